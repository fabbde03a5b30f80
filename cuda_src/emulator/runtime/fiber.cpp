// The switch between two stacks: the registers that a C function must preserve are pushed, the stack pointer changes
// hands, theirs are popped. About 2 ns, where swapcontext pays a system call for the signal mask.
#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
asm(R"(
.text
.globl emu_swap_stacks
.hidden emu_swap_stacks
.type emu_swap_stacks, @function
emu_swap_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_swap_stacks, .-emu_swap_stacks
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_swap_stacks
.hidden emu_swap_stacks
.type emu_swap_stacks, %function
emu_swap_stacks:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size emu_swap_stacks, .-emu_swap_stacks
)");
#endif

extern "C" void emu_swap_stacks(void** save, void* load);

namespace emu {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK = 512 << 10;  // its frames are larger
#else
constexpr size_t STACK = 128 << 10;  // reserved, not used: the pages that a thread touches are what it costs
#endif
constexpr size_t GUARD = 4096;
auto& all = *new std::vector<Fiber*>;  // never destroyed: a fiber has no end either

}  // namespace

void rewind(Fiber* fiber, void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->low + GUARD, fiber->high - fiber->low - GUARD);  // frames that never ended
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(fiber->high);
    *--top = nullptr;  // the caller that the entry does not have; keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->sp = top;
#elif defined(__aarch64__)
    void** top = reinterpret_cast<void**>(fiber->high - 160);
    for (int i = 0; i < 20; i++) top[i] = nullptr;
    top[11] = reinterpret_cast<void*>(entry);  // x30, where ret goes
    fiber->sp = top;
#else
    auto* context = static_cast<ucontext_t*>(fiber->sp ? fiber->sp : new ucontext_t);
    getcontext(context);
    context->uc_stack = {.ss_sp = fiber->low, .ss_flags = 0, .ss_size = size_t(fiber->high - fiber->low)};
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    fiber->sp = context;
#endif
    fiber->fake_stack = nullptr;
}

Fiber* new_fiber(void (*entry)()) {
    void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, GUARD, PROT_NONE);  // an overflow of the stack ends here and not in a neighbour
    auto* fiber = new Fiber;
    fiber->low = static_cast<char*>(memory);
    // Tops that all lie at the same place of their page would fall into the same few lines of the CPU's cache.
    fiber->high = fiber->low + STACK - (all.size() % 16) * 256;
    rewind(fiber, entry);
    all.push_back(fiber);
    return fiber;
}

Fiber* host_fiber() {
    static thread_local Fiber host;
#if !defined(__x86_64__) && !defined(__aarch64__)
    if (!host.sp) host.sp = new ucontext_t;
#endif
    return &host;
}

#if defined(__SANITIZE_ADDRESS__)
static thread_local Fiber* came_from = nullptr;
#endif

void switch_fiber(Fiber* from, Fiber* to) {
#if defined(__SANITIZE_ADDRESS__)
    came_from = from;
    __sanitizer_start_switch_fiber(&from->fake_stack, to->low, to->low ? size_t(to->high - to->low) : size_t(to->high));
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    emu_swap_stacks(&from->sp, to->sp);
#else
    swapcontext(static_cast<ucontext_t*>(from->sp), static_cast<ucontext_t*>(to->sp));
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

void fiber_begins() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    Fiber* host = host_fiber();
    if (came_from == host) {  // the only way to learn the host's stack, which the way back has to name
        host->low = static_cast<char*>(const_cast<void*>(bottom));
        host->high = host->low + size;
    }
#endif
}

bool any_stack_holds(uint64_t address) {
    for (const Fiber* f : all)
        if (address >= uint64_t(f->low) && address < uint64_t(f->high)) return true;
    return false;
}

}  // namespace emu
