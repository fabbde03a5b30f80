// Softmax at every row length: a row is read once
// ===============================================
//
// 14_softmax reads a row twice. To read it once, 2MN elements in all, the row has to stay on chip between the sum and
// the result. Rung v4 keeps the row in the registers of a block, rung v5 in those of a few lanes, rung v6 in those
// of several SMs. At 4.2 TB/s the bf16 matrices timed here cannot take less than 0.008 (32768 x 256) to 0.256 ms
// (2048 x 131072). Arithmetic is no limit: some 13 instructions per element, where 132 SMs can issue 27 in the time in
// which memory moves one bf16 in and out.
//
// You will be able to: choose by a row's length where it stays on chip: in a few lanes, in a block, in a cluster of
// blocks.
//
// Source of v6: CUDA C++ programming guide, "Thread block clusters" and "Distributed shared memory".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o softmax cuda_src/15_softmax_lengths.cu
// Run:      ./softmax                                     (checks every version, then times them all)
// No GPU:   python3 course.py run 15_softmax_lengths     (emulated and checked against PyTorch; v6 needs its GPU)
// Time it:  python3 course.py bench 15_softmax_lengths
#include "softmax_pair.cuh"
#include "softmax_problem.cuh"

// One block a row: how many rows a grid can have.
inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "softmax: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}
#ifndef COURSE_EMULATED
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#endif

// v4. New: the row stays in registers. A thread issues eight loads of 16 bytes before the first use. The row keeps its
// dtype: 128 bytes are 32 registers, converted to float again for the maximum, the sum and the result. A second
// exponential costs less than the registers that would keep the first. 64 registers per thread, so 128 KB on an SM.
// Predicted: one read and one write, copy speed while an SM holds two rows or more (to 64 KB each): one loads while
// another stores. By Little's law 4.2 TB/s at 800 ns are 25 KB in flight for each SM.
constexpr int K = 8, THREADS = 512;  // vectors per thread, threads of a block at most

// In 16 bits two at a time, as they lie there: widened first, the compiler would carry the floats along.
template <typename T>
__device__ __forceinline__ float vector_max(const uint4& v) {
    float m = LOWEST;
#ifndef COURSE_EMULATED
    if constexpr (sizeof(T) == 2) {
        const auto two = [](unsigned word) { return *reinterpret_cast<__nv_bfloat162*>(&word); };
        const __nv_bfloat162 both = __hmax2(__hmax2(two(v.x), two(v.y)), __hmax2(two(v.z), two(v.w)));
        return fmaxf(__low2float(both), __high2float(both));
    }
#endif
    float f[VEC<T>];
    unpack<T>(v, f);
#pragma unroll
    for (int e = 0; e < VEC<T>; e++) m = fmaxf(m, f[e]);
    return m;
}

template <typename T, int LANES = 32, int COUNT>
__device__ __forceinline__ Pair pair_of(const uint4 (&v)[COUNT]) {
    float m = LOWEST, s = 0;
#pragma unroll
    for (int k = 0; k < COUNT; k++) m = fmaxf(m, vector_max<T>(v[k]));
    m = lanes_max<LANES>(m);  // of all lanes first: then their sums need no rescaling
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float f[VEC<T>];
        unpack<T>(v[k], f);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++) s += exp_(f[e] - m);  // exp(-inf - m) = 0 past the end
    }
    return {m, lanes_sum<LANES>(s)};
}

template <typename T, int COUNT>
__device__ __forceinline__ void store_share(const uint4 (&v)[COUNT], Pair pair, T* row, int n, int first, int step,
                                            int end, bool whole) {
    const float scale = 1 / pair.s;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        float f[VEC<T>];
        unpack<T>(v[k], f);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++) f[e] = exp_(f[e] - pair.m) * scale;
        if (first + k * step < end) store_vector<T>(f, row, n, first + k * step, whole);
    }
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS, WHOLE ? 2 : 1)
    softmax_registers_kernel(const T* x, T* y, int n, int vectors) {
    __shared__ float2 pairs[THREADS / 32];
    x += blockIdx.x * int64_t(n), y += blockIdx.x * int64_t(n);
    uint4 v[K];
    load_share<T>(v, x, n, threadIdx.x, blockDim.x, vectors, WHOLE, -INFINITY);
    Pair pair = pair_of<T>(v);
    if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(pair.m, pair.s);
    __syncthreads();
    pair = merge_all(pairs, blockDim.x / 32);
    store_share<T>(v, pair, y, n, threadIdx.x, blockDim.x, vectors, WHOLE);
}

