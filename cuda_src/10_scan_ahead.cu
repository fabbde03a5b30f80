// Prefix sums in one pass, the next tile under way
// ================================================
//
// 09_scan_one_pass moves the least there is to move, 2n: 0.51 ms for 2^28 floats at 4.2 TB/s. It still takes longer
// than a copy. While a tile waits for its predecessors, it holds registers and has no loads in flight. Here the kernel
// is persistent: each block takes every gridDim.x-th tile. The rungs remove the wait:
//
//     look_back_waves   a tile's predecessors are the last tiles of the other blocks: one look, of known width
//     look_back_ahead   the next tile is loaded, and its sum published, before this one is finished
//
// T is float, or unsigned for int32: the same sums in two's complement, where overflow wraps as it does in PyTorch.
//
// You will be able to: load the next tile during the work on this one; get the same bits in every run.
//
// Source of what they build on: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o scan cuda_src/10_scan_ahead.cu
// Run:      ./scan                                        (checks every version, then times them all)
// No GPU:   python3 course.py run 10_scan_ahead          (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 10_scan_ahead
#include "scan_problem.cuh"
#include "scan_tile.cuh"
#include "copy_async.cuh"

#include <algorithm>

#ifndef COURSE_EMULATED
#include <cub/device/device_scan.cuh>
#endif

