// What a warp needs to multiply tiles on tensor cores by hand (19_flash_attention_v1.cu, 20): mma.sync, ldmatrix,
// asynchronous 16-byte copies, a swizzle. PTX ISA, "Matrix fragments for mma.m16n8k16".
//
// A fragment is a small matrix spread over the 32 lanes; lane = 4 g + t owns, in pairs of neighbours (one register):
//     A 16 x 16    a0 (g, 2t)   a1 (g + 8, 2t)   a2 (g, 2t + 8)   a3 (g + 8, 2t + 8)     16-bit, row, column
//     B 16 x  8    b0 (2t, g)   b1 (2t + 8, g)                                            16-bit, pair down a column
//     C 16 x  8    c0, c1 (g, 2t)   c2, c3 (g + 8, 2t)                                    fp32
// Two C tiles side by side, rounded to 16 bits and packed in pairs, are an A tile: no lane needs an element of another.
// That is what lets attention keep the probabilities P in registers between S = Q K^T and P V.
//
// Emulated (no tensor cores on a CPU), mma and ldmatrix are spelled out in shuffles: slower, and a precise definition.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace tensor {

#ifdef COURSE_EMULATED
using Address = const char*;
inline Address address(const void* shared) { return static_cast<const char*>(shared); }
inline float exp2_fast(float x) { return exp2f(x); }
inline void copy_16(char* to, const void* from, bool wanted) { __pipeline_memcpy_async(to, from, 16, wanted ? 0 : 16); }

template <typename T>
inline float half_of(uint32_t pair, int which) {
    const uint16_t bits = uint16_t(which ? pair >> 16 : pair);
    T value;
    std::memcpy(&value, &bits, 2);
    return float(value);
}

template <bool TRANSPOSED>
inline void ldmatrix(uint32_t (&r)[4], Address row) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {  // lane 8 i + r has brought the address of row r of the i-th 8 x 8 matrix
        if constexpr (TRANSPOSED) {
            const auto first = (Address)__shfl_sync(~0u, (unsigned long long)row, 8 * i + 2 * t) + 2 * g;
            const auto second = (Address)__shfl_sync(~0u, (unsigned long long)row, 8 * i + 2 * t + 1) + 2 * g;
            r[i] = *(const uint16_t*)first | uint32_t(*(const uint16_t*)second) << 16;
        } else {
            r[i] = *(const uint32_t*)((Address)__shfl_sync(~0u, (unsigned long long)row, 8 * i + g) + 4 * t);
        }
    }
}

template <typename T>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int s = 0; s < 4; s++) {  // the four lanes that share the sum over k
        uint32_t left[4], right[2][2];
        for (int i = 0; i < 4; i++) left[i] = __shfl_sync(~0u, a[i], 4 * g + s);
        for (int n = 0; n < 2; n++) {
            right[n][0] = __shfl_sync(~0u, b0, 4 * (2 * t + n) + s);
            right[n][1] = __shfl_sync(~0u, b1, 4 * (2 * t + n) + s);
        }
        for (int i = 0; i < 4; i++)
            for (int pair = 0; pair < 4; pair++)
                c[i] += half_of<T>(left[i / 2 + pair / 2 * 2], pair % 2) * half_of<T>(right[i % 2][pair / 2], pair % 2);
    }
}
#else
using Address = uint32_t;
__device__ __forceinline__ Address address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

// exp2f without the care for results below 2^-126, which flush to 0: one instruction instead of four.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes to shared memory without a register in between, or 16 zeros (then `from` is not read). What
// __pipeline_memcpy_async does, but for its branch on the number of zeros.
__device__ __forceinline__ void copy_16(char* to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}

// Four 8 x 8 matrices of 16-bit values; lane l brings the address of row l % 8 of matrix l / 8. Volatile and "memory":
// shared memory changes between two reads of one address, and the compiler cannot see that from the registers.
template <bool TRANSPOSED>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], Address row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row)
                     : "memory");
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Two floats, rounded, in one register: the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
}

