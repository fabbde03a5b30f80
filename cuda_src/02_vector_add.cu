// Vector add: host memory, device memory, and three ways to load
// ==============================================================
//
// z = x + y over n floats reads 8n bytes and writes 4n. A GPU has memory of its own, so data travel two distances. The
// first is from the host's memory to the device's, over PCIe 5, at 50 to 60 GB/s. The second is from there to the
// threads, at the 4.2 TB/s of a copy on an H200, 80 times as much. For n = 2^26 the kernel cannot take less than 0.19
// ms, while the 0.5 GB that it reads take 10 ms to arrive. So the GPU pays off for data that is there already or is
// used often.
//
// You will be able to: copy data to a GPU and back; write a grid-stride loop; load 16 bytes at a time; compute the
// bytes in flight.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o vector_add cuda_src/02_vector_add.cu
// Run:      ./vector_add                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 02_vector_add           (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 02_vector_add
#include "course.cuh"

constexpr int THREADS = 256;  // a block; 8 of them fill an SM's 2048 threads

// v1. One thread per element: the grid is as large as the problem. Neighbouring threads read neighbouring words, so a
// warp's 32 loads are one request of 128 bytes: 4 sectors of 32 bytes, none of them wasted. The last block hangs over
// the end, hence the `if`. Predicted: under the copy. Little's law: 4.2 TB/s at 800 ns latency want 25 KB in flight on
// each of 132 SMs; 2048 threads with two loads of 4 bytes are 16 KB.
__global__ void add_one_kernel(const float* x, const float* y, float* z, int64_t n) {  // [n] each
    // int64 before the product: blockIdx.x * blockDim.x is unsigned and wraps at 2^32.
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];
}

void add_one(const float* x, const float* y, float* z, int64_t n, cudaStream_t stream) {
    if (n == 0) return;  // a grid of no blocks is an error
    add_one_kernel<<<course::ceil_div(n, THREADS), THREADS, 0, stream>>>(x, y, z, n);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: a grid-stride loop. The grid is as large as the machine, and each thread takes every (grid size)-th
// element. One launch fits any n, and a thread sets up once. Neighbours stay neighbours in each pass: still 4 sectors
// a request. Predicted: no faster, since as few bytes are in flight. The loop is useful elsewhere, as in a reduction.
__global__ void add_grid_stride_kernel(const float* x, const float* y, float* z, int64_t n) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;  // New
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)  // New
        z[i] = x[i] + y[i];
}

void add_grid_stride(const float* x, const float* y, float* z, int64_t n, cudaStream_t stream) {
    if (n == 0) return;
    const int64_t blocks = std::min<int64_t>(course::ceil_div(n, THREADS), 8 * course::sms());
    add_grid_stride_kernel<<<blocks, THREADS, 0, stream>>>(x, y, z, n);
    CUDA_CHECK(cudaGetLastError());
}

