// What the emulator knows while a kernel runs: the launch, its resident blocks, their warps and threads.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../emu/core.h"
#include "fiber.h"

namespace emu {

struct Block;
struct Warp;

enum class State : uint8_t { fresh, ready, barrier, grid, warp, done };

struct Copy {  // one cp.async: the bytes arrive when its group is waited for
    void* to;
    const void* from;
    uint32_t bytes, zeros;
    bool committed;
};

struct Thread {
    Block* block = nullptr;
    Warp* warp = nullptr;
    Fiber* fiber = nullptr;
    State state = State::fresh;
    uint8_t lane = 0;
    uint16_t rank = 0;    // within the block
    uint32_t id = 0;      // block << 10 | rank: who did it, in shadow memory
    uint3 index{};        // threadIdx
    uint32_t fenced = 0;  // the time of its last __threadfence
    uint32_t polls = 0;   // volatile reads and atomics since it last waited
    // What it waits at, as a barrier or a warp's exchange:
    const void* pc = nullptr;
    const char* what = "";
    uint32_t mask = 0;
    Finish finish = nullptr;
    std::vector<Copy> copies;
    std::vector<uint32_t> groups;  // how many copies each committed group holds
};

// Two lanes are ordered if both took part in an exchange, or through a chain of exchanges. Up to the time before[j][i]
// lane j knows what lane i did. Exchanges of all lanes, nearly every one, are the one number `synced`.
struct Warp {
    Thread* lanes[32];
    Lane values[32];
    uint32_t live = 0, waiting = 0;
    uint32_t synced = 0;
    bool partial = false;
    uint32_t before[32][32];
    uint32_t slot = 0;  // its place in the counters
    uint32_t open = 0;  // requests that not all of its lanes have joined yet
};

struct Cell;

struct Block {
    uint3 index{};
    uint32_t number = 0, slot = 0;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    uint32_t live = 0, waiting = 0, count = 0, counted = 0;
    uint32_t began = 0, synced = 0;
    char* arena = nullptr;        // its shared memory: static variables, then the dynamic part
    Cell* cells = nullptr;        // what the sanitizer knows of it
    std::vector<uint32_t> known;  // known[b]: the time up to which this block has seen what block b did; empty: nothing
};

struct Variable {  // a __shared__ variable; its place is the same in every block
    const void* key;
    std::string name;
    uint32_t offset, bytes;
};

constexpr uint32_t STATIC_LIMIT = 48 << 10, DYNAMIC_LIMIT = 227 << 10;
constexpr uint32_t DYNAMIC_AT = 128 << 10;  // the static part with its redzones lies below
constexpr uint32_t ARENA = DYNAMIC_AT + DYNAMIC_LIMIT + 1024;

struct Running {
    std::string name;
    dim3 grid, block;
    size_t dynamic = 0;
    void (*call)(void*) = nullptr;
    void* closure = nullptr;
    size_t closure_bytes = 0;
    bool cooperative = false;
    // Order of execution: the threads of a block, shuffled; blocks in turn, or several at once.
    std::vector<uint16_t> order;
    std::deque<Block> blocks;  // resident ones
    std::vector<Block*> idle;
    uint64_t next_block = 0, total_blocks = 0, done_blocks = 0;
    uint32_t grid_waiting = 0;
    std::vector<Variable> variables;
    uint32_t static_bytes = 0, static_used = 0, static_end = 0;
    uint64_t yields = 0, progress = 0, progress_seen = 0;
    uint64_t barriers = 0;
    uint32_t ordered = 0;  // what happened before this time is ordered with everything: earlier launches, grid syncs
    // First and last address touched of each region, by its first address and whether it was written there.
    std::map<std::pair<uint64_t, bool>, std::pair<uint64_t, uint64_t>> extents;
    std::unordered_map<uint64_t, std::vector<uint32_t>> released;  // what a flag's reader learns, by address
};

extern thread_local Thread* current __attribute__((tls_model("initial-exec")));  // null on the host: hooks return
extern Running* running;
extern uint32_t now;  // grows with every event that orders threads

// schedule.cpp
[[noreturn]] void fault(const char* kind, const std::string& text);  // on a fiber: ends the launch
// A read of what no thread has written may be half of a race: the fault waits for the other half until the next
// barrier.
void fault_later(const Block&, const char* kind, const std::string& text);
bool fault_is_due();
void settle(const Block&);  // that moment has come
void ready(Thread*);        // queued, to go on in its turn
void go_on(Fiber* from);    // with whoever is next; the host decides when nobody is
void yield(Thread*);
void run(Running&);
const std::string& last_fault_kind();
const std::string& last_fault_text();
// wait.cpp
void release_barrier(Block&);
bool release_exchange(Thread*);  // false: somebody whom it waits for is not there yet
std::string waiting_places();
// shared.cpp
void new_arena(Block&);
void begin_shared(Block&);  // a block begins: its shared memory is poison again
const Variable* shared_variable(uint64_t offset);
// shadow.cpp
uint32_t ordered_time(const Thread&);
void warp_synced(Warp&, uint32_t mask);
void fence(Thread&);
void acquire(Thread&, uint64_t address);
void release(Thread&, uint64_t address);
// count.cpp
void count_begin();
void count_slots(uint32_t warps);
void count_flush(Warp&, bool block_ends);
void count_end(Running&);
// text.cpp
std::string line_of(const void* pc);  // "file.cu:41"
std::string function_name(const void* function, const char* otherwise);
std::string who(const Thread&);  // "thread (3,0,0) of block (7,0,0)"
std::string who(uint32_t id);
std::string module_of(uint64_t address, uint64_t* low, uint64_t* high);  // the loaded file whose data holds it, or ""

}  // namespace emu
