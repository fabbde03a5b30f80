// Attention forward on ThunderKittens, right for every sequence length
// ====================================================================
// O = softmax(Q K^T / sqrt(D)) V for Q, K, V, O [B, H, S, D] in bf16, D 64 or 128, causal or not. That is 4 B H S S D
// FLOPs (half if causal) over 8 B H S D bytes. With S = 4096 it is 2048 FLOPs per byte. So the tensor cores are the
// limit, and next to them the exponentials. A tile of 128 keys and 64 queries at D = 128 is 4.2 MFLOP, 1024 cycles of
// an SM's tensor cores. Its 8192 exponentials take 512 cycles, at 16 a cycle. That is a third of the time, unless they
// overlap.
//
// The scores never leave the registers (FlashAttention). A warp or a warpgroup owns rows of queries and goes along the
// keys with a running maximum m and sum l of each row. When the maximum grows, it scales down the accumulator and l.
//
// The tail. ThunderKittens' own mha_h100 (as of April 2026) rounds S / 192 blocks of queries and S / 128 tiles of keys
// down. So it never writes the rows past the last multiple of 192, and raises no error. Here both are rounded up. Rows
// past S arrive as zeros and are not stored. For the tensor map has a head's rows as a dimension: a tile that reaches
// past the end of one head does not touch the next. Keys past S get a score of -inf, since a zero is a score like any
// other.
//
// Sources: Dao et al., FlashAttention (2022); Shah et al., FlashAttention-3 (2024), 3.1 and 3.2; Spector et al.,
// ThunderKittens (2024); its headers.
//
// Compile:  nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -DKITTENS_HOPPER --use_fast_math
//           --expt-extended-lambda --expt-relaxed-constexpr -Icuda_src/include -I$THUNDERKITTENS_ROOT/include
//           -I$THUNDERKITTENS_ROOT/prototype -o attention day3_matmul_tk/lesson15_thunderkittens_attention.cu
// Needs: ThunderKittens Hopper
#include "matmul.cuh"  // random values on the device, is_hopper
#include "kittens_driver.cuh"

#include "kittens.cuh"

using namespace kittens;

constexpr int ROWS = 64;  // of queries that a warpgroup owns
template <int ROWS_OF_TILE, int D>
using tile = st_bf<ROWS_OF_TILE, D>;
template <int D, typename... Tiles>
using heads = gl<bf16, -1, -1, -1, D, Tiles...>;  // [B, H, S, D]

// The rows of a block. A head's blocks follow each other, so its K and V stay in L2. If causal, the last rows come
// first: they have the most keys, and would run alone at the end otherwise.
struct Place {
    int batch, head, tile;

    template <typename Heads>
    __device__ Place(const Heads& q, int rows, bool causal) {
        const int tiles = (q.rows() + rows - 1) / rows, nth = blockIdx.x % tiles, each = blockIdx.x / tiles;
        batch = each / q.depth(), head = each % q.depth(), tile = causal ? tiles - 1 - nth : nth;
    }
};

// A warp's running maximum and sum of its 16 rows. Scores come in unscaled; the scale is folded into exp2.
template <int KEYS>
struct Softmax {
    using scores = rt_fl<16, KEYS>;
    using column = col_vec<scores>;
    column maximum, sum;

    __device__ Softmax() {
        warp::neg_infty(maximum);
        warp::zero(sum);
    }

    // s becomes exp(s - maximum). The caller multiplies its accumulator by the returned factor.
    __device__ column step(scores& s, float scale) {
        column rescale, scaled;
        warp::copy(rescale, maximum);
        warp::row_max(maximum, s, maximum);
        warp::sub(rescale, rescale, maximum);
        warp::mul(rescale, rescale, scale);
        warp::exp2(rescale, rescale);  // the first time exp2(-inf) = 0
        warp::mul(scaled, maximum, scale);
        warp::mul(s, s, scale);  // with the next line one multiply-add
        warp::sub_row(s, s, scaled);
        warp::exp2(s, s);
        warp::mul(sum, sum, rescale);
        warp::row_sum(sum, s, sum);
        return rescale;
    }
};

// Scores of keys past S, and of keys that the causal mask hides from a query, become -inf. `row` and `key` are the
// tile's first. Every row sees key 0, in the first tile, so its maximum is finite from then on.
template <bool CAUSAL, int KEYS>
__device__ __forceinline__ void mask(rt_fl<16, KEYS>& s, int row, int key, int keys) {
    if (key + KEYS <= keys && (!CAUSAL || key + KEYS <= row + 1)) return;  // nothing to hide
    warp::apply(s, s, [=](int r, int k, float x) {
        return key + k < keys && (!CAUSAL || key + k <= row + r) ? x : -INFINITY;
    });
}

