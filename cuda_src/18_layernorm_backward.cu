// LayerNorm backward: one sum along the row, one down the column
// ==============================================================
//
// With x_hat = (x - mean) * rstd and g = dy * w, from what the forward saved (mean, rstd):
//     dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g))     means along the row
//     dw = sum(dy * x_hat), db = sum(dy)                      sums down the column
// It has to read dy and x and to write dx, 3MN elements. On an H200 (4.2 TB/s) 8192 x 8192 in bf16 (403 MB) cannot
// take less than 0.096 ms. For dx blocks should own rows, for dw and db columns: two kernels move 5MN.
//
// You will be able to: sum along rows and down columns from one read; make a sum over blocks deterministic.
//
// Sources: Ba, Kiros and Hinton, "Layer normalization", 2016; CUDA C++ programming guide, "Asynchronous data copies",
// "Thread block clusters", "Distributed shared memory".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o layernorm_backward
//           cuda_src/18_layernorm_backward.cu
// Run:      ./layernorm_backward                          (checks every version, then times them all)
// No GPU:   python3 course.py run 18_layernorm_backward  (emulated and checked against PyTorch; v4 needs its GPU)
// Time it:  python3 course.py bench 18_layernorm_backward
#include "18_layernorm_backward.cuh"  // v1, and what a thread does with its columns

#ifndef COURSE_EMULATED
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTERS  // older GPUs, and the emulator, have none: backward_kernel is not launched as one there
#endif

// v2. New: one kernel, as many blocks as run at once, each with many rows. Each block's part of dw and db stays in
// fp32 registers from the first row to the last. A second kernel adds the blocks' sums, in a fixed order. cp.async
// loads the next rows during the work on this one, every thread its own vectors. One barrier combines the two sums of
// a row. They alternate between two places, so that no second barrier is needed. Predicted: 3MN; and for 132 blocks at
// N = 8192 another 17 MB of partial sums through L2, 4% of the rest.
//
// v3. New: a short row (to 2 KB) belongs to a warp, and needs no barrier. Predicted: the speed that v2 has for long
// rows, since a short row costs the latency of a warp and not of a block.
//
// v4. New: a long row is shared by the blocks of a cluster, which write their sums into each other's shared memory.
// Predicted: 3MN to 128 KB per row (256 KB where the GPU allows 16 blocks a cluster). Without clusters the registers
// of a block end at 16 KB.
enum Meet { WARP, BLOCKWIDE, CLUSTER };
constexpr int STAGES = 3;  // rows of dy and x in flight
constexpr int MAX_PARTS = 16;

