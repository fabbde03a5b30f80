// Parallel reduction, continued: every byte in flight, and the blocks' sums added in the same launch
// ==================================================================================================
//
// 04_parallel_reduction ends with blocks that add quickly and have too few loads in flight. The sum of 2^28 floats
// reads 1 GiB, 0.26 ms at an H200's 4.2 TB/s. The sum of 2^20 floats reads 4 MiB, 1 us: there the launches decide, at
// 2 to 3 us each. So v7 is about bytes in flight, and v8 to v10 are three ways to need one launch only.
//
// You will be able to: keep enough bytes in flight; reduce in one launch, with an atomic, a cooperative launch or a
// ticket.
//
// Sources: CUDA programming guide, "Memory Fence Functions" (the last block's ticket) and "Grid Synchronization";
// D. Merrill's CUB is the peer.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o reduction cuda_src/07_reduction_one_launch.cu
// Run:      ./reduction                                     (checks every version, then times them all)
// No GPU:   python3 course.py run 07_reduction_one_launch  (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 07_reduction_one_launch
#include <cooperative_groups.h>

#include "course.cuh"
#ifndef COURSE_EMULATED
#include <cub/device/device_reduce.cuh>
#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffff;  // every lane takes part in a shuffle

// As in v6: lanes read each other's registers, the warps' sums pass through shared memory, the first warp adds them.
__device__ float warp_sum(float mine) {
#pragma unroll
    for (int s = 16; s > 0; s /= 2) mine += __shfl_down_sync(ALL, mine, s);
    return mine;  // right in lane 0
}

__device__ float block_sum(float mine) {
    __shared__ float of_warp[WARPS];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mine = warp_sum(mine);
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    return warp == 0 ? warp_sum(lane < WARPS ? of_warp[lane] : 0.0f) : 0.0f;  // right in thread 0
}

// [n] floats -> one. `scratch` has room for SCRATCH floats: a block's sum each, or what CUB wants.
constexpr int64_t SCRATCH = 16384;

// v7. New: 16 bytes a load, and eight loads a thread before the first use: 128 bytes per thread, 128 KB per SM. The
// grid is no larger than the machine, and its threads loop over x (grid-stride). So a block adds up once for its whole
// share, not once for every 512 elements. The attribute __launch_bounds__ tells the compiler how many blocks per SM
// shall hold, hence that a thread may have 64 registers. Without it the compiler saves registers: it adds before it has
// issued all loads. Predicted: a warp adds 1024 floats with 8 loads of 16 sectors and 32 additions, so only memory is a
// limit: its full speed.
constexpr int LOADS = 8, BLOCKS_AN_SM = 4;

__device__ float thread_sum(const float* x, int64_t n) {
    // A float4 begins at a multiple of 16 bytes: elements before the first and after the last are read singly.
    const int64_t head = min(int64_t(-(reinterpret_cast<uintptr_t>(x) / sizeof(float)) % 4), n);
    const int64_t quads = (n - head) / 4, tail = head + 4 * quads;
    const float4* x4 = reinterpret_cast<const float4*>(x + head);
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};  // four chains of additions instead of one
    const auto add = [&](float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
    int64_t i = int64_t(blockIdx.x) * (THREADS * LOADS) + threadIdx.x;
#pragma unroll 1
    for (; i < quads; i += int64_t(gridDim.x) * (THREADS * LOADS)) {
        float4 v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++)  // New: ask for all, also where some lie past the end, ...
            v[k] = i + k * THREADS < quads ? x4[i + k * THREADS] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < LOADS; k++) add(v[k]);  // ... then add
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) sum.x += x[threadIdx.x];
        if (tail + threadIdx.x < n) sum.y += x[tail + threadIdx.x];
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

int64_t full_grid(int64_t n) {
    const int64_t pieces = course::ceil_div(n, 4 * THREADS * LOADS);
    return std::clamp<int64_t>(pieces, 1, BLOCKS_AN_SM * course::sms());
}

__global__ __launch_bounds__(THREADS, BLOCKS_AN_SM)
void sum_vectorized_kernel(const float* x, float* sums, int64_t n) {
    const float sum = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

void sum_vectorized(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    const int64_t blocks = full_grid(n);
    sum_vectorized_kernel<<<blocks, THREADS, 0, stream>>>(x, scratch, n);
    sum_vectorized_kernel<<<1, THREADS, 0, stream>>>(scratch, sum, blocks);
    CUDA_CHECK(cudaGetLastError());
}

// v8. New: one atomic addition a block, so no second launch; but the sum has to be zero before. Predicted: 2 us less
// than v7, and the fastest of all. About 500 additions to one address are hidden under the loads of other blocks, and
// no thread waits for their result. A memset of 4 bytes takes the second launch's place, and is over while the kernel
// is being launched. The order of the blocks, and with it the rounding, differs in every run.
__global__ __launch_bounds__(THREADS, BLOCKS_AN_SM)
void sum_atomic_kernel(const float* x, float* sum, int64_t n) {
    const float mine = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) atomicAdd(sum, mine);
}

void sum_atomic(const float* x, float*, float* sum, int64_t n, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(float), stream));
    sum_atomic_kernel<<<full_grid(n), THREADS, 0, stream>>>(x, sum, n);
    CUDA_CHECK(cudaGetLastError());
}

