// Streams: copy in, compute and copy out at once, through two slots
// ==============================================================
// y = x / (1 + x^2). The arrays x and y are in the host's memory. The device has room for two chunks of each: chunk c
// goes through slot c % 2. A GPU has an engine for copies in, one for copies out, and its SMs: three things that can
// run at once, if each waits only for its inputs. Give each a stream, and use events for three kinds of waiting. The
// SMs wait for a chunk that is copied in, a copy out for a result that is computed, and all for a slot that is still in
// use.
//
// Each of the three takes one step a chunk. The grader runs your calls on a model of that machine, in every order that
// your streams and events allow. Predict the steps for 16 chunks: in one stream; in three; and with a single slot.
#include "course.cuh"

constexpr int SLOTS = 2;

__global__ void bend_kernel(const float* x, float* y, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float value = x[i];
    y[i] = value / (1.0f + value * value);
}

// n floats of the host's memory.
struct Host {
    explicit Host(int64_t n) {
        // TODO(1): memory that a copy engine can reach by itself.
        // stub: data = static_cast<float*>(std::malloc(n * sizeof(float)));
        CUDA_CHECK(cudaMallocHost(&data, n * sizeof(float)));
        // END(1)
    }
    Host(const Host&) = delete;
    ~Host() {
        if (cudaFreeHost(data) == cudaSuccess) return;
        (void)cudaGetLastError();  // it is memory of another kind: that is no error of the next call
        std::free(data);
    }
    float* data = nullptr;
};

// A stream for each engine, and events: one for each slot and kind of waiting, and two for the caller's stream.
struct Lanes {
    Lanes() {
        for (cudaStream_t* s : {&in, &work, &out}) CUDA_CHECK(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
        for (cudaEvent_t* e : all()) CUDA_CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    }
    Lanes(const Lanes&) = delete;
    ~Lanes() {
        for (cudaStream_t s : {in, work, out}) cudaStreamDestroy(s);
        for (cudaEvent_t* e : all()) cudaEventDestroy(*e);
    }
    std::vector<cudaEvent_t*> all() {
        std::vector<cudaEvent_t*> found = {&begin, &end};
        for (int s = 0; s < SLOTS; s++) found.insert(found.end(), {&arrived[s], &computed[s], &left[s]});
        return found;
    }
    cudaStream_t in, work, out;
    cudaEvent_t begin, end, arrived[SLOTS], computed[SLOTS], left[SLOTS];
};

// x, y: host memory of n floats; dx, dy: SLOTS times `size` floats of the device's. When `stream` has come this far the
// work may begin, and `stream` goes on when all of it is done. The host waits for nothing.
void pipelined(const float* x, float* y, float* dx, float* dy, int64_t n, int64_t size, Lanes& lanes,
               cudaStream_t stream) {
    const cudaStream_t in = lanes.in, work = lanes.work, out = lanes.out;
    // TODO(2): what was asked of `stream` before comes first. lanes.begin is for that.
    CUDA_CHECK(cudaEventRecord(lanes.begin, stream));
    for (cudaStream_t s : {in, work, out}) CUDA_CHECK(cudaStreamWaitEvent(s, lanes.begin, 0));
    // END(2)
    for (int64_t c = 0; c * size < n; c++) {
        const int64_t from = c * size, count = std::min(size, n - from), slot = c % SLOTS;
        float *const sx = dx + slot * size, *const sy = dy + slot * size;
        // TODO(3): copy in, launch, copy out, each in its stream; before each what it waits for, after it an event.
        CUDA_CHECK(cudaStreamWaitEvent(in, lanes.computed[slot], 0));  // chunk c - SLOTS has been read from sx
        CUDA_CHECK(cudaMemcpyAsync(sx, x + from, count * sizeof(float), cudaMemcpyHostToDevice, in));
        CUDA_CHECK(cudaEventRecord(lanes.arrived[slot], in));

        CUDA_CHECK(cudaStreamWaitEvent(work, lanes.arrived[slot], 0));
        CUDA_CHECK(cudaStreamWaitEvent(work, lanes.left[slot], 0));  // and has been copied out of sy
        bend_kernel<<<course::ceil_div(count, 128), 128, 0, work>>>(sx, sy, count);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventRecord(lanes.computed[slot], work));

        CUDA_CHECK(cudaStreamWaitEvent(out, lanes.computed[slot], 0));
        CUDA_CHECK(cudaMemcpyAsync(y + from, sy, count * sizeof(float), cudaMemcpyDeviceToHost, out));
        CUDA_CHECK(cudaEventRecord(lanes.left[slot], out));
        // END(3)
    }
    // TODO(4): `stream` goes on when all is done. lanes.end is for that.
    CUDA_CHECK(cudaEventRecord(lanes.end, out));
    CUDA_CHECK(cudaStreamWaitEvent(stream, lanes.end, 0));
    // END(4)
}

void bend(const float* x, float* y, int64_t n, int64_t size, cudaStream_t stream) {
    Host hx(n), hy(n);
    std::memcpy(hx.data, x, n * sizeof(float));
    course::Buffer<float> dx(SLOTS * size), dy(SLOTS * size);
    Lanes lanes;
    for (auto* slots : {&dx, &dy})  // NaN: what never came in will show
        CUDA_CHECK(cudaMemsetAsync(*slots, 0xFF, slots->size() * sizeof(float), stream));
    pipelined(hx.data, hy.data, dx, dy, n, size, lanes, stream);
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::memcpy(y, hy.data, n * sizeof(float));
}

COURSE_MODULE(m) { bind(m, "bend", bend); }
