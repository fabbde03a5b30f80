// Transpose: the same bytes in another order
// ==========================================
//
// y[c][r] = x[r][c] for a matrix of M rows and N columns reads 4MN bytes and writes 4MN. At the speed of a copy (4.2
// TB/s on an H200) that is 0.13 ms at 8192 x 8192 and 0.51 ms at 16384 x 16384. Nothing is computed. But neighbours in
// x are far apart in y. A warp that reads along a row of x writes down a column of y: 32 addresses in 32 sectors of 32
// bytes, and it uses 4 bytes of each. Shared memory helps: there a column costs as little as a row, once its 32 words
// are in 32 different banks. Two counts describe each rung. The first is sectors per request of a warp: 4 is perfect
// for 4 bytes per lane, 16 for 16 bytes. The second is wavefronts per access to shared memory. A wavefront is one pass
// over the 32 banks, 128 bytes, so 1 and 4 are perfect.
//
// You will be able to: count the sectors and wavefronts of an access; remove bank conflicts with padding or a swizzle.
//
// Sources: M. Harris, "An Efficient Matrix Transpose in CUDA C/C++" (2013); Ruetsch and Micikevicius, "Optimizing
// Matrix Transpose in CUDA" (2009).
//
// Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o transpose cuda_src/13_transpose.cu
// Run:      ./transpose                             (checks every version, then times them all)
// No GPU:   python3 course.py run 13_transpose      (the same kernels, emulated and checked against PyTorch)
// Time it:  python3 course.py bench 13_transpose
#include "course.cuh"

constexpr int TILE = 32;  // a warp's width
constexpr int ROWS = 8;   // warps in a block: 256 threads, of which each owns 4 elements of a tile

// Which tile of x a block owns. The grid has one dimension, for the other two end at 65535: M and N do not.
struct Corner {
    int64_t row, column;
};

__device__ Corner corner(int64_t N, int tile) {
    const unsigned across = unsigned((N + tile - 1) / tile);
    return {int64_t(blockIdx.x / across) * tile, int64_t(blockIdx.x % across) * tile};
}

// v7. The same, the tiles taken one below the other.
__device__ Corner corner_down(int64_t M, int tile) {
    const unsigned down = unsigned((M + tile - 1) / tile);
    return {int64_t(blockIdx.x % down) * tile, int64_t(blockIdx.x / down) * tile};
}

int64_t tiles(int64_t M, int64_t N, int tile) {
    const int64_t count = course::ceil_div(M, tile) * course::ceil_div(N, tile);
    course::require(count < (int64_t(1) << 31), "a grid has at most 2^31 - 1 blocks, and this matrix has more tiles");
    return count;
}

// v1. A warp reads 32 neighbours of a row and writes them to y, M words apart. Predicted: 4 sectors a read, 32 sectors
// a write. The eight warps of a block fill the same sectors one after another, so HBM traffic is little more than 4MN
// bytes each way. But L2 takes one sector a clock and slice, here for 4 bytes: a quarter of a copy's speed.
__global__ void transpose_read_kernel(const float* __restrict__ x, float* __restrict__ y,  // [M, N] -> [N, M]
                                      int64_t M, int64_t N) {
    const Corner at = corner(N, TILE);
    const int64_t c = at.column + threadIdx.x;
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS)
        if (const int64_t r = at.row + threadIdx.y + k; r < M && c < N) y[c * M + r] = x[r * N + c];
}

