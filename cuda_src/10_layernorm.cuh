// What 10_layernorm and 10b_layernorm_lengths share: statistics of a part of a row and how they merge, the check in
// main.
#pragma once
#include "09_rows.cuh"
#include "course.cuh"

// `count` elements with this mean, and m2 = sum((x - mean)^2).
struct Stats {
    float mean, m2, count;
};

// Chan, Golub and LeVeque 1979: no digit is lost, since only differences of means are squared.
__device__ __forceinline__ Stats merge(Stats a, Stats b) {
    const float count = a.count + b.count, share = count > 0 ? b.count / count : 0, delta = b.mean - a.mean;
    return {a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share, count};
}

// Which vectors of a row a thread owns: first, first + step, ... below end. n elements in a row.
struct Share {
    int n, first, step, end;
    bool whole;

    template <int COUNT, typename T>
    __device__ __forceinline__ void load(uint4 (&v)[COUNT], const T* row) const {
        load_share<T>(v, row, n, first, step, end, whole, 0.0f);
    }
    // How many elements of vector k are there.
    template <typename T>
    __device__ __forceinline__ int there(int k) const {
        const int i = first + k * step;
        return i < end ? min(VEC<T>, n - i * VEC<T>) : 0;
    }
};

template <typename T, int COUNT>
__device__ __forceinline__ float count_of(const Share& share) {
    int count = 0;
#pragma unroll
    for (int k = 0; k < COUNT; k++) count += share.there<T>(k);
    return float(count);
}

// Statistics of what a group of lanes holds, two passes over registers: exact, and no chain of divisions.
template <typename T, int LANES = 32, int COUNT>
__device__ __forceinline__ Stats stats_of(uint4 (&v)[COUNT], const Share& share, float count) {
    float sum = 0, m2 = 0;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float f[VEC<T>];
        unpack<T>(v[k], f);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++) sum += f[e];
    }
    const float mean = lanes_sum<LANES>(sum) / fmaxf(count, 1);
    again(v);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const int there = share.there<T>(k);
        float f[VEC<T>];
        unpack<T>(v[k], f);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++)
            // The padding is 0, and 0 - mean is not. Whole vectors are there or not.
            if (share.whole ? there > 0 : e < there) m2 += (f[e] - mean) * (f[e] - mean);
    }
    return {mean, lanes_sum<LANES>(m2), count};
}

// Statistics that lie in shared memory, merged by every warp for itself: all means first, then what they are apart.
__device__ __forceinline__ Stats merge_all(const float4* parts, int count, int n) {
    float sum = 0, m2 = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) sum += parts[i].x * parts[i].z;
    const float mean = lanes_sum(sum) / n;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        m2 += parts[i].y + (parts[i].x - mean) * (parts[i].x - mean) * parts[i].z;
    return {mean, lanes_sum(m2), float(n)};
}

// A vector of w or b, through the cache for what no kernel writes: so the compiler may load the next before it stores.
template <typename T>
__device__ __forceinline__ uint4 load_constant(const T* row, int i, const Share& share) {
    if (share.whole) return __ldg(reinterpret_cast<const uint4*>(row) + i);
    float f[VEC<T>];
#pragma unroll
    for (int e = 0; e < VEC<T>; e++) f[e] = i * VEC<T> + e < share.n ? widen(row[i * VEC<T> + e]) : 0;
    return pack<T>(f);
}

template <typename T, int COUNT>
__device__ __forceinline__ void store_share(const uint4 (&v)[COUNT], const T* w, const T* b, float mean, float rstd,
                                            T* row, const Share& share) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        const int i = share.first + k * share.step;
        if (i >= share.end) continue;
        float f[VEC<T>], scale[VEC<T>], shift[VEC<T>];
        unpack<T>(v[k], f);
        unpack<T>(load_constant(w, i, share), scale), unpack<T>(load_constant(b, i, share), shift);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++) f[e] = (f[e] - mean) * rstd * scale[e] + shift[e];
        store_vector<T>(f, row, share.n, i, share.whole);
    }
}

inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "layernorm: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}

#ifndef COURSE_EXTENSION
template <typename T>
using Rungs = std::vector<std::pair<std::string, void (*)(const T*, const T*, const T*, T*, float*, float*, int64_t,
                                                          int64_t, float, cudaStream_t)>>;

// Checks every rung on [M, N] against a loop in double (large ones in their last rows, where the offsets are largest),
// then times them.
template <typename T>
void run(const Rungs<T>& rungs, int64_t M, int64_t N, bool timed = false) {
    std::printf("\n[%lld, %lld] %s\n", (long long)M, (long long)N, sizeof(T) == 4 ? "fp32" : "bf16");
    // Around 50, so that E[x^2] - E[x]^2 would lose digits. A prime period, so that rows differ.
    const auto rounded = [](const std::vector<float>& values, int64_t count) {
        std::vector<T> all;
        for (int64_t i = 0; i < count; i++) all.push_back(narrow<T>(values[i % values.size()]));
        return all;
    };
    const float eps = 1e-5f;
    const std::vector<T> x = rounded(course::random(std::min<int64_t>(M * N, 1000003), 10, 50, 3), M * N);
    const std::vector<T> w = rounded(course::random(N, 11, 1, 0.3f), N), b = rounded(course::random(N, 12), N);
    const course::Buffer<T> dx(x), dw(w), db(b);
    course::Buffer<T> dy(x.size());
    course::Buffer<float> mean(M), rstd(M);
    std::vector<double> expected, means, rstds;
    const int64_t from = std::max<int64_t>(0, M - 1 - 200000 / N);
    for (int64_t row = from; row < M; row++) {
        double m = 0, m2 = 0;
        for (int64_t j = 0; j < N; j++) m += double(widen(x[row * N + j])) / double(N);
        for (int64_t j = 0; j < N; j++) m2 += (widen(x[row * N + j]) - m) * (widen(x[row * N + j]) - m);
        means.push_back(m), rstds.push_back(1 / std::sqrt(m2 / double(N) + eps));
        for (int64_t j = 0; j < N; j++)
            expected.push_back((widen(x[row * N + j]) - m) * rstds.back() * widen(w[j]) + widen(b[j]));
    }
    std::vector<course::Version> versions;
    const auto tail = [](const auto& all, size_t count) {
        std::vector<float> found;
        for (size_t i = all.size() - count; i < all.size(); i++) found.push_back(widen(all[i]));
        return found;
    };
    for (const auto& [name, rung] : rungs) {
        dy.poison(), mean.poison(), rstd.poison();
        rung(dx, dw, db, dy, mean, rstd, M, N, eps, nullptr);
        course::check(name, tail(dy.host(), expected.size()), expected, sizeof(T) == 4 ? 1e-3 : 1e-2);
        course::check(name + ", mean", tail(mean.host(), means.size()), means, 1e-4);
        course::check(name + ", rstd", tail(rstd.host(), rstds.size()), rstds, 1e-3);
        versions.push_back({name, [&, M, N, eps, f = rung](cudaStream_t stream) {
                                f(dx, dw, db, dy, mean, rstd, M, N, eps, stream);
                            }});
    }
    if (timed) course::time_versions(versions, {.bytes = 2.0 * double(M * N) * sizeof(T)});
}
#endif
