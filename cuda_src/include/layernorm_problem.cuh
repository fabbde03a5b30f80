// What main asks of every LayerNorm: y, mean and rstd of a loop in double, then a time for every rung.
#pragma once
#include "rows.cuh"
#include "course.cuh"

#ifndef COURSE_EXTENSION
template <typename T>
using Rungs = std::vector<std::pair<std::string, void (*)(const T*, const T*, const T*, T*, float*, float*, int64_t,
                                                          int64_t, float, cudaStream_t)>>;

// Checks every rung on [M, N] against a loop in double (large ones in their last rows, where the offsets are largest),
// then times them.
template <typename T>
void run(const Rungs<T>& rungs, int64_t M, int64_t N, bool timed = false) {
    std::printf("\n[%lld, %lld] %s\n", (long long)M, (long long)N, sizeof(T) == 4 ? "fp32" : "bf16");
    // Around 50, so that E[x^2] - E[x]^2 would lose digits. A prime period, so that rows differ.
    const auto rounded = [](const std::vector<float>& values, int64_t count) {
        std::vector<T> all;
        for (int64_t i = 0; i < count; i++) all.push_back(narrow<T>(values[i % values.size()]));
        return all;
    };
    const float eps = 1e-5f;
    const std::vector<T> x = rounded(course::random(std::min<int64_t>(M * N, 1000003), 10, 50, 3), M * N);
    const std::vector<T> w = rounded(course::random(N, 11, 1, 0.3f), N), b = rounded(course::random(N, 12), N);
    const course::Buffer<T> dx(x), dw(w), db(b);
    course::Buffer<T> dy(x.size());
    course::Buffer<float> mean(M), rstd(M);
    std::vector<double> expected, means, rstds;
    const int64_t from = std::max<int64_t>(0, M - 1 - 200000 / N);
    for (int64_t row = from; row < M; row++) {
        double m = 0, m2 = 0;
        for (int64_t j = 0; j < N; j++) m += double(widen(x[row * N + j])) / double(N);
        for (int64_t j = 0; j < N; j++) m2 += (widen(x[row * N + j]) - m) * (widen(x[row * N + j]) - m);
        means.push_back(m), rstds.push_back(1 / std::sqrt(m2 / double(N) + eps));
        for (int64_t j = 0; j < N; j++)
            expected.push_back((widen(x[row * N + j]) - m) * rstds.back() * widen(w[j]) + widen(b[j]));
    }
    std::vector<course::Version> versions;
    const auto tail = [](const auto& all, size_t count) {
        std::vector<float> found;
        for (size_t i = all.size() - count; i < all.size(); i++) found.push_back(widen(all[i]));
        return found;
    };
    for (const auto& [name, rung] : rungs) {
        dy.poison(), mean.poison(), rstd.poison();
        rung(dx, dw, db, dy, mean, rstd, M, N, eps, nullptr);
        course::check(name, tail(dy.host(), expected.size()), expected, sizeof(T) == 4 ? 1e-3 : 1e-2);
        course::check(name + ", mean", tail(mean.host(), means.size()), means, 1e-4);
        course::check(name + ", rstd", tail(rstd.host(), rstds.size()), rstds, 1e-3);
        versions.push_back({name, [&, M, N, eps, f = rung](cudaStream_t stream) {
                                f(dx, dw, db, dy, mean, rstd, M, N, eps, stream);
                            }});
    }
    if (timed) course::time_versions(versions, {.bytes = 2.0 * double(M * N) * sizeof(T)});
}
#endif
