// Streams: copy in, compute and copy out at the same time
// =======================================================
//
// y = f(x) where x and y live in the host's memory. n floats come in and n floats go out. Between them each element
// takes `turns` fused multiply-adds. A GPU has one engine for each direction of the link and its SMs for the rest:
// three things that can run at once. One after the other they take in + compute + out; no program can take less than
// the longest of them. Here all three take about as long (PCIe 5, 50 to 60 GB/s a direction; 51 TFLOP/s), so overlap
// gains a factor of 3. In c chunks the first copy in and the last copy out stay alone: (c + 2) / c of the limit, 1.13
// at 16 chunks.
//
// You will be able to: overlap copies and kernels with streams and events; compute what overlap can gain; record a CUDA
// graph.
//
// Sources: CUDA C++ programming guide, "Asynchronous concurrent execution" (streams, events, the default stream), "CUDA
// graphs"; CUDA C++ best practices guide, "Asynchronous and overlapping transfers with computation".
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o overlap cuda_src/05_stream_overlap.cu
// Run:      ./overlap                                     (checks every version, then times them all)
// No GPU:   python3 course.py run 05_stream_overlap       (the same code, emulated: streams run in turn)
#include "course.cuh"

#include <memory>

// Leans towards x by a thousandth a turn: bounded, and no turn can be left out. Grid-stride, as a chunk has any length.
__global__ void turn_kernel(const float* x, float* y, int64_t n, int turns) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        const float target = 0.001f * x[i];
        float value = x[i] > 0 ? 1.0f : -1.0f;
        for (int turn = 0; turn < turns; turn++) value = fmaf(value, 0.999f, target);
        y[i] = value;
    }
}

// What the versions work on: device memory for all of x and y, streams, and an event for each chunk and step.
class Pipeline {
  public:
    Pipeline(const float* x, float* y, int64_t n, int turns, int chunks, int streams)
        : x_(x), y_(y), n_(n), turns_(turns), chunks_(chunks), dx_(n), dy_(n), streams_(streams),
          events_(2 * chunks + 9) {
        course::require(chunks > 0 && streams > 0 && streams <= 8, "overlap: at least one chunk, and 1 to 8 streams");
        // cudaStreamNonBlocking: without it every operation in the legacy default stream waits for all of these, and
        // they wait for it. That is stream 0, where a launch that names no stream goes. One forgotten stream argument,
        // and nothing overlaps any more. The last version in main's table shows the price.
        for (auto& s : streams_) CUDA_CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        // Events that only order work need no clock, and cost less.
        for (auto& e : events_) CUDA_CHECK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    }
    Pipeline(const Pipeline&) = delete;
    ~Pipeline() {
        for (auto& s : streams_) cudaStreamDestroy(s);
        for (auto& e : events_) cudaEventDestroy(e);
    }

    // v1. One stream, and all of x before the first turn. Operations in one stream run in order.
    // Predicted: in + compute + out.
    void serial(cudaStream_t stream) {
        copy_in(0, n_, stream);
        compute(0, n_, stream);
        copy_out(0, n_, stream);
    }

    // v2. New: chunks, in turn over the streams. What is in different streams may run at the same time.
    // Predicted: one stream is v1 and a launch a chunk; from 3 on, one copies in, one computes, one copies out.
    void over_streams(cudaStream_t stream) {
        fork(stream);
        for (int c = 0; c < chunks_; c++) {
            const cudaStream_t s = streams_[c % streams_.size()];
            copy_in(begin(c), begin(c + 1), s);
            compute(begin(c), begin(c + 1), s);
            copy_out(begin(c), begin(c + 1), s);
        }
        join(stream);
    }

    // v3. New: a stream for each engine, and events for the dependences. Chunk c's FMAs wait for its copy in, its copy
    // out waits for its FMAs, and there is no other wait. Predicted: as v2 with 3 streams or more, by construction
    // instead of luck.
    void over_engines(cudaStream_t stream) {
        course::require(streams_.size() >= 3, "overlap: a stream for each of the three engines, so at least 3");
        fork(stream);
        for (int c = 0; c < chunks_; c++) {
            const cudaEvent_t arrived = events_[2 * c], computed = events_[2 * c + 1];
            copy_in(begin(c), begin(c + 1), streams_[0]);
            CUDA_CHECK(cudaEventRecord(arrived, streams_[0]));
            CUDA_CHECK(cudaStreamWaitEvent(streams_[1], arrived, 0));
            compute(begin(c), begin(c + 1), streams_[1]);
            CUDA_CHECK(cudaEventRecord(computed, streams_[1]));
            CUDA_CHECK(cudaStreamWaitEvent(streams_[2], computed, 0));
            copy_out(begin(c), begin(c + 1), streams_[2]);
        }
        join(stream);
    }

