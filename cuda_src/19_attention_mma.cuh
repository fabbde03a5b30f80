// v4 and v5 of 19_flash_attention_v1.cu: the same algorithm on tensor cores.
//
// v4. New: both matmuls are mma.sync.m16n8k16, 4096 FLOPs an instruction of a warp where v3's has 64. A block of 4
// warps keeps 128 queries in shared memory. A warp owns 32 of them, so it uses each K and V fragment that it fetches
// twice. The MMA leaves its S, 32 x 64 scores, in registers as C fragments. After the softmax these *are* operand A of
// P V (mma.cuh): P is never stored. V is fetched transposed by ldmatrix.trans, the tiles are swizzled. The scale and
// log2(e) are one factor in one multiply-add: exp(s scale - m scale) = exp2(s c - m c), c = scale log2(e). Predicted,
// D = 128: for a tile of 64 keys a warp fetches 16 KB of K, 16 KB of V and its 8 KB of Q again. That is 320
// wavefronts, 1280 cycles for the four warps of a block. These multiply 4 x 32 x 64 x 128 x 4 FLOPs. mma.sync can do
// 2400 FLOPs per cycle on an SM: 1750 cycles. With 16 queries per warp, eight warps would read 2304 wavefronts in the
// same 1750 cycles: shared memory would be the limit. On 132 SMs at 1.7 GHz that is 540 TFLOP/s if MMAs and reads
// overlap, 310 if they do not.
//
// v5. New: two stages of K and V. The copies of tile j + 1 are in flight while tile j is multiplied, and one barrier a
// tile is enough. After it tile j has arrived, and no warp reads tile j - 1 any more. Predicted: a round trip of some
// 700 cycles for each tile is hidden, of some 3500: 1.2 times v4.
#pragma once
#include "mma.cuh"
#include "course.cuh"

template <int D, int KEYS, int STAGES>
struct MmaTiles {
    static constexpr int WARPS = 4, M = 2, ROWS = WARPS * M * 16, THREADS = WARPS * 32;
    static constexpr int BYTES = 2 * D * (ROWS + STAGES * 2 * KEYS);
    static constexpr int BLOCKS = 2 * BYTES <= 200 * 1024 ? 2 : 1;  // on one SM, as shared memory allows
};

// One step of online softmax over the scores s [16 M][N] of a tile: s becomes P; o and l follow the new maximum.
template <int M, int N, int D>
__device__ __forceinline__ void softmax_step(float (&s)[M][N / 8][4], float (&o)[M][D / 8][4], float (&largest)[M][2],
                                             float (&l)[M][2], float c) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {  // rows g and g + 8 of the fragment
            float now = largest[m][h];
#pragma unroll
            for (int n = 0; n < N / 8; n++) now = fmaxf(now, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));  // the four lanes of a row
            now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
            const float shift = now == -INFINITY ? 0.0f : now * c;  // nothing seen yet: -inf minus -inf would be NaN
            const float correction = tensor::exp2_fast(largest[m][h] * c - shift);
            largest[m][h] = now;
            l[m][h] *= correction;
#pragma unroll
            for (int n = 0; n < D / 8; n++) o[m][n][2 * h] *= correction, o[m][n][2 * h + 1] *= correction;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[m][n][i] = tensor::exp2_fast(s[m][n][i] * c - shift);
                    l[m][h] += s[m][n][i];  // this lane's columns; the four lanes of a row meet at the end
                }
        }
}

