// LayerNorm at every row length: x is read once, w and b from the caches
// ======================================================================
//
// 16_layernorm reads a row twice. To read it once, 2MN elements in all, the row has to stay on chip between its
// statistics and its result. Rung v4 keeps it in the registers of a block, v5 of a few lanes, v6 of several SMs. Each
// row also needs w and b. These 2MN reads cause no HBM traffic: w and b stay in L2, and in L1 as far as they fit. At
// 4.2 TB/s 4096 x 32768 in bf16 (537 MB in and out) cannot take less than 0.128 ms.
//
// You will be able to: keep a row on chip at any length; say what the reads of w and b cost.
//
// Sources: Ba, Kiros and Hinton, "Layer normalization", 2016; Chan, Golub and LeVeque 1979 (merging statistics); CUDA
// C++ programming guide, "Thread block clusters", "Distributed shared memory".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o layernorm cuda_src/17_layernorm_lengths.cu
// Run:      ./layernorm                                   (checks every version, then times them all)
// No GPU:   python3 course.py run 17_layernorm_lengths   (emulated and checked against PyTorch; v6 needs its GPU)
// Time it:  python3 course.py bench 17_layernorm_lengths
#include "17_layernorm_registers.cuh"  // v4 and v5
#include "layernorm_problem.cuh"

#ifndef COURSE_EMULATED
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#endif

// v6. New: a long row is shared by the blocks of a cluster, which run at the same time on neighbouring SMs and can
// write into each other's shared memory. Each block keeps its part as v4 keeps a row. Each warp sends its statistics
// to every block, and there is one barrier of the cluster. Predicted: 2MN at any length to 512 KB. All of the row has
// to arrive before any of it is stored, and the blocks wait for the slowest. So somewhat less than v4 at 64 KB, where
// two rows share an SM.
#ifndef COURSE_EMULATED
constexpr int MAX_PARTS = 8;

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    layernorm_cluster_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int n, int vectors,
                             int part, float eps) {  // part: vectors of one block
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ float4 parts[MAX_PARTS * THREADS / 32];
    auto cluster = cg::this_cluster();
    cluster.barrier_arrive();  // a block that has not started has no shared memory to write to; loads need not wait
    const int blocks = cluster.num_blocks(), rank = cluster.block_rank(), warps = blockDim.x / 32;
    const int lane = threadIdx.x % 32, slot = rank * warps + threadIdx.x / 32;
    const int64_t row = blockIdx.x / blocks;
    const Share share = {n, rank * part + int(threadIdx.x), int(blockDim.x), min(vectors, (rank + 1) * part), true};
    uint4 v[K];
    share.load(v, x + row * n);
    const Stats mine = stats_of<T>(v, share, lanes_sum(count_of<T, K>(share)));
    cluster.barrier_wait();
    if (lane < blocks)  // lane i writes to block i
        *cluster.map_shared_rank(&parts[slot], lane) = make_float4(mine.mean, mine.m2, mine.count, 0);
    cluster.sync();  // after it no block accesses another's memory, so a block may exit
    const Stats all = merge_all(parts, blocks * warps, n);
    const float r = 1 / sqrtf(all.m2 / n + eps);
    again(v);
    store_share<T>(v, w, b, all.mean, r, y + row * n, share);
    if (rank == 0 && threadIdx.x == 0) mean[row] = all.mean, rstd[row] = r;
#endif
}

template <typename T>
void layernorm_cluster(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                       float eps, cudaStream_t stream) {
    course::require(has_clusters(), "layernorm_cluster needs a GPU with thread block clusters, sm_90 or newer");
    course::require(N * sizeof(T) <= MAX_PARTS * THREADS * K * 16, "layernorm_cluster: rows of at most 512 KB");
    course::require(whole(x, w, b, y, N), "layernorm_cluster: rows begin and end at multiples of 16 bytes");
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
    const auto kernel = layernorm_cluster_kernel<T>;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, x, w, b, y, mean, rstd, int(N), vectors, part, eps));
}
#endif

// The rest: rows past 512 KB (64 KB without clusters). Each thread merges statistics of four vectors at a time. The
// second read begins at the row's end, since the caches still hold what was read last.
template <typename T>
__global__ void __launch_bounds__(512) layernorm_rest_kernel(const T* x, const T* w, const T* b, T* y, float* mean,
                                                             float* rstd, int64_t N, float eps, bool whole) {
    __shared__ float4 parts[16];
    constexpr int64_t CHUNK = 512 * 4 * VEC<T>;  // elements, so that offsets within a chunk fit an int
    x += blockIdx.x * N, y += blockIdx.x * N;
    uint4 v[4];
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
        share.load(v, x + start);
        store_share<T>(v, w + start, b + start, all.mean, r, y + start, share);
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
    if (bytes <= 65536) return layernorm_registers(x, w, b, y, mean, rstd, M, N, eps, stream);
#ifndef COURSE_EMULATED
    if (bytes <= 1 << 19 && M < (1 << 28) && whole(x, w, b, y, N) && has_clusters())
        return layernorm_cluster(x, w, b, y, mean, rstd, M, N, eps, stream);
#endif
    if (no_rows(M, N)) return;
    layernorm_rest_kernel<<<M, 512, 0, stream>>>(x, w, b, y, mean, rstd, N, eps, whole(x, w, b, y, N));
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "layernorm_registers_float32", layernorm_registers<float>);
    bind(m, "layernorm_registers_bfloat16", layernorm_registers<bf16>);
    bind(m, "layernorm_lanes_float32", layernorm_lanes<float>);
    bind(m, "layernorm_lanes_bfloat16", layernorm_lanes<bf16>);
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
    if (bytes <= 65536) found.push_back({"v4 registers", layernorm_registers<T>});
    if (bytes <= 2048) found.push_back({"v5 lanes", layernorm_lanes<T>});
#ifndef COURSE_EMULATED
    if (bytes <= 1 << 19 && bytes % 16 == 0 && has_clusters()) found.push_back({"v6 cluster", layernorm_cluster<T>});
#endif
    found.push_back({"layernorm", layernorm<T>});
    return found;
}

int main() try {
    for (int64_t n : {1, 127, 1037, 1048}) run(rungs<float>(n), 37, n), run(rungs<bf16>(n), 37, n);
    if (course::small()) return 0;
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
