// The program of 21_multi_gpu.cu: checks every all-reduce, on several GPUs or on ranks that share one, then times
// copies between two GPUs, the all-reduces and NCCL's.
#pragma once
#include <memory>
#include <utility>

#include "21_ring.cuh"
#if !defined(COURSE_EMULATED) && __has_include(<nccl.h>)
#include <nccl.h>
#define COURSE_NCCL
#endif

constexpr double NVLINK = 450e9;  // bytes per second and direction between two H200 of one host

struct AllReduce {
    const char* name;
    void (*run)(Ring&);
};
constexpr AllReduce ALL_REDUCES[] = {
    {"v1 read all", read_all}, {"v2 ring, steps", ring_steps}, {"v3 ring, flags", ring_flags}};

// What each rank owns, on its own GPU.
struct Memory {
    course::Buffer<float> x, y, inbox;
    course::Buffer<unsigned> flags;
    explicit Memory(const std::vector<float>& values)
        : x(values), y(values.size()), inbox(values.size()), flags(std::vector<unsigned>(BLOCKS, 0)) {
        y.poison(), inbox.poison();
    }
};

struct Group {
    Ring& ring;
    std::vector<std::unique_ptr<Memory>> memory;

    // `from`: so many floats into each allocation; from 1 on nothing is aligned, and the kernels take single floats.
    explicit Group(Ring& r, int64_t from = 0) : ring(r) {
        for (int rank = 0; rank < ring.p.count; rank++) {
            CUDA_CHECK(cudaSetDevice(ring.device[rank]));
            memory.push_back(std::make_unique<Memory>(course::random(from + ring.p.n, 1 + rank, float(rank))));
            Memory& m = *memory.back();
            ring.set(rank, m.x + from, m.y + from, m.inbox + from, m.flags);
        }
        CUDA_CHECK(cudaSetDevice(ring.device[0]));
        synchronize();
    }
    void synchronize() const {
        for (int rank = 0; rank < ring.p.count; rank++) {
            CUDA_CHECK(cudaSetDevice(ring.device[rank]));
            CUDA_CHECK(cudaDeviceSynchronize());
        }
        CUDA_CHECK(cudaSetDevice(ring.device[0]));
    }
};

// Every version, against the sum in double precision, on all ranks; three calls in a row, whose flags go on growing.
void check_all(Ring& ring, int64_t from) {
    const Group group(ring, from);
    std::vector<double> expected(ring.p.n);
    for (int rank = 0; rank < ring.p.count; rank++) {
        const std::vector<float> x = course::random(from + ring.p.n, 1 + rank, float(rank));
        for (int64_t i = 0; i < ring.p.n; i++) expected[i] += x[from + i];
    }
    for (const AllReduce& version : ALL_REDUCES) {
        for (const auto& memory : group.memory) memory->y.poison(), memory->inbox.poison();
        group.synchronize();
        for (int call = 0; call < (course::emulated ? 2 : 3); call++) version.run(ring);
        group.synchronize();
        for (int rank = 0; rank < ring.p.count; rank++) {
            CUDA_CHECK(cudaSetDevice(ring.device[rank]));
            const std::vector<float> y = group.memory[rank]->y.host();
            const std::string who = ", rank " + std::to_string(rank) + " of " + std::to_string(ring.p.count) +
                                    (ring.simulated ? "" : ", a GPU each");
            course::check(version.name + who, std::vector<float>(y.begin() + from, y.end()), expected, 4e-6);
        }
    }
}

__global__ void copy_kernel(const float4* from, float4* to, int64_t quads) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < quads; i += stride) to[i] = from[i];
}

