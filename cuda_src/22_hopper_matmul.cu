// Matmul on Hopper, first half: from FMA to TMA, wgmma and warp specialization
// ============================================================================
//
// C[M, N] = A[M, K] * B[N, K]^T in bf16, summed in fp32 (x @ w.T in PyTorch). At M = N = K = 8192 that is 1.1 TFLOP
// over 0.4 GB: 2,730 FLOPs per byte. An H200 does about 170 FLOPs in the time of one byte (700 TFLOP/s over 4.2 TB/s).
// So the tensor cores are the limit, and the whole ladder is about keeping them fed. FMA instructions do 51 TFLOP/s (22
// ms). The tensor cores sustain 700 to 800 TFLOP/s (1.4 to 1.6 ms), but only through wgmma, which reads its operands
// from shared memory by itself. Each rung takes work away from the threads: v1 the multiplication, v2 the loads and
// their addresses, v3 the waiting. Lesson 23 goes on to the speed of cuBLAS.
//
// You will be able to: copy tiles with TMA and mbarriers; multiply them with wgmma; write a producer warpgroup and its
// ring of stages.
// You need: 03 and 06 (tiles in shared memory and in registers, cp.async), and 13 (swizzles).
//
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "cp.async.bulk.tensor"; CUTLASS, "Efficient
// GEMM in CUDA"; Shah et al., FlashAttention-3 (2024), section 2.2 on warp specialisation.
//
// Compile:  nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda_src/include -o hopper_matmul
//           cuda_src/22_hopper_matmul.cu
//           (-arch=sm_80 for another GPU: v2 and v3 are then left out. Built for sm_90 without the a, they are empty
//           kernels, and the check says "wrong at 0: -nan".)
// Run:      ./hopper_matmul
// Check:    python3 course.py check 22_hopper_matmul
// Time it:  python3 course.py bench 22_hopper_matmul
#include "mma.cuh"  // ldmatrix, mma.sync, and what the emulator does for them
#include "matmul.cuh"

using matmul::bf16, matmul::BK;

// v0. Without tensor cores: a block brings 32x32 tiles of A and B to shared memory and multiplies them with FMA. Every
// element loaded is used 32 times. The tiles' rows are 33 floats long: lanes read down a column of b_tile, which rows
// of 32 would put into one bank. This rung takes every shape, and runs without a GPU. Predicted: two shared reads for
// each FMA keep it under 10% of the 51 TFLOP/s.
constexpr int FMA_TILE = 32, FMA_ROWS = 8;  // 32 x 8 threads, each with 4 elements of C

__global__ void matmul_fma_kernel(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k) {
    __shared__ float a_tile[FMA_TILE][FMA_TILE + 1];
    __shared__ float b_tile[FMA_TILE][FMA_TILE + 1];
    const int64_t tiles_n = (n + FMA_TILE - 1) / FMA_TILE;
    const int64_t row0 = blockIdx.x / tiles_n * FMA_TILE, col0 = blockIdx.x % tiles_n * FMA_TILE;
    const int x = threadIdx.x, y = threadIdx.y;
    float sum[FMA_TILE / FMA_ROWS] = {};
    for (int64_t k0 = 0; k0 < k; k0 += FMA_TILE) {
        for (int i = y; i < FMA_TILE; i += FMA_ROWS) {
            const bool in_a = row0 + i < m && k0 + x < k, in_b = col0 + i < n && k0 + x < k;
            a_tile[i][x] = in_a ? __bfloat162float(a[(row0 + i) * k + k0 + x]) : 0.0f;
            b_tile[i][x] = in_b ? __bfloat162float(b[(col0 + i) * k + k0 + x]) : 0.0f;
        }
        __syncthreads();  // the tiles are whole
        for (int j = 0; j < FMA_TILE; j++)
            for (int i = 0; i < FMA_TILE / FMA_ROWS; i++) sum[i] += a_tile[y + i * FMA_ROWS][j] * b_tile[x][j];
        __syncthreads();  // and read by all: the next may overwrite them
    }
    for (int i = 0; i < FMA_TILE / FMA_ROWS; i++) {
        const int64_t row = row0 + y + i * FMA_ROWS;
        if (row < m && col0 + x < n) c[row * n + col0 + x] = __float2bfloat16(sum[i]);
    }
}

