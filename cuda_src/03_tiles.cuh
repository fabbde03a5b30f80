// What the kernels of the matrix multiply share: where a tile of C is, what a lane owns, 16 bytes at a time.
#pragma once
#include "course.cuh"

// Where in C a block's tile begins. Grids are one-dimensional, tiles row after row: gridDim.y would end at 65,535.
struct Place {
    int64_t row, column;
};

__device__ inline Place place(int64_t n, int tile_m, int tile_n) {
    const int64_t tiles_n = (n + tile_n - 1) / tile_n;
    return {blockIdx.x / tiles_n * tile_m, blockIdx.x % tiles_n * tile_n};
}

inline int64_t count_tiles(int64_t m, int64_t n, int tile_m, int tile_n) {
    return course::ceil_div(m, tile_m) * course::ceil_div(n, tile_n);
}

// A warp as 4 rows of 8 lanes. Bit 0 of the lane is a bit of its row and bit 1 one of its column: see v7.
__device__ inline int lane_row(int thread) { return (thread & 1) + (thread >> 4 & 1) * 2; }
__device__ inline int lane_column(int thread) { return thread >> 1 & 7; }

// Four floats that begin at a multiple of 16 bytes: one access.
__device__ inline float4& quad(float* p) { return *reinterpret_cast<float4*>(p); }
__device__ inline const float4& quad(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void take(float* to, const float* from) {
    const float4 four = quad(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
