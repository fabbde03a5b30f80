// Matrix multiply: from one FMA for two loads to eight for three
// ==============================================================
//
// C[M, N] = A[M, K] B[K, N] in fp32 without tensor cores (and without TF32): 2MNK FLOPs on 4(MK + KN + MN) bytes. At
// 4096 that is 137 GFLOP on 0.2 GB. An H200's 16,896 lanes have 67 TFLOP/s, of which cuBLAS gets about 51: they need 2
// ms, and memory needs 0.05 ms. So nothing here waits for HBM if each element is fetched often enough from a cache or
// from shared memory. One count predicts each rung. In a cycle an SM executes 4 warp-wide FMAs, but its L1 cache and
// shared memory answer with 128 bytes, one warp-wide load ("wavefront"). With w wavefronts an FMA, at most 1 / 4w of
// the peak:
//
//     rung                          wavefronts per FMA          ceiling
//     v1 naive                      32 + 1                      0.8%    0.5 TFLOP/s
//     v2 coalesced                  1 + 1                       12.5%     8
//     v3 shared tiles               1 + 1 (compiled: 1 + 1/4)   20%      13
//     v4 a column a thread          (8/4 + 1) / 8               67%      44
//
// 06_matrix_multiply_registers goes on from there to the speed of cuBLAS.
//
// You will be able to: count the wavefronts that an FMA costs; write a matmul with tiles in shared memory; say why a
// thread owns several elements.
//
// Sources: V. Volkov and J. Demmel, "Benchmarking GPUs to tune dense linear algebra", SC 2008 (registers over shared
// memory); S. Boehm, "How to optimize a CUDA matmul kernel for cuBLAS-like performance", 2022 (the ladder).
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o matrix_multiply
//           cuda_src/03_matrix_multiply.cu -lcublas
// Link:     cublas
// Run:      ./matrix_multiply                             (checks every version, then times them all beside cuBLAS)
// No GPU:   python3 course.py run 03_matrix_multiply      (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 03_matrix_multiply
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

// v1. A thread owns one element of C. The natural mistake: x counts rows. The 32 threads of a warp differ in x, so
// they read 32 rows of A, K floats apart. A request touches 32 sectors and uses 4 bytes of each. All read the same
// element of B, 1 sector, and C is written in 32 sectors. Predicted: 0.5 TFLOP/s at best, since L1 looks up one line
// after another.
constexpr int TILE = 32;

__global__ void naive_kernel(
    const float* a,  // [M, K]
    const float* b,  // [K, N]
    float* c,        // [M, N]
    int64_t m, int64_t n, int64_t k) {
    const auto [row0, column0] = place(n, TILE, TILE);
    const int64_t row = row0 + threadIdx.x, column = column0 + threadIdx.y;
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int64_t i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + column];
    c[row * n + column] = sum;
}

void multiply_naive(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (m == 0 || n == 0) return;  // a grid of no blocks is an error
    naive_kernel<<<count_tiles(m, n, TILE, TILE), dim3(TILE, TILE), 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: x counts columns. A warp reads one element of A (1 sector for all) and 32 neighbours of B (4 sectors, one
// line), and writes 32 neighbours of C. Predicted: 1/16 of the wavefronts, so up to 16 times as fast.
__global__ void coalesced_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    const auto [row0, column0] = place(n, TILE, TILE);
    const int64_t row = row0 + threadIdx.y, column = column0 + threadIdx.x;  // New
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int64_t i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + column];
    c[row * n + column] = sum;
}

