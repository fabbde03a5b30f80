// Flash attention, backward: recompute the matrix that was never kept
// ==================================================================
//
// With P = softmax(S), S = Q K^T scale and dO given, for each of B * H heads:
//     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = dS K scale     dK = dS^T Q scale
// with delta = rowsum(dO * O), one value per query. It equals rowsum(P * dP), and as O = P V it takes D multiply-adds
// instead of S. The forward pass has kept lse, from which P = exp(S - lse) is computed again. That is 2 S^2 D more
// FLOPs instead of 4 S^2 bytes of memory a head.
//
// Five matmuls, 10 S^2 D FLOPs, are the least. dK and dV sum over queries, dQ sums over keys. A loop that keeps one
// side in a block has to send the other side's sums elsewhere.
//
//   - One pass: keep K and V, add each tile's dQ to memory with fp32 atomics, as FlashAttention-2 does. That costs 10
//     S^2 D FLOPs, and 4 S^2 D / tile bytes of atomics a head. The order of additions differs in every run, and so do
//     the last bits of dQ.
//   - Two passes: one keeps K and V and sums dK and dV, one keeps Q and dO and sums dQ. Both need S and dP, so that
//     costs 14 S^2 D FLOPs. It needs no atomics, no fp32 copy of dQ, and no kernel to convert it. The bits are the same
//     in every run.
//
// This lesson takes two passes: deterministic, and both are the same kernel with the roles exchanged. The predicted
// price is 10/14 of what the tensor cores could do, before any other loss.
//
// You will be able to: derive the five matmuls of the backward; choose between one pass with atomics and two passes
// without.
//
// Sources: Dao et al. 2022, FlashAttention, appendix B.4, algorithm 4; Dao 2023, FlashAttention-2, section 3.1.2.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o flash_attention_backward
//           cuda_src/20_flash_attention_backward.cu
// Run:      ./flash_attention_backward
// No GPU:   python3 course.py run 20_flash_attention_backward
// Time it:  python3 course.py bench 20_flash_attention_backward
#include "20_attention_mma.cuh"
#include "course.cuh"

constexpr int THREADS = 256;

__host__ __device__ constexpr int tiles_of(int64_t S, int rows) { return int((S + rows - 1) / rows); }

// Folds over the `width` neighbouring lanes that share a row.
__device__ inline float row_sum(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// A tile [rows][WIDTH] in fp32, its rows `pitch` apart: zeros past the last row and past D, which then add nothing.
template <typename T, int ROWS, int WIDTH>
__device__ void fill(float* tile_smem, int pitch, const T* from, int live, int D) {
    for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
        const int row = i / WIDTH, d = i % WIDTH;
        tile_smem[row * pitch + d] = row < live && d < D ? float(from[int64_t(row) * D + d]) : 0.0f;
    }
}

