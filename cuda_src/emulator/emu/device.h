// What a kernel may call beside the C++ standard's mathematics: indices, barriers, bit tricks, fast mathematics.
#pragma once
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "atomics.h"
#include "core.h"
#include "warp.h"

// Functions that return by value, behind names that read as variables: reading one is no access to memory.
#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim \
    emu_block_dim()  // calls, so that the members of cudaLaunchConfig_t with these names can be calls as well
#define gridDim emu_grid_dim()
EMU_INLINE dim3 emu_block_dim() { return emu::block_size(); }
EMU_INLINE dim3 emu_grid_dim() { return emu::grid_size(); }
constexpr int warpSize = 32;

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__ const
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) alignas(n)
#define __builtin_align__(n) alignas(n)
#ifndef __CUDACC_VER_MAJOR__
#define __CUDACC_VER_MAJOR__ 13
#endif
#define __syncthreads() ((void)emu::barrier(0, "__syncthreads"))
#define __syncthreads_count(p) (emu::barrier((p) != 0, "__syncthreads_count"))
#define __syncthreads_or(p) (emu::barrier((p) != 0, "__syncthreads_or") != 0)
#define __syncthreads_and(p) (emu::barrier((p) == 0, "__syncthreads_and") == 0)
#define __trap() (emu::trap("__trap"))
#define __builtin_assume(condition) ((void)0)

namespace emu {

template <typename T, typename Tag>
EMU_INLINE T& shared(
    const char* name, Tag,
    size_t alignment = alignof(T)) {  // Tag: a lambda's type, one for each declaration and template instance
    static const char key = 0;
    return *static_cast<T*>(shared_memory(&key, sizeof(T), alignment, name));
}
template <typename T>
EMU_INLINE T* dynamic_shared() {
    return static_cast<T*>(dynamic_shared_memory());
}

template <typename A, typename B>
using Common = std::common_type_t<A, B>;
template <typename A, typename B>
using IfNumbers = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, Common<A, B>>;

}  // namespace emu

template <typename A, typename B>
constexpr emu::IfNumbers<A, B> min(A a, B b) {
    using T = emu::Common<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
constexpr emu::IfNumbers<A, B> max(A a, B b) {
    using T = emu::Common<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(unsigned(x))) << 32 | __brev(unsigned(x >> 32));
}
EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return unsigned(((static_cast<unsigned long long>(high) << 32 | low) << (n & 31)) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return unsigned((static_cast<unsigned long long>(high) << 32 | low) >> (n & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return r;
}
EMU_INLINE int __mulhi(int a, int b) { return int((static_cast<long long>(a) * b) >> 32); }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return unsigned((static_cast<unsigned long long>(a) * b) >> 32);
}
EMU_INLINE int __mul24(int a, int b) { return a * b; }
EMU_INLINE unsigned __umul24(unsigned a, unsigned b) { return a * b; }

EMU_INLINE float __int_as_float(int x) { return emu::from_bits<float>(emu::to_bits(x)); }
EMU_INLINE float __uint_as_float(unsigned x) { return emu::from_bits<float>(emu::to_bits(x)); }
EMU_INLINE int __float_as_int(float x) { return emu::from_bits<int>(emu::to_bits(x)); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu::from_bits<unsigned>(emu::to_bits(x)); }
EMU_INLINE double __longlong_as_double(long long x) { return emu::from_bits<double>(emu::to_bits(x)); }
EMU_INLINE long long __double_as_longlong(double x) { return emu::from_bits<long long>(emu::to_bits(x)); }
EMU_INLINE int __float2int_rn(float x) { return int(std::nearbyintf(x)); }
EMU_INLINE int __float2int_rz(float x) { return int(x); }
EMU_INLINE int __float2int_rd(float x) { return int(std::floor(x)); }
EMU_INLINE int __float2int_ru(float x) { return int(std::ceil(x)); }
EMU_INLINE unsigned __float2uint_rn(float x) { return unsigned(std::nearbyintf(x)); }
EMU_INLINE float __int2float_rn(int x) { return float(x); }
EMU_INLINE float __uint2float_rn(unsigned x) { return float(x); }

EMU_INLINE float __expf(float x) { return expf(x); }
EMU_INLINE float __exp10f(float x) { return powf(10.0f, x); }
EMU_INLINE float __logf(float x) { return logf(x); }
EMU_INLINE float __log2f(float x) { return log2f(x); }
EMU_INLINE float __sinf(float x) { return sinf(x); }
EMU_INLINE float __cosf(float x) { return cosf(x); }
EMU_INLINE float __powf(float x, float y) { return powf(x, y); }
EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __fmul_rn(float a, float b) { return a * b; }
EMU_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMU_INLINE float __fsub_rn(float a, float b) { return a - b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
EMU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMU_INLINE float rcbrtf(float x) { return 1.0f / cbrtf(x); }
EMU_INLINE void sincospif(float x, float* s, float* c) {
    *s = sinf(x * 3.14159265358979f), *c = cosf(x * 3.14159265358979f);
}
EMU_INLINE long long clock64() { return emu::clock(); }
EMU_INLINE unsigned long long __globaltimer() { return static_cast<unsigned long long>(emu::clock()); }
EMU_INLINE size_t __cvta_generic_to_shared(const void* p) { return size_t(p); }
