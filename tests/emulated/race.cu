// Races: two threads, one byte, one of them writes, nothing between.
#include "cases.h"

template <bool FIXED>
__global__ void missing_barrier(const float* x, float* y) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    if (FIXED) __syncthreads();
    y[threadIdx.x] = tile[127 - threadIdx.x];
}

template <bool FIXED>
__global__ void missing_second_barrier(const float* x, float* y) {  // the next tile is loaded while others still read
    __shared__ float tile[64];
    float sum = 0;
    for (int t = 0; t < 4; t++) {
        tile[threadIdx.x] = x[t * 64 + threadIdx.x];
        __syncthreads();
        for (int k = 0; k < 64; k++) sum += tile[k] * float(k + 1);
        if (FIXED) __syncthreads();
    }
    y[threadIdx.x] = sum;
}

template <bool FIXED>
__global__ void scan_in_place(float* x) {  // Hillis-Steele: everybody reads a neighbour that writes
    __shared__ float s[128];
    const int t = threadIdx.x;
    s[t] = x[t];
    for (int d = 1; d < 128; d *= 2) {
        __syncthreads();
        const float before = t >= d ? s[t - d] : 0.0f;
        if (FIXED) __syncthreads();
        s[t] += before;
    }
    x[t] = s[t];
}

template <bool FIXED>
__global__ void warp_synchronous(float* x) {  // lanes of a warp are not in step by themselves
    __shared__ float s[64];
    const int t = threadIdx.x;
    s[t] = x[t];
    __syncwarp();
    for (int d = 16; d; d /= 2) {
        const float other = t + d < 32 ? s[t + d] : 0.0f;
        if (FIXED) __syncwarp();
        s[t] += other;
        if (FIXED) __syncwarp();
    }
    x[t] = s[0];
}

template <bool FIXED>
__global__ void counter(int* total) {
    if (FIXED)
        atomicAdd(total, 1);
    else
        *total += 1;
}

template <bool FIXED>
__global__ void overlapping_blocks(float* x) {  // each block writes one element of its neighbour's
    const int i = blockIdx.x * 32 + threadIdx.x;
    x[i] = 1.0f;
    if (!FIXED && threadIdx.x == 0) x[i + 32] = 2.0f;
}

template <bool FIXED>
__global__ void last_block(const float* x, float* partial, unsigned* ticket, float* total) {
    __shared__ bool last;
    float sum = x[blockIdx.x * 32 + threadIdx.x];
    for (int d = 16; d; d /= 2) sum += __shfl_down_sync(0xffffffff, sum, d);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        if (FIXED) __threadfence();
        last = atomicAdd(ticket, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float all = 0;
        for (unsigned b = 0; b < gridDim.x; b++) all += partial[b];
        *total = all;
    }
}

template <bool FIXED>
__global__ void half_warps(float* x) {  // two halves synchronise by themselves; a read across them is not ordered
    __shared__ float s[32];
    const int t = threadIdx.x;
    const unsigned mask = t < 16 ? 0x0000ffff : 0xffff0000;
    s[t] = x[t];
    __syncwarp(mask);
    x[t] = s[FIXED ? t ^ 15 : 31 - t];
}

template <bool FIXED>
__global__ void producer_consumer(float* x) {  // two warps and a flag in shared memory
    __shared__ float value;
    __shared__ volatile int flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        value = x[0];
        if (FIXED) __threadfence_block();
        flag = 1;
    }
    if (threadIdx.x == 32) {
        while (flag == 0) {
        }
        x[1] = value;
    }
}

int main() {
    return run_cases({
        BOTH(missing_barrier, Device<float> x(128, 1.0f); Device<float> y(128);
         missing_barrier<FIXED><<<1, 128>>>(x, y)),
        BOTH(missing_second_barrier, Device<float> x(256, 1.0f); Device<float> y(64);
             missing_second_barrier<FIXED><<<1, 64>>>(x, y)),
        BOTH(scan_in_place, Device<float> x(128, 1.0f); scan_in_place<FIXED><<<1, 128>>>(x)),
        BOTH(warp_synchronous, Device<float> x(32, 1.0f); warp_synchronous<FIXED><<<1, 32>>>(x);
             expect(x.host(1)[0] == 32.0f, "sum")),
        BOTH(counter, Device<int> n(1, 0); counter<FIXED><<<4, 64>>>(n); expect(n.host(1)[0] == 256, "count")),
        BOTH(overlapping_blocks, Device<float> x(160, 0.0f); overlapping_blocks<FIXED><<<4, 32>>>(x)),
        BOTH(last_block, Device<float> x(256, 1.0f); Device<float> partial(8); Device<unsigned> ticket(1, 0u);
             Device<float> total(1); last_block<FIXED><<<8, 32>>>(x, partial, ticket, total);
             expect(total.host(1)[0] == 256.0f, "sum")),
        BOTH(half_warps, Device<float> x(32, 1.0f); half_warps<FIXED><<<1, 32>>>(x)),
        BOTH(producer_consumer, Device<float> x(2, 3.0f); producer_consumer<FIXED><<<1, 64>>>(x);
             expect(x.host(2)[1] == 3.0f, "value")),
    });
}
