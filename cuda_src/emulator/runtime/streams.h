// What the host asked of each stream, in the order of its calls. The work itself is done at once, in that order; from
// the log Python works out which other orders a GPU may choose, and how long they take.
#pragma once
#include "../emu/launch.h"
#include "machine.h"

namespace emu {

cudaError_t set(cudaError_t error);                     // remembers it for cudaGetLastError
cudaError_t submit(std::function<cudaError_t()> work);  // now, or while a graph is recorded, when it is launched

// A stream's number outlives the stream: a graph may be launched when the streams that recorded it are gone.
struct StreamId {
    int number = 0;  // 0: the legacy default stream
    bool blocking = false;
    StreamId(cudaStream_t);
};

void log_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind, StreamId stream);
void log_set(const void* p, size_t bytes, StreamId stream);
void log_kernel(const Running& launch, StreamId stream);
void log_wait(const char* what, StreamId stream, int event = 0);
void forget_log();         // and keep one from now on
std::string stream_log();  // JSON, and no more is kept

}  // namespace emu
