// Races and uninitialised reads, word by word. A race: two threads touch the same byte, one of them writes, and nothing
// orders the two. What orders: a barrier, an exchange within the warp, an atomic or volatile read that may see what was
// published after a __threadfence. Where this model is too coarse it misses a race; it never invents one.
#include "shadow.h"

#include <algorithm>

namespace emu {
namespace {

bool ordered(const Stamp& before, const Thread& t) {
    if (before.time < running->ordered || before.thread == t.id) return true;
    const Block& b = *t.block;
    const uint32_t block = before.thread >> 10;
    const bool seen = !b.known.empty() && before.time <= b.known[block];
    if (block != (t.id >> 10) || seen) return seen;
    if (before.time < b.synced) return true;
    if ((before.thread ^ t.id) >> 5) return false;
    const Warp& w = *t.warp;
    return before.time < w.synced || (w.partial && before.time < w.before[t.lane][before.thread & 31]);
}

const char* verb(Op op) { return op == Op::load ? "read" : op == Op::store ? "write" : "atomic"; }

std::string place(const Thread& t, const Region* region, uint64_t address) {  // "byte 8 of shared tile"
    if (region) return "byte " + std::to_string(address - region->low) + " of " + region->name;
    const uint64_t offset = address - uint64_t(t.block->arena);
    if (offset >= DYNAMIC_AT) return "byte " + std::to_string(offset - DYNAMIC_AT) + " of the dynamic shared memory";
    const Variable* v = shared_variable(offset);
    return "byte " + std::to_string(offset - v->offset) + " of shared " + v->name;
}

[[noreturn]] void race(const Thread& t, const Site& site, const Stamp& other, const std::string& place) {
    const Site& its = *site_number(other.site);
    fault("race", std::string(verb(site.op)) + " by " + who(t) + ", " + line_of(site.pc) + ", and " + verb(its.op) +
                      " by " + who(other.thread) + ", " + line_of(its.pc) + ": both touch " + place +
                      " and nothing orders them");
}

}  // namespace

void touch(Thread& t, Site& site, Cell* cells, uint64_t address, uint32_t bytes, bool sync, const Region* region) {
    const bool init = !region || region->watch_init, races = !region || region->watch_races;
    const bool loads = site.op != Op::store, stores = site.op != Op::load;
    Cell* cell = cells;
    const uint64_t end = address + bytes;
    for (uint64_t word = address & ~3ull; word < end; word += 4, cell++) {
        const uint32_t from = word < address ? address - word : 0, to = end - word < 4 ? end - word : 4;
        const uint8_t mask = (15u >> (4 - to)) & (15u << from);
        auto where = [&](uint8_t common) { return place(t, region, word + __builtin_ctz(common & 15)); };
        if (loads && init && (cell->written & mask) != mask && !fault_is_due())
            fault_later(*t.block, "uninitialised",
                        "read of " + where(mask & ~cell->written) + ", which nobody has written, by " + who(t) + ", " +
                            line_of(site.pc));
        if (!races) {
            if (stores) cell->written |= mask;
            continue;
        }
        const uint8_t same = sync ? SYNC : 0;  // of two synchronising accesses neither races
        const Stamp mine{now, t.id, site.number};
        if ((cell->write_mask & mask) && !(cell->write_mask & same) && cell->write.thread != t.id &&
            !ordered(cell->write, t))
            race(t, site, cell->write, where(cell->write_mask & mask));
        if (stores) {
            for (int r = 0; r < 2; r++) {
                if ((cell->read_mask[r] & mask) && !(cell->read_mask[r] & same) && !ordered(cell->read[r], t))
                    race(t, site, cell->read[r], where(cell->read_mask[r] & mask));
                if (!(cell->read_mask[r] & 15 & ~mask)) cell->read_mask[r] = 0;
            }
            const bool again =
                cell->write.thread == t.id && cell->write.time == now && (cell->write_mask & SYNC) == same;
            cell->write_mask = mask | same | (again ? cell->write_mask : 0);
            cell->write = mine;
            cell->written |= mask;
        } else {
            // The first slot keeps a reader as long as it could still race; the second has the latest of the others.
            const int r = cell->read_mask[0] && cell->read[0].thread != t.id && !ordered(cell->read[0], t);
            const bool again = cell->read_mask[r] && cell->read[r].thread == t.id && cell->read[r].time == now &&
                               (cell->read_mask[r] & SYNC) == same;
            cell->read_mask[r] = mask | same | (again ? cell->read_mask[r] : 0);
            cell->read[r] = mine;
        }
    }
}

void warp_synced(Warp& w, uint32_t mask) {
    now++;
    if (mask == w.live) {
        w.synced = now;
        return;
    }
    if (!w.partial)
        for (auto& row : w.before) std::fill(row, row + 32, 0);
    w.partial = true;
    uint32_t joined[32] = {};
    for (uint32_t m = mask; m; m &= m - 1) {
        const int lane = __builtin_ctz(m);
        for (int i = 0; i < 32; i++) joined[i] = std::max(joined[i], w.before[lane][i]);
    }
    for (uint32_t m = mask; m; m &= m - 1) joined[__builtin_ctz(m)] = now;
    for (uint32_t m = mask; m; m &= m - 1) std::copy(joined, joined + 32, w.before[__builtin_ctz(m)]);
}

// A fence by itself orders nothing: it dates what the next atomic or volatile write of this thread publishes.
void fence(Thread& t) { t.fenced = now++; }

void release(Thread& t, uint64_t address) {
    if (!t.fenced) return;
    std::vector<uint32_t>& clock = running->released[address];
    if (clock.empty()) clock.resize(running->total_blocks);
    const std::vector<uint32_t>& known = t.block->known;
    for (size_t b = 0; b < known.size(); b++) clock[b] = std::max(clock[b], known[b]);
    clock[t.block->number] = std::max(clock[t.block->number], t.fenced);
}

// What one thread learns its whole block knows at once: coarse, so that no order is overlooked.
void acquire(Thread& t, uint64_t address) {
    if (running->released.empty()) return;
    const auto found = running->released.find(address);
    if (found == running->released.end()) return;
    std::vector<uint32_t>& known = t.block->known;
    if (known.empty()) known.resize(running->total_blocks);
    for (size_t b = 0; b < known.size(); b++) known[b] = std::max(known[b], found->second[b]);
}

}  // namespace emu
