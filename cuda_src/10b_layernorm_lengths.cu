// LayerNorm at every row length: x is read once, w and b hardly at all
// ==================================================================== 10_layernorm reads a row twice. Kept in
// registers it is read once (v4): 2MN elements through memory. But each row also asks for w and b, which come from L2:
// 2 more reads a row of x, and L2 gives an SM less than twice what memory does. So blocks stay (v6): one keeps its
// columns of w and b in shared memory from its first row to its last, and the next rows arrive there behind the present
// one. Past 32 KB a row several SMs share rows and columns (v7). At 4.2 TB/s 4096 x 32768 in bf16 (537 MB in and out)
// cannot take less than 0.128 ms.
//
// Sources: Ba, Kiros and Hinton, "Layer normalization", 2016; Chan, Golub and LeVeque 1979 (merging statistics); CUDA
// C++ programming guide, "Asynchronous data copies", "Thread block clusters", "Distributed shared memory".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -o layernorm cuda_src/10b_layernorm_lengths.cu
// Run:      ./layernorm                                   (checks every version, then times them all)
// No GPU:   python cuda_src/10b_layernorm_lengths.py      (emulated and checked against PyTorch; v7 needs its GPU)
// Time it:  python -m lessonkit bench 10b_layernorm_lengths
#include "10b_layernorm_registers.cuh"  // v4 and v5

#include <cuda_pipeline.h>
#ifndef COURSE_EMULATED
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#endif

constexpr int K = 2;  // vectors of 16 bytes that a thread owns: 8 registers of x, 8 of w, 8 of b

// v6. New: as many blocks as run at once, each with many rows. cp.async brings w and b into shared memory once, and
// rows ahead of time, every thread its own vectors into its own slots: so no barrier guards them. Statistics alternate
// between two places: who writes one again has passed a barrier that all readers of it had to reach.
// Predicted: 2MN and nothing else, with up to 3 rows on their way for each that is worked on, some 100 KB an SM.
constexpr int STAGES = 3;

template <typename T>
struct Ring {  // [STAGES + 2][K][threads] vectors of 16 bytes: rows, then w, then b
    uint4* slots;
    Share share;

    __device__ __forceinline__ uint4* slot(int stage, int k) const {
        return &slots[(stage * K + k) * blockDim.x + threadIdx.x];
    }
    __device__ __forceinline__ void fetch(int stage, const T* row) const {
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int i = share.first + k * share.step;
            if (i < share.end) __pipeline_memcpy_async(slot(stage, k), reinterpret_cast<const uint4*>(row) + i, 16);
        }
    }
    __device__ __forceinline__ void take(uint4 (&v)[K], int stage) const {
#pragma unroll
        for (int k = 0; k < K; k++)
            v[k] = share.first + k * share.step < share.end ? *slot(stage, k) : make_uint4(0, 0, 0, 0);
    }
    // w, b and the first rows. One commit a turn, whether it has a row or not: wait_prior counts commits.
    __device__ __forceinline__ void start(const T* x, const T* w, const T* b, int64_t row, int64_t step,
                                          int64_t M) const {
        fetch(STAGES, w), fetch(STAGES + 1, b);
        for (int turn = 0; turn < STAGES; turn++, row += step) {
            if (row < M) fetch(turn, x + row * share.n);
            __pipeline_commit();
        }
    }
};

template <typename T>
__global__ void __launch_bounds__(1024)
    layernorm_persistent_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int n,
                                int vectors, float eps) {
    extern __shared__ uint4 slots[];
    __shared__ float4 parts[2][32];
    const Share share = {n, int(threadIdx.x), int(blockDim.x), vectors, true};
    const Ring<T> ring = {slots, share};
    ring.start(x, w, b, blockIdx.x, gridDim.x, M);
    uint4 v[K], scale[K], shift[K];
    const float count = lanes_sum(count_of<T, K>(share));
    int turn = 0;
    for (int64_t row = blockIdx.x; row < M; row += gridDim.x, turn++) {
        __pipeline_wait_prior(STAGES - 1);
        ring.take(v, turn % STAGES);
        const Stats mine = stats_of<T>(v, share, count);
        if (threadIdx.x % 32 == 0) parts[turn % 2][threadIdx.x / 32] = make_float4(mine.mean, mine.m2, mine.count, 0);
        __syncthreads();
        const int64_t ahead = row + int64_t(STAGES) * gridDim.x;
        if (ahead < M) ring.fetch(turn % STAGES, x + ahead * n);
        __pipeline_commit();
        const Stats all = merge_all(parts[turn % 2], blockDim.x / 32, n);
        const float r = 1 / sqrtf(all.m2 / n + eps);
        ring.take(scale, STAGES), ring.take(shift, STAGES + 1);
        again(v);
        store_share<T>(v, scale, shift, all.mean, r, y + row * n, share);
        if (threadIdx.x == 0) mean[row] = all.mean, rstd[row] = r;
    }
}

