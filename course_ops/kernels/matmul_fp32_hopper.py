"""C = A B in exact fp32 on Hopper: FMAs from shared memory, which one producer warp fills by TMA.

Without TF32 there are no tensor cores for fp32. An SM has lanes for 128 FMAs a cycle, and each FMA needs an element of
A and one of B in registers. A thread of the largest tile owns 16 x 8 elements of C. For each k it reads 16 elements of
A and 8 of B, and multiplies 128 times:

    loads of 16 bytes for 4 k      16 of A + 8 of B = 24
    FMAs for 4 k                   16 x 8 x 4 = 512        so 95% of the loop's instructions are FMAs

The sums take 128 registers. So an SM has room for one CTA of 256 such threads. Smaller tiles use fewer registers, so
several CTAs share an SM, and one multiplies while another one waits. They need more loads for an FMA, but cover a small
C with more CTAs. TILES says which share of the FMAs' rate each tile reaches.

A producer warp starts the copies, so the consumers meet at one barrier a step; without it they would meet at four.
Where A lies transposed, 16 bytes of it are four rows for one k, not four k of a row. So fewer of its elements wait in
registers.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from course_ops._common import cdiv, fp32_precision, num_sms, runs_gluon, tma_takes
from course_ops._launch import describing, launcher
from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import as_operand, load_stage, swizzled_tile

BLOCK_K, GROUP = 32, 8  # elements of K in a step: 128 bytes, the widest swizzle; rows of tiles in a group
FMAS = 128  # of an SM in a cycle
# Tile: warps along M and N, stages, registers a thread at launch (None: what fits), and the share of the FMAs' rate
# that 1, 2, ... CTAs of an SM reach together. Shares are fits to 7 shapes on an H200, 512 x 512 x 512 to 4096 x 4096 x
# 4096. Registers decide how many CTAs an SM has room for: a CTA has four warps more, of which one is the producer.
TILES = {
    (128, 256): ((2, 4), 4, None, (0.83,)),
    (128, 128): ((4, 2), 4, None, (0.78,)),
    (64, 128): ((2, 2), 3, 96, (0.45, 0.75)),
    (64, 64): ((2, 2), 3, 64, (0.55, 0.71, 0.75, 0.785)),
    (32, 64): ((2, 2), 3, 48, (0.45, 0.55, 0.60, 0.62, 0.65)),
}


@gluon.jit
def producer(descs, ring, row, col, steps, A_T: gl.constexpr, B_T: gl.constexpr):
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty = ring
    K: gl.constexpr = a_desc.block_type.shape[0 if A_T else 1]
    for step in range(steps):
        stage, parity = ring_slot(step, full.shape[0])
        mbarrier.wait(empty.index(stage), parity ^ 1)
        load_stage(
            a_desc, b_desc, a_smem.index(stage), b_smem.index(stage), full.index(stage), row, col, step * K, A_T, B_T
        )


# Lanes of a warp are 4 along M and 8 along N. A thread has two neighbouring rows, or four where A lies transposed: it
# reads 16 bytes along K, or along M. Four lanes then read four different groups of banks. B's columns are four
# neighbours, or where B lies transposed one, so that eight lanes read eight groups of banks.
@constexpr_function
def thread_layout(warps_m, warps_n, a_t, b_t):
    """Which thread owns which elements of C."""
    return gl.BlockedLayout([4 if a_t else 2, 1 if b_t else 4], [4, 8], [warps_m, warps_n], [1, 0])


# All consumer warps own one tile together. They release a stage when each has its elements in registers.
@gluon.jit
def consumer(
    ring, c_ptr, M, N, row, col, steps, WARPS_M: gl.constexpr, WARPS_N: gl.constexpr, A_T: gl.constexpr,
    B_T: gl.constexpr,
):  # fmt: skip
    a_smem, b_smem, full, empty = ring
    BLOCK_M: gl.constexpr = a_smem.shape[2 if A_T else 1]
    BLOCK_N: gl.constexpr = b_smem.shape[1 if B_T else 2]
    LAYOUT: gl.constexpr = thread_layout(WARPS_M, WARPS_N, A_T, B_T)
    OF_A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 0)
    OF_B: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 0)
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
    for step in range(steps):
        stage, parity = ring_slot(step, full.shape[0])
        mbarrier.wait(full.index(stage), parity)
        a = as_operand(a_smem.index(stage), A_T).load(OF_A)
        b = as_operand(b_smem.index(stage), B_T).load(OF_B)
        acc = gl.dot_fma(a, b, acc)
        mbarrier.arrive(empty.index(stage))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    to = rows.to(gl.int64)[:, None] * N + cols[None, :]
    gl.store(c_ptr + to, acc, mask=(rows < M)[:, None] & (cols < N)[None, :])


@gluon.jit(do_not_specialize=["M", "steps"])
def fp32_kernel(
    a_desc, b_desc, c_ptr, M, N, steps, STAGES: gl.constexpr, GROUP: gl.constexpr, WARPS_M: gl.constexpr,
    WARPS_N: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[1 if A_T else 0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1)  # the producer; the consumers together
    ring = allocate_stages(a_desc, STAGES), allocate_stages(b_desc, STAGES), full, empty
    tiles_m, tiles_n = (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N
    tile_m, tile_n = swizzled_tile(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    gl.warp_specialize(
        [
            (consumer, (ring, c_ptr, M, N, row, col, steps, WARPS_M, WARPS_N, A_T, B_T)),
            (producer, ((a_desc, b_desc), ring, row, col, steps, A_T, B_T)),
        ],
        [1],
        [24],
    )


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in exact fp32, K > 0. Copies a matrix whose rows TMA cannot read."""
    return prepare(a, b)(a, b)


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_fp32 for operands that lie as a and b do."""
    (M, K), N = a.shape, b.shape[1]
    block_m, block_n = tile = best_tile(M, N, num_sms(a.device))
    (warps_m, warps_n), stages, registers, _ = TILES[tile]
    (of_a, a_t), (of_b, b_t) = _describer(_readable(a), block_m, BLOCK_K), _describer(_readable(b), BLOCK_K, block_n)
    sizes = M, N, cdiv(K, BLOCK_K), stages, GROUP, warps_m, warps_n, a_t, b_t
    options = {"num_warps": warps_m * warps_n} | ({} if registers is None else {"maxnreg": registers})
    go = launcher(fp32_kernel, (cdiv(M, block_m) * cdiv(N, block_n),), **options)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(M, N)
        go(of_a(_readable(a)), of_b(_readable(b)), c, *sizes)
        return c

    return run


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether matmul_fp32 takes them: exact fp32 on Hopper, and no side so small that a copy costs."""
    large = min(a.shape[0], b.shape[1], a.shape[1]) >= 64
    return a.dtype == torch.float32 and fp32_precision() == "ieee" and large and runs_gluon(a)


