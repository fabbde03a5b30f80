// Sorting 32-bit keys: bitonic networks, then radix sort
// ======================================================
//
// A comparison sort moves every key about log2(n) times; a network that is the same for all inputs log2(n)^2 / 2
// times. A radix sort looks at 8 bits at a time and moves every key four times, whatever n is. For n = 2^26 keys of 4
// bytes, counted in reads and writes of all of memory (2n keys, 0.54 GB, 0.13 ms at 4.2 TB/s):
//
//     bitonic          351: log2(n) (log2(n) + 1) / 2 steps, each through all of memory     predicted 45 ms
//     bitonic_shared   136: steps within 2048 keys take place in shared memory              predicted 17 ms
//     radix            6: each of 4 digits reads n, reads n again, writes n                 predicted 0.8 ms or more
//
// The writes of a radix sort go to 256 places at once. So a warp's 32 keys may go to 32 sectors, and that costs more.
//
// 12_onesweep takes it to 4.5 and to whole sectors. Keys are uint32 with flip = 0, or int32 with flip = the sign bit:
// inverted, it orders negative numbers before the others. Any n below 2^32.
//
// You will be able to: sort any number of keys; count an algorithm's passes over memory; rank the keys of a warp.
//
// Sources: Batcher, "Sorting networks and their applications", 1968; Satish, Harris and Garland, "Designing efficient
// sorting algorithms for manycore GPUs", 2009; Merrill and Grimshaw, "High performance and scalable radix sorting
// for GPU computing", 2011.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o sort cuda_src/11_sort.cu
// Run:      ./sort                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 11_sort                 (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 11_sort
#include "radix_keys.cuh"
#include "sort_problem.cuh"

