// Traps: kernels broken on purpose, the tool that finds each, and the line that mends it
// =====================================================================================
//
// Bugs that only CUDA has are silent: most of these kernels run to their end on a GPU, and many of them give the right
// answer today. Each trap is one kernel, `template <bool FIXED>`, whose two forms differ in the line marked
// `// <-`. Above it: what a GPU shows without a tool (right by luck, wrong, an error, a hang), the tool of
// compute-sanitizer that finds it, and what it says. The emulator of this course finds all thirteen.
//
//   memcheck   addresses: outside every allocation, or not a multiple of the access's size
//   racecheck  two threads, one byte of shared memory, one of them writes, nothing between. Not global memory
//   initcheck  global memory that is read before it is written. Not shared memory
//   synccheck  barriers that some threads of the block never reach, masks that leave out the calling lane
//
// You will be able to: recognise each bug by what it shows; choose the tool that finds it; write the line that mends
// it.
//
// Compile:  nvcc -std=c++20 -O3 -lineinfo -arch=native -Icuda_src/include -o traps cuda_src/24_traps.cu
// Run:      ./traps                               (every fixed form, checked; and the list of names)
//           ./traps missing_barrier_broken        (one form, to see what a GPU shows)
//           compute-sanitizer --tool racecheck ./traps missing_barrier_broken      (-lineinfo: it names the line)
// No GPU:   python3 course.py run 24_traps        (emulated: each broken form is caught, each fixed one is right)
#include <cuda_pipeline.h>

#include "course.cuh"

// 1. Each thread writes a value and reads another thread's. On a GPU: right for warps that happen to run in order,
// wrong for others. It may change with the next driver. racecheck: "Race reported between Write access at ... and Read
// access at ... [N hazards]", with both lines. Fix: a barrier between the writes and the reads.
template <bool FIXED>
__global__ void missing_barrier_kernel(const float* x, float* y) {  // [256] -> [256], reversed
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    if (FIXED) __syncthreads();  // <-
    y[threadIdx.x] = tile[255 - threadIdx.x];
}

// 2. The second barrier of a loop, which is often forgotten. The fast warp writes the next tile while the slow one
// still reads this one. On a GPU: right nearly always, since warps drift apart slowly. racecheck: as above, a write
// after a read. Fix: a barrier between the reads and the next writes.
template <bool FIXED>
__global__ void missing_second_barrier_kernel(const float* x, float* y, int tiles) {  // [tiles * 256] -> [256]
    __shared__ float tile[256];
    float sum = 0;
    for (int t = 0; t < tiles; t++) {
        tile[threadIdx.x] = x[t * 256 + threadIdx.x];
        __syncthreads();
        sum += tile[255 - threadIdx.x];
        if (FIXED) __syncthreads();  // <-
    }
    y[threadIdx.x] = sum;
}

// 3. `bins[b] += 1` is three steps: read, add, write. Threads that read the same old value lose each other's count. On
// a GPU: far too small, at once. racecheck: between Read and Write access of one and the same line. Fix: one step.
template <bool FIXED>
__global__ void shared_counter_kernel(const int* x, int* y) {  // [256] in 0..7 -> [8]
    __shared__ int bins[8];
    if (threadIdx.x < 8) bins[threadIdx.x] = 0;
    __syncthreads();
    FIXED ? atomicAdd(&bins[x[threadIdx.x]], 1) : bins[x[threadIdx.x]] += 1;  // <-
    __syncthreads();
    if (threadIdx.x < 8) y[threadIdx.x] = bins[threadIdx.x];
}

// 4. The same between blocks, in global memory. On a GPU: too small. compute-sanitizer has no tool for it: racecheck
// looks at shared memory alone. The emulator does find it. Fix: atomicAdd, or one value per block and a second launch.
template <bool FIXED>
__global__ void global_counter_kernel(int* total) {
    FIXED ? atomicAdd(total, 1) : *total += 1;  // <-
}