void multiply_coalesced(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                        cudaStream_t stream) {
    if (m == 0 || n == 0) return;
    coalesced_kernel<<<count_tiles(m, n, TILE, TILE), dim3(TILE, TILE), 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// v3. New: the block loads a 32 x 32 tile of A and one of B into shared memory. It uses each element 32 times, and
// goes on to the next 32 of K. A thread still loads two words an FMA, from shared memory instead of L1. Both loads are
// conflict-free: of A one word for the whole warp, of B 32 neighbours. Predicted: not much faster! A thread makes 32
// times fewer global loads, and shared memory answers sooner, but the wavefronts are nearly as many. The compiler saves
// some: it loads four neighbours of A's row at once.
__global__ void shared_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    __shared__ float a_tile[TILE][TILE];  // New
    __shared__ float b_tile[TILE][TILE];
    const auto [row0, column0] = place(n, TILE, TILE);
    const int y = threadIdx.y, x = threadIdx.x;
    const int64_t row = row0 + y, column = column0 + x;
    float sum = 0;
    for (int64_t k0 = 0; k0 < k; k0 += TILE) {
        // Past an edge a tile holds zeros, which add nothing. No thread returns early: all threads fetch, all
        // synchronise.
        a_tile[y][x] = row < m && k0 + x < k ? a[row * k + k0 + x] : 0;
        b_tile[y][x] = k0 + y < k && column < n ? b[(k0 + y) * n + column] : 0;
        __syncthreads();  // New: the tiles are whole before any thread multiplies
        for (int i = 0; i < TILE; i++) sum += a_tile[y][i] * b_tile[i][x];
        __syncthreads();  // New: everyone has multiplied before the tiles are overwritten
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

void multiply_shared(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (m == 0 || n == 0) return;
    shared_kernel<<<count_tiles(m, n, TILE, TILE), dim3(TILE, TILE), 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// v4. New: a thread owns 8 rows of one column, so that an element of B, once in a register, is used 8 times. For each
// i a thread loads 1 word of b_tile and 8 of a_tile, and multiplies 8 times. The words of a_tile are the same for the
// whole warp, and one 16-byte load brings four steps of i. The tile of C grows to 64 x 64 and L2 is asked half as
// often. Predicted: 3/8 of a wavefront an FMA where v3 has 5/4: up to three times as fast. Occupancy halves: 64
// registers per thread, two blocks of 512. At M = N = K = 512 there are 64 blocks, fewer than SMs.
constexpr int BM = 64, BN = 64, BK = 8, TM = 8;  // a block's tile of C, its step through K, a thread's rows

__global__ void __launch_bounds__(BM / TM * BN)
column_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
    __shared__ float a_tile[BM][BK];
    __shared__ float b_tile[BK][BN];
    const auto [row0, column0] = place(n, BM, BN);
    const int x = threadIdx.x % BN, y = threadIdx.x / BN * TM;  // New: the thread's column and the first of its rows
    const int a_row = threadIdx.x / BK, a_column = threadIdx.x % BK;  // the element of a_tile that it fetches
    const int b_row = threadIdx.x / BN;
    float sum[TM] = {};
    for (int64_t k0 = 0; k0 < k; k0 += BK) {
        const int64_t row = row0 + a_row, column = column0 + x;
        a_tile[a_row][a_column] = row < m && k0 + a_column < k ? a[row * k + k0 + a_column] : 0;
        b_tile[b_row][x] = k0 + b_row < k && column < n ? b[(k0 + b_row) * n + column] : 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BK; i++) {
            const float b_rmem = b_tile[i][x];  // New
#pragma unroll
            for (int r = 0; r < TM; r++) sum[r] += a_tile[y + r][i] * b_rmem;
        }
        __syncthreads();
    }
    for (int r = 0; r < TM; r++)
        if (row0 + y + r < m && column0 + x < n) c[(row0 + y + r) * n + column0 + x] = sum[r];
}

void multiply_column(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    static_assert(BM / TM * BN == BM * BK && BM / TM * BN == BK * BN, "each thread fetches one element of each tile");
    if (m == 0 || n == 0) return;
    column_kernel<<<count_tiles(m, n, BM, BN), BM / TM * BN, 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "multiply_naive", multiply_naive);
    bind(m, "multiply_coalesced", multiply_coalesced);
    bind(m, "multiply_shared", multiply_shared);
    bind(m, "multiply_column", multiply_column);
}

#ifndef COURSE_EXTENSION
#include "multiply_problem.cuh"

int main() {
    // 2048, not 4096: v1 alone would take half a minute.
    return multiply_main({{"v1 naive", multiply_naive},
                          {"v2 coalesced", multiply_coalesced},
                          {"v3 shared tiles", multiply_shared},
                          {"v4 a column a thread", multiply_column}},
                         {2048});
}
#endif
