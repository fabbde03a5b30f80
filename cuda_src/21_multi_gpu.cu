// Several GPUs: copies between them, loads and stores into peer memory, and an all-reduce by hand
// ===============================================================================================
//
// Two H200 of one host are joined by NVLink, at 450 GB/s in each direction. That is a tenth of what each has to its own
// memory, and about seven times the 64 GB/s of 16 lanes of PCIe 5. With peer access on, a kernel may use an address of
// another GPU as it uses its own.
//
// All-reduce: k GPUs hold n floats each, and each wants the sum of all. If every GPU reads the data of all, (k - 1) 4n
// bytes enter each GPU. The ring cuts the data into k chunks. In k - 1 steps a chunk passes all ranks and each adds
// its own part (reduce-scatter). In k - 1 more steps the finished chunks pass all ranks (all-gather). 2 (k - 1) / k 4n
// bytes leave each GPU and as many arrive. That is below 8n for any k, and no algorithm on links alone moves fewer. n
// = 2^26 on 2 GPUs: 268 MB, at 450 GB/s 0.60 ms. On 8 it is 470 MB, 1.04 ms, where reading everything takes 1.9 GB and
// 4.2 ms.
//
// You will be able to: derive the bytes that an all-reduce moves; write a ring over NVLink; synchronise GPUs with
// flags.
//
// Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section
// 3; CUDA C++ programming guide, "Peer-to-peer memory access"; the PTX ISA's memory consistency model, "Scope".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o multi_gpu
//           cuda_src/21_multi_gpu.cu -lnccl   (leave -lnccl out without nccl.h)
// Run:      ./multi_gpu            (2 to 8 GPUs: checked, then timed; with one: the same kernels, ranks that share it)
// No GPU:   python3 course.py run 21_multi_gpu       (2 to 8 ranks in one memory, emulated and checked against PyTorch)
// Link:     nccl
#include "21_ring.cuh"

// v1. Each GPU reads the arrays of all k and sums them, by loads from its peers. Predicted: (k - 1) 4n bytes over each
// link, as many as the ring for k = 2 and 4 times as many for k = 8. A load over NVLink is a round trip of a
// microsecond and more, so many have to be in flight. With 16 bytes each, 128 blocks of 512 threads have 1 MB.
__global__ void read_all_kernel(Ranks p, int rank) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, stride = int64_t(gridDim.x) * blockDim.x;
    const int64_t quads = p.vectors ? p.n / 4 : 0;
    for (int64_t q = i; q < quads; q += stride) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (int r = 0; r < p.count; r++) sum = sum + __ldcg(reinterpret_cast<const float4*>(p.x[r]) + q);
        reinterpret_cast<float4*>(p.y[rank])[q] = sum;
    }
    for (int64_t e = 4 * quads + i; e < p.n; e += stride) {
        float sum = 0;
        for (int r = 0; r < p.count; r++) sum += __ldcg(p.x[r] + e);  // in the same order everywhere: the same bits
        p.y[rank][e] = sum;
    }
}

void read_all(Ring& ring) {
    if (ring.p.n == 0) return;
    ring.meet();  // a rank reads an array only after its owner has written it
    for (int r = 0; r < ring.p.count; r++) {
        CUDA_CHECK(cudaSetDevice(ring.device[r]));
        read_all_kernel<<<ring.blocks(ring.p.n), THREADS, 0, ring.stream[r]>>>(ring.p, r);
        CUDA_CHECK(cudaGetLastError());
    }
    ring.meet();  // no rank overwrites what another still reads
}

// v2. New: the ring, one launch a step. A rank adds the sum from its left neighbour to its own part. It stores the
// result into the memory of its right neighbour: stores need no answer, so fewer have to be in flight. A step begins
// when the left neighbour's step before is done. The streams synchronise by events; the host does not wait. Predicted:
// the link's time and 2 (k - 1) launches and events, 5 to 10 us each: as good as anything at 2^26, bad at 2^16.
__global__ void ring_step_kernel(Ranks p, int rank, int step) { send_chunk(p, rank, step, blockIdx.x, gridDim.x); }

void ring_steps(Ring& ring) {
    if (ring.p.n == 0) return;
    const int steps = 2 * (ring.p.count - 1);
    for (int step = 0; step <= steps; step++) {
        if (step > 0) ring.follow_left();  // New. After the last step too: then all of y has arrived
        for (int r = 0; r < ring.p.count && step < steps; r++) {
            CUDA_CHECK(cudaSetDevice(ring.device[r]));
            ring_step_kernel<<<ring.blocks(ring.p.chunk()), THREADS, 0, ring.stream[r]>>>(ring.p, r, step);
            CUDA_CHECK(cudaGetLastError());
        }
    }
}

// v3. New: one launch for all steps. Block b of a rank needs only what block b of its left neighbour has sent. They
// synchronise by a flag for each block, in the memory of the waiting rank: no launch, no event, no barrier of the
// whole GPU between steps. `first`, `here`: the ranks that share this launch. On one GPU each it is one; simulated it
// is all, interleaved block by block, so that blocks that wait for each other run together. Predicted: the link's time
// and about 2 us per step.
__global__ void __launch_bounds__(THREADS) ring_flags_kernel(Ranks p, int first, int here, unsigned base) {
    const int rank = first + blockIdx.x % here, block = blockIdx.x / here, blocks = gridDim.x / here;
    const int steps = 2 * (p.count - 1), right = (rank + 1) % p.count;
    for (int step = 0; step < steps; step++) {
        if (step > 0) wait(p.flags[rank] + block, base + step);  // New
        send_chunk(p, rank, step, block, blocks);
        signal(p.flags[right] + block, base + step + 1);  // New
    }
    wait(p.flags[rank] + block, base + steps);  // the last chunk of y has arrived
}

// Flags only grow, so they are never reset: call number `calls` begins where the one before ended.
void ring_flags(Ring& ring) {
    if (ring.p.n == 0) return;
    const int here = ring.simulated ? ring.p.count : 1, blocks = ring.blocks(ring.p.chunk());
    const unsigned base = ring.calls++ * 2u * (ring.p.count - 1);
    for (int first = 0; first < ring.p.count; first += here) {
        CUDA_CHECK(cudaSetDevice(ring.device[first]));
        ring_flags_kernel<<<blocks * here, THREADS, 0, ring.stream[first]>>>(ring.p, first, here, base);
        CUDA_CHECK(cudaGetLastError());
    }
}

// For Python: k ranks that share the present GPU, all in one tensor. x, y, inbox [k, n]; flags [k, BLOCKS], zeros.
template <void ALL_REDUCE(Ring&)>
void simulate(const float* x, float* y, float* inbox, unsigned* flags, int ranks, int64_t n, cudaStream_t stream) {
    course::require(2 <= ranks && ranks <= MAX_RANKS, "an all-reduce here has 2 to 8 ranks");
    Ring ring(ranks, n, stream);
    for (int r = 0; r < ranks; r++) ring.set(r, x + r * n, y + r * n, inbox + r * n, flags + r * BLOCKS);
    ALL_REDUCE(ring);
}

COURSE_MODULE(m) {
    bind(m, "read_all", simulate<read_all>);
    bind(m, "ring_steps", simulate<ring_steps>);
    bind(m, "ring_flags", simulate<ring_flags>);
}

#ifndef COURSE_EXTENSION
#include "21_main.cuh"
#endif