// 5. Lanes of a warp are not in step by themselves. Since Volta each has its own program counter. The compiler may
// reorder loads and stores unless it sees a dependence. On a GPU: right by luck, wrong after a change far away.
// racecheck: a race between lanes of one warp. Fix: __syncwarp() orders the memory of the lanes that it names.
template <bool FIXED>
__global__ void missing_syncwarp_kernel(const float* x, float* y) {  // [32] -> [32], the sum in each
    __shared__ float row[5][32];  // one row a step: a second barrier, as in trap 2, is not needed
    float sum = x[threadIdx.x];
    for (int step = 0; step < 5; step++) {
        row[step][threadIdx.x] = sum;
        if (FIXED) __syncwarp();  // <-
        sum += row[step][threadIdx.x ^ (16 >> step)];
    }
    y[threadIdx.x] = sum;
}

// 6. A barrier is for the whole block; here one warp goes past it and meets the others at the next one. On a GPU: the
// hardware counts arrivals and lets both through, so warp 1 reads the sums before warp 0 has added. Where a branch
// splits a warp, the block may hang. synccheck: "Barrier error detected. Divergent thread(s) in block". Fix: the
// barrier stands outside the branch, which holds only the work. (Threads that have returned are not waited for.)
template <bool FIXED>
__global__ void barrier_in_a_branch_kernel(const float* x, float* y) {  // [64] -> [64]: x[i] + x[i + 32], twice
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    if (FIXED || threadIdx.x < 32) __syncthreads();  // <-
    if (threadIdx.x < 32) tile[threadIdx.x] += tile[threadIdx.x + 32];
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x % 32];
}

// 7. A shuffle waits for every lane that its mask names; lanes 16 to 31 wait elsewhere, for these. On a GPU: a hang, or
// an undefined value; so the broken form runs in the emulator only. Fix: the mask names those that take part. (The same
// holds for __ballot_sync, __syncwarp and the rest; a mask must also name the lane that calls.)
template <bool FIXED>
__global__ void absent_lane_kernel(const float* x, float* y) {  // [32] -> [32]: pairs of the first 16 are added
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(FIXED ? 0x0000ffff : 0xffffffff, v, 1);  // <-
    __syncthreads();
    y[threadIdx.x] = v;
}

// 8. The last block hangs over the end. On a GPU: right by luck. Allocations are padded to 512 bytes, and after them
// comes another tensor, which is changed silently. The tool memcheck: "Invalid __global__ read of size 4 bytes ... is
// out of bounds". Fix: the mask.
template <bool FIXED>
__global__ void past_the_end_kernel(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (FIXED ? i < n : i <= n) y[i] = 2 * x[i];  // <-
}

// 9. i * n passes 2^31 long before the index itself does. On a GPU: the product wraps to a negative number: "an illegal
// memory access was encountered", or the data of another tensor. The tool memcheck: "Invalid __global__ read ... bytes
// before the nearest allocation". UBSan, in an emulated build: "signed integer overflow". Fix: int64 before the
// product.
constexpr int SAMPLES = 4096;
template <bool FIXED>
__global__ void index_overflow_kernel(const float* x, float* y, int n) {  // [n] -> [SAMPLES], evenly spread
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = FIXED ? x[int64_t(i) * n / SAMPLES] : x[i * n / SAMPLES];  // <-
}

// 10. A float4 begins at a multiple of 16 bytes. Row 1 of 7 floats begins at byte 28. On a GPU: "misaligned address",
// and every later call of the process fails with it. memcheck: "Invalid __global__ read of size 16 bytes",
// "misaligned". Fix: rows padded to a multiple of 4 floats (cudaMallocPitch does that), or single loads where the
// pitch is not one.
template <bool FIXED>
__global__ void misaligned_vector_kernel(const float* x, float* y) {  // 32 rows -> the sum of the first 4 of each
    constexpr int PITCH = FIXED ? 8 : 7;  // <-
    const float4 v = *reinterpret_cast<const float4*>(x + threadIdx.x * PITCH);
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}

