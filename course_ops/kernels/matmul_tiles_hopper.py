"""C = A B on Hopper in tiles whose width is no power of two, and y = gelu(x W^T + bias) with the epilogue in registers.

As matmul_hopper persistent and warp-specialized, in whole tiles. Whole tiles run in waves, one tile per SM, so the last
wave decides. An H200 has 132 SMs. On it, C of 1000 x 4608 takes two waves in its 144 tiles of 128 x 256, and one wave
in its 128 tiles of 128 x 288. Triton's blocks have powers of two as sizes. So a tile has a left part, of 64, 128 or 256
columns, and a right part of none, 32 or 64. Each part has a block of B and an accumulator of its own, and one step is
two MMAs.
From Triton 3.8 on a pair of CTAs can share the blocks of B (_matmul_plan says what that saves). A pair's tile is two of
these, one above the other.

      128 x 288 = | left: 256 | right: 32 |      256 x 160 = | left: 128 | right: 32 |, 128 rows for each consumer
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from course_ops._common import cdiv, num_sms, shared_memory
from course_ops._launch import launcher
from course_ops.hopper import aggregate, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import (
    accumulator,
    as_operand,
    describer,
    load_for_both,
    release,
    ring_barriers,
    split_columns,
    swizzled_tile,
    wait_until_read,
)
from course_ops.kernels._matmul_plan import STEP, Plan, group_of, parts_of, plan_of
from course_ops.kernels.matmul_hopper import takes
from course_ops.versions import async_load, async_store

CONSUMERS = 2


@aggregate
class PartitionArgs:
    """What the warps of a CTA share. right_desc, right_smem: None in tiles of one part."""

    a_desc: tma.tensor_descriptor  # blocks [ROWS, STEP], or transposed as in memory
    left_desc: tma.tensor_descriptor  # of B: [STEP, LEFT]
    right_desc: tma.tensor_descriptor | gl.constexpr
    c_desc: tma.tensor_descriptor  # panels [ROWS, PANEL]
    z_desc: tma.tensor_descriptor | gl.constexpr
    bias_ptr: gl.tensor | gl.constexpr
    a_smem: gl.shared_memory_descriptor  # [STAGES * 2, ROWS, STEP]: a block for each consumer
    left_smem: gl.shared_memory_descriptor
    right_smem: gl.shared_memory_descriptor | gl.constexpr
    c_smem: gl.shared_memory_descriptor  # [4, ROWS, PANEL]: two panels for each consumer
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    both_empty: gl.shared_memory_descriptor  # in CTA 0 of a pair
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor
    group: gl.tensor
    N: gl.tensor
    LEFT: gl.constexpr  # columns of the parts
    RIGHT: gl.constexpr
    A_T: gl.constexpr
    B_T: gl.constexpr
    GELU: gl.constexpr
    CTAS: gl.constexpr


# Past the end of A or B TMA fills a block with zeros and counts them as arrived bytes, so K needs no padding. In the
# first round every stage is empty: parity ^ 1 names the phase before the first, which counts as complete.
@gluon.jit
def producer(args):
    ROWS: gl.constexpr = args.c_desc.block_type.shape[0]
    STEP: gl.constexpr = args.a_desc.block_type.shape[0 if args.A_T else 1]
    OF_A: gl.constexpr = 2 * args.a_desc.block_type.nbytes // args.CTAS
    OF_B: gl.constexpr = STEP * (args.LEFT + args.RIGHT) * 2
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, args.tiles_m, args.tiles_n, args.group)
        col = tile_n * (args.LEFT + args.RIGHT)
        for step in range(args.steps):
            stage, parity = ring_slot(count, args.full.shape[0])
            wait_until_read(args, stage, parity ^ 1)
            full, k = args.full.index(stage), step * STEP
            mbarrier.expect(full, OF_A + OF_B)
            at = [col, k] if args.B_T else [k, col]
            load_for_both(args.left_desc, at, full, args.left_smem.index(stage), args.CTAS)
            for i in gl.static_range(2):
                row = (tile_m * 2 + i) * ROWS
                async_load(args.a_desc, [k, row] if args.A_T else [row, k], full, args.a_smem.index(stage * 2 + i))
            if args.RIGHT:
                right = col + args.LEFT
                at = [right, k] if args.B_T else [k, right]
                load_for_both(args.right_desc, at, full, args.right_smem.index(stage), args.CTAS)
            count += 1


# Each MMA is a group that can be waited for. A step with two parts is two groups. So the step before is complete when
# at most two groups are still running, and then its stage is released.
@gluon.jit
def consumer(args, WHICH: gl.constexpr):
    ROWS: gl.constexpr = args.c_desc.block_type.shape[0]
    LEFT: gl.constexpr = args.LEFT
    RIGHT: gl.constexpr = args.RIGHT
    left = gl.zeros((ROWS, LEFT), gl.float32, accumulator(LEFT, args.CTAS))
    if RIGHT:
        right = gl.zeros((ROWS, RIGHT), gl.float32, accumulator(RIGHT, args.CTAS))
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = swizzled_tile(tile, args.tiles_m, args.tiles_n, args.group)
        previous = 0
        for step in range(args.steps):
            stage, parity = ring_slot(count, args.full.shape[0])
            mbarrier.wait(args.full.index(stage), parity)
            a = as_operand(args.a_smem.index(stage * 2 + WHICH), args.A_T)
            b = as_operand(args.left_smem.index(stage), args.B_T)
            left = warpgroup_mma(a, b, left, use_acc=step > 0, is_async=True)
            if RIGHT:
                b = as_operand(args.right_smem.index(stage), args.B_T)
                right = warpgroup_mma(a, b, right, use_acc=step > 0, is_async=True)
                left, right = warpgroup_mma_wait(2, deps=(left, right))
            else:
                left = warpgroup_mma_wait(1, deps=(left,))
            release(args, previous, step > 0)
            previous = stage
            count += 1
        left_bias = bias_of(args, tile_n, 0, left)  # while the last step's MMAs run
        if RIGHT:
            right_bias = bias_of(args, tile_n, LEFT, right)
            left, right = warpgroup_mma_wait(0, deps=(left, right))
            right = plus(right, right_bias)
        else:
            left = warpgroup_mma_wait(0, deps=(left,))
        left = plus(left, left_bias)
        release(args, previous, True)
        row, col = (tile_m * 2 + WHICH) * ROWS, tile_n * (LEFT + RIGHT)
        tma.store_wait(0)  # of the last tile's panels: they have had the time of all steps
        store_part(args, left, row, col, WHICH)
        if RIGHT:
            store_part(args, right, row, col + LEFT, WHICH)
    tma.store_wait(0)


# N is a multiple of 8, as TMA stores C. Eight columns have one mask, so that a thread loads its two neighbours at once.
@gluon.jit
def bias_of(args, tile_n, FIRST: gl.constexpr, acc):
    """The bias of a part's columns, from FIRST on in the tile, as a row; None without a bias."""
    row = args.bias_ptr
    if row is not None:
        col = tile_n * (args.LEFT + args.RIGHT) + FIRST
        cols = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        row = gl.load(row + col + cols, mask=cols // 8 < (args.N - col) // 8)[None, :]
    return row


@gluon.jit
def plus(acc, bias):
    return acc if bias is None else acc + bias.to(gl.float32)


@gluon.jit
def panels_of(acc, PANEL: gl.constexpr):
    """acc as panels of PANEL columns, from left to right."""
    panels = (acc,)
    if acc.shape[1] >= 2 * PANEL:
        panels = split_columns(acc)
    if acc.shape[1] >= 4 * PANEL:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    if acc.shape[1] >= 8 * PANEL:
        panels = (
            split_columns(panels[0]) + split_columns(panels[1]) + split_columns(panels[2]) + split_columns(panels[3])
        )
    return panels


@gluon.jit
def gelu(z):
    """The tanh form, by one special function, to 11 bits: enough for a result in 16 bits."""
    u = z * (z * z * 0.0356774081 + 0.7978845608)  # sqrt(2 / pi) (z + 0.044715 z^3)
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], gl.float32, True, 1)
    return 0.5 * z * t + 0.5 * z


