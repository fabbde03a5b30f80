// Every load and store of a kernel arrives here: g++ -fsanitize=thread calls __tsan_read4(p) and its kin before each,
// and instead of its race detector's library we define them. What lies on the thread's own stack is let through at
// once.
#include <algorithm>
#include <cstring>

#include "shadow.h"

namespace emu {
namespace {

auto& table = *new std::vector<Site*>(1 << 12);  // neither is destroyed: sites stay for the reports
auto& numbered = *new std::vector<Site*>;

size_t place(const void* pc, Op op) {
    uint64_t h = (uint64_t(pc) * 4 + uint64_t(op)) * 0x9E3779B97F4A7C15;
    return h >> 20 & (table.size() - 1);
}

Site* insert(const void* pc, Op op) {
    if (numbered.size() * 2 > table.size()) {
        table.assign(table.size() * 2, nullptr);
        for (Site* s : numbered) {
            size_t i = place(s->pc, s->op);
            while (table[i]) i = (i + 1) & (table.size() - 1);
            table[i] = s;
        }
    }
    auto* site = new Site;
    site->pc = pc;
    site->op = op;
    site->number = numbered.size();
    numbered.push_back(site);
    size_t i = place(pc, op);
    while (table[i]) i = (i + 1) & (table.size() - 1);
    return table[i] = site;
}

const char* verb(Op op) { return op == Op::load ? "read" : op == Op::store ? "write" : "atomic"; }

std::string what(const Site& s, uint32_t bytes) { return std::to_string(bytes) + "-byte " + verb(s.op); }

[[noreturn]] void misaligned(const Thread& t, const Site& s, uint64_t address, uint32_t bytes) {
    fault("misaligned", what(s, bytes) + " at an address that is " + std::to_string(address % bytes) +
                            " past a multiple of " + std::to_string(bytes) + ", " + who(t) + ", " + line_of(s.pc));
}

void look_up_shared(Thread& t, Site& s, uint64_t offset, uint32_t bytes) {
    if (offset >= DYNAMIC_AT && running->dynamic) {
        s.shared_low = DYNAMIC_AT;
        s.shared_high = DYNAMIC_AT + running->dynamic;
        if (offset + bytes > s.shared_high)
            fault("out of bounds", what(s, bytes) + " " +
                                       std::to_string(offset - std::min<uint64_t>(offset, s.shared_high)) +
                                       " bytes past the end of the dynamic shared memory [" +
                                       std::to_string(running->dynamic) + " bytes], " + who(t) + ", " + line_of(s.pc));
        return;
    }
    const Variable* v = shared_variable(offset);
    if (!v || offset + bytes > v->offset + v->bytes) {
        std::string place = "of shared memory that is no variable";
        for (const Variable& near : running->variables)
            if (offset < near.offset && near.offset - offset <= 64)
                place = std::to_string(near.offset - offset) + " bytes before the begin of shared " + near.name;
            else if (offset + bytes > near.offset + near.bytes && offset - near.offset - near.bytes + 64 <= 256)
                place = std::to_string(int64_t(offset) - near.offset - near.bytes) + " bytes past the end of shared " +
                        near.name + " [" + std::to_string(near.bytes) + " bytes]";
        fault("out of bounds", what(s, bytes) + " " + place + ", " + who(t) + ", " + line_of(s.pc));
    }
    s.shared_low = v->offset;
    s.shared_high = v->offset + v->bytes;
}

void look_up_global(Thread& t, Site& s, uint64_t address, uint32_t bytes) {
    Region* r = find_region(address);
    if (!r && any_stack_holds(address))
        fault("out of bounds",
              what(s, bytes) + " of a local variable of another thread, " + who(t) + ", " + line_of(s.pc));
    for (const Block& b : running->blocks)
        if (!r && address - uint64_t(b.arena) < ARENA)
            fault("out of bounds",
                  what(s, bytes) + " of another block's shared memory, " + who(t) + ", " + line_of(s.pc));
    if (!r || address + bytes > r->high)
        fault("out of bounds", what(s, bytes) + " " + nearest(address) + ", " + who(t) + ", " + line_of(s.pc));
    note_extent(s);
    s.region = r;
    s.low = r->low;
    s.high = r->high;
    s.epoch = regions_epoch;
}

// One access, checked, remembered and counted. `natural`: the type's alignment is its size.
template <bool NATURAL>
EMU_INLINE void checked(const void* pc, uint64_t address, uint32_t bytes, Op op, bool sync) {
    Thread* t = current;
    if (!t || (address >= uint64_t(t->fiber->low) && address < uint64_t(t->fiber->high))) return;
    if (sync) {  // who polls lets others run, before it looks
        t->polls += op == Op::atomic ? 1 : op == Op::load ? 8 : 0;
        if (t->polls >= 64) yield(t);
        if (op != Op::store) acquire(*t, address);
    }
#if defined(__SANITIZE_ADDRESS__)
    return;  // without the hooks, only atomics come here: what plain stores have written is not known
#endif
    Site& s = *find_site(pc, op);
    count_site(s);
    if (op != Op::load && !sync) running->progress++;
    if (NATURAL && (address & (bytes - 1))) misaligned(*t, s, address, bytes);
    Block& b = *t->block;
    const uint64_t offset = address - uint64_t(b.arena);
    if (offset < ARENA) {
        if (offset < s.shared_low || offset + bytes > s.shared_high) look_up_shared(*t, s, offset, bytes);
        touch(*t, s, b.cells + offset / 4, address, bytes, sync, nullptr);
        count(*t, s, address, bytes, Space::shared);
    } else {
        if (address < s.low || address + bytes > s.high || s.epoch != regions_epoch)
            look_up_global(*t, s, address, bytes);
        const Region& r = *s.region;
        if (r.kind == Region::parameters) return;
        s.first = std::min(s.first, address);
        s.last = std::max(s.last, address + bytes);
        if (r.watch_races || r.watch_init)
            touch(*t, s, region_cells(r) + (address / 4 - r.low / 4), address, bytes, sync, &r);
        if (r.kind != Region::image) count(*t, s, address, bytes, Space::global);
    }
    if (sync && op != Op::load) release(*t, address);
}

void pieces(const void* pc, uint64_t address, uint64_t bytes, Op op) {  // a struct's copy: in the widest parts that fit
    const uint64_t part = (bytes | address | 16) & -(bytes | address | 16);
    for (uint64_t done = 0; done < bytes; done += part) checked<true>(pc, address + done, uint32_t(part), op, false);
}

}  // namespace

Site* find_site(const void* pc, Op op) {
    for (size_t i = place(pc, op);; i = (i + 1) & (table.size() - 1)) {
        Site* s = table[i];
        if (!s) return insert(pc, op);
        if (s->pc == pc && s->op == op) return s;
    }
}

Site* site_number(uint32_t number) { return numbered[number]; }

void access(const void* pc, uint64_t address, uint32_t bytes, Op op, bool sync) {
    checked<true>(pc, address, bytes, op, sync);
}

#define HERE __builtin_return_address(0)

void atomic_access(const void* p, size_t bytes) { checked<true>(HERE, uint64_t(p), bytes, Op::atomic, true); }
void sync_load(const void* p, size_t bytes) { checked<true>(HERE, uint64_t(p), bytes, Op::load, true); }
void sync_store(void* p, size_t bytes) {
    uint64_t old = 0;
    if (bytes <= 8) memcpy(&old, p, bytes);
    checked<true>(HERE, uint64_t(p), bytes, Op::store, true);
}

uint64_t peek(const void* p, size_t bytes) {
    uint64_t value = 0;
    memcpy(&value, p, bytes);
    return value;
}

void poke(void* p, size_t bytes, uint64_t value) {
    if (running && memcmp(p, &value, bytes)) running->progress++;  // somebody may be waiting for this
    memcpy(p, &value, bytes);
}

void thread_fence() {
    if (current) fence(*current);
}

// cp.async: from its issue until it is waited for, the target holds nothing that may be read.
void async_copy(void* to, const void* from, size_t bytes, size_t zeros) {
    Thread* t = current;
    if (bytes > zeros) checked<true>(HERE, uint64_t(from), bytes - zeros, Op::load, false);
    checked<true>(HERE, uint64_t(to), bytes, Op::store, false);
    const uint64_t offset = uint64_t(to) - uint64_t(t->block->arena);
    if (offset >= ARENA)
        fault("out of bounds", "an asynchronous copy goes to shared memory, " + who(*t) + ", " + line_of(HERE));
    for (size_t i = 0; i < bytes; i += 4) t->block->cells[(offset + i) / 4].written = 0;
    t->copies.push_back({to, from, uint32_t(bytes), uint32_t(zeros), false});
}

void async_commit() {
    Thread* t = current;
    uint32_t fresh = 0;
    for (Copy& c : t->copies) fresh += !c.committed, c.committed = true;
    t->groups.push_back(fresh);
}

void async_wait(size_t pending) {
    Thread* t = current;
    while (t->groups.size() > pending) {
        for (uint32_t i = 0; i < t->groups.front(); i++) {
            const Copy& c = t->copies[i];
            memcpy(c.to, c.from, c.bytes - c.zeros);
            memset(static_cast<char*>(c.to) + c.bytes - c.zeros, 0, c.zeros);
            const uint64_t offset = uint64_t(c.to) - uint64_t(t->block->arena);
            for (size_t at = 0; at < c.bytes; at += 4) {  // arrived now: others may read after the next barrier
                Cell& cell = t->block->cells[(offset + at) / 4];
                cell.written = 15;
                cell.write.time = now;
            }
        }
        t->copies.erase(t->copies.begin(), t->copies.begin() + t->groups.front());
        t->groups.erase(t->groups.begin());
    }
}

}  // namespace emu

