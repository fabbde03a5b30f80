// The part of the CUDA runtime API that the course uses. Streams and events are immediate: work is done when the call
// returns, in the order of the calls, which is one of the orders that a GPU may choose.
#pragma once
#include "core.h"

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidDevicePointer = 17,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorUnknown = 999
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrManagedMemory = 83,
    cudaDevAttrConcurrentManagedAccess = 89,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};

struct emuStream;
struct emuEvent;
struct emuGraph;
using cudaStream_t = emuStream*;
using cudaEvent_t = emuEvent*;
using cudaGraph_t = emuGraph*;
using cudaGraphExec_t = emuGraph*;
struct cudaUUID_t {
    char bytes[16];
};

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor, totalConstMem;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor,
        maxBlocksPerMultiProcessor;
    int regsPerBlock, regsPerMultiprocessor, l2CacheSize, memoryBusWidth, asyncEngineCount, concurrentKernels;
    int maxThreadsDim[3], maxGridSize[3], cooperativeLaunch, managedMemory, concurrentManagedAccess, unifiedAddressing;
};
struct cudaFuncAttributes {
    int numRegs, maxThreadsPerBlock, maxDynamicSharedSizeBytes;
    size_t sharedSizeBytes, localSizeBytes, constSizeBytes;
};

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1,
                   cudaEventDisableTiming = 2;
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                   cudaHostAllocWriteCombined = 4;
constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;
constexpr unsigned cudaMemAttachGlobal = 1;
constexpr int cudaCpuDeviceId = -1;

#define EMU_CALL EMU_API cudaError_t
EMU_CALL emuMalloc(void** p, size_t bytes, const char* what);
EMU_CALL cudaFree(void* p);
EMU_CALL cudaFreeHost(void* p);
template <typename T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
    return emuMalloc((void**)p, bytes, "cudaMalloc");
}
template <typename T>
cudaError_t cudaMallocAsync(T** p, size_t bytes, cudaStream_t) {
    return emuMalloc((void**)p, bytes, "cudaMallocAsync");
}
template <typename T>
cudaError_t cudaMallocManaged(T** p, size_t bytes, unsigned = cudaMemAttachGlobal) {
    return emuMalloc((void**)p, bytes, "managed");
}
template <typename T>
cudaError_t cudaMallocHost(T** p, size_t bytes, unsigned = 0) {
    return emuMalloc((void**)p, bytes, "pinned");
}
template <typename T>
cudaError_t cudaHostAlloc(T** p, size_t bytes, unsigned) {
    return emuMalloc((void**)p, bytes, "pinned");
}
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
EMU_CALL cudaHostRegister(void* p, size_t bytes, unsigned flags = 0);
EMU_CALL cudaHostUnregister(void* p);
EMU_CALL cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
EMU_CALL cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                           cudaMemcpyKind kind, cudaStream_t stream = nullptr);
EMU_CALL cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream = nullptr);
EMU_CALL cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
EMU_CALL cudaMemset(void* p, int value, size_t bytes);
EMU_CALL cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream = nullptr);
EMU_CALL cudaMemPrefetchAsync(const void* p, size_t bytes, int device, cudaStream_t stream = nullptr);
EMU_CALL cudaMemGetInfo(size_t* free, size_t* total);
EMU_CALL emuSymbol(void* symbol, const void* from, void* to, size_t bytes, size_t offset);
template <typename T>
cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind = cudaMemcpyHostToDevice) {
    return emuSymbol((void*)&symbol, from, nullptr, bytes, offset);
}
template <typename T>
cudaError_t cudaMemcpyFromSymbol(void* to, T& symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind = cudaMemcpyDeviceToHost) {
    return emuSymbol((void*)&symbol, nullptr, to, bytes, offset);
}
template <typename T>
cudaError_t cudaGetSymbolAddress(void** p, T& symbol) {
    return *p = (void*)&symbol, cudaSuccess;
}

EMU_CALL cudaGetLastError();
EMU_CALL cudaPeekAtLastError();
EMU_API const char* cudaGetErrorName(cudaError_t);
EMU_API const char* cudaGetErrorString(cudaError_t);
EMU_CALL cudaGetDevice(int*);
EMU_CALL cudaSetDevice(int);
EMU_CALL cudaGetDeviceCount(int*);
EMU_CALL cudaGetDeviceProperties(cudaDeviceProp*, int);
EMU_CALL cudaDeviceGetAttribute(int*, cudaDeviceAttr, int);
EMU_CALL cudaDeviceSynchronize();
EMU_CALL cudaDeviceReset();
EMU_CALL cudaDeviceCanAccessPeer(int*, int, int);
EMU_CALL cudaDeviceEnablePeerAccess(int, unsigned);
EMU_CALL cudaRuntimeGetVersion(int*);
EMU_CALL cudaDriverGetVersion(int*);

EMU_CALL cudaStreamCreate(cudaStream_t*);
EMU_CALL cudaStreamCreateWithFlags(cudaStream_t*, unsigned);
EMU_CALL cudaStreamCreateWithPriority(cudaStream_t*, unsigned, int);
EMU_CALL cudaStreamDestroy(cudaStream_t);
EMU_CALL cudaStreamSynchronize(cudaStream_t);
EMU_CALL cudaStreamQuery(cudaStream_t);
EMU_CALL cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0);
EMU_CALL cudaLaunchHostFunc(cudaStream_t, void (*)(void*), void*);
EMU_CALL cudaEventCreate(cudaEvent_t*);
EMU_CALL cudaEventCreateWithFlags(cudaEvent_t*, unsigned);
EMU_CALL cudaEventDestroy(cudaEvent_t);
EMU_CALL cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr);
EMU_CALL cudaEventSynchronize(cudaEvent_t);
EMU_CALL cudaEventQuery(cudaEvent_t);
EMU_CALL cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t);

EMU_CALL cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode);
EMU_CALL cudaStreamEndCapture(cudaStream_t, cudaGraph_t*);
EMU_CALL cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long = 0);
EMU_CALL cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
EMU_CALL cudaGraphDestroy(cudaGraph_t);
EMU_CALL cudaGraphExecDestroy(cudaGraphExec_t);

EMU_CALL emuAllowShared(const void* kernel, int bytes);
EMU_CALL emuOccupancy(int* blocks, int threads, size_t shared);
template <typename K>
cudaError_t cudaFuncSetAttribute(K* kernel, cudaFuncAttribute attribute, int value) {
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ? emuAllowShared((const void*)kernel, value)
                                                                    : cudaSuccess;
}
template <typename K>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, K*, int threads, size_t shared) {
    return emuOccupancy(blocks, threads, shared);
}
template <typename K>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, K*, size_t = 0, int limit = 0) {
    return *block = limit ? limit : 256, *grid = 4 * (2048 / *block), cudaSuccess;
}
template <typename K>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, K*) {
    return *a = {32, 1024, 48 << 10, 0, 0, 0}, cudaSuccess;
}
