// Access patterns whose cost is known. Each kernel's name is its pattern; one warp, so that a count is a request.
#include <cuda_fp16.h>

#include "cases.h"

template <int STRIDE>
__global__ void strided(const float* x, float* y) {
    y[threadIdx.x] = x[threadIdx.x * STRIDE];
}

__global__ void broadcast(const float* x, float* y) { y[threadIdx.x] = x[7]; }
__global__ void shifted(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x + 1]; }  // one sector more
__global__ void vectorised(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
__global__ void halves(const __half* x, __half* y) { y[threadIdx.x] = x[threadIdx.x]; }

__global__ void vector_used_in_parts(const float4* x, float* y) {  // still one access of 16 bytes
    const float4 v = x[threadIdx.x];
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

__global__ void loop(const float* x, float* y) {  // every trip is a request of its own
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += x[i * 32 + threadIdx.x];
    y[threadIdx.x] = sum;
}

__global__ void divergent(const float* x, float* y) {  // 8 lanes, then lanes with different numbers of trips
    if (threadIdx.x < 8) y[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (unsigned i = 0; i <= threadIdx.x / 16; i++) y[32 + threadIdx.x] = x[i];
}

template <int WIDTH>
__global__ void transposed(float* y) {  // a column of a tile: all in one bank, unless the rows are padded
    __shared__ float tile[32][WIDTH];
    for (int row = 0; row < 32; row++) tile[row][threadIdx.x] = float(row);
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x][0];
}

__global__ void shared_vectors(float* y) {
    __shared__ float4 s[32];
    s[threadIdx.x] = make_float4(1, 2, 3, 4);
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x].x;
}

__global__ void shared_doubles(float* y) {
    __shared__ double s[32];
    s[threadIdx.x] = 1.0;
    __syncthreads();
    y[threadIdx.x] = float(s[0]);
}

__global__ void atomics(int* n) { atomicAdd(n + threadIdx.x % 2 * 8, 1); }

int main() {
    Device<float> x(4096, 1.0f), y(4096);
    Device<int> n(32, 0);
    const auto* x4 = reinterpret_cast<const float4*>(x.data);
    auto* y4 = reinterpret_cast<float4*>(y.data);
    strided<1><<<1, 32>>>(x, y);
    strided<2><<<1, 32>>>(x, y);
    strided<32><<<1, 32>>>(x, y);
    broadcast<<<1, 32>>>(x, y);
    shifted<<<1, 32>>>(x, y);
    vectorised<<<1, 32>>>(x4, y4);
    halves<<<1, 32>>>(reinterpret_cast<const __half*>(x.data), reinterpret_cast<__half*>(y.data));
    vector_used_in_parts<<<1, 32>>>(x4, y);
    loop<<<1, 32>>>(x, y);
    divergent<<<1, 32>>>(x, y);
    transposed<32><<<1, 32>>>(y);
    transposed<33><<<1, 32>>>(y);
    shared_vectors<<<1, 32>>>(y);
    shared_doubles<<<1, 32>>>(y);
    atomics<<<1, 32>>>(n);
    std::puts(emu_end());
}
