// Flash attention, forward: never write the S x S matrix
// ======================================================
//
// O = softmax(Q K^T / sqrt(D)) V for each of B * H heads, Q, K, V, O [S, D], causal or not. The inputs and the output
// are small, 8 S D bytes per head in bf16, and the matrix between is not. At S = 16384, D = 128 a head's Q, K, V, O are
// 17 MB and its scores in fp32 1.07 GB. Naive attention writes that matrix, reads and writes it for the softmax and
// reads it again. That is 16 S^2 bytes against 8 S D, 256 times the least at this size. Online softmax needs none of
// it. FLOPs: 4 S^2 D a head, half of that if causal; D/4 FLOPs for each byte of scores that naive moves.
//
// An H200 has 4.2 TB/s of HBM and 51 TFLOP/s of fp32 on CUDA cores. Its tensor cores have 700 TFLOP/s of bf16 through
// wgmma and about 60% of that through mma.sync, which this file uses. So two comparisons are fair:
//
//   - Scalar flash attention (v2, v3) against naive attention on tensor cores (cuBLAS, torch.matmul) may lose: it has
//     14 times fewer FLOP/s, and as many FLOPs to do. What it wins is memory, O(S) for O(S^2).
//   - Flash attention on tensor cores (v4, v5) wins both: naive then spends its time on the S x S traffic.
//
// You will be able to: write flash attention with mma.sync; count its wavefronts and FLOPs; say where the scalar form
// loses and what it saves.
//
// Sources: Dao et al. 2022, FlashAttention, algorithm 1. Its two loops are exchanged here. The paper keeps K and V and
// visits Q, so O, m and l go to memory and back in each round. Here a block keeps Q and they stay in registers.
// Milakov and Gimelshein 2018, online softmax; Dao 2023, FlashAttention-2, section 3.3 (work partitioning between
// warps).
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o flash_attention cuda_src/19_flash_attention_v1.cu
// Run:      ./flash_attention
// No GPU:   python3 course.py run 19_flash_attention_v1
// Time it:  python3 course.py bench 19_flash_attention_v1
#include "19_attention_mma.cuh"
#include "19_attention_register.cuh"
#include "course.cuh"

// v1. Naive: three kernels, and the S x S matrix P between them. Predicted: 16 S^2 bytes per head for P, and in
// scores_kernel 32 neighbouring threads read 32 rows of K: each request touches 32 sectors where 4 would do.
template <typename T>
__global__ void scores_kernel(const T* q, const T* k, float* p, int S, int D, bool causal, float scale) {
    const int64_t head = blockIdx.x / tiles_of(S, 8);
    const int i = blockIdx.x % tiles_of(S, 8) * 8 + threadIdx.y, j = blockIdx.y * 32 + threadIdx.x;
    if (i >= S || j >= S) return;
    float sum = 0;
    for (int d = 0; d < D; d++) sum += float(q[(head * S + i) * D + d]) * float(k[(head * S + j) * D + d]);
    p[(head * S + i) * S + j] = causal && j > i ? -INFINITY : sum * scale;
}

__global__ void softmax_rows_kernel(float* p, float* lse, int64_t rows, int S) {  // a warp a row, in place
    const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float m = -INFINITY, l = 0;
    for (int j = threadIdx.x % 32; j < S; j += 32) m = fmaxf(m, p[row * S + j]);
    m = row_max(m, 32);
    for (int j = threadIdx.x % 32; j < S; j += 32) l += expf(p[row * S + j] - m);
    l = row_sum(l, 32);
    for (int j = threadIdx.x % 32; j < S; j += 32) p[row * S + j] = expf(p[row * S + j] - m) / l;
    if (threadIdx.x % 32 == 0) lse[row] = m + logf(l);
}

template <typename T>
__global__ void weighted_sum_kernel(const float* p, const T* v, T* o, int64_t rows, int S, int D) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = i / D, head = row / S;
    if (row >= rows) return;
    float sum = 0;
    for (int j = 0; j < S; j++) sum += p[row * S + j] * float(v[(head * S + j) * D + i % D]);
    o[i] = T(sum);
}

