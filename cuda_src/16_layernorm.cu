// LayerNorm: the mean and the spread of every row
// ===============================================
//
// y = (x - mean) * rstd * w + b with rstd = 1 / sqrt(variance + eps) along each row of x [M, N] (Ba, Kiros, Hinton
// 2016). It has to read MN elements and write MN. On an H200 (4.2 TB/s) 8192 x 8192 in bf16 (268 MB in and out) cannot
// take less than 0.064 ms. The definition reads a row three times: for the mean, for the variance, for the result.
// Here that becomes two; 17_layernorm_lengths makes it one. The shorter formula, E[x^2] - E[x]^2, also reads twice and
// loses all its digits where the mean is large beside the spread: it is not a rung.
//
// You will be able to: compute mean and variance in one pass without cancellation; merge the statistics of two parts.
//
// Sources of v3: Welford, "Note on a method for calculating corrected sums of squares and products", 1962; Chan, Golub
// and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o layernorm cuda_src/16_layernorm.cu
// Run:      ./layernorm                                   (checks every version, then times them all)
// No GPU:   python3 course.py run 16_layernorm            (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 16_layernorm
#include "layernorm_problem.cuh"

inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "layernorm: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}

// v1. One thread per row, as the definition reads. Predicted: neighbouring lanes are a row apart, so a request touches
// 32 sectors for 32 elements, and M threads fill the GPU only from M = 270,000 on.
template <typename T>
__global__ void layernorm_naive_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M,
                                       int64_t N, float eps) {  // x, y: [M, N]; w, b: [N]; mean, rstd: [M]
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= M) return;
    x += row * N, y += row * N;
    float sum = 0, m2 = 0;
    for (int64_t j = 0; j < N; j++) sum += widen(x[j]);
    const float m = sum / N;
    for (int64_t j = 0; j < N; j++) m2 += (widen(x[j]) - m) * (widen(x[j]) - m);
    const float r = 1 / sqrtf(m2 / N + eps);
    for (int64_t j = 0; j < N; j++) y[j] = narrow<T>((widen(x[j]) - m) * r * widen(w[j]) + widen(b[j]));
    mean[row] = m;
    rstd[row] = r;
}

template <typename T>
void layernorm_naive(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                     float eps, cudaStream_t stream) {
    if (no_rows(M, N)) return;
    layernorm_naive_kernel<<<course::ceil_div(M, 64), 64, 0, stream>>>(x, w, b, y, mean, rstd, M, N, eps);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: a block a row, neighbouring threads at neighbouring columns; shared memory adds up the threads' sums.
// Predicted: 2 sectors (bf16) or 4 (fp32) a request instead of 32. The row is still read three times, the second and
// third time from L1 or L2, and each of the two reductions costs 10 barriers. At N = 131072 the rows in work outgrow
// L2: three reads and a write of HBM, half of a copy's speed.
constexpr int BLOCK = 256;

__device__ float block_sum(float value, float* shared) {
    shared[threadIdx.x] = value;
    for (int half = BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    value = shared[0];
    __syncthreads();  // the next sum overwrites shared[0], which a slow warp may not have read yet
    return value;
}

template <typename T>
__global__ void layernorm_block_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t N,
                                       float eps) {
    __shared__ float shared[BLOCK];
    x += blockIdx.x * N, y += blockIdx.x * N;
    float sum = 0, m2 = 0;
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) sum += widen(x[j]);
    const float m = block_sum(sum, shared) / N;
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) m2 += (widen(x[j]) - m) * (widen(x[j]) - m);
    const float r = 1 / sqrtf(block_sum(m2, shared) / N + eps);
    for (int64_t j = threadIdx.x; j < N; j += BLOCK)
        y[j] = narrow<T>((widen(x[j]) - m) * r * widen(w[j]) + widen(b[j]));
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = r;
}

template <typename T>
void layernorm_block(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                     float eps, cudaStream_t stream) {
    if (no_rows(M, N)) return;
    layernorm_block_kernel<<<M, BLOCK, 0, stream>>>(x, w, b, y, mean, rstd, N, eps);
    CUDA_CHECK(cudaGetLastError());
}

// `count` elements with this mean, and m2 = sum((x - mean)^2).
struct Stats {
    float mean, m2, count;
};

// Chan, Golub and LeVeque 1979: no digit is lost, since only differences of means are squared.
__device__ __forceinline__ Stats merge(Stats a, Stats b) {
    const float count = a.count + b.count, share = count > 0 ? b.count / count : 0, delta = b.mean - a.mean;
    return {a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share, count};
}

// v3. New: mean and m2 in one pass. Each thread updates its own mean as elements arrive (Welford). Then threads merge
// as parts of a row (Chan): lanes by shuffles, warps through shared memory. One barrier is left of 20. Predicted: two
// reads and a write. Each iteration divides and needs the mean of the one before.
template <typename T>
__global__ void layernorm_welford_kernel(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t N,
                                         float eps) {
    __shared__ float4 parts[BLOCK / 32];
    x += blockIdx.x * N, y += blockIdx.x * N;
    Stats mine = {0, 0, 0};
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) {  // New
        const float value = widen(x[j]), delta = value - mine.mean;
        mine.count += 1;
        mine.mean += delta / mine.count;
        mine.m2 += delta * (value - mine.mean);  // the old difference times the new one
    }
    for (int apart = 16; apart; apart /= 2)  // New
        mine = merge(mine, {__shfl_xor_sync(ALL_LANES, mine.mean, apart), __shfl_xor_sync(ALL_LANES, mine.m2, apart),
                            __shfl_xor_sync(ALL_LANES, mine.count, apart)});
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float4(mine.mean, mine.m2, mine.count, 0);
    __syncthreads();
    Stats all = {0, 0, 0};
    for (int i = 0; i < BLOCK / 32; i++) all = merge(all, {parts[i].x, parts[i].y, parts[i].z});
    const float m = all.mean, r = 1 / sqrtf(all.m2 / N + eps);
    for (int64_t j = threadIdx.x; j < N; j += BLOCK)
        y[j] = narrow<T>((widen(x[j]) - m) * r * widen(w[j]) + widen(b[j]));
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = r;
}

template <typename T>
void layernorm_welford(const T* x, const T* w, const T* b, T* y, float* mean, float* rstd, int64_t M, int64_t N,
                       float eps, cudaStream_t stream) {
    if (no_rows(M, N)) return;
    layernorm_welford_kernel<<<M, BLOCK, 0, stream>>>(x, w, b, y, mean, rstd, N, eps);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "layernorm_naive_float32", layernorm_naive<float>);
    bind(m, "layernorm_naive_bfloat16", layernorm_naive<bf16>);
    bind(m, "layernorm_block_float32", layernorm_block<float>);
    bind(m, "layernorm_block_bfloat16", layernorm_block<bf16>);
    bind(m, "layernorm_welford_float32", layernorm_welford<float>);
    bind(m, "layernorm_welford_bfloat16", layernorm_welford<bf16>);
}

#ifndef COURSE_EXTENSION
template <typename T>
Rungs<T> rungs() {
    return {{"v1 naive", layernorm_naive<T>}, {"v2 block", layernorm_block<T>}, {"v3 welford", layernorm_welford<T>}};
}

int main() try {
    for (int64_t n : {1, 127, 1037}) run(rungs<float>(), 7, n), run(rungs<bf16>(), 7, n);
    if (course::small()) return 0;
    run(rungs<float>(), 3, 100003);
    for (auto [M, N] : {std::pair{32768, 256}, {4096, 4096}, {8192, 8192}, {4096, 32768}})
        run(rungs<bf16>(), M, N, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