// Which head and which rows a block of a grid of heads * tiles works on. Heads go in groups whose streamed tensors fit
// in the L2 together. In a group the tiles with the longest loops start first (causal: the last queries, the first
// keys). Otherwise a few of them would run alone at the end.
struct Place {
    int head, first;
};
__device__ __forceinline__ Place place(int S, int rows, int heads, int group, bool last_first) {
    const int tiles = (S + rows - 1) / rows;
    const int first_head = blockIdx.x / (tiles * group) * group, nth = blockIdx.x - first_head * tiles;
    const int in_group = min(group, heads - first_head), tile = nth / in_group;
    return {first_head + nth % in_group, (last_first ? tiles - 1 - tile : tile) * rows};
}
inline int heads_in_l2(int64_t bytes_a_head, int64_t heads) {  // L2 has 50 MB or more, some for what streams by
    return int(std::clamp<int64_t>((int64_t(24) << 20) / bytes_a_head, 1, heads));
}

// The offset of 16 bytes in a tile [rows][D], in bytes. A row is 128 or 256 bytes, and ldmatrix reads eight rows of
// one column at once. Without the exclusive or these would be in the same four banks: 8 wavefronts instead of 1.
template <int D>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return uint32_t(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

// The block's threads start a copy of `live` rows of D values into a tile of ROWS; the rows past `live` become zeros.
template <typename T, int ROWS, int D, int THREADS>
__device__ __forceinline__ void copy_rows(T* tile_smem, const T* from, int live) {
    constexpr int CHUNKS = D / 8;
    static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies as many 16-byte chunks");
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        const int row = (threadIdx.x + i * THREADS) / CHUNKS, chunk = (threadIdx.x + i * THREADS) % CHUNKS;
        copy_16(reinterpret_cast<char*>(tile_smem) + swizzled<D>(row, chunk), from + row * D + chunk * 8, row < live);
    }
}

// acc [16 M][N] += A [16 M][D] times B [N][D] transposed; A and B swizzled tiles. A warp computes it alone.
template <typename T, int M, int N, int D>
__device__ __forceinline__ void multiply_transposed(float (&acc)[M][N / 8][4], const T* a_smem, const T* b_smem) {
    const int lane = threadIdx.x % 32;
    const uint32_t a_row = swizzled<D>(lane & 15, lane >> 4);
    const uint32_t b_row = swizzled<D>((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
    const Address a_tile = address(a_smem), b_tile = address(b_smem);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix<false>(a[m], a_tile + (a_row ^ (k * 32)) + m * 16 * D * 2);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            ldmatrix<false>(b, b_tile + (b_row ^ (k * 32)) + n * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<T>(acc[m][2 * n], a[m], b[0], b[1]);
                mma<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// acc [16 M][D] += P [16 M][K] times B [K][D]; P comes in registers, as A fragments.
template <typename T, int M, int K, int D>
__device__ __forceinline__ void multiply(float (&acc)[M][D / 8][4], const uint32_t (&p)[M][K / 16][4],
                                         const T* b_smem) {
    const int lane = threadIdx.x % 32;
    const uint32_t b_row = swizzled<D>(lane & 15, lane >> 4);
    const Address b_tile = address(b_smem);
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldmatrix<true>(b, b_tile + (b_row ^ (n * 32)) + k * 16 * D * 2);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma<T>(acc[m][2 * n], p[m][k], b[0], b[1]);
                mma<T>(acc[m][2 * n + 1], p[m][k], b[2], b[3]);
            }
        }
    }
}

// C fragments [16 M][K], rounded, as A fragments.
template <typename T, int M, int K>
__device__ __forceinline__ void as_left(uint32_t (&a)[M][K / 16][4], const float (&c)[M][K / 8][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < K / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][k][i] = pack<T>(c[m][2 * k + i / 2][i % 2 * 2], c[m][2 * k + i / 2][i % 2 * 2 + 1]);
}

// Write a warp's acc [16 M][D] to `live` rows at `to`, 16 bytes per lane, through shared memory of the warp's own.
template <typename T, int M, int D>
__device__ __forceinline__ void store_rows(T* to, int live, const float (&acc)[M][D / 8][4], T* own_smem) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    char* tile = reinterpret_cast<char*>(own_smem);
    __syncwarp();  // other lanes may still read this memory
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<uint32_t*>(tile + swizzled<D>(m * 16 + h * 8 + g, n) + 4 * t) =
                    pack<T>(acc[m][n][2 * h], acc[m][n][2 * h + 1]);
    __syncwarp();
#pragma unroll
    for (int i = lane; i < M * 16 * (D / 8); i += 32) {
        const int row = i / (D / 8), chunk = i % (D / 8);
        if (row < live)
            *reinterpret_cast<uint4*>(to + row * D + chunk * 8) =
                *reinterpret_cast<const uint4*>(tile + swizzled<D>(row, chunk));
    }
}

}  // namespace tensor