namespace {

// Rung 1. A bitonic network merges sorted runs of `half` keys to runs of 2 * half. The first step compares each key
// with its mirror image in the pair of runs. It leaves the smaller half on the left, and each half bitonic. Steps at
// distance half / 2, half / 4, ... 1 sort those. Every comparison puts the smaller key left. So n need not be a power
// of two: keys that are missing at the end count as larger than all, never move, and need not exist.
__device__ void compare_exchange(uint32_t& left, uint32_t& right, uint32_t flip) {
    const uint32_t a = left, b = right;
    if ((a ^ flip) > (b ^ flip)) left = b, right = a;
}

// The p-th of the pairs that a step compares: (left, left ^ with).
__device__ int64_t left_of(int64_t p, int64_t half) { return 2 * p - (p & (half - 1)); }  // half is a power of two

__global__ void bitonic_step_kernel(uint32_t* keys, int64_t n, int64_t half, bool mirror, uint32_t flip) {
    const int64_t left = left_of(int64_t(blockIdx.x) * blockDim.x + threadIdx.x, half);
    const int64_t right = left ^ (mirror ? 2 * half - 1 : half);
    if (right < n) compare_exchange(keys[left], keys[right], flip);
}

// Rung 2. New: while the distance is below TILE, both keys of a pair are in the same tile. A block reads the tile
// once, takes all those steps in shared memory with a barrier between them, and writes it once. Conflict-free but for
// the shortest distances. Here the missing keys do exist, as the largest key.
constexpr int TILE = 2048;

template <bool MERGE>  // sort the tile; or, since larger steps have gone before, only steps at TILE / 2 and below
__global__ void __launch_bounds__(TILE / 2) bitonic_tile_kernel(const uint32_t* in, uint32_t* out, int64_t n,
                                                                uint32_t flip) {
    __shared__ uint32_t keys[TILE];
    const int t = threadIdx.x;
    const int64_t first = int64_t(blockIdx.x) * TILE;
    for (int k = t; k < TILE; k += TILE / 2) keys[k] = first + k < n ? in[first + k] : ~flip;
    for (int run = MERGE ? TILE : 2; run <= TILE; run *= 2) {
        for (int half = run / 2; half > 0; half /= 2) {
            __syncthreads();
            const int left = int(left_of(t, half));
            const bool mirror = !MERGE && half == run / 2;
            compare_exchange(keys[left], keys[left ^ (mirror ? 2 * half - 1 : half)], flip);
        }
    }
    __syncthreads();
    for (int k = t; k < TILE; k += TILE / 2)
        if (first + k < n) out[first + k] = keys[k];
}

// Rung 3. New: no comparisons. One kernel counts how many keys of each tile have each digit. A second scans the
// counts, digit by digit and tile by tile within it: that is where each tile's keys of that digit begin. The third
// writes every key there, behind those of its tile that come before it. Four digits; how a warp ranks its keys is in
// radix_keys.cuh. For a tile of 8 keys and digits of 2 bits:
//
//     digit of each key                2   0   2   1   0   2   2   1
//     rank: equal digits before it     0   0   1   0   1   2   3   1
//     count of digit 0, 1, 2, 3        2   2   4   0
//     begin, the scan of the counts    0   2   4   8
//     place = begin[digit] + rank      4   0   5   2   1   6   7   3
//
// How many keys of each tile have each digit: counts[digit][tile], and over all tiles: totals[digit].
template <int SIZE>
__global__ void __launch_bounds__(BINS) count_kernel(const uint32_t* in, unsigned* counts, unsigned* totals, int64_t n,
                                                     int shift, uint32_t flip) {
    __shared__ unsigned bins[BINS];
    bins[threadIdx.x] = 0;
    __syncthreads();
    const int64_t first = int64_t(blockIdx.x) * SIZE;
    for (int64_t i = first + threadIdx.x; i < min(first + SIZE, n); i += BINS)
        atomicAdd(&bins[digit_of(in[i], shift, flip)], 1u);
    __syncthreads();
    counts[int64_t(threadIdx.x) * gridDim.x + blockIdx.x] = bins[threadIdx.x];
    atomicAdd(&totals[threadIdx.x], bins[threadIdx.x]);
}

// Block d turns the counts of digit d into places: after all keys with smaller digits, tile after tile.
template <int CHUNK>
__global__ void __launch_bounds__(CHUNK) places_kernel(unsigned* counts, const unsigned* totals, int64_t tiles) {
    __shared__ unsigned warps[CHUNK / 32];
    __shared__ unsigned carry;
    const int t = threadIdx.x, digit = blockIdx.x;
    counts += int64_t(digit) * tiles;
    // The first turn sums the totals of smaller digits, the others scan CHUNK counts each.
    for (int64_t first = -CHUNK; first < tiles; first += CHUNK) {
        const bool before = first < 0;
        unsigned mine = 0;
        if (before)
            for (int smaller = t; smaller < digit; smaller += CHUNK) mine += totals[smaller];
        else if (first + t < tiles)
            mine = counts[first + t];
        const unsigned up_to = warp_inclusive(mine);
        if (t % 32 == 31) warps[t / 32] = up_to;
        __syncthreads();
        const unsigned warps_up_to = warp_inclusive(t % 32 < CHUNK / 32 ? warps[t % 32] : 0);
        const unsigned earlier = __shfl_sync(ALL, warps_up_to, t / 32 > 0 ? t / 32 - 1 : 0);
        const unsigned base = (before ? 0 : carry) + (t >= 32 ? earlier : 0);
        if (!before && first + t < tiles) counts[first + t] = base + up_to - mine;
        __syncthreads();  // all have read carry and warps
        if (t == CHUNK - 1) carry = base + up_to;
        __syncthreads();
    }
}

// The three kernels of a digit, four times; scatter(tiles, in, out, places, shift) launches the third.
template <int SIZE, typename Scatter>
void radix_passes(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t n, uint32_t flip, cudaStream_t stream,
                  Scatter scatter) {
    constexpr int CHUNK = EMULATED ? 32 : 1024;
    const unsigned tiles = unsigned(course::ceil_div(n, SIZE));
    if (tiles == 0) return;
    unsigned *const totals = scratch + n, *const counts = totals + BINS;
    for (int shift = 0; shift < 32; shift += DIGIT_BITS) {
        uint32_t* const to = shift / DIGIT_BITS % 2 == 0 ? scratch : out;  // in -> scratch -> out -> scratch -> out
        CUDA_CHECK(cudaMemsetAsync(totals, 0, BINS * sizeof(unsigned), stream));
        count_kernel<SIZE><<<tiles, BINS, 0, stream>>>(in, counts, totals, n, shift, flip);
        CUDA_CHECK(cudaGetLastError());
        places_kernel<CHUNK><<<BINS, CHUNK, 0, stream>>>(counts, totals, tiles);
        CUDA_CHECK(cudaGetLastError());
        scatter(tiles, in, to, counts, shift);
        CUDA_CHECK(cudaGetLastError());
        in = to;
    }
}

constexpr int THREADS = 256, ITEMS = EMULATED ? 2 : 16;
using Tile = Keys<THREADS, ITEMS>;

__global__ void __launch_bounds__(THREADS) scatter_kernel(const uint32_t* in, uint32_t* out, const unsigned* places,
                                                          int64_t n, int shift, uint32_t flip) {
    __shared__ unsigned counts[Tile::WARPS][BINS];
    const int t = threadIdx.x;
    for (int w = 0; w < Tile::WARPS; w++) counts[w][t] = 0;
    Tile tile;
    tile.load(in, blockIdx.x, n, flip);
    __syncthreads();
    tile.rank_in_warp(counts[t / 32], shift, flip);
    __syncthreads();
    unsigned place = places[int64_t(t) * gridDim.x + blockIdx.x];  // thread t takes digit t: warp after warp
    for (int w = 0; w < Tile::WARPS; w++) {
        const unsigned count = counts[w][t];
        counts[w][t] = place;
        place += count;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (int64_t(blockIdx.x) * Tile::SIZE + tile.place(k) < n)
            out[counts[t / 32][digit_of(tile.key[k], shift, flip)] + tile.rank[k]] = tile.key[k];
}

// ---- Launchers. in, out: n keys; scratch: at least 2 n + 16384 words, the same for every rung.

inline void expect_sizes(int64_t n, int64_t scratch_size) {
    course::require(n >= 0 && n < int64_t(1) << 32, "sort: n must be from 0 to 2^32 - 1");
    course::require(scratch_size >= 2 * n + 16384, "sort: scratch must have 2 n + 16384 words");
}

// All steps that merge runs of run / 2 keys at distances of `shortest` and more.
void long_steps(uint32_t* keys, int64_t n, int64_t run, int64_t shortest, uint32_t flip, cudaStream_t stream) {
    for (int64_t half = run / 2; half >= shortest; half /= 2) {
        const int64_t pairs = course::ceil_div(n, 2 * half) * half;
        bitonic_step_kernel<<<unsigned(course::ceil_div(pairs, 256)), 256, 0, stream>>>(keys, n, half, half == run / 2,
                                                                                       flip);
        CUDA_CHECK(cudaGetLastError());
    }
}

void bitonic(const uint32_t* in, uint32_t* out, uint32_t*, int64_t scratch_size, int64_t n, uint32_t flip,
             cudaStream_t stream) {
    expect_sizes(n, scratch_size);
    CUDA_CHECK(cudaMemcpyAsync(out, in, n * sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream));
    for (int64_t run = 2; run < 2 * n; run *= 2) long_steps(out, n, run, 1, flip, stream);
}

void bitonic_shared(const uint32_t* in, uint32_t* out, uint32_t*, int64_t scratch_size, int64_t n, uint32_t flip,
                    cudaStream_t stream) {
    expect_sizes(n, scratch_size);
    if (n == 0) return;
    const unsigned tiles = unsigned(course::ceil_div(n, TILE));
    bitonic_tile_kernel<false><<<tiles, TILE / 2, 0, stream>>>(in, out, n, flip);
    CUDA_CHECK(cudaGetLastError());
    for (int64_t run = 2 * TILE; run < 2 * n; run *= 2) {
        long_steps(out, n, run, TILE, flip, stream);
        bitonic_tile_kernel<true><<<tiles, TILE / 2, 0, stream>>>(out, out, n, flip);
        CUDA_CHECK(cudaGetLastError());
    }
}

void radix(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t scratch_size, int64_t n, uint32_t flip,
           cudaStream_t stream) {
    expect_sizes(n, scratch_size);
    radix_passes<Tile::SIZE>(in, out, scratch, n, flip, stream,
                             [=](unsigned tiles, const uint32_t* in, uint32_t* to, const unsigned* places, int shift) {
                                 scatter_kernel<<<tiles, THREADS, 0, stream>>>(in, to, places, n, shift, flip);
                             });
}

const std::vector<Rung> RUNGS = {{"bitonic", bitonic}, {"bitonic_shared", bitonic_shared}, {"radix", radix}};

}  // namespace

int main() { check_and_time(RUNGS); }

COURSE_MODULE(m) {
    bind(m, "bitonic", bitonic);
    bind(m, "bitonic_shared", bitonic_shared);
    bind(m, "radix", radix);
}