void transpose_read(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;  // a grid of no blocks is an error
    transpose_read_kernel<<<tiles(M, N, TILE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v2. New: the other way round, a warp writes 32 neighbours of y and reads down a column of x: 32 sectors a read and 4
// a write. Predicted: faster than v1, though it is the same count. The unused rest of a sector stays in L1, where the
// block's other warps find it; a write goes through to L2 each time. L1 looks up one line a clock, so a read of 128
// bytes takes 32 clocks: 132 SMs * 4 bytes * 1.7 GHz = 0.9 TB/s each way.
__global__ void transpose_write_kernel(const float* __restrict__ x, float* __restrict__ y, int64_t M, int64_t N) {
    const Corner at = corner(N, TILE);
    const int64_t r = at.row + threadIdx.x;  // New
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS)
        if (const int64_t c = at.column + threadIdx.y + k; r < M && c < N) y[c * M + r] = x[r * N + c];
}

void transpose_write(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;
    transpose_write_kernel<<<tiles(M, N, TILE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v3 to v5 differ in one line: the place of element (r, c) of the tile. How a row and a column of 32 fall on 32 banks:
struct Plain {  // a row: banks 0..31; a column: 32 words apart, all in one bank
    static constexpr int words = TILE * TILE;
    static __device__ int at(int r, int c) { return r * TILE + c; }
};
struct Padded {  // a column: 33 words apart, the next bank each time
    static constexpr int words = TILE * (TILE + 1);
    static __device__ int at(int r, int c) { return r * (TILE + 1) + c; }
};
struct Swizzled {  // row r is permuted by XOR with r: both a row and a column meet each bank once
    static constexpr int words = TILE * TILE;
    static __device__ int at(int r, int c) { return r * TILE + (c ^ r); }
};

// v3. New: shared memory. Warps read rows of a tile, wait for each other, and write columns of it as rows of y: 4
// sectors a request on both sides. But Plain reads its column with 32 wavefronts: an SM passes 128 bytes in 32 clocks.
// Predicted: a little under half of a copy, 132 SMs * 4 bytes * 1.7 GHz = 0.9 TB/s each way.
template <typename Layout>
__global__ void transpose_tile_kernel(const float* x, float* y, int64_t M, int64_t N) {
    __shared__ float tile[Layout::words];
    const Corner from = corner(N, TILE);
    const int lane = threadIdx.x;
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        const int r = threadIdx.y + k;
        if (from.row + r < M && from.column + lane < N)
            tile[Layout::at(r, lane)] = x[(from.row + r) * N + from.column + lane];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        const int c = threadIdx.y + k;
        if (from.column + c < N && from.row + lane < M)
            y[(from.column + c) * M + from.row + lane] = tile[Layout::at(lane, c)];
    }
}

void transpose_tile(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;
    transpose_tile_kernel<Plain><<<tiles(M, N, TILE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v4. New: one word of padding a row. With 4 banks instead of 32, a column [r0] is in one bank, or in all of them:
//
//     v3: rows of 4 words           v4: rows of 5 words, one unused      v5: rows of 4 words, column c at c ^ r
//     bank   0    1    2    3       bank   0    1    2    3              bank   0    1    2    3
//          [00]  01   02   03            [00]  01   02   03                   [00]  01   02   03
//          [10]  11   12   13              -  [10]  11   12                    11  [10]  13   12
//          [20]  21   22   23             13    -  [20]  21                    22   23  [20]  21
//          [30]  31   32   33             22   23    -  [30]                   33   32   31  [30]
//
// Predicted: 1 wavefront a shared access, and HBM is the limit again: nine tenths of a copy. A thread has 4 loads of 4
// bytes in flight, 32 KB per SM, just over the 25 KB of Little's law.
void transpose_padded(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;
    transpose_tile_kernel<Padded><<<tiles(M, N, TILE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v5. New: a permutation instead of the padding. Predicted: v4's speed in 32 rows of 128 bytes, without the 33rd word.
// It matters where the layout cannot be padded: 16-byte words (v6), TMA and tensor cores, which want swizzles like
// this.
void transpose_swizzled(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;
    transpose_tile_kernel<Swizzled><<<tiles(M, N, TILE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

// v6. New: 16 bytes an access, everywhere. A tile is 64 x 64, and a thread owns a square of 4 x 4 of it. It loads four
// float4 (pieces of four rows), transposes the square in its registers, and stores four float4 (pieces of four
// columns) into shared memory. From there the block writes rows of y, 256 bytes each. A float4 takes 4 banks, so a
// tile row of 16 float4 spans the 32 banks twice, and 8 lanes (128 bytes) are served at a time. They store to the same
// float4 column in rows 4 apart. These would be in one group of banks, 8 wavefronts instead of 1; hence the XOR with
// r / 4. Predicted: 16 sectors a request, 4 wavefronts a shared access, both the least there is. 64 KB and more are in
// flight on an SM: a copy's speed.
constexpr int SQUARES = 16;  // along each side of a tile: 16 x 16 threads

__device__ int wide_at(int r, int quad) { return r * SQUARES + (quad ^ (r / 4)); }

template <bool DOWN>
__global__ __launch_bounds__(SQUARES * SQUARES)
void transpose_vectorized_kernel(const float4* x, float4* y, int64_t M4, int64_t N4) {  // [4 M4, N4] -> [4 N4, M4]
    __shared__ float4 tile[4 * SQUARES * SQUARES];  // row r is column r of x's tile
    const Corner from = DOWN ? corner_down(M4, SQUARES) : corner(N4, SQUARES);  // counted in squares
    const int i = threadIdx.y, j = threadIdx.x;
    if (from.row + i < M4 && from.column + j < N4) {  // M and N are multiples of 4: a square is inside or outside
        float4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = x[(4 * (from.row + i) + k) * N4 + from.column + j];
        tile[wide_at(4 * j + 0, i)] = make_float4(v[0].x, v[1].x, v[2].x, v[3].x);
        tile[wide_at(4 * j + 1, i)] = make_float4(v[0].y, v[1].y, v[2].y, v[3].y);
        tile[wide_at(4 * j + 2, i)] = make_float4(v[0].z, v[1].z, v[2].z, v[3].z);
        tile[wide_at(4 * j + 3, i)] = make_float4(v[0].w, v[1].w, v[2].w, v[3].w);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int c = k * SQUARES + i;
        if (4 * from.column + c < 4 * N4 && from.row + j < M4)
            y[(4 * from.column + c) * M4 + from.row + j] = tile[wide_at(c, j)];
    }
}

// A row that begins off a multiple of 16 bytes cannot be read by float4.
bool quads_fit(const float* x, const float* y, int64_t M, int64_t N) {
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(float4) == 0; };
    return M % 4 == 0 && N % 4 == 0 && aligned(x) && aligned(y);
}

template <bool DOWN>
void launch_vectorized(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (M == 0 || N == 0) return;
    transpose_vectorized_kernel<DOWN><<<tiles(M / 4, N / 4, SQUARES), dim3(SQUARES, SQUARES), 0, stream>>>(
        reinterpret_cast<const float4*>(x), reinterpret_cast<float4*>(y), M / 4, N / 4);
    CUDA_CHECK(cudaGetLastError());
}

void transpose_vectorized(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    (quads_fit(x, y, M, N) ? launch_vectorized<false> : transpose_swizzled)(x, y, M, N, stream);  // v5 takes the others
}

// v7. New: another order of the tiles. Blocks start in the order of blockIdx and some 1000 run at a time. If those are
// neighbours along a row of x, each row of it is read in one piece, and y is written in pieces of 256 bytes, a row
// apart. Taken down a column they write whole rows of y, and read x in pieces. The counts are the same. But writes
// wait in L2 and leave it line by line. Opening a DRAM page for a write costs more than for a read, since the bus has
// to change direction. So it is the writes that should be neighbours. Predicted: nothing at 1024 and 2048, where L2
// holds all; 1 to 3% of a copy's speed beyond. Rows of more than 64 KB keep v6's order: there the reads, so far apart,
// cost more than the writes gain.
void transpose_down(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    const auto launch = N <= 16384 ? launch_vectorized<true> : launch_vectorized<false>;
    (quads_fit(x, y, M, N) ? launch : transpose_swizzled)(x, y, M, N, stream);
}

// v8. New: a kernel for the other shapes. Where M is odd, a row of y begins anywhere in a sector of 32 bytes, and so
// does each piece of it that a tile owns. The 128 bytes of v5 are 5 sectors, of which 2 are written in part. L2 has to
// merge those with the neighbour's writes, or to read the rest from DRAM. Pieces twice as long have half as many ends:
// 9 sectors for 256 bytes. Predicted: between v5 and v7, whose loads are four times as wide.
constexpr int WIDE = 64;  // words

__global__ __launch_bounds__(TILE * ROWS)
void transpose_wide_kernel(const float* __restrict__ x, float* __restrict__ y, int64_t M, int64_t N) {
    __shared__ float tile[WIDE * (WIDE + 1)];
    const Corner at = corner_down(M, WIDE);
#pragma unroll
    for (int k = 0; k < WIDE; k += ROWS) {
        const int i = threadIdx.y + k;
#pragma unroll
        for (int c = threadIdx.x; c < WIDE; c += TILE)
            if (at.row + i < M && at.column + c < N) tile[i * (WIDE + 1) + c] = x[(at.row + i) * N + at.column + c];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WIDE; k += ROWS) {
        const int c = threadIdx.y + k;
#pragma unroll
        for (int i = threadIdx.x; i < WIDE; i += TILE)
            if (at.row + i < M && at.column + c < N) y[(at.column + c) * M + at.row + i] = tile[i * (WIDE + 1) + c];
    }
}

void transpose_any(const float* x, float* y, int64_t M, int64_t N, cudaStream_t stream) {
    if (quads_fit(x, y, M, N)) return transpose_down(x, y, M, N, stream);
    if (M == 0 || N == 0) return;
    transpose_wide_kernel<<<tiles(M, N, WIDE), dim3(TILE, ROWS), 0, stream>>>(x, y, M, N);
    CUDA_CHECK(cudaGetLastError());
}

using Launcher = void (*)(const float*, float*, int64_t, int64_t, cudaStream_t);
constexpr std::pair<const char*, Launcher> LADDER[] = {
    {"transpose_read", transpose_read},     {"transpose_write", transpose_write},
    {"transpose_tile", transpose_tile},     {"transpose_padded", transpose_padded},
    {"transpose_swizzled", transpose_swizzled}, {"transpose_vectorized", transpose_vectorized},
    {"transpose_down", transpose_down},     {"transpose_any", transpose_any}};

COURSE_MODULE(m) {
    for (const auto& [name, launcher] : LADDER) bind(m, name, launcher);
}

#ifndef COURSE_EXTENSION
// What y must be.
std::vector<float> transposed(const std::vector<float>& x, int64_t M, int64_t N) {
    std::vector<float> y(x.size());
    for (int64_t r = 0; r < M; r++)
        for (int64_t c = 0; c < N; c++) y[c * M + r] = x[r * N + c];
    return y;
}

int main() try {
    const int64_t large = course::small() ? 96 : 8192;
    // Not square, no multiple of a tile, and of 4 or not; then the size that is timed.
    for (const auto& [M, N] : {std::pair<int64_t, int64_t>{67, 131}, {68, 132}, {1, 33}, {large, large}}) {
        const std::vector<float> host = course::random(M * N, 1), expected = transposed(host, M, N);
        course::Buffer<float> x(host), y(host.size());
        std::vector<course::Version> versions;
        for (const auto& [name, launch] : LADDER) {
            y.poison();
            launch(x, y, M, N, nullptr);
            course::check(name, y.host(), expected, 0.0);
            versions.push_back({name, [&, M = M, N = N, launch = launch](cudaStream_t s) { launch(x, y, M, N, s); }});
        }
        if (M == large) course::time_versions(versions, {.bytes = 8.0 * M * N});
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
#endif
