// Matmul on ThunderKittens: the ladder of cuda_src/22 in a tile library
// ====================================================================
// C[M, N] = A[M, K] * B[K, N] in bf16, accumulated in fp32, all row-major as torch.matmul has them. ThunderKittens is a
// library of headers (HazyResearch, MIT licence). Its types are tiles in registers (rt), in shared memory (st) and in
// global memory (gl). Its functions are what a warp, a warpgroup or one thread does to a whole tile: load, store,
// mma_AB, tma::load_async. The library takes care of layouts, swizzles, descriptors and the 128 operands of a wgmma.
// The kernel still synchronises its warps: every barrier of cuda_src/22 is here too.
//
// The arithmetic is lesson 1's: an SM does 2048 multiply-adds per cycle, and L2 gives it about 39 bytes per cycle.
//
// Sources: Spector et al., ThunderKittens: Simple, Fast, and Adorable AI Kernels (2024), section 3; its headers
// include/ops/group/mma/warpgroup.cuh, include/types/shared/st.cuh and prototype/lcf/lcf.cuh.
//
// Compile:  nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -DKITTENS_HOPPER --use_fast_math
//           --expt-extended-lambda --expt-relaxed-constexpr -Icuda_src/include -I$THUNDERKITTENS_ROOT/include
//           -I$THUNDERKITTENS_ROOT/prototype -o matmul day3_matmul_tk/lesson14_thunderkittens_matmul.cu
// Needs: ThunderKittens Hopper
#include "matmul.cuh"  // the check of its main, cuBLAS, is_hopper
#include "kittens_driver.cuh"

#include "kittens.cuh"
#ifdef KITTENS_HOPPER
#include "prototype.cuh"
#endif

using namespace kittens;

// A shared tile is stored in panels of 64 columns: 128 bytes, the longest row that a swizzle takes. A tensor map sees a
// matrix as a row of such panels. So a matrix's columns are a multiple of 64, or the last panel would reach into the
// next row: the Python side pads K and N with zeros. Panels and rows outside of the matrix arrive as zeros and are not
// stored. Loads and stores by threads (v1, v2) have a mask for rows only: for them N is a multiple of the tile.
constexpr int BK = 64;
using a_tile = st_bf<64, BK>;
template <int N>
using b_tile = st_bf<BK, N>;
using c_tile = st_bf<64, 64>;
template <typename... Tiles>
using matrix = gl<bf16, 1, 1, -1, -1, Tiles...>;  // [1, 1, rows, columns], and a tensor map for each kind of tile

template <int N>
struct Globals {
#ifdef KITTENS_HOPPER
    matrix<a_tile> a;
    matrix<b_tile<N>> b;
    matrix<c_tile> c;
#else
    matrix<> a, b, c;
#endif
    __host__ Globals(bf16* a, bf16* b, bf16* c, size_t m, size_t n, size_t k)
        : a(a, nullptr, nullptr, m, k), b(b, nullptr, nullptr, k, n), c(c, nullptr, nullptr, m, n) {}
    __device__ int steps() const { return a.cols() / BK; }
};

// Store a warpgroup's 64 x N of C through a shared tile, from which it writes the rows that C has, each as a whole.
template <typename Matrix, int N>
__device__ __forceinline__ void store_rows(const Matrix& to, rt_fl<16, N>& c, c_tile& panel, int row, int col) {
    const int own = 1 + warpid() / 4;  // of the 16 barriers that a block has; 0 is __syncthreads'
#pragma unroll
    for (int i = 0; i < N / 64; i++) {
        warpgroup::store(panel, reinterpret_cast<rt_fl<16, 64>&>(c.tiles[0][4 * i]));
        warpgroup::sync(own);
        warpgroup::store(to, panel, {row, N / 64 * col + i});
        warpgroup::sync(own);
    }
}

// v1. The plain loop: a block copies tiles to shared memory, and its warps load them into registers and multiply. 8
// warps share 128 x 128 of C, 16 rows each. The 60 lines of cuda_src/22 for swizzle, ldmatrix, fragments and the mask
// of rows are six calls here. Predicted: lesson 13's v1 or less. Loads go through registers, and all warps wait for
// them. A warp reads 4.5 KB of shared memory for 65,536 FLOPs instead of 3. So 100 to 250 TFLOP/s.
constexpr int TILE = 128;

