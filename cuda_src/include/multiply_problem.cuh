// What main asks of every fp32 matrix multiply: the answer of a plain loop, then a time beside cuBLAS.
#pragma once
#include "course.cuh"

#include <cmath>
#if !defined(COURSE_EMULATED) && __has_include(<cublas_v2.h>)  // not every toolkit carries cuBLAS
#include <cublas_v2.h>
#define COURSE_CUBLAS
#endif

using Launcher = void (*)(const float*, const float*, float*, int64_t, int64_t, int64_t, cudaStream_t);

// `rows` of A B, summed in double: all of a large product would take the processor minutes.
inline std::vector<double> product(const std::vector<float>& a, const std::vector<float>& b, int64_t n, int64_t k,
                                   const std::vector<int64_t>& rows) {
    std::vector<double> c(rows.size() * n);
    for (size_t r = 0; r < rows.size(); r++)
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < n; j++) c[r * n + j] += double(a[rows[r] * k + i]) * b[i * n + j];
    return c;
}

struct Problem {
    int64_t m, n, k;
    std::vector<float> a = course::random(m * k, 1), b = course::random(k * n, 2);
    course::Buffer<float> da{a}, db{b}, dc{size_t(m * n)};

    void check(const char* name, Launcher multiply, const std::vector<int64_t>& rows) {
        dc.poison();
        multiply(da, db, dc, m, n, k, nullptr);
        const std::vector<float> all = dc.host();
        std::vector<float> got;
        for (int64_t row : rows) got.insert(got.end(), all.begin() + row * n, all.begin() + (row + 1) * n);
        // A sum of k products is about sqrt(k), and what rounding does to it grows with that.
        course::check(name, got, product(a, b, n, k, rows), 1e-5, std::sqrt(double(k)));
    }
};

inline int multiply_main(const std::vector<std::pair<const char*, Launcher>>& versions,
                         [[maybe_unused]] std::vector<int64_t> sizes) try {
    Problem odd{course::emulated ? 133 : 517, course::emulated ? 131 : 391, course::emulated ? 23 : 203};
    std::vector<int64_t> every(odd.m);
    for (int64_t row = 0; row < odd.m; row++) every[row] = row;
    Problem even{odd.m, odd.n + 1, odd.k + 1};  // multiples of 4: every row begins at a multiple of 16 bytes
    for (const auto& [name, multiply] : versions) {
        try {
            odd.check(name, multiply, every);
        } catch (const std::invalid_argument& refusal) {
            std::printf("%-28s refuses: %s\n", name, refusal.what());
        }
        even.check(name, multiply, every);
    }
#ifndef COURSE_EMULATED
    if (course::small()) return 0;
#ifdef COURSE_CUBLAS
    cublasHandle_t handle;
    course::require(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS, "cuBLAS does not start");
#endif
    for (int64_t n : sizes) {
        Problem p{n, n, n};
        std::vector<course::Version> timed;
        for (const auto& [name, multiply] : versions) {
            p.check(name, multiply, {0, n / 2 + 1, n - 1});
            timed.push_back({name, [&p, n, multiply = multiply](cudaStream_t s) {
                                 multiply(p.da, p.db, p.dc, n, n, n, s);
                             }});
        }
#ifdef COURSE_CUBLAS
        // cuBLAS stores columns, so what it sees are the transposes: C' = B' A'. No TF32 unless asked for.
        timed.push_back({"cuBLAS", [&](cudaStream_t s) {
                             const float one = 1, zero = 0;
                             cublasSetStream(handle, s);
                             cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, p.db, n, p.da, n, &zero,
                                         p.dc, n);
                         }});
#endif
        std::printf("%lld x %lld x %lld\n", (long long)n, (long long)n, (long long)n);
        course::time_versions(timed, {.flops = 2.0 * n * n * n});
    }
#ifdef COURSE_CUBLAS
    cublasDestroy(handle);
#endif
#endif
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