template <typename T, int K, Meet MEET>
__global__ void __launch_bounds__(MEET == WARP ? 256 : 512)
    backward_kernel(const Task<T> task, int vectors, int part) {  // part: vectors of one block of a cluster
    const int64_t M = task.M;
    const int n = int(task.N);
    extern __shared__ uint4 slots[];
    __shared__ float2 sums[2][MEET == CLUSTER ? MAX_PARTS * 16 : 16];
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
    int parts = 1, rank = 0;
#ifdef CLUSTERS
    if constexpr (MEET == CLUSTER) {
        cg::this_cluster().barrier_arrive();  // waited for before the first write to another block
        parts = cg::this_cluster().num_blocks(), rank = cg::this_cluster().block_rank();
    }
#endif
    const int64_t group = MEET == WARP ? blockIdx.x * warps + warp : blockIdx.x / parts;
    const int64_t step = MEET == WARP ? gridDim.x * warps : gridDim.x / parts;
    const Share share = MEET == WARP ? Share{n, lane, 32, vectors, true}
                                     : Share{n, rank * part + int(threadIdx.x), int(blockDim.x),
                                             min(vectors, (rank + 1) * part), true};
    const Rows<T, K> rows = {slots, task.dy, task.x, share};
    for (int stage = 0; stage < STAGES; stage++) rows.fetch(stage, group + stage * step, group + stage * step < M);
    uint4 scale[K], d[K], v[K];
    share.load(scale, task.w);
    float dw[K][VEC<T>] = {}, db[K][VEC<T>] = {};
    float next_mean = group < M ? task.mean[group] : 0, next_rstd = group < M ? task.rstd[group] : 0;
#ifdef CLUSTERS
    if constexpr (MEET == CLUSTER) cg::this_cluster().barrier_wait();
#endif
    int turn = 0;
    for (int64_t row = group; row < M; row += step, turn++) {
        const float m = next_mean, r = next_rstd;
        if (row + step < M) next_mean = task.mean[row + step], next_rstd = task.rstd[row + step];
        __pipeline_wait_prior(STAGES - 1);
        const int stage = turn % STAGES;
        rows.take(d, 2 * stage), rows.take(v, 2 * stage + 1);
        float2 all = accumulate<T>(d, v, scale, m, r, dw, db);
        if constexpr (MEET == BLOCKWIDE) {
            if (lane == 0) sums[turn % 2][warp] = all;
            __syncthreads();
        }
#ifdef CLUSTERS
        if constexpr (MEET == CLUSTER) {
            if (lane < parts) *cg::this_cluster().map_shared_rank(&sums[turn % 2][rank * warps + warp], lane) = all;
            cg::this_cluster().sync();  // after the last one no block accesses another's memory
        }
#endif
        rows.fetch(stage, row + STAGES * step, row + STAGES * step < M);
        if constexpr (MEET != WARP) {
            all = {0, 0};
            for (int i = lane; i < parts * warps; i += 32) all.x += sums[turn % 2][i].x, all.y += sums[turn % 2][i].y;
            all = {lanes_sum(all.x), lanes_sum(all.y)};
        }
        again(d), again(v);
        store_dx<T>(d, v, scale, m, r, {all.x / n, all.y / n}, task.dx + row * n, share);
    }
    if constexpr (MEET == WARP) {  // the block's warps first add up among themselves, where their rows were
        __pipeline_wait_prior(0);
        __syncthreads();
        float* block = reinterpret_cast<float*>(slots);
        for (int i = 0; i < warps; i++) {
            if (i == warp) add_to<T>(block, n, i == 0, dw, db, share);
            __syncthreads();
        }
        for (int i = threadIdx.x; i < 2 * n; i += blockDim.x)
            task.partials[(i < n ? blockIdx.x : gridDim.x + blockIdx.x) * int64_t(n) + (i < n ? i : i - n)] = block[i];
    } else {
        add_to<T>(task.partials + group * n, step * n, true, dw, db, share);
    }
}

// [blocks, N] of dw, then of db, in fp32 -> [N] each. A block adds up 32 columns, warp by warp every 32nd row.
template <typename T>
__global__ void add_partials_kernel(const float* partials, T* dw, T* db, int64_t blocks, int64_t N) {
    __shared__ float parts[32][32];
    const int64_t column = blockIdx.x * int64_t(32) + threadIdx.x;
    const float* from = partials + blockIdx.y * blocks * N + column;
    float sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.y; i < blocks; i += 32) sum += column < N ? from[i * N] : 0;
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= N) return;
    sum = 0;
    for (int i = 0; i < 32; i++) sum += parts[i][threadIdx.x];
    (blockIdx.y == 0 ? dw : db)[column] = narrow<T>(sum);
}

#ifndef COURSE_EMULATED
template <typename T, int K, Meet MEET>
int clusters_at_once(const Plan& plan, cudaLaunchConfig_t& config, cudaLaunchAttribute& cluster) {
    if (!has_clusters()) return 0;
    int count = 0;
    const auto kernel = backward_kernel<T, K, MEET>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));  // 16 blocks
    config.gridDim = dim3(unsigned(plan.parts));
    config.blockDim = dim3(unsigned(plan.threads));
    config.dynamicSmemBytes = size_t(plan.bytes);
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(plan.parts), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess) return count;
    (void)cudaGetLastError();
    return 0;
}
#endif

