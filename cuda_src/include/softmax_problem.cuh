// What main asks of every softmax: the answer of a loop in double, then a time for every rung.
#pragma once
#include "rows.cuh"
#include "course.cuh"

#ifndef COURSE_EXTENSION
template <typename T>
using Rungs = std::vector<std::pair<std::string, void (*)(const T*, T*, int64_t, int64_t, cudaStream_t)>>;

// Checks every rung on [M, N] against a loop in double (large ones in their last rows, where the offsets are largest),
// then times them.
template <typename T>
void run(const Rungs<T>& rungs, int64_t M, int64_t N, bool timed = false) {
    std::printf("\n[%lld, %lld] %s\n", (long long)M, (long long)N, sizeof(T) == 4 ? "fp32" : "bf16");
    // Around -5: a column past the end that counts as 0 would win. A prime period, so that rows differ.
    const std::vector<float> values = course::random(std::min<int64_t>(M * N, 1000003), 9, -5, 3);
    std::vector<T> host;
    for (int64_t i = 0; i < M * N; i++) host.push_back(narrow<T>(values[i % values.size()]));
    const course::Buffer<T> x(host);
    course::Buffer<T> y(host.size());
    std::vector<double> expected;
    for (int64_t row = std::max<int64_t>(0, M - 1 - 200000 / N); row < M; row++) {
        double m = -INFINITY, s = 0;
        for (int64_t j = 0; j < N; j++) m = std::max(m, double(widen(host[row * N + j])));
        for (int64_t j = 0; j < N; j++) s += std::exp(double(widen(host[row * N + j])) - m);
        for (int64_t j = 0; j < N; j++) expected.push_back(std::exp(double(widen(host[row * N + j])) - m) / s);
    }
    std::vector<course::Version> versions;
    for (const auto& [name, rung] : rungs) {
        y.poison();
        rung(x, y, M, N, nullptr);
        const std::vector<T> all = y.host();
        std::vector<float> got;
        for (size_t i = all.size() - expected.size(); i < all.size(); i++) got.push_back(widen(all[i]));
        // 3e-8 N: a thread that adds N numbers one after the other is off by up to N / 2^25 of their sum.
        course::check(name, got, expected, sizeof(T) == 4 ? 1e-5 + 3e-8 * double(N) : 1e-2, 1e-4 / double(N));
        versions.push_back({name, [&x, &y, M, N, f = rung](cudaStream_t stream) { f(x, y, M, N, stream); }});
    }
    if (timed) course::time_versions(versions, {.bytes = 2.0 * double(M * N) * sizeof(T)});
}
#endif
