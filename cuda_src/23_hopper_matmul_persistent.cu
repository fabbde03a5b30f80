// Matmul on Hopper, second half: a persistent kernel, and clusters that share loads
// =================================================================================
//
// The first half (22_hopper_matmul.cu) ends with a producer warp that feeds two consumer warpgroups through a ring:
// within a tile the tensor cores never wait. At M = N = K = 8192 they have 1.1 TFLOP to do: 1.4 to 1.6 ms at the 700
// to 800 TFLOP/s that an H200's 700 W sustain. An SM multiplies a 128x256 tile in 65,536 cycles at K = 4096. So each
// 1000 cycles of a tile's prologue or epilogue cost 1.5%, and each byte moved costs power that the multiplication
// could have had. Rung v4 hides the prologues and most of each epilogue. v5 removes a third of the loads. The bar is
// the speed of cuBLAS.
//
// You will be able to: keep the tensor cores busy from tile to tile; share loads in a cluster, and say when that gains
// nothing.
//
// Sources: CUTLASS, sm90 kernels (warp-specialised persistent cooperative) and their pipeline; Shah et al.,
// FlashAttention-3 (2024), 2.2; P. Shankhdhar, fast.cu (2024); PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
//
// Compile:  nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda_src/include -o persistent cuda_src/23*.cu
//           (Built for sm_90 without the a, v4 and v5 are empty kernels, and the check says "wrong at 0: -nan".)
// Run:      ./persistent
// Check:    python3 course.py check 23_hopper_matmul_persistent
// Time it:  python3 course.py bench 23_hopper_matmul_persistent
#include "matmul.cuh"

using matmul::bf16;

// The tile of C that is the `index`-th to be computed. At any time 132 tiles are in work and read the same columns of
// A and B at about the same time. They share most loads if they form a block close to square, and least if they form a
// row. Groups of `group` rows of tiles are walked column by column. For 128x256 tiles and groups of 16, 2048 x 2112
// elements are in work at once, and a step reads 4160 rows of A and B. A 128 x 33,792 strip would read 33,920.
struct Place {
    int m, n;
};
__host__ __device__ inline Place place(int64_t index, int tiles_m, int tiles_n, int group) {
    const int64_t in_group = int64_t(group) * tiles_n, first = index / in_group * group, rest = index % in_group;
    const int rows = int(first + group <= tiles_m ? group : tiles_m - first);  // the last group may be lower
    return {int(first + rest % rows), int(rest / rows)};
}

// The schedule alone, with simple arithmetic: a thread computes an element of C, from global memory. This is the
// persistent grid that v4 adds. It visits each tile once; without tensor cores it can be checked without a GPU.
// Predicted: an FMA of a warp reads 2 rows of a and 16 of b, 18 lines in L1, which looks up one a cycle. So 32 FMAs in
// 18 cycles on 132 SMs at 1.7 GHz are 0.8 TFLOP/s.
constexpr int SMALL = 16, SMALL_GROUP = 4;  // tiles of 16x16

__global__ void matmul_schedule_kernel(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k) {
    const int tiles_m = (m + SMALL - 1) / SMALL, tiles_n = (n + SMALL - 1) / SMALL;
    for (int64_t i = blockIdx.x; i < int64_t(tiles_m) * tiles_n; i += gridDim.x) {
        const Place tile = place(i, tiles_m, tiles_n, SMALL_GROUP);
        const int64_t row = int64_t(tile.m) * SMALL + threadIdx.y, col = int64_t(tile.n) * SMALL + threadIdx.x;
        if (row >= m || col >= n) continue;
        float sum = 0;
        for (int64_t j = 0; j < k; j++) sum += __bfloat162float(a[row * k + j]) * __bfloat162float(b[col * k + j]);
        c[row * n + col] = __float2bfloat16(sum);
    }
}

void matmul_schedule(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (m == 0 || n == 0) return;
    const int64_t tiles = course::ceil_div(m, SMALL) * course::ceil_div(n, SMALL);
    const int64_t blocks = std::min<int64_t>(tiles, 8 * course::sms());
    matmul_schedule_kernel<<<blocks, dim3(SMALL, SMALL), 0, stream>>>(a, b, c, m, n, k);
    CUDA_CHECK(cudaGetLastError());
}

