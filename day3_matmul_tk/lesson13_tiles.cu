// Tiles: a matmul in a small tile library, with the same instructions as the loop by hand
// =======================================================================================
// C[M, N] = A[M, K] * B[K, N], bf16 with fp32 accumulators on mma.sync, which every GPU since Ampere has. The programs
// cuda_src/06 and 22 write such loops out: which thread copies which 16 bytes, where a swizzle puts them, which lane
// holds which element of a fragment. None of that is about matmul. In tiles.cuh it stands once, in types, and the
// kernel only says which warp has which tile, and when. Kernel v1 shows this. Kernel v2 is the same without the
// library, to compare instruction by instruction. In v3 and v4 the next idea is a change of three lines.
//
// A block's tile of 128 x 128 takes 32 KB a step of 64 for 2.1 MFLOP: 64 FLOPs a byte of L2 (lesson 1). A warp's 64 x
// 32 reads 3 KB of shared memory for 65,536 FLOPs. At an SM's 128 bytes per cycle that is 2700 FLOPs per cycle, two
// thirds of the tensor cores' peak. Kernel v4's warps have 64 x 64: 4 KB for twice the FLOPs.
//
//     block, 128 x 128 of C      warp 0 | warp 1 | warp 2 | warp 3      64 rows, 32 columns each
//                                warp 4 | warp 5 | warp 6 | warp 7
//     one warp, 16 of K          4 fragments of A (64 x 16), 2 pairs of fragments of B (16 x 32): 6 ldmatrix, 16 mma
//     v3's ring, 3 stages        step 0 multiplies | 1 is there or arrives | 2 arrives
//
// Sources: PTX ISA, "Matrix fragments for mma.m16n8k16", ldmatrix, cp.async; Spector et al., ThunderKittens (2024),
// for the types and their functions; NVIDIA, CUTLASS: "Efficient GEMM in CUDA".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o tiles day3_matmul_tk/lesson13_tiles.cu   (sm_80 or newer)
// Run:      ./tiles
#include <cuda_bf16.h>

#include "tiles.cuh"

using bf16 = __nv_bfloat16;
using Input = tiles::Matrix<const bf16>;
using Output = tiles::Matrix<bf16>;

constexpr int THREADS = 256, BK = 64;  // 8 warps

// v1. The plain loop in tiles. Predicted: it loads, waits and multiplies one after the other. The second block on the
// SM can use the waits only in part, so this reaches a third to half of mma.sync's rate.
__global__ __launch_bounds__(THREADS, 2) void tiles_kernel(Input a, Input b, Output c) {
    __shared__ tiles::SharedTile<bf16, 128, BK> a_tile;
    __shared__ tiles::SharedTile<bf16, BK, 128> b_tile;
    const int64_t across = (c.cols + 127) / 128, row = blockIdx.x / across * 128, col = blockIdx.x % across * 128;
    const int warp_row = threadIdx.x / 128 * 64, warp_col = threadIdx.x / 32 % 4 * 32;
    tiles::Sums<64, 32> sums;
    for (int64_t k = 0; k < a.cols; k += BK) {
        tiles::load_async<THREADS>(a_tile, a, row, k);
        tiles::load_async<THREADS>(b_tile, b, k, col);
        tiles::commit();
        tiles::wait();
        __syncthreads();  // all threads' copies are there
#pragma unroll
        for (int i = 0; i < BK; i += 16)
            tiles::mma(sums, tiles::left<64, 16>(a_tile, warp_row, i), tiles::right<16, 32>(b_tile, i, warp_col));
        __syncthreads();  // and all warps have read: the next step may overwrite
    }
    tiles::store(c, sums, row + warp_row, col + warp_col);
}

