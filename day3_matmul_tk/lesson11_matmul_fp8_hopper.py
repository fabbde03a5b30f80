"""fp8 matmul on Hopper: the same ring, twice the FLOPs
====================================================
Lesson 9's persistent kernel with elements of 8 bits. A row of a stage is 128 bytes again, now 128 elements, and the
tensor cores multiply 4096 pairs per cycle instead of 2048.

You will be able to: say what 8 bits change in a Hopper kernel and what they leave as it was, and load scales where they
cost nothing. You need: lesson 9 (the kernel), lesson 6 (scales of a tensor and of rows).
A Hopper GPU runs the rungs. Without one they are compiled; the barriers are lesson 9's, and so is their CPU model.
Run it:    python3 course.py run lesson11_matmul_fp8_hopper
Check it:  python3 course.py check lesson11_matmul_fp8_hopper
Time it:   python3 course.py bench lesson11_matmul_fp8_hopper

Budget of a tile of 128 x 256, in cycles:

    one step                    bf16, 64 of K    fp8, 128 of K
    bytes                       48 KB            48 KB
    tensor cores                1024             1024
    steps when K is 4096        64               32
    tile in all                 65,500           32,800
    epilogue, not overlapped    1000: 1.5%       at least 1000: 3%       waits for the last MMA, scales, rounds

A step of the same cycles covers twice as much of K, so the epilogue is twice as large a share of a tile. In
bf16 cuBLAS holds about 790 TFLOP/s. Twice that less 3% is 1530.

Scales of a tensor or of rows do not change with k: the accumulator is multiplied once, at the end. A consumer loads
them before it waits for the last MMA:

    tensor cores   MMMMMMMMMMMMMMMM|                 M = last MMA of the tile
    loads                  ssss                      s = scales of 64 rows and 256 columns
    warps                  i       |scale, to bf16, store

Questions before you read on. Which two constants of lesson 9's kernel change, and which do not? A barrier could keep
the second consumer two steps behind the first, so that their epilogues do not coincide. Why does that gain nothing?
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, needs, num_sms, tma_takes

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import course_ops
from course_ops.hopper import aggregate, allocate_barriers, allocate_stages, async_load, async_store, ring_slot
from problems.matmul_fp8 import FP8, PROBLEM, scheme_of

BLOCK_K = 128


@gluon.jit
def tile_at(index, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes index-th: down GROUP rows of tiles, then to the next column of tiles."""
    first = index // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = index % (GROUP * tiles_n)
    return first + within % height, within // height


