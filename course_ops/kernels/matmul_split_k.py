"""C = A B on Hopper for outputs of at most one tile an SM: K is split, partial sums meet by a reduce-scatter in L2."""

from collections.abc import Callable
from functools import lru_cache
from math import log2

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from course_ops._common import cdiv, num_sms
from course_ops._launch import launcher
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import as_operand, block_barrier, describer, load_stage, split_columns
from course_ops.kernels._tiles import stream_zeros
from course_ops.versions import async_store, reinterpret


@gluon.jit
def load_part(descs, ring, corner, part, count, A_T: gl.constexpr, B_T: gl.constexpr):
    stage, _ = ring_slot(count, ring[2].shape[0])
    a_to, b_to, bar = ring[0].index(stage), ring[1].index(stage), ring[2].index(stage)
    k, more = (part[0] + count) * 64, count < part[1]
    load_stage(descs[0], descs[1], a_to, b_to, bar, corner[0], corner[1], k, A_T, B_T, more)


@gluon.jit
def producer(descs, ring, corner, part, A_T: gl.constexpr, B_T: gl.constexpr):
    for count in range(ring[2].shape[0], part[1]):  # the kernel has filled the ring once
        stage, parity = ring_slot(count, ring[2].shape[0])
        mbarrier.wait(ring[3].index(stage), parity ^ 1)
        load_part(descs, ring, corner, part, count, A_T, B_T)


