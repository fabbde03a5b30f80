// Prefix sums in one pass: decoupled look-back
// ============================================
//
// y[i] = x[0] + ... + x[i] reads n and writes n: 2^28 floats are 2.1 GB, 0.51 ms at 4.2 TB/s. A block can scan only
// its own tile (08_scan), and its sum is needed by all tiles after it, which run in no order. Three ways between
// tiles:
//
//     scan, then propagate   4n   every tile's y is written, read again, and written again with the prefix added
//     reduce, then scan      3n   the first pass only reads x, for the tiles' sums
//     decoupled look-back    2n   one pass: a tile looks back at what its predecessors have published so far
//
// While tiles look back, memory is idle; 10_scan_ahead loads the next tile meanwhile. T is float, or unsigned for
// int32: the same sums in two's complement, where overflow wraps as it does in PyTorch.
//
// You will be able to: write a scan that reads and writes each element once; let blocks wait for each other without a
// deadlock.
//
// Source: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016, section 4.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o scan cuda_src/09_scan_one_pass.cu
// Run:      ./scan                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 09_scan_one_pass       (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 09_scan_one_pass
#include "scan_problem.cuh"
#include "scan_tile.cuh"

#ifndef COURSE_EMULATED
#include <cub/device/device_scan.cuh>
#endif