    // v4. New: the same work recorded once and launched as one graph; the events become its edges.
    // Predicted: v3's time, and one call of the host instead of 7 a chunk: it shows where chunks are small.
    cudaGraphExec_t record() {
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        cudaStream_t stream;
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));  // the default stream cannot be recorded
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        over_engines(stream);  // fork and join make the other streams part of the recording
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&ready, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
        CUDA_CHECK(cudaStreamDestroy(stream));
        return ready;
    }

    void copy_in(int64_t from, int64_t to, cudaStream_t stream) {
        if (from == to) return;
        CUDA_CHECK(cudaMemcpyAsync(dx_ + from, x_ + from, (to - from) * sizeof(float), cudaMemcpyHostToDevice, stream));
    }
    void compute(int64_t from, int64_t to, cudaStream_t stream) {
        if (from == to) return;
        const int64_t blocks = std::min<int64_t>(course::ceil_div(to - from, 256), 8 * course::sms());
        turn_kernel<<<blocks, 256, 0, stream>>>(dx_ + from, dy_ + from, to - from, turns_);
        CUDA_CHECK(cudaGetLastError());
    }
    void copy_out(int64_t from, int64_t to, cudaStream_t stream) {
        if (from == to) return;
        CUDA_CHECK(cudaMemcpyAsync(y_ + from, dy_ + from, (to - from) * sizeof(float), cudaMemcpyDeviceToHost, stream));
    }

  private:
    int64_t begin(int chunk) const { return n_ * chunk / chunks_; }

    // The streams begin when `stream` has come this far, and it goes on when all of them are done.
    void fork(cudaStream_t stream) {
        CUDA_CHECK(cudaEventRecord(events_.back(), stream));
        for (auto& s : streams_) CUDA_CHECK(cudaStreamWaitEvent(s, events_.back(), 0));
    }
    void join(cudaStream_t stream) {
        for (size_t i = 0; i < streams_.size(); i++) {
            const cudaEvent_t done = events_[2 * chunks_ + i];
            CUDA_CHECK(cudaEventRecord(done, streams_[i]));
            CUDA_CHECK(cudaStreamWaitEvent(stream, done, 0));
        }
    }

    const float* x_;
    float* y_;
    int64_t n_;
    int turns_, chunks_;
    course::Buffer<float> dx_, dy_;
    std::vector<cudaStream_t> streams_;
    std::vector<cudaEvent_t> events_;
};

