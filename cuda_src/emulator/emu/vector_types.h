// float4 and its family. A copy of one is ONE access of its whole size, as on the GPU. g++ would read the parts one by
// one, unlike a GPU's compiler, so copies go through a type of that size.
#pragma once
#include <cstdint>

namespace emu {
template <int BYTES>
struct Wide;
template <>
struct Wide<2> {
    typedef uint16_t type __attribute__((may_alias));
};
template <>
struct Wide<4> {
    typedef uint32_t type __attribute__((may_alias));
};
template <>
struct Wide<8> {
    typedef uint64_t type __attribute__((may_alias));
};
template <>
struct Wide<16> {
    typedef float type __attribute__((vector_size(16), may_alias));
};
}  // namespace emu

// For any struct of 2, 4, 8 or 16 bytes that kernels load whole.
#define EMU_WIDE_COPY(Type, BYTES)                                               \
    Type() = default;                                                            \
    __attribute__((always_inline)) Type(const Type& other) {                     \
        *(emu::Wide<BYTES>::type*)this = *(const emu::Wide<BYTES>::type*)&other; \
    }                                                                            \
    __attribute__((always_inline)) Type& operator=(const Type& other) {          \
        *(emu::Wide<BYTES>::type*)this = *(const emu::Wide<BYTES>::type*)&other; \
        return *this;                                                            \
    }

#define EMU_VECTOR1(NAME, T) \
    struct NAME##1 { T x; }; \
    static inline NAME##1 make_##NAME##1(T x) { return {x}; }
#define EMU_VECTOR2(NAME, T)                        \
    struct alignas(2 * sizeof(T)) NAME##2 {         \
        T x, y;                                     \
        constexpr NAME##2(T x, T y) : x(x), y(y) {} \
        EMU_WIDE_COPY(NAME##2, 2 * sizeof(T))       \
    };                                              \
    static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }
#define EMU_VECTOR3(NAME, T)       \
    struct NAME##3 { T x, y, z; }; \
    static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }
#define EMU_VECTOR4(NAME, T)                                              \
    struct alignas(4 * sizeof(T)) NAME##4 {                               \
        T x, y, z, w;                                                     \
        constexpr NAME##4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} \
        EMU_WIDE_COPY(NAME##4, 4 * sizeof(T))                             \
    };                                                                    \
    static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMU_VECTORS(NAME, T) EMU_VECTOR1(NAME, T) EMU_VECTOR2(NAME, T) EMU_VECTOR3(NAME, T)

EMU_VECTORS(char, signed char)
EMU_VECTOR4(char, signed char)
EMU_VECTORS(uchar, unsigned char)
EMU_VECTOR4(uchar, unsigned char)
EMU_VECTORS(short, short)
EMU_VECTOR4(short, short)
EMU_VECTORS(ushort, unsigned short)
EMU_VECTOR4(ushort, unsigned short)
EMU_VECTORS(int, int)
EMU_VECTOR4(int, int)
EMU_VECTORS(uint, unsigned int)
EMU_VECTOR4(uint, unsigned int)
EMU_VECTORS(long, long)
EMU_VECTORS(ulong, unsigned long)
EMU_VECTORS(longlong, long long)
EMU_VECTORS(ulonglong, unsigned long long)
EMU_VECTORS(float, float)
EMU_VECTOR4(float, float)
EMU_VECTORS(double, double)

struct alignas(16) double4 {  // 32 bytes: two accesses on the GPU as well
    double x, y, z, w;
};
static inline double4 make_double4(double x, double y, double z, double w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    operator uint3() const { return {x, y, z}; }
};
