// Which thread runs when. Threads run one after the other until they wait. A block's threads run in a shuffled order,
// which every barrier reverses, so that both "a before b" and "b before a" are met. Blocks run one after the other,
// unless they wait for others.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace emu {

thread_local Thread* current = nullptr;
Running* running = nullptr;
uint32_t now = 1;
uint64_t seed = getenv("COURSE_EMU_SEED") ? strtoull(getenv("COURSE_EMU_SEED"), nullptr, 10) : 0;

namespace {

std::vector<Thread*> queue;  // a ring: each thread is in it at most once
size_t first = 0, queued = 0;
std::vector<Fiber*> fibers, idle_fibers;
std::string fault_kind, fault_words;
struct Due {
    const Block* block = nullptr;
    const char* kind;
    std::string words;
} due;

void enqueue(Thread* t) { queue[(first + queued++) & (queue.size() - 1)] = t; }

Thread* dequeue() {
    if (!queued) return nullptr;
    Thread* t = queue[first];
    first = (first + 1) & (queue.size() - 1);
    queued--;
    return t;
}

void finish(Thread* t);

// A thread that ends hands its stack to the next that begins, with no switch: a kernel without barriers needs one.
void entry() {
    fiber_begins();
    for (;;) {
        Fiber* mine = current->fiber;
        running->call(running->closure);
        finish(current);
        Thread* next = dequeue();
        current = next;
        if (next && next->state == State::fresh) {
            next->fiber = mine;
            next->state = State::ready;
            continue;
        }
        idle_fibers.push_back(mine);
        switch_fiber(mine, next ? next->fiber : host_fiber());
    }
}

Fiber* take_fiber() {
    if (idle_fibers.empty()) {
        fibers.push_back(new_fiber(entry));
        return fibers.back();
    }
    Fiber* fiber = idle_fibers.back();
    idle_fibers.pop_back();
    return fiber;
}

void begin_block(uint64_t number) {
    Running& l = *running;
    const uint32_t threads = l.block.x * l.block.y * l.block.z;
    Block* b;
    if (l.idle.empty()) {
        b = &l.blocks.emplace_back();
        b->slot = l.blocks.size() - 1;
        b->threads.resize(threads);
        b->warps.resize((threads + 31) / 32);
        new_arena(*b);
        count_slots(l.blocks.size() * b->warps.size());
        size_t capacity = 64;
        while (capacity < l.blocks.size() * threads + 1) capacity *= 2;
        if (capacity > queue.size()) {
            std::vector<Thread*> waiting;
            while (Thread* t = dequeue()) waiting.push_back(t);
            queue.assign(capacity, nullptr);
            first = 0;
            for (Thread* t : waiting) enqueue(t);
        }
    } else {
        b = l.idle.back();
        l.idle.pop_back();
    }
    b->number = uint32_t(number);
    b->index = {unsigned(number % l.grid.x), unsigned(number / l.grid.x % l.grid.y),
                unsigned(number / l.grid.x / l.grid.y)};
    b->live = threads;
    b->waiting = b->count = 0;
    b->began = b->synced = ++now;
    b->known.clear();
    begin_shared(*b);
    for (uint32_t w = 0; w < b->warps.size(); w++) {
        Warp& warp = b->warps[w];
        const uint32_t lanes = std::min(32u, threads - w * 32);
        warp.live = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warp.waiting = warp.synced = 0;
        warp.partial = false;
        warp.open = 0;
        warp.slot = b->slot * b->warps.size() + w;
    }
    for (uint32_t rank : l.order) {
        Thread& t = b->threads[rank];
        t.block = b;
        t.warp = &b->warps[rank / 32];
        t.lane = rank % 32;
        t.warp->lanes[t.lane] = &t;
        t.rank = rank;
        t.id = b->number << 10 | rank;
        t.index = {rank % l.block.x, rank / l.block.x % l.block.y, rank / l.block.x / l.block.y};
        t.state = State::fresh;
        t.fenced = t.polls = t.mask = 0;
        t.pc = nullptr;
        t.copies.clear();
        t.groups.clear();
        enqueue(&t);
    }
}

uint64_t most_resident() {
    const Running& l = *running;
    return l.cooperative ? l.total_blocks : 4 * std::max(1u, std::min(16u, 2048 / (l.block.x * l.block.y * l.block.z)));
}

bool another_block() {
    const Running& l = *running;
    if (l.next_block == l.total_blocks || l.blocks.size() - l.idle.size() >= most_resident()) return false;
    begin_block(running->next_block++);
    return true;
}

void finish(Thread* t) {
    Block& b = *t->block;
    Warp& w = *t->warp;
    t->state = State::done;
    running->progress++;
    w.live &= ~(1u << t->lane);
    while (w.waiting) {  // those who waited for it need not any more
        bool released = false;
        for (uint32_t m = w.waiting; m && !released; m &= m - 1) released = release_exchange(w.lanes[__builtin_ctz(m)]);
        if (!released) break;
    }
    if (--b.live) {
        if (b.waiting == b.live) release_barrier(b);
        return;
    }
    settle(b);
    for (Warp& each : b.warps) count_flush(each, true);
    running->done_blocks++;
    running->idle.push_back(&b);
    if (running->next_block < running->total_blocks) begin_block(running->next_block++);
}

}  // namespace