constexpr float LOG2_E = 1.4426950408889634f;
template <int D>
__device__ constexpr float scale() { return LOG2_E * (D == 64 ? 0.125f : 0.08838834764831845f); }  // 1 / sqrt(D)

// v1. Warps: each owns 16 queries, in registers as fragments of mma.sync. A block of four warps copies 64 keys and
// values to shared memory, waits, and multiplies. Predicted: nothing overlaps within a block. Each warp reads 64 x D of
// K and of V from shared memory for 16 rows: 2 KB for 32,768 FLOPs at D = 64. At 128 bytes per cycle that feeds at most
// half of the tensor cores: 100 to 200 TFLOP/s.
template <int D>
struct WarpGlobals {
    heads<D> q, k, v, o;
};

template <int D, bool CAUSAL>
__global__ __launch_bounds__(128) void warps_kernel(const __grid_constant__ WarpGlobals<D> g) {
    constexpr int KEYS = 64;
    __shared__ tile<KEYS, D> k_smem, v_smem;
    using block = group<4>;
    const Place at(g.q, ROWS, CAUSAL);
    const int keys = g.k.rows(), row = at.tile * ROWS + warpid() * 16;
    const int end = CAUSAL ? min(keys, (at.tile + 1) * ROWS) : keys;
    rt_bf<16, D> q;
    rt_fl<16, D> o;
    Softmax<KEYS> softmax;
    block::load(k_smem, g.q, {at.batch, at.head, at.tile, 0});
    __syncthreads();
    block::load(q, k_smem);  // 16 rows to each warp
    warp::zero(o);
    for (int j = 0; j * KEYS < end; j++) {
        __syncthreads();  // what was in the tiles has been read by all
        block::load(k_smem, g.k, {at.batch, at.head, j, 0});
        block::load(v_smem, g.v, {at.batch, at.head, j, 0});
        __syncthreads();
        rt_fl<16, KEYS> s;
        warp::zero(s);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            rt_bf<16, D> k;
            warp::load(k, k_smem.template subtile<16, D>({i, 0}));
            auto& part = reinterpret_cast<rt_fl<16, 16>&>(s.tiles[0][i]);
            warp::mma_ABt(part, q, k, part);
        }
        mask<CAUSAL>(s, row, j * KEYS, keys);
        const auto rescale = softmax.step(s, scale<D>());
        warp::mul_row(o, o, rescale);
        rt_bf<16, KEYS> p;
        warp::copy(p, s);
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            rt_bf<16, D, ducks::rt_layout::col> v;
            warp::load(v, v_smem.template subtile<16, D>({i, 0}));
            warp::mma_AB(o, reinterpret_cast<rt_bf<16, 16>&>(p.tiles[0][i]), v, o);
        }
    }
    warp::div_row(o, o, softmax.sum);
    __syncthreads();
    block::store(k_smem, o);
    __syncthreads();
    block::store(g.o, k_smem, {at.batch, at.head, at.tile, 0});  // the rows that there are
}

#ifdef KITTENS_HOPPER
// v2. New: warpgroups, TMA, a producer. Two consumers own 64 queries each and read tiles of 128 keys and values by
// wgmma. P is operand A in registers. A producer keeps a ring of tiles filled. K and V have semaphores of their own,
// since a stage of K is released long before its V. Predicted: one consumer's exponentials overlap with the other's
// MMAs while the two happen to be out of step: 400 to 550 TFLOP/s at D = 128.
constexpr int KEYS = 128, CONSUMERS = 2;

template <int D>
struct Globals {
    heads<D, tile<ROWS, D>> q;
    heads<D, tile<KEYS, D>> k, v;
    heads<D, tile<ROWS, D>> o;
};

template <int D>
struct Shared {
    static constexpr int STAGES = D == 64 ? 4 : 2;  // 32 KB of Q at D = 128, and 64 KB a stage
    tile<ROWS, D> q[CONSUMERS];
    tile<KEYS, D> k[STAGES], v[STAGES];
};

template <int D>
struct Semaphores {
    static constexpr int STAGES = Shared<D>::STAGES;
    semaphore q_full, k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];

    __device__ void init() {
        if (threadIdx.x == 0) {
            init_semaphore(q_full, 0, 1);
            for (int i = 0; i < STAGES; i++) {
                init_semaphore(k_full[i], 0, 1), init_semaphore(v_full[i], 0, 1);
                init_semaphore(k_empty[i], CONSUMERS, 0), init_semaphore(v_empty[i], CONSUMERS, 0);
            }
        }
        __syncthreads();
    }
};