namespace {

// Called by one warp: the sum of the `window` tiles before `tile`, in the same order in every run. A lane requests all
// its words before it looks at the first, and reads a word again while it is EMPTY.
template <typename T>
__device__ T window_sum(const volatile Word* words, int64_t tile, int window) {
    constexpr int AT_ONCE = 5;  // 160 tiles: rung 2's 132 blocks on an H200 in one look, rung 1's 264 in two
    const int lane = threadIdx.x % 32;
    T sum = T(0);
    for (int first = lane; first < window + lane; first += AT_ONCE * 32) {
        Word word[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int back = first + k * 32 + 1;
            word[k] = back <= window && back <= tile ? words[tile - back] : Word(SUM) << 32;  // a sum of 0
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            while (unsigned(word[k] >> 32) == EMPTY) {
                __nanosleep(20);
                word[k] = words[tile - (first + k * 32 + 1)];
            }
            T value;
            from_bits(unsigned(word[k]), value);
            sum += value;
        }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    return sum;
}

// Rung 1. New: the grid is as large as the GPU and its blocks are persistent. The launch is cooperative: all blocks
// are resident, so all may wait for each other. Block b takes the tiles b, b + gridDim.x, ... It knows the prefix
// before its last tile, and since then gridDim.x tiles have followed: the window is the grid. With 4 blocks:
//
//     block        0    1    2    3
//     round 0      0    1  [ 2    3        tile 6 = prefix before tile 2, which block 2 knows from round 0,
//     round 1      4    5 ]  6    7                 + the sums of tiles 2, 3, 4, 5: the window
//
// No tile has to publish a prefix, none searches for one, and float sums are the same in every run. Predicted: no
// faster than 09's look_back, 80% of a copy. Two blocks an SM of 48 KB, and all wait for the slowest of their wave,
// where 09's drift apart.
template <typename T, int THREADS, int VECTORS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) waves_kernel(const T* x, T* y, Word* words, int64_t n) {
    using Part = Tile<T, THREADS, VECTORS>;
    __shared__ T shared_prefix;
    T prefix = T(0);  // warp 0's: the sum of all tiles before this one
    for (int64_t tile = blockIdx.x; tile * Part::SIZE < n; tile += gridDim.x) {
        Part part;
        part.load(x, tile, n);
        part.scan_fours();
        T tile_sum;
        const T before = warps_before<T, THREADS / 32>(part.sum(), tile_sum);
        if (threadIdx.x < 32) {
            if (threadIdx.x == 0) publish(words, tile, SUM, tile_sum);
            prefix += window_sum<T>(words, tile, gridDim.x);
            if (threadIdx.x == 0) shared_prefix = prefix;
        }
        part.scan();
        __syncthreads();
        part.store(y, tile, n, shared_prefix + before);
    }
}

// Rung 2. New: a ring of tiles in shared memory, filled by cp.async. Round i does three things. It adds up tile i + 1,
// which has arrived, and publishes that sum. It finishes tile i, whose predecessors' sums were published a round ago.
// It requests tile i + STAGES. So a sum has always been published in time, unless a block is a whole round late, and
// every SM always has a tile in flight. Every thread reads what it copied itself, so the ring needs no barrier: the
// only one of a round is for the warps' sums. Predicted: the speed of a copy. Shared memory is written once and read
// twice, 12 bytes for each 8 of HBM traffic. An SM moves about 18 bytes of HBM traffic a cycle. Its shared memory
// moves 128 bytes per cycle. What may cost time: all SMs store at once, and then all wait for their loads.
template <typename T, int THREADS, int VECTORS, int STAGES>
__global__ void __launch_bounds__(THREADS, 1) ahead_kernel(const T* x, T* y, Word* words, int64_t n) {
    using Part = Tile<T, THREADS, VECTORS>;
    static_assert(STAGES >= 3);
    extern __shared__ __align__(16) unsigned ring_smem[];  // [STAGES][Part::SIZE] of T
    __shared__ T totals[2][THREADS / 32], shared_prefix[2];  // of odd and of even rounds: one barrier keeps them apart
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t tiles = (n + Part::SIZE - 1) / Part::SIZE;
    const int rounds = int((tiles - blockIdx.x + gridDim.x - 1) / gridDim.x);
    const auto tile_of = [&](int round) { return blockIdx.x + int64_t(round) * gridDim.x; };
    const auto slot = [&](int round) { return reinterpret_cast<T*>(ring_smem) + round % STAGES * Part::SIZE; };
    const auto fetch = [&](int round) {
        if (round < rounds) Part::copy(slot(round), x, tile_of(round), n);
        __pipeline_commit();
    };
    Part part;
    const auto add_up = [&](int round) {
        __pipeline_wait_prior(STAGES - 2);
        if (round >= rounds) return;
        part.take(slot(round));
        part.scan_fours();
        const T sum = part.sum();
        if (lane == 0) totals[round % 2][warp] = sum;
    };
    T prefix = T(0);  // warp 0's: the sum of all tiles before this round's
    const auto publish_sum = [&](int round) {  // returns what comes before this warp
        T sums[1] = {lane < THREADS / 32 ? totals[round % 2][lane] : T(0)};
        warp_inclusive(sums);
        if (threadIdx.x == THREADS / 32 - 1) publish(words, tile_of(round), SUM, sums[0]);
        const T left = __shfl_sync(ALL, sums[0], warp > 0 ? warp - 1 : 0);
        return warp > 0 ? left : T(0);
    };

    for (int round = 0; round < STAGES - 1; round++) fetch(round);
    add_up(0);
    __syncthreads();
    T before = publish_sum(0);
    fetch(STAGES - 1);
    for (int round = 0; round < rounds; round++) {
        add_up(round + 1);
        if (warp == 0) {
            prefix += window_sum<T>(words, tile_of(round), gridDim.x);
            if (lane == 0) shared_prefix[round % 2] = prefix;
        }
        __syncthreads();
        const T next_before = round + 1 < rounds ? publish_sum(round + 1) : T(0);
        part.take(slot(round));
        fetch(round + STAGES);
        part.scan_fours();
        part.scan();
        part.store(y, tile_of(round), n, shared_prefix[round % 2] + before);
        before = next_before;
    }
}

// ---- Launchers. x, y: n elements; scratch: at least n / 512 + 1024 elements, at an address divisible by 8.

// `blocks` an SM, all of them resident: a cooperative launch that cannot promise that is an error.
template <typename T>
void scan(void (*kernel)(const T*, T*, Word*, int64_t), int threads, int64_t tile, size_t shared, int blocks,
          const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    course::require(n >= 0 && course::ceil_div(n, tile) <= 0x7FFFFFFF,
                    "scan: n is below 0 or more than 2^31 - 1 tiles: split x");
    course::require(scratch_size >= n / 512 + 1024, "scan: scratch must have n / 512 + 1024 elements");
    course::require(reinterpret_cast<uintptr_t>(scratch) % 8 == 0, "scan: scratch must be aligned to 8 bytes");
    if (n == 0) return;
    const int64_t tiles = course::ceil_div(n, tile);
    Word* words = reinterpret_cast<Word*>(scratch);  // a word a tile: zero is EMPTY
    CUDA_CHECK(cudaMemsetAsync(words, 0, size_t(tiles) * sizeof(Word), stream));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
    void* arguments[] = {&x, &y, &words, &n};
    const unsigned grid = unsigned(std::min<int64_t>(tiles, int64_t(blocks) * course::sms()));
    CUDA_CHECK(cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(threads), arguments, shared, stream));
}