// v3. New: 16 bytes a load. A float4 must start at a multiple of 16 bytes. At most 3 elements come before the first
// such address (the head) and at most 3 after the last whole float4 (the tail). The first three threads of the grid
// take one of each. Predicted: 64 KB in flight, 2.5 times what Little's law asks for: the speed of a copy. A request is
// 512 bytes, 16 sectors.
__global__ void add_vectorized_kernel(const float* x, const float* y, float* z, int64_t n, int head) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t quads = (n - head) / 4;
    if (i < quads) {
        const float4 a = reinterpret_cast<const float4*>(x + head)[i];  // New
        const float4 b = reinterpret_cast<const float4*>(y + head)[i];
        reinterpret_cast<float4*>(z + head)[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    if (i < head) z[i] = x[i] + y[i];  // New: the head
    if (const int64_t t = head + 4 * quads + i; t < n) z[t] = x[t] + y[t];  // New: the tail
}

void add_vectorized(const float* x, const float* y, float* z, int64_t n, cudaStream_t stream) {
    const auto past = [](const float* p) { return int(reinterpret_cast<uintptr_t>(p) / sizeof(float) % 4); };
    // Three arrays that are not equally far past a multiple of 16 bytes never are at one together.
    if (past(x) != past(z) || past(y) != past(z)) return add_grid_stride(x, y, z, n, stream);
    if (n == 0) return;
    const int head = int(std::min<int64_t>((4 - past(z)) % 4, n));
    const int64_t blocks = course::ceil_div(std::max<int64_t>((n - head) / 4, 3), THREADS);  // 3: head and tail
    add_vectorized_kernel<<<blocks, THREADS, 0, stream>>>(x, y, z, n, head);
    CUDA_CHECK(cudaGetLastError());
}

COURSE_MODULE(m) {
    bind(m, "add_one", add_one);
    bind(m, "add_grid_stride", add_grid_stride);
    bind(m, "add_vectorized", add_vectorized);
}

#ifndef COURSE_EXTENSION
// From the host to the device. `pageable` is what malloc and std::vector give: the driver copies it piece by piece
// into a buffer that the device can reach, and sends that. `pinned` memory stays where it is, so the device fetches it
// itself. `managed` memory has one address on both sides, and a page moves at its first access: here the kernel's,
// which waits for each page. Predicted: pinned reaches the link's speed, pageable and managed a fraction of it.
void time_transfers(int64_t n) {
    const size_t bytes = n * sizeof(float);
    std::vector<float> pageable(n, 1.0f);
    float *pinned = nullptr, *managed = nullptr;
    CUDA_CHECK(cudaMallocHost(&pinned, bytes));
    CUDA_CHECK(cudaMallocManaged(&managed, bytes));
    std::fill_n(pinned, n, 1.0f);
    course::Buffer<float> device(n);
    const auto copy = [&](const float* host) {
        return [&device, host, bytes](cudaStream_t s) {
            CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, s));
        };
    };
    const auto touch = [&](cudaStream_t s) { add_vectorized(managed, managed + n / 2, device, n / 2, s); };
    const auto bring_back = [&] { std::fill_n(managed, n, 1.0f); };  // the pages move to the host
    course::time_versions({{"pageable to device", copy(pageable.data())},
                           {"pinned to device", copy(pinned)},
                           {"managed, touched", touch, bring_back}},
                          {.bytes = double(bytes)});
    CUDA_CHECK(cudaFree(managed));
    CUDA_CHECK(cudaFreeHost(pinned));
}

int main() try {
    const int64_t n = course::small() ? 10'007 : (1 << 26) + 3;
    const std::vector<float> x = course::random(n, 1), y = course::random(n, 2, 3.0f);
    course::Buffer<float> dx(x), dy(y), dz(n);
    using Launcher = void (*)(const float*, const float*, float*, int64_t, cudaStream_t);
    const std::pair<const char*, Launcher> launchers[] = {
        {"v1 one an element", add_one}, {"v2 grid-stride", add_grid_stride}, {"v3 vectorized", add_vectorized}};
    std::vector<course::Version> versions;
    for (const auto& [name, add] : launchers) {
        // From the start, and from 1 float on: the vectorized version then has a head.
        for (int64_t from : {0, 1}) {
            std::vector<float> expected(n - from);
            for (int64_t i = from; i < n; i++) expected[i - from] = x[i] + y[i];
            dz.poison();
            add(dx + from, dy + from, dz + from, n - from, nullptr);
            std::vector<float> z = dz.host();
            z.erase(z.begin(), z.begin() + from);
            course::check(name, z, expected, 0.0);
        }
        versions.push_back({name, [=, &dx, &dy, &dz](cudaStream_t s) { add(dx, dy, dz, n, s); }});
    }
    course::time_versions(versions, {.bytes = 12.0 * n, .flops = double(n)});
    time_transfers(course::small() ? 4096 : 1 << 26);
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