// One thread loads the queries of both consumers, then every tile of keys and of values.
template <int D>
__device__ __forceinline__ void produce(const Globals<D>& g, Shared<D>& s, Semaphores<D>& sem, const Place& at, int n) {
    tma::expect(sem.q_full, s.q);
    for (int i = 0; i < CONSUMERS; i++)
        tma::load_async(s.q[i], g.q, {at.batch, at.head, CONSUMERS * at.tile + i, 0}, sem.q_full);
    matmul::Ring<Shared<D>::STAGES> ring;
    for (int j = 0; j < n; j++, ring.advance()) {
        const int stage = ring.stage;
        wait(sem.k_empty[stage], ring.parity ^ 1);  // in the first round at once
        tma::expect(sem.k_full[stage], s.k[stage]);
        tma::load_async(s.k[stage], g.k, {at.batch, at.head, j, 0}, sem.k_full[stage]);
        wait(sem.v_empty[stage], ring.parity ^ 1);
        tma::expect(sem.v_full[stage], s.v[stage]);
        tma::load_async(s.v[stage], g.v, {at.batch, at.head, j, 0}, sem.v_full[stage]);
    }
}

// C++ does not know that a wgmma writes its tile until the wait for it, so the compiler may move a read before the
// wait. This marks the tile as changed here, at no cost, so reads of it stay behind this line.
template <typename Tile>
__device__ __forceinline__ void pin(Tile& t) {
#pragma unroll
    for (int i = 0; i < Tile::width; i++)
#pragma unroll
        for (auto& pair : t.tiles[0][i].data) asm volatile("" : "+f"(pair.x), "+f"(pair.y)::"memory");
}

__device__ __forceinline__ void release(semaphore& empty) {
    if (warpgroup::laneid() == 0) arrive(empty);
}

template <int D, bool CAUSAL, bool AHEAD>
__device__ __forceinline__ void consume(Shared<D>& s, Semaphores<D>& sem, rt_fl<16, D>& o, int row, int n, int keys) {
    auto& q = s.q[warpgroup::groupid()];
    rt_fl<16, KEYS> scores;
    rt_bf<16, KEYS> p;
    Softmax<KEYS> softmax;
    matmul::Ring<Shared<D>::STAGES> ring;
    warp::zero(o);
    wait(sem.q_full, 0);
    if constexpr (!AHEAD) {
        for (int j = 0; j < n; j++, ring.advance()) {
            wait(sem.k_full[ring.stage], ring.parity);
            warpgroup::mm_ABt(scores, q, s.k[ring.stage]);
            warpgroup::mma_async_wait();
            pin(scores);
            release(sem.k_empty[ring.stage]);
            mask<CAUSAL>(scores, row, j * KEYS, keys);
            warp::mul_row(o, o, softmax.step(scores, scale<D>()));
            warp::copy(p, scores);
            wait(sem.v_full[ring.stage], ring.parity);
            warpgroup::mma_AB(o, p, s.v[ring.stage]);
            warpgroup::mma_async_wait();
            pin(o);
            release(sem.v_empty[ring.stage]);
        }
    } else {
        // v3. New: QK of a step is issued before PV of the last step, and its exponentials overlap with that PV. PV
        // reads p while the softmax works on the scores, so no tile is needed twice. Predicted: the tensor cores no
        // longer wait for exponentials, two thirds of which had no MMA to overlap with: +10 to 20% on v2.
        //
        //     v2    QK 1 | softmax 1 | PV 1 | QK 2 | softmax 2 | PV 2
        //     v3    QK 1 | softmax 1 | QK 2 PV 1   | QK 3 PV 2   |
        //                            |   softmax 2 |   softmax 3 |
        wait(sem.k_full[0], 0);
        warpgroup::mm_ABt(scores, q, s.k[0]);
        warpgroup::mma_async_wait();
        pin(scores);
        release(sem.k_empty[0]);
        mask<CAUSAL>(scores, row, 0, keys);
        softmax.step(scores, scale<D>());
        warp::copy(p, scores);
        for (int j = 1; j < n; j++) {
            const auto last = ring;
            ring.advance();
            wait(sem.k_full[ring.stage], ring.parity);
            warpgroup::mm_ABt(scores, q, s.k[ring.stage]);
            wait(sem.v_full[last.stage], last.parity);
            warpgroup::mma_AB(o, p, s.v[last.stage]);
            warpgroup::mma_async_wait<1>();  // the scores are there, P V may be running
            pin(scores);
            release(sem.k_empty[ring.stage]);
            mask<CAUSAL>(scores, row, j * KEYS, keys);
            const auto rescale = softmax.step(scores, scale<D>());
            warpgroup::mma_async_wait();
            pin(o);
            release(sem.v_empty[last.stage]);
            warp::mul_row(o, o, rescale);
            warp::copy(p, scores);
        }
        wait(sem.v_full[ring.stage], ring.parity);
        warpgroup::mma_AB(o, p, s.v[ring.stage]);
        warpgroup::mma_async_wait();
        pin(o);
    }
    warp::div_row(o, o, softmax.sum);
}

