// What programs that work along rows need: 16 bytes as floats, a thread's share of a row in registers, reductions over
// lanes. All but the last two are device functions.
#pragma once
#include "course.cuh"

#include <cuda_bf16.h>

#include <cstdint>

using bf16 = __nv_bfloat16;
constexpr unsigned ALL_LANES = 0xffffffffu;

template <typename T>
constexpr int VEC = 16 / int(sizeof(T));  // elements in 16 bytes, the widest access that a thread can make

__host__ __device__ inline float widen(float value) { return value; }
__host__ __device__ inline float widen(bf16 value) { return __bfloat162float(value); }

template <typename T>
__host__ __device__ inline T narrow(float value) {
    if constexpr (sizeof(T) == 4)
        return value;
    else
        return __float2bfloat16(value);
}

// A bf16 is the upper half of a float, so widening two of them is a shift and a mask.
template <typename T>
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[VEC<T>]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        if constexpr (sizeof(T) == 4) {
            f[w] = __uint_as_float(words[w]);
        } else {
            f[2 * w] = __uint_as_float(words[w] << 16);
            f[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
        }
    }
}

template <typename T>
__device__ __forceinline__ unsigned bits(T value) {
    if constexpr (sizeof(T) == 4)
        return __float_as_uint(value);
    else
        return __bfloat16_as_ushort(value);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&f)[VEC<T>]) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        if constexpr (sizeof(T) == 4)
            words[w] = __float_as_uint(f[w]);
        else
            words[w] = bits(narrow<bf16>(f[2 * w])) | bits(narrow<bf16>(f[2 * w + 1])) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread's share of a row: vectors first, first + step, ... below `end`. `whole` says that every row starts at a
// multiple of 16 bytes and ends at one; otherwise each element comes by itself, and those from n on are `fill`.
template <typename T, int K>
__device__ __forceinline__ void load_share(uint4 (&v)[K], const T* row, int n, int first, int step, int end, bool whole,
                                           float fill) {
    const unsigned one = bits(narrow<T>(fill)), word = sizeof(T) == 4 ? one : one | one << 16;
    if (whole) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int i = first + k * step;
            v[k] = i < end ? reinterpret_cast<const uint4*>(row)[i] : make_uint4(word, word, word, word);
        }
    } else {
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int i = first + k * step;
            float f[VEC<T>];
#pragma unroll
            for (int e = 0; e < VEC<T>; e++) {
                const int column = i * VEC<T> + e;
                f[e] = i < end && column < n ? widen(row[column]) : fill;
            }
            v[k] = pack<T>(f);
        }
    }
}

template <typename T>
__device__ __forceinline__ void store_vector(const float (&f)[VEC<T>], T* row, int n, int i, bool whole) {
    if (whole) {
        reinterpret_cast<uint4*>(row)[i] = pack<T>(f);
    } else {
#pragma unroll
        for (int e = 0; e < VEC<T>; e++)
            if (i * VEC<T> + e < n) row[i * VEC<T> + e] = narrow<T>(f[e]);
    }
}

// Which vectors of a row a thread owns: first, first + step, ... below end. n elements in a row.
struct Share {
    int n, first, step, end;
    bool whole;

    template <int COUNT, typename T>
    __device__ __forceinline__ void load(uint4 (&v)[COUNT], const T* row) const {
        load_share<T>(v, row, n, first, step, end, whole, 0.0f);
    }
    // How many elements of vector k are there.
    template <typename T>
    __device__ __forceinline__ int there(int k) const {
        const int i = first + k * step;
        return i < end ? min(VEC<T>, n - i * VEC<T>) : 0;
    }
};

// Hides from the compiler that v is unchanged. So it converts v to float again instead of keeping the floats, which
// for 16-bit elements take twice the registers.
template <int COUNT>
__device__ __forceinline__ void again(uint4 (&v)[COUNT]) {
#ifndef COURSE_EMULATED
#pragma unroll
    for (int k = 0; k < COUNT; k++) asm("" : "+r"(v[k].x), "+r"(v[k].y), "+r"(v[k].z), "+r"(v[k].w));
#endif
}

// Over groups of LANES neighbouring lanes; every lane gets the result.
template <int LANES = 32>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

template <int LANES = 32>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, apart));
    return value;
}

// Every row starts and ends at a multiple of 16 bytes.
template <typename T>
inline bool whole_vectors(const void* a, const void* b, int64_t n) {
    return n % VEC<T> == 0 && reinterpret_cast<uintptr_t>(a) % 16 == 0 && reinterpret_cast<uintptr_t>(b) % 16 == 0;
}

#ifndef COURSE_EMULATED
inline bool has_clusters() {
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
}
#endif
