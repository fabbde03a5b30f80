// kernel<<<grid, block, shared, stream>>>(arguments) becomes emu::Launch("kernel", grid, block, shared,
// stream).run(...).
#pragma once
#include <memory>
#include <tuple>
#include <utility>

#include "api.h"

namespace emu {

EMU_API cudaError_t launch(const char* name, const void* kernel, dim3 grid, dim3 block, size_t shared,
                           cudaStream_t stream, bool cooperative, void (*call)(void*), std::shared_ptr<void> closure,
                           size_t closure_bytes);

class Launch {
  public:
    Launch(const char* name, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr,
           bool cooperative = false)
        : name(name), grid(grid), block(block), shared(shared), stream(stream), cooperative(cooperative) {}

    // Arguments are converted to the parameters' types and copied once, here, as at a real launch.
    template <typename... Parameters, typename... Arguments>
    cudaError_t run(void (*kernel)(Parameters...), Arguments&&... arguments) {
        static_assert(sizeof...(Parameters) == sizeof...(Arguments),
                      "a kernel launch with too few or too many arguments");
        return start((const void*)kernel,
                     [kernel, copies = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
                         std::apply(kernel, copies);
                     });
    }

    // For a template whose arguments are deduced: `kernel` is a lambda that calls it.
    template <typename Kernel, typename... Arguments>
    cudaError_t run_deduced(Kernel kernel, Arguments&&... arguments) {
        return start(nullptr, [kernel, copies = std::make_tuple(std::forward<Arguments>(arguments)...)] {
            std::apply(kernel, copies);
        });
    }

  private:
    template <typename Call>
    cudaError_t start(const void* kernel, Call call) {
        return launch(
            name, kernel, grid, block, shared, stream, cooperative, [](void* c) { (*static_cast<Call*>(c))(); },
            std::make_shared<Call>(std::move(call)), sizeof(Call));
    }

    const char* name;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    bool cooperative;
};

template <typename Tuple, typename Call, size_t... I>
void from_pointers(void** pointers, Call call, std::index_sequence<I...>) {
    call(*static_cast<std::tuple_element_t<I, Tuple>*>(pointers[I])...);
}

}  // namespace emu

// The kernel itself, not a (void*) of it: its parameters' types say how to read the arguments.
template <typename... Parameters>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                                        size_t shared = 0, cudaStream_t stream = nullptr) {
    cudaError_t error = cudaSuccess;
    emu::from_pointers<std::tuple<Parameters...>>(
        arguments,
        [&](auto... a) {
            error = emu::Launch("cooperative kernel", grid, block, shared, stream, true).run(kernel, a...);
        },
        std::index_sequence_for<Parameters...>());
    return error;
}
template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t shared = 0,
                             cudaStream_t stream = nullptr) {
    cudaError_t error = cudaSuccess;
    emu::from_pointers<std::tuple<Parameters...>>(
        arguments, [&](auto... a) { error = emu::Launch("kernel", grid, block, shared, stream).run(kernel, a...); },
        std::index_sequence_for<Parameters...>());
    return error;
}

enum cudaLaunchAttributeID {
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int cooperative = 0, programmaticStreamSerializationAllowed = 0;
        struct {
            unsigned x, y, z;
        } clusterDim{1, 1, 1};
    } val;
};
struct cudaLaunchConfig_t {
    dim3 grid, block;
    dim3& emu_grid_dim() { return grid; }  // config.gridDim, see device.h
    dim3& emu_block_dim() { return block; }
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameters...), Arguments&&... arguments) {
    bool cooperative = false;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const auto& cluster = c->attrs[i].val.clusterDim;
        if (c->attrs[i].id == cudaLaunchAttributeCooperative) cooperative = c->attrs[i].val.cooperative;
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension && cluster.x * cluster.y * cluster.z > 1)
            return cudaErrorNotSupported;
    }
    return emu::Launch("kernel", c->grid, c->block, c->dynamicSmemBytes, c->stream, cooperative)
        .run(kernel, std::forward<Arguments>(arguments)...);
}
