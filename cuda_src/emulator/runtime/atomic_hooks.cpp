// C++ atomics (__atomic_*, std::atomic_ref, cuda::atomic_ref) as -fsanitize=thread calls them. On the host they are
// what they say; in a kernel they are checked first, and an order of release or stronger is a __threadfence as well.
#include "shadow.h"

using emu::Op;

namespace {

inline void seen(const void* pc, const volatile void* p, uint32_t bytes, Op op, int order) {
    if (!emu::current) return;
    if (order >= __ATOMIC_RELEASE && op != Op::load) emu::thread_fence();
    emu::access(pc, uint64_t(p), bytes, op, true);
    if (op != Op::load) emu::running->progress++;
}

}  // namespace

#define HERE __builtin_return_address(0)
#define FETCH(BITS, T, NAME)                                                          \
    EMU_API T __tsan_atomic##BITS##_fetch_##NAME(volatile T* p, T value, int order) { \
        seen(HERE, p, sizeof(T), Op::atomic, order);                                  \
        return __atomic_fetch_##NAME(p, value, __ATOMIC_SEQ_CST);                     \
    }
#define COMPARE(BITS, T, NAME)                                                                                       \
    EMU_API int __tsan_atomic##BITS##_compare_exchange_##NAME(volatile T* p, T* expected, T value, int order, int) { \
        seen(HERE, p, sizeof(T), Op::atomic, order);                                                                 \
        return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
    }
#define ATOMICS(BITS, T)                                                                                       \
    EMU_API T __tsan_atomic##BITS##_load(const volatile T* p, int order) {                                     \
        seen(HERE, p, sizeof(T), Op::load, order);                                                             \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                           \
    }                                                                                                          \
    EMU_API void __tsan_atomic##BITS##_store(volatile T* p, T value, int order) {                              \
        seen(HERE, p, sizeof(T), Op::store, order);                                                            \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                          \
    }                                                                                                          \
    EMU_API T __tsan_atomic##BITS##_exchange(volatile T* p, T value, int order) {                              \
        seen(HERE, p, sizeof(T), Op::atomic, order);                                                           \
        return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                                \
    }                                                                                                          \
    EMU_API T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T expected, T value, int order, int) { \
        seen(HERE, p, sizeof(T), Op::atomic, order);                                                           \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);           \
        return expected;                                                                                       \
    }                                                                                                          \
    FETCH(BITS, T, add)                                                                                        \
    FETCH(BITS, T, sub)                                                                                        \
    FETCH(BITS, T, and) FETCH(BITS, T, or) FETCH(BITS, T, xor) FETCH(BITS, T, nand) COMPARE(BITS, T, strong)   \
        COMPARE(BITS, T, weak)

extern "C" {
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
EMU_API void __tsan_atomic_thread_fence(int) { emu::thread_fence(); }
EMU_API void __tsan_atomic_signal_fence(int) {}
}