// v9. New: the blocks of a cooperative launch are all resident, so that they can wait for each other. One launch, and
// the same sum in every run. Predicted: half a microsecond to 1 us more than v8. After the last block's last load
// comes a chain of round trips to L2. The block writes and fences its sum, and counts itself in. Then the first block
// sees that all are there and reads the sums.
__global__ __launch_bounds__(THREADS, BLOCKS_AN_SM)
void sum_cooperative_kernel(const float* x, float* sums, float* sum, int64_t n) {
    const float mine = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) sums[blockIdx.x] = mine;
    cooperative_groups::this_grid().sync();  // New
    if (blockIdx.x != 0) return;
    float of_blocks = 0.0f;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) of_blocks += sums[i];
    of_blocks = block_sum(of_blocks);
    if (threadIdx.x == 0) *sum = of_blocks;
}

void sum_cooperative(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    int blocks_an_sm = 0;  // a grid that is not resident as a whole would wait for ever, and is refused
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, sum_cooperative_kernel, THREADS, 0));
    const int64_t blocks = std::min<int64_t>(full_grid(n), int64_t(blocks_an_sm) * course::sms());
    void* arguments[] = {&x, &scratch, &sum, &n};
    CUDA_CHECK(cudaLaunchCooperativeKernel(sum_cooperative_kernel, dim3(blocks), dim3(THREADS), arguments, 0, stream));
}

// v10. New: no block waits. Each block takes a ticket when its sum is written. The block with the last ticket adds all
// sums, in the order of the blocks. The function atomicInc wraps to 0 at the last ticket, so `ticket` starts at 0 and
// is 0 again afterwards. It is cleared once and not before every launch, and no other stream may use it. Predicted:
// v9's time. The last block's time decides, and its chain is as long: sum, fence, ticket, sums. So v8's memset is
// cheaper than this tail. In return v9 and v10 give the same sum in every run.
__global__ __launch_bounds__(THREADS, BLOCKS_AN_SM)
void sum_last_block_kernel(const float* x, float* sums, unsigned* ticket, float* sum, int64_t n) {
    __shared__ bool last;
    const float mine = block_sum(thread_sum(x, n));
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = mine;
        __threadfence();  // New: a block that sees the ticket sees the sum
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    float of_blocks = 0.0f;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) of_blocks += __ldcg(sums + i);  // past L1
    of_blocks = block_sum(of_blocks);
    if (threadIdx.x == 0) *sum = of_blocks;
}

void sum_last_block(const float* x, float* scratch, unsigned* ticket, float* sum, int64_t n, cudaStream_t stream) {
    sum_last_block_kernel<<<full_grid(n), THREADS, 0, stream>>>(x, scratch, ticket, sum, n);
    CUDA_CHECK(cudaGetLastError());
}

#ifndef COURSE_EMULATED
void cub_sum(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    size_t bytes = 0;
    CUDA_CHECK(cub::DeviceReduce::Sum(nullptr, bytes, x, sum, n, stream));
    course::require(bytes <= SCRATCH * sizeof(float), "CUB wants more scratch than SCRATCH floats");
    CUDA_CHECK(cub::DeviceReduce::Sum(scratch, bytes, x, sum, n, stream));
}
#endif

using Launcher = void (*)(const float*, float*, float*, int64_t, cudaStream_t);
constexpr std::pair<const char*, Launcher> LADDER[] = {
    {"sum_vectorized", sum_vectorized}, {"sum_atomic", sum_atomic}, {"sum_cooperative", sum_cooperative},
#ifndef COURSE_EMULATED
    {"cub_sum", cub_sum},
#endif
};

COURSE_MODULE(m) {
    for (const auto& [name, launcher] : LADDER) bind(m, name, launcher);
    bind(m, "sum_last_block", sum_last_block);
}

#ifndef COURSE_EXTENSION
int main() try {
    // Random numbers, repeated: making 2^28 takes longer than all the rest. Their mean is 1, so that the sum does not
    // cancel, and a number that is lost is more than rounding.
    const int64_t part = course::small() ? 20'011 : 1 << 24, n = course::small() ? part : 16 * part;
    const std::vector<float> host = course::random(part, 1, 1.0f);
    course::Buffer<float> x(n), scratch(SCRATCH), sum(1);
    course::Buffer<unsigned> ticket(std::vector<unsigned>{0});
    for (int64_t i = 0; i < n; i += part)
        CUDA_CHECK(cudaMemcpy(x + i, host.data(), part * sizeof(float), cudaMemcpyHostToDevice));
    using Sum = std::function<void(const float*, int64_t, cudaStream_t)>;
    std::vector<std::pair<const char*, Sum>> ladder;
    for (const auto& [name, f] : LADDER)
        ladder.push_back({name, [&, f = f](const float* a, int64_t m, cudaStream_t s) { f(a, scratch, sum, m, s); }});
    ladder.push_back({"sum_last_block", [&](const float* a, int64_t m, cudaStream_t s) {
                          sum_last_block(a, scratch, ticket, sum, m, s);
                      }});
    for (int64_t size : {n / 256, n / 16, n}) {
        std::vector<course::Version> versions;
        for (const auto& [name, launch] : ladder) {
            // A start that is no multiple of 16 bytes and an end that no block divides; then everything.
            for (const auto& [from, m] : {std::pair<int64_t, int64_t>{3, size - 8}, {0, size}}) {
                double expected = 0.0;
                for (int64_t i = from; i < from + m; i++) expected += host[i % part];
                sum.poison();
                launch(x + from, m, nullptr);
                course::check(name, sum.host(), std::vector<double>{expected}, 1e-6);
            }
            versions.push_back({name, [&x, launch = launch, size](cudaStream_t s) { launch(x, size, s); }});
        }
        std::printf("%lld floats\n", (long long)size);
        course::time_versions(versions, {.bytes = 4.0 * size, .flops = double(size)});
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
