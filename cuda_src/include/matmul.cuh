// C[M, N] = A[M, K] * B[N, K]^T in bf16, which is x @ w.T in PyTorch: both inputs lie K-major. What main asks (inputs,
// a loop on the CPU, cuBLAS beside it), and what Hopper kernels say with it: Ring, aligned, store_rows, prepare.
#pragma once
#include <cuda_bf16.h>

#include "course.cuh"
#ifndef COURSE_EMULATED
#include <dlfcn.h>

#include "hopper.cuh"
#endif

namespace matmul {

using bf16 = __nv_bfloat16;
using Launcher = void (*)(const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, cudaStream_t);

// Close to normal (the sum of four uniform numbers), deviation 1, made where they are needed: 2^28 of them from a host
// would take longer than everything else. Never zeros: a GPU that multiplies zeros stays cooler and runs faster.
__global__ void fill_kernel(bf16* x, int64_t n, uint64_t seed) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
        uint64_t z = uint64_t(i) * 0x9E3779B97F4A7C15u + seed;  // SplitMix64 (Steele, Lea, Flood 2014)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        const float sum = float(z & 0xFFFF) + float(z >> 16 & 0xFFFF) + float(z >> 32 & 0xFFFF) + float(z >> 48);
        x[i] = __float2bfloat16((sum - 2 * 65535.0f) / 37837.0f);
    }
}

struct Problem {
    int64_t m, n, k;
    course::Buffer<bf16> a, b, c;

    Problem(int64_t m, int64_t n, int64_t k) : m(m), n(n), k(k), a(m * k), b(n * k), c(m * n) {
        fill_kernel<<<course::emulated ? 2 : 1024, 256>>>(a, m * k, 1);
        fill_kernel<<<course::emulated ? 2 : 1024, 256>>>(b, n * k, 2);
        CUDA_CHECK(cudaGetLastError());
    }

    static std::vector<float> floats(const course::Buffer<bf16>& buffer) {
        const std::vector<bf16> values = buffer.host();
        std::vector<float> wide(values.size());
        for (size_t i = 0; i < wide.size(); i++) wide[i] = __bfloat162float(values[i]);
        return wide;
    }

    // Every element of a small result; of a large one the first and last rows' corners and some 2000 more.
    void check(const std::vector<std::pair<const char*, Launcher>>& versions) {
        const std::vector<float> x = floats(a), w = floats(b);
        std::vector<int64_t> where;
        const int64_t step = std::max<int64_t>(1, double(m) * n * k < 1e8 ? 1 : m * n / 2000);
        for (int64_t i = 0; i < m * n; i += step) where.push_back(i);
        if (m * n > 0) where.push_back(m * n - 1);
        std::vector<double> expected;
        for (int64_t i : where) {
            double sum = 0;
            for (int64_t j = 0; j < k; j++) sum += double(x[i / n * k + j]) * w[i % n * k + j];
            expected.push_back(sum);
        }
        for (const auto& [name, launch] : versions) {
            c.poison();
            launch(a, b, c, m, n, k, nullptr);
            const std::vector<bf16> all = c.host();
            std::vector<float> got;
            for (int64_t i : where) got.push_back(__bfloat162float(all[i]));
            course::check(name, got, expected, 0.004);  // half a unit in the last of bf16's 8 bits is 0.0039
            for (bf16 value : all)
                course::require(!std::isnan(__bfloat162float(value)), "an element is NaN: nobody wrote it");
        }
    }

    course::Version timed(const char* name, Launcher launch) {
        return {name, [this, launch](cudaStream_t s) { launch(a, b, c, m, n, k, s); }};
    }
};

constexpr int BK = 64;  // columns of a tile of A or B: 64 bf16 are 128 bytes, the longest row that a swizzle knows

// Two neighbours of a row of C. n is even wherever the pair may be stored at once.
__device__ __forceinline__ void store_pair(bf16* c, int64_t row, int64_t col, int64_t m, int64_t n, float x, float y) {
    if (row >= m || col >= n) return;
    bf16* to = c + row * n + col;
    if (n % 2 == 0) {
        *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
    } else {
        to[0] = __float2bfloat16(x);
        if (col + 1 < n) to[1] = __float2bfloat16(y);
    }
}

