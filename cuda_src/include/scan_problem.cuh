// What main asks of every scan: floats, and integers exactly, then a time for every rung.
#pragma once
#include "course.cuh"

#include <algorithm>

template <typename T>
struct Rung {
    const char* name;
    void (*launch)(const T*, T*, T*, int64_t, int64_t, cudaStream_t);
};

constexpr size_t SPARE = 1024;  // elements of scratch past one for every 512 inputs: the sums of the sums, CUB's own

// Sums of normal values wander off to about sqrt(n), and a sum near 0 is as inexact as the large ones that it is made
// of. Hence a tolerance relative to the largest. The prefix of a wrong tile is off by far more.
template <typename T>
void check_all(const std::vector<Rung<T>>& rungs, const std::vector<T>& x, double tolerance) {
    std::vector<double> expected(x.size());
    double sum = 0, largest = 0;
    for (size_t i = 0; i < x.size(); i++) {
        expected[i] = sum += double(x[i]);
        largest = std::max(largest, std::abs(sum));
    }
    const course::Buffer<T> x_gpu(x);
    course::Buffer<T> y(x.size()), scratch(x.size() / 512 + SPARE);
    for (const Rung<T>& rung : rungs) {
        y.poison();
        rung.launch(x_gpu, y, scratch, int64_t(scratch.size()), int64_t(x.size()), nullptr);
        course::check(rung.name, y.host(), expected, tolerance, largest);
    }
}

// hurts: a length that is several levels of sums, and a tail; timed: a length to time
inline void check_and_time(const std::vector<Rung<float>>& rungs, const std::vector<Rung<unsigned>>& exact_rungs,
                           size_t hurts, size_t timed) {
    check_all(rungs, course::random(hurts, 1), 2e-6);
    std::vector<unsigned> whole(hurts);
    for (size_t i = 0; i < hurts; i++) whole[i] = unsigned(i * 2654435761u) >> 25;  // sums below 2^32, and exact
    check_all(exact_rungs, whole, 0);

    const std::vector<float> part = course::random(std::min(timed, size_t(1) << 22), 2);
    course::Buffer<float> x(timed), y(timed), scratch(timed / 512 + SPARE);
    for (size_t at = 0; at < timed; at += part.size())
        CUDA_CHECK(cudaMemcpy(x + at, part.data(), part.size() * sizeof(float), cudaMemcpyHostToDevice));
    std::vector<course::Version> versions;
    for (const Rung<float>& rung : rungs)
        versions.push_back({rung.name, [&, launch = rung.launch](cudaStream_t s) {
                                launch(x, y, scratch, int64_t(scratch.size()), int64_t(timed), s);
                            }});
    course::time_versions(versions, {.bytes = 8.0 * double(timed)});
}
