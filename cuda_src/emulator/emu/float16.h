// 16-bit floating types for both headers. Values live in 16 bits. Every operation is done in float and rounded once to
// the type, as by the GPU's own instructions. For +, -, *, / and sqrt that is exact: float has more than twice the
// bits.
#pragma once
#include <cmath>
#include <cstdint>

#include "device.h"

namespace emu {

inline uint16_t half_bits(float f) {  // round to nearest, ties to even; what overflows is infinite
    const uint32_t x = __float_as_uint(f), sign = x >> 16 & 0x8000, magnitude = x & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7fff);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000)  // subnormal: the hardware's float addition does the rounding
        return uint16_t(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000));
    return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
inline float half_value(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) return __uint_as_float(sign | __float_as_uint(float(rest) * 0x1p-24f));
    return __uint_as_float(sign | ((rest << 13) + 0x38000000));
}
inline uint16_t bfloat16_bits(float f) {
    const uint32_t x = __float_as_uint(f);
    if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
inline float bfloat16_value(uint16_t b) { return __uint_as_float(uint32_t(b) << 16); }

}  // namespace emu

#define EMU_OPERATOR(T, op)                                                \
    EMU_INLINE T operator op(T a, T b) { return T(float(a) op float(b)); } \
    EMU_INLINE T& operator op## = (T & a, T b) { return a = a op b; }
#define EMU_COMPARE(T, op, name)                                           \
    EMU_INLINE bool operator op(T a, T b) { return float(a) op float(b); } \
    EMU_INLINE bool __h##name(T a, T b) { return float(a) op float(b); }
#define EMU_UNARY(T, name, expression) \
    EMU_INLINE T h##name(T a) {        \
        const float x = float(a);      \
        return T(expression);          \
    }
#define EMU_PAIR(T, T2, name) \
    EMU_INLINE T2 __h##name##2(T2 a, T2 b) { return T2(__h##name(a.x, b.x), __h##name(a.y, b.y)); }