template <typename T, int K, Meet MEET>
Plan plan(int64_t M, int64_t N) {
    const int64_t vectors = course::ceil_div(N, VEC<T>), longest = K * (MEET == WARP ? 32 : 512);
    Plan plan;
    if (N % VEC<T> != 0 || vectors > (MEET == CLUSTER ? MAX_PARTS : 1) * longest) return plan;
    if (MEET == CLUSTER)
        for (plan.parts = 2; vectors > plan.parts * longest;) plan.parts *= 2;
    plan.part = int(course::ceil_div(vectors, plan.parts));
    plan.threads = MEET == WARP ? 256 : 32 * int(course::ceil_div(plan.part, 32 * K));
    plan.bytes = 2 * STAGES * K * plan.threads * 16;
    const auto kernel = backward_kernel<T, K, MEET>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.bytes));
    int count = 0;
    if (MEET != CLUSTER) {
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, plan.threads, plan.bytes));
        count = std::min(count, 4) * course::sms();  // more blocks, more partial sums
    }
#ifndef COURSE_EMULATED
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster = {};
    if (MEET == CLUSTER) count = clusters_at_once<T, K, MEET>(plan, config, cluster);
#endif
    plan.groups = std::min<int64_t>(course::ceil_div(M, MEET == WARP ? 8 : 1), count);
    return plan;
}

