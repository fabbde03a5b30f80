// Softmax: three reads of a row, then two
// =======================================
//
// y_j = exp(x_j - m) / s with m = max(x), s = sum(exp(x - m)) along each row of x [M, N]. It has to read MN elements
// and write MN. On an H200 (4.2 TB/s) 8192 x 8192 in bf16 (268 MB in and out) cannot take less than 0.064 ms. As the
// formula stands it reads each row three times. Here that becomes two; 15_softmax_lengths makes it one.
//
// You will be able to: reduce a row in a block; merge pairs of maximum and sum; say what online softmax saves and what
// it costs.
//
// Source of v3: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o softmax cuda_src/14_softmax.cu
// Run:      ./softmax                                     (checks every version, then times them all)
// No GPU:   python3 course.py run 14_softmax              (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 14_softmax
#include "softmax_pair.cuh"
#include "softmax_problem.cuh"

// One block a row: how many rows a grid can have.
inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "softmax: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}

// v1. One thread per row, as the formula reads. m is subtracted because exp overflows past 88.7 in fp32.
// Predicted: neighbouring lanes are a row apart, so a request of a warp touches 32 sectors for 32 elements, and M
// threads fill the GPU only from M = 270,000 on. Three reads and a write of 32 bytes for each element of 2.
template <typename T>
__global__ void softmax_naive_kernel(const T* x, T* y, int64_t M, int64_t N) {  // x, y: [M, N]
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= M) return;
    x += row * N, y += row * N;
    float m = LOWEST, s = 0;
    for (int64_t j = 0; j < N; j++) m = fmaxf(m, widen(x[j]));
    for (int64_t j = 0; j < N; j++) s += exp_(widen(x[j]) - m);
    for (int64_t j = 0; j < N; j++) y[j] = narrow<T>(exp_(widen(x[j]) - m) / s);
}

template <typename T>
void softmax_naive(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M * N == 0) return;
    softmax_naive_kernel<<<course::ceil_div(M, 64), 64, 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: a block a row, neighbouring threads at neighbouring columns; the threads' results meet in shared memory.
// Predicted: 2 sectors (bf16) or 4 (fp32) a request instead of 32. The row is still read three times, the second and
// third time from L1 or L2; each of the two reductions costs 10 barriers.
constexpr int BLOCK = 256;

template <typename Combine>
__device__ float block_reduce(float value, float* shared, Combine combine) {
    shared[threadIdx.x] = value;
    for (int half = BLOCK / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    value = shared[0];
    __syncthreads();  // the next reduction overwrites shared[0], which a slow warp may not have read yet
    return value;
}

template <typename T>
__global__ void softmax_block_kernel(const T* x, T* y, int64_t N) {
    __shared__ float shared[BLOCK];
    x += blockIdx.x * N, y += blockIdx.x * N;
    float m = LOWEST, s = 0;
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) m = fmaxf(m, widen(x[j]));
    m = block_reduce(m, shared, [](float a, float b) { return fmaxf(a, b); });
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) s += exp_(widen(x[j]) - m);
    s = block_reduce(s, shared, [](float a, float b) { return a + b; });
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) y[j] = narrow<T>(exp_(widen(x[j]) - m) / s);
}

template <typename T>
void softmax_block(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (no_rows(M, N)) return;
    softmax_block_kernel<<<M, BLOCK, 0, stream>>>(x, y, N);
    CUDA_CHECK(cudaGetLastError());
}

// v3. New: m and s in one pass. A pair (m, s) stands for the sum s * exp(m); when m grows, s is rescaled, and two
// pairs merge the same way. Lanes merge by shuffles, so that one barrier is left of 20. Predicted: two reads and a
// write. Each iteration needs the pair of the one before: two exponentials in place of one, and no other work of the
// thread hides them.
template <typename T>
__global__ void softmax_online_kernel(const T* x, T* y, int64_t N) {
    __shared__ float2 pairs[BLOCK / 32];
    x += blockIdx.x * N, y += blockIdx.x * N;
    Pair pair = {LOWEST, 0};
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) {
        const float value = widen(x[j]), m = fmaxf(pair.m, value);
        pair = {m, pair.s * exp_(pair.m - m) + exp_(value - m)};  // New
    }
    pair = merge_lanes(pair);
    if (threadIdx.x % 32 == 0) pairs[threadIdx.x / 32] = make_float2(pair.m, pair.s);
    __syncthreads();
    pair = merge_all(pairs, BLOCK / 32);
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) y[j] = narrow<T>(exp_(widen(x[j]) - pair.m) / pair.s);
}

template <typename T>
void softmax_online(const T* x, T* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (no_rows(M, N)) return;
    softmax_online_kernel<<<M, BLOCK, 0, stream>>>(x, y, N);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "softmax_naive_float32", softmax_naive<float>);
    bind(m, "softmax_naive_bfloat16", softmax_naive<bf16>);
    bind(m, "softmax_block_float32", softmax_block<float>);
    bind(m, "softmax_block_bfloat16", softmax_block<bf16>);
    bind(m, "softmax_online_float32", softmax_online<float>);
    bind(m, "softmax_online_bfloat16", softmax_online<bf16>);
}

#ifndef COURSE_EXTENSION
template <typename T>
Rungs<T> rungs() {
    return {{"v1 naive", softmax_naive<T>}, {"v2 block", softmax_block<T>}, {"v3 online", softmax_online<T>}};
}

int main() try {
    for (int64_t n : {1, 127, 1037}) run(rungs<float>(), 7, n), run(rungs<bf16>(), 7, n);
    if (course::small()) return 0;
    run(rungs<float>(), 3, 100003);
    for (auto [M, N] : {std::pair{32768, 256}, {4096, 4096}, {8192, 8192}, {4096, 32768}})
        run(rungs<bf16>(), M, N, true);
    run(rungs<float>(), 4096, 8192, true);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
