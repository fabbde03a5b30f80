// Sorting 32-bit keys: bitonic networks, then radix sort
// ======================================================
// A comparison sort moves every key about log2(n) times; a network that is the same for all inputs log2(n)^2 / 2 times.
// A radix sort looks at 8 bits at a time and moves every key four times, whatever n is. For n = 2^26 keys of 4 bytes,
// counted in reads and writes of all of memory (2n keys, 0.54 GB, 0.13 ms at 4.2 TB/s):
//   bitonic          351: log2(n) (log2(n) + 1) / 2 steps, each through all of memory     predicted 45 ms
//   bitonic_shared   136: steps within 2048 keys take place in shared memory              predicted 17 ms
//   radix            6: each of 4 digits reads n, reads n again, writes n  predicted 0.8 ms, and more:
//                    the writes go to 256 places at once, so a warp's 32 keys lie in up to 32 sectors
// 07b_onesweep takes it to 4.5 and to whole sectors. Keys are uint32 with flip = 0, or int32 with flip = the sign bit:
// inverted, it orders negative numbers before the others. Any n below 2^32.
// Sources: Batcher, "Sorting networks and their applications", 1968; Satish, Harris and Garland, "Designing efficient
// sorting algorithms for manycore GPUs", 2009; Merrill and Grimshaw, "High performance and scalable radix sorting
// for GPU computing", 2011.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -o sort cuda_src/07_sort.cu
// Run:      ./sort                                  (checks every version, then times them all)
// No GPU:   python cuda_src/07_sort.py                    (the same kernels, emulated and checked against PyTorch)
// Time it:  python -m lessonkit bench 07_sort
#include "07_main.cuh"
#include "07_sort_rank.cuh"

namespace {

// Rung 1. A bitonic network merges sorted runs of `half` keys to runs of 2 * half: the first step compares each key
// with its mirror image in the pair of runs, which leaves the smaller half on the left, each half bitonic; steps at
// distance half / 2, half / 4, ... 1 sort those. Every comparison puts the smaller key left. So n need not be a power
// of two: keys that are missing at the end are larger than all, would never move, and need not exist.
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

// Rung 2. New: while the distance is below TILE, both keys of a pair are in the same tile, so that a block can read it
// once, take all those steps in shared memory with a barrier between them, and write it once. Conflict-free but for
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

// Rung 3. New: no comparisons. Count how many keys of each tile have each digit; scan the counts, digit by digit and
// tile by tile within it, to where each tile's keys of that digit go; then put every key there, behind those of its
// tile that come before it. Three kernels a digit, four digits; the first two and the ranks are in 07_sort_rank.cuh.
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