template <typename T>
void layernorm_persistent(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                          float eps, cudaStream_t stream) {
    course::require(N * sizeof(T) <= 1024 * K * 16, "layernorm_persistent: rows of at most 32 KB");
    course::require(whole(x, w, b, y, N), "layernorm_persistent: rows begin and end at multiples of 16 bytes");
    if (no_rows(M, N)) return;
    const int vectors = int(course::ceil_div(N, VEC<T>)), threads = 32 * int(course::ceil_div(vectors, 32 * K));
    const int bytes = (STAGES + 2) * K * threads * 16;
    const auto kernel = layernorm_persistent_kernel<T>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (STAGES + 2) * K * 1024 * 16));
    int blocks = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, bytes));
    const int64_t grid = std::min<int64_t>(M, int64_t(std::max(blocks, 1)) * course::sms());
    layernorm_persistent_kernel<T><<<grid, threads, bytes, stream>>>(x, w, b, y, mean, rstd, M, int(N), vectors, eps);
    CUDA_CHECK(cudaGetLastError());
}

// v7. New: a long row is shared by the blocks of a cluster, which run at the same time on neighbouring SMs and can
// write into each other's shared memory. A block owns its columns of w and b for good and a part of every row; each
// warp sends its statistics to every block. One barrier of the cluster a row, and the two places alternate as before.
// Predicted: 2MN at any length to 256 KB. With parts of 8 to 16 KB an SM runs four of them or more, and one waits for
// its cluster while another works.
#ifndef COURSE_EMULATED
constexpr int MAX_PARTS = 8;

template <typename T>
__global__ void __launch_bounds__(1024)
    layernorm_cluster_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int n,
                             int vectors, int part, float eps) {  // part: vectors of one block
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ uint4 slots[];
    __shared__ float4 parts[2][MAX_PARTS * 32];
    auto cluster = cg::this_cluster();
    cluster.barrier_arrive();  // a block that has not started has no shared memory to write to; loads need not wait
    const int blocks = cluster.num_blocks(), rank = cluster.block_rank(), warps = blockDim.x / 32;
    const int lane = threadIdx.x % 32, slot = rank * warps + threadIdx.x / 32;
    const int64_t first = blockIdx.x / blocks, step = gridDim.x / blocks;
    const Share share = {n, rank * part + int(threadIdx.x), int(blockDim.x), min(vectors, (rank + 1) * part), true};
    const Ring<T> ring = {slots, share};
    ring.start(x, w, b, first, step, M);
    uint4 v[K], scale[K], shift[K];
    const float count = lanes_sum(count_of<T, K>(share));
    cluster.barrier_wait();
    int turn = 0;
    for (int64_t row = first; row < M; row += step, turn++) {
        __pipeline_wait_prior(STAGES - 1);
        ring.take(v, turn % STAGES);
        const Stats mine = stats_of<T>(v, share, count);
        if (lane < blocks)  // lane i writes to block i
            *cluster.map_shared_rank(&parts[turn % 2][slot], lane) = make_float4(mine.mean, mine.m2, mine.count, 0);
        cluster.barrier_arrive();
        const int64_t ahead = row + STAGES * step;
        if (ahead < M) ring.fetch(turn % STAGES, x + ahead * n);
        __pipeline_commit();
        cluster.barrier_wait();  // after the last one nobody touches another block's memory, so a block may leave
        const Stats all = merge_all(parts[turn % 2], blocks * warps, n);
        const float r = 1 / sqrtf(all.m2 / n + eps);
        ring.take(scale, STAGES), ring.take(shift, STAGES + 1);
        again(v);
        store_share<T>(v, scale, shift, all.mean, r, y + row * n, share);
        if (rank == 0 && threadIdx.x == 0) mean[row] = all.mean, rstd[row] = r;
    }
#endif
}

inline bool has_clusters() {
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
}

template <typename T>
void layernorm_cluster(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                       float eps, cudaStream_t stream) {
    course::require(has_clusters(), "layernorm_cluster needs a GPU with thread block clusters, sm_90 or newer");
    course::require(N * sizeof(T) <= MAX_PARTS * 1024 * K * 16, "layernorm_cluster: rows of at most 256 KB");
    course::require(whole(x, w, b, y, N), "layernorm_cluster: rows begin and end at multiples of 16 bytes");
    if (no_rows(M, N)) return;
    const int vectors = int(course::ceil_div(N, VEC<T>));
    int parts = 2;  // blocks of up to 16 KB while 8 are enough
    while (parts < MAX_PARTS && vectors > parts * 512 * K) parts *= 2;
    const int part = int(course::ceil_div(vectors, parts)), threads = 32 * int(course::ceil_div(part, 32 * K));
    const auto kernel = layernorm_cluster_kernel<T>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (STAGES + 2) * K * 1024 * 16));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(parts));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(STAGES + 2) * K * threads * 16;
    config.stream = stream;
    cudaLaunchAttribute cluster[1];
    cluster[0].id = cudaLaunchAttributeClusterDimension;
    cluster[0].val.clusterDim = {unsigned(parts), 1, 1};
    config.attrs = cluster;
    config.numAttrs = 1;
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    config.gridDim.x = unsigned(std::min<int64_t>(M, std::max(clusters, 1)) * parts);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, x, w, b, y, mean, rstd, M, int(N), vectors, part, eps));
}
#endif

