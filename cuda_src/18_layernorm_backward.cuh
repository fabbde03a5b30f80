// What 18_layernorm_backward is made of: v1, what a thread of later rungs does with its
// columns of a row, and the check in main.
#pragma once
#include "rows.cuh"
#include "course.cuh"

#include <cuda_pipeline.h>

template <typename T>
struct Task {
    const T *dy, *x, *w;        // [M, N], [M, N], [N]
    const float *mean, *rstd;   // [M], from the forward
    T *dx, *dw, *db;            // [M, N], [N], [N]
    float* partials;            // scratch: [2, groups, N], dw then db of each group of rows
    int64_t M, N;
};

// How to launch a kernel on a task, and how many groups (blocks, or clusters) leave partial sums.
struct Plan {
    int threads = 0, parts = 1, part = 0, bytes = 0;  // part: vectors of one block
    int64_t groups = 0;                               // 0: it cannot be launched here
};

inline bool no_rows(int64_t M, int64_t N) {
    course::require(M < (int64_t(1) << 31), "layernorm: a grid has at most 2^31 - 1 blocks, pass fewer rows at a time");
    return M * N == 0;
}

// v1. A kernel for each direction: a block a row for dx; for dw and db a block for 32 columns, whose 8 warps take every
// eighth row. Predicted: 5MN, and dx reads its row twice (the second time from L1 or L2): at best 5/3 of the least
// time.
constexpr int BLOCK = 256;

template <typename T>
__global__ void dx_kernel(const T* dy, const T* x, const T* w, const float* mean, const float* rstd, T* dx, int64_t N) {
    __shared__ float2 parts[BLOCK / 32];
    const int64_t row = blockIdx.x;
    dy += row * N, x += row * N, dx += row * N;
    const float m = mean[row], r = rstd[row];
    float along = 0, sum = 0;
    for (int64_t j = threadIdx.x; j < N; j += BLOCK) {
        const float g = widen(dy[j]) * widen(w[j]);
        along += g * (widen(x[j]) - m) * r;
        sum += g;
    }
    along = lanes_sum(along), sum = lanes_sum(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float2(along, sum);
    __syncthreads();
    along = sum = 0;
    for (int i = 0; i < BLOCK / 32; i++) along += parts[i].x, sum += parts[i].y;
    along /= N, sum /= N;
    for (int64_t j = threadIdx.x; j < N; j += BLOCK)
        dx[j] = narrow<T>(r * (widen(dy[j]) * widen(w[j]) - (widen(x[j]) - m) * r * along - sum));
}

template <typename T>
__global__ void dw_db_kernel(const T* dy, const T* x, const float* mean, const float* rstd, T* dw, T* db, int64_t M,
                             int64_t N) {
    __shared__ float2 parts[8][32];
    const int64_t column = blockIdx.x * int64_t(32) + threadIdx.x;
    float dw_sum = 0, db_sum = 0;
    for (int64_t row = threadIdx.y; row < M && column < N; row += 8) {
        const float d = widen(dy[row * N + column]);
        dw_sum += d * (widen(x[row * N + column]) - mean[row]) * rstd[row];
        db_sum += d;
    }
    parts[threadIdx.y][threadIdx.x] = make_float2(dw_sum, db_sum);
    __syncthreads();
    if (threadIdx.y != 0 || column >= N) return;
    dw_sum = db_sum = 0;
    for (int i = 0; i < 8; i++) dw_sum += parts[i][threadIdx.x].x, db_sum += parts[i][threadIdx.x].y;
    dw[column] = narrow<T>(dw_sum);
    db[column] = narrow<T>(db_sum);
}

template <typename T>
void layernorm_backward_naive(const Task<T>& t, cudaStream_t stream) {
    if (t.N == 0) return;
    if (!no_rows(t.M, t.N)) dx_kernel<<<t.M, BLOCK, 0, stream>>>(t.dy, t.x, t.w, t.mean, t.rstd, t.dx, t.N);
    const dim3 block(32, 8);
    dw_db_kernel<<<course::ceil_div(t.N, 32), block, 0, stream>>>(t.dy, t.x, t.mean, t.rstd, t.dw, t.db, t.M, t.N);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T, int K>
struct Rows {  // the rows that a thread has in flight: slots [2 * stages][K][threads]
    uint4* slots;
    const T *dy, *x;
    Share share;

    __device__ __forceinline__ uint4* slot(int which, int k) const {
        return &slots[(which * K + k) * blockDim.x + threadIdx.x];
    }
    __device__ __forceinline__ void fetch(int stage, int64_t row, bool there) const {
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int i = share.first + k * share.step;
            if (!there || i >= share.end) continue;
            const int64_t from = row * share.n + int64_t(i) * VEC<T>;
            __pipeline_memcpy_async(slot(2 * stage, k), dy + from, 16);
            __pipeline_memcpy_async(slot(2 * stage + 1, k), x + from, 16);
        }
        __pipeline_commit();  // whether there was a row or not: wait_prior counts commits
    }
    __device__ __forceinline__ void take(uint4 (&v)[K], int which) const {
#pragma unroll
        for (int k = 0; k < K; k++)
            v[k] = share.first + k * share.step < share.end ? *slot(which, k) : make_uint4(0, 0, 0, 0);
    }
};

// A thread's part of the two sums, and of dw and db. Past the end dy is 0, and so is every product.
template <typename T, int K>
__device__ __forceinline__ float2 accumulate(const uint4 (&dy)[K], const uint4 (&x)[K], const uint4 (&w)[K], float mean,
                                             float rstd, float (&dw)[K][VEC<T>], float (&db)[K][VEC<T>]) {
    float2 sums = {0, 0};
#pragma unroll
    for (int k = 0; k < K; k++) {
        float d[VEC<T>], f[VEC<T>], scale[VEC<T>];
        unpack<T>(dy[k], d), unpack<T>(x[k], f), unpack<T>(w[k], scale);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++) {
            const float x_hat = (f[e] - mean) * rstd, g = d[e] * scale[e];
            sums.x += g * x_hat;
            sums.y += g;
            dw[k][e] += d[e] * x_hat;
            db[k][e] += d[e];
        }
    }
    return {lanes_sum(sums.x), lanes_sum(sums.y)};
}

