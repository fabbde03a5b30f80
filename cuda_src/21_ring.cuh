// What the all-reduces of 21_multi_gpu.cu share: whose memory is where, one step of the ring, flags, streams that wait.
#pragma once
#include "course.cuh"

constexpr int MAX_RANKS = 8, THREADS = 512;
constexpr int BLOCKS = 128;  // at most, and flags per rank: 128 * 512 threads of 16 bytes are 1 MB in flight

struct Ranks {  // addresses on every GPU; with peer access they are good on all of them
    const float* x[MAX_RANKS];
    float* y[MAX_RANKS];
    float* inbox[MAX_RANKS];  // [n]: partial sums that the left neighbour has sent
    unsigned* flags[MAX_RANKS];  // [BLOCKS]: how many steps the left neighbour's block has done
    int count;
    bool vectors;  // everything begins at a multiple of 16 bytes
    int64_t n;

    // Elements of a chunk, a multiple of 4; the last chunks of a short array are smaller, or empty.
    __host__ __device__ int64_t chunk() const { return ((n + count - 1) / count + 3) / 4 * 4; }
};

__device__ inline float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// One step of the ring: rank sends chunk (rank - step) mod k to the right, with its own part added on the way.
//     step 0            its own x            to the right neighbour's inbox
//     1 .. k - 2        x + what has come    to the inbox
//     k - 1             x + what has come: the whole sum, to its own y and the right neighbour's
//     k .. 2k - 3       what has come in y   to the right neighbour's y
//
// The chunk that each rank sends, for k = 4. A chunk moves one rank to the right in each step:
//                  rank 0    rank 1    rank 2    rank 3
//     step 0       0         1         2         3          reduce-scatter: own x
//          1       3         0         1         2            + x
//          2       2         3         0         1            + x
//          3       1         2         3         0            + x: the whole sum
//          4       0         1         2         3          all-gather
//          5       3         0         1         2
//
// Block b of every rank takes the same elements of a chunk. __ldcg: from L2, where a peer's stores arrive; L1 may hold
// an older copy of the line.
__device__ inline void send_chunk(const Ranks& p, int rank, int step, int block, int blocks) {
    const int k = p.count, right = (rank + 1) % k, chunk = (rank - step + 2 * k) % k;
    const int64_t begin = min(chunk * p.chunk(), p.n), size = min(p.chunk(), p.n - begin);
    const float* mine = (step < k ? p.x[rank] : p.y[rank]) + begin;
    const float* came = p.inbox[rank] + begin;
    float* to = (step < k - 1 ? p.inbox[right] : p.y[right]) + begin;
    float* own = p.y[rank] + begin;
    const bool adds = 0 < step && step < k, whole = step == k - 1;

    const int64_t i = int64_t(block) * blockDim.x + threadIdx.x, stride = int64_t(blocks) * blockDim.x;
    const int64_t quads = p.vectors ? size / 4 : 0;
    for (int64_t q = i; q < quads; q += stride) {
        float4 v = __ldcg(reinterpret_cast<const float4*>(mine) + q);
        if (adds) v = v + __ldcg(reinterpret_cast<const float4*>(came) + q);
        reinterpret_cast<float4*>(to)[q] = v;
        if (whole) reinterpret_cast<float4*>(own)[q] = v;
    }
    for (int64_t e = 4 * quads + i; e < size; e += stride) {
        float v = __ldcg(mine + e);
        if (adds) v += __ldcg(came + e);
        to[e] = v;
        if (whole) own[e] = v;
    }
}

// A fence of the system, not of the device: the waiting block may be on another GPU. The order matters: data, fence,
// flag when it sends; flag, fence, data when it waits.
__device__ inline void signal(volatile unsigned* flag, unsigned value) {
    __syncthreads();  // the whole block has stored
    if (threadIdx.x == 0) {
        __threadfence_system();
        *flag = value;
    }
}

__device__ inline void wait(const volatile unsigned* flag, unsigned value) {
    if (threadIdx.x == 0) {
        while (int(*flag - value) < 0)  // the difference: a flag that has passed 2^32 is still ahead
            __nanosleep(20);
        __threadfence_system();
    }
    __syncthreads();
}

// The ranks and where each runs. The next call uses no buffer too early. A rank that has all of y has what its right
// neighbour summed too, so that neighbour is done with its inbox. And a y is written only after its owner has added
// its own x.
struct Ring {
    Ranks p{};
    bool simulated;  // all ranks on the present device, in one stream
    unsigned calls = 0;
    int device[MAX_RANKS] = {};
    cudaStream_t stream[MAX_RANKS] = {};
    cudaEvent_t event[MAX_RANKS] = {};

    Ring(int ranks, int64_t n, cudaStream_t shared) : simulated(true) {
        p.count = ranks, p.n = n, p.vectors = true;
        int here = 0;
        CUDA_CHECK(cudaGetDevice(&here));
        std::fill_n(device, ranks, here);
        std::fill_n(stream, ranks, shared);
    }

    Ring(int ranks, int64_t n) : simulated(false) {  // rank r on GPU r
        p.count = ranks, p.n = n, p.vectors = true;
        for (int r = 0; r < ranks; r++) {
            device[r] = r;
            CUDA_CHECK(cudaSetDevice(r));
            CUDA_CHECK(cudaStreamCreateWithFlags(&stream[r], cudaStreamNonBlocking));
            CUDA_CHECK(cudaEventCreateWithFlags(&event[r], cudaEventDisableTiming));
        }
        CUDA_CHECK(cudaSetDevice(0));
    }
    Ring(const Ring&) = delete;

    ~Ring() {
        for (int r = 0; r < p.count && !simulated; r++) {
            cudaStreamDestroy(stream[r]);
            cudaEventDestroy(event[r]);
        }
        cudaSetDevice(device[0]);
    }

    void set(int r, const float* x, float* y, float* inbox, unsigned* flags) {
        p.x[r] = x, p.y[r] = y, p.inbox[r] = inbox, p.flags[r] = flags;
        for (const void* pointer : {static_cast<const void*>(x), static_cast<const void*>(y), (const void*)inbox})
            p.vectors = p.vectors && reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0;
    }

    int blocks(int64_t elements) const {
        return int(std::min<int64_t>(BLOCKS, course::ceil_div(elements, 4 * THREADS)));
    }

    void record_all() {
        for (int r = 0; r < p.count; r++) CUDA_CHECK(cudaEventRecord(event[r], stream[r]));
    }

    void follow_left() {  // what a rank does next waits for all that its left neighbour has been given so far
        if (simulated) return;
        record_all();
        for (int r = 0; r < p.count; r++)
            CUDA_CHECK(cudaStreamWaitEvent(stream[r], event[(r + p.count - 1) % p.count], 0));
    }

    void meet() {  // every rank waits for every other
        if (simulated) return;
        record_all();
        for (int r = 0; r < p.count; r++)
            for (int other = 0; other < p.count; other++) CUDA_CHECK(cudaStreamWaitEvent(stream[r], event[other], 0));
    }
};
