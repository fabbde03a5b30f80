// A fiber is a stack and a place to go on. One per started thread of a block, reused for the next thread that starts.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Fiber {
    void* sp = nullptr;          // where it stopped (ucontext: the context)
    char *low = nullptr, *high;  // its stack: what lies there is a thread's own, not checked
    void* fake_stack = nullptr;  // AddressSanitizer's
};

Fiber* new_fiber(void (*entry)());
void rewind(Fiber*, void (*entry)());  // forgets what it was doing: after a fault
Fiber* host_fiber();                   // the stack that the launch came on
void switch_fiber(Fiber* from, Fiber* to);
void fiber_begins();  // the first words of every entry
bool any_stack_holds(uint64_t address);

}  // namespace emu
