// Softmax of a part of a row as a pair (m, s), and how pairs merge: over lanes, over the warps of a block.
#pragma once
#include "rows.cuh"
#include "course.cuh"

#include <cfloat>

constexpr float LOG2E = 1.44269504088896f;
// Where a maximum starts. Not -inf: in a part of a row that is all -inf, exp(-inf - -inf) would be NaN for good.
constexpr float LOWEST = -FLT_MAX;

// exp(a) = 2^(a log2(e)). The hardware's 2^a flushes results below 2^-126 to 0, which is as near as a quotient needs.
__device__ __forceinline__ float exp_(float a) {
#ifdef COURSE_EMULATED
    return exp2f(a * LOG2E);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a * LOG2E));
    return result;
#endif
}

// A pair stands for the sum s * exp(m) of a part of a row, without its overflow.
struct Pair {
    float m, s;
};

__device__ __forceinline__ Pair merge(Pair a, Pair b) {
    const float m = fmaxf(a.m, b.m);
    return {m, a.s * exp_(a.m - m) + b.s * exp_(b.m - m)};
}

// Every lane of a group of LANES gets the group's pair.
template <int LANES = 32>
__device__ __forceinline__ Pair merge_lanes(Pair mine) {
    const float m = lanes_max<LANES>(mine.m);
    return {m, lanes_sum<LANES>(mine.s * exp_(mine.m - m))};
}

// Pairs that lie in shared memory, merged by every warp for itself.
__device__ __forceinline__ Pair merge_all(const float2* pairs, int count) {
    Pair all = {LOWEST, 0};
    for (int i = threadIdx.x % 32; i < count; i += 32) all = merge(all, {pairs[i].x, pairs[i].y});
    return merge_lanes(all);
}