// For Python: x and y are host memory, and y is complete when the function returns.
void overlap_serial(const float* x, float* y, int64_t n, int turns, cudaStream_t stream) {
    Pipeline(x, y, n, turns, 1, 1).serial(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void overlap_streams(const float* x, float* y, int64_t n, int turns, int chunks, int streams, cudaStream_t stream) {
    Pipeline pipeline(x, y, n, turns, chunks, streams);
    pipeline.over_streams(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void overlap_engines(const float* x, float* y, int64_t n, int turns, int chunks, cudaStream_t stream) {
    Pipeline pipeline(x, y, n, turns, chunks, 3);
    pipeline.over_engines(stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
}

void overlap_graph(const float* x, float* y, int64_t n, int turns, int chunks, cudaStream_t stream) {
    Pipeline pipeline(x, y, n, turns, chunks, 3);
    const cudaGraphExec_t graph = pipeline.record();
    for (int again = 0; again < 2; again++) CUDA_CHECK(cudaGraphLaunch(graph, stream));  // as often as one likes
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaGraphExecDestroy(graph));
}

COURSE_MODULE(m) {
    bind(m, "overlap_serial", overlap_serial);
    bind(m, "overlap_streams", overlap_streams);
    bind(m, "overlap_engines", overlap_engines);
    bind(m, "overlap_graph", overlap_graph);
}

#ifndef COURSE_EXTENSION
// Host memory that the copy engines can reach by themselves. Pageable memory (new, malloc) they cannot: the driver
// copies it through a small pinned buffer of its own, on the host's time, and nothing overlaps.
struct Pinned {
    explicit Pinned(int64_t n) { CUDA_CHECK(cudaMallocHost(&data, n * sizeof(float))); }
    ~Pinned() { cudaFreeHost(data); }
    float* data = nullptr;
};

// y against a loop on the host; for large n in a part of the elements, both ends of it included.
void check(const std::string& version, const float* x, float* y, int64_t n, int turns) {
    std::vector<float> got, expected;
    const int64_t step = std::max<int64_t>(1, n / 10000);
    for (int64_t i = n - 1; i >= 0; i -= step) {
        float value = x[i] > 0 ? 1.0f : -1.0f;
        for (int turn = 0; turn < turns; turn++) value = std::fmaf(value, 0.999f, 0.001f * x[i]);
        got.push_back(y[i]), expected.push_back(value);
    }
    course::check(version, got, expected, 1e-6);
    std::fill_n(y, n, NAN);  // for the next version
}

int main() try {
    const int64_t n = course::small() ? 10'007 : (1 << 26) + 3;
    const int turns = course::small() ? 3 : 1500, chunks = course::small() ? 5 : 16;
    Pinned x(n), y(n);
    const std::vector<float> some = course::random(std::min<int64_t>(n, 1000003), 5);
    for (int64_t i = 0; i < n; i++) x.data[i] = some[i % some.size()], y.data[i] = NAN;
    std::vector<float> pageable_x(x.data, x.data + n), pageable_y(n, NAN);
    Pipeline pageable(pageable_x.data(), pageable_y.data(), n, turns, 1, 1);
    Pipeline whole(x.data, y.data, n, turns, 1, 3);
    std::vector<std::unique_ptr<Pipeline>> chunked;
    std::vector<course::Version> versions = {{"v1 pageable", [&](cudaStream_t s) { pageable.serial(s); }},
                                             {"v1 pinned", [&](cudaStream_t s) { whole.serial(s); }}};
    for (int streams : {1, 2, 3, 4, 8}) {
        Pipeline* p = chunked.emplace_back(new Pipeline(x.data, y.data, n, turns, chunks, streams)).get();
        versions.push_back({"v2 streams: " + std::to_string(streams), [p](cudaStream_t s) { p->over_streams(s); }});
    }
    Pipeline engines(x.data, y.data, n, turns, chunks, 3), finer(x.data, y.data, n, turns, 4 * chunks, 3);
    versions.push_back({"v3 engines", [&](cudaStream_t s) { engines.over_engines(s); }});
    versions.push_back({"v3 engines, a quarter each", [&](cudaStream_t s) { finer.over_engines(s); }});
    const cudaGraphExec_t graph = engines.record();
    versions.push_back({"v4 graph", [&](cudaStream_t s) { CUDA_CHECK(cudaGraphLaunch(graph, s)); }});
    for (const auto& version : versions) {
        version.run(nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
        const bool is_pageable = version.name == "v1 pageable";
        check(version.name, x.data, is_pageable ? pageable_y.data() : y.data, n, turns);
    }
#ifdef COURSE_EMULATED
    course::time_versions(versions, {});
#else
    // The pitfall: a stream that blocks, and something in the legacy default stream between its operations.
    cudaStream_t blocking[3];
    for (auto& s : blocking) CUDA_CHECK(cudaStreamCreate(&s));
    versions.push_back({"legacy stream between", [&](cudaStream_t) {
                            for (int c = 0; c < chunks; c++) {
                                const int64_t from = n * c / chunks, to = n * (c + 1) / chunks;
                                whole.copy_in(from, to, blocking[c % 3]);
                                whole.compute(from, to, cudaStreamLegacy);  // a launch without a stream
                                whole.copy_out(from, to, blocking[c % 3]);
                            }
                        }});
    versions.back().run(nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    check(versions.back().name, x.data, y.data, n, turns);  // right, as everything waited for everything
    const size_t parts = versions.size();
    versions.push_back({"copy in", [&](cudaStream_t s) { whole.copy_in(0, n, s); }});
    versions.push_back({"compute", [&](cudaStream_t s) { whole.compute(0, n, s); }});
    versions.push_back({"copy out", [&](cudaStream_t s) { whole.copy_out(0, n, s); }});
    const std::vector<float> ms = course::medians(versions, course::small() ? 1 : 10);
    const float in = ms[parts], compute = ms[parts + 1], out = ms[parts + 2], limit = std::max({in, compute, out});
    std::printf("\n%lld floats each way: in %.2f ms (%.1f GB/s), compute %.2f ms, out %.2f ms (%.1f GB/s)\n",
                (long long)n, in, n * 4e-6 / in, compute, out, n * 4e-6 / out);
    std::printf("sum %.2f ms; limit, the longest of the three, %.2f ms\n", in + compute + out, limit);
    for (size_t i = 0; i < parts; i++)
        std::printf("%-28s %9.2f ms  %5.1f%% of the limit's speed, %.2fx v1 pinned\n", versions[i].name.c_str(), ms[i],
                    100 * limit / ms[i], ms[1] / ms[i]);
    for (auto& s : blocking) CUDA_CHECK(cudaStreamDestroy(s));
#endif
    CUDA_CHECK(cudaGraphExecDestroy(graph));
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
