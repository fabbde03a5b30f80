// Shuffles, votes and reductions of a warp: each lane gives a value; when all lanes of the mask have come, one function
// computes what each of them gets.
#pragma once
#include <bit>
#include <type_traits>

#include "core.h"

namespace emu {

template <typename T>
EMU_INLINE uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <typename T>
EMU_INLINE T from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

// A lane that is not there gives NaN, not a fault: a reduction of half a warp may read it and not use it.
inline void shuffle(Lane* lanes, uint32_t arrived) {
    for (uint32_t m = arrived; m; m &= m - 1) {
        Lane& lane = lanes[__builtin_ctz(m)];
        lane.out = arrived >> lane.ask & 1 ? lanes[lane.ask].in : ~0ull;
    }
}
inline void ballot(Lane* lanes, uint32_t arrived) {
    uint32_t bits = 0;
    for (uint32_t m = arrived; m; m &= m - 1) bits |= uint32_t(lanes[__builtin_ctz(m)].in) << __builtin_ctz(m);
    for (uint32_t m = arrived; m; m &= m - 1) lanes[__builtin_ctz(m)].out = bits;
}
inline void match(Lane* lanes, uint32_t arrived) {
    for (uint32_t m = arrived; m; m &= m - 1) {
        Lane& lane = lanes[__builtin_ctz(m)];
        lane.out = 0;
        for (uint32_t o = arrived; o; o &= o - 1)
            if (lanes[__builtin_ctz(o)].in == lane.in) lane.out |= 1u << __builtin_ctz(o);
    }
}
template <typename T, typename Operation>
void reduce(Lane* lanes, uint32_t arrived) {
    T total = from_bits<T>(lanes[__builtin_ctz(arrived)].in);
    for (uint32_t m = arrived & (arrived - 1); m; m &= m - 1)
        total = Operation()(total, from_bits<T>(lanes[__builtin_ctz(m)].in));
    for (uint32_t m = arrived; m; m &= m - 1) lanes[__builtin_ctz(m)].out = to_bits(total);
}

template <typename T>
EMU_INLINE T shuffle_from(uint32_t mask, T value, uint32_t source, const char* what) {
    return from_bits<T>(exchange(mask, to_bits(value), source, shuffle, what));
}

}  // namespace emu

template <typename T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = emu::lane_index();
    return emu::shuffle_from(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), "__shfl_sync");
}
template <typename T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = emu::lane_index();
    return emu::shuffle_from(mask, value, (lane & (width - 1)) < delta ? lane : lane - delta, "__shfl_up_sync");
}
template <typename T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = emu::lane_index();
    return emu::shuffle_from(mask, value, (lane & (width - 1)) + delta < unsigned(width) ? lane + delta : lane,
                             "__shfl_down_sync");
}
template <typename T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const unsigned lane = emu::lane_index(), other = lane ^ lanes;
    return emu::shuffle_from(mask, value, (other & ~(width - 1)) > (lane & ~(width - 1)) ? lane : other,
                             "__shfl_xor_sync");
}

EMU_INLINE void __syncwarp(unsigned mask = 0xffffffff) { emu::exchange(mask, 0, 0, nullptr, "__syncwarp"); }
EMU_INLINE unsigned __ballot_sync(unsigned mask, int predicate) {
    return unsigned(emu::exchange(mask, predicate != 0, 0, emu::ballot, "__ballot_sync"));
}
EMU_INLINE int __any_sync(unsigned mask, int predicate) {
    return emu::exchange(mask, predicate != 0, 0, emu::ballot, "__any_sync") != 0;
}
EMU_INLINE int __all_sync(unsigned mask, int predicate) {
    return emu::exchange(mask, predicate == 0, 0, emu::ballot, "__all_sync") == 0;
}
template <typename T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
    return unsigned(emu::exchange(mask, emu::to_bits(value), 0, emu::match, "__match_any_sync"));
}
template <typename T>
EMU_INLINE unsigned __match_all_sync(unsigned mask, T value, int* all) {
    const unsigned same = unsigned(emu::exchange(mask, emu::to_bits(value), 0, emu::match, "__match_all_sync"));
    *all = same == (mask & emu::live_lanes());
    return *all ? same : 0;
}
// Which lanes run together is the hardware's choice; that it is this lane alone is always a right answer.
EMU_INLINE unsigned __activemask() { return 1u << emu::lane_index(); }

namespace emu {
struct Add {
    template <typename T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Min {
    template <typename T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct Max {
    template <typename T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
struct And {
    template <typename T>
    T operator()(T a, T b) const {
        return a & b;
    }
};
struct Or {
    template <typename T>
    T operator()(T a, T b) const {
        return a | b;
    }
};
struct Xor {
    template <typename T>
    T operator()(T a, T b) const {
        return a ^ b;
    }
};
}  // namespace emu

#define EMU_REDUCE(name, T, Operation)                                                                               \
    EMU_INLINE T __reduce_##name##_sync(unsigned mask, T value) {                                                    \
        return emu::from_bits<T>(                                                                                    \
            emu::exchange(mask, emu::to_bits(value), 0, emu::reduce<T, emu::Operation>, "__reduce_" #name "_sync")); \
    }
EMU_REDUCE(add, int, Add)
EMU_REDUCE(add, unsigned, Add)
EMU_REDUCE(min, int, Min)
EMU_REDUCE(min, unsigned, Min)
EMU_REDUCE(max, int, Max)
EMU_REDUCE(max, unsigned, Max)
EMU_REDUCE(and, unsigned, And)
EMU_REDUCE(or, unsigned, Or)
EMU_REDUCE(xor, unsigned, Xor)
