// A tile library from four instructions: cp.async, ldmatrix, mma.sync and a store. (cuda_src/include/mma.cuh has their
// wrappers and their emulation.) A tile is a type, which fixes its memory and its layout:
//
//     Matrix<T>                 device memory, row by row, with its size
//     SharedTile<T, R, C>       shared memory, R rows of C, in swizzled pieces of 16 bytes
//     Left<T, R, K>             registers of a warp: A's fragments of mma.m16n8k16
//     Right<T, K, C>            registers of a warp: B's
//     Sums<R, C>                registers of a warp: C's, fp32
//
// The whole block calls load_async and store of a SharedTile; one warp calls each other function. All sizes are
// template arguments and all loops unroll, so at run time no trace of the types is left. A Sums<64, 32> is 64 registers
// of a lane, and a load of a Left is ldmatrix and an exclusive or. The library does no synchronisation. The kernel says
// when a tile is complete and when it may be overwritten (commit, wait, __syncthreads).
#pragma once
#include "course.cuh"
#include "mma.cuh"

namespace tiles {

template <typename T>
struct Matrix {
    T* data;
    int64_t rows, cols;  // cols is a multiple of 8: a piece of 16 bytes is all inside or all outside

    __device__ __forceinline__ bool holds(int64_t row, int64_t col) const { return row < rows && col < cols; }
    __device__ __forceinline__ T* at(int64_t row, int64_t col) const { return data + row * cols + col; }
};

// ---- shared memory --------------------------------------------------------------------------------------------------

// Rows of 128 bytes or a multiple. ldmatrix reads one piece of 16 bytes from each of eight rows at once. Without a
// swizzle the eight would be in the same four banks. So piece p of row r is stored at place p ^ (r % 8) of its eight.
//
//     place        0  1  2  3  4  5  6  7        piece 0 of rows 0 to 7 is in eight different places:
//     row 0        0  1  2  3  4  5  6  7        no bank conflict
//     row 1        1  0  3  2  5  4  7  6
//     row 2        2  3  0  1  6  7  4  5
template <typename T, int R, int C>
struct SharedTile {
    static constexpr int ROWS = R, COLS = C, PIECES = C / 8;
    static_assert(C % 64 == 0, "rows of 128 bytes or a multiple");
    alignas(128) T data[R * C];

