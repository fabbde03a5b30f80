// v2 of 20_flash_attention_backward.cu: the same two passes on tensor cores.
//
// New: as in v4 of the forward pass, a warp keeps its results in registers. The pass for dK and dV computes S
// *transposed*, K Q^T. So P^T and dS^T come out as C fragments with keys as rows, and these are operand A of P^T dO
// and dS^T Q. The pass for dQ computes S and dP and multiplies dS K. No P and no dS in shared memory, one barrier a
// tile. Q (or K) is fetched twice, once as [n][k] and once, by ldmatrix.trans, as [k][n]. Predicted: 14 S^2 D FLOPs
// for the 10 that one pass with atomics needs, and every exponential twice. Of the 540 TFLOP/s that mma.sync can do,
// 10/14 are 385. Every B fragment serves 16 or, where registers allow, 32 rows. So shared memory is about as busy as
// the tensor cores: half of that, 190, if the two do not overlap.
#pragma once
#include "mma.cuh"
#include "course.cuh"

// M * 16 rows per warp, COLS rows of the other side a tile. Two accumulators of [16 M][D] fp32 (dK, dV) or one (dQ).
template <int D, bool KEYS>
struct BackwardTiles {
    static constexpr int WARPS = 4, M = KEYS ? 1 : 2, COLS = D == 128 && !KEYS ? 32 : 64;
    static constexpr int ROWS = WARPS * M * 16, THREADS = WARPS * 32, BLOCKS = 2;  // blocks: on one SM
    static constexpr int BYTES = 2 * D * (2 * ROWS + 4 * COLS) + (KEYS ? 16 * COLS : 0);
};