namespace {

// Rung 1: scan, then propagate, as in 08_scan, but with 16 elements per thread (scan_tile.cuh). Each thread has four
// loads of 16 bytes in flight, 16 sectors a request, all used, and one barrier a tile. Predicted: the speed of copying
// 4n.
constexpr int THREADS = 256, VECTORS = 4;
template <typename T>
using Usual = Tile<T, THREADS, VECTORS>;

template <typename T>
__global__ void __launch_bounds__(THREADS) propagate_kernel(const T* x, T* y, T* sums, int64_t n) {
    Usual<T> tile;
    tile.load(x, blockIdx.x, n);
    tile.scan_fours();
    T block_total;
    const T before = warps_before<T, THREADS / 32>(tile.scan(), block_total);
    tile.store(y, blockIdx.x, n, before);
    if (threadIdx.x == 0) sums[blockIdx.x] = block_total;
}

// Rung 2. New: the first pass writes only the tiles' sums, so y is written once: 3n, and 3/4 of rung 1's time.
template <typename T>
__global__ void __launch_bounds__(THREADS) reduce_kernel(const T* x, T* sums, int64_t n) {
    Usual<T> tile;
    tile.load(x, blockIdx.x, n);
    tile.scan_fours();
    T block_total;
    warps_before<T, THREADS / 32>(tile.sum(), block_total);
    if (threadIdx.x == 0) sums[blockIdx.x] = block_total;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) scan_from_kernel(const T* x, T* y, const T* sums, int64_t n) {
    Usual<T> tile;
    tile.load(x, blockIdx.x, n);
    tile.scan_fours();
    T block_total;
    const T before = warps_before<T, THREADS / 32>(tile.scan(), block_total);
    tile.store(y, blockIdx.x, n, (blockIdx.x > 0 ? sums[blockIdx.x - 1] : T(0)) + before);
}

// Rung 3. New: one pass (2n). A tile publishes its sum as soon as it knows it, then looks back over its predecessors.
// It adds the sum of each predecessor that has published only its SUM. One that has published its PREFIX ends the
// search:
//
//     tile        0        1        2        3        4        5
//     published   PREFIX   PREFIX   SUM      SUM      SUM      .
//                          stop <-- add <--- add <--- add <--- looks back
//
//     prefix before tile 5 = PREFIX of 1 + SUM of 2 + SUM of 3 + SUM of 4
//
// So tiles wait for a predecessor's load, never for its look-back. The bytes in flight meanwhile set the pace:
//
// - A waiting tile keeps its data in registers: 96 of a thread's 128, so 2 blocks hold 192 KB on an SM. With 16 of 32,
//   as in rungs 1 and 2, 8 blocks hold 128 KB. Large tiles also publish fewer words. At 4.2 TB/s some 20 tiles begin
//   each microsecond. A round trip to L2 takes most of a microsecond, so a warp reads WINDOW * 32 words at a time.
//
// - The tile's sum is published before the tile is scanned, because other tiles wait for it. The sum takes 5 shuffles
//   of a warp, the scan 7 for each of 24 groups of four, 168. The warps scan while warp 0 looks back.
//
// - No ticket: tiles are blocks in order, and their loads start at once. A tile waits only for lower blocks, which GPUs
//   start first. CUDA does not promise that order; CUB relies on it too. A ticket from an atomicAdd would need no such
//   promise, and would cost a round trip per tile.
//
// Predicted: two thirds of rung 2's time, plus what tiles wait while they hold registers and load nothing. Float sums
// now depend on when predecessors publish. The last bits may differ from run to run, where rungs 1 and 2 repeat
// theirs.

// Called by one warp: the sum of all tiles before `tile`. Lane l looks l tiles further back than lane 0.
template <typename T, int WINDOW>
__device__ T look_back(const volatile Word* words, int tile) {
    const int lane = threadIdx.x % 32;
    T sum = T(0);  // of the tiles that this lane has taken
    for (int last = tile - 1;;) {
        Word word[WINDOW];
#pragma unroll
        for (int k = 0; k < WINDOW; k++) {
            const int at = last - k * 32 - lane;
            word[k] = at >= 0 ? words[at] : Word(PREFIX) << 32;  // before the first tile: a prefix of 0
        }
#pragma unroll
        for (int k = 0; k < WINDOW; k++) {
            const unsigned empty = __ballot_sync(ALL, unsigned(word[k] >> 32) == EMPTY);
            const unsigned prefix = __ballot_sync(ALL, unsigned(word[k] >> 32) == PREFIX);
            const unsigned known = ~empty & (empty - 1);             // lanes below the lowest set bit; all, if none is
            const unsigned taken = known & (prefix ^ (prefix - 1));  // ... and up to the first prefix
            T value;
            from_bits(unsigned(word[k]), value);
            if (taken >> lane & 1) sum += value;
            if (prefix & known) {
                for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
                return sum;
            }
            last -= __popc(taken);
            if (empty) break;  // look again, from the first tile that had nothing to say
        }
    }
}

template <typename T, int THREADS, int VECTORS, int WINDOW, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) look_back_kernel(const T* x, T* y, Word* words, int64_t n) {
    __shared__ T shared_prefix;
    const int64_t tile = blockIdx.x;
    Tile<T, THREADS, VECTORS> part;
    part.load(x, tile, n);
    part.scan_fours();
    T tile_sum;
    const T before = warps_before<T, THREADS / 32>(part.sum(), tile_sum);
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) publish(words, tile, SUM, tile_sum);
        const T prefix = look_back<T, WINDOW>(words, int(tile));
        if (threadIdx.x == 0) {
            publish(words, tile, PREFIX, prefix + tile_sum);
            shared_prefix = prefix;
        }
    }
    part.scan();
    __syncthreads();
    part.store(y, tile, n, shared_prefix + before);
}

// ---- Launchers. x, y: n elements; scratch: at least n / 512 + 1024 elements, at an address divisible by 8.

constexpr int SIZE = Usual<float>::SIZE;

unsigned tiles_of(int64_t n, int64_t scratch_size, int64_t size = SIZE) {
    course::require(n >= 0 && course::ceil_div(n, size) <= 0x7FFFFFFF,
                    "scan: n is below 0 or more than 2^31 - 1 tiles: split x");
    course::require(scratch_size >= n / 512 + 1024, "scan: scratch must have n / 512 + 1024 elements");
    return unsigned(course::ceil_div(n, size));
}

