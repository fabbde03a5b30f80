// Kernels as the course has them, larger than the other files': right, and no false alarm.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <cmath>
#include <cstdlib>

#include "cases.h"

namespace cg = cooperative_groups;

template <int T>
__global__ void __launch_bounds__(T* T) matmul(const float* a, const float* b, float* c, int n) {
    __shared__ float as[T][T], bs[T][T];
    const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * T + y, col = blockIdx.x * T + x;
    float sum = 0;
    for (int t = 0; t < n; t += T) {
        as[y][x] = row < n && t + x < n ? a[row * n + t + x] : 0.0f;
        bs[y][x] = t + y < n && col < n ? b[(t + y) * n + col] : 0.0f;
        __syncthreads();
        for (int k = 0; k < T; k++) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (row < n && col < n) c[row * n + col] = sum;
}

__global__ void double_buffered(const float* x, float* y, int tiles) {
    __shared__ alignas(16) float s[2][128];
    auto load = [&](int tile) {
        __pipeline_memcpy_async(&s[tile % 2][threadIdx.x * 4], x + tile * 128 + threadIdx.x * 4, 16);
        __pipeline_commit();
    };
    load(0);
    float sum = 0;
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles)
            load(tile + 1);
        else
            __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        for (int i = 0; i < 4; i++) sum += s[tile % 2][127 - (threadIdx.x + 32 * i)];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}

__device__ float warp_sum(float v) {
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(0xffffffff, v, d);
    return v;
}

__device__ float block_sum(float v) {
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    v = warp_sum(v);
    if (lane == 0) sums[warp] = v;
    __syncthreads();
    if (warp == 0) {
        v = warp_sum(lane < int(blockDim.x) / 32 ? sums[lane] : 0.0f);
        if (lane == 0) sums[0] = v;
    }
    __syncthreads();
    v = sums[0];
    __syncthreads();
    return v;
}

__global__ void softmax(const float* x, float* y, int n) {
    x += size_t(blockIdx.x) * n, y += size_t(blockIdx.x) * n;
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[i]);
    sum = block_sum(sum);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i]) / sum;
}

__global__ void transpose(const float* x, float* y, int rows, int columns) {
    extern __shared__ float tile[];
    int r = blockIdx.y * 32, c = blockIdx.x * 32;
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (r + i < rows && c + int(threadIdx.x) < columns)
            tile[i * 33 + threadIdx.x] = x[(r + i) * columns + c + threadIdx.x];
    __syncthreads();
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (c + i < columns && r + int(threadIdx.x) < rows)
            y[(c + i) * rows + r + threadIdx.x] = tile[threadIdx.x * 33 + i];
}

// One pass: a block publishes its sum, then looks back over its predecessors' until one has published its whole prefix.
constexpr int EMPTY = 0, SUM = 1, PREFIX = 2;
__global__ void look_back(const int* x, int* y, int n, unsigned* tickets, volatile int* state, volatile int* sums,
                          volatile int* prefixes) {
    __shared__ unsigned tile;
    __shared__ int before, s[128];
    const unsigned t = threadIdx.x;
    if (t == 0) tile = atomicAdd(tickets, 1);
    __syncthreads();
    const int i = tile * 128 + t;
    int v = i < n ? x[i] : 0;
    s[t] = v;
    __syncthreads();
    for (unsigned d = 1; d < 128; d *= 2) {
        const int other = t >= d ? s[t - d] : 0;
        __syncthreads();
        s[t] = v += other;
        __syncthreads();
    }
    if (t == 127) {
        int sum = 0;
        if (tile == 0) {
            prefixes[0] = v;
        } else {
            sums[tile] = v;
            __threadfence();
            state[tile] = SUM;
            for (int p = int(tile) - 1;; p--) {
                int found;
                while ((found = state[p]) == EMPTY) {
                }
                __threadfence();
                if (found == PREFIX) {
                    sum += prefixes[p];
                    break;
                }
                sum += sums[p];
            }
            prefixes[tile] = sum + v;
        }
        __threadfence();
        state[tile] = PREFIX;
        before = sum;
    }
    __syncthreads();
    if (i < n) y[i] = before + v;
}

__global__ void histogram(const int* x, int* bins, int n) {
    __shared__ int mine[64];
    for (int b = threadIdx.x; b < 64; b += blockDim.x) mine[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < 64; b += blockDim.x) atomicAdd(&bins[b], mine[b]);
}

__global__ void grid_sum(const float* x, float* partial, float* total, int n) {
    const auto grid = cg::this_grid();
    const auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    float v = 0;
    for (size_t i = grid.thread_rank(); i < size_t(n); i += grid.size()) v += x[i];
    for (int d = 4; d; d /= 2) v += tile.shfl_down(v, d);
    if (tile.thread_rank() == 0) partial[grid.thread_rank() / 8] = v;
    grid.sync();
    if (grid.thread_rank() == 0) {
        v = 0;
        for (size_t i = 0; i < grid.size() / 8; i++) v += partial[i];
        *total = v;
    }
}