// 11. The sum is never set to zero. On a GPU: right by luck in a fresh process, whose memory is zeros. It is wrong
// when the allocator returns memory that was used before. The tool initcheck: "Uninitialized __global__ memory read of
// size 4 bytes". Fix: in the launcher, cudaMemset (see accumulate below).
__global__ void accumulate_kernel(const float* x, float* y) { y[threadIdx.x] += x[threadIdx.x]; }

// 12. The block reads a whole tile and only n elements of it were written. On a GPU: the data of the block that ran
// before on this SM. No tool of compute-sanitizer finds it, since initcheck looks at global memory alone. The emulator
// fills shared memory with NaN, and sees the read. Fix: the tail is padded with what the sum ignores.
template <bool FIXED>
__global__ void unwritten_tail_kernel(const float* x, float* y, int n) {  // [n <= 64] -> [1]
    __shared__ float tile[64];
    if (FIXED || int(threadIdx.x) < n) tile[threadIdx.x] = int(threadIdx.x) < n ? x[threadIdx.x] : 0.0f;  // <-
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (float value : tile) sum += value;
        y[0] = sum;
    }
}

// 13. cp.async only begins a copy, and a barrier does not wait for it. On a GPU: old values or new ones, a matter of
// timing; small copies from L2 often win. racecheck: a race between the copy's write and the read. Fix: the wait, and
// then the barrier: the wait is for one's own copies, the barrier tells the others.
template <bool FIXED>
__global__ void forgotten_wait_kernel(const float* x, float* y) {  // [256] -> [256], reversed
    __shared__ float tile[256];
    __pipeline_memcpy_async(&tile[threadIdx.x], &x[threadIdx.x], sizeof(float));
    __pipeline_commit();
    if (FIXED) __pipeline_wait_prior(0);  // <-
    __syncthreads();
    y[threadIdx.x] = tile[255 - threadIdx.x];
}

// Everything below prepares one launch of each and checks what it wrote.
using Values = std::vector<float>;

Values reversed(const Values& x, float factor = 1.0f) {
    Values y(x.rbegin(), x.rend());
    for (float& value : y) value *= factor;
    return y;
}

// Launches on device copies of x, and checks the `y.size()` floats that come out.
template <typename Launch>
void float_trap(const std::string& name, const Values& x, const Values& expected, Launch launch) {
    course::Buffer<float> dx(x), dy(expected.size());
    launch(dx, dy);
    CUDA_CHECK(cudaGetLastError());
    course::check(name, dy.host(), expected, 1e-5);
}

