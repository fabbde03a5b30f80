// What the radix sorts of 07_sort.cu and 07b_onesweep.cu share. An LSD radix sort is one stable step a digit, from the
// lowest digit up; stable, because keys that agree in a digit must keep the order that the lower digits gave them.
#pragma once
#include "course.cuh"

constexpr unsigned ALL = 0xFFFFFFFF;  // every lane of a warp
constexpr int DIGIT_BITS = 8, BINS = 1 << DIGIT_BITS, PASSES = 32 / DIGIT_BITS;

#ifdef COURSE_EMULATED  // a thread costs as much there as a block here: small tiles, so that a small input has many
constexpr bool EMULATED = true;
#else
constexpr bool EMULATED = false;
#endif

// flip is 0 for unsigned keys and the sign bit for signed ones: with it inverted, negative numbers come first.
__device__ inline unsigned digit_of(uint32_t key, int shift, uint32_t flip) {
    return ((key >> shift) ^ (flip >> shift)) & (BINS - 1);
}

// The same number, but the compiler does not know that. Digits that are wanted twice it would otherwise keep, and a
// register for each key of a thread costs more than the two instructions that find a digit again.
__device__ inline int afresh(int shift) {
#ifndef COURSE_EMULATED
    asm volatile("" : "+r"(shift));
#endif
    return shift;
}

// The lanes of this warp whose digit is the same: what __match_any_sync answers, by one vote a bit: whoever votes
// otherwise is another. From plain C++ the compiler makes 6 instructions a bit, since it shifts the bit down before it
// asks for it; from this PTX it makes 3, and these 8 bits of every key are half of all the work.
__device__ inline unsigned lanes_with(unsigned digit) {
#ifdef COURSE_EMULATED
    return __match_any_sync(ALL, digit);
#else
    unsigned others = 0;
#pragma unroll
    for (int bit = 0; bit < DIGIT_BITS; bit++) {
        unsigned voted_otherwise;
        asm volatile(
            "{ .reg .pred set; .reg .b32 masked, with, mine;\n"
            "and.b32 masked, %1, %2;  setp.ne.u32 set, masked, 0;\n"
            "vote.sync.ballot.b32 with, set, 0xffffffff;  selp.b32 mine, 0xffffffff, 0, set;\n"
            "xor.b32 %0, with, mine; }"
            : "=r"(voted_otherwise)
            : "r"(digit), "r"(1u << bit));
        others |= voted_otherwise;
    }
    return ~others;
#endif
}

// A tile in the registers of a block. Each warp owns a stretch of it and reads it 32 keys at a time, in order.
template <int THREADS, int ITEMS>
struct Keys {
    static constexpr int SIZE = THREADS * ITEMS, WARPS = THREADS / 32;
    static_assert(THREADS >= BINS && THREADS % 32 == 0);
    uint32_t key[ITEMS];
    unsigned rank[ITEMS];  // how many keys of this warp with the same digit come before

    static __device__ int place(int k) { return (threadIdx.x / 32 * ITEMS + k) * 32 + threadIdx.x % 32; }

    // Past the end come keys with the largest digits: being last, they take no place that belongs to a key.
    __device__ void load(const uint32_t* in, int64_t tile, int64_t n, uint32_t flip) {
        in += tile * SIZE;
        const int left = int(min(n - tile * SIZE, int64_t(SIZE)));
#pragma unroll
        for (int k = 0; k < ITEMS; k++) key[k] = place(k) < left ? in[place(k)] : ~flip;
    }

    // counts: BINS zeros of this warp alone; afterwards, how many keys each digit has. Every peer reads the count so
    // far, then the last of them moves it on: no atomics, and lanes with the same digit read the same word.
    __device__ void rank_in_warp(unsigned* counts, int shift, uint32_t flip) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < ITEMS; k++) {
            const unsigned digit = digit_of(key[k], shift, flip), peers = lanes_with(digit);
            rank[k] = counts[digit] + __popc(peers & ((1u << lane) - 1));
            __syncwarp();
            if (peers >> lane == 1) counts[digit] = rank[k] + 1;
            __syncwarp();
        }
    }
};

__device__ inline unsigned warp_inclusive(unsigned value) {
    for (int step = 1; step < 32; step *= 2) {
        const unsigned left = __shfl_up_sync(ALL, value, step);
        if (int(threadIdx.x % 32) >= step) value += left;
    }
    return value;
}

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

inline void expect_sizes(int64_t n, int64_t scratch_size) {
    course::require(n >= 0 && n < int64_t(1) << 32, "sort: n must be from 0 to 2^32 - 1");
    course::require(scratch_size >= 2 * n + 16384, "sort: scratch must have 2 n + 16384 words");
}
