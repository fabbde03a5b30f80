// What every program of cuda_src shares: errors that say where, buffers, a check that NaN cannot pass, a timer, and the
// door to Python. A program reads like this (02_vector_add.cu is the model):
//
//   main: make inputs, run every version once into a poisoned buffer, check it against a plain loop, then time them all
//   COURSE_MODULE(m) { bind(m, "add", add); }    with -DCOURSE_EXTENSION; launchers take device pointers and a stream
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define CUDA_CHECK(call) course::cuda_check((call), #call, __FILE__, __LINE__)

namespace course {

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // forget it, or the next call would be blamed
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + cudaGetErrorName(error) + " (" +
                             cudaGetErrorString(error) + ") from " + call);
}

// What a launcher is told and cannot do. Python sees a ValueError.
inline void require(bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
}

#ifdef COURSE_EMULATED
constexpr bool emulated = true;
#else
constexpr bool emulated = false;
#endif

// Main takes small sizes, and runs once what it would time: in the emulator, and where COURSE_SMALL is set, since under
// compute-sanitizer every access is slow.
inline bool small() { return emulated || std::getenv("COURSE_SMALL"); }

// Streaming multiprocessors of the present device.
inline int sms() {
    int device = 0, count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Device memory that frees itself. Passed where a T* is expected.
template <typename T>
class Buffer {
  public:
    explicit Buffer(size_t count) : size_(count) {
        CUDA_CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
    }
    explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) {
        CUDA_CHECK(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(data_); }

    operator T*() const { return data_; }
    size_t size() const { return size_; }

    // Every byte 0xFF: NaN in every floating type, so that an element that is never written is seen.
    void poison() { CUDA_CHECK(cudaMemset(data_, 0xFF, size_ * sizeof(T))); }

    std::vector<T> host() const {
        std::vector<T> values(size_);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    T* data_ = nullptr;
    size_t size_;
};

// Normal values, never zeros or a constant: those hide bugs, and a GPU that multiplies zeros runs faster.
inline std::vector<float> random(size_t count, unsigned seed, float mean = 0.0f, float deviation = 1.0f) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> values(count);
    for (float& value : values) value = normal(generator);
    return values;
}

// |got - expected| <= tolerance * (|expected| + scale) everywhere, which NaN is not. Throws with the first that fails.
template <typename T, typename U>
void check(const std::string& version, const std::vector<T>& got, const std::vector<U>& expected, double tolerance,
           double scale = 1.0) {
    require(got.size() == expected.size(), "check: the sizes differ");
    for (size_t i = 0; i < got.size(); i++) {
        const double g = double(got[i]), e = double(expected[i]);
        if (!(std::abs(g - e) <= tolerance * (std::abs(e) + scale)))
            throw std::runtime_error(version + " is wrong at " + std::to_string(i) + ": " + std::to_string(g) +
                                     ", expected " + std::to_string(e));
    }
    std::printf("%-28s right: %zu values\n", version.c_str(), got.size());
}

struct Version {
    std::string name;
    std::function<void(cudaStream_t)> run;
    std::function<void()> before = {};  // not timed: puts back what the run before has changed
};

// What a run has to do at least; 0 leaves the column out.
struct Work {
    double bytes = 0, flops = 0;
};

inline void run_once(const std::vector<Version>& versions) {
    for (const Version& version : versions) {
        if (version.before) version.before();
        version.run(nullptr);
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    std::printf("%zu versions ran; times need a GPU and no COURSE_SMALL\n", versions.size());
}

#ifdef COURSE_EMULATED
inline void time_versions(const std::vector<Version>& versions, Work) { run_once(versions); }
#else
// Milliseconds of each version: the median of `rounds`. Each round times each version once, in a new order, with the
// L2 cache overwritten before. In a fixed order each version would have its own state of caches and clocks.
inline std::vector<float> medians(const std::vector<Version>& versions, int rounds = 30) {
    int device = 0, l2 = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    Buffer<char> other(4 * size_t(l2));
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<std::vector<float>> times(versions.size());
    std::vector<size_t> order(versions.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::mt19937 generator(0);
    for (int round = -2; round < rounds; round++) {  // two rounds to warm up
        std::shuffle(order.begin(), order.end(), generator);
        for (size_t i : order) {
            if (versions[i].before) versions[i].before();
            CUDA_CHECK(cudaMemsetAsync(other, 0, other.size(), nullptr));
            CUDA_CHECK(cudaEventRecord(start, nullptr));
            versions[i].run(nullptr);
            CUDA_CHECK(cudaEventRecord(stop, nullptr));
            CUDA_CHECK(cudaEventSynchronize(stop));
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (round >= 0) times[i].push_back(ms);
        }
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    std::vector<float> found;
    for (auto& t : times) {
        std::nth_element(t.begin(), t.begin() + t.size() / 2, t.end());
        found.push_back(t[t.size() / 2]);
    }
    return found;
}

// Times every version beside a copy that moves as many bytes, and prints the table.
inline void time_versions(std::vector<Version> versions, Work work) {
    if (small()) return run_once(versions);
    Buffer<char> from(std::max<size_t>(size_t(work.bytes / 2), 16)), to(from.size());
    if (work.bytes > 0)
        versions.push_back({"copy", [&](cudaStream_t s) {
                                CUDA_CHECK(cudaMemcpyAsync(to, from, from.size(), cudaMemcpyDeviceToDevice, s));
                            }});
    const std::vector<float> ms = medians(versions);
    for (size_t i = 0; i < versions.size(); i++) {
        std::printf("%-28s %9.4f ms", versions[i].name.c_str(), ms[i]);
        if (work.bytes > 0)
            std::printf(" %8.1f GB/s %5.1f%% of a copy", work.bytes / ms[i] * 1e-6, 100 * ms.back() / ms[i]);
        if (work.flops > 0 && versions[i].name != "copy") std::printf(" %8.1f GFLOP/s", work.flops / ms[i] * 1e-6);
        std::printf("\n");
    }
}
#endif

}  // namespace course

#ifdef COURSE_EXTENSION
#include "binding.h"
#define COURSE_MODULE(m) void course_module(course::Module& m)
#else
// Not a module but a program: what would be bound is compiled and never called.
namespace course {
struct NoModule {};
template <typename R, typename... Args>
void bind(NoModule&, const char*, R (*)(Args...)) {}
}  // namespace course
#define COURSE_MODULE(m) [[maybe_unused]] static void course_module(course::NoModule& m)
#endif
using course::bind;