using emu::Op;
#define CHECK(NATURAL, BYTES, OP, SYNC) \
    emu::checked<NATURAL>(__builtin_return_address(0), uint64_t(p), BYTES, Op::OP, SYNC)
#define HOOKS(N)                                                                                        \
    extern "C" EMU_API void __tsan_read##N(void* p) { CHECK(true, N, load, false); }                    \
    extern "C" EMU_API void __tsan_write##N(void* p) { CHECK(true, N, store, false); }                  \
    extern "C" EMU_API void __tsan_unaligned_read##N(void* p) { CHECK(false, N, load, false); }         \
    extern "C" EMU_API void __tsan_unaligned_write##N(void* p) { CHECK(false, N, store, false); }       \
    extern "C" EMU_API void __tsan_volatile_read##N(void* p) { CHECK(true, N, load, true); }            \
    extern "C" EMU_API void __tsan_volatile_write##N(void* p) {                                         \
        if (emu::current) emu::running->progress++;                                                     \
        CHECK(true, N, store, true);                                                                    \
    }                                                                                                   \
    extern "C" EMU_API void __tsan_unaligned_volatile_read##N(void* p) { CHECK(false, N, load, true); } \
    extern "C" EMU_API void __tsan_unaligned_volatile_write##N(void* p) { CHECK(false, N, store, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4) HOOKS(8) HOOKS(16)

    extern "C" {
    EMU_API void __tsan_read_range(void* p, size_t n) {
        emu::pieces(__builtin_return_address(0), uint64_t(p), n, Op::load);
    }
    EMU_API void __tsan_write_range(void* p, size_t n) {
        emu::pieces(__builtin_return_address(0), uint64_t(p), n, Op::store);
    }
    EMU_API void __tsan_init() {}
    EMU_API void __tsan_func_entry(void*) {}
    EMU_API void __tsan_func_exit() {}
    EMU_API void __tsan_vptr_update(void*, void*) {}
    EMU_API void __tsan_vptr_read(void*) {}
}