__global__ __launch_bounds__(256) void loop_kernel(const __grid_constant__ Globals<TILE> g) {
    __shared__ alignas(1024) a_tile a_smem[2];
    __shared__ alignas(1024) b_tile<TILE> b_smem;
    using block = group<8>;
    const int row = blockIdx.x / (g.c.cols() / TILE), col = blockIdx.x % (g.c.cols() / TILE), half = warpid() / 4;
    rt_fl<16, TILE> c;
    warp::zero(c);
    for (int step = 0; step < g.steps(); step++) {
        for (int i = 0; i < 2; i++) block::load(a_smem[i], g.a, {2 * row + i, step});
        block::load(b_smem, g.b, {step, col});
        __syncthreads();  // the tiles are complete
#pragma unroll
        for (int k = 0; k < BK / 16; k++) {
            rt_bf<16, 16> a;
            rt_bf<16, TILE, ducks::rt_layout::col> b;  // mma.sync wants pairs down a column of B
            warp::load(a, a_smem[half].subtile<16, 16>({warpid() % 4, k}));
            warp::load(b, b_smem.subtile<16, TILE>({k, 0}));
            warp::mma_AB(c, a, b, c);
        }
        __syncthreads();  // and read by all: the next may overwrite them
    }
    store_rows(g.c, c, a_smem[half], 2 * row + half, col);
}

#ifdef KITTENS_HOPPER
// v2. New: wgmma, which reads both tiles from shared memory: no tile of A or B in registers, no ldmatrix. The call
// mma_AB is asynchronous, and mma_async_wait waits for it. Predicted: the loop's shared memory traffic falls to a
// third. The waits for the loads remain: 250 to 400 TFLOP/s.
__global__ __launch_bounds__(256) void wgmma_kernel(const __grid_constant__ Globals<TILE> g) {
    __shared__ alignas(1024) a_tile a_smem[2];
    __shared__ alignas(1024) b_tile<TILE> b_smem;
    using block = group<8>;
    const int row = blockIdx.x / (g.c.cols() / TILE), col = blockIdx.x % (g.c.cols() / TILE);
    const int half = warpgroup::groupid();
    rt_fl<16, TILE> c;
    warp::zero(c);
    for (int step = 0; step < g.steps(); step++) {
        for (int i = 0; i < 2; i++) block::load(a_smem[i], g.a, {2 * row + i, step});
        block::load(b_smem, g.b, {step, col});
        __syncthreads();
        warpgroup::mma_AB(c, a_smem[half], b_smem);  // New
        warpgroup::mma_async_wait();
        __syncthreads();
    }
    store_rows(g.c, c, a_smem[half], 2 * row + half, col);
}

// Store a warpgroup's 64 x N of C by TMA. The warpgroup writes panels of 64 x 64 to two buffers in shared memory in
// alternation. TMA reads one in whole rows of 128 bytes while the warpgroup writes the other.
template <int N>
__device__ __forceinline__ void store_panels(const matrix<c_tile>& to, rt_fl<16, N>& c, c_tile (&panels)[2], int row,
                                             int col) {
    const int own = 1 + warpgroup::groupid();  // of the 16 barriers that a block has; 0 is __syncthreads'
#pragma unroll
    for (int i = 0; i < N / 64; i++) {
        if (warpgroup::laneid() == 0) tma::store_async_read_wait<1>();  // TMA has read this buffer's panel before
        warpgroup::sync(own);
        warpgroup::store(panels[i % 2], reinterpret_cast<rt_fl<16, 64>&>(c.tiles[0][4 * i]));
        warpgroup::sync(own);
        if (warpgroup::laneid() == 0) tma::store_async(to, panels[i % 2], {row, N / 64 * col + i});
    }
}

// Dynamic shared memory as one struct of tiles, which begin at multiples of 1024 bytes.
template <typename Shared>
__device__ __forceinline__ Shared& tiles_in_shared() {
    extern __shared__ unsigned char shared[];
    return matmul::aligned<Shared>(shared);
}

// v3. New: TMA loads, and two pairs of tiles: one is loaded while the other is multiplied. One thread starts the load,
// and a semaphore (an mbarrier) completes its phase when all announced bytes have arrived. Predicted: a step's 512
// cycles of MMA hide its 840 of L2 only in part. By its 64 KB of shared memory three blocks fit on an SM, by its 90
// registers per thread two. So 500 to 600 TFLOP/s.
struct Buffers {
    a_tile a[2][2];
    b_tile<TILE> b[2];
};