    static __device__ __forceinline__ uint32_t place(int row, int piece) {  // in bytes
        return uint32_t(row * C * sizeof(T) + ((piece ^ (row & 7)) << 4));
    }
    __device__ __forceinline__ char* piece(int row, int piece) {
        return reinterpret_cast<char*>(data) + place(row, piece);
    }
};

// THREADS threads start to copy the tile of `from` with first element (row, col); zeros outside of the matrix.
template <int THREADS, typename T, int R, int C>
__device__ __forceinline__ void load_async(SharedTile<T, R, C>& to, const Matrix<const T>& from, int64_t row,
                                           int64_t col) {
    constexpr int PIECES = C / 8;
    static_assert(R * PIECES % THREADS == 0, "every thread copies as many pieces");
#pragma unroll
    for (int i = 0; i < R * PIECES / THREADS; i++) {
        const int r = (threadIdx.x + i * THREADS) / PIECES, p = (threadIdx.x + i * THREADS) % PIECES;
        const bool inside = from.holds(row + r, col + 8 * p);
        tensor::copy_16(to.piece(r, p), inside ? from.at(row + r, col + 8 * p) : from.data, inside);
    }
}

// commit: this thread's copies since the last commit are one group. wait: all its groups but the newest KEEP are done.
// Copies of other threads may still be in flight.
__device__ __forceinline__ void commit() { __pipeline_commit(); }
template <int KEEP = 0>
__device__ __forceinline__ void wait() {
    __pipeline_wait_prior(KEEP);
}

// ---- registers ------------------------------------------------------------------------------------------------------
// A table of the PTX ISA says which lane holds which element (mma.cuh quotes it). Only this part of the file uses it.

template <typename T, int R, int K>
struct Left {
    uint32_t at[R / 16][K / 16][4];
};
template <typename T, int K, int C>
struct Right {
    uint32_t at[K / 16][C / 16][4];  // two fragments of 8 columns side by side
};
template <int R, int C>
struct Sums {
    float at[R / 16][C / 8][4] = {};
};

// The rows from `row` and the columns from `k` on of a shared tile. Lane l passes the address of row l % 16 of the left
// (l < 16) or the right eight columns. The instruction gives each lane its elements of the four 8 x 8 parts.
template <int R, int K, typename T, int ROWS, int COLS>
__device__ __forceinline__ Left<T, R, K> left(const SharedTile<T, ROWS, COLS>& from, int row, int k) {
    const int lane = threadIdx.x % 32;
    const tensor::Address tile = tensor::address(from.data);
    Left<T, R, K> to;
#pragma unroll
    for (int m = 0; m < R / 16; m++)
#pragma unroll
        for (int i = 0; i < K / 16; i++)
            tensor::ldmatrix<false>(to.at[m][i], tile + from.place(row + 16 * m + lane % 16, k / 8 + 2 * i + lane / 16));
    return to;
}

// The same for B. Its fragments are pairs down a column, but its rows are contiguous in memory: ldmatrix transposes.
template <int K, int C, typename T, int ROWS, int COLS>
__device__ __forceinline__ Right<T, K, C> right(const SharedTile<T, ROWS, COLS>& from, int k, int col) {
    const int lane = threadIdx.x % 32;
    const tensor::Address tile = tensor::address(from.data);
    Right<T, K, C> to;
#pragma unroll
    for (int i = 0; i < K / 16; i++)
#pragma unroll
        for (int n = 0; n < C / 16; n++)
            tensor::ldmatrix<true>(to.at[i][n], tile + from.place(k + 16 * i + lane % 16, col / 8 + 2 * n + lane / 16));
    return to;
}

// c += a b
template <typename T, int R, int K, int C>
__device__ __forceinline__ void mma(Sums<R, C>& c, const Left<T, R, K>& a, const Right<T, K, C>& b) {
#pragma unroll
    for (int i = 0; i < K / 16; i++)
#pragma unroll
        for (int m = 0; m < R / 16; m++)
#pragma unroll
            for (int n = 0; n < C / 8; n++)
                tensor::mma<T>(c.at[m][n], a.at[m][i], b.at[i][n / 2][n % 2 * 2], b.at[i][n / 2][n % 2 * 2 + 1]);
}

// ---- back -----------------------------------------------------------------------------------------------------------

// Round and store to the rows and columns from (row, col) on that the matrix has. A warp writes 16 bytes of each row
// for every 8 columns.
template <typename T, int R, int C>
__device__ __forceinline__ void store(const Matrix<T>& to, const Sums<R, C>& c, int64_t row, int64_t col) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < R / 16; m++)
#pragma unroll
        for (int n = 0; n < C / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t r = row + 16 * m + 8 * half + lane / 4, at = col + 8 * n + lane % 4 * 2;
                if (to.holds(r, at))
                    *reinterpret_cast<uint32_t*>(to.at(r, at)) =
                        tensor::pack<T>(c.at[m][n][2 * half], c.at[m][n][2 * half + 1]);
            }
}

// Round and store into a shared tile, which the block's store then copies to memory in pieces of 16 bytes.
template <typename T, int R, int C, int ROWS, int COLS>
__device__ __forceinline__ void store(SharedTile<T, ROWS, COLS>& to, const Sums<R, C>& c, int row, int col) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < R / 16; m++)
#pragma unroll
        for (int n = 0; n < C / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *reinterpret_cast<uint32_t*>(to.piece(row + 16 * m + 8 * half + lane / 4, col / 8 + n) +
                                             lane % 4 * 4) =
                    tensor::pack<T>(c.at[m][n][2 * half], c.at[m][n][2 * half + 1]);
}

template <int THREADS, typename T, int R, int C>
__device__ __forceinline__ void store(const Matrix<T>& to, SharedTile<T, R, C>& from, int64_t row, int64_t col) {
    constexpr int PIECES = C / 8;
#pragma unroll
    for (int i = 0; i < R * PIECES / THREADS; i++) {
        const int r = (threadIdx.x + i * THREADS) / PIECES, p = (threadIdx.x + i * THREADS) % PIECES;
        if (to.holds(row + r, col + 8 * p))
            *reinterpret_cast<uint4*>(to.at(row + r, col + 8 * p)) = *reinterpret_cast<const uint4*>(from.piece(r, p));
    }
}

}  // namespace tiles