@gluon.jit
def store_part(args, acc, row, col, WHICH: gl.constexpr):
    """A part of the tile to C, through GELU, and before GELU to z. Past the ends TMA writes nothing."""
    PANEL: gl.constexpr = args.c_desc.block_type.shape[1]
    panels = panels_of(acc, PANEL)
    for p in gl.static_range(len(panels)):
        x = panels[p]
        start = col + PANEL * p
        if args.z_desc is not None:
            store_panel(args, args.z_desc, x, row, start, 2 * WHICH)
        if args.GELU:
            x = gelu(x)
        store_panel(args, args.c_desc, x, row, start, 2 * WHICH + (1 if args.z_desc is not None else p % 2))


# A tile's panels go through a consumer's two buffers in turns. store_wait(1): all panels but the last have left shared
# memory. The fence orders the threads' writes before TMA's reads.
@gluon.jit
def store_panel(args, desc, x, row, col, BUFFER: gl.constexpr):
    panel = args.c_smem.index(BUFFER)
    tma.store_wait(1)
    panel.store(x.to(desc.dtype))
    fence_async_shared()
    async_store(desc, [row, col], panel)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps", "group", "N"])
def tiles_kernel(
    a_desc, left_desc, right_desc, c_desc, z_desc, bias_ptr, tiles_m, tiles_n, steps, group, N,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
    GELU: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    full, empty, both_empty = ring_barriers(STAGES, 2, CTAS)
    args = PartitionArgs(
        a_desc=a_desc, left_desc=left_desc, right_desc=right_desc, c_desc=c_desc, z_desc=z_desc, bias_ptr=bias_ptr,
        a_smem=allocate_stages(a_desc, STAGES * 2), left_smem=allocate_stages(left_desc, STAGES),
        right_smem=allocate_stages(right_desc, STAGES) if RIGHT else None, c_smem=allocate_stages(c_desc, 4),
        full=full, empty=empty, both_empty=both_empty,
        tiles_m=tiles_m, tiles_n=tiles_n, steps=steps, group=group, N=N,
        LEFT=LEFT, RIGHT=RIGHT, A_T=A_T, B_T=B_T, GELU=GELU, CTAS=CTAS,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))
    ], [4, 1], [232, 40])  # fmt: skip


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether this kernel takes a and b, and the plan has a tile of it."""
    return takes(a, b) and plan_of(a, b, num_sms(a.device)).other


def matmul_tiles_hopper(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in 16 bits, as the plan has it; operands as for matmul_hopper."""
    return prepare(a, b)(a, b)


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_tiles_hopper for operands that lie as a and b do."""
    M, N = a.shape[0], b.shape[1]
    run = planned(a, b, plan_of(a, b, num_sms(a.device)), a.new_empty(M, N, device="meta"))
    return lambda a, b: run(a, b, a.new_empty(M, N))


def by_plan(
    a: Tensor, b: Tensor, plan: Plan, c: Tensor, bias: Tensor | None = None, gelu: bool = False, z: Tensor | None = None
) -> Tensor:
    """c [M, N] = gelu(a [M, K] b [K, N] + bias) in 16 bits, K > 0, by a plan's whole tiles; z: before GELU.

    Operands as for matmul_hopper. Rows of c and z begin at multiples of 16 bytes.
    """
    return planned(a, b, plan, c, gelu, z)(a, b, c, bias, z)


def planned(
    a: Tensor, b: Tensor, plan: Plan, c: Tensor, gelu: bool = False, z: Tensor | None = None
) -> Callable[..., Tensor]:
    """by_plan for tensors that lie as these do: a function of a, b, c, bias and z."""
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    left, right = parts_of(plan.block_n)
    ctas, rows = plan.ctas, plan.ctas * plan.block_m // CONSUMERS
    (of_a, a_t), (of_left, b_t) = describer(a, rows, STEP, plan.rows_apart), describer(b, STEP, left, plan.same)
    of_right = describer(b, STEP, right, plan.same)[0] if right else _absent
    panel = right or 64
    of_c, of_z = (_absent if t is None else describer(t, rows, panel, plan.rows_apart)[0] for t in (c, z))
    tiles_m, tiles_n = cdiv(M, ctas * plan.block_m), cdiv(N, plan.block_n)
    tiles = tiles_m * tiles_n
    stages = stages_of(plan.block_m, plan.block_n, shared_memory(a.device))
    group = group_of(tiles_m, ctas * plan.block_m, plan.block_n, sms // ctas)
    sizes = tiles_m, tiles_n, cdiv(K, STEP), group, N, left, right, stages, a_t, b_t, gelu, ctas
    waves = cdiv(tiles, sms // ctas)
    go = launcher(tiles_kernel, (cdiv(tiles, waves),), num_warps=4, num_ctas=ctas)

    def run(a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        go(of_a(a), of_left(b), of_right(b), of_c(c), of_z(z), bias, *sizes)
        return c

    return run


def _absent(_: Any) -> None:
    """The descriptor of what a tile or a call does not have."""


def stages_of(block_m: int, block_n: int, memory: int) -> int:
    """How many steps' blocks of A and B have room in so many bytes of shared memory; six at most."""
    beside = 2 * block_m * (parts_of(block_n)[1] or 64) * 2 + 1024  # bytes: two panels of C a consumer; barriers
    return min(6, (memory - beside) // (2 * STEP * (block_m + block_n)))