__global__ void guarded_sum(int* lock, int* total) {  // a lock, taken by one thread of each block
    if (threadIdx.x == 0) {
        while (atomicCAS(lock, 0, 1) != 0) {
        }
        __threadfence();
        *total += 1;
        __threadfence();
        atomicExch(lock, 0);
    }
}

static std::vector<float> values(size_t n) {
    std::vector<float> v(n);
    for (size_t i = 0; i < n; i++) v[i] = float((i * 7919) % 1000) / 500.0f - 1.0f;
    return v;
}

static bool near(float a, float b) { return std::abs(a - b) <= 1e-4f * (1.0f + std::abs(b)); }

int main() {
    return run_cases({
        {"matmul_fixed",
         [] {
             const int n = 50;
             const auto a = values(n * n), b = values(n * n + 3);
             Device<float> da(a), db(b), dc(n * n);
             matmul<16><<<dim3(4, 4), dim3(16, 16)>>>(da, db, dc, n);
             const auto c = dc.host(n * n);
             for (int i = 0; i < n; i++)
                 for (int j = 0; j < n; j++) {
                     float sum = 0;
                     for (int k = 0; k < n; k++) sum += a[i * n + k] * b[k * n + j];
                     expect(near(c[i * n + j], sum), "matmul");
                 }
         }},
        {"double_buffered_fixed",
         [] {
             Device<float> x(values(128 * 5)), y(32);
             double_buffered<<<1, 32>>>(x, y, 5);
         }},
        {"softmax_fixed",
         [] {
             const int n = 300;
             const auto x = values(3 * n);
             Device<float> dx(x), dy(3 * n);
             softmax<<<3, 128>>>(dx, dy, n);
             const auto y = dy.host(3 * n);
             for (int r = 0; r < 3; r++) {
                 double sum = 0;
                 for (int i = 0; i < n; i++) sum += y[r * n + i];
                 expect(std::abs(sum - 1) < 1e-4, "softmax");
             }
         }},
        {"transpose_fixed",
         [] {
             const auto x = values(70 * 45);
             Device<float> dx(x), dy(70 * 45);
             transpose<<<dim3(2, 3), dim3(32, 8), 32 * 33 * 4>>>(dx, dy, 70, 45);
             const auto y = dy.host(70 * 45);
             for (int r = 0; r < 70; r++)
                 for (int c = 0; c < 45; c++) expect(y[c * 70 + r] == x[r * 45 + c], "transpose");
         }},
        {"look_back_fixed",
         [] {
             const int n = 128 * 20 - 5;
             Device<int> x(n, 3), y(n), sums(20), prefixes(20), state(20, 0);
             Device<unsigned> tickets(1, 0u);
             look_back<<<20, 128>>>(x, y, n, tickets, state, sums, prefixes);
             const auto got = y.host(n);
             for (int i = 0; i < n; i++) expect(got[i] == 3 * (i + 1), "scan");
         }},
        {"look_back_interleaved_fixed",
         [] {
             setenv("COURSE_EMU_BLOCKS", "7", 1);
             const int n = 128 * 40;
             Device<int> x(n, 2), y(n), sums(40), prefixes(40), state(40, 0);
             Device<unsigned> tickets(1, 0u);
             look_back<<<40, 128>>>(x, y, n, tickets, state, sums, prefixes);
             unsetenv("COURSE_EMU_BLOCKS");
             const auto got = y.host(n);
             for (int i = 0; i < n; i++) expect(got[i] == 2 * (i + 1), "scan");
         }},
        {"histogram_fixed",
         [] {
             std::vector<int> x(5000);
             for (int i = 0; i < 5000; i++) x[i] = i * 31 % 64;
             Device<int> dx(x), bins(64, 0);
             histogram<<<5, 96>>>(dx, bins, 5000);
             int total = 0;
             for (int b : bins.host(64)) total += b;
             expect(total == 5000, "histogram");
         }},
        {"grid_sum_fixed",
         [] {
             const auto x = values(3000);
             Device<float> dx(x), partial(64), total(1);
             float *px = dx, *pp = partial, *pt = total;
             int n = 3000;
             void* arguments[] = {&px, &pp, &pt, &n};
             expect(cudaLaunchCooperativeKernel(grid_sum, 8, 64, arguments) == cudaSuccess, "launch");
             float sum = 0;
             for (float v : x) sum += v;
             expect(near(total.host(1)[0], sum), "sum");
         }},
        {"guarded_sum_fixed",
         [] {
             Device<int> lock(1, 0), total(1, 0);
             setenv("COURSE_EMU_BLOCKS", "4", 1);
             guarded_sum<<<12, 32>>>(lock, total);
             unsetenv("COURSE_EMU_BLOCKS");
             expect(total.host(1)[0] == 12, "sum");
         }},
    });
}