template <int D, bool CAUSAL, bool AHEAD>
__global__ __launch_bounds__(128 * (CONSUMERS + 1), 1) void warpgroups_kernel(const __grid_constant__ Globals<D> g) {
    extern __shared__ unsigned char shared[];
    auto& s = matmul::aligned<Shared<D>>(shared);
    __shared__ Semaphores<D> sem;
    sem.init();
    const Place at(g.q, ROWS * CONSUMERS, CAUSAL);
    const int keys = g.k.rows(), own = warpgroup::groupid();
    const int end = CAUSAL ? min(keys, (at.tile + 1) * ROWS * CONSUMERS) : keys, n = (end + KEYS - 1) / KEYS;
    if (own == CONSUMERS) {
        warpgroup::decrease_registers<24>();
        if (warpgroup::laneid() == 0) produce(g, s, sem, at, n);
    } else {
        warpgroup::increase_registers<240>();
        rt_fl<16, D> o;
        const int row = (CONSUMERS * at.tile + own) * ROWS + warpid() % 4 * 16;  // this warp's first
        consume<D, CAUSAL, AHEAD>(s, sem, o, row, n, keys);
        auto& o_smem = s.q[own];  // its queries are not needed any more
        warpgroup::store(o_smem, o);
        warpgroup::sync(1 + own);
        if (warpgroup::laneid() == 0) {
            tma::store_async(g.o, o_smem, {at.batch, at.head, CONSUMERS * at.tile + own, 0});
            tma::store_async_read_wait();  // shared memory goes when the block ends
        }
    }
}
#endif

// ---- on the host ----------------------------------------------------------------------------------------------------

template <typename G>
G make_globals(bf16* q, bf16* k, bf16* v, bf16* o, size_t b, size_t h, size_t s) {
    return {{q, b, h, s, nullptr}, {k, b, h, s, nullptr}, {v, b, h, s, nullptr}, {o, b, h, s, nullptr}};
}

template <typename G>
void launch(void (*kernel)(G), int rows, int threads, int bytes, bf16* q, bf16* k, bf16* v, bf16* o, int64_t b,
            int64_t h, int64_t s, cudaStream_t stream) {
    const int64_t blocks = b * h * course::ceil_div(s, rows);
    if (blocks == 0) return;
    course::require(blocks < int64_t(1) << 31 && s < int64_t(1) << 30, "2^30 rows a head, 2^31 tiles: split the batch");
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<blocks, threads, bytes, stream>>>(make_globals<G>(q, k, v, o, b, h, s));
    CUDA_CHECK(cudaGetLastError());
}

void attention_warps(bf16* q, bf16* k, bf16* v, bf16* o, int64_t b, int64_t h, int64_t s, int64_t d, bool causal,
                     cudaStream_t stream) {
    course::require(d == 64 || d == 128, "D is 64 or 128");
    if (d == 64)
        launch(causal ? warps_kernel<64, true> : warps_kernel<64, false>, ROWS, 128, 0, q, k, v, o, b, h, s, stream);
    else
        launch(causal ? warps_kernel<128, true> : warps_kernel<128, false>, ROWS, 128, 0, q, k, v, o, b, h, s, stream);
}

#ifdef KITTENS_HOPPER
template <bool AHEAD>
void attention(bf16* q, bf16* k, bf16* v, bf16* o, int64_t b, int64_t h, int64_t s, int64_t d, bool causal,
               cudaStream_t stream) {
    course::require(d == 64 || d == 128, "D is 64 or 128");
    constexpr int rows = ROWS * CONSUMERS, threads = 128 * (CONSUMERS + 1);
    if (d == 64)
        launch(causal ? warpgroups_kernel<64, true, AHEAD> : warpgroups_kernel<64, false, AHEAD>, rows, threads,
               sizeof(Shared<64>) + 1024, q, k, v, o, b, h, s, stream);
    else
        launch(causal ? warpgroups_kernel<128, true, AHEAD> : warpgroups_kernel<128, false, AHEAD>, rows, threads,
               sizeof(Shared<128>) + 1024, q, k, v, o, b, h, s, stream);
}

