// v8 to v10 of the matrix multiply: asynchronous copies, and operands that are loaded a step ahead.
#pragma once
#include "copy_async.cuh"
#include "course.cuh"

// Where in C a block's tile begins. Grids are one-dimensional, tiles row after row: gridDim.y would end at 65,535.
struct Place {
    int64_t row, column;
};

__device__ inline Place place(int64_t n, int tile_m, int tile_n) {
    const int64_t tiles_n = (n + tile_n - 1) / tile_n;
    return {blockIdx.x / tiles_n * tile_m, blockIdx.x % tiles_n * tile_n};
}

inline int64_t count_tiles(int64_t m, int64_t n, int tile_m, int tile_n) {
    return course::ceil_div(m, tile_m) * course::ceil_div(n, tile_n);
}

// A warp as 4 rows of 8 lanes. Bit 0 of the lane is a bit of its row and bit 1 one of its column: see v7.
__device__ inline int lane_row(int thread) { return (thread & 1) + (thread >> 4 & 1) * 2; }
__device__ inline int lane_column(int thread) { return thread >> 1 & 7; }

// Four floats that begin at a multiple of 16 bytes: one access.
__device__ inline float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ inline const float4& quad(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void take(float* to, const float* from) {
    const float4 four = quad(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// What a block of one instance is: WARPS_M x WARPS_N warps of 4 x 8 lanes, each with TM x TN elements of C.
template <int TM, int TN, int BK, int STAGES, int WARPS_M, int WARPS_N, bool QUADS>
struct Shape {
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N, BM = WARPS_M * 4 * TM, BN = WARPS_N * 8 * TN;
    static constexpr int A_PITCH = BM + 4, A_SIZE = BK * A_PITCH, STAGE = A_SIZE + BK * BN;  // in floats
    static constexpr int A_ROWS = THREADS / 8, B_WIDTH = QUADS ? 4 : 1;
    static constexpr int B_ROWS = THREADS / (BN / B_WIDTH);  // rows of B that the block copies at once, as A_ROWS of A
    static_assert(STAGES >= 2 && BM % A_ROWS == 0 && BK % B_ROWS == 0 && BK % 8 == 0 && TM % 4 == 0 && TN % 4 == 0);
};

// New: cp.async. STAGES tiles of A and B are in flight; while one is multiplied the others arrive. A is still
// transposed, which copies of 4 bytes can do. A warp takes 8 steps of k from each of 4 rows (4 whole sectors). It
// stores them at k * (BM + 4) + row, in 32 different banks. B keeps its rows and takes 16 bytes a copy. New: operands
// a step ahead. Those of step i + 1 are loaded before the FMAs of step i, so that no FMA waits for shared memory. Even
// at the barrier: it comes a step before the tile's end, when the last step's operands are in registers. The stage is
// free then, and the next tile's first operands are loaded under the last step's FMAs. Predicted: one barrier a tile
// where v7 has two, no wait for memory at all. A third stage should bring nothing. A tile of 8 steps is 2000 cycles of
// FMAs for an SM with 16 warps, and a load from L2 takes 300 to 600.
template <int TM, int TN, int BK, int STAGES, int WARPS_M, int WARPS_N, int BLOCKS, bool QUADS>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, BLOCKS)
pipelined_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    using S = Shape<TM, TN, BK, STAGES, WARPS_M, WARPS_N, QUADS>;
    extern __shared__ __align__(16) float tiles_smem[];  // [STAGES] x (A [BK][BM + 4], B [BK][BN])
    const Place at = place(n, S::BM, S::BN);
    const int t = threadIdx.x, warp = t / 32;

    // What this thread copies of each tile. Rows past the end of A repeat the last: their sums are never stored.
    const int a_step = t % 8, a_row = t / 8;
    const float* a_from[S::BM / S::A_ROWS];
#pragma unroll
    for (int p = 0; p < S::BM / S::A_ROWS; p++) {
        const int64_t row = at.row + a_row + p * S::A_ROWS;
        a_from[p] = a + (row < m ? row : m - 1) * k + a_step;
    }
    const int b_row = t / (S::BN / S::B_WIDTH), b_column = t % (S::BN / S::B_WIDTH) * S::B_WIDTH;
    const float* b_from = b + b_row * n + at.column + b_column;
    const bool b_inside = at.column + b_column < n;
    int k_left = k;  // from the tile that is fetched next to the end; below 1 there is nothing left but zeros
    auto fetch = [&](float* stage) {
#pragma unroll
        for (int p = 0; p < S::BM / S::A_ROWS; p++) {
#pragma unroll
            for (int step = 0; step < BK; step += 8)
                copy_async<4>(stage + (a_step + step) * S::A_PITCH + a_row + p * S::A_ROWS, a_from[p] + step,
                              a_step + step < k_left);
            a_from[p] += BK;
        }
#pragma unroll
        for (int p = 0; p < BK; p += S::B_ROWS)
            copy_async<4 * S::B_WIDTH>(stage + S::A_SIZE + (b_row + p) * S::BN + b_column, b_from + p * n,
                                       b_inside && b_row + p < k_left);
        b_from += BK * n;
        k_left -= BK;
        __pipeline_commit();
    };

    // What it multiplies: rows y .. y + 3, y + 16 .. y + 19, ... of the tile, columns x .. x + 3, x + 32 .. x + 35, ...
    const int y = warp / WARPS_N * 4 * TM + lane_row(t) * 4, x = warp % WARPS_N * 8 * TN + lane_column(t) * 4;
    float sum[TM][TN] = {}, a_rmem[2][TM], b_rmem[2][TN];
    auto load = [&](const float* stage, int step, int into) {
#pragma unroll
        for (int r = 0; r < TM; r += 4) take(a_rmem[into] + r, stage + step * S::A_PITCH + y + 4 * r);
#pragma unroll
        for (int s = 0; s < TN; s += 4) take(b_rmem[into] + s, stage + S::A_SIZE + step * S::BN + x + 8 * s);
    };

#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(tiles_smem + s * S::STAGE);
    __pipeline_wait_prior(STAGES - 1);
    __syncthreads();
    float* stage = tiles_smem;
    load(stage, 0, 0);
#pragma unroll 1
    for (int64_t k0 = 0; k0 < k; k0 += BK) {
#pragma unroll
        for (int i = 0; i < BK; i++) {
            if (i < BK - 1) {
                load(stage, i + 1, (i + 1) % 2);
            } else {
                __pipeline_wait_prior(STAGES - 2);  // my part of the next tile is there,
                __syncthreads();                    // everyone's is, and no thread reads this tile any more
                fetch(stage);
                stage = stage == tiles_smem + (STAGES - 1) * S::STAGE ? tiles_smem : stage + S::STAGE;
                load(stage, 0, 0);
            }
#pragma unroll
            for (int s = 0; s < TN; s++) {
#pragma unroll
                for (int j = 0; j < TM; j++) {
                    const int r = s % 2 ? TM - 1 - j : j;  // back and forth: each FMA shares an operand with the last
                    sum[r][s] += a_rmem[i % 2][r] * b_rmem[i % 2][s];
                }
            }
        }
    }
    __pipeline_wait_prior(0);  // zeros may still be in flight

#pragma unroll
    for (int r = 0; r < TM; r++) {
        const int64_t row = at.row + y + r / 4 * 16 + r % 4;
#pragma unroll
        for (int s = 0; s < TN; s += 4) {
            const int64_t column = at.column + x + 8 * s;
            if (row >= m || column >= n) continue;
            float* to = c + row * n + column;
            if (QUADS) quad(to) = {sum[r][s], sum[r][s + 1], sum[r][s + 2], sum[r][s + 3]};
            else
                for (int e = 0; e < 4 && column + e < n; e++) to[e] = sum[r][s + e];
        }
    }
}

template <int TM, int TN, int BK, int STAGES, int WARPS_M, int WARPS_N, int BLOCKS, bool QUADS>
void start_pipelined(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    using S = Shape<TM, TN, BK, STAGES, WARPS_M, WARPS_N, QUADS>;
    const auto kernel = pipelined_kernel<TM, TN, BK, STAGES, WARPS_M, WARPS_N, BLOCKS, QUADS>;
    constexpr int bytes = STAGES * S::STAGE * sizeof(float);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<count_tiles(m, n, S::BM, S::BN), S::THREADS, bytes, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// Any M, N, K. Where B's or C's rows do not begin at multiples of 16 bytes, copies of 4 bytes, four times as many.
template <int TM, int TN, int BK, int STAGES, int WARPS_M, int WARPS_N, int BLOCKS>
void launch_pipelined(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    course::require(k < int64_t(1) << 31, "K must be below 2^31");
    if (m == 0 || n == 0) return;
    const bool quads = n % 4 == 0 && (reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c)) % 16 == 0;
    const auto start = quads ? start_pipelined<TM, TN, BK, STAGES, WARPS_M, WARPS_N, BLOCKS, true>
                             : start_pipelined<TM, TN, BK, STAGES, WARPS_M, WARPS_N, BLOCKS, false>;
    start(a, b, c, m, n, k, stream);
}