#ifndef COURSE_EMULATED
// cuBLAS, found when the program runs, so that it builds and runs where there is none. Numbers: library_types.h (14 is
// CUDA_R_16BF) and cublas_api.h (68 CUBLAS_COMPUTE_32F, 1 and 0 transposed or not, -1 the library's own choice).
class Cublas {
  public:
    Cublas() {
        for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"})
            if (!library_) library_ = dlopen(name, RTLD_NOW);
        if (!library_) return;
        create_ = reinterpret_cast<decltype(create_)>(dlsym(library_, "cublasCreate_v2"));
        set_stream_ = reinterpret_cast<decltype(set_stream_)>(dlsym(library_, "cublasSetStream_v2"));
        gemm_ = reinterpret_cast<decltype(gemm_)>(dlsym(library_, "cublasGemmEx"));
        course::require(create_(&handle_) == 0, "cublasCreate failed");
    }

    explicit operator bool() const { return library_; }

    // cuBLAS counts in columns: its C is our C transposed, B (transposed again) times A.
    void operator()(const bf16* a, const bf16* b, bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) const {
        const float one = 1, zero = 0;
        set_stream_(handle_, stream);
        const int status = gemm_(handle_, 1, 0, int(n), int(m), int(k), &one, b, 14, int(k), a, 14, int(k), &zero, c,
                                 14, int(n), 68, -1);
        course::require(status == 0, "cublasGemmEx failed");
    }

  private:
    void *library_ = nullptr, *handle_ = nullptr;
    int (*create_)(void**) = nullptr;
    int (*set_stream_)(void*, cudaStream_t) = nullptr;
    int (*gemm_)(void*, int, int, int, int, int, const float*, const void*, int, int, const void*, int, int,
                 const float*, void*, int, int, int, int) = nullptr;
};

// Checks and times the versions beside cuBLAS on square matrices.
inline void race(const std::vector<std::pair<const char*, Launcher>>& versions, const std::vector<int64_t>& sizes) {
    const Cublas cublas;
    for (int64_t size : sizes) {
        Problem p(size, size, size);
        std::printf("M = N = K = %d\n", int(size));
        p.check(versions);
        std::vector<course::Version> timed;
        for (const auto& [name, launch] : versions) timed.push_back(p.timed(name, launch));
        if (cublas) timed.push_back({"cuBLAS", [&](cudaStream_t s) { cublas(p.a, p.b, p.c, size, size, size, s); }});
        course::time_versions(timed, {.flops = 2.0 * size * size * size});
    }
}

constexpr int CONSUMERS = 2;  // warpgroups that multiply; one more loads

template <int Stages>
struct Ring {  // a place in a ring of stages, and the parity of the round
    int stage = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
    __device__ int before() const { return (stage + Stages - 1) % Stages; }
};

// Dynamic shared memory begins at a multiple of 16 bytes, a swizzled tile at one of 1024: each launch asks for 1024
// more.
template <typename Shared>
__device__ __forceinline__ Shared& aligned(unsigned char* shared) {
    return *reinterpret_cast<Shared*>(shared + (1024 - hopper::address(shared) % 1024) % 1024);
}

// A warpgroup's 64xN result, from wgmma's registers to C at (row0, col0). A row gets 16 bytes of each 8 columns: 8
// half-used sectors a request, which is what v4 mends.
template <int N>
__device__ __forceinline__ void store_rows(const float (&d)[N / 2], bf16* c, int64_t row0, int64_t col0, int64_t m,
                                           int64_t n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int64_t row = row0 + 16 * warp + lane / 4, col = col0 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        store_pair(c, row, col + 8 * j, m, n, d[4 * j], d[4 * j + 1]);
        store_pair(c, row + 8, col + 8 * j, m, n, d[4 * j + 2], d[4 * j + 3]);
    }
}

// What TMA and this ladder ask of a shape. True if there is something to multiply.
inline bool prepare(bf16* c, int64_t m, int64_t n, int64_t k, cudaStream_t stream) {
    course::require(hopper::is_hopper(), "wgmma and the copy engine need a Hopper GPU (sm_90): take matmul_mma");
    course::require(std::max({m, n, k}) < int64_t(1) << 31, "a dimension is 2^31 or more: split the matrices");
    if (m == 0 || n == 0) return false;
    if (k == 0) CUDA_CHECK(cudaMemsetAsync(c, 0, m * n * sizeof(bf16), stream));  // a sum of nothing
    return k > 0;
}
#endif

}  // namespace matmul