#ifndef COURSE_EMULATED
// Times work that runs in the ring's streams: they begin after, and the timer's stream goes on when all are done.
void time_all(Ring& ring, const std::vector<std::pair<std::string, std::function<void()>>>& versions, double bytes) {
    CUDA_CHECK(cudaSetDevice(0));
    cudaEvent_t begin;
    CUDA_CHECK(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming));
    std::vector<course::Version> timed;
    for (const auto& [name, work] : versions)
        timed.push_back({name, [&ring, begin, &work = work](cudaStream_t s) {
                             CUDA_CHECK(cudaEventRecord(begin, s));
                             for (int r = 0; r < ring.p.count; r++)
                                 CUDA_CHECK(cudaStreamWaitEvent(ring.stream[r], begin, 0));
                             work();
                             CUDA_CHECK(cudaSetDevice(0));
                             ring.record_all();
                             for (int r = 0; r < ring.p.count; r++)
                                 CUDA_CHECK(cudaStreamWaitEvent(s, ring.event[r], 0));
                         }});
    const std::vector<float> ms = course::medians(timed);
    for (size_t i = 0; i < timed.size(); i++)
        std::printf("  %-32s %9.4f ms %7.1f GB/s a direction, %5.1f%% of NVLink's\n", timed[i].name.c_str(), ms[i],
                    bytes / ms[i] * 1e-6, 100 * bytes / ms[i] * 1e3 / NVLINK);
    CUDA_CHECK(cudaEventDestroy(begin));
}

// From GPU 0 to GPU 1, and both ways at once. Predicted: copy engines and stores near the link's speed, both ways as
// fast as one way; loads less, since each waits for its answer; through the host PCIe's speed.
void time_copies(int64_t n) {
    Ring ring(2, n);
    const Group group(ring);
    const Memory &zero = *group.memory[0], &one = *group.memory[1];
    const size_t bytes = n * sizeof(float), piece = std::min<size_t>(bytes, 8 << 20);
    char* pinned = nullptr;
    CUDA_CHECK(cudaMallocHost(&pinned, bytes));
    const auto engine = [&](int from, const Memory& a, const Memory& b) {
        CUDA_CHECK(cudaMemcpyPeerAsync(b.y, 1 - from, a.x, from, bytes, ring.stream[from]));
    };
    const auto kernel = [&](int runs, const Memory& a, const Memory& b) {
        CUDA_CHECK(cudaSetDevice(runs));
        const float4* from = reinterpret_cast<const float4*>(static_cast<float*>(a.x));
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(b.y));
        copy_kernel<<<4 * course::sms(), 512, 0, ring.stream[runs]>>>(from, to, n / 4);
        CUDA_CHECK(cudaGetLastError());
    };
    const auto staged = [&] {  // in pieces: one goes down to GPU 1 while the next comes up from GPU 0
        for (size_t at = 0; at < bytes; at += piece) {
            const size_t size = std::min(piece, bytes - at);
            CUDA_CHECK(cudaMemcpyAsync(pinned + at, reinterpret_cast<char*>(static_cast<float*>(zero.x)) + at, size,
                                       cudaMemcpyDeviceToHost, ring.stream[0]));
            CUDA_CHECK(cudaEventRecord(ring.event[0], ring.stream[0]));
            CUDA_CHECK(cudaStreamWaitEvent(ring.stream[1], ring.event[0], 0));
            CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<char*>(static_cast<float*>(one.y)) + at, pinned + at, size,
                                       cudaMemcpyHostToDevice, ring.stream[1]));
        }
    };
    const std::vector<std::pair<std::string, std::function<void()>>> versions = {
        {"through the host", staged},
        {"copy engine", [&] { engine(0, zero, one); }},
        {"copy engines, both ways", [&] { engine(0, zero, one), engine(1, one, zero); }},
        {"kernel that loads from 0", [&] { kernel(1, zero, one); }},
        {"kernel that stores into 1", [&] { kernel(0, zero, one); }},
        {"kernels that store, both ways", [&] { kernel(0, zero, one), kernel(1, one, zero); }}};
    const std::vector<float> expected = zero.x.host();
    for (const auto& [name, work] : versions) {
        CUDA_CHECK(cudaSetDevice(1));
        CUDA_CHECK(cudaMemset(one.y, 0xFF, bytes));
        group.synchronize();
        work();
        group.synchronize();
        course::check(name, one.y.host(), expected, 0.0);
    }
    std::printf("copies of %.0f MB between GPUs 0 and 1 (predicted: %.3f ms at 450 GB/s)\n", bytes * 1e-6,
                bytes / NVLINK * 1e3);
    time_all(ring, versions, double(bytes));
    CUDA_CHECK(cudaFreeHost(pinned));
}

