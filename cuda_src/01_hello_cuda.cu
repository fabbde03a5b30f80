// Hello, CUDA: a thread's coordinates, and the element that it owns
// =================================================================
//
// A kernel is one function that very many threads run at once. The launch says how many: kernel<<<grid, block>>>()
// starts grid.x * grid.y * grid.z blocks of block.x * block.y * block.z threads. Every thread runs the same lines.
// Only its coordinates tell it from the others, and from them it computes which element is its own. Four words:
//
//     thread   the smallest piece: its own registers, its own place in the code
//     warp     32 threads of a block that get their instructions together; the one with number k is lane k
//     block    1 to 1024 threads on one SM: they can share memory and wait for each other
//     grid     all blocks of a launch, in no order; an H200 has 132 SMs with up to 2048 threads each: 270,336 at once
//
// This program prints a greeting from the device, and every thread writes its coordinates for the host to check. It
// shows what happens to an invalid launch, and asks how many blocks an SM holds.
//
// You will be able to: compute a thread's index in one, two and three dimensions; read the error of a launch; say how
// many blocks an SM holds.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o hello cuda_src/01_hello_cuda.cu
// Run:      ./hello
// No GPU:   python3 course.py run 01_hello_cuda      (the same kernels, emulated and checked against PyTorch)
// Check:    python3 course.py check 01_hello_cuda
#include <cooperative_groups.h>

#include "course.cuh"

// __global__: runs on the device, is launched from the host. __device__: runs on the device, is called from there.
__global__ void hello_kernel() {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Printing goes through a small buffer and is slow, so one warp of a block speaks, and of its lanes every eighth.
    if (warp == 1 && lane % 8 == 0)
        printf("hello from block %u, thread %u: warp %u, lane %u\n", blockIdx.x, threadIdx.x, warp, lane);
}

// What a thread writes down: one column of a table of 9 rows, so that neighbours write neighbouring words.
constexpr int FACTS = 9;

__device__ void write_down(int* out, int64_t n, int64_t i, unsigned thread) {  // out: [FACTS, n]
    if (i >= n) return;  // blocks come whole, elements do not: the last block has threads without one
    const int facts[FACTS] = {int(blockIdx.x),  int(blockIdx.y),  int(blockIdx.z),
                              int(threadIdx.x), int(threadIdx.y), int(threadIdx.z),
                              int(thread),      int(thread / 32), int(thread % 32)};
    for (int fact = 0; fact < FACTS; fact++) out[fact * n + i] = facts[fact];
}

// v1. A line. Blocks of blockDim.x threads one after another: thread i of them all is this one.
__global__ void who_1d_kernel(int* out, int64_t n) {
    // int64 before the product: blockIdx.x * blockDim.x is unsigned and wraps at 2^32.
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    write_down(out, n, i, threadIdx.x);
}

// v2. New: rows of threads in a block, and rows of blocks, as for an image. x runs fastest: threads are numbered along
// x, then along y. This number decides which warp a thread is in. A block of 8 x 8 is 2 warps of 4 rows each.
__global__ void who_2d_kernel(int* out, int64_t n) {
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;      // New
    const int64_t block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;  // New
    write_down(out, n, block * (blockDim.x * blockDim.y) + thread, thread);
}

// v3. New: layers. The number in general, as in an array [z][y][x]: each layer passed counts all its rows, each row all
// its threads. With one layer it is v2's number, with one row v1's, so this formula is right for every launch.
__global__ void who_3d_kernel(int* out, int64_t n) {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int64_t block = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    write_down(out, n, block * threads + thread, thread);
}

// v4. New: the thread's number from the library that CUDA has for it. A group knows its size and each thread's rank in
// it, and later lessons ask it for more: to wait, to shuffle, to reduce.
__global__ void who_groups_kernel(int* out, int64_t n) {
    const auto block = cooperative_groups::this_thread_block();
    const dim3 at = block.group_index(), grid = gridDim;
    const int64_t number = (int64_t(at.z) * grid.y + at.y) * grid.x + at.x;
    write_down(out, n, number * block.size() + block.thread_rank(), block.thread_rank());
}

// What v1 to v4 share on the host. A launch returns at once, before the kernel has run, and returns nothing. A launch
// that cannot be (too many threads, no block) is reported by cudaGetLastError(); what goes wrong later, inside the
// kernel, by the next call that waits for it.
using Kernel = void (*)(int* out, int64_t n);

void launch(Kernel kernel, int* out, int64_t n, dim3 grid, dim3 block, cudaStream_t stream) {
    kernel<<<grid, block, 0, stream>>>(out, n);  // 0: bytes of shared memory beside those that the kernel declares
    CUDA_CHECK(cudaGetLastError());
}

void who_1d(int* out, int64_t n, int blocks, int threads, cudaStream_t stream) {
    launch(who_1d_kernel, out, n, blocks, threads, stream);
}

void who_2d(int* out, int64_t n, int gx, int gy, int bx, int by, cudaStream_t stream) {
    launch(who_2d_kernel, out, n, dim3(gx, gy), dim3(bx, by), stream);
}