template <typename T>
void softmax_registers(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    course::require(N * sizeof(T) <= THREADS * K * 16, "softmax_registers: rows of at most 64 KB");
    if (no_rows(M, N)) return;
    const int vectors = int(course::ceil_div(N, VEC<T>)), threads = 32 * int(course::ceil_div(vectors, 32 * K));
    const bool whole = whole_vectors<T>(x, y, N);
    const auto kernel = whole ? softmax_registers_kernel<T, true> : softmax_registers_kernel<T, false>;
    kernel<<<M, threads, 0, stream>>>(x, y, int(N), vectors);
    CUDA_CHECK(cudaGetLastError());
}

// v5. New: a short row needs no block. LANES lanes of a warp (1 to 32, for up to 2 KB) own a row with four vectors
// each, 32 / LANES rows per warp. There is no barrier and no shared memory, and lanes past a row's end work on another
// row. Predicted: copy speed at 256 columns, where v4 fills 32 of the 256 vectors that its warp can hold.
template <typename T, int LANES>
__global__ void __launch_bounds__(128)
    softmax_lanes_kernel(const T* x, T* y, int64_t M, int n, int vectors, bool whole) {
    const int64_t row = (blockIdx.x * int64_t(128) + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES, end = row < M ? vectors : 0;  // lanes past M stay for the shuffles
    uint4 v[4];
    load_share<T>(v, x + row * n, n, lane, LANES, end, whole, -INFINITY);
    const Pair pair = pair_of<T, LANES>(v);
    store_share<T>(v, pair, y + row * n, n, lane, LANES, end, whole);
}

template <typename T, int LANES>
void softmax_lanes_of(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    const int vectors = int(course::ceil_div(N, VEC<T>));
    if constexpr (LANES < 32) {
        if (vectors > 4 * LANES) return softmax_lanes_of<T, 2 * LANES>(x, y, M, N, stream);
    }
    course::require(N * sizeof(T) <= 2048, "softmax_lanes: rows of at most 2 KB, four vectors a lane");
    if (no_rows(M, N)) return;
    const int64_t blocks = course::ceil_div(M, 128 / LANES);
    softmax_lanes_kernel<T, LANES><<<blocks, 128, 0, stream>>>(x, y, M, int(N), vectors, whole_vectors<T>(x, y, N));
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void softmax_lanes(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    softmax_lanes_of<T, 1>(x, y, M, N, stream);
}

// v6. New: a long row is shared by the blocks of a cluster, which run at the same time on neighbouring SMs and can
// write into each other's shared memory. Each warp sends its pair to every block. After one barrier of the cluster all
// blocks have all pairs. Predicted: most of copy speed from 64 KB per row on, where v4 ends, to 512 KB: blocks wait for
// the slowest of theirs.
#ifndef COURSE_EMULATED
constexpr int MAX_PARTS = 8;

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS, WHOLE ? 2 : 1)
    softmax_cluster_kernel(const T* x, T* y, int n, int vectors, int part) {  // part: vectors of one block
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ float2 pairs[MAX_PARTS * THREADS / 32];
    auto cluster = cg::this_cluster();
    cluster.barrier_arrive();  // a block that has not started has no shared memory to write to; loads need not wait
    const int parts = cluster.num_blocks(), rank = cluster.block_rank(), warps = blockDim.x / 32;
    const int64_t row = blockIdx.x / parts;
    const int first = rank * part + threadIdx.x, end = min(vectors, (rank + 1) * part);
    uint4 v[K];
    load_share<T>(v, x + row * n, n, first, blockDim.x, end, WHOLE, -INFINITY);
    Pair pair = pair_of<T>(v);
    cluster.barrier_wait();
    if (threadIdx.x % 32 < parts) {  // lane i writes to block i
        float2* slot = &pairs[rank * warps + threadIdx.x / 32];
        *cluster.map_shared_rank(slot, threadIdx.x % 32) = make_float2(pair.m, pair.s);
    }
    cluster.sync();  // after it no block accesses another's memory, so a block may exit
    pair = merge_all(pairs, parts * warps);
    store_share<T>(v, pair, y + row * n, n, first, blockDim.x, end, WHOLE);
#endif
}

template <typename T>
void softmax_cluster(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    course::require(has_clusters(), "softmax_cluster needs a GPU with thread block clusters, sm_90 or newer");
    course::require(N * sizeof(T) <= MAX_PARTS * THREADS * K * 16, "softmax_cluster: rows of at most 512 KB");
    if (no_rows(M * MAX_PARTS, N)) return;
    const int vectors = int(course::ceil_div(N, VEC<T>));
    int parts = 2;  // blocks of up to 32 KB while 8 are enough
    while (parts < MAX_PARTS && vectors > parts * 256 * K) parts *= 2;
    const int part = int(course::ceil_div(vectors, parts));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(M * parts));
    config.blockDim = dim3(32 * unsigned(course::ceil_div(part, 32 * K)));
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {unsigned(parts), 1, 1};
    config.attrs = cluster;
    config.numAttrs = 1;
    const bool whole = whole_vectors<T>(x, y, N);
    const auto kernel = whole ? softmax_cluster_kernel<T, true> : softmax_cluster_kernel<T, false>;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, x, y, int(N), vectors, part));
}
#endif

