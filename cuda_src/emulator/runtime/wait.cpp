// Where threads wait for one another: barriers of the block and the grid, exchanges within a warp. Each has one rule:
// when the last of those who are waited for comes (or returns), all go on.
#include "machine.h"

namespace emu {
namespace {

void wait(Thread* t, State state, const void* pc, const char* what) {
    t->state = state;
    t->pc = pc;
    t->what = what;
}

void release_grid() {
    running->grid_waiting = 0;
    running->progress++;
    running->ordered = ++now;
    for (Block& b : running->blocks) {
        b.synced = now;
        for (Warp& w : b.warps) count_flush(w, false);
        for (uint16_t rank : running->order) {
            Thread& t = b.threads[rank];
            if (t.state == State::grid && &t != current) ready(&t);
        }
    }
    if (current && current->state == State::grid) current->state = State::ready;
}

}  // namespace

void release_barrier(Block& b) {
    settle(b);
    for (const Thread& t : b.threads)
        if (t.state == State::barrier && t.pc != b.threads[0].pc) {
            const Thread* other = &t;
            for (const Thread& u : b.threads)
                if (u.state == State::barrier && u.pc != other->pc && line_of(u.pc) != line_of(other->pc))
                    fault("barrier", who(*other) + " waits at " + other->what + ", " + line_of(other->pc) + ", and " +
                                         who(u) + " at " + u.what + ", " + line_of(u.pc) +
                                         ": every thread of a block has to reach the same barrier");
            break;
        }
    b.counted = b.count;
    b.count = b.waiting = 0;
    b.synced = ++now;
    running->progress++;
    running->barriers++;
    for (Warp& w : b.warps) count_flush(w, false);
    const bool back = running->barriers & 1;
    for (size_t i = 0; i < running->order.size(); i++) {
        Thread& t = b.threads[running->order[back ? running->order.size() - 1 - i : i]];
        if (t.state == State::barrier && &t != current) ready(&t);
    }
    if (current && current->block == &b && current->state == State::barrier) current->state = State::ready;
}

bool release_exchange(Thread* t) {
    Warp& w = *t->warp;
    const uint32_t need = t->mask & w.live;
    if ((w.waiting & need) != need) return false;
    for (uint32_t m = need; m; m &= m - 1) {
        const Thread* o = w.lanes[__builtin_ctz(m)];
        if (o->mask != t->mask || o->finish != t->finish) return false;
        if (o->pc != t->pc && line_of(o->pc) != line_of(t->pc))
            fault("barrier", who(*o) + " is at " + o->what + ", " + line_of(o->pc) + ", and " + who(*t) + " at " +
                                 t->what + ", " + line_of(t->pc) +
                                 ", for the same lanes: they have to come to one place");
    }
    if (t->finish) {
        Thread* self = current;
        current = nullptr;  // what the exchange itself touches is nobody's access
        t->finish(w.values, need);
        current = self;
    }
    w.waiting &= ~need;
    running->progress++;
    warp_synced(w, need);
    if (need == w.live) count_flush(w, false);
    for (uint32_t m = need; m; m &= m - 1) {
        Thread* o = w.lanes[__builtin_ctz(m)];
        if (o == current)
            o->state = State::ready;
        else
            ready(o);
    }
    return true;
}

std::string waiting_places() {
    std::map<std::string, std::pair<int, const Thread*>> places;
    for (const Block& b : running->blocks)
        for (const Thread& t : b.threads) {
            if (t.state == State::done || t.state == State::fresh || t.block->live == 0) continue;
            char lanes[40] = "";
            if (t.state == State::warp) snprintf(lanes, sizeof lanes, " for lanes 0x%08x", t.mask);
            std::string place =
                t.state == State::ready ? "polling memory" : "waiting at " + std::string(t.what) + lanes;
            if (t.pc) place += ", " + line_of(t.pc);
            auto& [count, example] = places[place];
            if (!count++) example = &t;
        }
    std::string text;
    for (const auto& [place, found] : places)
        text += (text.empty() ? "" : "; ") + std::to_string(found.first) +
                (found.first == 1 ? " thread is " : " threads are ") + place + " (" + who(*found.second) + ")";
    return text;
}

int barrier(int predicate, const char* what) {
    Thread* t = current;
    Block& b = *t->block;
    b.count += predicate != 0;
    wait(t, State::barrier, __builtin_return_address(0), what);
    if (++b.waiting == b.live)
        release_barrier(b);
    else
        go_on(t->fiber);
    return int(b.counted);
}

void grid_barrier() {
    Thread* t = current;
    wait(t, State::grid, __builtin_return_address(0), "grid.sync");
    if (!running->cooperative) fault("barrier", "grid.sync without cudaLaunchCooperativeKernel, " + line_of(t->pc));
    uint64_t live = 0;
    for (const Block& b : running->blocks) live += b.live;
    if (++running->grid_waiting == live)
        release_grid();
    else
        go_on(t->fiber);
}

uint64_t exchange(uint32_t mask, uint64_t in, uint32_t ask, Finish finish, const char* what) {
    Thread* t = current;
    wait(t, State::warp, __builtin_return_address(0), what);
    if (!(mask >> t->lane & 1))
        fault("barrier",
              std::string(what) + ": the mask leaves out the lane that calls it, " + who(*t) + ", " + line_of(t->pc));
    t->mask = mask;
    t->finish = finish;
    Lane& lane = t->warp->values[t->lane];
    lane.in = in;
    lane.ask = ask;
    t->warp->waiting |= 1u << t->lane;
    if (!release_exchange(t)) go_on(t->fiber);
    return lane.out;
}

}  // namespace emu
