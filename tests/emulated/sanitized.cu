// What the hooks do not see and AddressSanitizer and UBSan do: arrays of a thread's own, arithmetic that overflows.
#include <cstring>

#include "cases.h"

__global__ void local_array(const int* index, float* y) {
    float values[4];
    for (int i = 0; i < 4; i++) values[i] = float(i);
    y[threadIdx.x] = values[index[threadIdx.x]];
}

__global__ void shared_array(const int* index, float* y) {
    __shared__ float values[32];
    values[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = __shfl_sync(0xffffffff, values[index[threadIdx.x] * 8], 0);
}

__global__ void overflow(const int* index, float* y) { y[threadIdx.x] = float(index[threadIdx.x] * 700000000); }

int main(int, char** arguments) {
    const bool broken = std::strstr(arguments[1], "_broken");
    Device<int> index(32, broken ? 4 : 3);
    Device<float> y(32);
    if (std::strstr(arguments[1], "local")) local_array<<<1, 32>>>(index, y);
    if (std::strstr(arguments[1], "shared")) shared_array<<<1, 32>>>(index, y);
    if (std::strstr(arguments[1], "overflow")) overflow<<<1, 32>>>(index, y);
    std::puts("none");
}
