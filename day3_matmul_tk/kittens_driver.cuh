// ThunderKittens' gl makes its tensor maps with two functions of the driver, which its own builds link from libcuda.
// That library exists only on machines with a driver, and this program should build everywhere. So the linker finds
// these two definitions, which look up the driver's functions at their first call.
#pragma once
#include <cuda.h>

#include "course.cuh"

namespace course {

template <typename Function>
Function* driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
    require(found == cudaDriverEntryPointSuccess, "the driver is older than CUDA 12: no tensor maps");
    return reinterpret_cast<Function*>(function);
}

}  // namespace course

extern "C" inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                                  void* data, const cuuint64_t* extents, const cuuint64_t* strides,
                                                  const cuuint32_t* box, const cuuint32_t* steps,
                                                  CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                  CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill outside) {
    static const auto encode = course::driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    return encode(map, type, rank, data, extents, strides, box, steps, interleave, swizzle, promotion, outside);
}

extern "C" inline CUresult cuGetErrorString(CUresult error, const char** text) {
    static const auto get = course::driver_function<decltype(cuGetErrorString)>("cuGetErrorString");
    return get(error, text);
}