void who_3d(int* out, int64_t n, int gx, int gy, int gz, int bx, int by, int bz, cudaStream_t stream) {
    launch(who_3d_kernel, out, n, dim3(gx, gy, gz), dim3(bx, by, bz), stream);
}

void who_groups(int* out, int64_t n, int gx, int gy, int gz, int bx, int by, int bz, cudaStream_t stream) {
    launch(who_groups_kernel, out, n, dim3(gx, gy, gz), dim3(bx, by, bz), stream);
}

// How many blocks of a kernel an SM holds at once. Whatever runs out first decides: threads (2048 on an H200), blocks
// (32; 16 in the emulator), registers (65,536), or shared memory (228 KB). A block takes `shared` bytes of it and 1 KB
// for the system, so one block can ask for 227 KB.
int blocks_an_sm(int threads, int64_t shared, cudaStream_t) {
    int blocks = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, who_3d_kernel, threads, shared));
    return blocks;
}

COURSE_MODULE(m) {
    bind(m, "who_1d", who_1d);
    bind(m, "who_2d", who_2d);
    bind(m, "who_3d", who_3d);
    bind(m, "who_groups", who_groups);
    bind(m, "blocks_an_sm", blocks_an_sm);
}

#ifndef COURSE_EXTENSION
void greet() {
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    std::printf("%s: %d SMs, up to %d threads a block and %d an SM, warps of %d\n\n", device.name,
                device.multiProcessorCount, device.maxThreadsPerBlock, device.maxThreadsPerMultiProcessor,
                device.warpSize);
    hello_kernel<<<2, 64>>>();  // the order of the lines is not defined
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());  // wait, or the program ends before it is printed
}

// The host counts through the threads in order, six loops deep, and compares with what each wrote down.
void compare(const char* name, const std::function<void(int*, int64_t)>& run, dim3 grid, dim3 block) {
    const int64_t all = int64_t(grid.x) * grid.y * grid.z * block.x * block.y * block.z, n = all - 3;
    std::vector<int> expected(FACTS * n);
    int64_t i = 0;
    for (unsigned gz = 0; gz < grid.z; gz++)
        for (unsigned gy = 0; gy < grid.y; gy++)
            for (unsigned gx = 0; gx < grid.x; gx++) {
                int thread = 0;
                for (unsigned z = 0; z < block.z; z++)
                    for (unsigned y = 0; y < block.y; y++)
                        for (unsigned x = 0; x < block.x && i < n; x++, i++, thread++) {
                            const unsigned facts[] = {gx, gy, gz, x, y, z};
                            for (int fact = 0; fact < 6; fact++) expected[fact * n + i] = int(facts[fact]);
                            expected[6 * n + i] = thread;
                            expected[7 * n + i] = thread / 32;
                            expected[8 * n + i] = thread % 32;
                        }
            }
    course::Buffer<int> out(FACTS * n);
    out.poison();
    run(out, n);
    course::check(name, out.host(), expected, 0.0);
}

void refused(const char* why, dim3 grid, dim3 block, size_t shared = 0) {
    who_3d_kernel<<<grid, block, shared>>>(nullptr, 0);
    const cudaError_t error = cudaGetLastError();  // and forgets it: the next launch starts afresh
    course::require(error != cudaSuccess, "a launch that cannot be was accepted");
    std::printf("%-36s %s: %s\n", why, cudaGetErrorName(error), cudaGetErrorString(error));
}

int main() try {
    greet();
    std::printf("\nEvery thread writes down who it is:\n");
    compare("v1 a line", [](int* out, int64_t n) { who_1d(out, n, 5, 96, nullptr); }, 5, 96);
    compare("v2 rows", [](int* out, int64_t n) { who_2d(out, n, 3, 2, 8, 12, nullptr); }, {3, 2}, {8, 12});
    const dim3 grid(3, 2, 4), block(7, 5, 3);
    compare("v3 layers", [](int* out, int64_t n) { who_3d(out, n, 3, 2, 4, 7, 5, 3, nullptr); }, grid, block);
    compare("v4 groups", [](int* out, int64_t n) { who_groups(out, n, 3, 2, 4, 7, 5, 3, nullptr); }, grid, block);
    std::printf("\nLaunches that cannot be:\n");
    refused("1025 threads in a block", 1, 1025);
    refused("1088 threads, 32 x 34", 1, {32, 34});
    refused("65 layers of threads, the most is 64", 1, {1, 1, 65});
    refused("no block at all", dim3(0), 32);
    refused("65,536 rows of blocks", {1, 65536}, 32);
    refused("a megabyte of shared memory a block", 1, 32, 1 << 20);
    std::printf("\nBlocks that an SM holds, and threads:\n");
    for (int threads : {32, 64, 256, 768, 1024})
        for (int shared : {0, 32 * 1024})
            std::printf("%5d threads, %5d bytes shared: %3d blocks, %5d threads\n", threads, shared,
                        blocks_an_sm(threads, shared, nullptr), threads * blocks_an_sm(threads, shared, nullptr));
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
