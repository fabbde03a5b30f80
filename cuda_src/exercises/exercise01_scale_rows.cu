// Which element is mine? Rows, columns and a pitch
// ================================================
// y[r, c] = x[r, c] * s[r]. Rows of x begin `pitch` floats apart (pitch >= cols), rows of y `cols` apart. A block of
// 32 x 8 threads owns a patch of 32 columns and 8 rows. Threads that are neighbours in x must take neighbours in memory:
// then a warp's 32 loads are one request of 4 sectors of 32 bytes. The patch hangs over both edges.
//
// Predict: sectors per request if threadIdx.x ran down the rows instead.
#include "course.cuh"

__global__ void scale_rows_kernel(const float* x, const float* s, float* y, int rows, int cols, int pitch) {
    // TODO(1): this thread's row and column; do they exist? One element loaded, scaled and stored.
    const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t r = int64_t(blockIdx.y) * blockDim.y + threadIdx.y;
    if (r < rows && c < cols) y[r * cols + c] = x[r * pitch + c] * s[r];
    // END(1)
}

void scale_rows(const float* x, const float* s, float* y, int64_t rows, int64_t cols, int64_t pitch,
                cudaStream_t stream) {
    const dim3 block(32, 8);
    // TODO(2): blocks along the columns and along the rows.
    // stub: const dim3 grid(1, 1);
    const dim3 grid(course::ceil_div(cols, 32), course::ceil_div(rows, 8));
    // END(2)
    scale_rows_kernel<<<grid, block, 0, stream>>>(x, s, y, rows, cols, pitch);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) { bind(m, "scale_rows", scale_rows); }