template <typename T, int THREADS, int VECTORS, int BLOCKS, typename... Args>
void waves_with(Args... args) {
    scan<T>(waves_kernel<T, THREADS, VECTORS, BLOCKS>, THREADS, Tile<T, THREADS, VECTORS>::SIZE, 0, BLOCKS, args...);
}

template <typename T, int THREADS, int VECTORS, int STAGES, typename... Args>
void ahead_with(Args... args) {
    constexpr int64_t SIZE = Tile<T, THREADS, VECTORS>::SIZE;
    scan<T>(ahead_kernel<T, THREADS, VECTORS, STAGES>, THREADS, SIZE, STAGES * SIZE * sizeof(T), 1, args...);
}

// Emulated, a thread costs much: small tiles, so that a small input has many.
template <typename T>
void look_back_waves(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    if constexpr (course::emulated) waves_with<T, 64, 4, 2>(x, y, scratch, scratch_size, n, stream);
    else waves_with<T, 256, 12, 2>(x, y, scratch, scratch_size, n, stream);
}

template <typename T>
void look_back_ahead(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    if constexpr (course::emulated) ahead_with<T, 64, 4, 3>(x, y, scratch, scratch_size, n, stream);
    else ahead_with<T, 1024, 4, 3>(x, y, scratch, scratch_size, n, stream);
}

#ifndef COURSE_EMULATED
template <typename T>
void cub_scan(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    course::require(n <= 0x7FFFFFFF, "cub_scan: n must be below 2^31 here, for CUB's 32-bit offsets (its faster ones)");
    size_t bytes = 0;
    CUDA_CHECK(cub::DeviceScan::InclusiveSum(nullptr, bytes, x, y, int(n), stream));
    course::require(bytes <= size_t(scratch_size) * sizeof(T), "cub_scan: scratch is too small");
    CUDA_CHECK(cub::DeviceScan::InclusiveSum(scratch, bytes, x, y, int(n), stream));
}
#endif

template <typename T>
const std::vector<Rung<T>> RUNGS = {
    {"look_back_waves", look_back_waves<T>},
    {"look_back_ahead", look_back_ahead<T>},
#ifndef COURSE_EMULATED
    {"CUB DeviceScan", cub_scan<T>},
#endif
};

}  // namespace

int main() {
    const size_t hurts = course::small() ? 1024 * 25 + 7 : 32768 * 500 + 1021;  // rounds enough to go around the ring
    check_and_time(RUNGS<float>, RUNGS<unsigned>, hurts, course::small() ? 8192 : size_t(1) << 28);
}

COURSE_MODULE(m) {
    bind(m, "look_back_waves_float", look_back_waves<float>);
    bind(m, "look_back_waves_int", look_back_waves<unsigned>);
    bind(m, "look_back_ahead_float", look_back_ahead<float>);
    bind(m, "look_back_ahead_int", look_back_ahead<unsigned>);
#ifndef COURSE_EMULATED
    bind(m, "cub_float", cub_scan<float>);
    bind(m, "cub_int", cub_scan<unsigned>);
#endif
}
