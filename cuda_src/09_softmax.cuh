// What 09_softmax and 09b_softmax_lengths share: exponentials, the pair (m, s) and how pairs merge, the check in main.
#pragma once
#include "09_rows.cuh"
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

// One block a row: how many rows a grid can have.
inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "softmax: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}

#ifndef COURSE_EXTENSION
template <typename T>
using Rungs = std::vector<std::pair<std::string, void (*)(const T*, T*, int64_t, int64_t, cudaStream_t)>>;

// Checks every rung on [M, N] against a loop in double (large ones in their last rows, where the offsets are largest),
// then times them.
template <typename T>
void run(const Rungs<T>& rungs, int64_t M, int64_t N, bool timed = false) {
    std::printf("\n[%lld, %lld] %s\n", (long long)M, (long long)N, sizeof(T) == 4 ? "fp32" : "bf16");
    // Around -5: a column past the end that counts as 0 would win. A prime period, so that rows differ.
    const std::vector<float> values = course::random(std::min<int64_t>(M * N, 1000003), 9, -5, 3);
    std::vector<T> host;
    for (int64_t i = 0; i < M * N; i++) host.push_back(narrow<T>(values[i % values.size()]));
    const course::Buffer<T> x(host);
    course::Buffer<T> y(host.size());
    std::vector<double> expected;
    for (int64_t row = std::max<int64_t>(0, M - 1 - 200000 / N); row < M; row++) {
        double m = -INFINITY, s = 0;
        for (int64_t j = 0; j < N; j++) m = std::max(m, double(widen(host[row * N + j])));
        for (int64_t j = 0; j < N; j++) s += std::exp(double(widen(host[row * N + j])) - m);
        for (int64_t j = 0; j < N; j++) expected.push_back(std::exp(double(widen(host[row * N + j])) - m) / s);
    }
    std::vector<course::Version> versions;
    for (const auto& [name, rung] : rungs) {
        y.poison();
        rung(x, y, M, N, nullptr);
        const std::vector<T> all = y.host();
        std::vector<float> got;
        for (size_t i = all.size() - expected.size(); i < all.size(); i++) got.push_back(widen(all[i]));
        // 3e-8 N: a thread that adds N numbers one after the other is off by up to N / 2^25 of their sum.
        course::check(name, got, expected, sizeof(T) == 4 ? 1e-5 + 3e-8 * double(N) : 1e-2, 1e-4 / double(N));
        versions.push_back({name, [&x, &y, M, N, f = rung](cudaStream_t stream) { f(x, y, M, N, stream); }});
    }
    if (timed) course::time_versions(versions, {.bytes = 2.0 * double(M * N) * sizeof(T)});
}
#endif
