// A tile of keys in the registers of a block: load it, rank the keys of a warp by their digit. An LSD radix sort is
// one stable step a digit, from the lowest digit up. Stable: keys that agree in a digit keep the order that the lower
// digits gave them.
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

// The lanes of this warp whose digit is the same: what __match_any_sync answers, by one vote a bit. A lane that votes
// otherwise has another digit. From plain C++ the compiler makes 6 instructions a bit, since it shifts the bit down
// before the vote. From this PTX it makes 3, and these 8 bits of every key are half of all the work.
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
