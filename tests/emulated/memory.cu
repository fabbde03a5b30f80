// Addresses that are nobody's, values that nobody wrote, vectors at odd addresses.
#include <cuda_pipeline.h>

#include "cases.h"

template <bool FIXED>
__global__ void past_the_end(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (FIXED ? i < n : i <= n) y[i] = x[i];
}

template <bool FIXED>
__global__ void before_the_begin(const float* x, float* y) {
    const int i = threadIdx.x;
    y[i] = x[i] + (FIXED && i == 0 ? 0.0f : x[i - 1]);
}

template <bool FIXED>
__global__ void shared_past_the_end(float* x) {
    __shared__ float tile[32];
    __shared__ float guard[32];
    guard[threadIdx.x] = 0;
    tile[threadIdx.x + (FIXED ? 0 : 1)] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = guard[threadIdx.x];
}

__global__ void dynamic_shared(float* x) {
    extern __shared__ float values[];
    values[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = values[31 - threadIdx.x];
}

__global__ void write(float* x) { x[threadIdx.x] = 1.0f; }

template <bool FIXED>
__global__ void masked_lane(float* out) {  // an address of a local variable does not travel to another thread
    float mine = float(threadIdx.x);
    unsigned long long address = reinterpret_cast<unsigned long long>(&mine);
    address = __shfl_sync(0xffffffff, address, FIXED ? int(threadIdx.x) : 0);
    out[threadIdx.x] = *reinterpret_cast<volatile float*>(address);
}

template <bool FIXED>
__global__ void never_written(float* x) {
    __shared__ float sums[32];
    if (FIXED || threadIdx.x != 7) sums[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (float s : sums) total += s;
        x[0] = total;
    }
}

__global__ void accumulate(float* x) { x[threadIdx.x] += 1.0f; }

__global__ void vectors(const float* x, float4* y, int first) {
    y[threadIdx.x] = *reinterpret_cast<const float4*>(x + first + 4 * threadIdx.x);
}

__global__ void doubles(const char* x, double* y, int offset) {
    y[threadIdx.x] = reinterpret_cast<const double*>(x + offset)[threadIdx.x];
}

template <bool FIXED>
__global__ void partial_shuffle(float* x) {  // 20 lanes: those that are not there give NaN, which must not be used
    float v = x[threadIdx.x];
    for (int d = 16; d; d /= 2) {
        const float other = __shfl_down_sync(0xffffffff, v, d);
        if (!FIXED || threadIdx.x + d < blockDim.x) v += other;
    }
    if (threadIdx.x == 0) x[0] = v;
}

template <bool FIXED>
__global__ void forgotten_wait(const float* x, float* y) {  // the copy is under way: there is nothing to read yet
    __shared__ float tile[32];
    __pipeline_memcpy_async(&tile[threadIdx.x], &x[threadIdx.x], 4);
    __pipeline_commit();
    if (FIXED) __pipeline_wait_prior(0);
    __syncthreads();
    y[threadIdx.x] = tile[31 - threadIdx.x];
}

int main() {
    return run_cases({
        BOTH(past_the_end, Device<float> x(100, 1.0f); Device<float> y(100); past_the_end<FIXED><<<4, 32>>>(x, y, 100)),
        BOTH(before_the_begin, Device<float> x(32, 1.0f); Device<float> y(32);
             before_the_begin<FIXED><<<1, 32>>>(x, y)),
        BOTH(shared_past_the_end, Device<float> x(32, 1.0f); shared_past_the_end<FIXED><<<1, 32>>>(x)),
        BOTH(dynamic_too_small, Device<float> x(32, 1.0f); dynamic_shared<<<1, 32, FIXED ? 128 : 64>>>(x)),
        BOTH(host_pointer, std::vector<float> host(32); Device<float> x(32);
             write<<<1, 32>>>(FIXED ? x.data : host.data())),
        BOTH(after_free, float* x; cudaMalloc(&x, 128); if (!FIXED) cudaFree(x); write<<<1, 32>>>(x);
             if (FIXED) cudaFree(x)),
        BOTH(masked_lane, Device<float> x(32); masked_lane<FIXED><<<1, 32>>>(x)),
        BOTH(never_written, Device<float> x(1); never_written<FIXED><<<1, 32>>>(x)),
        BOTH(uninitialised_global, Device<float> x(32); if (FIXED) cudaMemset(x, 0, 128); accumulate<<<1, 32>>>(x)),
        BOTH(misaligned_float4, Device<float> x(160, 1.0f); Device<float4> y(32);
             vectors<<<1, 32>>>(x, y, FIXED ? 4 : 3)),
        BOTH(misaligned_double, Device<char> x(300, char(1)); Device<double> y(32);
             doubles<<<1, 32>>>(x, y, FIXED ? 8 : 4)),
        BOTH(forgotten_wait, Device<float> x(32, 1.0f); Device<float> y(32);
             forgotten_wait<FIXED><<<1, 32>>>(x, y)),
        BOTH(partial_shuffle, Device<float> x(20, 1.0f); partial_shuffle<FIXED><<<1, 20>>>(x);
             expect(x.host(1)[0] == 20.0f, "sum")),
    });
}
