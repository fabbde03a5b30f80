// Prefix sums (scan) inside a block: y[i] = x[0] + ... + x[i]
// ==========================================================
//
// A scan reads n and writes n, so 2n elements is the floor: 2^28 floats are 2.1 GB, 0.51 ms at 4.2 TB/s. Two things
// make it hard. y[i] needs every x before it: this lesson shows how the threads of a block share that work. And blocks
// run in no order: 09_scan_one_pass shows how they pass their sums on. Here every block scans 1024 elements, the same
// kernel scans the blocks' sums, and a last kernel adds them. n is read and written twice, so 4n of traffic. That is a
// predicted 1.02 ms for every rung that is not limited inside the block. The rungs differ only there:
//
//     Hillis-Steele      10 n adds, 10 barriers      Blelloch, padded   the same without bank conflicts
//     Blelloch           2 n adds, 22 barriers       warp shuffles      10 n adds, 1 barrier, 32 words of shared memory
//
// T is float, or unsigned for int32: the same sums in two's complement, where overflow wraps as it does in PyTorch.
//
// You will be able to: scan inside a block in three ways; count the additions, barriers and bank conflicts of each.
//
// Sources: Hillis and Steele, "Data parallel algorithms", 1986; Blelloch, "Prefix sums and their applications", 1990;
// Harris, Sengupta and Owens, GPU Gems 3, chapter 39.
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o scan cuda_src/08_scan.cu
// Run:      ./scan                                  (checks every version, then times them all)
// No GPU:   python3 course.py run 08_scan                 (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 08_scan
#include "scan_problem.cuh"

