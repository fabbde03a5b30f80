// A tile of a scan in the registers of a block: load, prefix sums, store, and the words that it publishes for others.
#pragma once
#include "copy_async.cuh"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr unsigned ALL = 0xFFFFFFFF;  // every lane of a warp

// Hillis-Steele among the lanes of a warp, for several values at once. The values do not depend on each other, so
// their shuffles overlap; the five steps of one value wait for each other.
template <typename T, int COUNT>
__device__ void warp_inclusive(T (&values)[COUNT]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const T left = __shfl_up_sync(ALL, values[k], step);
            if (lane >= step) values[k] += left;
        }
    }
}

// Sum of `total` over the warps before this one, and over the block. The barrier is the block's only one: each warp
// scans the totals for itself instead of waiting for one that does.
template <typename T, int WARPS>
__device__ T warps_before(T total, T& block_total) {
    __shared__ T totals[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    T scanned[1] = {lane < WARPS ? totals[lane] : T(0)};
    warp_inclusive(scanned);
    block_total = __shfl_sync(ALL, scanned[0], WARPS - 1);
    const T before = __shfl_sync(ALL, scanned[0], warp > 0 ? warp - 1 : 0);
    return warp > 0 ? before : T(0);
}

// What a tile says to those after it: status and value in one 64-bit word, which is written and read whole, so that no
// fence is needed between them. A word of zeros is EMPTY.
using Word = unsigned long long;
constexpr unsigned EMPTY = 0, SUM = 1, PREFIX = 2;

__device__ inline unsigned to_bits(float value) { return __float_as_uint(value); }
__device__ inline unsigned to_bits(unsigned value) { return value; }
__device__ inline void from_bits(unsigned bits, float& value) { value = __uint_as_float(bits); }
__device__ inline void from_bits(unsigned bits, unsigned& value) { value = bits; }

template <typename T>
__device__ void publish(volatile Word* words, int64_t tile, unsigned status, T value) {
    words[tile] = Word(status) << 32 | to_bits(value);
}

// 16 bytes of T, as one access.
template <typename T>
using Four = std::conditional_t<std::is_same_v<T, float>, float4, uint4>;

// THREADS * VECTORS * 4 elements. Each warp owns a stretch of them. Its lane l owns the groups l, l + 32, ... of four
// neighbours, so that a request of the warp is 512 contiguous bytes.
template <typename T, int THREADS, int VECTORS>
struct Tile {
    static constexpr int SIZE = THREADS * VECTORS * 4;
    T v[VECTORS][4];

    static __device__ int start(int k) {  // within the tile, of this thread's k-th group of four
        return ((threadIdx.x / 32 * VECTORS + k) * 32 + threadIdx.x % 32) * 4;
    }
    static __device__ int size(int64_t tile, int64_t n) { return int(min(n - tile * SIZE, int64_t(SIZE))); }
    // Whole tiles of aligned memory go by 16 bytes; the last tile, or all of an odd address's, by elements, masked.
    static __device__ bool whole(const T* p, int64_t tile, int64_t n) {
        return (tile + 1) * SIZE <= n && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    }
    // Into shared memory, without waiting; each thread copies the elements that it will take from there.
    static __device__ void copy(T* to, const T* x, int64_t tile, int64_t n) {
        const bool all = whole(x, tile, n);
        const int there = size(tile, n);
        x += tile * SIZE;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int i = start(k);
            if (all) copy_async<16>(to + i, x + i, true);
            else
                for (int e = 0; e < 4; e++) copy_async<4>(to + i + e, x + i + e, i + e < there);
        }
    }
    __device__ void take(const T* from) {  // a whole tile, aligned: of memory, or as `copy` left it
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const Four<T> q = *reinterpret_cast<const Four<T>*>(from + start(k));
            v[k][0] = q.x, v[k][1] = q.y, v[k][2] = q.z, v[k][3] = q.w;
        }
    }
    __device__ void load(const T* x, int64_t tile, int64_t n) {
        const bool all = whole(x, tile, n);
        x += tile * SIZE;
        if (all) {
            take(x);
        } else {
#pragma unroll
            for (int e = 0; e < VECTORS * 4; e++) {
                const int i = start(e / 4) + e % 4;
                v[e / 4][e % 4] = i < size(tile, n) ? x[i] : T(0);
            }
        }
    }
    __device__ void store(T* y, int64_t tile, int64_t n, T before) {
#pragma unroll
        for (int e = 0; e < VECTORS * 4; e++) v[e / 4][e % 4] += before;
        const bool all = whole(y, tile, n);
        y += tile * SIZE;
        if (all) {
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                *reinterpret_cast<Four<T>*>(y + start(k)) = {v[k][0], v[k][1], v[k][2], v[k][3]};
        } else {
#pragma unroll
            for (int e = 0; e < VECTORS * 4; e++) {
                const int i = start(e / 4) + e % 4;
                if (i < size(tile, n)) y[i] = v[e / 4][e % 4];
            }
        }
    }
    // Inclusive prefixes within each group of four, which both functions below expect.
    __device__ void scan_fours() {
#pragma unroll
        for (int e = 0; e < VECTORS * 4; e++)
            if (e % 4 > 0) v[e / 4][e % 4] += v[e / 4][e % 4 - 1];
    }
    // Sum of this warp's part of the tile: 5 shuffles in all, where scan makes 7 a group.
    __device__ T sum() const {
        T part = T(0);
#pragma unroll
        for (int k = 0; k < VECTORS; k++) part += v[k][3];
        for (int step = 16; step > 0; step /= 2) part += __shfl_xor_sync(ALL, part, step);
        return part;
    }
    // Inclusive prefixes within this warp's part; returns its sum. Four groups at a time overlap enough, and cost four
    // registers; all 16 of a large tile would cost 16.
    __device__ T scan() {
        T part = T(0);
        constexpr int AT_ONCE = VECTORS % 4 == 0 ? 4 : VECTORS % 3 == 0 ? 3 : 1;
#pragma unroll
        for (int first = 0; first < VECTORS; first += AT_ONCE) {
            T fours[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) fours[k] = v[first + k][3];
            warp_inclusive(fours);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const T left = __shfl_up_sync(ALL, fours[k], 1);
                const T before = threadIdx.x % 32 > 0 ? part + left : part;
                for (int j = 0; j < 4; j++) v[first + k][j] += before;
                part += __shfl_sync(ALL, fours[k], 31);
            }
        }
        return part;
    }
};
