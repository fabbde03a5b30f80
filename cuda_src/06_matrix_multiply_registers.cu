// Matrix multiply, on to the speed of cuBLAS: a square of C in each thread's registers
// ====================================================================================
//
// Where 03_matrix_multiply ends, a thread loads 9 words for 8 FMAs. A thread that owns a square of TM x TN elements of
// C loads TM + TN words for TM * TN FMAs, so the larger the square, the fewer loads. Its accumulators live in
// registers, of which an SM has 65,536: 8 x 8 leaves room for 512 threads, 16 x 8 for 256. Two limits hold for an SM
// and a cycle:
//
//     wavefronts: 4 warp-wide FMAs, but 1 shared-memory wavefront of 128 bytes
//     issue:      4 warp-wide instructions of any kind: each one that is no FMA takes the place of an FMA
//
// The ceiling is a share of 67 TFLOP/s:
//
//     rung                        loads per FMA    wavefronts per FMA  FMAs of all instructions    ceiling
//     v5 8 x 8 a thread           16 / 64          48 / 64             about 3/4                   33%
//     v6 16-byte loads            4 / 64           24 / 64             0.87                        67%
//     v7 warp tiles               4 / 64           8 to 16 / 64        0.87                        87%
//     v8 pipelined                4 / 64           as v7               0.87, no waits              87%
//     v9 16 x 8 a thread          6 / 128          12 to 24 / 128      0.91, no waits              91%
//     v10 one block an SM         6 / 128          12 to 24 / 128      as v9, fewer copies         91%
//
// The register banks are the next limit. There are two, each gives one operand a cycle, and an FMA has three. An FMA
// keeps the rate if it shares one operand with the FMA before (.reuse in the machine code) and the other two are in
// different banks. The compiler chooses the registers, and for one FMA in six it finds no such choice. So about 80%
// remains for v9 and v10. Memory is far from a limit: 128 x 128 tiles read A and B 32 times each. At 4096 that is 4.3
// GB in 2.7 ms, 1.6 TB/s, a fifth of the 8 TB/s that L2 gives (day 1, lesson 9).
//
// You will be able to: choose a register tile by its loads per FMA; avoid bank conflicts of 16-byte loads; hide loads
// with cp.async.
//
// Sources: NVIDIA CUTLASS, "Efficient GEMM in CUDA" (the hierarchy of tiles); S. Gray, "SGEMM" in maxas (registers and
// banks); S. Boehm, "How to optimize a CUDA matmul kernel for cuBLAS-like performance", 2022.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o registers
//           cuda_src/06_matrix_multiply_registers.cu -lcublas
// Link:     cublas
// Run:      ./registers                                         (checks every version, then times them beside cuBLAS)
// No GPU:   python3 course.py run 06_matrix_multiply_registers    (the same kernels, emulated, checked against PyTorch)
// Time it:  python3 course.py bench 06_matrix_multiply_registers
#include "06_pipelined.cuh"

constexpr int BM = 128, BN = 128, BK = 8;  // a block's tile of C and its step through K, for v5 to v7
constexpr int TM = 8, TN = 8, THREADS = BM / TM * (BN / TN);

