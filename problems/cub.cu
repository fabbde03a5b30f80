// CUB's sum and scans, the peers of problems/sum.py and problems/scan.py. CUB is a library of C++ templates, so these
// lines are all that is written here. There is no main: cub.py calls the launchers.
#include "course.cuh"

#ifndef COURSE_EMULATED
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#include <cuda/std/iterator>

// Every function of CUB is called twice: without scratch it only says how many bytes of it the call needs.
int64_t sum_scratch(int64_t n, cudaStream_t stream) {
    size_t bytes = 0;
    const float* x = nullptr;
    float* sum = nullptr;
    CUDA_CHECK(cub::DeviceReduce::Sum(nullptr, bytes, x, sum, n, stream));
    return int64_t(bytes);
}

void sum(const float* x, float* sum, char* scratch, int64_t bytes, int64_t n, cudaStream_t stream) {
    size_t size = size_t(bytes);
    CUDA_CHECK(cub::DeviceReduce::Sum(scratch, size, x, sum, n, stream));
}

// With 32-bit offsets CUB's scan is faster, so lengths below 2^31 have them.
template <typename In, typename Out>
void inclusive_sum(In x, Out y, char* scratch, size_t& bytes, int64_t n, cudaStream_t stream) {
    if (n <= 0x7FFFFFFF)
        CUDA_CHECK(cub::DeviceScan::InclusiveSum(scratch, bytes, x, y, int(n), stream));
    else
        CUDA_CHECK(cub::DeviceScan::InclusiveSum(scratch, bytes, x, y, n, stream));
}

int64_t scan_scratch(int64_t n, cudaStream_t stream) {
    size_t bytes = 0;
    const float* x = nullptr;
    float* y = nullptr;
    inclusive_sum(x, y, nullptr, bytes, n, stream);
    return int64_t(bytes);
}

void scan(const float* x, float* y, char* scratch, int64_t bytes, int64_t n, cudaStream_t stream) {
    size_t size = size_t(bytes);
    inclusive_sum(x, y, scratch, size, n, stream);
}

// From the other end: CUB walks its iterators, so both are turned round and nothing is copied.
int64_t scan_reversed_scratch(int64_t n, cudaStream_t stream) {
    size_t bytes = 0;
    const float* x = nullptr;
    float* y = nullptr;
    inclusive_sum(cuda::std::make_reverse_iterator(x), cuda::std::make_reverse_iterator(y), nullptr, bytes, n, stream);
    return int64_t(bytes);
}

void scan_reversed(const float* x, float* y, char* scratch, int64_t bytes, int64_t n, cudaStream_t stream) {
    size_t size = size_t(bytes);
    const auto from = cuda::std::make_reverse_iterator(x + n);
    inclusive_sum(from, cuda::std::make_reverse_iterator(y + n), scratch, size, n, stream);
}

COURSE_MODULE(m) {
    bind(m, "sum_scratch", sum_scratch);
    bind(m, "sum", sum);
    bind(m, "scan_scratch", scan_scratch);
    bind(m, "scan", scan);
    bind(m, "scan_reversed_scratch", scan_reversed_scratch);
    bind(m, "scan_reversed", scan_reversed);
}
#endif