void ready(Thread* t) {
    t->state = State::ready;
    t->polls = 0;
    enqueue(t);
}

void go_on(Fiber* from) {
    Thread* next = dequeue();
    current = next;
    if (next && next->state == State::fresh) {
        next->fiber = take_fiber();
        next->state = State::ready;
    }
    switch_fiber(from, next ? next->fiber : host_fiber());
}

void settle(const Block& b) {
    if (due.block == &b) fault(due.kind, due.words);
}

void fault(const char* kind, const std::string& text) {
    const bool earlier = due.block && kind != std::string("race");
    fault_kind = earlier ? due.kind : kind;
    fault_words = earlier ? due.words : text;
    if (!current) throw Fault(kind, text);
    Fiber* from = current->fiber;
    current = nullptr;
    switch_fiber(from, host_fiber());
    __builtin_unreachable();
}

void fault_later(const Block& b, const char* kind, const std::string& text) {
    if (!due.block) due = {&b, kind, text};
}
bool fault_is_due() { return due.block; }

void yield(Thread* t) {
    Running& l = *running;
    t->polls = 0;
    if (l.progress != l.progress_seen) l.progress_seen = l.progress, l.yields = 0;
    const uint64_t rounds = ++l.yields / (queued + 1);
    if (rounds > 100 && another_block())
        l.yields = 0;
    else if (rounds > 5000)
        fault("barrier", "no thread gets on: " + waiting_places());
    if (!queued) return;
    enqueue(t);
    go_on(t->fiber);
}

const std::string& last_fault_kind() { return fault_kind; }
const std::string& last_fault_text() { return fault_words; }

void run(Running& l) {
    running = &l;
    first = queued = 0;
    const uint32_t threads = l.block.x * l.block.y * l.block.z;
    l.order.resize(threads);
    // Warps in any order, and the lanes within each: not all threads at once, so that a warp's accesses come together.
    uint64_t state = seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D;
    auto random = [&] { return state ^= state << 13, state ^= state >> 7, state ^= state << 17, state >> 16; };
    std::vector<uint32_t> warps((threads + 31) / 32);
    for (uint32_t w = 0; w < warps.size(); w++) warps[w] = w;
    for (size_t i = warps.size(); i > 1; i--) std::swap(warps[i - 1], warps[random() % i]);
    size_t at = 0;
    for (uint32_t w : warps) {
        const size_t begin = at;
        for (uint32_t r = w * 32; r < std::min(threads, w * 32 + 32); r++) l.order[at++] = r;
        for (size_t i = at - begin; i > 1; i--) std::swap(l.order[begin + i - 1], l.order[begin + random() % i]);
    }
    l.total_blocks = uint64_t(l.grid.x) * l.grid.y * l.grid.z;
    l.ordered = ++now;
    const char* at_once = getenv("COURSE_EMU_BLOCKS");
    const uint64_t resident =
        l.cooperative ? l.total_blocks : std::min<uint64_t>(at_once ? std::max(1, atoi(at_once)) : 1, most_resident());
    fault_kind.clear();
    due = {};
    count_begin();
    // The last of the blocks that run together goes first. So a block that relies on an order, which CUDA does not
    // promise, waits.
    l.next_block = std::min(resident, l.total_blocks);
    for (uint64_t i = l.next_block; i-- > 0;) begin_block(i);
    while (l.done_blocks < l.total_blocks && fault_kind.empty()) {
        if (queued)
            go_on(host_fiber());
        else {
            fault_kind = due.block ? due.kind : "barrier";
            fault_words = due.block ? due.words : "a barrier that not everybody reaches: " + waiting_places();
        }
    }
    if (!fault_kind.empty()) {  // nobody goes on: their stacks are dropped as they are
        idle_fibers = fibers;
        for (Fiber* f : fibers) rewind(f, entry);
    }
    current = nullptr;
    count_end(l);
    running = nullptr;
    if (!fault_kind.empty()) throw Fault(fault_kind, fault_words);
}

uint32_t live_lanes() { return current->warp->live; }
void pause() {
    if (current) yield(current);
}
void trap(const char* what) {
    fault("trap", std::string(what) + " by " + who(*current) + ", " + line_of(__builtin_return_address(0)));
}
long long clock() {  // grows, so that a loop that waits for it ends
    static long long ticks = 0;
    if (running) running->progress++;
    return ticks += 64;
}
bool in_kernel() { return current != nullptr; }
uint3 thread_index() { return current->index; }
uint3 block_index() { return current->block->index; }
dim3 block_size() { return running->block; }
dim3 grid_size() { return running->grid; }
uint32_t lane_index() { return current->lane; }
uint32_t thread_rank() { return current->rank; }
uint32_t dynamic_bytes() { return uint32_t(running->dynamic); }

}  // namespace emu

extern "C" EMU_API void emu_set_seed(uint64_t value) { emu::seed = value; }
