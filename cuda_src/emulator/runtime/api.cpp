// The runtime API on a made-up device: allocations that are watched, copies, launches. Streams are in streams.cpp.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "../emu/launch.h"
#include "shadow.h"
#include "streams.h"

using emu::Region;
using emu::set;
using emu::submit;

namespace {

cudaError_t last = cudaSuccess;
std::map<const void*, size_t> allowed_shared;
std::map<void*, size_t> sizes;

bool runs_over(const void* p, size_t bytes) {  // the end of its allocation, which the driver knows too
    const Region* r = emu::find_region(uint64_t(p));
    return r && r->kind == Region::allocation && uint64_t(p) + bytes > r->high;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
    if (bytes && (!to || !from)) return cudaErrorInvalidValue;
    if (bytes && (runs_over(to, bytes) || runs_over(from, bytes))) return cudaErrorInvalidValue;
    if (bytes) memmove(to, from, bytes);
    emu::mark_written(uint64_t(to), bytes);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, emu::StreamId stream) {
    emu::log_copy(to, from, bytes, kind, stream);
    return copy(to, from, bytes);
}

constexpr size_t REDZONE = 256;

}  // namespace

namespace emu {

cudaError_t set(cudaError_t error) { return error == cudaSuccess ? error : (last = error); }

static std::recursive_mutex one_launch;  // the GPU is one, also for a program of several host threads

cudaError_t launch(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   bool cooperative, void (*call)(void*), std::shared_ptr<void> closure, size_t closure_bytes) {
    const uint64_t threads = uint64_t(block.x) * block.y * block.z, blocks = uint64_t(grid.x) * grid.y * grid.z;
    if (!threads || threads > 1024 || block.z > 64 || !blocks || grid.x > 0x7fffffff || grid.y > 65535 ||
        grid.z > 65535)
        return set(cudaErrorInvalidConfiguration);
    const auto found = allowed_shared.find(kernel);
    const size_t most = found != allowed_shared.end() ? found->second : kernel ? STATIC_LIMIT : DYNAMIC_LIMIT;
    if (shared > most) return set(cudaErrorInvalidValue);
    if (cooperative && blocks > 4 * std::max<uint64_t>(1, std::min<uint64_t>(16, 2048 / threads)))
        return set(cudaErrorCooperativeLaunchTooLarge);
    const std::string called =
        strstr(name, "kernel") == name || strstr(name, "cooperative ") == name ? function_name(kernel, name) : name;
    return submit([=, stream_id = StreamId(stream)] {
        std::lock_guard lock(one_launch);
        if (running) throw std::logic_error("a kernel launches a kernel: not emulated");
        if (now > 3u << 30) forget_times(), now = 1;
        Running l;
        l.name = called;
        l.grid = grid;
        l.block = block;
        l.dynamic = shared;
        l.call = call;
        l.closure = closure.get();
        l.cooperative = cooperative;
        add_region(Region::parameters, uint64_t(closure.get()), closure_bytes, "the parameters", false, false);
        struct Forget {
            ~Forget() { remove_regions(Region::parameters); }
        } forget;
        run(l);
        log_kernel(l, stream_id);
        return cudaSuccess;
    });
}

}  // namespace emu