template <typename T, int K>
__device__ __forceinline__ void store_dx(const uint4 (&dy)[K], const uint4 (&x)[K], const uint4 (&w)[K], float mean,
                                         float rstd, float2 means, T* dx, const Share& share) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        float d[VEC<T>], f[VEC<T>], scale[VEC<T>];
        unpack<T>(dy[k], d), unpack<T>(x[k], f), unpack<T>(w[k], scale);
#pragma unroll
        for (int e = 0; e < VEC<T>; e++)
            d[e] = rstd * (d[e] * scale[e] - (f[e] - mean) * rstd * means.x - means.y);
        const int i = share.first + k * share.step;
        if (i < share.end) store_vector<T>(d, dx, share.n, i, true);
    }
}

// to += (or =) what this thread has of dw and db; db lies `apart` floats behind dw.
template <typename T, int K>
__device__ __forceinline__ void add_to(float* to, int64_t apart, bool first, const float (&dw)[K][VEC<T>],
                                       const float (&db)[K][VEC<T>], const Share& share) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int i = share.first + k * share.step;
        if (i >= share.end) continue;
#pragma unroll
        for (int e = 0; e < VEC<T>; e += 4) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float4* at = reinterpret_cast<float4*>(to + side * apart + i * VEC<T> + e);
                const float* f = side ? &db[k][e] : &dw[k][e];
                const float4 old = first ? make_float4(0, 0, 0, 0) : *at;
                *at = make_float4(old.x + f[0], old.y + f[1], old.z + f[2], old.w + f[3]);
            }
        }
    }
}