#ifndef COURSE_EMULATED
using namespace hopper;
using matmul::BK, matmul::CONSUMERS, matmul::Ring, matmul::aligned;

// v4. New: a persistent kernel. As many blocks as SMs, each taking every gridDim.x-th tile in the order of `place`.
// The ring continues from tile to tile, so that the producer is up to 4 steps into the next tile while the consumers
// store this one. The result goes through shared memory, in panels of 64x64. Swizzled stores by stmatrix have no bank
// conflicts. TMA takes whole 128-byte rows from there, and the threads go on as soon as it has read them. Predicted: a
// tile's epilogue costs the conversion and 4 panels, about 1500 of a tile's 65,536 cycles at K = 4096. Its prologue
// costs nothing any more: 5% more than v3's 600 to 700 TFLOP/s, and a larger gain where K is small.
//
// v5. New: clusters (marked so below). The two blocks of a cluster work on tiles one above the other, which need the
// same B. Each block loads half of it and TMA delivers it to both (multicast): 32 KB per block and step from L2 instead
// of 48. A stage is empty when the consumers of both blocks have read it. Predicted: v4's time. At 700 TFLOP/s v4
// takes 8 TB/s from L2, which L2 gives, and the ring has 4 steps in reserve. Faster loads do not help consumers that
// never wait. Nor does v5 save much of the power that limits the clocks from 8192 on. Most of the power goes into the
// MMAs. The 48 KB of a step are also written to shared memory once and read there 1.7 times as before. In return two
// blocks have to stay in step. So v4 is the rung to take: as fast on squares, and it wastes less where the number of
// tiles down is odd. Clusters are for kernels that L2 limits: smaller tiles, or two SMs that share a tile too large
// for one.
template <int TileM, int TileN, int StagesT, int ClusterM, int ClusterN, int GroupT, int PanelsT = 2>
struct Plan {
    static constexpr int M = TileM, N = TileN, STAGES = StagesT;       // a block's tile, and how many of its steps fit
    static constexpr int CM = ClusterM, CN = ClusterN, CLUSTER = CM * CN;  // blocks of a cluster, down and across
    static constexpr int GROUP = GroupT;                               // of cluster tiles, see place
    static constexpr int PANELS = PanelsT;                             // of C that a consumer may have on the way
    static constexpr int HALVES = M / 64 / CONSUMERS;                  // 64-row results of a consumer
    struct Shared {
        bf16 a[STAGES][M * BK], b[STAGES][N * BK], c[CONSUMERS][PANELS][64 * 64];
        uint64_t full[STAGES], empty[STAGES];
    };
    static constexpr int BYTES = sizeof(Shared) + 1024;
    static_assert(BYTES <= 227 * 1024, "more shared memory than a block can have");
    static_assert(HALVES * N / 64 % PANELS == 0, "a tile's last panel and the next one's first would be the same");
};

__device__ __forceinline__ uint32_t pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
}