void matmul_fma(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (m == 0 || n == 0) return;
    const int64_t blocks = course::ceil_div(m, FMA_TILE) * course::ceil_div(n, FMA_TILE);
    course::require(blocks < int64_t(1) << 31, "more than 2^31 tiles of C: split M");
    matmul_fma_kernel<<<blocks, dim3(FMA_TILE, FMA_ROWS), 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// v1. New: tensor cores, as every GPU since Ampere has them. An mma.sync multiplies 16x16 by 16x8 from a warp's
// registers: 4096 FLOPs an instruction. Before it, ldmatrix loads the registers from shared memory in the layout that
// mma wants. The instruction cp.async copies the tiles from global to shared memory without passing through registers.
// Two pairs of tiles let the next load run under this multiplication. Eight warps share a 128x128 tile, each 64x32 of
// it: for a step of 16 a warp reads 3 KB for 65,536 FLOPs. Rows of a tile are 128 bytes, their 16-byte pieces swizzled,
// so that ldmatrix has no bank conflicts.
// Predicted: Hopper runs mma.sync at about 60% of its wgmma rate, and here the warps wait at two barriers in each
// step: 300 to 450 TFLOP/s.
constexpr int MMA_TILE = 128, MMA_THREADS = 256, MMA_ELEMENTS = MMA_TILE * BK, MMA_SHARED = 2 * 2 * MMA_ELEMENTS * 2;

// Rows row0 on, columns k0 on of x[rows, k], zeros outside. 16 bytes are all inside or all outside, since k % 8 == 0.
__device__ __forceinline__ void copy_tile(bf16* tile, const bf16* x, int64_t row0, int64_t rows, int64_t k0,
                                          int64_t k) {
#pragma unroll
    for (int i = 0; i < MMA_ELEMENTS / 8 / MMA_THREADS; i++) {
        const int row = (threadIdx.x + i * MMA_THREADS) / 8, piece = threadIdx.x % 8;
        const bool inside = row0 + row < rows && k0 + piece * 8 < k;
        tensor::copy_16(reinterpret_cast<char*>(tile) + tensor::swizzled<BK>(row, piece),
                        inside ? x + (row0 + row) * k + k0 + piece * 8 : x, inside);
    }
}

__global__ __launch_bounds__(MMA_THREADS, 2) void matmul_mma_kernel(const bf16* a, const bf16* b, bf16* c, int64_t m,
                                                                    int64_t n, int64_t k) {
    extern __shared__ __align__(1024) unsigned char shared[];
    bf16* a_tiles = reinterpret_cast<bf16*>(shared);  // [2][128, 64], then B's
    bf16* b_tiles = a_tiles + 2 * MMA_ELEMENTS;
    const int64_t tiles_n = (n + MMA_TILE - 1) / MMA_TILE;
    const int64_t row0 = blockIdx.x / tiles_n * MMA_TILE, col0 = blockIdx.x % tiles_n * MMA_TILE;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 128 * 64, warp_col = threadIdx.x / 32 % 4 * 32;
    const int64_t steps = (k + BK - 1) / BK;
    const auto copy = [&](int64_t step) {
        if (step < steps) {
            copy_tile(a_tiles + step % 2 * MMA_ELEMENTS, a, row0, m, step * BK, k);
            copy_tile(b_tiles + step % 2 * MMA_ELEMENTS, b, col0, n, step * BK, k);
        }
        __pipeline_commit();  // an empty group where nothing is left keeps the count below right
    };
    float d[4][4][4] = {};  // 4 x 4 results of 16x8, 4 elements per lane
    copy(0);
    for (int64_t step = 0; step < steps; step++) {
        copy(step + 1);
        __pipeline_wait_prior(1);  // all but the newest: this step's tiles
        __syncthreads();           // and all threads' parts of them
        tensor::multiply_transposed<bf16, 4, 32, BK>(d, a_tiles + step % 2 * MMA_ELEMENTS + warp_row * BK,
                                                     b_tiles + step % 2 * MMA_ELEMENTS + warp_col * BK);
        __syncthreads();  // before the next copy overwrites what was read here
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = row0 + warp_row + 16 * i + lane / 4, col = col0 + warp_col + 8 * j + lane % 4 * 2;
            matmul::store_pair(c, row, col, m, n, d[i][j][0], d[i][j][1]);
            matmul::store_pair(c, row + 8, col, m, n, d[i][j][2], d[i][j][3]);
        }
}

void matmul_mma(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    course::require(k % 8 == 0, "16-byte copies need K to be a multiple of 8: pad it with zeros, or take matmul_fma");
    if (m == 0 || n == 0) return;
    CUDA_CHECK(cudaFuncSetAttribute(matmul_mma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MMA_SHARED));
    const int64_t blocks = course::ceil_div(m, MMA_TILE) * course::ceil_div(n, MMA_TILE);
    matmul_mma_kernel<<<blocks, MMA_THREADS, MMA_SHARED, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

#ifndef COURSE_EMULATED
using namespace hopper;
using matmul::CONSUMERS, matmul::Ring, matmul::aligned;

// v2. New: TMA, the Tensor Memory Accelerator, copies a box of a matrix to shared memory. One thread starts the copy of
// a whole tile. An mbarrier, 8 bytes of shared memory, counts the bytes that arrive, and all threads wait on it. Then
// wgmma reads both tiles from shared memory itself, 64x128x16 an instruction: 262,144 FLOPs where mma.sync has 4096.
// There is no ldmatrix, no address and no mask: elements outside the matrix arrive as zeros. A warpgroup of 4 warps
// owns a 128x128 tile, 128 accumulators per thread. In a block a load and a multiplication never overlap; the three
// blocks that fit an SM overlap with each other.
//
// wgmma finds a tile by a descriptor, 64 bits with its address and swizzle. It runs while its threads go on:
// wgmma_commit closes a group of wgmma, and wgmma_wait<N> waits until at most N groups are unfinished. An mbarrier's
// phases are numbered 0, 1, 2, ...; a wait names the phase by its last bit. include/hopper.cuh has all these functions,
// a PTX instruction each.
// Predicted: 450 to 600 TFLOP/s.
constexpr int WGMMA_TILE = 128;

__global__ __launch_bounds__(128) void matmul_wgmma_kernel(const __grid_constant__ CUtensorMap a_map,
                                                           const __grid_constant__ CUtensorMap b_map, bf16* c,
                                                           int64_t m, int64_t n, int64_t k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // compiled for sm_90a, which alone has wgmma
    __shared__ alignas(1024) bf16 a_tile[WGMMA_TILE * BK];
    __shared__ alignas(1024) bf16 b_tile[WGMMA_TILE * BK];
    __shared__ uint64_t loaded;
    const int64_t tiles_n = (n + WGMMA_TILE - 1) / WGMMA_TILE;
    const int row0 = blockIdx.x / tiles_n * WGMMA_TILE, col0 = blockIdx.x % tiles_n * WGMMA_TILE;
    if (threadIdx.x == 0) {
        barrier_init(&loaded, 1);
        barriers_ready();
    }
    __syncthreads();
    float d[2][WGMMA_TILE / 2];  // rows 0 to 63 and 64 to 127
    const uint64_t a_from = tile_descriptor(a_tile), b_from = tile_descriptor(b_tile);
    const int steps = (k + BK - 1) / BK;
    for (int step = 0; step < steps; step++) {
        if (threadIdx.x == 0) {
            barrier_expect(&loaded, sizeof(a_tile) + sizeof(b_tile));
            load_box(a_tile, &a_map, &loaded, step * BK, row0);
            load_box(b_tile, &b_map, &loaded, step * BK, col0);
        }
        barrier_wait(&loaded, step % 2);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)  // the first multiplication of all overwrites d
                wgmma<WGMMA_TILE>(d[half], a_from + half * DESCRIPTOR_64_ROWS + i * DESCRIPTOR_16_COLUMNS,
                                  b_from + i * DESCRIPTOR_16_COLUMNS, i > 0 || step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all have waited: thread 0 may have the tiles overwritten; v3 has one thread wait
    }
#pragma unroll
    for (int half = 0; half < 2; half++) matmul::store_rows<WGMMA_TILE>(d[half], c, row0 + 64 * half, col0, m, n);
#endif
}

void matmul_wgmma(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (!matmul::prepare(c, m, n, k, stream)) return;
    const CUtensorMap a_map = tensor_map(a, m, k, k, WGMMA_TILE), b_map = tensor_map(b, n, k, k, WGMMA_TILE);
    const int64_t blocks = course::ceil_div(m, WGMMA_TILE) * course::ceil_div(n, WGMMA_TILE);
    matmul_wgmma_kernel<<<blocks, 128, 0, stream>>>(a_map, b_map, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

// v3. New: warp specialization. One warpgroup, the producer, only loads. Two, the consumers, only multiply, each 64
// rows of a 128x256 tile. Between them is a ring of 4 stages (48 KB each). The producer waits until a stage is `empty`,
// the consumers until it is `full`. Neither waits while the ring has stages of both kinds. The producer needs few
// registers. So setmaxnreg gives most of its registers to the consumers, whose threads have 128 accumulators each. A
// consumer keeps one wgmma group in flight while it releases the stage of the group before. One thread's wait is enough
// for that: a wgmma group is of all four warps (PTX ISA, wgmma.commit_group). CUTLASS signals from one thread, too.
//
//     producer     load 0   load 1   load 2   load 3   wait empty 0   load 4 ...
//     consumers             wait full 0   multiply 0   multiply 1, release 0   multiply 2, release 1 ...
//
// Predicted: a step loads 48 KB for 4.2 MFLOP (v2: 32 KB for 2.1 MFLOP). The tensor cores wait only at each tile's
// start and end: 600 to 700 TFLOP/s.
constexpr int TILE_M = 128, TILE_N = 256, STAGES = 4;

struct SpecializedShared {
    bf16 a[STAGES][TILE_M * BK], b[STAGES][TILE_N * BK];
    uint64_t full[STAGES], empty[STAGES];
};

__global__ __launch_bounds__(384, 1) void matmul_specialized_kernel(const __grid_constant__ CUtensorMap a_map,
                                                                    const __grid_constant__ CUtensorMap b_map, bf16* c,
                                                                    int64_t m, int64_t n, int64_t k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared[];
    auto& s = aligned<SpecializedShared>(shared);
    const int64_t tiles_n = (n + TILE_N - 1) / TILE_N;
    const int row0 = blockIdx.x / tiles_n * TILE_M, col0 = blockIdx.x % tiles_n * TILE_N;
    const int steps = (k + BK - 1) / BK, warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], CONSUMERS);
        barriers_ready();
    }
    __syncthreads();
    Ring<STAGES> ring;
    if (warpgroup == CONSUMERS) {
        registers_shrink<40>();
        if (thread != 0) return;
        for (int step = 0; step < steps; step++, ring.advance()) {
            barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);  // returns at once in the first round: unused so far
            barrier_expect(&s.full[ring.stage], sizeof(s.a[0]) + sizeof(s.b[0]));
            load_box(s.a[ring.stage], &a_map, &s.full[ring.stage], step * BK, row0);
            load_box(s.b[ring.stage], &b_map, &s.full[ring.stage], step * BK, col0);
        }
    } else {
        registers_grow<232>();
        const uint64_t a_from = tile_descriptor(s.a[0] + warpgroup * 64 * BK), b_from = tile_descriptor(s.b[0]);
        float d[TILE_N / 2];
        for (int step = 0; step < steps; step++, ring.advance()) {
            barrier_wait(&s.full[ring.stage], ring.parity);
            const uint64_t a_stage = a_from + (ring.stage * sizeof(s.a[0]) >> 4);
            const uint64_t b_stage = b_from + (ring.stage * sizeof(s.b[0]) >> 4);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; i++)
                wgmma<TILE_N>(d, a_stage + i * DESCRIPTOR_16_COLUMNS, b_stage + i * DESCRIPTOR_16_COLUMNS,
                              i > 0 || step > 0);
            wgmma_commit();
            wgmma_wait<1>();  // the MMAs of the step before are done, so its stage may be filled; this step's go on
            if (step > 0 && thread == 0) barrier_arrive(&s.empty[ring.before()]);
        }
        wgmma_wait<0>();
        matmul::store_rows<TILE_N>(d, c, row0 + warpgroup * 64, col0, m, n);
    }
