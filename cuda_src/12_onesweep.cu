// Radix sort in one sweep a digit
// ===============================
//
// A radix sort of 32-bit keys by 8-bit digits moves every key four times: 8n of reads and writes at the least. One
// more read counts all four digits at once: 9n, 2.4 GB for n = 2^26, 0.57 ms at 4.2 TB/s. The radix rung of 11_sort
// moves 12n, since it reads the keys twice a digit, and writes 32-byte sectors for single keys. Here:
//
//     radix_ordered   12n, but the keys are put in order within a tile first: a warp writes runs, not single keys
//     onesweep         9n: a tile learns its predecessors' counts by decoupled look-back (09_scan_one_pass),
//                      256 of them side by side, one for each digit
//
// Neither will reach the speed of a copy. To rank 32 keys costs a warp about 60 instructions and shared memory about
// 15 wavefronts. That takes as much time as HBM needs for their 256 bytes, and all of it must overlap. Predicted for
// onesweep: 1.0 to 1.7 ms; for radix_ordered, with 12n instead of 9n, 1.3 to 2.3 ms. Keys are uint32 with flip = 0, or
// int32 with flip = the sign bit. Any n below 2^32. From 2^30 - 1 on, counts outgrow the 30 bits that a look-back word
// has for them: there onesweep calls radix_ordered.
//
// You will be able to: write a radix sort that reads the keys once per digit; say why keys are put in order before they
// are written.
//
// Sources: Adinets and Merrill, "Onesweep: A Faster Least Significant Digit Radix Sort for GPUs", 2022; Merrill and
// Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o sort cuda_src/12_onesweep.cu
// Run:      ./sort                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 12_onesweep            (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 12_onesweep
#include "radix_keys.cuh"
#include "sort_problem.cuh"

#ifndef COURSE_EMULATED
#include <cub/device/device_radix_sort.cuh>
#endif

namespace {

// The count and the scan of a digit, as in 11_sort's radix; rung 1 has a third kernel of its own.

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

// Rung 1. New against 11_sort's radix: the block first puts its keys in order of their digit in shared memory, and
// writes them from there. With a tile of 8 keys and digits of 2 bits:
//
//     digits as read        2   0   2   1   0   2   2   1
//     in shared memory      0   0 | 1   1 | 2   2   2   2      at begin[digit] + rank, as in 11_sort
//     in HBM                one run for each digit: its place in the whole output + (index in the tile - begin[digit])
//
// Predicted: 4096 keys make runs of 16 keys a digit on average, so a warp writes about 7 sectors instead of 32. The
// price is a round trip through shared memory (32 random digits in 32 banks: 3 to 4 wavefronts).
template <int THREADS, int ITEMS>
struct Shared {
    unsigned counts[THREADS / 32][BINS];  // a warp's count of each digit, then where its keys begin in `ordered`
    uint32_t ordered[THREADS * ITEMS];
    unsigned goes_to[BINS];  // add to a key's place in `ordered` for its place in the output
    unsigned ticket;
};

// Called by all threads of a block, thread d < BINS with its number: the sum of those before it.
__device__ unsigned exclusive_over_bins(unsigned mine) {
    __shared__ unsigned warps[BINS / 32];
    const int t = threadIdx.x;
    const unsigned up_to = warp_inclusive(mine);
    if (t < BINS && t % 32 == 31) warps[t / 32] = up_to;
    __syncthreads();
    unsigned before = up_to - mine;
    for (int w = 0; w < BINS / 32; w++)
        if (w < t / 32) before += warps[w];
    return before;
}

// The keys of a tile in order of their digit; thread d < BINS learns where in the tile digit d begins and its count.
template <int THREADS, int ITEMS, typename Publish>
__device__ void order(Keys<THREADS, ITEMS>& tile, Shared<THREADS, ITEMS>& shared, int shift, uint32_t flip,
                      unsigned& begin, Publish publish) {
    const int t = threadIdx.x, warp = t / 32;
    for (int b = t % 32; b < BINS; b += 32) shared.counts[warp][b] = 0;
    __syncwarp();
    tile.rank_in_warp(shared.counts[warp], shift, flip);
    __syncthreads();
    unsigned count = 0;
    if (t < BINS) {
        for (int w = 0; w < THREADS / 32; w++) count += shared.counts[w][t];
        publish(count);
    }
    begin = exclusive_over_bins(count);
    if (t < BINS) {
        unsigned next = begin;
        for (int w = 0; w < THREADS / 32; w++) {
            const unsigned here = shared.counts[w][t];
            shared.counts[w][t] = next;
            next += here;
        }
    }
    __syncthreads();
    shift = afresh(shift);
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        shared.ordered[shared.counts[warp][digit_of(tile.key[k], shift, flip)] + tile.rank[k]] = tile.key[k];
}

// Neighbours in `ordered` mostly have the same digit, so a warp's 32 keys go to two or three runs.
template <int THREADS, int ITEMS>
__device__ void write(const Shared<THREADS, ITEMS>& shared, uint32_t* out, int64_t left, int shift, uint32_t flip) {
    const int keys = int(min(left, int64_t(THREADS * ITEMS)));
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int place = k * THREADS + threadIdx.x;
        const uint32_t key = shared.ordered[place];
        if (place < keys) out[shared.goes_to[digit_of(key, shift, flip)] + unsigned(place)] = key;
    }
}