void time_all_reduces(int ranks, int64_t n) {
    Ring ring(ranks, n);
    const Group group(ring);
    std::vector<std::pair<std::string, std::function<void()>>> versions;
    for (const AllReduce& version : ALL_REDUCES) versions.push_back({version.name, [&] { version.run(ring); }});
#ifdef COURSE_NCCL
    const auto nccl = [](ncclResult_t result) {
        if (result != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(result));
    };
    std::vector<ncclComm_t> communicators(ranks);
    nccl(ncclCommInitAll(communicators.data(), ranks, ring.device));
    versions.push_back({"NCCL", [&] {
                            nccl(ncclGroupStart());
                            for (int r = 0; r < ranks; r++)
                                nccl(ncclAllReduce(ring.p.x[r], ring.p.y[r], n, ncclFloat, ncclSum, communicators[r],
                                                   ring.stream[r]));
                            nccl(ncclGroupEnd());
                        }});
#else
    std::printf("(no nccl.h where the compiler looks, so NCCL is not measured)\n");
#endif
    const double bytes = 2.0 * (ranks - 1) / ranks * n * sizeof(float);
    std::printf("all-reduce of %lld floats on %d GPUs: %.2f MB each way and GPU (predicted: %.4f ms at 450 GB/s)\n",
                static_cast<long long>(n), ranks, bytes * 1e-6, bytes / NVLINK * 1e3);
    time_all(ring, versions, bytes);
#ifdef COURSE_NCCL
    for (ncclComm_t communicator : communicators) ncclCommDestroy(communicator);
#endif
}
#endif

// How many GPUs reach each other's memory, from GPU 0 on; lets them.
int connect() {
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    count = std::min(count, MAX_RANKS);
    for (int a = 0; a < count; a++)
        for (int b = 0; b < count; b++) {
            int reaches = a == b;
            if (a != b) CUDA_CHECK(cudaDeviceCanAccessPeer(&reaches, a, b));
            if (!reaches) count = std::max(a, b);
        }
    for (int a = 0; a < count; a++)
        for (int b = 0; b < count; b++) {
            CUDA_CHECK(cudaSetDevice(a));
            if (a != b) CUDA_CHECK(cudaDeviceEnablePeerAccess(b, 0));
        }
#ifndef COURSE_EMULATED
    for (int a = 0; a < count; a++) {  // kernels that wait for each other are loaded before one of them runs
        cudaFuncAttributes unused;
        CUDA_CHECK(cudaSetDevice(a));
        CUDA_CHECK(cudaFuncGetAttributes(&unused, ring_flags_kernel));
    }
#endif
    CUDA_CHECK(cudaSetDevice(0));
    return count;
}

int main() try {
    const int gpus = connect();
    const int64_t n = course::emulated ? 4'099 : 1'000'003;
    for (int ranks = 2; ranks <= (course::emulated ? 4 : MAX_RANKS); ranks++)
        for (int64_t from : {0, 1}) {
            Ring ring(ranks, n, nullptr);
            check_all(ring, from);
        }
    if (gpus < 2) {
        std::printf("These ranks share one GPU. Copies and NCCL want 2 GPUs that reach each other; here: %d\n", gpus);
        return 0;
    }
#ifndef COURSE_EMULATED
    for (int ranks = 2; ranks <= gpus; ranks++)
        for (int64_t from : {0, 1}) {
            Ring ring(ranks, n);
            check_all(ring, from);
        }
    time_copies(1 << 26);
    for (int ranks = 2; ranks <= gpus; ranks = ranks < gpus ? std::min(2 * ranks, gpus) : gpus + 1)
        for (int64_t size : {1 << 14, 1 << 20, 1 << 26}) time_all_reduces(ranks, size);
#endif
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