__global__ __launch_bounds__(256) void double_buffer_kernel(const __grid_constant__ Globals<TILE> g, int tiles_n) {
    auto& s = tiles_in_shared<Buffers>();
    __shared__ semaphore arrived[2];
    const int row = blockIdx.x / tiles_n, col = blockIdx.x % tiles_n;  // TMA masks what is outside of C
    const int half = warpgroup::groupid(), steps = g.steps();
    const auto load = [&](int step) {
        const int to = step % 2;
        tma::expect(arrived[to], s.a[to], s.b[to]);
        for (int i = 0; i < 2; i++) tma::load_async(s.a[to][i], g.a, {2 * row + i, step}, arrived[to]);
        tma::load_async(s.b[to], g.b, {step, col}, arrived[to]);
    };
    if (threadIdx.x == 0) {
        for (auto& each : arrived) init_semaphore(each, 0, 1);
        load(0);
    }
    __syncthreads();
    rt_fl<16, TILE> c;
    warp::zero(c);
    for (int step = 0; step < steps; step++) {
        if (threadIdx.x == 0 && step + 1 < steps) load(step + 1);  // New: before this step's multiplication
        wait(arrived[step % 2], step / 2 % 2);
        warpgroup::mma_AB(c, s.a[step % 2][half], s.b[step % 2]);
        warpgroup::mma_async_wait();
        __syncthreads();  // both warpgroups are done with these tiles: the next load may overwrite them
    }
    store_panels(g.c, c, s.a[half], 2 * row + half, col);
    if (warpgroup::laneid() == 0) tma::store_async_read_wait();  // shared memory goes when the block ends
}

// v4. New: warp specialization, and a tile of 128 x 256. A producer warp fills a ring of four stages of 48 KB, and two
// consumer warpgroups multiply 64 x 256 each. They synchronise through `full` and `empty` alone:
//
//     producer    |load 0|load 1|load 2|load 3|      |load 4|      |load 5|            waits for empty[stage]
//     consumers          |MMA 0       |MMA 1       |MMA 2       |MMA 3       |         wait for full[stage]
//
// A consumer keeps one wgmma in flight and releases the stage of the one before. Predicted: the tensor cores do not
// wait within a tile, since a step's MMA takes 1024 cycles. L2 needs up to 1260 for its load, until a grouped order of
// tiles shares operands (lesson 1), and a tile's start and end remain: 600 to 700 TFLOP/s.
constexpr int WIDE = 256, STAGES = 4, CONSUMERS = 2;
using WideGlobals = Globals<WIDE>;

struct Pipeline {
    a_tile a[STAGES][CONSUMERS];
    b_tile<WIDE> b[STAGES];
    c_tile c[CONSUMERS][2];
};

// The ring's semaphores. All threads call the constructor once, then the producer and the consumers call the rest.
struct Stages {
    semaphore full[STAGES], empty[STAGES];

    __device__ void init() {
        if (threadIdx.x == 0)
            for (int i = 0; i < STAGES; i++) init_semaphore(full[i], 0, 1), init_semaphore(empty[i], CONSUMERS, 0);
        __syncthreads();
    }
};

// One step's tiles of A (for both consumers) and B into the ring's next stage. One thread.
__device__ __forceinline__ void load_stage(const WideGlobals& g, Pipeline& s, Stages& stages,
                                           matmul::Ring<STAGES>& ring, int row, int col, int step) {
    wait(stages.empty[ring.stage], ring.parity ^ 1);  // in the first round it returns at once
    auto& full = stages.full[ring.stage];
    tma::expect(full, s.a[ring.stage], s.b[ring.stage]);
    for (int i = 0; i < CONSUMERS; i++)
        tma::load_async(s.a[ring.stage][i], g.a, {CONSUMERS * row + i, step}, full);
    tma::load_async(s.b[ring.stage], g.b, {step, col}, full);
    ring.advance();
}

