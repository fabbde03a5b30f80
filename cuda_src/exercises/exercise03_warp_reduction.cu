// Reduction inside a warp: registers that neighbours read
// =====================================================
// sum[r] = x[r, 0] + ... + x[r, cols - 1], a warp a row. Lane l takes columns l, l + 32, ...: 4 sectors a request. Then the
// 32 partial sums become one in five shuffles, without shared memory and without a barrier. Every lane named in the mask
// has to take part in a shuffle, also one that had no column.
//
// Predict: instructions that a tree in shared memory takes for the same five steps: loads, stores and barriers.
#include "course.cuh"

constexpr unsigned ALL = 0xffffffff;
constexpr int WARPS = 4;  // a block: four rows

// The sum over the 32 lanes, right in lane 0 at least.
__device__ float warp_sum(float mine) {
    // TODO(1): five shuffles.
    // stub: return mine;
    for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_down_sync(ALL, mine, distance);
    return mine;
    // END(1)
}

__global__ void row_sum_kernel(const float* x, float* sum, int rows, int cols) {  // [rows, cols] -> [rows]
    const int lane = threadIdx.x % 32;
    const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= rows) return;  // a whole warp leaves together
    float mine = 0.0f;
    // TODO(2): add this lane's columns, then the lanes; one lane stores.
    for (int c = lane; c < cols; c += 32) mine += x[row * cols + c];
    mine = warp_sum(mine);
    if (lane == 0) sum[row] = mine;
    // END(2)
}

void row_sum(const float* x, float* sum, int64_t rows, int64_t cols, cudaStream_t stream) {
    row_sum_kernel<<<course::ceil_div(rows, WARPS), WARPS * 32, 0, stream>>>(x, sum, rows, cols);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) { bind(m, "row_sum", row_sum); }
