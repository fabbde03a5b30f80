// Hopper's own instructions as small functions: barriers in shared memory, copies by TMA, matmuls of a
// warpgroup on the tensor cores (wgmma), clusters, and setmaxnreg. Each comment quotes the title of its section in the
// PTX ISA (chapter 9).
//
// TMA and wgmma access memory through the "async proxy", threads through the "generic" one. Data that one writes and
// the other reads need a fence (fence_async) as well as a barrier. An mbarrier counts two things, arrivals of threads
// and bytes of copies, and its phase ends when both are complete. A waiting thread names the parity (0, 1, 0, ...) of
// the phase that it waits for. So two threads that are never a whole phase apart cannot confuse phases.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "course.cuh"

namespace hopper {

using bf16 = __nv_bfloat16;

// Shared memory has 32-bit addresses of its own, which PTX wants in place of pointers.
__device__ __forceinline__ uint32_t address(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// ---- mbarrier: "Parallel Synchronization and Communication Instructions: mbarrier" ----------------------------------

// `arrivals` that end a phase. One thread does this, and then makes it known with barriers_ready and a barrier of
// threads.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
}

// TMA and the other blocks of the cluster see the barriers as initialised ("membar / fence").
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Arrive, and add to the bytes that this phase waits for. Bytes may arrive before this: then the count is below zero.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrive at the barrier at the same offset in the shared memory of block `rank` of the cluster ("mapa").
// The default scope is .cta. That is enough: after wgmma_wait this thread has no outstanding reads or writes that the
// other block must see. `.release.cluster` would add a GPU-wide fence to each arrival.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(address(barrier)),
        "r"(rank)
        : "memory");
}

// Return when the phase of this parity is over. On a fresh barrier the phase before the first (parity 1) counts as
// over.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done)  // try_wait sleeps in hardware for a while, then says no
        asm volatile(
            "{ .reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(address(barrier)), "r"(parity)
            : "memory");
}

// ---- TMA: "cp.async.bulk.tensor" ------------------------------------------------------------------------------------
// One thread asks for a box of a matrix that a tensor map describes; (column, row) is the box's first element and may
// lie outside. What is outside arrives as zeros, whose bytes count like any others, and is not stored.

__device__ __forceinline__ void load_box(void* shared, const CUtensorMap* map, uint64_t* barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(address(shared)),
        "l"(map), "r"(address(barrier)), "r"(column), "r"(row)
        : "memory");
}

// The same box into each block of the cluster whose bit is set in `blocks`, at the same place, on the same barrier.
__device__ __forceinline__ void load_box_multicast(void* shared, const CUtensorMap* map, uint64_t* barrier, int column,
                                                   int row, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(address(shared)),
        "l"(map), "r"(address(barrier)), "r"(column), "r"(row), "h"(blocks)
        : "memory");
}

// Shared memory to the matrix. The thread's stores since its last commit are one group.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* shared, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(address(shared)), "r"(column), "r"(row)
                 : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Return when all but the thread's newest `Groups` have been read out of shared memory, which is then free again.
template <int Groups>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

// This thread's ordinary writes to shared memory before, the async proxy's reads after ("membar / fence.proxy").
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters and warpgroups ----------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block of the cluster ("barrier.cluster"). Shared memory of a block that has ended is gone, so a
// cluster meets here before its first message and after its last.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();  // a warp arrives as one
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// __syncthreads for `threads` threads, whole warps ("barrier"): 0 is __syncthreads' own, 1 to 15 are free.
template <int Threads>
__device__ __forceinline__ void named_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

// Give registers back, or wait for them ("setmaxnreg"). All four warps of a warpgroup; a multiple of 8 from 24 to 256.
// The kernel's own number, by __launch_bounds__, is what there is to share.
template <int Registers>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Four 8x8 matrices of bf16 from a warp's registers to shared memory ("stmatrix"): lane i names row i % 8 of matrix i /
// 8.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

#endif