template <int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) ordered_kernel(const uint32_t* in, uint32_t* out, const unsigned* places,
                                                         int64_t n, int shift, uint32_t flip) {
    extern __shared__ unsigned memory[];
    auto& shared = *reinterpret_cast<Shared<THREADS, ITEMS>*>(memory);
    const int t = threadIdx.x;
    Keys<THREADS, ITEMS> keys;
    keys.load(in, blockIdx.x, n, flip);
    unsigned begin;
    order(keys, shared, shift, flip, begin, [](unsigned) {});
    if (t < BINS) shared.goes_to[t] = places[int64_t(t) * gridDim.x + blockIdx.x] - begin;
    __syncthreads();
    write(shared, out, n - int64_t(blockIdx.x) * keys.SIZE, shift, flip);
}

// Rung 2. New: one kernel a digit. A tile counts its digits and publishes the 256 counts. Then thread d looks back for
// digit d. It adds the counts of predecessors that have published only their COUNT. One that has published the SUM of
// all tiles up to itself ends the search. Status and count share a word, so that one read gets both. The keys are put
// in order between publishing and looking back, so that most predecessors have published by then. One kernel before
// the first pass counts where each digit begins in the whole output, for all four passes, since a pass only permutes
// the keys. Predicted: three quarters of rung 1's bytes, 6 launches instead of 12.
constexpr unsigned EMPTY = 0, COUNT = 1u << 30, SUM = 2u << 30, NUMBER = COUNT - 1;

__global__ void __launch_bounds__(BINS) histogram_kernel(const uint32_t* in, unsigned* starts, int64_t n,
                                                         uint32_t flip) {
    constexpr int UNROLL = 8;  // loads in flight for each thread
    __shared__ unsigned bins[PASSES][BINS];
    const int t = threadIdx.x;
    for (int pass = 0; pass < PASSES; pass++) bins[pass][t] = 0;
    __syncthreads();
    for (int64_t i = int64_t(blockIdx.x) * BINS * UNROLL + t; i < n; i += int64_t(gridDim.x) * BINS * UNROLL) {
        uint32_t key[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) key[k] = i + k * BINS < n ? in[i + k * BINS] : 0;
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * BINS < n)
                for (int pass = 0; pass < PASSES; pass++)
                    atomicAdd(&bins[pass][digit_of(key[k], pass * DIGIT_BITS, flip)], 1u);
    }
    __syncthreads();
    for (int pass = 0; pass < PASSES; pass++) atomicAdd(&starts[pass * BINS + t], bins[pass][t]);
}

__global__ void __launch_bounds__(BINS) starts_kernel(unsigned* starts) {
    starts += blockIdx.x * BINS + threadIdx.x;
    *starts = exclusive_over_bins(*starts);
}

template <int THREADS, int ITEMS, int WINDOW, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) onesweep_kernel(const uint32_t* in, uint32_t* out,
                                                                  const unsigned* starts, unsigned* ticket,
                                                                  volatile unsigned* words, int64_t n, int shift,
                                                                  uint32_t flip) {
    extern __shared__ unsigned memory[];
    auto& shared = *reinterpret_cast<Shared<THREADS, ITEMS>*>(memory);
    const int t = threadIdx.x;
    if (t == 0) shared.ticket = atomicAdd(ticket, 1u);  // not blockIdx: a block waits only for blocks that run
    __syncthreads();
    const int64_t tile = shared.ticket;
    volatile unsigned* const mine = words + tile * BINS + t;
    Keys<THREADS, ITEMS> keys;
    keys.load(in, tile, n, flip);
    unsigned begin, count = 0;
    order(keys, shared, shift, flip, begin, [&](unsigned found) { *mine = COUNT | (count = found); });
    if (t < BINS) {
        unsigned before = 0, word[WINDOW];  // so many round trips at once
        bool done = false;
        for (int64_t at = tile - 1; !done;) {
#pragma unroll
            for (int k = 0; k < WINDOW; k++) word[k] = at >= k ? unsigned(words[(at - k) * BINS + t]) : SUM;
#pragma unroll
            for (int k = 0; k < WINDOW; k++) {
                if (done || word[k] == EMPTY) break;
                before += word[k] & NUMBER;
                done = (word[k] & SUM) != 0;
                at--;
            }
        }
        *mine = SUM | (before + count);
        shared.goes_to[t] = starts[t] + before - begin;
    }
    __syncthreads();
    write(shared, out, n - tile * keys.SIZE, shift, flip);
}

// ---- Launchers. in, out: n keys; scratch: at least 2 n + 16384 words, the same for every rung.