// The rest: rows past 256 KB (32 KB without clusters), whose statistics each thread merges from four vectors at a time
// and which it reads a second time, from the end: what came last is what the caches still hold.
template <typename T>
__global__ void __launch_bounds__(512) layernorm_rest_kernel(const T* x, const T* w, const T* b, T* y, float* mean,
                                                             float* rstd, int64_t N, float eps, bool whole) {
    __shared__ float4 parts[16];
    constexpr int64_t CHUNK = 512 * 4 * VEC<T>;  // elements, so that offsets within a chunk fit an int
    x += blockIdx.x * N, y += blockIdx.x * N;
    uint4 v[4], scale[4], shift[4];
    Stats mine = {0, 0, 0};
    const auto share_of = [&](int64_t start) {
        const int n = int(min(CHUNK, N - start));
        return Share{n, int(threadIdx.x), 512, (n + VEC<T> - 1) / VEC<T>, whole};
    };
    for (int64_t start = 0; start < N; start += CHUNK) {
        const Share share = share_of(start);
        share.load(v, x + start);
        mine = merge(mine, stats_of<T>(v, share, lanes_sum(count_of<T, 4>(share))));
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float4(mine.mean, mine.m2, mine.count, 0);
    __syncthreads();
    const Stats all = merge_all(parts, 16, int(N));
    const float r = 1 / sqrtf(all.m2 / N + eps);
    for (int64_t start = (N - 1) / CHUNK * CHUNK; start >= 0; start -= CHUNK) {
        const Share share = share_of(start);
        share.load(v, x + start), share.load(scale, w + start), share.load(shift, b + start);
        store_share<T>(v, scale, shift, all.mean, r, y + start, share);
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = all.mean, rstd[blockIdx.x] = r;
}

// The one to call: every M and N, each row length by the rung that suits it.
template <typename T>
void layernorm(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N, float eps,
               cudaStream_t stream) {
    const int64_t bytes = N * sizeof(T);
    course::require(N < (int64_t(1) << 31), "layernorm: rows of fewer than 2^31 elements");
    if (bytes <= 2048) return layernorm_lanes(x, w, b, y, mean, rstd, M, N, eps, stream);
    if (whole(x, w, b, y, N)) {
        if (bytes <= 32768) return layernorm_persistent(x, w, b, y, mean, rstd, M, N, eps, stream);
#ifndef COURSE_EMULATED
        if (bytes <= 262144 && has_clusters()) return layernorm_cluster(x, w, b, y, mean, rstd, M, N, eps, stream);
#endif
    }
    if (bytes <= 32768) return layernorm_registers(x, w, b, y, mean, rstd, M, N, eps, stream);
    if (no_rows(M, N)) return;
    layernorm_rest_kernel<<<M, 512, 0, stream>>>(x, w, b, y, mean, rstd, N, eps, whole(x, w, b, y, N));
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "layernorm_registers_float32", layernorm_registers<float>);
    bind(m, "layernorm_registers_bfloat16", layernorm_registers<bf16>);
    bind(m, "layernorm_lanes_float32", layernorm_lanes<float>);
    bind(m, "layernorm_lanes_bfloat16", layernorm_lanes<bf16>);
    bind(m, "layernorm_persistent_float32", layernorm_persistent<float>);
    bind(m, "layernorm_persistent_bfloat16", layernorm_persistent<bf16>);
#ifndef COURSE_EMULATED
    bind(m, "layernorm_cluster_float32", layernorm_cluster<float>);
    bind(m, "layernorm_cluster_bfloat16", layernorm_cluster<bf16>);
#endif
    bind(m, "layernorm_float32", layernorm<float>);
    bind(m, "layernorm_bfloat16", layernorm<bf16>);
}

#ifndef COURSE_EXTENSION
template <typename T>
Rungs<T> rungs(int64_t N) {
    const int64_t bytes = N * sizeof(T);
    Rungs<T> found;
    if (bytes <= 32768) found.push_back({"v4 registers", layernorm_registers<T>});
    if (bytes <= 2048) found.push_back({"v5 lanes", layernorm_lanes<T>});
    if (bytes <= 32768 && bytes % 16 == 0) found.push_back({"v6 persistent", layernorm_persistent<T>});
#ifndef COURSE_EMULATED
    if (bytes <= 262144 && bytes % 16 == 0 && has_clusters()) found.push_back({"v7 cluster", layernorm_cluster<T>});
#endif
    found.push_back({"layernorm", layernorm<T>});
    return found;
}

int main() try {
    for (int64_t n : {1, 127, 1037, 1048}) run(rungs<float>(n), 37, n), run(rungs<bf16>(n), 37, n);
    if (course::emulated) return 0;
    for (int64_t n : {4099, 50024, 300007}) run(rungs<float>(n), 3, n), run(rungs<bf16>(n), 3, n);
    for (auto [M, N] : {std::pair{32768, 256}, {32768, 1024}, {4096, 4096}, {8192, 8192}, {4096, 12672}, {4096, 32768},
                        {2048, 131072}})
        run(rungs<bf16>(N), M, N, true);
    run(rungs<float>(8192), 4096, 8192, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