void attention_warpgroups(bf16* q, bf16* k, bf16* v, bf16* o, int64_t b, int64_t h, int64_t s, int64_t d, bool causal,
                          cudaStream_t stream) {
    attention<false>(q, k, v, o, b, h, s, d, causal, stream);
}

void attention_ahead(bf16* q, bf16* k, bf16* v, bf16* o, int64_t b, int64_t h, int64_t s, int64_t d, bool causal,
                     cudaStream_t stream) {
    attention<true>(q, k, v, o, b, h, s, d, causal, stream);
}
#endif

COURSE_MODULE(m) {
    bind(m, "attention_warps", attention_warps);
#ifdef KITTENS_HOPPER
    bind(m, "attention_warpgroups", attention_warpgroups);
    bind(m, "attention_ahead", attention_ahead);
#endif
}

#if !defined(COURSE_EXTENSION) && defined(KITTENS_HOPPER)
// Row `row` of the result for one head of Q, K, V [S, D].
std::vector<double> expected_row(const float* q, const float* k, const float* v, int64_t s, int64_t d, int64_t row,
                                 bool causal) {
    const int64_t keys = causal ? row + 1 : s;
    std::vector<double> weights(keys), o(d);
    double maximum = -INFINITY, sum = 0;
    for (int64_t j = 0; j < keys; j++) {
        for (int64_t i = 0; i < d; i++) weights[j] += double(q[row * d + i]) * k[j * d + i];
        maximum = std::max(maximum, weights[j] /= std::sqrt(double(d)));
    }
    for (double& w : weights) sum += w = std::exp(w - maximum);
    for (int64_t j = 0; j < keys; j++)
        for (int64_t i = 0; i < d; i++) o[i] += weights[j] / sum * v[j * d + i];
    return o;
}

int main() try {
    course::require(hopper::is_hopper(), "wgmma and the copy engine need a Hopper GPU (sm_90)");
    const std::vector<std::pair<const char*, decltype(&attention_ahead)>> versions = {
        {"v1 warps", attention_warps}, {"v2 warpgroups", attention_warpgroups}, {"v3 ahead", attention_ahead}};
    for (const int64_t s : {200, 4096})  // no tile divides 200
        for (const int64_t d : {64, 128})
            for (const bool causal : {false, true}) {
                if (s > 200 && course::small()) return 0;
                const int64_t heads = s > 200 ? 64 : 3, n = heads * s * d;
                course::Buffer<bf16> q(n), k(n), v(n), o(n);
                matmul::fill_kernel<<<1024, 256>>>(q, n, 1);
                matmul::fill_kernel<<<1024, 256>>>(k, n, 2);
                matmul::fill_kernel<<<1024, 256>>>(v, n, 3);
                const auto hq = matmul::Problem::floats(q), hk = matmul::Problem::floats(k);
                const auto hv = matmul::Problem::floats(v);
                std::printf("S = %d, D = %d%s\n", int(s), int(d), causal ? ", causal" : "");
                std::vector<course::Version> timed;
                for (const auto& [name, launch] : versions) {
                    o.poison();
                    launch(q, k, v, o, 1, heads, s, d, causal, nullptr);
                    const std::vector<float> all = matmul::Problem::floats(o);
                    std::vector<double> expected;
                    std::vector<float> got;
                    for (int64_t row = s - 1; row >= 0; row -= s > 200 ? 511 : 1) {  // of the last head
                        const int64_t head = (heads - 1) * s * d;
                        const auto one = expected_row(&hq[head], &hk[head], &hv[head], s, d, row, causal);
                        expected.insert(expected.end(), one.begin(), one.end());
                        got.insert(got.end(), &all[head + row * d], &all[head + row * d] + d);
                    }
                    course::check(name, got, expected, 0.01, 0.3);
                    for (float x : all) course::require(!std::isnan(x), "an element is NaN: nobody wrote it");
                    timed.push_back({name, [&, launch = launch, heads, s, d, causal](cudaStream_t stream) {
                                         launch(q, k, v, o, 1, heads, s, d, causal, stream);
                                     }});
                }
                if (s > 200) course::time_versions(timed, {.flops = 4.0 * heads * s * s * d / (causal ? 2 : 1)});
            }
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