#define EMU_FLOAT16(T, T2, word)                                                                         \
    struct T {                                                                                           \
        uint16_t emu_bits;                                                                               \
        T() = default;                                                                                   \
        EMU_INLINE_MEMBER T(float f) : emu_bits(emu::word##_bits(f)) {}                                  \
        EMU_INLINE_MEMBER T(double f) : emu_bits(emu::word##_bits(float(f))) {}                          \
        EMU_INLINE_MEMBER T(int i) : emu_bits(emu::word##_bits(float(i))) {}                             \
        EMU_INLINE_MEMBER T(unsigned i) : emu_bits(emu::word##_bits(float(i))) {}                        \
        EMU_INLINE_MEMBER T(long i) : emu_bits(emu::word##_bits(float(i))) {}                            \
        EMU_INLINE_MEMBER operator float() const { return emu::word##_value(emu_bits); }                 \
    };                                                                                                   \
    struct alignas(4) T2 {                                                                               \
        T x, y;                                                                                          \
        EMU_INLINE_MEMBER T2(T x, T y) : x(x), y(y) {}                                                   \
        EMU_WIDE_COPY(T2, 4)                                                                             \
    };                                                                                                   \
    EMU_OPERATOR(T, +)                                                                                   \
    EMU_OPERATOR(T, -)                                                                                   \
    EMU_OPERATOR(T, *)                                                                                   \
    EMU_OPERATOR(T, /)                                                                                   \
    EMU_COMPARE(T, <, lt)                                                                                \
    EMU_COMPARE(T, >, gt)                                                                                \
    EMU_COMPARE(T, <=, le)                                                                               \
    EMU_COMPARE(T, >=, ge)                                                                               \
    EMU_COMPARE(T, ==, eq)                                                                               \
    EMU_COMPARE(T, !=, ne)                                                                               \
    EMU_INLINE T operator-(T a) { return T(-float(a)); }                                                 \
    EMU_INLINE T __hneg(T a) { return T(-float(a)); }                                                    \
    EMU_INLINE T __habs(T a) { return T(std::fabs(float(a))); }                                          \
    EMU_INLINE T __hadd(T a, T b) { return a + b; }                                                      \
    EMU_INLINE T __hsub(T a, T b) { return a - b; }                                                      \
    EMU_INLINE T __hmul(T a, T b) { return a * b; }                                                      \
    EMU_INLINE T __hdiv(T a, T b) { return a / b; }                                                      \
    EMU_INLINE T __hmax(T a, T b) { return T(std::fmax(float(a), float(b))); }                           \
    EMU_INLINE T __hmin(T a, T b) { return T(std::fmin(float(a), float(b))); }                           \
    EMU_INLINE T __hfma(T a, T b, T c) { return T(float(double(float(a)) * float(b) + float(c))); }      \
    EMU_INLINE bool __hisnan(T a) { return std::isnan(float(a)); }                                       \
    EMU_INLINE bool __hisinf(T a) { return std::isinf(float(a)); }                                       \
    EMU_UNARY(T, exp, expf(x))                                                                           \
    EMU_UNARY(T, exp2, exp2f(x))                                                                         \
    EMU_UNARY(T, log, logf(x))                                                                           \
    EMU_UNARY(T, log2, log2f(x))                                                                         \
    EMU_UNARY(T, sqrt, sqrtf(x))                                                                         \
    EMU_UNARY(T, rsqrt, 1.0f / sqrtf(x))                                                                 \
    EMU_UNARY(T, rcp, 1.0f / x)                                                                          \
    EMU_UNARY(T, sin, sinf(x))                                                                           \
    EMU_UNARY(T, cos, cosf(x))                                                                           \
    EMU_UNARY(T, tanh, tanhf(x))                                                                         \
    EMU_PAIR(T, T2, add)                                                                                 \
    EMU_PAIR(T, T2, sub)                                                                                 \
    EMU_PAIR(T, T2, mul)                                                                                 \
    EMU_PAIR(T, T2, max)                                                                                 \
    EMU_PAIR(T, T2, min)                                                                                 \
    EMU_INLINE T2 __h2div(T2 a, T2 b) { return T2(a.x / b.x, a.y / b.y); }                               \
    EMU_INLINE T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); } \
    EMU_INLINE T2 operator+(T2 a, T2 b) { return __hadd2(a, b); }                                        \
    EMU_INLINE T2 operator-(T2 a, T2 b) { return __hsub2(a, b); }                                        \
    EMU_INLINE T2 operator*(T2 a, T2 b) { return __hmul2(a, b); }                                        \
    EMU_INLINE T2 h2exp(T2 a) { return T2(hexp(a.x), hexp(a.y)); }                                       \
    EMU_INLINE T2 h2exp2(T2 a) { return T2(hexp2(a.x), hexp2(a.y)); }                                    \
    EMU_INLINE T __low2##word(T2 a) { return a.x; }                                                      \
    EMU_INLINE T __high2##word(T2 a) { return a.y; }                                                     \
    EMU_INLINE float __low2float(T2 a) { return float(a.x); }                                            \
    EMU_INLINE float __high2float(T2 a) { return float(a.y); }                                           \
    EMU_INLINE T __float2##word(float f) { return T(f); }                                                \
    EMU_INLINE T __float2##word##_rn(float f) { return T(f); }                                           \
    EMU_INLINE T __double2##word(double f) { return T(f); }                                              \
    EMU_INLINE T __int2##word##_rn(int i) { return T(i); }                                               \
    EMU_INLINE float __##word##2float(T a) { return float(a); }                                          \
    EMU_INLINE unsigned short __##word##_as_ushort(T a) { return a.emu_bits; }                           \
    EMU_INLINE short __##word##_as_short(T a) { return short(a.emu_bits); }                              \
    EMU_INLINE T __ushort_as_##word(unsigned short bits) { return emu::from_bits<T>(bits); }             \
    EMU_INLINE T __short_as_##word(short bits) { return emu::from_bits<T>(uint16_t(bits)); }             \
    EMU_INLINE T2 __halves2##word##2(T a, T b) { return T2(a, b); }                                      \
    EMU_INLINE T2 __##word##2##word##2(T a) { return T2(a, a); }                                         \
    EMU_INLINE T2 __float2##word##2_rn(float f) { return T2(T(f), T(f)); }                               \
    EMU_INLINE T2 __floats2##word##2_rn(float a, float b) { return T2(T(a), T(b)); }                     \
    EMU_INLINE T2 __float22##word##2_rn(float2 f) { return T2(T(f.x), T(f.y)); }                         \
    EMU_INLINE float2 __##word##22float2(T2 a) { return float2(float(a.x), float(a.y)); }

#define EMU_INLINE_MEMBER __attribute__((always_inline))