@aggregate
class PartitionArgs:
    """What the warps of a CTA share."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor  # of b.t(), whose rows are contiguous
    c_desc: tma.tensor_descriptor
    c_smem: gl.shared_memory_descriptor  # [4, 64, 64]
    a_smem: gl.shared_memory_descriptor  # [2 * STAGES, 64, BLOCK_K]: each consumer's rows by themselves
    b_smem: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, BLOCK_K]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    scale_a_ptr: gl.tensor
    scale_b_ptr: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    steps: gl.tensor
    M: gl.tensor
    N: gl.tensor
    GROUP: gl.constexpr
    ROWS: gl.constexpr  # a scale for each row of A and column of B; otherwise one for all of each


@gluon.jit
def split_columns(x):
    """[M, N] -> the left and the right [M, N / 2]. A thread holds columns of both, so nothing moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    """acc to C in 16 bits, in panels of 64 columns, through buffers FIRST and FIRST + 1 of c_smem in turn."""
    panels = split_columns(acc)  # even, so a tile's last panel and the next tile's first use different buffers
    if acc.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    for p in gl.static_range(len(panels)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(panels[p].to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)


@gluon.jit
def producer(args):
    BLOCK_N: gl.constexpr = args.b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = args.a_desc.block_type.shape[1]
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(tile, args.tiles_m, args.tiles_n, args.GROUP)
        for step in range(args.steps):
            stage, parity = ring_slot(count, args.full.shape[0])
            mbarrier.wait(args.empty.index(stage), parity ^ 1)
            full, k = args.full.index(stage), step * BLOCK_K
            mbarrier.expect(full, 2 * args.a_desc.block_type.nbytes + args.b_desc.block_type.nbytes)
            async_load(args.b_desc, [tile_n * BLOCK_N, k], full, args.b_smem.index(stage))
            for which in gl.static_range(2):
                row, half = (tile_m * 2 + which) * 64, stage * 2 + which
                async_load(args.a_desc, [row, k], full, args.a_smem.index(half))
            count += 1


# New against lesson 9: instr_shape's 32 elements of K, B by rows of b.t(), and the scales. A consumer loads them before
# it waits for the last MMA, so that they arrive while it runs.
@gluon.jit
def consumer(args, WHICH: gl.constexpr):
    BLOCK_N: gl.constexpr = args.b_smem.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    acc = gl.zeros((64, BLOCK_N), gl.float32, LAYOUT)
    count = 0
    for tile in range(gl.program_id(0), args.tiles_m * args.tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(tile, args.tiles_m, args.tiles_n, args.GROUP)
        row, col = (tile_m * 2 + WHICH) * 64, tile_n * BLOCK_N
        previous = 0
        for step in range(args.steps):
            stage, parity = ring_slot(count, args.full.shape[0])
            mbarrier.wait(args.full.index(stage), parity)
            a, b = args.a_smem.index(stage * 2 + WHICH), args.b_smem.index(stage).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(args.empty.index(previous), pred=step > 0)
            previous = stage
            count += 1
        scale_a, scale_b = gl.load(args.scale_a_ptr), gl.load(args.scale_b_ptr)
        if args.ROWS:
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
            scale_a = gl.load(args.scale_a_ptr + rows, mask=rows < args.M, other=0.0)[:, None]
            scale_b = gl.load(args.scale_b_ptr + cols, mask=cols < args.N, other=0.0)[None, :]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(args.empty.index(previous))
        store_tile(args.c_desc, args.c_smem, acc * (scale_a * scale_b), row, col, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def fp8_kernel(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 4)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    args = PartitionArgs(
        a_desc=a_desc, b_desc=b_desc, c_desc=c_desc, c_smem=c_smem,
        a_smem=allocate_stages(a_desc, 2 * STAGES), b_smem=allocate_stages(b_desc, STAGES),
        full=full, empty=empty, scale_a_ptr=scale_a_ptr, scale_b_ptr=scale_b_ptr,
        tiles_m=tiles_m, tiles_n=tiles_n, steps=steps, M=M, N=N, GROUP=GROUP, ROWS=ROWS,
    )  # fmt: skip
    gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [232, 40])


# Rung 1. Predicted at 4096: 97% of twice cuBLAS's rate in bf16, as in the table. That is 1% to 2% over lesson 6's
# matmul_fp8, as lesson 9's persistent kernel gains 1% to 2% over lesson 2.
@needs(90, "TMA and wgmma", only=True)
def summed(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [1, 1] or [M, 1] and [1, N] -> [M, N] in bf16.

    Rows of a, b.t() and the result begin at multiples of 16 bytes. TypeError, ValueError for what is not so;
    Unsupported for other scales and rows.
    """
    return _run(a, b, scale_a, scale_b)


# Rung 2. New: tiles of 128 x 128 where 128 x 256 would leave SMs idle. Predicted: nothing at 4096 and 8192.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As summed; other scales, and operands whose rows TMA cannot copy, go to course_ops.matmul_fp8."""
    try:
        return _run(a, b, scale_a, scale_b, widths=(256, 128))
    except Unsupported:
        return course_ops.matmul_fp8(a, scale_a, b, scale_b)


def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K):
    """Cycles of a 16-bit matmul on Hopper if only tensor cores and L2 cost time. For ranking tiles, not for timing."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes per cycle from L2; an SM takes no more than 64
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # wait for a stage and issue its MMA: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first operands arrive, and to write C
    return math.ceil(tiles / num_sms()) * (math.ceil(K / BLOCK_K) * step + ends)


def _run(a, b, scale_a, scale_b, widths=(256,)):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) == "blocks":
        raise Unsupported("the tensor cores sum over all of K: scales that change with k come in lesson 12")
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if not tma_takes(a, b.t(), c):
        raise Unsupported(f"strides {a.stride()}, {b.stride()}, {c.stride()}: TMA wants rows at multiples of 16 bytes")
    # A step of 128 elements of 8 bits has the bytes of one of 64 elements of 16 bits, and takes as long.
    width = min(widths, key=lambda n: _predicted_cycles(max(1, M), max(1, N), K / 2, 128, n, BLOCK_K / 2))
    a_desc, b_desc, c_desc = _describe(a, 64, BLOCK_K), _describe(b.t(), width, BLOCK_K), _describe(c, 64, 64)
    # As rows, [1, M or 1] and [N or 1, 1]: PyTorch's layout of scales.
    scale_a, scale_b = scale_a.t().contiguous(), scale_b.t().contiguous()
    tiles_m, tiles_n, steps = triton.cdiv(M, 128), triton.cdiv(N, width), triton.cdiv(K, BLOCK_K)
    programs = triton.cdiv(tiles_m * tiles_n, triton.cdiv(tiles_m * tiles_n, num_sms()))
    stages, group = 5 if width == 128 else 4, 16
    fp8_kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N, stages, group, scheme == "rows",
        num_warps=4,
    )  # fmt: skip
    return c


def _describe(t, *block):
    """A TMA descriptor for blocks of a matrix, whose rows of 128 bytes are swizzled."""
    dtype = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}[t.dtype]
    return TensorDescriptor.from_tensor(t, list(block), gl.NVMMASharedLayout.get_default_for(list(block), dtype))


# The answers: BLOCK_K is 128 instead of 64, and instr_shape has 32 elements of K instead of 16. Tile, stages and GROUP
# stay, because a step has the same bytes and cycles. Nothing ties the two consumers to each other, so their epilogues
# may lie apart without a barrier. With it a stage is held two steps longer, and of four stages two are left for loads
# ahead. No row of such a kernel is kept. To measure it, let one consumer arrive where the other waits, then `bench`.
LESSON = Lesson(
    about=About(
        teaches="the ring in fp8: what 8 bits change in a Hopper kernel, scales at the end of a tile",
        hours=0.75,
        operator="fp8 matmul",
        language="Gluon",
        pictures=("ring",),
    ),
    problem=PROBLEM,
    rungs=(summed, matmul_fp8),
    predicted=(
        Prediction(rung=summed, at={"M": 4096, "N": 4096, "K": 4096, "scheme": "tensor"}, tflop_per_s=1530),
        Prediction(rung=matmul_fp8, at={"M": 8192, "N": 8192, "K": 8192, "scheme": "rows"}, times=1, over=summed),
    ),
    checks=(
        *PROBLEM.checks,
        case("the ring goes round within a tile, and two rounds of tiles", M=200, N=136, K=1040, scheme="rows"),
        case("two rounds of the grid, tiles of fewer steps than stages", gib=0.1, M=1544, N=6152, K=144, scheme="rows"),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="rows"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows") for n in (4096, 8192)),
    wrong=(
        Mutant("one row's scale for all", "consumer", "scale_a_ptr + rows,", "scale_a_ptr + rows * 0,", "summed"),
        Mutant("the first columns' scales for all", "consumer", "_ptr + cols,", "_ptr + cols % 8,", "summed"),
        Mutant("the tile before is added", "consumer", "step > 0, is", "True, is", "summed"),
        Mutant("one half twice", "consumer", "stage * 2 + WHICH", "stage * 2 + 1", "matmul_fp8"),
        Mutant(
            "more bytes announced than come",
            "producer",
            "2 * args.a_desc.block_type.nbytes",
            "3 * args.a_desc.block_type.nbytes",
            "summed",
            "hang",
        ),
        Mutant(
            "a tile's last stage is kept",
            "consumer",
            "mbarrier.arrive(args.empty.index(previous))",
            "pass",
            "summed",
            "hang",
        ),
        Mutant(
            "empty wants three arrivals",
            "fp8_kernel",
            "allocate_barriers(STAGES, 2)",
            "allocate_barriers(STAGES, 3)",
            "matmul_fp8",
            "hang",
        ),
        Mutant(
            "consumers do not wait",
            "consumer",
            "mbarrier.wait(args.full.index(stage), parity)",
            "pass",
            "matmul_fp8",
            "value or nan",
        ),
    ),
    claims=dict.fromkeys((summed, matmul_fp8), ("wgmma", "tma", "no spills")),
)

if __name__ == "__main__":
    LESSON.main()