// heads = B * H; q, k, v, o [heads, S, D]; lse [heads, S]; scratch: p [heads, S, S]
template <typename T>
void attention_naive(const T* q, const T* k, const T* v, T* o, float* lse, float* p, int64_t heads, int64_t S,
                     int64_t D, bool causal, float scale, cudaStream_t stream) {
    if (heads * S * D == 0) return;
    course::require(S < 65536 * 32, "attention_naive: S must be below 2^21, the grid's limit in y");
    course::require(heads * S * D < 256 * (int64_t(1) << 31), "attention_naive: too many elements for one grid");
    const dim3 grid(heads * tiles_of(S, 8), tiles_of(S, 32));
    scores_kernel<T><<<grid, dim3(32, 8), 0, stream>>>(q, k, p, S, D, causal, scale);
    CUDA_CHECK(cudaGetLastError());
    softmax_rows_kernel<<<course::ceil_div(heads * S, 8), THREADS, 0, stream>>>(p, lse, heads * S, S);
    CUDA_CHECK(cudaGetLastError());
    weighted_sum_kernel<T>
        <<<course::ceil_div(heads * S * D, THREADS), THREADS, 0, stream>>>(p, v, o, heads * S, S, D);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: online softmax over tiles of 32 keys in shared memory. A warp owns a query; a lane owns a key of the tile,
// then columns of the output. The largest score so far is m, and l is the sum of exp(s - m). When m grows, the sums so
// far are relative to the old m and are multiplied by exp(m_old - m_new). Memory: O and lse, nothing else. Predicted:
// each multiply-add takes two words from shared memory (a shuffle counts as one). So 16 lanes multiply in a cycle
// where the SM has 128: an eighth of 51 TFLOP/s at best.
template <typename T, int WIDTH>  // WIDTH: D rounded up to what the registers are laid out for
__global__ void __launch_bounds__(THREADS)
    attention_online_kernel(const T* q, const T* k, const T* v, T* o, float* lse, int S, int D, bool causal,
                            float scale) {
    __shared__ float q_smem[8][WIDTH];
    __shared__ float k_smem[32][WIDTH + 1];  // + 1: lane j reads row j, and the rows would all begin in bank 0
    __shared__ float v_smem[32][WIDTH];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t base = int64_t(blockIdx.x / tiles_of(S, 8)) * S;
    const int first = blockIdx.x % tiles_of(S, 8) * 8, row = first + warp;
    const int keys = causal ? min(S, first + 8) : S;  // that some query of the block sees
    const int seen = causal ? min(S, row + 1) : S;    // that this warp's query sees
    fill<T, 8, WIDTH>(&q_smem[0][0], WIDTH, q + (base + first) * D, S - first, D);
    float m = -INFINITY, l = 0, acc[WIDTH / 32] = {};
    for (int start = 0; start < keys; start += 32) {
        __syncthreads();  // all have read the tile before this one
        fill<T, 32, WIDTH>(&k_smem[0][0], WIDTH + 1, k + (base + start) * D, S - start, D);
        fill<T, 32, WIDTH>(&v_smem[0][0], WIDTH, v + (base + start) * D, S - start, D);
        __syncthreads();
        float s = 0;
        for (int d = 0; d < WIDTH; d++) s += q_smem[warp][d] * k_smem[lane][d];
        s = start + lane < seen ? s * scale : -INFINITY;
        const float m_new = fmaxf(m, row_max(s, 32));
        const float shift = m_new == -INFINITY ? 0 : m_new;  // nothing seen yet: -inf minus -inf would be NaN
        const float correction = expf(m - shift), p = expf(s - shift);
        l = l * correction + row_sum(p, 32);
        for (float& a : acc) a *= correction;
        for (int j = 0; j < 32; j++) {
            const float p_j = __shfl_sync(~0u, p, j);
            for (int c = 0; c < WIDTH / 32; c++) acc[c] += p_j * v_smem[j][lane + 32 * c];
        }
        m = m_new;
    }
    if (row >= S) return;
    for (int c = 0; c < WIDTH / 32; c++)
        if (lane + 32 * c < D) o[(base + row) * D + lane + 32 * c] = T(acc[c] / l);
    if (lane == 0) lse[base + row] = m + logf(l);
}

template <typename T>
void attention_online(const T* q, const T* k, const T* v, T* o, float* lse, int64_t heads, int64_t S, int64_t D,
                      bool causal, float scale, cudaStream_t stream) {
    course::require(D <= 128, "attention_online: D must be at most 128, a row's share of registers");
    if (heads * S * D == 0) return;
    const int64_t blocks = heads * tiles_of(S, 8);
    course::require(blocks < int64_t(1) << 31, "attention_online: B * H * S must be below 2^34");
    if (D <= 64)
        attention_online_kernel<T, 64><<<blocks, THREADS, 0, stream>>>(q, k, v, o, lse, S, D, causal, scale);
    else
        attention_online_kernel<T, 128><<<blocks, THREADS, 0, stream>>>(q, k, v, o, lse, S, D, causal, scale);
    CUDA_CHECK(cudaGetLastError());
}

// v3, register tiles: 19_attention_register.cuh. v4 and v5, tensor cores: 19_attention_mma.cuh.

template <typename T>
void bind_all(auto& m, const std::string& type) {
    bind(m, ("attention_naive_" + type).c_str(), attention_naive<T>);
    bind(m, ("attention_online_" + type).c_str(), attention_online<T>);
    bind(m, ("attention_register_" + type).c_str(), attention_register<T>);
    if constexpr (!std::is_same_v<T, float>) {
        bind(m, ("attention_mma_" + type).c_str(), attention_mma<T, 1>);
        bind(m, ("attention_pipelined_" + type).c_str(), attention_mma<T, 2>);
    }
}

COURSE_MODULE(m) {
    bind_all<float>(m, "float32");
    bind_all<__half>(m, "float16");
    bind_all<__nv_bfloat16>(m, "bfloat16");
}

#ifndef COURSE_EXTENSION
// The answer by plain loops in double, a query at a time.
template <typename T>
void reference(const std::vector<T>& q, const std::vector<T>& k, const std::vector<T>& v, std::vector<double>& o,
               std::vector<double>& lse, int64_t heads, int64_t S, int64_t D, bool causal) {
    std::vector<double> p(S);
    for (int64_t row = 0; row < heads * S; row++) {
        const int64_t head = row / S, seen = causal ? row % S + 1 : S;
        double largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < seen; j++) {
            p[j] = 0;
            for (int64_t d = 0; d < D; d++) p[j] += double(float(q[row * D + d])) * float(k[(head * S + j) * D + d]);
            largest = std::max(largest, p[j] /= std::sqrt(double(D)));
        }
        for (int64_t j = 0; j < seen; j++) sum += p[j] = std::exp(p[j] - largest);
        lse[row] = largest + std::log(sum);
        for (int64_t j = 0; j < seen; j++)
            for (int64_t d = 0; d < D; d++) o[row * D + d] += p[j] / sum * float(v[(head * S + j) * D + d]);
    }
}