// A consumer's 64 x 256 of C. It releases the stage of a step one step later, when that step's wgmma is complete.
__device__ __forceinline__ void multiply_stages(rt_fl<16, WIDE>& c, Pipeline& s, Stages& stages,
                                                matmul::Ring<STAGES>& ring, int steps) {
    const auto release = [&](int stage) {
        if (warpgroup::laneid() == 0) arrive(stages.empty[stage]);
    };
    const int own = warpgroup::groupid();
    wait(stages.full[ring.stage], ring.parity);
    warpgroup::mm_AB(c, s.a[ring.stage][own], s.b[ring.stage]);  // the first overwrites c
    ring.advance();
    for (int step = 1; step < steps; step++, ring.advance()) {
        wait(stages.full[ring.stage], ring.parity);
        warpgroup::mma_AB<rt_fl<16, WIDE>, a_tile, b_tile<WIDE>, /*fence=*/0>(c, s.a[ring.stage][own], s.b[ring.stage]);
        warpgroup::mma_async_wait<1>();
        release(ring.before());
    }
    warpgroup::mma_async_wait();
    release(ring.before());
}

__global__ __launch_bounds__(384, 1) void specialized_kernel(const __grid_constant__ WideGlobals g, int tiles_n) {
    auto& s = tiles_in_shared<Pipeline>();
    __shared__ Stages stages;
    stages.init();
    const int row = blockIdx.x / tiles_n, col = blockIdx.x % tiles_n;
    matmul::Ring<STAGES> ring;
    if (warpgroup::groupid() == CONSUMERS) {
        warpgroup::decrease_registers<40>();  // of 168 a thread: the consumers need more
        if (warpgroup::laneid() == 0)
            for (int step = 0; step < g.steps(); step++) load_stage(g, s, stages, ring, row, col, step);
    } else {
        warpgroup::increase_registers<232>();
        rt_fl<16, WIDE> c;
        multiply_stages(c, s, stages, ring, g.steps());
        store_panels(g.c, c, s.c[warpgroup::groupid()], CONSUMERS * row + warpgroup::groupid(), col);
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
    }
}

// The tile of C that is the `index`-th in order: groups of `GROUP` rows of tiles, column by column within a group. So
// the 132 tiles that run together are close to a square (cuda_src/23).
constexpr int GROUP = 16;
__device__ __forceinline__ int2 place(int64_t index, int tiles_m, int tiles_n) {
    const int64_t in_group = int64_t(GROUP) * tiles_n, first = index / in_group * GROUP, rest = index % in_group;
    const int rows = int(min(int64_t(GROUP), tiles_m - first));  // the last group may be lower
    return {int(first + rest % rows), int(rest / rows)};
}

// v5. New: the load-compute-store-finish template. The loops, the ring and its semaphores come from prototype::lcf.
// This file says which tiles there are, where a task begins, how to load a step, how to multiply it, and how to finish.
// And the kernel is persistent: a block takes every 132nd tile. Predicted: the next tile's loads run during the end of
// this tile, +5% on v4, and the grouped order saves L2 traffic: 650 to 750 TFLOP/s.
struct MatmulTemplate {
    struct layout {
        struct globals : WideGlobals {
            int tiles_m, tiles_n;
        };
        struct input_block {
            a_tile a[CONSUMERS];
            b_tile<WIDE> b;
        };
        struct finish_block {
            c_tile c[CONSUMERS][2];
        };
        struct common_state {
            int row, col;
        };
        struct consumer_state {
            rt_fl<16, WIDE> c;
            semaphore* before;  // of the stage whose multiplication may still be running
        };
    };
    static constexpr int NUM_CONSUMER_WARPS = 4 * CONSUMERS, INPUT_PIPE_STAGES = STAGES, PRODUCER_BARRIER_ARRIVALS = 1;
    // All shared memory but 128 bytes for the semaphores. Then the finish block stands behind the last stage, and the
    // producer need not wait for it.
    static constexpr int MAX_SHARED_MEMORY = 227 * 1024 - 128 + 1024, BYTES = MAX_SHARED_MEMORY - 1024;

    __device__ static void common_setup(prototype::lcf::common_setup_args<layout> args) {
        const auto& g = args.globals;
        const int64_t task = int64_t(args.task_iter) * gridDim.x + blockIdx.x;
        if (task >= int64_t(g.tiles_m) * g.tiles_n) {
            args.num_iters = -1;  // no more work
            return;
        }
        const int2 tile = place(task, g.tiles_m, g.tiles_n);
        args.common = {tile.x, tile.y};
        args.num_iters = g.steps();
    }

