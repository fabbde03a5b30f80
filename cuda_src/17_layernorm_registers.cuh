// The rungs of 17_layernorm_lengths that keep a row in registers and go: v4, a block per row, v5, some lanes per row.
#pragma once
#include "rows.cuh"
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

// v4. The row stays in registers between its statistics and its result. A thread issues eight loads of 16 bytes before
// the first use. The row keeps its dtype: in 16 bits 32 registers, converted to float again for the mean, the variance
// and the result. Last come w and b, from L1 or L2, a vector at a time. One barrier. Predicted: one read and one write.
// 64 registers per thread leave room for 128 KB of rows on an SM. Little's law wants 25 KB in flight, so one row loads
// while another stores: nearly copy speed to 32 KB per row. The reads of w and b are 2MN more from L1 or L2, which are
// faster than HBM but not free: a tenth less past 16 KB per row.
constexpr int K = 8, THREADS = 512;  // vectors per thread, threads of a block at most

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS, WHOLE ? 2 : 1)
    layernorm_registers_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int n, int vectors,
                               float eps) {
    __shared__ float4 parts[THREADS / 32];
    x += blockIdx.x * int64_t(n), y += blockIdx.x * int64_t(n);
    const Share share = {n, int(threadIdx.x), int(blockDim.x), vectors, WHOLE};
    uint4 v[K];
    share.load(v, x);
    const Stats mine = stats_of<T>(v, share, lanes_sum(count_of<T, K>(share)));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float4(mine.mean, mine.m2, mine.count, 0);
    __syncthreads();
    const Stats all = merge_all(parts, blockDim.x / 32, n);
    const float r = 1 / sqrtf(all.m2 / n + eps);
    again(v);
    store_share<T>(v, w, b, all.mean, r, y, share);
    if (threadIdx.x == 0) mean[blockIdx.x] = all.mean, rstd[blockIdx.x] = r;
}

// 16-byte accesses want all of them to begin and end at multiples of 16 bytes.
template <typename T>
bool whole(const T* x, const T* w, const T* b, const T* y, int64_t N) {
    return whole_vectors<T>(x, y, N) && whole_vectors<T>(w, b, N);
}

template <typename T>
void layernorm_registers(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                         float eps, cudaStream_t stream) {
    course::require(N * sizeof(T) <= THREADS * K * 16, "layernorm_registers: rows of at most 64 KB");
    if (no_rows(M, N)) return;
    const int vectors = int(course::ceil_div(N, VEC<T>)), threads = 32 * int(course::ceil_div(vectors, 32 * K));
    const auto kernel =
        whole(x, w, b, y, N) ? layernorm_registers_kernel<T, true> : layernorm_registers_kernel<T, false>;
    kernel<<<M, threads, 0, stream>>>(x, w, b, y, mean, rstd, int(N), vectors, eps);
    CUDA_CHECK(cudaGetLastError());
}

// v5. New: a short row needs no block. LANES lanes of a warp (1 to 32, for up to 2 KB) own a row with four vectors
// each: no barrier, no shared memory. Predicted: copy speed at 256 columns, where v4 fills 32 of the 256 vectors that
// its warp can hold. w and b are 4 KB at most, which L1 holds.
template <typename T, int LANES, bool WHOLE>
__global__ void __launch_bounds__(128, 6)
    layernorm_lanes_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int n,
                           int vectors, float eps) {
    const int64_t row = (blockIdx.x * int64_t(128) + threadIdx.x) / LANES;
    // Lanes past M stay for the shuffles, and hold nothing.
    const Share share = {n, int(threadIdx.x % LANES), LANES, row < M ? vectors : 0, WHOLE};
    uint4 v[4];
    share.load(v, x + row * n);
    const Stats stats = stats_of<T, LANES>(v, share, float(n));
    const float r = 1 / sqrtf(stats.m2 / n + eps);
    again(v);
    store_share<T>(v, w, b, stats.mean, r, y + row * n, share);
    if (threadIdx.x % LANES == 0 && row < M) mean[row] = stats.mean, rstd[row] = r;
}

template <typename T, int LANES>
void layernorm_lanes_of(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                        float eps, cudaStream_t stream) {
    const int vectors = int(course::ceil_div(N, VEC<T>));
    if constexpr (LANES < 32) {
        if (vectors > 4 * LANES) return layernorm_lanes_of<T, 2 * LANES>(x, w, b, y, mean, rstd, M, N, eps, stream);
    }
    course::require(N * sizeof(T) <= 2048, "layernorm_lanes: rows of at most 2 KB, all that a warp's lanes hold");
    if (no_rows(M, N)) return;
    const int64_t grid = course::ceil_div(M, 128 / LANES);
    const auto kernel =
        whole(x, w, b, y, N) ? layernorm_lanes_kernel<T, LANES, true> : layernorm_lanes_kernel<T, LANES, false>;
    kernel<<<grid, 128, 0, stream>>>(x, w, b, y, mean, rstd, M, int(N), vectors, eps);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void layernorm_lanes(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                     float eps, cudaStream_t stream) {
    layernorm_lanes_of<T, 1>(x, w, b, y, mean, rstd, M, N, eps, stream);
}
