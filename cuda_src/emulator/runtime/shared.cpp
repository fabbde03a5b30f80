// Shared memory: one arena a block, its variables with redzones between them, everything poison when a block begins.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "shadow.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define LOCK(p, n) __asan_poison_memory_region(p, n)
#define UNLOCK(p, n) __asan_unpoison_memory_region(p, n)
#else
#define LOCK(p, n)
#define UNLOCK(p, n)
#endif

namespace emu {
namespace {

constexpr uint32_t REDZONE = 128;  // a whole row of banks, so that it moves no variable to other banks
struct Arena {
    char* memory;
    Cell* cells;
};
std::vector<Arena> arenas;

void* reserve(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return p;
}

void poison(Block& b, uint32_t offset, uint32_t bytes) {
    UNLOCK(b.arena + offset, bytes);
    memset(b.arena + offset, 0xFF, bytes);  // NaN in every type
    memset(static_cast<void*>(b.cells + offset / 4), 0, (bytes + 3) / 4 * sizeof(Cell));
}

}  // namespace

void new_arena(Block& b) {
    while (arenas.size() <= b.slot)
        arenas.push_back({static_cast<char*>(reserve(ARENA)), static_cast<Cell*>(reserve(ARENA / 4 * sizeof(Cell)))});
    b.arena = arenas[b.slot].memory;
    b.cells = arenas[b.slot].cells;
    LOCK(b.arena, ARENA);
}

void begin_shared(Block& b) {
    for (const Variable& v : running->variables) poison(b, v.offset, v.bytes);
    if (running->dynamic) poison(b, DYNAMIC_AT, running->dynamic);
}

const Variable* shared_variable(uint64_t offset) {
    for (const Variable& v : running->variables)
        if (offset >= v.offset && offset < v.offset + v.bytes) return &v;
    return nullptr;
}

void* shared_memory(const void* key, size_t bytes, size_t alignment, const char* name) {
    if (!current) throw std::logic_error(std::string("shared variable ") + name + " outside a kernel");
    Running& l = *running;
    for (const Variable& v : l.variables)
        if (v.key == key) return current->block->arena + v.offset;
    l.static_used += bytes;
    if (l.static_used > STATIC_LIMIT)
        fault("shared memory", std::string(name) + " makes " + std::to_string(l.static_used) +
                                   " bytes of static shared memory, and 49152 is the limit: use dynamic shared memory");
    const uint32_t at = (l.static_end + REDZONE + std::max<size_t>(alignment, 128) - 1) /
                        std::max<size_t>(alignment, 128) * std::max<size_t>(alignment, 128);
    l.static_end = at + bytes;
    if (l.static_end > DYNAMIC_AT) fault("shared memory", "too many shared variables for the emulator");
    l.variables.push_back({key, name, at, uint32_t(bytes)});
    for (Block& b : l.blocks) poison(b, at, bytes);
    return current->block->arena + at;
}

void* dynamic_shared_memory() {
    if (!current) throw std::logic_error("dynamic shared memory outside a kernel");
    return current->block->arena + DYNAMIC_AT;
}

}  // namespace emu