inline void expect_sizes(int64_t n, int64_t scratch_size) {
    course::require(n >= 0 && n < int64_t(1) << 32, "sort: n must be from 0 to 2^32 - 1");
    course::require(scratch_size >= 2 * n + 16384, "sort: scratch must have 2 n + 16384 words");
}

void radix_ordered(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t scratch_size, int64_t n, uint32_t flip,
                   cudaStream_t stream) {
    expect_sizes(n, scratch_size);
    constexpr int THREADS = 256, ITEMS = EMULATED ? 2 : 16;
    constexpr int BYTES = sizeof(Shared<THREADS, ITEMS>);
    radix_passes<THREADS * ITEMS>(
        in, out, scratch, n, flip, stream,
        [=](unsigned tiles, const uint32_t* in, uint32_t* to, const unsigned* places, int shift) {
            ordered_kernel<THREADS, ITEMS><<<tiles, THREADS, BYTES, stream>>>(in, to, places, n, shift, flip);
        });
}

template <int THREADS, int ITEMS, int WINDOW, int BLOCKS>
void onesweep_with(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t scratch_size, int64_t n, uint32_t flip,
                   cudaStream_t stream) {
    expect_sizes(n, scratch_size);
    if (n >= int64_t(NUMBER)) return radix_ordered(in, out, scratch, scratch_size, n, flip, stream);
    if (n == 0) return;
    constexpr int BYTES = sizeof(Shared<THREADS, ITEMS>);
    CUDA_CHECK(cudaFuncSetAttribute(onesweep_kernel<THREADS, ITEMS, WINDOW, BLOCKS>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    const int64_t tiles = course::ceil_div(n, THREADS * ITEMS);
    // All that must begin as zero is one piece: where the digits begin, tickets, and the tiles' words for each pass.
    unsigned *const starts = scratch + n, *const tickets = starts + PASSES * BINS, *const words = tickets + PASSES;
    const size_t zeros = size_t(PASSES) * (BINS + 1 + size_t(tiles) * BINS);
    course::require(n + int64_t(zeros) <= scratch_size, "sort: tiles so small need more scratch");
    CUDA_CHECK(cudaMemsetAsync(starts, 0, zeros * sizeof(unsigned), stream));
    const unsigned blocks = unsigned(std::min<int64_t>(course::ceil_div(n, 2048), 1056));  // 8 for each of 132 SMs
    histogram_kernel<<<blocks, BINS, 0, stream>>>(in, starts, n, flip);
    CUDA_CHECK(cudaGetLastError());
    starts_kernel<<<PASSES, BINS, 0, stream>>>(starts);
    CUDA_CHECK(cudaGetLastError());
    for (int pass = 0; pass < PASSES; pass++) {
        uint32_t* const to = pass % 2 == 0 ? scratch : out;  // in -> scratch -> out -> scratch -> out
        onesweep_kernel<THREADS, ITEMS, WINDOW, BLOCKS><<<unsigned(tiles), THREADS, BYTES, stream>>>(
            in, to, starts + pass * BINS, tickets + pass, words + pass * tiles * BINS, n, pass * DIGIT_BITS, flip);
        CUDA_CHECK(cudaGetLastError());
        in = to;
    }
}

void onesweep(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t scratch_size, int64_t n, uint32_t flip,
              cudaStream_t stream) {
    onesweep_with<384, EMULATED ? 2 : 18, 2, 3>(in, out, scratch, scratch_size, n, flip, stream);
}

#ifndef COURSE_EMULATED
void cub_sort(const uint32_t* in, uint32_t* out, uint32_t* scratch, int64_t scratch_size, int64_t n, uint32_t flip,
              cudaStream_t stream) {
    course::require(n <= 0x7FFFFFFF, "cub_sort: n must be below 2^31 here");
    course::require(flip == 0 || flip == 1u << 31, "cub_sort: flip must be 0 or the sign bit");
    size_t bytes = size_t(scratch_size) * sizeof(uint32_t);
    if (flip == 0) {
        CUDA_CHECK(cub::DeviceRadixSort::SortKeys(scratch, bytes, in, out, int(n), 0, 32, stream));
    } else {
        const auto* const signed_in = reinterpret_cast<const int32_t*>(in);
        auto* const signed_out = reinterpret_cast<int32_t*>(out);
        CUDA_CHECK(cub::DeviceRadixSort::SortKeys(scratch, bytes, signed_in, signed_out, int(n), 0, 32, stream));
    }
}
#endif

const std::vector<Rung> RUNGS = {
    {"radix_ordered", radix_ordered}, {"onesweep", onesweep},
#ifndef COURSE_EMULATED
    {"CUB DeviceRadixSort", cub_sort},
#endif
};

}  // namespace

int main() { check_and_time(RUNGS); }

COURSE_MODULE(m) {
    bind(m, "radix_ordered", radix_ordered);
    bind(m, "onesweep", onesweep);
#ifndef COURSE_EMULATED
    bind(m, "cub", cub_sort);
#endif
}