//     KEYS: rows are keys, x1, x2 = K, V, a tile is of queries, y1, y2 = Q, dO; out1, out2 = dK, dV.
//     Else: rows are queries, x1, x2 = Q, dO, a tile is of keys, y1, y2 = K, V; out1 = dQ.
// lse2, delta [heads, PS]: lse * log2(e) and rowsum(dO * O); past S they are infinite and 0, so that P is 0 there.
template <typename T, int D, bool KEYS, class Tile = BackwardTiles<D, KEYS>>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    attention_backward_mma_kernel(const T* x1, const T* x2, const T* y1, const T* y2, const float* lse2,
                                  const float* delta, T* out1, T* out2, int S, int PS, int heads, int group,
                                  bool causal, float scale) {
    constexpr int ROWS = Tile::ROWS, COLS = Tile::COLS, M = Tile::M;
    extern __shared__ __align__(1024) uint4 backward_smem[];
    T* x1_smem = reinterpret_cast<T*>(backward_smem);                    // [ROWS][D], swizzled as all tiles
    T* x2_smem = x1_smem + ROWS * D;                                     // [ROWS][D]
    T* y1_smem = x2_smem + ROWS * D;                                     // [2][COLS][D]
    T* y2_smem = y1_smem + 2 * COLS * D;                                 // [2][COLS][D]
    float* stats_smem = reinterpret_cast<float*>(y2_smem + 2 * COLS * D);  // [2][2][COLS]: lse2 and delta, KEYS only
    const auto [head, first] = tensor::place(S, ROWS, heads, group, !KEYS);
    const int64_t base = int64_t(head) * S, stats = int64_t(head) * PS;
    const int own = threadIdx.x / 32 * M * 16, warp_row = first + own, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int begin = KEYS && causal ? first / COLS : 0;  // queries before the first key see none of the keys
    const int end = ((!KEYS && causal ? min(S, first + ROWS) : S) + COLS - 1) / COLS;

    const auto copy_tile = [&](int j) {
        const int stage = j % 2;
        const int64_t at = (base + j * COLS) * D;
        tensor::copy_rows<T, COLS, D, Tile::THREADS>(y1_smem + stage * COLS * D, y1 + at, S - j * COLS);
        tensor::copy_rows<T, COLS, D, Tile::THREADS>(y2_smem + stage * COLS * D, y2 + at, S - j * COLS);
        if (KEYS && threadIdx.x < COLS / 2) {  // 4 floats a thread; PS is a multiple of COLS
            const int half = threadIdx.x / (COLS / 4), i = threadIdx.x % (COLS / 4) * 4;
            tensor::copy_16(reinterpret_cast<char*>(stats_smem + (2 * stage + half) * COLS + i),
                            (half ? delta : lse2) + stats + j * COLS + i, true);
        }
        __pipeline_commit();
    };
    tensor::copy_rows<T, ROWS, D, Tile::THREADS>(x1_smem, x1 + (base + first) * D, S - first);
    tensor::copy_rows<T, ROWS, D, Tile::THREADS>(x2_smem, x2 + (base + first) * D, S - first);
    copy_tile(begin);

    float row_lse2[M][2], row_delta[M][2], acc1[M][D / 8][4] = {}, acc2[KEYS ? M : 1][D / 8][4] = {};
    if (!KEYS)
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            row_lse2[i / 2][i % 2] = lse2[stats + warp_row + i * 8 + g];  // a multiple of ROWS lies within PS
            row_delta[i / 2][i % 2] = delta[stats + warp_row + i * 8 + g];
        }
    for (int j = begin; j < end; j++) {
        __pipeline_wait_prior(0);
        __syncthreads();  // tile j is there for all, and all have read tile j - 1
        if (j + 1 < end) copy_tile(j + 1);
        if (warp_row >= S) continue;
        if (causal && (KEYS ? (j + 1) * COLS <= warp_row : j * COLS >= warp_row + M * 16)) continue;  // all masked
        const T *y1_tile = y1_smem + j % 2 * COLS * D, *y2_tile = y2_smem + j % 2 * COLS * D;
        const float* stats_tile = stats_smem + j % 2 * 2 * COLS;
        const bool partial = KEYS ? causal && j * COLS < warp_row + M * 16 - 1
                                  : (j + 1) * COLS > (causal ? min(S, warp_row + 1) : S);
        float p[M][COLS / 8][4] = {};
        tensor::multiply_transposed<T, M, COLS, D>(p, x1_smem + own * D, y1_tile);
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float2 l2 = {};
            if (KEYS) l2 = *reinterpret_cast<const float2*>(stats_tile + n * 8 + 2 * t);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float l = KEYS ? (i % 2 ? l2.y : l2.x) : row_lse2[m][i / 2];
                    p[m][n][i] = tensor::exp2_fast(p[m][n][i] * (scale * 1.44269504f) - l);
                    const int row = warp_row + m * 16 + i / 2 * 8 + g, col = j * COLS + n * 8 + 2 * t + i % 2;
                    if (partial && (KEYS ? col < row : col >= S || (causal && col > row))) p[m][n][i] = 0;
                }
        }
        uint32_t left[M][COLS / 16][4];
        if constexpr (KEYS) {
            tensor::as_left<T, M, COLS>(left, p);
            tensor::multiply<T, M, COLS, D>(acc2, left, y2_tile);  // dV += P^T dO
        }
        float ds[M][COLS / 8][4] = {};
        tensor::multiply_transposed<T, M, COLS, D>(ds, x2_smem + own * D, y2_tile);  // dP = dO V^T, or transposed
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            float2 d2 = {};
            if (KEYS) d2 = *reinterpret_cast<const float2*>(stats_tile + COLS + n * 8 + 2 * t);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    ds[m][n][i] = p[m][n][i] * (ds[m][n][i] - (KEYS ? (i % 2 ? d2.y : d2.x) : row_delta[m][i / 2]));
        }
        tensor::as_left<T, M, COLS>(left, ds);
        tensor::multiply<T, M, COLS, D>(acc1, left, y1_tile);  // dK += dS^T Q, or dQ += dS K
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc1[m][n][i] *= scale;
    // Each warp has read its own rows of x1 and x2 alone: their places serve what it writes.
    tensor::store_rows<T, M, D>(out1 + (base + warp_row) * D, S - warp_row, acc1, x1_smem + own * D);
    if constexpr (KEYS)
        tensor::store_rows<T, M, D>(out2 + (base + warp_row) * D, S - warp_row, acc2, x2_smem + own * D);
}

template <typename T, int D, bool KEYS>
void launch_backward_mma(const T* x1, const T* x2, const T* y1, const T* y2, const float* lse2, const float* delta,
                         T* out1, T* out2, int64_t heads, int64_t S, int PS, bool causal, float scale,
                         cudaStream_t stream) {
    using Tile = BackwardTiles<D, KEYS>;
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_mma_kernel<T, D, KEYS>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::BYTES));
    const int64_t blocks = heads * course::ceil_div(S, Tile::ROWS);
    course::require(blocks < int64_t(1) << 31, "attention_backward_mma: B * H * S is too large");
    attention_backward_mma_kernel<T, D, KEYS><<<int(blocks), Tile::THREADS, Tile::BYTES, stream>>>(
        x1, x2, y1, y2, lse2, delta, out1, out2, int(S), PS, int(heads), tensor::heads_in_l2(4 * S * D, heads), causal,
        scale);
    CUDA_CHECK(cudaGetLastError());
}