template <typename T>
__global__ void __launch_bounds__(THREADS) add_kernel(T* y, const T* sums, int64_t n) {
    const int64_t tile = int64_t(blockIdx.x) + 1;  // the first tile has nothing before it
    Usual<T> part;
    part.load(y, tile, n);
    part.store(y, tile, n, sums[tile - 1]);
}

// sums has room for this level's and those above it.
template <typename T>
void scan_levels(const T* x, T* y, T* sums, int64_t n, cudaStream_t stream) {
    const unsigned tiles = unsigned(course::ceil_div(n, SIZE));
    propagate_kernel<T><<<tiles, THREADS, 0, stream>>>(x, y, sums, n);
    CUDA_CHECK(cudaGetLastError());
    if (tiles == 1) return;
    scan_levels<T>(sums, sums, sums + tiles, tiles, stream);
    add_kernel<T><<<tiles - 1, THREADS, 0, stream>>>(y, sums, n);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void propagate(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    if (tiles_of(n, scratch_size) > 0) scan_levels<T>(x, y, scratch, n, stream);
}

template <typename T>
void reduce_then_scan(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    const unsigned tiles = tiles_of(n, scratch_size);
    if (tiles == 0) return;
    reduce_kernel<T><<<tiles, THREADS, 0, stream>>>(x, scratch, n);
    CUDA_CHECK(cudaGetLastError());
    scan_levels<T>(scratch, scratch, scratch + tiles, tiles, stream);
    scan_from_kernel<T><<<tiles, THREADS, 0, stream>>>(x, y, scratch, n);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T, int THREADS, int VECTORS, int WINDOW, int BLOCKS>
void look_back_with(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    const unsigned tiles = tiles_of(n, scratch_size, Tile<T, THREADS, VECTORS>::SIZE);
    course::require(reinterpret_cast<uintptr_t>(scratch) % 8 == 0, "scan: scratch must be aligned to 8 bytes");
    if (tiles == 0) return;
    Word* const words = reinterpret_cast<Word*>(scratch);  // a word a tile: zero is EMPTY
    CUDA_CHECK(cudaMemsetAsync(words, 0, size_t(tiles) * sizeof(Word), stream));
    look_back_kernel<T, THREADS, VECTORS, WINDOW, BLOCKS><<<tiles, THREADS, 0, stream>>>(x, y, words, n);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void look_back(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
#ifdef COURSE_EMULATED  // a thread costs much there: small tiles, so that a small input has many
    look_back_with<T, 128, 16, 4, 4>(x, y, scratch, scratch_size, n, stream);
#else
    // For integers the compiler reorders additions and keeps more of them: 24 vectors would spill.
    look_back_with<T, 256, std::is_same_v<T, float> ? 24 : 16, 4, 2>(x, y, scratch, scratch_size, n, stream);
#endif
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
    {"propagate", propagate<T>},
    {"reduce_then_scan", reduce_then_scan<T>},
    {"look_back", look_back<T>},
#ifndef COURSE_EMULATED
    {"CUB DeviceScan", cub_scan<T>},
#endif
};

}  // namespace

int main() {
    const size_t hurts = course::small() ? 4096 * 5 + 7 : 4096 * 4096 + 1021;  // the latter: three levels of sums
    check_and_time(RUNGS<float>, RUNGS<unsigned>, hurts, course::small() ? 8192 : size_t(1) << 28);
}

COURSE_MODULE(m) {
    bind(m, "propagate_float", propagate<float>);
    bind(m, "propagate_int", propagate<unsigned>);
    bind(m, "reduce_then_scan_float", reduce_then_scan<float>);
    bind(m, "reduce_then_scan_int", reduce_then_scan<unsigned>);
    bind(m, "look_back_float", look_back<float>);
    bind(m, "look_back_int", look_back<unsigned>);
#ifndef COURSE_EMULATED
    bind(m, "cub_float", cub_scan<float>);
    bind(m, "cub_int", cub_scan<unsigned>);
#endif
}