# A consumer owns the upper (WHICH = 0) or lower 64 rows of the tile, and meets the consumers of the other splits that
# own the same rows.
@gluon.jit
def consumer(
    c_desc, ring, corner, part, meeting, WHICH: gl.constexpr, SPLITS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr
):  # fmt: skip
    a_smem, b_smem, full, empty = ring
    parts_ptr, counters_ptr, tile, split, M = meeting
    N: gl.constexpr = b_smem.shape[1 if B_T else 2]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((64, N), gl.float32, acc_layout)
    previous = 0
    for count in range(part[1]):
        stage, parity = ring_slot(count, full.shape[0])
        mbarrier.wait(full.index(stage), parity)
        a = as_operand(a_smem.index(stage), A_T).slice(WHICH * 64, 64)
        acc = hopper.warpgroup_mma(a, as_operand(b_smem.index(stage), B_T), acc, use_acc=count > 0, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(previous), pred=count > 0)
        previous = stage
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    row, col = corner[0] + WHICH * 64, corner[1]
    if row < M:  # with 64 rows or fewer the lower half does not exist
        if SPLITS == 1:
            store(c_desc, a_smem, acc, row, col, WHICH, A_T)
        else:
            parts_ptr += (tile * 2 + WHICH) * SPLITS * 64 * N
            x = reduce_scatter(acc, parts_ptr, counters_ptr + tile * 2 + WHICH, split, SPLITS)
            store(c_desc, a_smem, x, row, col + split * (N // SPLITS), WHICH, A_T)


# C leaves by TMA in panels of 64 columns, through the stages of A, of which this consumer owns its half.
@gluon.jit
def store(c_desc, a_smem, x, row, col, WHICH: gl.constexpr, A_T: gl.constexpr):
    panels = (x,)
    if x.shape[1] >= 128:
        panels = split_columns(x)
    if x.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    WIDTH: gl.constexpr = c_desc.block_type.shape[1]
    for p in gl.static_range(len(panels)):
        stage = reinterpret(a_smem.index(p), c_desc.dtype, [128 // WIDTH, 64, WIDTH], c_desc.layout)
        panel = stage.index(WHICH * (64 // WIDTH))
        panel.store(panels[p].to(c_desc.dtype))
        hopper.fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)
    tma.store_wait(0)


# A thread of wgmma's layout holds, of every 8 columns, 2 neighbours in each of 2 rows. In this order its 4 elements
# are neighbours, and a warp's too: 16 bytes a thread, 512 in a row. No element moves between threads.
@gluon.jit
def to_shares(x, SPLITS: gl.constexpr):
    """[64, N] -> [SPLITS, 64 * N / SPLITS]: shares of N / SPLITS columns."""
    x = x.reshape((4, 2, 8, SPLITS, x.shape[1] // SPLITS // 8, 4, 2)).permute((3, 4, 0, 2, 5, 1, 6))
    return x.reshape((SPLITS, x.numel // SPLITS))


@gluon.jit
def from_share(x):
    """One share, back: [64 * N] -> [64, N]."""
    return x.reshape((x.numel // 512, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, x.numel // 64))


@gluon.jit
def complete_at(counter, SPLITS: gl.constexpr):
    """What the counter shows when all SPLITS arrivals of this call have come: it is never reset."""
    return (counter | SPLITS - 1) + 1


@gluon.jit
def arrive_and_wait(ptr, SPLITS: gl.constexpr):
    block_barrier()  # one thread counts: the others' stores must be done
    count = complete_at(gl.atomic_add(ptr, 1, sem="acq_rel", scope="gpu"), SPLITS)
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"  # by each thread: its later loads are not older
    while gl.inline_asm_elementwise(asm, "=r,l", [ptr], gl.int32, is_pure=False, pack=1) - count < 0:
        pass  # a difference: right when the counter has passed 2^31, too


@gluon.jit
def reduce_scatter(acc, parts_ptr, counter_ptr, split, SPLITS: gl.constexpr):
    """Leave the other splits their shares of acc, wait, and return the sum of this split's share, in the order of K."""
    x = to_shares(acc, SPLITS)
    SIZE: gl.constexpr = x.shape[1]
    each = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(parts_ptr + (each * SPLITS + split) * SIZE + number, x, mask=each != split)
    mine = gl.sum(gl.where(each == split, x, 0.0), axis=0)
    arrive_and_wait(counter_ptr, SPLITS)
    ptrs = parts_ptr + (split * SPLITS + each) * SIZE + number
    theirs = gl.load(ptrs, mask=each != split, other=0.0, cache_modifier=".cg")  # read once: not into L1
    return from_share(gl.sum(gl.where(each == split, mine[None, :], theirs), axis=0))


# Waiting ends: there are no more programs than SMs. If another kernel holds some SMs, programs still start by number,
# and a tile's programs are neighbours. So at most one tile has some of its programs running and some not. All other
# tiles end, and make room for the rest of that one.
@gluon.jit(do_not_specialize=["tiles_m", "steps", "M"])
def split_k_kernel(
    a_desc, b_desc, c_desc,
    parts_ptr, counters_ptr,  # [tiles, 2, SPLITS (whose share), SPLITS (from whom), SIZE] fp32; [tiles, 2] int32
    tiles_m, steps, M, STAGES: gl.constexpr, SPLITS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = allocate_stages(a_desc, STAGES), allocate_stages(b_desc, STAGES), full, empty
    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    corner = tile % tiles_m * 128, tile // tiles_m * b_desc.block_type.shape[0 if B_T else 1]
    part = split * steps // SPLITS, (split + 1) * steps // SPLITS - split * steps // SPLITS  # first step, and how many
    for count in gl.static_range(STAGES):
        load_part((a_desc, b_desc), ring, corner, part, count, A_T, B_T)
    meeting = parts_ptr, counters_ptr, tile, split, M
    gl.warp_specialize([
        (consumer, (c_desc, ring, corner, part, meeting, 0, SPLITS, A_T, B_T)),
        (consumer, (c_desc, ring, corner, part, meeting, 1, SPLITS, A_T, B_T)),
        (producer, ((a_desc, b_desc), ring, corner, part, A_T, B_T)),
    ], [4, 1], [240, 24])  # fmt: skip


def _cycles(N: int, K: int, block_n: int, splits: int) -> float:
    """Estimate: an SM loads 50 bytes a cycle, memory gives 2300, and parts cross L2 at 64.

    They wait 4000 cycles, and 1000 more each time that the splits double.
    """
    meeting = 3000 + 1000 * log2(splits) + 2 * 4 * 128 * block_n / 64 if splits > 1 else 0
    return max(2 * (128 + block_n) * K / splits / 50, 2 * N * K / 2300) + meeting


@lru_cache(maxsize=4096)  # the host's time of a call is part of it
def choose(M: int, N: int, K: int, sms: int) -> tuple[int, int, float] | None:
    """block_n, splits and estimated cycles of the best choice within one wave of programs; None if there is none."""
    tiles_m, steps = cdiv(M, 128), cdiv(K, 64)
    choices = [
        (block_n, splits, _cycles(N, K, block_n, splits))
        for block_n in (64, 128, 256)
        for splits in (1, 2, 4, 8)
        if splits <= min(sms // (tiles_m * cdiv(N, block_n)), steps)
    ]
    return min(choices, key=lambda choice: choice[2], default=None)


def matmul_split_k(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in 16 bits where choose() has an answer; operands as matmul_hopper; deterministic."""
    return prepare(a, b)(a, b)


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_split_k for operands that lie as a and b do."""
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    chosen = choose(M, N, K, sms)
    assert chosen, "more than one wave of tiles"
    block_n, splits, _ = chosen
    (of_a, a_t), (of_b, b_t) = describer(a, 128, 64), describer(b, 64, block_n)
    of_c, _ = describer(a.new_empty(M, N, device="meta"), 64, min(64, block_n // splits))
    tiles_m = cdiv(M, 128)
    tiles = tiles_m * cdiv(N, block_n)
    partial = tiles * splits * 128 * block_n if splits > 1 else 0
    sizes = tiles_m, cdiv(K, 64), M, 224 * 1024 // (128 * (128 + block_n)), splits, a_t, b_t
    no_parts = a.new_empty(0, dtype=torch.float32)
    go = launcher(split_k_kernel, (tiles * splits,), num_warps=4)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c, parts = a.new_empty(M, N), a.new_empty(partial, dtype=torch.float32) if partial else no_parts
        counters = stream_zeros(a, 2 * sms, splits)  # of each number of splits, so that they stay its multiples
        go(of_a(a), of_b(b), of_c(c), parts, counters, *sizes)
        return c

    return run
