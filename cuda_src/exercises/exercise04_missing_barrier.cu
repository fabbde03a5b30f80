// Debug: two barriers are missing
// ===============================
// y[i] = (x[i-1] + x[i] + x[i+1]) / 3, x outside is 0. A block walks along x, 128 elements at a time, and keeps them with
// one neighbour at each end in shared memory. So it reads each element from memory once and not three times. On a GPU
// the answers are right nearly always.
//
// Two barriers are missing. Say for each, before you put it there, which thread would read or write too early
// without it. A third barrier would cost time and fix nothing, and the grader counts them.
#include "course.cuh"

constexpr int THREADS = 128;

__global__ void smooth_kernel(const float* x, float* y, int64_t n, int64_t per_block) {  // [n] each
    __shared__ float near[THREADS + 2];
    const int t = threadIdx.x;
    const int64_t first = blockIdx.x * per_block;
    for (int64_t from = first; from < first + per_block; from += THREADS) {
        const int64_t i = from + t;
        near[t + 1] = i < n ? x[i] : 0.0f;
        if (t == 0) near[0] = from > 0 && from <= n ? x[from - 1] : 0.0f;
        if (t == THREADS - 1) near[THREADS + 1] = i + 1 < n ? x[i + 1] : 0.0f;
        __syncthreads();  // all of near is there
        if (i < n) y[i] = (near[t] + near[t + 1] + near[t + 2]) / 3.0f;
        __syncthreads();  // nobody needs near any more
    }
}

void smooth(const float* x, float* y, int64_t n, int64_t turns, cudaStream_t stream) {
    const int64_t per_block = THREADS * turns;
    smooth_kernel<<<course::ceil_div(n, per_block), THREADS, 0, stream>>>(x, y, n, per_block);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) { bind(m, "smooth", smooth); }