// ---- wgmma: "Asynchronous Warpgroup Level Matrix Instructions" ------------------------------------------------------
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of rows of 64 bf16 (128 bytes) as TMA stores it with the 128-byte swizzle. Eight rows are 1024 bytes, in which
// the 16-byte piece p of row r is at place p ^ (r % 8). So a column of pieces touches every bank once. The tile must
// begin at a multiple of 1024 bytes. The descriptor ("Matrix Descriptor Format") has
//     bits 0-13 address / 16       bits 16-29 leading offset (unused by a swizzled row of this length)
//     bits 32-45 bytes from 8 rows to the next 8, / 16      bits 62-63 swizzle, 1 = 128 bytes
__device__ __forceinline__ uint64_t tile_descriptor(const bf16* tile) {
    return uint64_t((address(tile) & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// 16 columns on, within the row of 64: 32 bytes. The hardware swizzles the final address, so one may simply add.
constexpr uint64_t DESCRIPTOR_16_COLUMNS = 32 >> 4;
constexpr uint64_t DESCRIPTOR_64_ROWS = 64 * 128 >> 4;

// Before the first wgmma, and whenever registers that a wgmma reads or adds to were touched by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Return when all but the newest `Groups` are done: their accumulators may be read, their tiles overwritten.
template <int Groups>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory");
}

#define HOPPER_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_D16(i) HOPPER_D4(i), HOPPER_D4(i + 4), HOPPER_D4(i + 8), HOPPER_D4(i + 12)
#define HOPPER_D32(i) HOPPER_D16(i), HOPPER_D16(i + 16)
#define HOPPER_R32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25" \
    ",%26,%27,%28,%29,%30,%31"
#define HOPPER_R64 \
    HOPPER_R32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55" \
    ",%56,%57,%58,%59,%60,%61,%62,%63"
#define HOPPER_R96 \
    HOPPER_R64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87" \
    ",%88,%89,%90,%91,%92,%93,%94,%95"
#define HOPPER_R128 \
    HOPPER_R96 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115" \
    ",%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The last operands: 1, 1 multiply A and B by one (not minus one), 0, 0 say that both lie K-major.
#define HOPPER_WGMMA(N, registers, a, b, p)           \
    "{ .reg .pred add;\nsetp.ne.b32 add, " p ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" registers "}, " a ", " b ", add, 1, 1, 0, 0; }"

// d[64, N] = a[64, 16] * b[N, 16]^T (+ d if `add`), by all 128 threads. Warp w has rows 16w to 16w + 15. Its lane l has
// d[4j] and d[4j + 1] at row l / 4, columns 8j + 2(l % 4) and the next. Eight rows below are d[4j + 2] and d[4j + 3].
template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
    static_assert(N == 64 || N == 128 || N == 192 || N == 256);
    if constexpr (N == 64)
        asm volatile(HOPPER_WGMMA("64", HOPPER_R32, "%32", "%33", "%34") : HOPPER_D32(0) : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 128)
        asm volatile(HOPPER_WGMMA("128", HOPPER_R64, "%64", "%65", "%66")
                     : HOPPER_D32(0), HOPPER_D32(32)
                     : "l"(a), "l"(b), "r"(add));
    else if constexpr (N == 192)
        asm volatile(HOPPER_WGMMA("192", HOPPER_R96, "%96", "%97", "%98")
                     : HOPPER_D32(0), HOPPER_D32(32), HOPPER_D32(64)
                     : "l"(a), "l"(b), "r"(add));
    else
        asm volatile(HOPPER_WGMMA("256", HOPPER_R128, "%128", "%129", "%130")
                     : HOPPER_D32(0), HOPPER_D32(32), HOPPER_D32(64), HOPPER_D32(96)
                     : "l"(a), "l"(b), "r"(add));
}

#undef HOPPER_D4
#undef HOPPER_D16
#undef HOPPER_D32
#undef HOPPER_R32
#undef HOPPER_R64
#undef HOPPER_R96
#undef HOPPER_R128
#undef HOPPER_WGMMA
#endif

// ---- on the host ----------------------------------------------------------------------------------------------------

inline bool is_hopper() {
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major == 9;
}

// How TMA sees bf16 data[rows, columns], whose rows begin `pitch` elements apart: boxes of `box_rows` rows
// of 64 columns, laid down with the 128-byte swizzle. The driver has the encoder; asked for here, no -lcuda is needed.
inline CUtensorMap tensor_map(const bf16* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows,
                              CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    course::require(pitch % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0,
                    "the copy engine needs rows that begin at multiples of 16 bytes: pad the last dimension to a "
                    "multiple of 8 with torch.nn.functional.pad, or call .clone() on a tensor that starts elsewhere");
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        const char* name = "cuTensorMapEncodeTiled";
        CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
        course::require(found == cudaDriverEntryPointSuccess, "the driver is older than CUDA 12: no tensor maps");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    CUtensorMap map;
    const cuuint64_t extent[] = {cuuint64_t(columns), cuuint64_t(rows)};
    const cuuint64_t bytes[] = {cuuint64_t(pitch) * sizeof(bf16)};  // from a row to the next
    const cuuint32_t box[] = {64, cuuint32_t(box_rows)}, every[] = {1, 1};
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(data), extent, bytes,
                                   box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    course::require(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refused: a dimension of 0, or of 2^32 and more?");
    return map;
}

}  // namespace hopper