    struct producer {
        __device__ static void setup(prototype::lcf::producer_setup_args<layout>) {
            warpgroup::decrease_registers<40>();
        }
        __device__ static void load(prototype::lcf::producer_load_args<layout> args) {
            if (warpgroup::laneid() != 0) return;
            tma::expect(args.inputs_arrived, args.input.a, args.input.b);
            for (int i = 0; i < CONSUMERS; i++)
                tma::load_async(args.input.a[i], args.globals.a, {CONSUMERS * args.common.row + i, args.iter},
                                args.inputs_arrived);
            tma::load_async(args.input.b, args.globals.b, {args.iter, args.common.col}, args.inputs_arrived);
        }
    };

    struct consumer {
        __device__ static void setup(prototype::lcf::consumer_setup_args<layout> args) {
            warpgroup::increase_registers<232>();
            warp::zero(args.state.c);
        }
        __device__ static void compute(prototype::lcf::consumer_compute_args<layout> args) {
            warpgroup::mma_AB(args.state.c, args.input.a[warpgroup::groupid()], args.input.b);
            warpgroup::mma_async_wait<1>();
            if (args.iter > 0) warp::arrive(*args.state.before);  // a lane of each warp, as the template counts
            args.state.before = &args.inputs_finished;
        }
        __device__ static void finish(prototype::lcf::consumer_finish_args<layout> args) {
            warpgroup::mma_async_wait();
            warp::arrive(*args.state.before);
            const int own = warpgroup::groupid();
            store_panels(args.globals.c, args.state.c, args.finish.c[own], CONSUMERS * args.common.row + own,
                         args.common.col);
            warp::arrive(args.finish_finished);
        }
    };
};

// v6. New: the template's loop written out. The template loses time at each tile's end in two ways: its consumers wait
// for each other before and after they finish, and its ring starts anew. Here each consumer stores when it is done and
// goes on. While it stores, the other consumer has the tensor cores for itself. Predicted: 1500 fewer of a tile's
// 65,536 cycles at K = 4096, +2% on v5, as fast as cuBLAS.
__global__ __launch_bounds__(384, 1) void persistent_kernel(const __grid_constant__ WideGlobals g, int tiles_m,
                                                            int tiles_n) {
    auto& s = tiles_in_shared<Pipeline>();
    __shared__ Stages stages;
    stages.init();
    const int64_t tiles = int64_t(tiles_m) * tiles_n;
    matmul::Ring<STAGES> ring;  // turns on from tile to tile
    if (warpgroup::groupid() == CONSUMERS) {
        warpgroup::decrease_registers<40>();
        if (warpgroup::laneid() == 0)
            for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
                const int2 tile = place(i, tiles_m, tiles_n);
                for (int step = 0; step < g.steps(); step++) load_stage(g, s, stages, ring, tile.x, tile.y, step);
            }
    } else {
        warpgroup::increase_registers<232>();
        const int own = warpgroup::groupid();
        rt_fl<16, WIDE> c;
        for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x) {
            const int2 tile = place(i, tiles_m, tiles_n);
            multiply_stages(c, s, stages, ring, g.steps());
            store_panels(g.c, c, s.c[own], CONSUMERS * tile.x + own, tile.y);
        }
        if (warpgroup::laneid() == 0) tma::store_async_read_wait();
    }
}
#endif

// ---- on the host ----------------------------------------------------------------------------------------------------

// The arguments of every launcher. The Python side has padded K and N and takes care of empty matrices.
inline void require_whole_panels(int64_t m, int64_t n, int64_t k, int columns = 64) {
    course::require(n % columns == 0 && k % 64 == 0, "N (a multiple of 64, in v1 and v2 of 128) or K (of 64): pad it");
    course::require(std::min({m, n, k}) > 0 && std::max({m, n, k}) < int64_t(1) << 31, "M, N, K from 1 to 2^31 - 1");
}

struct Grid {
    int64_t tiles_m, tiles_n, tiles;
    Grid(int64_t m, int64_t n, int width)
        : tiles_m(course::ceil_div(m, 128)), tiles_n(course::ceil_div(n, width)), tiles(tiles_m * tiles_n) {
        course::require(tiles < int64_t(1) << 31, "more than 2^31 tiles of C: split M");
    }
    // A persistent grid has one block for each SM, or fewer that take as many rounds: at 4096 cubed 128 of 132.
    int64_t staying() const { return course::ceil_div(tiles, course::ceil_div(tiles, course::sms())); }
};

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, int64_t blocks, int threads, int bytes, cudaStream_t stream, const Arguments&... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, threads, bytes, stream>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