cudaError_t emuMalloc(void** p, size_t bytes, const char* what) {
    if (!p) return set(cudaErrorInvalidValue);
    if (bytes > size_t(16) << 30) return *p = nullptr, set(cudaErrorMemoryAllocation);
    auto* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 2 * REDZONE));
    if (!memory) return *p = nullptr, set(cudaErrorMemoryAllocation);
    *p = memory + REDZONE;
    memset(memory, 0xFF, REDZONE);
    const bool device = what[0] == 'c';
    emu::add_region(Region::allocation, uint64_t(*p), bytes,
                    std::string("the ") + (device ? "" : what) + (device ? "" : " ") + "allocation of " +
                        std::to_string(bytes) + " bytes",
                    device, true);
    sizes[*p] = bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
    if (!p) return cudaSuccess;
    const auto found = sizes.find(p);
    if (found == sizes.end()) return set(cudaErrorInvalidValue);
    sizes.erase(found);
    emu::remove_region(uint64_t(p), true);
    std::free(static_cast<char*>(p) - REDZONE);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    emu::add_region(Region::allocation, uint64_t(p), bytes, "the registered host memory", false, true);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
    return set(emu::remove_region(uint64_t(p), false) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return submit([=, s = emu::StreamId(stream)] { return copy(to, from, bytes, kind, s); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t error = set(copy(to, from, bytes, kind, nullptr));
    return emu::log_wait("synchronise", nullptr), error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    return submit([=] { return copy(to, from, bytes); });
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
    return submit([=] {
        for (size_t i = 0; i < height; i++)
            copy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
        return cudaSuccess;
    });
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    return submit([=, s = emu::StreamId(stream)] {
        emu::log_set(p, bytes, s);
        memset(p, value, bytes);
        emu::mark_written(uint64_t(p), bytes);
        return cudaSuccess;
    });
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }
cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t(16) << 30, cudaSuccess; }
cudaError_t emuSymbol(void* symbol, const void* from, void* to, size_t bytes, size_t offset) {
    char* p = static_cast<char*>(symbol) + offset;
    return set(from ? copy(p, from, bytes) : copy(to, p, bytes));
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last; }

#define ERRORS(X)                                                                  \
    X(cudaSuccess, "no error")                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                  \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")             \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                            \
    X(cudaErrorCooperativeLaunchTooLarge, "too many blocks in cooperative launch") \
    X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")         \
    X(cudaErrorNotReady, "device not ready")                                       \
    X(cudaErrorNotSupported, "operation not supported")                            \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")

const char* cudaGetErrorName(cudaError_t error) {
#define NAME(code, words) \
    if (error == code) return #code;
    ERRORS(NAME)
    return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t error) {
#define WORDS(code, words) \
    if (error == code) return words;
    ERRORS(WORDS)
    return "unknown error";
}

cudaError_t cudaGetDevice(int* d) { return *d = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return set(d == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return emu::log_wait("synchronise all", nullptr), cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return set(cudaErrorInvalidDevice); }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    if (device) return set(cudaErrorInvalidDevice);
    *p = {};
    strcpy(p->name, "emulated on the CPU");
    p->totalGlobalMem = size_t(16) << 30;
    p->sharedMemPerBlock = emu::STATIC_LIMIT;
    p->sharedMemPerBlockOptin = emu::DYNAMIC_LIMIT;
    p->sharedMemPerMultiprocessor = emu::DYNAMIC_LIMIT + 1024;
    p->totalConstMem = 64 << 10;
    p->major = 8;
    p->multiProcessorCount = 4;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 16;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 4 << 20;
    p->memoryBusWidth = 512;
    p->asyncEngineCount = 2;
    p->concurrentKernels = p->cooperativeLaunch = p->managedMemory = p->concurrentManagedAccess = p->unifiedAddressing =
        1;
    const int block[] = {1024, 1024, 64}, grid[] = {0x7fffffff, 65535, 65535};
    std::copy(block, block + 3, p->maxThreadsDim);
    std::copy(grid, grid + 3, p->maxGridSize);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device)) return cudaErrorInvalidDevice;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMemoryClockRate: *value = 1000000; break;
        default: *value = 1;
    }
    return cudaSuccess;
}

cudaError_t emuAllowShared(const void* kernel, int bytes) {
    if (bytes < 0 || uint32_t(bytes) > emu::DYNAMIC_LIMIT) return set(cudaErrorInvalidValue);
    allowed_shared[kernel] = std::max<size_t>(bytes, emu::STATIC_LIMIT);
    return cudaSuccess;
}
cudaError_t emuOccupancy(int* blocks, int threads, size_t shared) {
    if (threads < 1 || threads > 1024) return set(cudaErrorInvalidValue);
    *blocks = std::min<int64_t>(
        {2048 / ((threads + 31) / 32 * 32), 16, int64_t((emu::DYNAMIC_LIMIT + 1024) / (shared + 1024))});
    return cudaSuccess;
}