template <typename P>
__global__ __launch_bounds__(384, 1) void matmul_persistent_kernel(
    const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
    const __grid_constant__ CUtensorMap c_map, int tiles_m, int tiles_n, int steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ unsigned char shared[];
    auto& s = aligned<typename P::Shared>(shared);
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int rank = P::CLUSTER > 1 ? cluster_rank() : 0, rank_m = rank % P::CM, rank_n = rank / P::CM;
    const int64_t tiles = int64_t(tiles_m) * tiles_n, from = blockIdx.x / P::CLUSTER, stride = gridDim.x / P::CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < P::STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], CONSUMERS * P::CLUSTER);
        }
        barriers_ready();
    }
    if constexpr (P::CLUSTER > 1) cluster_sync();  // v5: no block sends before the other's barriers are ready
    else __syncthreads();
    Ring<P::STAGES> ring;
    if (warpgroup == CONSUMERS) {
        registers_shrink<40>();
        if (thread == 0)
            for (int64_t i = from; i < tiles; i += stride) {
                const Place tile = place(i, tiles_m, tiles_n, P::GROUP);
                // v5: of the A that a row of the cluster shares, and the B that a column shares, each block loads a
                // part.
                constexpr int A_ROWS = P::M / P::CN, B_ROWS = P::N / P::CM;
                const int a_row = (tile.m * P::CM + rank_m) * P::M + rank_n * A_ROWS;
                const int b_row = (tile.n * P::CN + rank_n) * P::N + rank_m * B_ROWS;
                constexpr int ROW = P::CN == 1 ? 1 : 1 | 1 << P::CM, COLUMN = (1 << P::CM) - 1;  // bits of such blocks
                for (int step = 0; step < steps; step++, ring.advance()) {
                    uint64_t* full = &s.full[ring.stage];
                    bf16* a = s.a[ring.stage] + rank_n * A_ROWS * BK;
                    bf16* b = s.b[ring.stage] + rank_m * B_ROWS * BK;
                    barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
                    barrier_expect(full, sizeof(s.a[0]) + sizeof(s.b[0]));  // v5: also what the others send
                    if constexpr (P::CN > 1) load_box_multicast(a, &a_map, full, step * BK, a_row, ROW << rank_m);
                    else load_box(a, &a_map, full, step * BK, a_row);
                    if constexpr (P::CM > 1)
                        load_box_multicast(b, &b_map, full, step * BK, b_row, COLUMN << P::CM * rank_n);
                    else load_box(b, &b_map, full, step * BK, b_row);
                }
            }
    } else {
        registers_grow<232>();
        const auto release = [&](int stage) {
            if constexpr (P::CLUSTER == 1) {
                if (thread == 0) barrier_arrive(&s.empty[stage]);
            } else {
                if (thread < P::CLUSTER) barrier_arrive_at(&s.empty[stage], thread);  // v5: tell all senders
            }
        };
        const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;  // of a panel: where this lane's pieces go
        const uint64_t a_first = tile_descriptor(s.a[0] + warpgroup * P::HALVES * 64 * BK);
        const uint64_t b_first = tile_descriptor(s.b[0]);
        float d[P::HALVES][P::N / 2];
        for (int64_t i = from; i < tiles; i += stride) {
            const Place tile = place(i, tiles_m, tiles_n, P::GROUP);
            for (int step = 0; step < steps; step++, ring.advance()) {
                barrier_wait(&s.full[ring.stage], ring.parity);
                const uint64_t a = a_first + (ring.stage * sizeof(s.a[0]) >> 4);
                const uint64_t b = b_first + (ring.stage * sizeof(s.b[0]) >> 4);
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < BK / 16; j++)
#pragma unroll
                    for (int h = 0; h < P::HALVES; h++)
                        wgmma<P::N>(d[h], a + h * DESCRIPTOR_64_ROWS + j * DESCRIPTOR_16_COLUMNS,
                                    b + j * DESCRIPTOR_16_COLUMNS, j > 0 || step > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (step > 0) release(ring.before());
            }
            wgmma_wait<0>();
            release(ring.before());
            const int c_row = (tile.m * P::CM + rank_m) * P::M + warpgroup * P::HALVES * 64;
            const int c_col = (tile.n * P::CN + rank_n) * P::N;
#pragma unroll
            for (int p = 0; p < P::HALVES * P::N / 64; p++) {
                const int h = p / (P::N / 64), q = p % (P::N / 64);
                bf16* panel = s.c[warpgroup][p % P::PANELS];
                if (thread == 0) store_wait_read<P::PANELS - 1>();  // TMA has read what was here before
                named_sync<128>(1 + warpgroup);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float* x = &d[h][32 * q + 8 * j];  // columns 64q + 16j on
                    store_matrices(address(panel) + row * 128 + ((2 * j + lane / 16) ^ (row & 7)) * 16,
                                   pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
                }
                fence_async();
                named_sync<128>(1 + warpgroup);
                if (thread == 0) {
                    store_box(&c_map, panel, c_col + 64 * q, c_row + 64 * h);
                    store_commit();
                }
            }
        }
        if (thread == 0) store_wait_read<0>();  // shared memory goes when the block ends
    }
    if constexpr (P::CLUSTER > 1) cluster_sync();  // v5: and no block exits while the other may still send
#endif
}