// The rest: rows past 512 KB (64 KB without clusters). Each thread merges the pairs of eight vectors at a time. The
// second read begins at the row's end, since the caches still hold what was read last.
template <typename T>
__global__ void __launch_bounds__(512) softmax_rest_kernel(const T* x, T* y, int64_t N, bool whole) {
    __shared__ float2 pairs[16];
    constexpr int64_t CHUNK = 512 * K * VEC<T>;  // elements, so that offsets within a chunk fit an int
    x += blockIdx.x * N, y += blockIdx.x * N;
    uint4 v[K];
    Pair pair = {LOWEST, 0};
    for (int64_t start = 0; start < N; start += CHUNK) {
        const int n = int(min(CHUNK, N - start));
        load_share<T>(v, x + start, n, threadIdx.x, 512, (n + VEC<T> - 1) / VEC<T>, whole, -INFINITY);
        pair = merge(pair, pair_of<T>(v));
    }
    if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(pair.m, pair.s);
    __syncthreads();
    pair = merge_all(pairs, 16);
    for (int64_t start = (N - 1) / CHUNK * CHUNK; start >= 0; start -= CHUNK) {
        const int n = int(min(CHUNK, N - start)), vectors = (n + VEC<T> - 1) / VEC<T>;
        load_share<T>(v, x + start, n, threadIdx.x, 512, vectors, whole, -INFINITY);
        store_share<T>(v, pair, y + start, n, threadIdx.x, 512, vectors, whole);
    }
}

// The one to call: every M and N, each row length by the rung that suits it.
template <typename T>
void softmax(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    const int64_t bytes = N * sizeof(T);
    if (bytes <= 2048) return softmax_lanes(x, y, M, N, stream);
    if (bytes <= 65536) return softmax_registers(x, y, M, N, stream);
#ifndef COURSE_EMULATED
    if (bytes <= 1 << 19 && M < (1 << 28) && has_clusters()) return softmax_cluster(x, y, M, N, stream);
#endif
    if (no_rows(M, N)) return;
    softmax_rest_kernel<<<M, 512, 0, stream>>>(x, y, N, whole_vectors<T>(x, y, N));
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "softmax_registers_float32", softmax_registers<float>);
    bind(m, "softmax_registers_bfloat16", softmax_registers<bf16>);
    bind(m, "softmax_lanes_float32", softmax_lanes<float>);
    bind(m, "softmax_lanes_bfloat16", softmax_lanes<bf16>);
#ifndef COURSE_EMULATED
    bind(m, "softmax_cluster_float32", softmax_cluster<float>);
    bind(m, "softmax_cluster_bfloat16", softmax_cluster<bf16>);
#endif
    bind(m, "softmax_float32", softmax<float>);
    bind(m, "softmax_bfloat16", softmax<bf16>);
}

#ifndef COURSE_EXTENSION
template <typename T>
Rungs<T> rungs(int64_t N) {
    Rungs<T> found;
    if (N * sizeof(T) <= 65536) found.push_back({"v4 registers", softmax_registers<T>});
    if (N * sizeof(T) <= 2048) found.push_back({"v5 lanes", softmax_lanes<T>});
#ifndef COURSE_EMULATED
    if (has_clusters() && N * sizeof(T) <= 1 << 19) found.push_back({"v6 cluster", softmax_cluster<T>});
#endif
    found.push_back({"softmax", softmax<T>});
    return found;
}

int main() try {
    for (int64_t n : {1, 127, 1037}) run(rungs<float>(n), 37, n), run(rungs<bf16>(n), 37, n);
    if (course::small()) return 0;
    for (int64_t n : {4099, 100003, 1000003}) run(rungs<float>(n), 3, n), run(rungs<bf16>(n), 3, n);
    for (auto [M, N] : {std::pair{32768, 256}, {32768, 1024}, {4096, 4096}, {8192, 8192}, {4096, 12672}, {4096, 32768},
                        {2048, 131072}})
        run(rungs<bf16>(N), M, N, true);
    run(rungs<float>(8192), 4096, 8192, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