// v5. A thread owns 8 x 8 elements of C. For each of the 8 steps of i it loads 8 words of a_tile's column and 8 of
// b_tile's row into registers and multiplies all pairs: 16 loads, 64 FMAs. Predicted: half of v4's wavefronts at best,
// and bank conflicts take that gain back. In b_tile the 16 threads of a half-warp begin 8 words apart, in 4 of the 32
// banks: 4 wavefronts a load. In a_tile the two halves read rows that are 64 words apart, one bank: 2 wavefronts.
__global__ void __launch_bounds__(THREADS)
square_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    __shared__ float a_tile[BM][BK];
    __shared__ float b_tile[BK][BN];
    const Place at = place(n, BM, BN);
    const int t = threadIdx.x, y = t / (BN / TN) * TM, x = t % (BN / TN) * TN;
    const int a_row = t / BK, a_column = t % BK, b_row = t / BN, b_column = t % BN;  // the first that it copies
    float sum[TM][TN] = {};
    for (int64_t k0 = 0; k0 < k; k0 += BK) {
#pragma unroll
        for (int p = 0; p < BM; p += THREADS / BK) {
            const int64_t row = at.row + a_row + p, column = k0 + a_column;
            a_tile[a_row + p][a_column] = row < m && column < k ? a[row * k + column] : 0;
        }
#pragma unroll
        for (int p = 0; p < BK; p += THREADS / BN) {
            const int64_t row = k0 + b_row + p, column = at.column + b_column;
            b_tile[b_row + p][b_column] = row < k && column < n ? b[row * n + column] : 0;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BK; i++) {
            float a_rmem[TM], b_rmem[TN];
#pragma unroll
            for (int r = 0; r < TM; r++) a_rmem[r] = a_tile[y + r][i];
#pragma unroll
            for (int s = 0; s < TN; s++) b_rmem[s] = b_tile[i][x + s];
#pragma unroll
            for (int r = 0; r < TM; r++)
#pragma unroll
                for (int s = 0; s < TN; s++) sum[r][s] += a_rmem[r] * b_rmem[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < TM; r++)
#pragma unroll
        for (int s = 0; s < TN; s++)
            if (at.row + y + r < m && at.column + x + s < n) c[(at.row + y + r) * n + at.column + x + s] = sum[r][s];
}

// v6. New: everything in 16-byte pieces, a quarter of the load instructions. The layout of B stays in b_tile. A is
// transposed on its way in, so that the 8 rows of a thread are neighbours. Its rows are 4 words longer than BM, so
// that the 32 words that a warp stores (16 rows, 2 of k) are in 32 banks. Predicted: a 16-byte load takes 4 wavefronts
// at least (8 lanes each); in b_tile 8 lanes that begin 8 words apart reach half of the banks: 8.
//
// v7. New, with WARP_TILES: a warp's 32 threads own a compact 32 x 64 instead of 16 x 128. A thread's 8 rows and
// columns come in fours, 16 rows and 32 columns apart. The 8 lanes along a row read 8 neighbouring pieces, so no bank
// twice. A warp also reads fewer different elements of A and B: 96 a step of k where v6 reads 144. Lanes that differ
// in bit 0 share their piece of B, in bit 1 of A. The hardware may serve such pairs at once: 2 wavefronts, not 4.
// Neighbouring lanes also write neighbouring pieces of C: 16 whole sectors a store where v6 writes halves of 32.
template <bool WARP_TILES>
__global__ void __launch_bounds__(THREADS, 2)
vectorized_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    __shared__ __align__(16) float a_tile[BK][BM + 4];  // [k][row]
    __shared__ __align__(16) float b_tile[BK][BN];
    const Place at = place(n, BM, BN);
    const int t = threadIdx.x, warp = t / 32;
    const int y = WARP_TILES ? warp / 2 * 32 + lane_row(t) * 4 : t / 16 * TM;
    const int x = WARP_TILES ? warp % 2 * 64 + lane_column(t) * 4 : t % 16 * TN;
    constexpr int DOWN = WARP_TILES ? 16 : 4, RIGHT = WARP_TILES ? 32 : 4;  // from the first four to the second
    float sum[TM][TN] = {};
    for (int64_t k0 = 0; k0 < k; k0 += BK) {
        const int a_row = t / 2, a_column = t % 2 * 4, b_row = t / 32, b_column = t % 32 * 4;
        const bool a_inside = at.row + a_row < m && k0 + a_column < k;
        const bool b_inside = k0 + b_row < k && at.column + b_column < n;
        const float4 zero = {0, 0, 0, 0};
        const float4 four = a_inside ? quad(a + (at.row + a_row) * k + k0 + a_column) : zero;  // New
        a_tile[a_column + 0][a_row] = four.x;
        a_tile[a_column + 1][a_row] = four.y;
        a_tile[a_column + 2][a_row] = four.z;
        a_tile[a_column + 3][a_row] = four.w;
        quad(&b_tile[b_row][b_column]) = b_inside ? quad(b + (k0 + b_row) * n + at.column + b_column) : zero;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BK; i++) {
            float a_rmem[TM], b_rmem[TN];
            take(a_rmem, &a_tile[i][y]);  // New: 16 bytes each
            take(a_rmem + 4, &a_tile[i][y + DOWN]);
            take(b_rmem, &b_tile[i][x]);
            take(b_rmem + 4, &b_tile[i][x + RIGHT]);
#pragma unroll
            for (int r = 0; r < TM; r++)
#pragma unroll
                for (int s = 0; s < TN; s++) sum[r][s] += a_rmem[r] * b_rmem[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < TM; r++) {
        const int64_t row = at.row + y + r / 4 * DOWN + r % 4;
#pragma unroll
        for (int s = 0; s < TN; s += 4) {
            const int64_t column = at.column + x + s / 4 * RIGHT;
            if (row < m && column < n)
                quad(c + row * n + column) = {sum[r][s], sum[r][s + 1], sum[r][s + 2], sum[r][s + 3]};
        }
    }
}

void multiply_square(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (m == 0 || n == 0) return;
    square_kernel<<<count_tiles(m, n, BM, BN), THREADS, 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

template <bool WARP_TILES>
void launch_vectorized(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    const auto address = [](const float* p) { return reinterpret_cast<uintptr_t>(p); };
    course::require(n % 4 == 0 && k % 4 == 0, "N and K must be multiples of 4");
    course::require((address(a) | address(b) | address(c)) % 16 == 0, "A, B and C must begin at multiples of 16 bytes");
    if (m == 0 || n == 0) return;
    vectorized_kernel<WARP_TILES><<<count_tiles(m, n, BM, BN), THREADS, 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

void multiply_vectorized(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                         cudaStream_t stream) {
    launch_vectorized<false>(a, b, c, m, n, k, stream);
}

void multiply_warp_tiles(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                         cudaStream_t stream) {
    launch_vectorized<true>(a, b, c, m, n, k, stream);
}

// v8. Two tiles in flight and still 8 x 8 elements per thread: 256 threads, 128 registers each, two blocks per SM.
void multiply_pipelined(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                        cudaStream_t stream) {
    launch_pipelined<8, 8, 8, 2, 4, 2, 2>(a, b, c, m, n, k, stream);
}

// v9. New: 16 x 8 elements per thread. The same 128 x 128 of C with 128 threads of up to 255 registers, two blocks an
// SM. Predicted: a quarter fewer loads an FMA, and 91% of the loop's instructions are FMAs, since BK = 16 halves the
// overhead of a tile. Yet v9 is at most a few percent faster than v8. Loads are no limit any more, and a scheduler has
// two warps, half of v8's. While one waits for a bank, a barrier or the next instruction of a 36 KB loop, there is one
// other.
void multiply_wide(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    launch_pipelined<16, 8, 16, 3, 2, 2, 2>(a, b, c, m, n, k, stream);
}

// v10. New: both blocks' warps in one block, which owns 128 x 256. An SM has as many warps and registers as before,
// but a row of A that is fetched serves 256 columns, not 128. A thread copies 12 times a tile, not 20, since the
// copies saved are the short ones of A. L2 gives 384 words per step instead of 512. Two stages: while one tile is
// multiplied the next one arrives. A third stage would only add addresses to keep. Predicted: a few percent.
void multiply_one_block(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                        cudaStream_t stream) {
    launch_pipelined<16, 8, 16, 2, 2, 4, 1>(a, b, c, m, n, k, stream);
}

COURSE_MODULE(m) {
    bind(m, "multiply_square", multiply_square);
    bind(m, "multiply_vectorized", multiply_vectorized);
    bind(m, "multiply_warp_tiles", multiply_warp_tiles);
    bind(m, "multiply_pipelined", multiply_pipelined);
    bind(m, "multiply_wide", multiply_wide);
    bind(m, "multiply_one_block", multiply_one_block);
}

#ifndef COURSE_EXTENSION
#include "multiply_problem.cuh"

int main() {
    return multiply_main({{"v5 8 x 8 a thread", multiply_square},
                          {"v6 16-byte loads", multiply_vectorized},
                          {"v7 warp tiles", multiply_warp_tiles},
                          {"v8 pipelined", multiply_pipelined},
                          {"v9 16 x 8 a thread", multiply_wide},
                          {"v10 one block an SM", multiply_one_block}},
                         {4096, 8192});
}
#endif
