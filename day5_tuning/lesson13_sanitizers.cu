// Three bugs that Triton's language cannot express, or its interpreter cannot show: lesson13_sanitizers.py calls them.
#include "course.cuh"

// Each thread writes one element and reads another thread's. Missing: __syncthreads() between the two.
__global__ void reverse_kernel(const float* x, float* y) {  // [256] -> [256]
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = tile[255 - threadIdx.x];
}

// Half of the block waits at the first barrier, while the other half goes on to the second.
__global__ void half_barrier_kernel(float* y) {  // [256]
    if (threadIdx.x < 128) __syncthreads();
    y[threadIdx.x] = 1.0f;
    __syncthreads();
}

// `*total += 1` is a read, an addition and a write. Blocks that read the same value lose each other's count.
__global__ void count_blocks_kernel(int* total) { *total += 1; }

void reverse(const float* x, float* y, cudaStream_t stream) {
    reverse_kernel<<<1, 256, 0, stream>>>(x, y);
    CUDA_CHECK(cudaGetLastError());
}

void half_barrier(float* y, cudaStream_t stream) {
    half_barrier_kernel<<<1, 256, 0, stream>>>(y);
    CUDA_CHECK(cudaGetLastError());
}

void count_blocks(int* total, cudaStream_t stream) {
    count_blocks_kernel<<<8, 1, 0, stream>>>(total);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "reverse", reverse);
    bind(m, "half_barrier", half_barrier);
    bind(m, "count_blocks", count_blocks);
}
