// Streams, events and graphs: immediate, and logged (see streams.h).
#include "streams.h"

#include "shadow.h"

struct emuStream {
    int number;
    bool blocking;  // waits for the legacy default stream, and that for it
};
struct emuEvent {
    int number;
    bool recorded = false;
};
struct emuGraph {
    int origin;  // the stream that recorded it: its work goes to the stream that launches it
    std::vector<std::function<cudaError_t()>> nodes;
};

namespace emu {
namespace {

emuGraph* capture = nullptr;  // while one is under way, all streams' work goes there
int streams = 0, events = 0;
bool logging = false;
std::string log;
int recorded_in = -1, launched_in = 0;

bool pinned(const void* p) {
    const Region* r = find_region(uint64_t(p));
    return r && (r->name.find("pinned") != r->name.npos || r->name.find("registered") != r->name.npos);
}

std::string range(const void* p, size_t bytes) {
    return "[" + std::to_string(uint64_t(p)) + ", " + std::to_string(uint64_t(p) + bytes) + "]";
}

void add(const std::string& what, StreamId s, int event, size_t bytes, bool pageable, const std::string& reads,
         const std::string& writes) {
    if (!logging) return;
    const int stream = s.number == recorded_in ? launched_in : s.number;
    auto figure = [](const char* key, uint64_t n) { return std::string(", \"") + key + "\": " + std::to_string(n); };
    auto flag = [](const char* key, bool b) { return std::string(", \"") + key + "\": " + (b ? "true" : "false"); };
    log += (log.empty() ? "{\"what\": \"" : ",\n{\"what\": \"") + what + "\"" + figure("stream", stream) +
           flag("blocking", s.blocking) + figure("event", event) + figure("bytes", bytes) + flag("pageable", pageable) +
           ", \"reads\": [" + reads + "], \"writes\": [" + writes + "]}";
}

}  // namespace

StreamId::StreamId(cudaStream_t s) : number(s ? s->number : 0), blocking(s && s->blocking) {}

cudaError_t submit(std::function<cudaError_t()> work) {
    if (!capture) return set(work());
    capture->nodes.push_back(std::move(work));
    return cudaSuccess;
}

void log_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind, StreamId stream) {
    const bool in = kind == cudaMemcpyHostToDevice, out = kind == cudaMemcpyDeviceToHost;
    add(in ? "copy in" : out ? "copy out" : "copy", stream, 0, bytes, (in && !pinned(from)) || (out && !pinned(to)),
        range(from, bytes), range(to, bytes));
}

void log_set(const void* p, size_t bytes, StreamId stream) {
    add("memset", stream, 0, bytes, false, "", range(p, bytes));
}

// Its accesses as one range for each allocation that it reads, and one for each that it writes.
void log_kernel(const Running& launch, StreamId stream) {
    std::string ranges[2];
    size_t written = 0;
    for (const auto& [key, extent] : launch.extents) {
        std::string& all = ranges[key.second];
        all += (all.empty() ? "" : ", ") + range((void*)extent.first, extent.second - extent.first);
        written += key.second ? extent.second - extent.first : 0;
    }
    add("kernel", stream, 0, written, false, ranges[0], ranges[1]);
}

void log_wait(const char* what, StreamId stream, int event) { add(what, stream, event, 0, false, "", ""); }

void forget_log() {
    log.clear();
    logging = true;
}

std::string stream_log() {
    logging = false;
    return "[" + log + "]";
}

}  // namespace emu

using emu::capture;
using emu::set;
using emu::submit;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    return *s = new emuStream{++emu::streams, flags != cudaStreamNonBlocking}, cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) {
    return cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return delete s, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (capture) return set(cudaErrorStreamCaptureInvalidated);
    return emu::log_wait("synchronise", s), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
// The only other flag, cudaEventWaitExternal, is for streams that are captured as a graph.
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    if (flags) return set(cudaErrorInvalidValue);
    return submit([stream = emu::StreamId(s), event = e->number] {
        return emu::log_wait("wait", stream, event), cudaSuccess;
    });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*function)(void*), void* data) {
    return submit([=] { return function(data), cudaSuccess; });
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return *e = new emuEvent{++emu::events}, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    e->recorded = true;
    return submit([stream = emu::StreamId(s), event = e->number] {
        return emu::log_wait("record", stream, event), cudaSuccess;
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    return emu::log_wait("synchronise event", nullptr, e->number), cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = 0;  // there is no time here to be proud of
    return a->recorded && b->recorded ? cudaSuccess : set(cudaErrorInvalidValue);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    if (capture) return set(cudaErrorStreamCaptureInvalidated);
    capture = new emuGraph{emu::StreamId(s).number, {}};
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    if (!capture) return set(cudaErrorStreamCaptureInvalidated);
    *graph = capture;
    capture = nullptr;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    return *exec = new emuGraph(*graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    emu::recorded_in = exec->origin, emu::launched_in = emu::StreamId(s).number;
    cudaError_t error = cudaSuccess;
    for (const auto& node : exec->nodes)
        if (error == cudaSuccess) error = node();
    emu::recorded_in = -1;
    return set(error);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete exec, cudaSuccess; }
