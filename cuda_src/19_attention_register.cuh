// v3 of 19_flash_attention_v1.cu, and what the scalar versions share.
#pragma once
#include "course.cuh"

constexpr int THREADS = 256;

__host__ __device__ constexpr int tiles_of(int64_t S, int rows) { return int((S + rows - 1) / rows); }

// Folds over the `width` neighbouring lanes that share a row.
__device__ inline float row_max(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ inline float row_sum(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// A tile [rows][WIDTH] in fp32, its rows `pitch` apart: zeros past the last row and past D, which then add nothing.
template <typename T, int ROWS, int WIDTH>
__device__ void fill(float* tile_smem, int pitch, const T* from, int live, int D) {
    for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
        const int row = i / WIDTH, d = i % WIDTH;
        tile_smem[row * pitch + d] = row < live && d < D ? float(from[int64_t(row) * D + d]) : 0.0f;
    }
}

// v3. New: register tiles. A thread owns 8 queries x 4 keys of S and 8 queries x WIDTH/16 columns of O. Sixteen
// threads share 8 queries, and every word that a thread fetches is used 4 to 8 times. P goes through shared memory,
// since another thread needs it, and V takes K's place. Predicted: 128 multiply-adds of a warp are 32 cycles of the
// SM. They need 8 reads of Q, one wavefront each, and 4 of K, two each: 16 wavefronts. So arithmetic is the limit and
// 4 to 5 times v2 is possible.
template <int WIDTH>
struct Tiles {
    static constexpr int ROWS = 128, KEYS = 64, PITCH = WIDTH + 4, P_PITCH = KEYS + 4;  // + 4: the next row's banks
    static constexpr int BYTES = 4 * ((ROWS + KEYS) * PITCH + ROWS * P_PITCH);
};

__device__ inline float4 quad(const float* at) { return *reinterpret_cast<const float4*>(at); }

template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS)
    attention_register_kernel(const T* q, const T* k, const T* v, T* o, float* lse, int S, int D, bool causal,
                              float scale) {
    using Tile = Tiles<WIDTH>;
    extern __shared__ float4 register_smem[];
    float* q_smem = reinterpret_cast<float*>(register_smem);  // [ROWS][PITCH]
    float* kv_smem = q_smem + Tile::ROWS * Tile::PITCH;       // [KEYS][PITCH]
    float* p_smem = kv_smem + Tile::KEYS * Tile::PITCH;       // [ROWS][P_PITCH]
    const int tx = threadIdx.x % 16, row = threadIdx.x / 16 * 8;  // this thread's 8 rows begin at `row`
    const int tiles = tiles_of(S, Tile::ROWS);
    const int64_t base = int64_t(blockIdx.x / tiles) * S;
    const int first = (tiles - 1 - int(blockIdx.x) % tiles) * Tile::ROWS;  // causal: the longest rows start first
    const int keys = causal ? min(S, first + Tile::ROWS) : S;
    fill<T, Tile::ROWS, WIDTH>(q_smem, Tile::PITCH, q + (base + first) * D, S - first, D);
    float m[8], l[8] = {}, acc[8][WIDTH / 16] = {};
    for (float& x : m) x = -INFINITY;
    for (int start = 0; start < keys; start += Tile::KEYS) {
        __syncthreads();  // all have read V of the tile before
        fill<T, Tile::KEYS, WIDTH>(kv_smem, Tile::PITCH, k + (base + start) * D, S - start, D);
        __syncthreads();
        float s[8][4] = {};
        for (int d = 0; d < WIDTH; d += 4) {
            float4 b[4];
            for (int j = 0; j < 4; j++) b[j] = quad(kv_smem + (tx + 16 * j) * Tile::PITCH + d);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float4 a = quad(q_smem + (row + i) * Tile::PITCH + d);
                for (int j = 0; j < 4; j++) s[i][j] += a.x * b[j].x + a.y * b[j].y + a.z * b[j].z + a.w * b[j].w;
            }
        }
        __syncthreads();  // K is done with
        fill<T, Tile::KEYS, WIDTH>(kv_smem, Tile::PITCH, v + (base + start) * D, S - start, D);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int seen = causal ? min(S, first + row + i + 1) : S;
            float largest = m[i], sum = 0;
            for (int j = 0; j < 4; j++) {
                s[i][j] = start + tx + 16 * j < seen ? s[i][j] * scale : -INFINITY;
                largest = fmaxf(largest, s[i][j]);
            }
            largest = row_max(largest, 16);
            const float shift = largest == -INFINITY ? 0 : largest, correction = expf(m[i] - shift);
            for (int j = 0; j < 4; j++) {
                const float p = expf(s[i][j] - shift);
                p_smem[(row + i) * Tile::P_PITCH + tx + 16 * j] = p;
                sum += p;
            }
            l[i] = l[i] * correction + row_sum(sum, 16);
            for (float& a : acc[i]) a *= correction;
            m[i] = largest;
        }
        __syncthreads();  // P and V are there
        for (int j = 0; j < Tile::KEYS; j += 4) {
            float4 p[8];
            for (int i = 0; i < 8; i++) p[i] = quad(p_smem + (row + i) * Tile::P_PITCH + j);
#pragma unroll
            for (int jj = 0; jj < 4; jj++)
                for (int c = 0; c < WIDTH / 64; c++) {
                    const float4 b = quad(kv_smem + (j + jj) * Tile::PITCH + 4 * tx + 64 * c);
                    for (int i = 0; i < 8; i++) {
                        const float w = jj == 0 ? p[i].x : jj == 1 ? p[i].y : jj == 2 ? p[i].z : p[i].w;
                        acc[i][4 * c] += w * b.x, acc[i][4 * c + 1] += w * b.y;
                        acc[i][4 * c + 2] += w * b.z, acc[i][4 * c + 3] += w * b.w;
                    }
                }
        }
    }
    for (int i = 0; i < 8 && first + row + i < S; i++) {
        for (int c = 0; c < WIDTH / 16; c++) {
            const int d = 4 * tx + 64 * (c / 4) + c % 4;
            if (d < D) o[(base + first + row + i) * D + d] = T(acc[i][c] / l[i]);
        }
        if (tx == 0) lse[base + first + row + i] = m[i] + logf(l[i]);
    }
}

template <typename T, int WIDTH>
void launch_register(const T* q, const T* k, const T* v, T* o, float* lse, int64_t heads, int S, int D, bool causal,
                     float scale, cudaStream_t stream) {
    const int bytes = Tiles<WIDTH>::BYTES;
    CUDA_CHECK(cudaFuncSetAttribute(attention_register_kernel<T, WIDTH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    bytes));
    const int64_t blocks = heads * tiles_of(S, Tiles<WIDTH>::ROWS);
    attention_register_kernel<T, WIDTH><<<blocks, THREADS, bytes, stream>>>(q, k, v, o, lse, S, D, causal, scale);
    CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void attention_register(const T* q, const T* k, const T* v, T* o, float* lse, int64_t heads, int64_t S, int64_t D,
                        bool causal, float scale, cudaStream_t stream) {
    course::require(D <= 128, "attention_register: D must be at most 128, a row's share of registers");
    course::require(heads * tiles_of(S, 128) < int64_t(1) << 31, "attention_register: B * H * S is too large");
    if (heads * S * D == 0) return;
    (D <= 64 ? launch_register<T, 64> : launch_register<T, 128>)(q, k, v, o, lse, heads, S, D, causal, scale, stream);
}