// Before both passes, one warp for each row writes lse2 and delta, both [heads, PS] with PS = S rounded up to 128.
// In it lse2 = lse * log2(e), so that P = exp2(S scale log2(e) - lse2). Past S lse2 is infinite, which makes P 0
// there.
template <typename T>
__global__ void row_stats_kernel(const T* dout, const T* o, const float* lse, float* lse2, float* delta, int64_t rows,
                                 int S, int PS, int D) {  // rows = heads * PS
    const int64_t i = int64_t(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (i >= rows) return;
    const int64_t head = i / PS, row = head * S + i % PS;
    const bool inside = i % PS < S;
    float sum = 0;
    for (int d = threadIdx.x % 32; inside && d < D; d += 32) sum += float(dout[row * D + d]) * float(o[row * D + d]);
    sum = row_sum(sum, 32);
    if (threadIdx.x % 32 == 0) {
        lse2[i] = inside ? lse[row] * 1.44269504f : INFINITY;
        delta[i] = inside ? sum : 0;
    }
}

// v1. Two passes on CUDA cores, laid out as v2 of the forward pass. A warp owns a row: with KEYS a key and its value,
// else a query and its dO. 32 rows of the other side are a tile. A lane owns one of them, then columns of the sums.
//     x1, x2, y1, y2 = K, V, Q, dO   and   out1, out2 = dK, dV      if KEYS
//     x1, x2, y1, y2 = Q, dO, K, V   and   out1 = dQ                else
// In both S = x1 . y1, dP = x2 . y2, out1 = sum of dS y1 scale, and dV = sum of P y2. Predicted: two words from shared
// memory for a multiply-add, an eighth of 51 TFLOP/s at best. 14 S^2 D FLOPs take 3.5 times the forward pass's time.
template <typename T, int WIDTH, bool KEYS>
__global__ void __launch_bounds__(THREADS)
    attention_backward_kernel(const T* x1, const T* x2, const T* y1, const T* y2, const float* lse2, const float* delta,
                              T* out1, T* out2, int S, int PS, int D, bool causal, float scale) {
    __shared__ float x1_smem[8][WIDTH];
    __shared__ float x2_smem[8][WIDTH];
    __shared__ float y1_smem[32][WIDTH + 1];  // + 1: lane j reads row j, and the rows would all begin in bank 0
    __shared__ float y2_smem[32][WIDTH + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t head = blockIdx.x / tiles_of(S, 8), base = head * S;
    const int first = blockIdx.x % tiles_of(S, 8) * 8, row = first + warp;
    const int begin = KEYS && causal ? first / 32 * 32 : 0;  // queries before the first key see none of the keys
    const int end = !KEYS && causal ? min(S, first + 8) : S;
    fill<T, 8, WIDTH>(&x1_smem[0][0], WIDTH, x1 + (base + first) * D, S - first, D);
    fill<T, 8, WIDTH>(&x2_smem[0][0], WIDTH, x2 + (base + first) * D, S - first, D);
    float acc1[WIDTH / 32] = {}, acc2[WIDTH / 32] = {};
    for (int start = begin; start < end; start += 32) {
        __syncthreads();  // all have read the tile before this one
        fill<T, 32, WIDTH>(&y1_smem[0][0], WIDTH + 1, y1 + (base + start) * D, S - start, D);
        fill<T, 32, WIDTH>(&y2_smem[0][0], WIDTH + 1, y2 + (base + start) * D, S - start, D);
        __syncthreads();
        float s = 0, dp = 0;
        for (int d = 0; d < WIDTH; d++) {
            s += x1_smem[warp][d] * y1_smem[lane][d];
            dp += x2_smem[warp][d] * y2_smem[lane][d];
        }
        const int query = KEYS ? start + lane : row, key = KEYS ? row : start + lane;
        const bool seen = query < S && key < S && (!causal || key <= query);
        const float p = seen ? exp2f(s * (scale * 1.44269504f) - lse2[head * PS + query]) : 0.0f;
        const float ds = seen ? p * (dp - delta[head * PS + query]) : 0.0f;
        for (int j = 0; j < 32; j++) {
            const float ds_j = __shfl_sync(~0u, ds, j), p_j = __shfl_sync(~0u, p, j);
            for (int c = 0; c < WIDTH / 32; c++) {
                acc1[c] += ds_j * y1_smem[j][lane + 32 * c];
                if (KEYS) acc2[c] += p_j * y2_smem[j][lane + 32 * c];
            }
        }
    }
    for (int c = 0; c < WIDTH / 32; c++)
        if (row < S && lane + 32 * c < D) {
            out1[(base + row) * D + lane + 32 * c] = T(acc1[c] * scale);
            if (KEYS) out2[(base + row) * D + lane + 32 * c] = T(acc2[c]);
        }
}

// What both versions begin with. `stats` [2, heads, PS] is scratch of 8 bytes per row.
template <typename T>
void row_stats(const T* o, const float* lse, const T* dout, float* stats, int64_t heads, int64_t S, int64_t D,
               cudaStream_t stream) {
    const int64_t rows = heads * course::ceil_div(S, 128) * 128;
    course::require(rows < int64_t(1) << 33, "attention_backward: B * H * S must be below 2^33");
    row_stats_kernel<T><<<course::ceil_div(rows, 8), THREADS, 0, stream>>>(dout, o, lse, stats, stats + rows, rows, S,
                                                                          int(course::ceil_div(S, 128) * 128), D);
    CUDA_CHECK(cudaGetLastError());
}

// heads = B * H; q, k, v, o, dout, dq, dk, dv [heads, S, D]; lse [heads, S]; stats [2, heads, S rounded up to 128]
template <typename T>
void attention_backward_scalar(const T* q, const T* k, const T* v, const T* o, const float* lse, const T* dout, T* dq,
                               T* dk, T* dv, float* stats, int64_t heads, int64_t S, int64_t D, bool causal,
                               float scale, cudaStream_t stream) {
    course::require(D <= 128, "attention_backward_scalar: D must be at most 128, a row's share of registers");
    if (heads * S * D == 0) return;
    row_stats(o, lse, dout, stats, heads, S, D, stream);
    const int PS = int(course::ceil_div(S, 128) * 128);
    const float *lse2 = stats, *delta = stats + heads * PS;
    const int64_t blocks = heads * tiles_of(S, 8);
    course::require(blocks < int64_t(1) << 31, "attention_backward_scalar: B * H * S must be below 2^34");
    const auto pass = [&](auto keys, const T* x1, const T* x2, const T* y1, const T* y2, T* out1, T* out2) {
        constexpr bool KEYS = decltype(keys)::value;
        const auto kernel = D <= 64 ? attention_backward_kernel<T, 64, KEYS> : attention_backward_kernel<T, 128, KEYS>;
        kernel<<<blocks, THREADS, 0, stream>>>(x1, x2, y1, y2, lse2, delta, out1, out2, S, PS, D, causal, scale);
        CUDA_CHECK(cudaGetLastError());
    };
    pass(std::true_type{}, k, v, q, dout, dk, dv);
    pass(std::false_type{}, q, dout, k, v, dq, static_cast<T*>(nullptr));
}

// v2. New: tensor cores, in 20_attention_mma.cuh.
template <typename T>
void attention_backward_mma(const T* q, const T* k, const T* v, const T* o, const float* lse, const T* dout, T* dq,
                            T* dk, T* dv, float* stats, int64_t heads, int64_t S, int64_t D, bool causal, float scale,
                            cudaStream_t stream) {
    course::require(D == 64 || D == 128, "attention_backward_mma: D must be 64 or 128: pad with zeros");
    if (heads * S == 0) return;
    row_stats(o, lse, dout, stats, heads, S, D, stream);
    const int PS = int(course::ceil_div(S, 128) * 128);
    const float *lse2 = stats, *delta = stats + heads * PS;
    (D == 64 ? launch_backward_mma<T, 64, true> : launch_backward_mma<T, 128, true>)(
        k, v, q, dout, lse2, delta, dk, dv, heads, S, PS, causal, scale, stream);
    (D == 64 ? launch_backward_mma<T, 64, false> : launch_backward_mma<T, 128, false>)(
        q, dout, k, v, lse2, delta, dq, nullptr, heads, S, PS, causal, scale, stream);
}

COURSE_MODULE(m) {
    bind(m, "attention_backward_scalar_float32", attention_backward_scalar<float>);
    bind(m, "attention_backward_scalar_float16", attention_backward_scalar<__half>);
    bind(m, "attention_backward_scalar_bfloat16", attention_backward_scalar<__nv_bfloat16>);
    bind(m, "attention_backward_mma_float16", attention_backward_mma<__half>);
    bind(m, "attention_backward_mma_bfloat16", attention_backward_mma<__nv_bfloat16>);
}

#ifndef COURSE_EXTENSION
// Gradients by plain loops in double, and the o and lse of the forward pass.
struct Reference {
    std::vector<double> o, lse, dq, dk, dv;

    template <typename T>
    Reference(const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v, const std::vector<T>& dout,
              int64_t heads, int64_t S, int64_t D, bool causal)
        : o(q.size()), lse(heads * S), dq(q.size()), dk(q.size()), dv(q.size()) {
        const double scale = 1 / std::sqrt(double(D));
        std::vector<double> p(S), dp(S);
        const auto dot = [&](const std::vector<T>& a, int64_t i, const std::vector<T>& b, int64_t j) {
            double sum = 0;
            for (int64_t d = 0; d < D; d++) sum += double(float(a[i * D + d])) * float(b[j * D + d]);
            return sum;
        };
        for (int64_t i = 0; i < heads * S; i++) {
            const int64_t first = i / S * S, seen = causal ? i % S + 1 : S;
            double sum = 0, delta = 0;
            for (int64_t j = 0; j < seen; j++) sum += std::exp(dot(q, i, k, first + j) * scale);
            lse[i] = std::log(sum);
            for (int64_t j = 0; j < seen; j++) {
                p[j] = std::exp(dot(q, i, k, first + j) * scale - lse[i]);
                delta += p[j] * (dp[j] = dot(dout, i, v, first + j));
            }
            for (int64_t j = 0; j < seen; j++)
                for (int64_t d = 0, key = (first + j) * D; d < D; d++) {
                    o[i * D + d] += p[j] * float(v[key + d]);
                    dv[key + d] += p[j] * float(dout[i * D + d]);
                    dq[i * D + d] += p[j] * (dp[j] - delta) * scale * float(k[key + d]);
                    dk[key + d] += p[j] * (dp[j] - delta) * scale * float(q[i * D + d]);
                }
        }
    }
};

template <typename T>
void run(int64_t heads, int64_t S, int64_t D, bool causal, bool timed) {
    const auto random = [&](unsigned seed) {
        const std::vector<float> values = course::random(heads * S * D, seed);
        return std::vector<T>(values.begin(), values.end());
    };
    const std::vector<T> hq = random(1), hk = random(2), hv = random(3), hdout = random(4);
    // What the forward pass has kept. At the timed sizes S is too large for plain loops. There o is small, since it is
    // a mean of S values, and scores are normal, so that lse is near log(keys) + 1/2.
    std::vector<double> exact[3];
    std::vector<float> ho, hlse;
    if (timed) {
        ho = course::random(hq.size(), 5, 0, 0.02f);
        for (int64_t i = 0; i < heads * S; i++) hlse.push_back(0.5f + std::log(float(causal ? i % S + 1 : S)));
    } else {
        Reference reference(hq, hk, hv, hdout, heads, S, D, causal);
        ho.assign(reference.o.begin(), reference.o.end()), hlse.assign(reference.lse.begin(), reference.lse.end());
        exact[0] = reference.dq, exact[1] = reference.dk, exact[2] = reference.dv;
    }
    course::Buffer<T> q(hq), k(hk), v(hv), dout(hdout), o(std::vector<T>(ho.begin(), ho.end()));
    course::Buffer<T> dq(hq.size()), dk(hq.size()), dv(hq.size());
    course::Buffer<float> lse(hlse), stats(2 * heads * course::ceil_div(S, 128) * 128);
    const float scale = 1 / std::sqrt(float(D));
    std::vector<course::Version> versions = {{"v1 scalar", [&](cudaStream_t s) {
        attention_backward_scalar<T>(q, k, v, o, lse, dout, dq, dk, dv, stats, heads, S, D, causal, scale, s);
    }}};
    if constexpr (!std::is_same_v<T, float>)
        versions.push_back({"v2 tensor cores", [&](cudaStream_t s) {
            attention_backward_mma<T>(q, k, v, o, lse, dout, dq, dk, dv, stats, heads, S, D, causal, scale, s);
        }});
    for (const auto& version : versions) {
        dq.poison(), dk.poison(), dv.poison(), stats.poison();
        version.run(nullptr);
        const std::vector<T> got[3] = {dq.host(), dk.host(), dv.host()};
        for (int i = 0; i < 3; i++) {
            if (exact[i].empty()) exact[i].assign(got[i].begin(), got[i].end());  // timed: against the first version
            const double tolerance = std::is_same_v<T, float> ? 2e-5 : 2e-2;
            course::check(version.name + (i == 0 ? ", dq" : i == 1 ? ", dk" : ", dv"), got[i], exact[i], tolerance);
        }
    }
    if (!timed) return;
    std::printf("B H = %d, S = %d, D = %d%s; 10 S^2 D FLOPs a head counted, 14 done; %.2f MB of scratch\n", int(heads),
                int(S), int(D), causal ? ", causal" : "", 8e-6 * heads * S);
    const double part = causal ? 0.5 : 1;
    course::time_versions(versions, {.bytes = 16.0 * heads * S * D, .flops = part * 10 * heads * S * S * D});
}

int main() try {
    for (bool causal : {false, true}) {
        run<float>(2, course::emulated ? 37 : 261, 40, causal, false);  // no tile divides S, no vector D
        run<__nv_bfloat16>(1, course::emulated ? 70 : 261, 64, causal, false);
        if (!course::emulated) run<__half>(3, 261, 128, causal, false);
    }
    if (course::small()) return 0;
    for (int64_t D : {64, 128}) run<__nv_bfloat16>(16, 4096, D, D == 128, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
