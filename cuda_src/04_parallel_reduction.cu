// Parallel reduction: many threads, one sum
// =========================================
//
// sum = x[0] + ... + x[n-1] reads 4n bytes, does n additions and writes 4 bytes. On an H200 (4.2 TB/s, 132 SMs) 2^28
// floats cannot take less than 0.26 ms, and each SM has to take in 18 bytes a clock. The instructions per element
// decide whether it can. An SM issues 4 warp instructions a clock, and 32 floats are 128 bytes, 7 clocks' worth of
// memory. So 32 floats may cost 28 instructions. v1 spends about 80, and 9 barriers; v6 some 20 and one barrier. While
// a block adds, it has no loads in flight: a thread of v1 to v3 loads 4 bytes in all, 8 KB per SM. Little's law wants
// 25 KB in flight all the time (4.2 TB/s at 800 ns). 07_reduction_one_launch corrects that.
//
// The ladder down to v5 is M. Harris, "Optimizing Parallel Reduction in CUDA" (2007), with what has changed since:
// warps no longer run in step (Volta's independent thread scheduling), and registers are read by shuffles (Kepler).
//
// You will be able to: write a tree reduction without divergence or bank conflicts; sum with warp shuffles; say what
// each barrier is for.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o reduction cuda_src/04_parallel_reduction.cu
// Run:      ./reduction                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 04_parallel_reduction  (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 04_parallel_reduction
#include "course.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffff;  // every lane takes part in a shuffle

// Blocks cannot wait for each other, but launches on a stream do: each level sums pieces of `per_block` elements,
// until one is left. The levels after the first are short: n / 256 elements, n / 65536, ... Their sums lie side by
// side in `scratch`, which has room for n / 255 + 8 floats.
template <typename Kernel>
void in_levels(Kernel kernel, int per_block, const float* x, float* scratch, float* sum, int64_t n,
               cudaStream_t stream) {
    for (;;) {
        const int64_t blocks = std::max<int64_t>(course::ceil_div(n, per_block), 1);  // n = 0: one block writes 0
        float* sums = blocks == 1 ? sum : scratch;
        kernel<<<blocks, THREADS, 0, stream>>>(x, sums, n);
        CUDA_CHECK(cudaGetLastError());
        if (blocks == 1) return;
        x = sums;
        n = blocks;
        scratch += blocks;
    }
}

// v1. A binary tree in shared memory: in step s, the threads at multiples of 2s add the element s further on. Sectors
// and banks are perfect: 4 sectors a request, 1 wavefront a shared access. But the working threads are spread over all
// warps, so all 8 warps go through all 8 steps, in the end for one lane of 32 (divergence). Predicted: a sixth of the
// memory's speed. A round of blocks loads 8 KB. The load takes 0.8 us. At 80 instructions for each of 64 warps, the
// additions take 0.7 us more.
struct Divergent {
    static __device__ void add_up(float* partial) {  // [THREADS], the sum comes to be in partial[0]
        const unsigned t = threadIdx.x;
        for (unsigned s = 1; s < THREADS; s *= 2) {
            if (t % (2 * s) == 0) partial[t] += partial[t + s];
            __syncthreads();
        }
    }
};

// v1 to v5 are this kernel around their tree. A block owns THREADS * PER_THREAD neighbours.
template <typename Tree, int PER_THREAD>
__global__ void sum_tree_kernel(const float* x, float* sums, int64_t n) {  // [n] -> [gridDim.x]
    __shared__ float partial[THREADS];
    const int64_t i = int64_t(blockIdx.x) * (THREADS * PER_THREAD) + threadIdx.x;
    float mine = i < n ? x[i] : 0.0f;
    if (PER_THREAD == 2) mine += i + THREADS < n ? x[i + THREADS] : 0.0f;  // New in v4
    partial[threadIdx.x] = mine;
    __syncthreads();
    Tree::add_up(partial);
    if (threadIdx.x == 0) sums[blockIdx.x] = partial[0];
}

void sum_divergent(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_tree_kernel<Divergent, 1>, THREADS, x, scratch, sum, n, stream);
}

// v2. New: the first threads do the work, so that whole warps are idle and skip a step. But thread t now works at 2st.
// With s = 1 neighbours are 2 words apart and share 16 banks two by two; with s = 4 and s = 8 eight lanes meet in each
// bank. Predicted: a third less to issue than v1, but up to 8 wavefronts where 1 would do: a small gain.
struct Strided {
    static __device__ void add_up(float* partial) {
        for (unsigned s = 1; s < THREADS; s *= 2) {
            const unsigned left = 2 * s * threadIdx.x;  // New
            if (left < THREADS) partial[left] += partial[left + s];
            __syncthreads();
        }
    }
};

void sum_strided(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_tree_kernel<Strided, 1>, THREADS, x, scratch, sum, n, stream);
}

