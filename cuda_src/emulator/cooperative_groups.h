// Cooperative groups: the block, tiles of a warp, the grid. Each is a set of threads that knows how to wait for itself.
#pragma once
#include "emu/device.h"

namespace cooperative_groups {

struct thread_block {
    static void sync() { emu::barrier(0, "thread_block.sync"); }
    static unsigned thread_rank() { return emu::thread_rank(); }
    static unsigned size() { return emu::block_size().x * emu::block_size().y * emu::block_size().z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return emu::block_index(); }
    static dim3 thread_index() { return emu::thread_index(); }
    static dim3 group_dim() { return emu::block_size(); }
    static dim3 dim_threads() { return emu::block_size(); }
};
EMU_INLINE thread_block this_thread_block() { return {}; }

struct grid_group {
    void sync() const { emu::grid_barrier(); }
    bool is_valid() const { return true; }
    unsigned long long num_blocks() const {
        const dim3 g = emu::grid_size();
        return static_cast<unsigned long long>(g.x) * g.y * g.z;
    }
    unsigned long long block_rank() const {
        const dim3 g = emu::grid_size(), b = emu::block_index();
        return (static_cast<unsigned long long>(b.z) * g.y + b.y) * g.x + b.x;
    }
    unsigned long long size() const { return num_blocks() * thread_block::size(); }
    unsigned long long num_threads() const { return size(); }
    unsigned long long thread_rank() const { return block_rank() * thread_block::size() + thread_block::thread_rank(); }
    dim3 group_dim() const { return emu::grid_size(); }
    dim3 dim_blocks() const { return emu::grid_size(); }
    dim3 block_index() const { return emu::block_index(); }
};
EMU_INLINE grid_group this_grid() { return {}; }

template <unsigned N, typename Parent = thread_block>
struct thread_block_tile {
    static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "a tile is 1, 2, 4, 8, 16 or 32 threads");
    static unsigned mask() { return N == 32 ? ~0u : ((1u << N % 32) - 1) << (emu::lane_index() / N * N); }
    static unsigned thread_rank() { return emu::lane_index() % N; }
    static constexpr unsigned size() { return N; }
    static constexpr unsigned num_threads() { return N; }
    static unsigned meta_group_rank() { return emu::thread_rank() / N; }
    static unsigned meta_group_size() { return (thread_block::size() + N - 1) / N; }
    void sync() const { __syncwarp(mask()); }
    template <typename T>
    T shfl(T value, int source) const {
        return __shfl_sync(mask(), value, source, N);
    }
    template <typename T>
    T shfl_up(T value, unsigned delta) const {
        return __shfl_up_sync(mask(), value, delta, N);
    }
    template <typename T>
    T shfl_down(T value, unsigned delta) const {
        return __shfl_down_sync(mask(), value, delta, N);
    }
    template <typename T>
    T shfl_xor(T value, unsigned lanes) const {
        return __shfl_xor_sync(mask(), value, int(lanes), N);
    }
    int any(int predicate) const { return __any_sync(mask(), predicate); }
    int all(int predicate) const { return __all_sync(mask(), predicate); }
    unsigned ballot(int predicate) const { return __ballot_sync(mask(), predicate) >> (emu::lane_index() / N * N); }
    template <typename T>
    unsigned match_any(T value) const {
        return __match_any_sync(mask(), value) >> (emu::lane_index() / N * N);
    }
};
template <unsigned N, typename Parent>
EMU_INLINE thread_block_tile<N, Parent> tiled_partition(const Parent&) {
    return {};
}

// Which threads happen to run together is the hardware's choice: one by itself is always a right answer.
struct coalesced_group {
    void sync() const {}
    unsigned thread_rank() const { return 0; }
    unsigned size() const { return 1; }
    unsigned num_threads() const { return 1; }
    template <typename T>
    T shfl(T value, int) const {
        return value;
    }
};
EMU_INLINE coalesced_group coalesced_threads() { return {}; }

template <typename Group>
EMU_INLINE void sync(const Group& group) {
    group.sync();
}

template <typename T = void>
struct plus : emu::Add {};
template <typename T = void>
struct less : emu::Min {};
template <typename T = void>
struct greater : emu::Max {};
template <typename T = void>
struct bit_and : emu::And {};
template <typename T = void>
struct bit_or : emu::Or {};
template <typename T = void>
struct bit_xor : emu::Xor {};

template <unsigned N, typename Parent, typename T, typename Operation>
T reduce(const thread_block_tile<N, Parent>& tile, T value, Operation operation) {
    for (unsigned lanes = N / 2; lanes; lanes /= 2) value = operation(value, tile.shfl_xor(value, lanes));
    return value;
}
template <unsigned N, typename Parent, typename T, typename Operation = plus<T>>
T inclusive_scan(const thread_block_tile<N, Parent>& tile, T value, Operation operation = {}) {
    for (unsigned delta = 1; delta < N; delta *= 2) {
        const T before = tile.shfl_up(value, delta);
        if (tile.thread_rank() >= delta) value = operation(before, value);
    }
    return value;
}
template <unsigned N, typename Parent, typename T>
T exclusive_scan(const thread_block_tile<N, Parent>& tile, T value) {
    const T before = tile.shfl_up(inclusive_scan(tile, value), 1);
    return tile.thread_rank() ? before : T(0);
}

}  // namespace cooperative_groups
