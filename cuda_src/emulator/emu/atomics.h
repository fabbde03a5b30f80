// Atomics. Only one fiber runs at a time, so reading, computing and writing is atomic already. What matters is that the
// access is checked and counted as one, and that it orders what a __threadfence published.
#pragma once
#include <type_traits>

#include "core.h"
#include "warp.h"

namespace emu {

template <typename T>
struct Same {  // the value's type comes from the pointer, so that atomicAdd(unsigned*, 1) works
    using type = T;
};

template <typename T, typename Operation>
EMU_INLINE T rmw(T* p, Operation operation) {
    atomic_access(p, sizeof(T));
    const T old = from_bits<T>(peek(p, sizeof(T)));
    poke(p, sizeof(T), to_bits<T>(operation(old)));
    return old;
}

}  // namespace emu

#define EMU_ATOMIC(name, expression)                                                    \
    template <typename T>                                                               \
    EMU_INLINE T atomic##name(T* p, typename emu::Same<T>::type value) {                \
        return emu::rmw(p, [value](T old) -> T { return expression; });                 \
    }                                                                                   \
    template <typename T>                                                               \
    EMU_INLINE T atomic##name##_block(T* p, typename emu::Same<T>::type value) {        \
        return emu::rmw(p, [value](T old) -> T { return expression; });                 \
    }                                                                                   \
    template <typename T>                                                               \
    EMU_INLINE T atomic##name(volatile T* p, typename emu::Same<T>::type value) {       \
        return emu::rmw(const_cast<T*>(p), [value](T old) -> T { return expression; }); \
    }
EMU_ATOMIC(Add, T(old + value))
EMU_ATOMIC(Sub, T(old - value))
EMU_ATOMIC(Min, value < old ? value : old)
EMU_ATOMIC(Max, old < value ? value : old)
EMU_ATOMIC(And, T(old& value))
EMU_ATOMIC(Or, T(old | value))
EMU_ATOMIC(Xor, T(old ^ value))
EMU_ATOMIC(Exch, value)
EMU_ATOMIC(Inc, old >= value ? T(0) : T(old + 1))
EMU_ATOMIC(Dec, old == 0 || old > value ? value : T(old - 1))

template <typename T>
EMU_INLINE T atomicCAS(T* p, typename emu::Same<T>::type compare, typename emu::Same<T>::type value) {
    return emu::rmw(p, [=](T old) -> T { return emu::to_bits(old) == emu::to_bits(compare) ? value : old; });
}
template <typename T>
EMU_INLINE T atomicCAS(volatile T* p, typename emu::Same<T>::type compare, typename emu::Same<T>::type value) {
    return atomicCAS(const_cast<T*>(p), compare, value);
}

EMU_INLINE void __threadfence() { emu::thread_fence(); }
EMU_INLINE void __threadfence_block() { emu::thread_fence(); }
EMU_INLINE void __threadfence_system() { emu::thread_fence(); }
EMU_INLINE void __nanosleep(unsigned) { emu::pause(); }

// Loads and stores with a cache hint are loads and stores.
#define EMU_LOAD(name)              \
    template <typename T>           \
    EMU_INLINE T name(const T* p) { \
        return *p;                  \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
#define EMU_STORE(name)                                             \
    template <typename T>                                           \
    EMU_INLINE void name(T* p, typename emu::Same<T>::type value) { \
        *p = value;                                                 \
    }
EMU_STORE(__stcs)
EMU_STORE(__stcg)
EMU_STORE(__stwb)
EMU_STORE(__stwt)
// These two skip the L1 cache, which is how flags are polled: volatile, so that a loop reads each time and lets others
// run.
#define EMU_LOAD_FRESH(name)                          \
    template <typename T>                             \
    EMU_INLINE T name(const T* p) {                   \
        if constexpr (std::is_scalar_v<T>)            \
            return *const_cast<const volatile T*>(p); \
        else                                          \
            return *p;                                \
    }
EMU_LOAD_FRESH(__ldcg)
EMU_LOAD_FRESH(__ldcv)