@lru_cache(maxsize=4096)
def best_tile(M: int, N: int, sms: int) -> tuple[int, int]:
    """The tile with the fewest estimated cycles for each k, on the SM that has most tiles."""
    return min(TILES, key=lambda tile: cycles(tile, M, N, sms))


def cycles(tile: tuple[int, int], M: int, N: int, sms: int) -> float:
    """Estimated cycles for each k: of full rounds of CTAs on an SM, and of a last one with what is left."""
    rates = TILES[tile][-1]
    rounds, rest = divmod(math.ceil(math.ceil(M / tile[0]) * math.ceil(N / tile[1]) / sms), len(rates))
    waves = rounds * len(rates) / rates[-1] + (rest / rates[rest - 1] if rest else 0)
    return tile[0] * tile[1] / FMAS * waves


def _readable(t: Tensor) -> Tensor:
    """t, or if TMA can copy it neither by rows nor by columns, a copy whose rows begin at multiples of 16 bytes."""
    if tma_takes(t) or tma_takes(t.t()):
        return t
    return t.new_empty(t.shape[0], t.shape[1] + -t.shape[1] % 4)[:, : t.shape[1]].copy_(t)


def _describer(t: Tensor, rows: int, cols: int) -> tuple[Callable[[Tensor], TensorDescriptor], bool]:
    """A function that describes to TMA what lies as t, in blocks; whether t lies transposed."""
    shape, strides, transposed = t.shape, t.stride(), t.stride(1) != 1
    if transposed:
        shape, strides, rows, cols = shape[::-1], strides[::-1], cols, rows
    return describing(TensorDescriptor, shape, strides, [rows, cols], layout=_layout_of(rows, cols)), transposed


@cache
def _layout_of(rows: int, cols: int) -> gl.NVMMASharedLayout:
    """How TMA writes a block to shared memory: with a swizzle of 128 bytes, so that lanes read different banks."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.float32)
