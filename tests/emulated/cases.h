// A test file is a list of cases, each a broken kernel or its fix. The program runs every case under several orders of
// threads and prints one line each: name, seed, the fault or "none". Names end in _broken or _fixed.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

extern "C" void emu_set_seed(uint64_t);
extern "C" const char* emu_end();

struct Case {
    const char* name;
    void (*run)();
};

template <typename T>
struct Device {  // n values on the device, not written unless `value` is given
    T* data = nullptr;
    explicit Device(size_t n) { cudaMalloc(&data, n * sizeof(T)); }
    Device(size_t n, T value) : Device(n) {
        const std::vector<T> host(n, value);
        cudaMemcpy(data, host.data(), n * sizeof(T), cudaMemcpyHostToDevice);
    }
    explicit Device(const std::vector<T>& host) : Device(host.size()) {
        cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    }
    ~Device() { cudaFree(data); }
    operator T*() const { return data; }
    std::vector<T> host(size_t n) const {
        std::vector<T> values(n);
        cudaMemcpy(values.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost);
        return values;
    }
};

inline void expect(bool right, const char* what) {
    if (!right) throw emu::Fault("wrong", what);
}

// The case twice: with FIXED false, then true.
#define BOTH(name, ...)                  \
    {#name "_broken",                    \
     [] {                                \
         constexpr bool FIXED = false;   \
         __VA_ARGS__;                    \
     }},                                 \
    {                                    \
        #name "_fixed", [] {             \
            constexpr bool FIXED = true; \
            __VA_ARGS__;                 \
        }                                \
    }

inline int run_cases(const std::vector<Case>& cases, int seeds = 4) {
    for (const Case& c : cases)
        for (int seed = 0; seed < seeds; seed++) {
            emu_set_seed(seed);
            try {
                c.run();
                std::printf("%s\t%d\tnone\t\n", c.name, seed);
            } catch (const emu::Fault& f) {
                std::printf("%s\t%d\t%s\t%s\n", c.name, seed, f.kind.c_str(), f.text.c_str());
            }
        }
    return 0;
}