template <typename P>
void persistent(const bf16* a, int64_t a_pitch, const bf16* b, int64_t b_pitch, bf16* c, int64_t c_pitch, int64_t m,
                int64_t n, int64_t k, cudaStream_t stream) {
    const CUtensorMap a_map = tensor_map(a, m, k, a_pitch, P::M / P::CN);
    const CUtensorMap b_map = tensor_map(b, n, k, b_pitch, P::N / P::CM);
    const CUtensorMap c_map = tensor_map(c, m, n, c_pitch, 64);
    const int64_t tiles_m = course::ceil_div(m, P::M * P::CM), tiles_n = course::ceil_div(n, P::N * P::CN);
    // Rounds that the tiles take, and no more clusters than these need. At 4096 cubed 64 of 66 clusters take 4 rounds
    // as well. The two extra clusters would have no work in the last round, but would use power in the others, and so
    // lower the clock of all.
    const int64_t tiles = tiles_m * tiles_n, rounds = course::ceil_div(tiles, course::sms() / P::CLUSTER);
    const int64_t clusters = course::ceil_div(tiles, rounds);
    const auto kernel = matmul_persistent_kernel<P>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::BYTES));
    cudaLaunchAttribute cluster{};  // <<<>>> knows no clusters
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {P::CLUSTER, 1, 1};
    cudaLaunchConfig_t launch{};
    launch.gridDim = clusters * P::CLUSTER;
    launch.blockDim = 128 * (CONSUMERS + 1);
    launch.dynamicSmemBytes = P::BYTES;
    launch.stream = stream;
    launch.attrs = &cluster;
    launch.numAttrs = P::CLUSTER > 1;
    CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, a_map, b_map, c_map, int(tiles_m), int(tiles_n),
                                  int(course::ceil_div(k, BK))));
}

// Any shape. TMA cannot read rows that do not begin at multiples of 16 bytes: K or N is no multiple of 8, or the
// address none of 16. Such matrices are copied with longer rows, which end in zeros.
template <typename P>
void any_shape(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    if (!matmul::prepare(c, m, n, k, stream)) return;
    const auto fits = [](const bf16* x, int64_t pitch) {
        return pitch % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    };
    if (fits(a, k) && fits(b, k) && fits(c, n)) return persistent<P>(a, k, b, k, c, n, m, n, k, stream);
    const int64_t k8 = course::ceil_div(k, 8) * 8, n8 = course::ceil_div(n, 8) * 8;
    bf16* copies = nullptr;  // of A, B and C, one after the other: each a multiple of 16 bytes
    CUDA_CHECK(cudaMallocAsync(&copies, (m * k8 + n * k8 + m * n8) * sizeof(bf16), stream));
    bf16 *b8 = copies + m * k8, *c8 = b8 + n * k8;
    const auto copy = [&](bf16* to, int64_t to_pitch, const bf16* x, int64_t pitch, int64_t columns, int64_t rows) {
        CUDA_CHECK(cudaMemcpy2DAsync(to, to_pitch * sizeof(bf16), x, pitch * sizeof(bf16), columns * sizeof(bf16), rows,
                                     cudaMemcpyDeviceToDevice, stream));
    };
    copy(copies, k8, a, k, k, m);
    copy(b8, k8, b, k, k, n);
    persistent<P>(copies, k8, b8, k8, c8, n8, m, n, k, stream);
    copy(c, n, c8, n8, n, m);
    CUDA_CHECK(cudaFreeAsync(copies, stream));
}

void matmul_persistent(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    any_shape<Plan<128, 256, 4, 1, 1, 16>>(a, b, c, m, n, k, stream);
}

void matmul_cluster(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    any_shape<Plan<128, 256, 4, 2, 1, 8>>(a, b, c, m, n, k, stream);
}
#endif

COURSE_MODULE(m) {
    bind(m, "matmul_schedule", matmul_schedule);
#ifndef COURSE_EMULATED
    bind(m, "matmul_persistent", matmul_persistent);
    bind(m, "matmul_cluster", matmul_cluster);
#endif
}

#ifndef COURSE_EXTENSION
int main() try {
    matmul::Problem(301, 77, 51).check({{"the schedule alone", matmul_schedule}});
#ifndef COURSE_EMULATED
    course::require(is_hopper(), "wgmma and TMA multicast need a Hopper GPU (sm_90)");
    const std::vector<std::pair<const char*, matmul::Launcher>> versions = {
        {"v4 persistent", matmul_persistent}, {"v5 cluster", matmul_cluster}};
    matmul::Problem(301, 392, 1000).check(versions);  // no tile divides any of them
    matmul::Problem(300, 391, 777).check(versions);  // nor is any a multiple of 8
    if (course::small()) return 0;
    matmul::race(versions, {4096, 8192, 16384});
#endif
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