namespace {

constexpr unsigned ALL = 0xFFFFFFFF;  // every lane of a warp
constexpr int BLOCK = 1024;           // elements of a block

// Rung 1. Hillis-Steele: after step s each element is the sum of 2^s, since it adds its neighbour 2^(s-1) to the left.
// Two rows, so that one barrier a step is enough: a row is written while the other is read. Every thread reads shared
// memory twice and writes it once in each of 10 steps, without bank conflicts: a shift keeps 32 banks apart. There are
// 10 n adds where n would do. Predicted: 960 wavefronts for the steps and 64 for both ends, 1024 for a block. An SM
// has 1986 blocks, 1.2 ms at 1.7 GHz; add_offsets_kernel reads and writes n again in 0.5 ms. Together 1.7 ms.
template <typename T>
__global__ void hillis_steele_kernel(const T* x, T* y, T* sums, int64_t n) {
    __shared__ T rows[2][BLOCK];
    const int t = threadIdx.x;
    const int64_t i = int64_t(blockIdx.x) * BLOCK + t;
    int now = 0;
    rows[now][t] = i < n ? x[i] : T(0);
    for (int step = 1; step < BLOCK; step *= 2) {
        __syncthreads();
        rows[1 - now][t] = rows[now][t] + (t >= step ? rows[now][t - step] : T(0));
        now = 1 - now;
    }
    if (i < n) y[i] = rows[now][t];
    if (t == BLOCK - 1) sums[blockIdx.x] = rows[now][t];
}

// Rungs 2 and 3. New: a tree instead of n log n adds. Up the tree pairs are summed in place, with BLOCK - 1 adds. Down
// the tree each node gives its own prefix to the left child, and prefix + left sum to the right child. For 8 elements:
//
//     x                   2    5    1    4    3    6    2    7
//     up,   stride 1      2    7    1    5    3    9    2    9     each right child adds its left one
//           stride 2      2    7    1   12    3    9    2   18
//           stride 4      2    7    1   12    3    9    2   30     the root is the block's sum; then it is set to 0
//     down, stride 4      2    7    1    0    3    9    2   12
//           stride 2      2    0    1    7    3   12    2   21
//           stride 1      0    2    7    8   12   15   21   23     exclusive prefixes
//
// Predicted for rung 2: 22 barriers to rung 1's 10. The stride doubles, so lanes meet in one bank: 2-, 4-, ... 32-way
// conflicts, some 1400 wavefronts for a block: 1.6 ms, and 0.5 ms for the second kernel. New in rung 3: one unused
// word after every 32, so that a stride of 32 words moves on by a bank. Predicted: some 320 wavefronts, but the same
// idle threads: half of them after one step, all but one at the root. A block takes 3100 cycles, 1360 for its loads
// and 80 for each barrier, and an SM holds four: 0.9 ms, and 0.5 ms for the second kernel.
template <typename T, bool PADDED>
__global__ void blelloch_kernel(const T* x, T* y, T* sums, int64_t n) {
    __shared__ T tree[BLOCK + (PADDED ? BLOCK / 32 : 0)];
    const auto at = [&](int k) -> T& { return tree[PADDED ? k + k / 32 : k]; };
    const int t = threadIdx.x;
    const int64_t low = int64_t(blockIdx.x) * BLOCK + t, high = low + BLOCK / 2;
    const T x_low = low < n ? x[low] : T(0), x_high = high < n ? x[high] : T(0);
    at(t) = x_low;
    at(t + BLOCK / 2) = x_high;
    for (int stride = 1; stride < BLOCK; stride *= 2) {
        __syncthreads();
        const int right = 2 * stride * (t + 1) - 1;
        if (right < BLOCK) at(right) += at(right - stride);
    }
    __syncthreads();
    if (t == 0) {
        sums[blockIdx.x] = at(BLOCK - 1);
        at(BLOCK - 1) = T(0);
    }
    for (int stride = BLOCK / 2; stride > 0; stride /= 2) {
        __syncthreads();
        const int right = 2 * stride * (t + 1) - 1;
        if (right < BLOCK) {
            const T left_sum = at(right - stride);
            at(right - stride) = at(right);
            at(right) += left_sum;
        }
    }
    __syncthreads();  // the tree now holds exclusive prefixes: add the element itself
    if (low < n) y[low] = at(t) + x_low;
    if (high < n) y[high] = at(t + BLOCK / 2) + x_high;
}

// Rung 4. New: Hillis-Steele among the 32 lanes of a warp by shuffles, from register to register. The 32 warps' sums
// are scanned the same way. Every warp does that for itself, so that none waits for another. Predicted: as many adds
// as rung 1, but one barrier where rung 3 has 22, and a warp touches shared memory twice. The speed of 4n.
template <typename T>
__device__ T warp_inclusive(T value) {
    for (int step = 1; step < 32; step *= 2) {
        const T left = __shfl_up_sync(ALL, value, step);
        if (int(threadIdx.x % 32) >= step) value += left;
    }
    return value;
}

template <typename T>
__global__ void __launch_bounds__(BLOCK) shuffle_kernel(const T* x, T* y, T* sums, int64_t n) {
    __shared__ T totals[BLOCK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t i = int64_t(blockIdx.x) * BLOCK + threadIdx.x;
    T mine = warp_inclusive(i < n ? x[i] : T(0));
    if (lane == 31) totals[warp] = mine;
    __syncthreads();
    const T up_to = warp_inclusive(totals[lane]);
    const T before = __shfl_sync(ALL, up_to, warp > 0 ? warp - 1 : 0);
    if (warp > 0) mine += before;
    if (i < n) y[i] = mine;
    if (threadIdx.x == BLOCK - 1) sums[blockIdx.x] = mine;
}

// Every block but the first adds what all before it sum to.
template <typename T>
__global__ void add_offsets_kernel(T* y, const T* sums, int64_t n, int size) {
    if (blockIdx.x == 0) return;
    const T before = sums[blockIdx.x - 1];
    const int64_t begin = int64_t(blockIdx.x) * size;
    for (int64_t i = begin + threadIdx.x; i < min(begin + size, n); i += blockDim.x) y[i] += before;
}

// Scan each block's part, scan the parts' sums (by the same means, until one block is enough), add them: 4n.
template <typename T, typename Launch>
void scan_then_propagate(const T* x, T* y, T* sums, int64_t n, int size, cudaStream_t stream, Launch launch) {
    if (n == 0) return;
    const int64_t blocks = course::ceil_div(n, size);
    launch(unsigned(blocks), x, y, sums, n);
    CUDA_CHECK(cudaGetLastError());
    if (blocks == 1) return;
    scan_then_propagate<T>(sums, sums, sums + blocks, blocks, size, stream, launch);
    add_offsets_kernel<<<unsigned(blocks), 256, 0, stream>>>(y, sums, n, size);
    CUDA_CHECK(cudaGetLastError());
}

// ---- Launchers. x, y: n elements; scratch: at least n / 512 + 64 elements (the blocks' sums, the sums of those, ...).

template <typename T, typename Launch>
void scan(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream, Launch launch) {
    course::require(n >= 0 && course::ceil_div(n, BLOCK) <= 0x7FFFFFFF, "scan: n must be from 0 to 2^41");
    course::require(scratch_size >= n / 512 + 64, "scan: scratch must have n / 512 + 64 elements");
    scan_then_propagate(x, y, scratch, n, BLOCK, stream, launch);
}

template <typename T>
void hillis_steele(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    scan(x, y, scratch, scratch_size, n, stream, [=](unsigned blocks, const T* x, T* y, T* sums, int64_t n) {
        hillis_steele_kernel<T><<<blocks, BLOCK, 0, stream>>>(x, y, sums, n);
    });
}

template <typename T, bool PADDED>
void blelloch(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    scan(x, y, scratch, scratch_size, n, stream, [=](unsigned blocks, const T* x, T* y, T* sums, int64_t n) {
        blelloch_kernel<T, PADDED><<<blocks, BLOCK / 2, 0, stream>>>(x, y, sums, n);
    });
}

template <typename T>
void shuffle(const T* x, T* y, T* scratch, int64_t scratch_size, int64_t n, cudaStream_t stream) {
    scan(x, y, scratch, scratch_size, n, stream, [=](unsigned blocks, const T* x, T* y, T* sums, int64_t n) {
        shuffle_kernel<T><<<blocks, BLOCK, 0, stream>>>(x, y, sums, n);
    });
}

template <typename T>
const std::vector<Rung<T>> RUNGS = {{"hillis_steele", hillis_steele<T>},
                                    {"blelloch", blelloch<T, false>},
                                    {"blelloch_padded", blelloch<T, true>},
                                    {"shuffle", shuffle<T>}};

}  // namespace

int main() {
    const size_t hurts = course::small() ? 1024 * 4 + 7 : 1024 * 1024 * 3 + 1021;  // two levels of sums, or three
    check_and_time(RUNGS<float>, RUNGS<unsigned>, hurts, course::small() ? 8192 : size_t(1) << 26);
}

COURSE_MODULE(m) {
    bind(m, "hillis_steele_float", hillis_steele<float>);
    bind(m, "hillis_steele_int", hillis_steele<unsigned>);
    bind(m, "blelloch_float", blelloch<float, false>);
    bind(m, "blelloch_int", blelloch<unsigned, false>);
    bind(m, "blelloch_padded_float", blelloch<float, true>);
    bind(m, "blelloch_padded_int", blelloch<unsigned, true>);
    bind(m, "shuffle_float", shuffle<float>);
    bind(m, "shuffle_int", shuffle<unsigned>);
}
