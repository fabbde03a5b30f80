// The door between a kernel and the emulator's library: plain functions, so that what every program includes is small.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "vector_types.h"

#define EMU_API __attribute__((visibility("default")))
#define EMU_INLINE inline __attribute__((always_inline))

namespace emu {

// What a kernel did wrong. kind: "out of bounds", "misaligned", "uninitialised", "race", "barrier".
struct EMU_API Fault : std::runtime_error {
    std::string kind, text;
    Fault(const std::string& kind, const std::string& text)
        : std::runtime_error(kind + ": " + text), kind(kind), text(text) {}
};

// One lane's part in an exchange within a warp: what it gives, what it asks for, what it gets.
struct Lane {
    uint64_t in;
    uint32_t ask;
    uint64_t out;
};
using Finish = void (*)(Lane* lanes, uint32_t arrived);  // runs once, when every lane of the mask has come

EMU_API uint3 thread_index() __attribute__((const));
EMU_API uint3 block_index() __attribute__((const));
EMU_API dim3 block_size() __attribute__((const));
EMU_API dim3 grid_size() __attribute__((const));
EMU_API uint32_t lane_index() __attribute__((const));
EMU_API uint32_t thread_rank() __attribute__((const));
EMU_API uint32_t dynamic_bytes() __attribute__((const));
EMU_API bool in_kernel();

EMU_API int barrier(int predicate, const char* what);  // of the block; returns how many predicates were not 0
EMU_API void grid_barrier();
EMU_API uint64_t exchange(uint32_t mask, uint64_t in, uint32_t ask, Finish finish, const char* what);
EMU_API uint32_t live_lanes();
EMU_API void thread_fence();
EMU_API void pause();  // a thread that waits for another says so
EMU_API void trap(const char* what);
EMU_API long long clock();

EMU_API void* shared_memory(const void* key, size_t bytes, size_t alignment, const char* name);
EMU_API void* dynamic_shared_memory();

// Atomics: check the address once, then read and write without being watched.
EMU_API void atomic_access(const void* address, size_t bytes);
EMU_API uint64_t peek(const void* address, size_t bytes);
EMU_API void poke(void* address, size_t bytes, uint64_t value);
EMU_API void sync_load(const void* address, size_t bytes);  // as a volatile or acquire load
EMU_API void sync_store(void* address, size_t bytes);       // as a volatile or release store

EMU_API void async_copy(void* to, const void* from, size_t bytes, size_t zeros);
EMU_API void async_commit();
EMU_API void async_wait(size_t groups_that_may_be_pending);

}  // namespace emu