// v2. The same by hand: the same copies, fragments and MMAs, with every index written out. Predicted: exactly as many
// LDGSTS, LDSM, HMMA and STG as v1, and v1's time. (The property `the_library_costs_nothing` in lesson13_tiles.py
// checks the counts.)
__global__ __launch_bounds__(THREADS, 2) void by_hand_kernel(Input a, Input b, Output c) {
    __shared__ alignas(128) bf16 a_smem[128 * BK];
    __shared__ alignas(128) bf16 b_smem[BK * 128];
    const int64_t across = (c.cols + 127) / 128, row = blockIdx.x / across * 128, col = blockIdx.x % across * 128;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 128 * 64, warp_col = threadIdx.x / 32 % 4 * 32;
    const tensor::Address a_at = tensor::address(a_smem), b_at = tensor::address(b_smem);
    float sums[4][4][4] = {};
    for (int64_t k = 0; k < a.cols; k += BK) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = threadIdx.x + i * THREADS;
            const int64_t a_row = row + at / 8, a_col = k + at % 8 * 8, b_row = k + at / 16, b_col = col + at % 16 * 8;
            const bool a_inside = a_row < a.rows && a_col < a.cols, b_inside = b_row < b.rows && b_col < b.cols;
            tensor::copy_16(reinterpret_cast<char*>(a_smem) + at / 8 * 128 + ((at % 8 ^ (at / 8 & 7)) << 4),
                            a_inside ? a.data + a_row * a.cols + a_col : a.data, a_inside);
            tensor::copy_16(reinterpret_cast<char*>(b_smem) + at / 16 * 256 + ((at % 16 ^ (at / 16 & 7)) << 4),
                            b_inside ? b.data + b_row * b.cols + b_col : b.data, b_inside);
        }
        __pipeline_commit();
        __pipeline_wait_prior(0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t left[4][4], right[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int r = warp_row + 16 * m + lane % 16, piece = 2 * i + lane / 16;
                tensor::ldmatrix<false>(left[m], a_at + (r * 128 + ((piece ^ (r & 7)) << 4)));
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int r = 16 * i + lane % 16, piece = warp_col / 8 + 2 * n + lane / 16;
                tensor::ldmatrix<true>(right[n], b_at + (r * 256 + ((piece ^ (r & 7)) << 4)));
            }
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    tensor::mma<bf16>(sums[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t r = row + warp_row + 16 * m + 8 * half + lane / 4;
                const int64_t at = col + warp_col + 8 * n + lane % 4 * 2;
                if (r < c.rows && at < c.cols)
                    *reinterpret_cast<uint32_t*>(c.data + r * c.cols + at) =
                        tensor::pack<bf16>(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
            }
}

template <int M, int N>
struct Stage {
    tiles::SharedTile<bf16, M, BK> a;
    tiles::SharedTile<bf16, BK, N> b;
};

// v3. New: a ring of stages, each a pair of tiles. STAGES - 1 steps are in flight while one is multiplied. A step needs
// one barrier: the load behind it overwrites a stage that all warps multiplied before it. Predicted: no waiting for
// memory within a tile, only for ldmatrix. So it reaches mma.sync's rate, which we take as 480 TFLOP/s. An H200 stays a
// third below that, and the cause is not known.
//
// v4 is v3 with other constants: 128 x 256 of C a block, 64 x 64 per warp, 128 accumulator registers per thread. There
// are two additions. Tiles come in groups of 8 rows (lesson 1). And C goes through the ring's memory, so it is stored
// in pieces of 16 bytes. Predicted: two thirds of v3's ldmatrix traffic and three quarters of its loads from L2. No
// gain if mma.sync itself is the limit, 1.33 times if L2 is.
template <int M, int N, int STAGES, int GROUP, bool THROUGH_SHARED>
__global__ __launch_bounds__(THREADS) void pipelined_kernel(Input a, Input b, Output c) {
    extern __shared__ __align__(128) unsigned char shared[];
    auto* stages = reinterpret_cast<Stage<M, N>*>(shared);
    constexpr int WARP_M = 64, WARPS_M = M / WARP_M, WARP_N = N / (8 / WARPS_M);
    const int64_t down = (c.rows + M - 1) / M, across = (c.cols + N - 1) / N;
    const int64_t first = blockIdx.x / (GROUP * across) * GROUP, within = blockIdx.x % (GROUP * across);
    const int64_t height = down - first < GROUP ? down - first : GROUP;  // the last group may be lower
    const int64_t row = (first + within % height) * M, col = within / height * N;
    const int warp_row = threadIdx.x / 32 % WARPS_M * WARP_M, warp_col = threadIdx.x / 32 / WARPS_M * WARP_N;
    const int64_t steps = (a.cols + BK - 1) / BK;
    const auto load = [&](int64_t step) {
        if (step < steps) {
            auto& stage = stages[step % STAGES];
            tiles::load_async<THREADS>(stage.a, a, row, step * BK);
            tiles::load_async<THREADS>(stage.b, b, step * BK, col);
        }
        tiles::commit();  // an empty group after the last step keeps the count below right
    };
    for (int i = 0; i < STAGES - 1; i++) load(i);
    tiles::Sums<WARP_M, WARP_N> sums;
    for (int64_t step = 0; step < steps; step++) {
        tiles::wait<STAGES - 2>();  // this thread's copies of this step have arrived
        __syncthreads();            // all threads' copies have; and all have multiplied the step before
        load(step + STAGES - 1);    // so its stage may be overwritten
        const auto& stage = stages[step % STAGES];
#pragma unroll
        for (int i = 0; i < BK; i += 16)
            tiles::mma(sums, tiles::left<WARP_M, 16>(stage.a, warp_row, i),
                       tiles::right<16, WARP_N>(stage.b, i, warp_col));
    }
    if constexpr (THROUGH_SHARED) {
        tiles::wait();  // no copy is in flight,
        __syncthreads();  // no thread reads the ring
        auto& c_tile = *reinterpret_cast<tiles::SharedTile<bf16, M, N>*>(shared);
        tiles::store(c_tile, sums, warp_row, warp_col);
        __syncthreads();
        tiles::store<THREADS>(c, c_tile, row, col);
    } else {
        tiles::store(c, sums, row + warp_row, col + warp_col);
    }
}

// ---- on the host ----------------------------------------------------------------------------------------------------

// Blocks of m x n for a C; K and N are multiples of 8 here.
inline int64_t grid(int64_t rows, int64_t cols, int64_t k, int m, int n) {
    course::require(k % 8 == 0 && cols % 8 == 0, "16-byte copies need N and K to be multiples of 8: pad with zeros");
    const int64_t blocks = course::ceil_div(rows, m) * course::ceil_div(cols, n);
    course::require(blocks < int64_t(1) << 31, "more than 2^31 tiles of C: split M");
    return blocks;
}

void matmul_tiles(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    const int64_t blocks = grid(m, n, k, 128, 128);
    if (blocks == 0) return;
    tiles_kernel<<<blocks, THREADS, 0, stream>>>(Input{a, m, k}, Input{b, k, n}, Output{c, m, n});
    CUDA_CHECK(cudaGetLastError());
}

void matmul_by_hand(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    const int64_t blocks = grid(m, n, k, 128, 128);
    if (blocks == 0) return;
    by_hand_kernel<<<blocks, THREADS, 0, stream>>>(Input{a, m, k}, Input{b, k, n}, Output{c, m, n});
    CUDA_CHECK(cudaGetLastError());
}

template <int M, int N, int STAGES, int GROUP, bool THROUGH_SHARED>
void pipelined(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    const int64_t blocks = grid(m, n, k, M, N);
    if (blocks == 0) return;
    constexpr int bytes = STAGES * sizeof(Stage<M, N>);
    const auto kernel = pipelined_kernel<M, N, STAGES, GROUP, THROUGH_SHARED>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    pipelined_kernel<M, N, STAGES, GROUP, THROUGH_SHARED>
        <<<blocks, THREADS, bytes, stream>>>(Input{a, m, k}, Input{b, k, n}, Output{c, m, n});
    CUDA_CHECK(cudaGetLastError());
}

void matmul_pipelined(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    pipelined<128, 128, 3, 1, false>(a, b, c, m, n, k, stream);
}

void matmul_wide(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    pipelined<128, 256, 3, 8, true>(a, b, c, m, n, k, stream);
}

COURSE_MODULE(m) {
    bind(m, "matmul_tiles", matmul_tiles);
    bind(m, "matmul_by_hand", matmul_by_hand);
    bind(m, "matmul_pipelined", matmul_pipelined);
    bind(m, "matmul_wide", matmul_wide);
}

#ifndef COURSE_EXTENSION
int main() try {
    const std::vector<std::pair<const char*, decltype(&matmul_tiles)>> versions = {{"v1 tiles", matmul_tiles},
                                                                                   {"v2 by hand", matmul_by_hand},
                                                                                   {"v3 pipelined", matmul_pipelined},
                                                                                   {"v4 wide", matmul_wide}};
    for (const int64_t size : {104, 4096, 8192}) {
        if (size > 104 && course::small()) return 0;
        const int64_t m = size - 1, n = size, k = size;
        const auto rounded = [](size_t count, unsigned seed) {
            std::vector<bf16> values;
            for (float x : course::random(count, seed)) values.push_back(__float2bfloat16(x));
            return values;
        };
        const std::vector<bf16> a = rounded(m * k, 1), b = rounded(k * n, 2);
        const course::Buffer<bf16> a_device(a), b_device(b);
        course::Buffer<bf16> c_device(m * n);
        std::vector<course::Version> timed;
        for (const auto& [name, launch] : versions) {
            c_device.poison();
            launch(a_device, b_device, c_device, m, n, k, nullptr);
            const std::vector<bf16> c = c_device.host();
            std::vector<float> got, expected;
            for (int64_t i = 0; i < m * n; i += 1 + m * n / 2000) {
                float sum = 0;
                for (int64_t j = 0; j < k; j++)
                    sum += __bfloat162float(a[i / n * k + j]) * __bfloat162float(b[j * n + i % n]);
                got.push_back(__bfloat162float(c[i])), expected.push_back(sum);
            }
            course::check(name, got, expected, 0.006);
            timed.push_back({name, [&, launch = launch, m, n, k](cudaStream_t s) {
                                 launch(a_device, b_device, c_device, m, n, k, s);
                             }});
        }
        if (size > 104) course::time_versions(timed, {.flops = 2.0 * m * n * k});
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