#endif
}

void matmul_specialized(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (!matmul::prepare(c, m, n, k, stream)) return;
    const CUtensorMap a_map = tensor_map(a, m, k, k, TILE_M), b_map = tensor_map(b, n, k, k, TILE_N);
    constexpr int bytes = sizeof(SpecializedShared) + 1024;
    CUDA_CHECK(cudaFuncSetAttribute(matmul_specialized_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int64_t blocks = course::ceil_div(m, TILE_M) * course::ceil_div(n, TILE_N);
    matmul_specialized_kernel<<<blocks, 128 * (CONSUMERS + 1), bytes, stream>>>(a_map, b_map, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}
#endif

COURSE_MODULE(m) {
    bind(m, "matmul_fma", matmul_fma);
    bind(m, "matmul_mma", matmul_mma);
#ifndef COURSE_EMULATED
    bind(m, "matmul_wgmma", matmul_wgmma);
    bind(m, "matmul_specialized", matmul_specialized);
#endif
}

#ifndef COURSE_EXTENSION
int main() try {
    std::vector<std::pair<const char*, matmul::Launcher>> versions = {{"v0 FMA", matmul_fma}};
    matmul::Problem(37, 45, 51).check(versions);
    versions.push_back({"v1 mma.sync", matmul_mma});
    matmul::Problem(131, 69, 136).check(versions);
#ifndef COURSE_EMULATED
    if (is_hopper()) {
        versions.push_back({"v2 TMA and wgmma", matmul_wgmma});
        versions.push_back({"v3 warp specialised", matmul_specialized});
    }
    matmul::Problem(301, 392, 1000).check(versions);  // no tile divides any of them
    if (course::small()) return 0;
    matmul::race(versions, {4096});
    versions.erase(versions.begin());  // v0 would take most of the time
    matmul::race(versions, {8192});
#endif
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
