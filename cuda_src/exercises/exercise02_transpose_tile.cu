// A tile in shared memory: transpose, with both sides in whole sectors
// ===================================================================
// y[c, r] = x[r, c]. A thread that reads along a row writes down a column: one of the two is 32 sectors a request. So a
// block reads a tile of 32 x 32 along its rows into shared memory, waits, and writes the tile's columns as rows of y. Now
// shared memory is read down a column: 32 words that lie 32 apart are all in one bank. A row of 33 words mends that.
//
// Predict: wavefronts of a load from shared memory with rows of 32 words, and with rows of 33.
#include "course.cuh"

constexpr int TILE = 32, STEP = 8;  // a block of 32 x 8 threads: each moves 4 elements of the tile

__global__ void transpose_kernel(const float* x, float* y, int rows, int cols) {  // [rows, cols] -> [cols, rows]
    // TODO(1): the tile, so that neither its rows nor its columns share a bank.
    // stub: __shared__ float tile[TILE][TILE];
    __shared__ float tile[TILE][TILE + 1];
    // END(1)
    // TODO(2): read the tile along rows of x: threadIdx.y, threadIdx.y + STEP, ... are its rows.
    const int c = blockIdx.x * TILE + threadIdx.x;
    for (int i = threadIdx.y; i < TILE; i += STEP) {
        const int64_t r = blockIdx.y * TILE + i;
        if (r < rows && c < cols) tile[i][threadIdx.x] = x[r * cols + c];
    }
    __syncthreads();
    // END(2)
    // TODO(3): write it along rows of y.
    const int to = blockIdx.y * TILE + threadIdx.x;
    for (int i = threadIdx.y; i < TILE; i += STEP) {
        const int64_t from = blockIdx.x * TILE + i;
        if (from < cols && to < rows) y[from * rows + to] = tile[threadIdx.x][i];
    }
    // END(3)
}

void transpose(const float* x, float* y, int64_t rows, int64_t cols, cudaStream_t stream) {
    const dim3 grid(course::ceil_div(cols, TILE), course::ceil_div(rows, TILE)), block(TILE, STEP);
    transpose_kernel<<<grid, block, 0, stream>>>(x, y, rows, cols);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) { bind(m, "transpose", transpose); }