template <typename T, int D, int KEYS, int STAGES, class Tile = MmaTiles<D, KEYS, STAGES>>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    attention_mma_kernel(const T* q, const T* k, const T* v, T* o, float* lse, int S, int heads, int group, bool causal,
                         float scale) {
    constexpr int ROWS = Tile::ROWS, M = Tile::M;
    extern __shared__ __align__(1024) uint4 mma_smem[];
    T* q_smem = reinterpret_cast<T*>(mma_smem);  // [ROWS][D], swizzled, as all tiles are
    T* k_smem = q_smem + ROWS * D;               // [STAGES][KEYS][D]
    T* v_smem = k_smem + STAGES * KEYS * D;      // [STAGES][KEYS][D]

    const auto [head, first] = tensor::place(S, ROWS, heads, group, true);
    const int64_t base = int64_t(head) * S;
    const int warp_row = first + threadIdx.x / 32 * M * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int keys = causal ? min(S, first + ROWS) : S;  // that some query of the block sees
    const int steps = (keys + KEYS - 1) / KEYS;

    const auto copy_tile = [&](int j) {
        const int stage = j % STAGES * KEYS * D;
        const int64_t at = (base + j * KEYS) * D;
        tensor::copy_rows<T, KEYS, D, Tile::THREADS>(k_smem + stage, k + at, S - j * KEYS);
        tensor::copy_rows<T, KEYS, D, Tile::THREADS>(v_smem + stage, v + at, S - j * KEYS);
        __pipeline_commit();
    };
    tensor::copy_rows<T, ROWS, D, Tile::THREADS>(q_smem, q + (base + first) * D, S - first);
    copy_tile(0);

    float acc[M][D / 8][4] = {}, l[M][2] = {}, largest[M][2];
    for (auto& rows : largest) rows[0] = rows[1] = -INFINITY;
    for (int j = 0; j < steps; j++) {
        if (STAGES == 1 && j > 0) {
            __syncthreads();  // all have read tile j - 1
            copy_tile(j);
        }
        __pipeline_wait_prior(0);
        __syncthreads();  // what every thread copied is there for all
        if (STAGES == 2 && j + 1 < steps) copy_tile(j + 1);
        if (causal && j * KEYS > warp_row + M * 16 - 1) continue;  // above the diagonal for the whole warp
        float s[M][KEYS / 8][4] = {};
        tensor::multiply_transposed<T, M, KEYS, D>(s, q_smem + threadIdx.x / 32 * M * 16 * D,
                                                   k_smem + j % STAGES * KEYS * D);
        if ((j + 1) * KEYS > (causal ? min(S, warp_row + 1) : S))  // some query of the warp does not see some key
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = warp_row + m * 16 + i / 2 * 8 + g, col = j * KEYS + n * 8 + 2 * t + i % 2;
                        if (col >= S || (causal && col > row)) s[m][n][i] = -INFINITY;
                    }
        softmax_step<M, KEYS, D>(s, acc, largest, l, scale * 1.44269504f);
        uint32_t p[M][KEYS / 16][4];
        tensor::as_left<T, M, KEYS>(p, s);
        tensor::multiply<T, M, KEYS, D>(acc, p, v_smem + j % STAGES * KEYS * D);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = l[m][h] + __shfl_xor_sync(~0u, l[m][h], 2);
            sum += __shfl_xor_sync(~0u, sum, 1);
#pragma unroll
            for (int n = 0; n < D / 8; n++) acc[m][n][2 * h] *= 1 / sum, acc[m][n][2 * h + 1] *= 1 / sum;
            const int row = warp_row + m * 16 + h * 8 + g;
            if (t == 0 && row < S) lse[base + row] = largest[m][h] * scale + logf(sum);
        }
    // A warp's queries have been read by this warp alone: their place serves its output.
    tensor::store_rows<T, M, D>(o + (base + warp_row) * D, S - warp_row, acc, q_smem + threadIdx.x / 32 * M * 16 * D);
}

template <typename T, int D, int KEYS, int STAGES>
void launch_mma(const T* q, const T* k, const T* v, T* o, float* lse, int64_t heads, int64_t S, bool causal,
                float scale, cudaStream_t stream) {
    using Tile = MmaTiles<D, KEYS, STAGES>;
    CUDA_CHECK(cudaFuncSetAttribute(attention_mma_kernel<T, D, KEYS, STAGES>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::BYTES));
    const int64_t tiles = course::ceil_div(S, Tile::ROWS);
    course::require(heads * tiles < int64_t(1) << 31, "attention_mma: B * H * S is too large");
    const int group = tensor::heads_in_l2(4 * S * D, heads);  // K and V
    attention_mma_kernel<T, D, KEYS, STAGES><<<int(heads * tiles), Tile::THREADS, Tile::BYTES, stream>>>(
        q, k, v, o, lse, int(S), int(heads), group, causal, scale);
    CUDA_CHECK(cudaGetLastError());
}

// heads = B * H; q, k, v, o [heads, S, D]; lse [heads, S]
template <typename T, int STAGES>
void attention_mma(const T* q, const T* k, const T* v, T* o, float* lse, int64_t heads, int64_t S, int64_t D,
                   bool causal, float scale, cudaStream_t stream) {
    course::require(D == 64 || D == 128, "attention_mma: D must be 64 or 128: pad q, k and v with zeros");
    if (heads * S == 0) return;
    (D == 64 ? launch_mma<T, 64, 64, STAGES> : launch_mma<T, 128, 64, STAGES>)(q, k, v, o, lse, heads, S, causal, scale,
                                                                               stream);
}