// Every version that takes this D, checked; with `timed`, then timed.
template <typename T>
void run(int64_t heads, int64_t S, int64_t D, bool causal, bool timed) {
    const auto random = [&](unsigned seed) {
        const std::vector<float> values = course::random(heads * S * D, seed);
        return std::vector<T>(values.begin(), values.end());
    };
    const std::vector<T> q = random(1), k = random(2), v = random(3);
    course::Buffer<T> dq(q), dk(k), dv(v), o(q.size());
    course::Buffer<float> lse(heads * S), p(heads * S * S);
    const float scale = 1 / std::sqrt(float(D));
    using Launcher = decltype(&attention_online<T>);
    std::vector<std::pair<const char*, Launcher>> flash = {{"v2 online softmax", attention_online<T>},
                                                           {"v3 register tiles", attention_register<T>}};
    std::vector<course::Version> versions = {{"v1 naive", [&](cudaStream_t s) {
        attention_naive<T>(dq, dk, dv, o, lse, p, heads, S, D, causal, scale, s);
    }}};
    if constexpr (!std::is_same_v<T, float>) {
        flash.push_back({"v4 tensor cores", attention_mma<T, 1>});
        flash.push_back({"v5 two stages", attention_mma<T, 2>});
    }
    for (const auto& [name, attention] : flash)
        versions.push_back({name, [=, &dq, &dk, &dv, &o, &lse](cudaStream_t s) {
            attention(dq, dk, dv, o, lse, heads, S, D, causal, scale, s);
        }});
    std::vector<double> o_exact(timed ? 0 : q.size()), lse_exact(timed ? 0 : heads * S);
    if (!timed) reference(q, k, v, o_exact, lse_exact, heads, S, D, causal);
    for (const auto& version : versions) {
        o.poison(), lse.poison();
        version.run(nullptr);
        const std::vector<T> got = o.host();
        const std::vector<float> got_lse = lse.host();
        if (o_exact.empty()) o_exact.assign(got.begin(), got.end()), lse_exact.assign(got_lse.begin(), got_lse.end());
        course::check(version.name, got, o_exact, std::is_same_v<T, float> ? 1e-5 : timed ? 2e-2 : 1e-2);
        course::check(version.name + ", lse", got_lse, lse_exact, 1e-5);
    }
    if (!timed) return;
    std::printf("B H = %d, S = %d, D = %d%s; naive allocates %.0f MB for its scores, the others %.2f MB for lse\n",
                int(heads), int(S), int(D), causal ? ", causal" : "", 4e-6 * heads * S * S, 4e-6 * heads * S);
    const double part = causal ? 0.5 : 1;
    course::time_versions(versions, {.bytes = 8.0 * heads * S * D, .flops = part * 4 * heads * S * S * D});
}

int main() try {
    for (bool causal : {false, true}) {
        run<float>(2, course::emulated ? 37 : 517, 40, causal, false);  // no tile divides S, no vector D
        run<__nv_bfloat16>(1, course::emulated ? 70 : 517, 64, causal, false);
        if (!course::emulated) run<__half>(3, 517, 128, causal, false);
    }
    if (course::small()) return 0;
    for (int64_t S : {1024, 4096}) run<__nv_bfloat16>(65536 / S, S, 128, S == 4096, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