void matmul_loop(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k, TILE);
    launch(loop_kernel, Grid(m, n, TILE).tiles, 256, 0, stream, Globals<TILE>(a, b, c, m, n, k));
}

#ifdef KITTENS_HOPPER
void matmul_wgmma(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k, TILE);
    launch(wgmma_kernel, Grid(m, n, TILE).tiles, 256, 0, stream, Globals<TILE>(a, b, c, m, n, k));
}

void matmul_double_buffer(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k);
    const Grid grid(m, n, TILE);
    constexpr int bytes = sizeof(Buffers) + 1024;
    launch(double_buffer_kernel, grid.tiles, 256, bytes, stream, Globals<TILE>(a, b, c, m, n, k), int(grid.tiles_n));
}

void matmul_specialized(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k);
    const Grid grid(m, n, WIDE);
    constexpr int bytes = sizeof(Pipeline) + 1024;
    launch(specialized_kernel, grid.tiles, 384, bytes, stream, WideGlobals(a, b, c, m, n, k), int(grid.tiles_n));
}

void matmul_template(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k);
    const Grid grid(m, n, WIDE);
    const MatmulTemplate::layout::globals g{{a, b, c, size_t(m), size_t(n), size_t(k)}, int(grid.tiles_m),
                                            int(grid.tiles_n)};
    launch(prototype::lcf::kernel<MatmulTemplate>, grid.staying(), 384, MatmulTemplate::BYTES, stream, g);
}

void matmul_persistent(bf16* a, bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    require_whole_panels(m, n, k);
    const Grid grid(m, n, WIDE);
    constexpr int bytes = sizeof(Pipeline) + 1024;
    launch(persistent_kernel, grid.staying(), 384, bytes, stream, WideGlobals(a, b, c, m, n, k), int(grid.tiles_m),
           int(grid.tiles_n));
}
#endif

COURSE_MODULE(m) {
    bind(m, "matmul_loop", matmul_loop);
#ifdef KITTENS_HOPPER
    bind(m, "matmul_wgmma", matmul_wgmma);
    bind(m, "matmul_double_buffer", matmul_double_buffer);
    bind(m, "matmul_specialized", matmul_specialized);
    bind(m, "matmul_template", matmul_template);
    bind(m, "matmul_persistent", matmul_persistent);
#endif
}

#if !defined(COURSE_EXTENSION) && defined(KITTENS_HOPPER)
int main() try {
    course::require(hopper::is_hopper(), "wgmma and the copy engine need a Hopper GPU (sm_90)");
    const std::vector<std::pair<const char*, void (*)(bf16*, bf16*, bf16*, int64_t, int64_t, int64_t, cudaStream_t)>>
        versions = {{"v1 loop", matmul_loop},
                    {"v2 wgmma", matmul_wgmma},
                    {"v3 double buffer", matmul_double_buffer},
                    {"v4 specialised", matmul_specialized},
                    {"v5 template", matmul_template},
                    {"v6 persistent", matmul_persistent}};
    for (const int64_t size : {500, 4096, 8192}) {
        if (size > 500 && course::small()) return 0;
        const int64_t m = size, n = size / 128 * 128, k = n;  // 500 rows: no tile divides them
        matmul::Problem p(m, n, k);
        const std::vector<float> a = p.floats(p.a), b = p.floats(p.b);
        std::vector<course::Version> timed;
        for (const auto& [name, launch] : versions) {
            p.c.poison();
            launch(p.a, p.b, p.c, m, n, k, nullptr);
            const std::vector<float> c = p.floats(p.c);
            std::vector<double> expected;
            std::vector<float> got;
            for (int64_t i = 0; i < m * n; i += m * n / 1999) {
                double sum = 0;
                for (int64_t j = 0; j < k; j++) sum += double(a[i / n * k + j]) * b[j * n + i % n];
                expected.push_back(sum), got.push_back(c[i]);
            }
            course::check(name, got, expected, 0.004);
            for (float value : c) course::require(!std::isnan(value), "an element is NaN: nobody wrote it");
            timed.push_back({name, [&p, launch = launch, m, n, k](cudaStream_t s) {
                                 launch(p.a, p.b, p.c, m, n, k, s);
                             }});
        }
        if (size > 500) course::time_versions(timed, {.flops = 2.0 * m * n * k});
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