template <typename T, int K, Meet MEET>
void launch(const Task<T>& task, cudaStream_t stream) {
    const Plan p = plan<T, K, MEET>(task.M, task.N);
    course::require(p.groups > 0, "layernorm_backward: this rung has no launch for these rows; use layernorm_backward");
    course::require(whole_vectors<T>(task.dy, task.x, task.N) && whole_vectors<T>(task.w, task.dx, task.N),
                    "layernorm_backward: 16-byte vectors need arrays that begin at a multiple of 16 bytes");
    const int vectors = int(task.N / VEC<T>);
    if constexpr (MEET != CLUSTER) {
        backward_kernel<T, K, MEET><<<p.groups, p.threads, p.bytes, stream>>>(task, vectors, p.part);
        CUDA_CHECK(cudaGetLastError());
    }
#ifndef COURSE_EMULATED
    if constexpr (MEET == CLUSTER) {
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute cluster = {};
        clusters_at_once<T, K, MEET>(p, config, cluster);
        config.gridDim.x = unsigned(p.groups * p.parts);
        config.stream = stream;
        CUDA_CHECK(cudaLaunchKernelEx(&config, backward_kernel<T, K, MEET>, task, vectors, p.part));
    }
#endif
    const dim3 grid(unsigned(course::ceil_div(task.N, 32)), 2), block(32, 32);
    add_partials_kernel<<<grid, block, 0, stream>>>(task.partials, task.dw, task.db, p.groups, task.N);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void layernorm_backward_persistent(const Task<T>& task, cudaStream_t stream) {
    launch<T, 2, BLOCKWIDE>(task, stream);
}

template <typename T>
void layernorm_backward_warp(const Task<T>& task, cudaStream_t stream) {
    const int64_t bytes = task.N * sizeof(T);
    if (bytes <= 512) return launch<T, 1, WARP>(task, stream);
    if (bytes <= 1024) return launch<T, 2, WARP>(task, stream);
    launch<T, 4, WARP>(task, stream);
}

#ifndef COURSE_EMULATED
template <typename T>
void layernorm_backward_cluster(const Task<T>& task, cudaStream_t stream) {
    launch<T, 2, CLUSTER>(task, stream);
}
#endif

// The one to call: every M and N, each row length by the rung that suits it; v1 where rows are no whole vectors.
template <typename T>
void layernorm_backward(const Task<T>& t, cudaStream_t stream) {
    const int64_t bytes = t.N * sizeof(T);
    const bool whole = whole_vectors<T>(t.dy, t.x, t.N) && whole_vectors<T>(t.w, t.dx, t.N);
    if (t.M == 0 || t.N == 0 || !whole) return layernorm_backward_naive(t, stream);
    if (bytes <= 2048) return layernorm_backward_warp(t, stream);
    if (bytes <= 16384) return layernorm_backward_persistent(t, stream);
#ifndef COURSE_EMULATED
    if (plan<T, 2, CLUSTER>(t.M, t.N).groups > 0) return layernorm_backward_cluster(t, stream);
#endif
    layernorm_backward_naive(t, stream);
}

// Floats of scratch that any of these may want on [M, N].
template <typename T>
int64_t layernorm_backward_scratch(int64_t M, int64_t N, cudaStream_t) {
    if (M == 0 || N == 0) return 0;
    int64_t groups = std::max(plan<T, 1, WARP>(M, N).groups, plan<T, 2, WARP>(M, N).groups);
    groups = std::max({groups, plan<T, 4, WARP>(M, N).groups, plan<T, 2, BLOCKWIDE>(M, N).groups});
#ifndef COURSE_EMULATED
    groups = std::max(groups, plan<T, 2, CLUSTER>(M, N).groups);
#endif
    return 2 * groups * N;
}

// A rung as Python calls it, with everything in the task one by one.
template <typename T, void (*RUNG)(const Task<T>&, cudaStream_t)>
void from_python(const T* dy, const T* x, const T* w, const float* mean, const float* rstd, T* dx, T* dw, T* db,
                 float* partials, int64_t M, int64_t N, cudaStream_t stream) {
    RUNG({dy, x, w, mean, rstd, dx, dw, db, partials, M, N}, stream);
}

COURSE_MODULE(m) {
    bind(m, "layernorm_backward_scratch_float32", layernorm_backward_scratch<float>);
    bind(m, "layernorm_backward_scratch_bfloat16", layernorm_backward_scratch<bf16>);
    bind(m, "layernorm_backward_naive_float32", from_python<float, layernorm_backward_naive<float>>);
    bind(m, "layernorm_backward_naive_bfloat16", from_python<bf16, layernorm_backward_naive<bf16>>);
    bind(m, "layernorm_backward_persistent_float32", from_python<float, layernorm_backward_persistent<float>>);
    bind(m, "layernorm_backward_persistent_bfloat16", from_python<bf16, layernorm_backward_persistent<bf16>>);
    bind(m, "layernorm_backward_warp_float32", from_python<float, layernorm_backward_warp<float>>);
    bind(m, "layernorm_backward_warp_bfloat16", from_python<bf16, layernorm_backward_warp<bf16>>);
#ifndef COURSE_EMULATED
    bind(m, "layernorm_backward_cluster_float32", from_python<float, layernorm_backward_cluster<float>>);
    bind(m, "layernorm_backward_cluster_bfloat16", from_python<bf16, layernorm_backward_cluster<bf16>>);
#endif
    bind(m, "layernorm_backward_float32", from_python<float, layernorm_backward<float>>);
    bind(m, "layernorm_backward_bfloat16", from_python<bf16, layernorm_backward<bf16>>);
}

#ifndef COURSE_EXTENSION
template <typename T>
void run(int64_t M, int64_t N, bool timed = false) {
    BackwardRungs<T> rungs = {{"v1 naive", layernorm_backward_naive<T>}};
    if (plan<T, 2, BLOCKWIDE>(M, N).groups) rungs.push_back({"v2 persistent", layernorm_backward_persistent<T>});
    if (plan<T, 4, WARP>(M, N).groups) rungs.push_back({"v3 warp", layernorm_backward_warp<T>});
#ifndef COURSE_EMULATED
    if (plan<T, 2, CLUSTER>(M, N).groups) rungs.push_back({"v4 cluster", layernorm_backward_cluster<T>});
#endif
    rungs.push_back({"layernorm_backward", layernorm_backward<T>});
    run_backward(rungs, M, N, layernorm_backward_scratch<T>(M, N, nullptr), timed);
}

int main() try {
    for (int64_t n : {1, 127, 264, 1048}) run<float>(19, n), run<bf16>(19, n);
    if (course::small()) return 0;
    run<float>(300, 16388), run<bf16>(300, 40008);
    for (auto [M, N] : {std::pair{32768, 256}, {32768, 1024}, {4096, 4096}, {8192, 8192}, {4096, 12672}, {4096, 32768},
                        {2048, 131072}})
        run<bf16>(M, N, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