template <bool FIXED>
void run(const std::string& trap, const std::string& name) {
    const Values x = course::random(256, 1);
    const auto launched = [&](const Values& values, const Values& expected, auto launch) {
        float_trap(name, values, expected, launch);
    };
    if (trap == "missing_barrier")
        launched(x, reversed(x), [](auto& x, auto& y) { missing_barrier_kernel<FIXED><<<1, 256>>>(x, y); });
    if (trap == "missing_second_barrier") {
        Values many, expected = reversed(x, 8.0f);
        for (int tile = 0; tile < 8; tile++) many.insert(many.end(), x.begin(), x.end());
        launched(many, expected, [](auto& x, auto& y) { missing_second_barrier_kernel<FIXED><<<1, 256>>>(x, y, 8); });
    }
    if (trap == "shared_counter") {
        std::vector<int> keys(256), expected(8, 32);
        for (int i = 0; i < 256; i++) keys[i] = i / 4 % 8;
        course::Buffer<int> dx(keys), dy(8);
        shared_counter_kernel<FIXED><<<1, 256>>>(dx, dy);
        course::check(name, dy.host(), expected, 0.0);
    }
    if (trap == "global_counter") {
        course::Buffer<int> total(std::vector<int>{0});
        global_counter_kernel<FIXED><<<16, 64>>>(total);
        course::check(name, total.host(), std::vector<int>{1024}, 0.0);
    }
    const Values warp(x.begin(), x.begin() + 32);
    if (trap == "missing_syncwarp") {
        double sum = 0;
        for (float value : warp) sum += value;
        launched(warp, Values(32, float(sum)),
                 [](auto& x, auto& y) { missing_syncwarp_kernel<FIXED><<<1, 32>>>(x, y); });
    }
    if (trap == "barrier_in_a_branch") {
        Values expected(64);
        for (int i = 0; i < 64; i++) expected[i] = x[i % 32] + x[i % 32 + 32];
        launched(Values(x.begin(), x.begin() + 64), expected,
                 [](auto& x, auto& y) { barrier_in_a_branch_kernel<FIXED><<<1, 64>>>(x, y); });
    }
    if (trap == "absent_lane") {
        course::require(FIXED || course::emulated, "absent_lane_broken may hang a GPU: it runs in the emulator only");
        Values expected = warp;
        for (int i = 0; i < 16; i++) expected[i] += warp[i ^ 1];
        launched(warp, expected, [](auto& x, auto& y) { absent_lane_kernel<FIXED><<<1, 32>>>(x, y); });
    }
    if (trap == "past_the_end") {  // 1000 floats: the byte after them is not allocated
        const Values more = course::random(1000, 2);
        Values expected = more;
        for (float& value : expected) value *= 2;
        launched(more, expected, [](auto& x, auto& y) { past_the_end_kernel<FIXED><<<8, 128>>>(x, y, 1000); });
    }
    if (trap == "index_overflow") {
        const int n = 1'000'003;
        const Values many = course::random(n, 3);
        Values expected(SAMPLES);
        for (int64_t i = 0; i < SAMPLES; i++) expected[i] = many[i * n / SAMPLES];
        launched(many, expected,
                 [n](auto& x, auto& y) { index_overflow_kernel<FIXED><<<SAMPLES / 256, 256>>>(x, y, n); });
    }
    if (trap == "misaligned_vector") {
        Values expected(32);
        for (int row = 0; row < 32; row++)
            for (int column = 0; column < 4; column++) expected[row] += x[row * (FIXED ? 8 : 7) + column];
        launched(x, expected, [](auto& x, auto& y) { misaligned_vector_kernel<FIXED><<<1, 32>>>(x, y); });
    }
    if (trap == "unset_sum")
        launched(x, x, [](auto& x, auto& y) {
            if (FIXED) CUDA_CHECK(cudaMemset(y, 0, y.size() * sizeof(float)));  // <-
            accumulate_kernel<<<1, 256>>>(x, y);
        });
    if (trap == "unwritten_tail") {
        double sum = 0;
        for (int i = 0; i < 50; i++) sum += x[i];
        launched(Values(x.begin(), x.begin() + 50), {float(sum)},
                 [](auto& x, auto& y) { unwritten_tail_kernel<FIXED><<<1, 64>>>(x, y, 50); });
    }
    if (trap == "forgotten_wait")
        launched(x, reversed(x), [](auto& x, auto& y) { forgotten_wait_kernel<FIXED><<<1, 256>>>(x, y); });
}

const char* const TRAPS[] = {"missing_barrier",  "missing_second_barrier", "shared_counter",  "global_counter",
                             "missing_syncwarp", "barrier_in_a_branch",    "absent_lane",     "past_the_end",
                             "index_overflow",   "misaligned_vector",      "unset_sum",       "unwritten_tail",
                             "forgotten_wait"};

int main(int count, char** arguments) try {
    if (count > 2) throw std::invalid_argument("one name, or none: missing_barrier_broken, missing_barrier_fixed, ...");
    bool known = count == 1;
    for (const std::string trap : TRAPS) {
        const bool fixed = count == 2 && arguments[1] == trap + "_fixed";
        const bool broken = count == 2 && arguments[1] == trap + "_broken";
        if (count == 1 || fixed) run<true>(trap, trap + "_fixed");
        if (broken) run<false>(trap, trap + "_broken");
        known = known || fixed || broken;
    }
    if (!known) throw std::invalid_argument(std::string(arguments[1]) + " is no name; ./traps alone lists the names");
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