// v3. New: the tree the other way round. Thread t adds the element half an array further on, so the working threads
// are the first ones and their words are neighbours. Predicted: no bank conflict, 1 wavefront a shared access, and a
// quarter of the memory's speed: 8 KB a round of 0.8 us of latency and 0.3 us of barriers.
struct Sequential {
    static __device__ void add_up(float* partial) {
        const unsigned t = threadIdx.x;
        for (unsigned s = THREADS / 2; s > 0; s /= 2) {  // New
            if (t < s) partial[t] += partial[t + s];
            __syncthreads();
        }
    }
};

void sum_sequential(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_tree_kernel<Sequential, 1>, THREADS, x, scratch, sum, n, stream);
}

// v4. New: the first addition happens on the way in (PER_THREAD = 2); in v3 half of the threads only load. Predicted:
// little more than half of v3's time, for there are half as many blocks and each costs the same.
void sum_first_add(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_tree_kernel<Sequential, 2>, 2 * THREADS, x, scratch, sum, n, stream);
}

// v5. New: one warp adds the last 64 elements, which needs no barrier of the block, and the steps are unrolled. Older
// texts leave out any barrier here ("a warp runs in step") and declare the array volatile. Since Volta that is a race:
// lanes may drift apart. __syncwarp() holds them together, once between reading and writing and once after. Predicted:
// 3 barriers of the block instead of 9, so a tenth or two off.
struct Unrolled {
    static __device__ void add_up(float* partial) {
        const unsigned t = threadIdx.x;
#pragma unroll
        for (unsigned s = THREADS / 2; s > 32; s /= 2) {
            if (t < s) partial[t] += partial[t + s];
            __syncthreads();
        }
        if (t >= 32) return;
        float mine = partial[t];
#pragma unroll
        for (unsigned s = 32; s > 0; s /= 2) {  // New
            mine += partial[t + s];             // what lanes past s add is never read
            __syncwarp();                       // every lane has read before one writes
            partial[t] = mine;
            __syncwarp();                       // and every lane has written before one reads
        }
    }
};

void sum_unrolled(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_tree_kernel<Unrolled, 2>, 2 * THREADS, x, scratch, sum, n, stream);
}

// v6. New: lanes read each other's registers. 5 shuffles make one sum of a warp, without shared memory. The 8 warps'
// sums pass through shared memory once, with one barrier, and the first warp adds them the same way.
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

// Predicted: half of the memory's speed. The bytes in flight are the limit, no longer the instructions. Two loads of 4
// bytes per thread are 16 KB per SM where 25 KB are wanted, and none while a block adds, ends and the next one starts.
__global__ void sum_shuffle_kernel(const float* x, float* sums, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * (2 * THREADS) + threadIdx.x;
    const float a = i < n ? x[i] : 0.0f;
    const float b = i + THREADS < n ? x[i + THREADS] : 0.0f;
    const float sum = block_sum(a + b);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

void sum_shuffle(const float* x, float* scratch, float* sum, int64_t n, cudaStream_t stream) {
    in_levels(sum_shuffle_kernel, 2 * THREADS, x, scratch, sum, n, stream);
}

using Launcher = void (*)(const float*, float*, float*, int64_t, cudaStream_t);
constexpr std::pair<const char*, Launcher> LADDER[] = {
    {"sum_divergent", sum_divergent}, {"sum_strided", sum_strided},   {"sum_sequential", sum_sequential},
    {"sum_first_add", sum_first_add}, {"sum_unrolled", sum_unrolled}, {"sum_shuffle", sum_shuffle}};

COURSE_MODULE(m) {
    for (const auto& [name, launcher] : LADDER) bind(m, name, launcher);
}

#ifndef COURSE_EXTENSION
int main() try {
    // Random numbers, repeated: making 2^28 takes longer than all the rest. Their mean is 1, so that the sum does not
    // cancel, and a number that is lost is more than rounding.
    const int64_t part = course::small() ? 20'011 : 1 << 24, n = course::small() ? part : 16 * part;
    const std::vector<float> host = course::random(part, 1, 1.0f);
    course::Buffer<float> x(n), scratch(n / 255 + 8), sum(1);
    for (int64_t i = 0; i < n; i += part)
        CUDA_CHECK(cudaMemcpy(x + i, host.data(), part * sizeof(float), cudaMemcpyHostToDevice));
    std::vector<course::Version> versions;
    for (const auto& [name, launch] : LADDER) {
        for (int64_t m : {part - 5, n}) {  // an end that no block divides, then everything
            double expected = 0.0;
            for (int64_t i = 0; i < m; i++) expected += host[i % part];
            sum.poison();
            launch(x, scratch, sum, m, nullptr);
            course::check(name, sum.host(), std::vector<double>{expected}, 1e-6);
        }
        versions.push_back({name, [&, n, launch = launch](cudaStream_t s) { launch(x, scratch, sum, n, s); }});
    }
    course::time_versions(versions, {.bytes = 4.0 * n, .flops = double(n)});
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