#ifndef COURSE_EXTENSION
template <typename T>
using BackwardRungs = std::vector<std::pair<std::string, void (*)(const Task<T>&, cudaStream_t)>>;

// Checks every rung on [M, N] against a loop in double (the last rows of dx; all of dw and db), then times them.
template <typename T>
void run_backward(const BackwardRungs<T>& rungs, int64_t M, int64_t N, int64_t scratch, bool timed = false) {
    std::printf("\n[%lld, %lld] %s\n", (long long)M, (long long)N, sizeof(T) == 4 ? "fp32" : "bf16");
    const auto values = [](int64_t count, unsigned seed, float mean, float deviation) {
        const std::vector<float> some = course::random(std::min<int64_t>(count, 1000003), seed, mean, deviation);
        std::vector<T> all;
        for (int64_t i = 0; i < count; i++) all.push_back(narrow<T>(some[i % some.size()]));
        return all;
    };
    // dy is not centred: with a mean of 0 a forgotten mean(g) would hide in the noise.
    const std::vector<T> dy = values(M * N, 13, 0.5f, 1), x = values(M * N, 14, 1, 2), w = values(N, 15, 1, 0.3f);
    std::vector<float> mean(M), rstd(M);
    std::vector<double> dx, dw(N), db(N);
    const int64_t from = std::max<int64_t>(0, M - 1 - 200000 / N), step = timed ? std::max<int64_t>(1, M * N >> 24) : 1;
    for (int64_t row = 0; row < M; row++) {  // any numbers will do: they need not be those of x
        mean[row] = 1 + 0.01f * float(row % 7), rstd[row] = 0.5f + 0.01f * float(row % 5);
        double along = 0, sum = 0;
        const auto x_hat = [&](int64_t j) { return (double(widen(x[row * N + j])) - mean[row]) * rstd[row]; };
        const auto g = [&](int64_t j) { return double(widen(dy[row * N + j])) * widen(w[j]); };
        if (step == 1)
            for (int64_t j = 0; j < N; j++) {
                dw[j] += widen(dy[row * N + j]) * x_hat(j);
                db[j] += widen(dy[row * N + j]);
            }
        if (row < from) continue;
        for (int64_t j = 0; j < N; j++) along += g(j) * x_hat(j) / double(N), sum += g(j) / double(N);
        for (int64_t j = 0; j < N; j++) dx.push_back(rstd[row] * (g(j) - x_hat(j) * along - sum));
    }
    const course::Buffer<T> d_dy(dy), d_x(x), d_w(w);
    const course::Buffer<float> d_mean(mean), d_rstd(rstd);
    course::Buffer<T> d_dx(dy.size()), d_dw(N), d_db(N);
    course::Buffer<float> partials(scratch);
    const Task<T> task = {d_dy, d_x, d_w, d_mean, d_rstd, d_dx, d_dw, d_db, partials, M, N};
    const auto last = [](const std::vector<T>& all, size_t count) {
        std::vector<float> found;
        for (size_t i = all.size() - count; i < all.size(); i++) found.push_back(widen(all[i]));
        return found;
    };
    std::vector<course::Version> versions;
    for (const auto& [name, rung] : rungs) {
        d_dx.poison(), d_dw.poison(), d_db.poison(), partials.poison();
        rung(task, nullptr);
        const double tolerance = sizeof(T) == 4 ? 1e-5 : 1e-2;
        course::check(name, last(d_dx.host(), dx.size()), dx, tolerance);
        if (step == 1) {  // a sum of M terms: its error grows with their size, not its own
            course::check(name + ", dw", last(d_dw.host(), N), dw, tolerance, std::sqrt(double(M)));
            course::check(name + ", db", last(d_db.host(), N), db, tolerance, std::sqrt(double(M)));
        }
        versions.push_back({name, [task, f = rung](cudaStream_t stream) { f(task, stream); }});
    }
    if (timed) course::time_versions(versions, {.bytes = 3.0 * double(M * N) * sizeof(T)});
}
#endif
