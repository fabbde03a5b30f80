"""Matmul: persistent kernel, TMA, warp specialization
===================================================
By lesson 1's table the main loop runs at the rate of L2. Three costs remain, and no tile size removes them. A program
starts with an empty pipeline: about 1500 cycles until its first operands arrive. It ends with the epilogue: 64 KB of C
for 128 x 256, 1700 cycles. And its threads compute addresses: 48 KB per step are 3072 copies of 16 bytes, each with a
pointer and a mask. A tile of 128 x 256 at K = 4096 takes 65,536 cycles on the tensor cores, or 80,600 where L2 is the
limit. Start and epilogue, 3200 cycles, are 4% of the tile's whole time, and 14% at K = 1024. This lesson removes these
costs one by one.

    rung              what a program's threads do beside multiplying      stages of 48 KB, and KB for C, of 227
    persistent        addresses and masks of every 16 bytes; writing C    4 stages of 32 KB: the tile is 128 x 128,
                                                                          as registers hold no larger tile's addresses
    tma_device        one thread starts a tile's copy; writing C          3 stages and 64 KB
    tma_host          the same, without writing descriptors first         3 stages and 64 KB
    subtiled          the same, C in halves                               4 stages and 32 KB
    warp_specialized  writing C, while other warps load the next tile     3 stages and 64 KB
    matmul            as subtiled, with a tile that fits the shape        4 stages of 32 or 48 KB, and C in halves

One SM over time. First with a program for each tile, then with a persistent program, then with a persistent program
whose two loops, over tiles and over K, are flattened into one:

    one tile each    |fill|MMMMMMMM|store|     |fill|MMMMMMMM|store|
    persistent       |fill|MMMMMMMM|store|fill|MMMMMMMM|store|              no new start, but the pipeline still drains
    flattened        |fill|MMMMMMMM|store|MMMMMMMM|store|                   the next tile's loads run during the store

A persistent program takes every 132nd tile of the grouped order (lesson 1), so the 132 tiles of a round still share
operands in L2. For 4 SMs, groups of 2 rows of tiles and 4 columns:

     0  2  4  6        round 0: tiles 0 to 3, a square of 2 x 2       SM 0 computes tiles 0, 4, 8, 12
     1  3  5  7        round 1: tiles 4 to 7, the next square         SM 1 computes tiles 1, 5, 9, 13
     8 10 12 14        round 2: tiles 8 to 11
     9 11 13 15        round 3: tiles 12 to 15                        4 tiles of a row read 1 + 4 blocks, a square 2 + 2

New words (GLOSSARY.md): warpgroup, TMA, wgmma, epilogue, warp specialization, producer and consumer.
You will learn: persistent kernels, flattened loops, tensor descriptors and TMA, and what an epilogue takes from shared
memory. You will also learn warp specialization, how to see that it happened, and a matmul for any shape and stride.
You need: lesson 1 (the grouped order, a pipelined loop).
Run it:    python3 course.py run lesson02_matmul_persistent
Check it:  python3 course.py check lesson02_matmul_persistent
Time it:   python3 course.py bench lesson02_matmul_persistent
"""

import math

from lessonkit import (
    DEVICE,
    About,
    Lesson,
    Mutant,
    Prediction,
    Unsupported,
    case,
    compiled,
    device,
    num_sms,
    shared_memory,
    tma_takes,
)

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.matmul import LLM, PROBLEM, empty_product, precision

GROUP = 16  # rows of tiles: 16 x 8.25 tiles of 128 x 256 at once are 2048 x 2112 elements of C, close to a square


# A tile of C by pointers, and the order of tiles: lesson 1's.
@triton.jit
def multiply_tile(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N]
    tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # int64 before any stride: a row index times a stride passes 2^31 as soon as the matrix has 2^31 elements.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full([], BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        # Past K both operands are 0. One alone would not do, since 0 * inf is NaN.
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (ks[None, :] < K - k), other=0)
        b = tl.load(b_ptrs, mask=(ks[:, None] < K - k) & (cols[None, :] < N), other=0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += a_step
        b_ptrs += b_step
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


@triton.jit
def place(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) that a program computes."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


# Rung 1. New: a persistent kernel, one program for each SM, which takes every 132nd tile. Predicted: no gain
# over lesson 1's `pipelined`, 490 TFLOP/s. 132 programs start instead of 4096 at 8192. But the pipeline still drains at
# a tile's end and fills again for the next, and with four stages no second program fits on the SM to use that time.
@triton.jit
def persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        multiply_tile(
            a_ptr, b_ptr, c_ptr, tile_m, tile_n, M, N, K,
            stride_am, stride_ak, stride_bk, stride_bn, stride_cm, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip


def persistent(a, b):
    """[M, K], [K, N] -> [M, N], any strides; one program for each SM. Four stages, or three where a block has 99 KB."""
    c = empty_product(a, b)
    block = (128, 128, 64) if a.element_size() == 2 else (64, 64, 32)
    if c.numel():
        persistent_kernel[_grid(c, block)](
            a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), c.stride(0), *block, precision(), GROUP,
            num_warps=8, num_stages=min(4, shared_memory() // ((128 + 128) * 64 * 2)),
        )  # fmt: skip
    return c


# What the other rungs share: tiles by tensor descriptor. A descriptor is 128 bytes for TMA, the SM's unit for copies: a
# tensor's address, shape and strides, and the block's shape. One thread names a block's corner, [row, column], and TMA
# computes the addresses. Outside of the tensor TMA loads zeros and stores nothing. So there are no masks, no pointers
# and no registers for them. In return, rows must begin at multiples of 16 bytes.
@triton.jit
def multiply_tiles(
    a_desc, b_desc, c_desc,  # [M, K] or, if A_T, [K, M]; [K, N] or, if B_T, [N, K]; [M, N]
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SPECIALIZE: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    FLAT: tl.constexpr = not SPECIALIZE  # on Hopper warp specialization does not take flattened loops, nor needs them
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT, warp_specialize=SPECIALIZE):
        tile_m, tile_n = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            # .T is free: wgmma, Hopper's MMA of a warpgroup, reads a 16-bit tile in either order from shared memory.
            a = a_desc.load([k, row]).T if A_T else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_T else b_desc.load([k, col])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if PARTS == 1:
            c_desc.store([row, col], acc.to(c_desc.dtype))
        else:
            # In wgmma's layout a thread holds columns of both halves, so the split moves nothing between threads.
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))


# Rung 2. New, two things. First, descriptors. The kernel writes them into memory that `set_allocator` provides. Every
# program writes its own three and waits until TMA can see them: a microsecond, which matters at n = 1024.
# Second, flatten=True: the loop over tiles and the loop over K become one loop, pipelined as one. The first steps of
# the next tile are loaded while the last steps of this one are multiplied and C is written. If these were
# pointers, the compiler would not know their alignment from one tile to the next, and could not copy 16 bytes at once.
# Predicted: no register holds an address, so 128 x 256 fits: 81% of the peak instead of 61%, 650 TFLOP/s. Of the cost
# of a tile's start and epilogue only the writing of C is left.
@triton.jit
def tma_device_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_am, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [stride_cm, 1], [BLOCK_M, BLOCK_N])
    multiply_tiles(
        a_desc, b_desc, c_desc, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, GROUP, 1, SPECIALIZE, False, False
    )


def tma_device(a, b, specialize=False):
    """[M, K], [K, N] -> [M, N], rows of all three 16-byte aligned; persistent, descriptors made by the kernel."""
    c = _prepare(a, b)
    if specialize and a.element_size() != 2:
        raise Unsupported("in fp32 there is no wgmma that reads b [K, N]: the compiler has nothing to split")
    specialize = (
        specialize and device.architecture() == 90
    )  # Blackwell's compiler specialises other loops than this one
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    block = _blocks(a)
    if c.numel():
        tma_device_kernel[_grid(c, block)](
            a, b, c, *c.shape, a.shape[1], a.stride(0), b.stride(0), c.stride(0), *block, precision(), GROUP,
            specialize, num_warps=4 if specialize else 8, num_stages=_stages(a, block, 1),
        )  # fmt: skip
    return c


# Rung 3. New: the host makes the descriptors and passes them as kernel arguments, in constant memory. The loop
# is the same. Predicted: a microsecond less, which is 6% at n = 1024 and nothing at 8192. Nothing has to be allocated.
@triton.jit
def tma_host_kernel(
    a_desc, b_desc, c_desc, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
):  # fmt: skip
    multiply_tiles(a_desc, b_desc, c_desc, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, GROUP, PARTS, False, A_T, B_T)


def tma_host(a, b, parts=1):
    """As tma_device, descriptors made by the host."""
    c = _prepare(a, b)
    if c.numel():
        _launch_host(a, b, c, _blocks(a), parts)
    return c


def _launch_host(a, b, c, block, parts):
    m, n, k = block
    a_t, b_t = a.stride(-1) != 1, b.stride(-1) != 1
    a_desc = TensorDescriptor.from_tensor(a.t() if a_t else a, [k, m] if a_t else [m, k])
    b_desc = TensorDescriptor.from_tensor(b.t() if b_t else b, [n, k] if b_t else [k, n])
    c_desc = TensorDescriptor.from_tensor(c, [m, n // parts])
    tma_host_kernel[_grid(c, block)](
        a_desc, b_desc, c_desc, *c.shape, a.shape[1], *block, precision(), GROUP, parts, a_t, b_t,
        num_warps=8 if m > 64 or a.element_size() != 2 else 4, num_stages=_stages(a, block, parts),
    )  # fmt: skip


# Rung 4. New: C is stored in two halves. TMA stores from shared memory, so a tile of C needs 64 KB there, beside the
# stages, into which the next tile's operands already arrive. In halves it needs 32 KB, and a fourth stage fits: 192 +
# 32 of 227 KB. Predicted: 2% faster, where loads arrive late (an L2 miss takes 600 cycles and more, a step 1024).
def subtiled(a, b):
    """As tma_host, C stored in halves and a stage more."""
    return tma_host(a, b, parts=2)


# Rung 5. New: warp specialization. In rungs 1 to 4 all 8 warps wait for a stage, multiply, and then all write C, while
# the tensor cores are idle. Here a producer warpgroup (4 warps) loads and does nothing else. It keeps 24 registers per
# thread, and the instruction setmaxnreg gives the rest to the others. Two consumer warpgroups multiply and write 64 x
# 256 each. The compiler splits the program by itself, if num_warps=4 and the descriptors are made in the kernel. With
# num_warps=8 Triton 3.6 and 3.7 compile the same code as without it, and say nothing: look for 12 warps in the compiled
# kernel. Predicted: loads never wait for an epilogue, so the 2.6% that writing C takes at K = 4096 are saved. With
# fewer steps per tile the gain is larger. (Do not use it on a GPU that is shared: beside another process some answers
# are wrong. Day 5, lesson 4.)
def warp_specialized(a, b):
    """As tma_device, with a producer warpgroup and two consumer warpgroups."""
    return tma_device(a, b, specialize=True)


# Rung 6. New: any shape, stride and dtype, and a tile that fits the shape.
# Tiles: a wave is 132 tiles, and the last wave costs as much as a full one, so _predicted_cycles (lesson 1) decides. At
# 1024 it takes 128 tiles of 64 x 128, not 32 of 128 x 256. At 2048 it takes 128 of 128 x 256, which is one wave.
# One warpgroup computes a tile of 64 rows. BLOCK_K is 128 there: with 64 a step would wait longer than it computes.
# Strides: a transposed operand is a descriptor of its transpose. An operand whose rows are not 16-byte aligned is
# copied first. That costs 4 bytes per element, and a matmul uses each element M or N times. Where M or N is small,
# rung 1's pointers are used.
# Predicted at 1024: 14,100 cycles where 128 x 256 takes 23,700, so 1.68 times as fast. No change from 2048 on.
TILES = ((128, 256, 64), (128, 128, 64), (64, 128, 128))


def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """Cycles of a 16-bit matmul on Hopper if only tensor cores and L2 cost time. For ranking tiles, not for timing."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes per cycle from L2; an SM takes no more than 64
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # wait for a stage and issue its MMA: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first operands arrive, and to write C
    return math.ceil(tiles / num_sms()) * (math.ceil(K / BLOCK_K) * step + ends)


def matmul(a, b):
    """[M, K], [K, N] -> [M, N]: any shape, any strides. In fp32 TF32 only if PyTorch's setting allows it."""
    c = empty_product(a, b)
    if min(*c.shape, a.shape[1]) < 64 or device.architecture() < 90:
        return persistent(a, b)
    a, b = (t if tma_takes(t) or tma_takes(t.t()) else _aligned_like(t).copy_(t) for t in (a, b))
    out = c if tma_takes(c) else _aligned_like(c)
    block = min(TILES, key=lambda tile: _predicted_cycles(*c.shape, a.shape[1], *tile))
    _launch_host(a, b, out, block if a.element_size() == 2 else _blocks(a), 2)
    return c if out is c else c.copy_(out)


def _prepare(a, b):
    c = empty_product(a, b)
    if not tma_takes(a, b, c):
        raise Unsupported("the TMA wants rows that begin at 16 bytes, neighbours next to each other, and at least one")
    return c


def _aligned_like(t):
    """An uninitialised tensor of the same shape, whose rows begin at multiples of 16 bytes."""
    return t.new_empty(t.shape[0], t.shape[1] + -t.shape[1] % 8)[:, : t.shape[1]]


def _blocks(a):
    return (128, 256 if device.roomy() else 128, 64) if a.element_size() == 2 else (64, 64, 32)


def _stages(a, block, parts):
    """As many stages as shared memory holds beside a part of C, 4 at most; without TMA all of C lies there in fp32."""
    (m, n, k), size = block, a.element_size()
    beside = m * n * size // parts if device.architecture() >= 90 else m * n * 4
    return max(1, min(4, (shared_memory() - 1024 - beside) // ((m + n) * k * size)))


def _grid(c, block):
    return (min(num_sms(), triton.cdiv(c.shape[0], block[0]) * triton.cdiv(c.shape[1], block[1])),)


def what_hopper_makes_of_it(rung):
    """For sm_90: no spills, stages and C's staging in shared memory, and warp specialization where the rung asks."""
    kernels = {k.rung: k for k in compiled.kernels(__name__, (90,))}
    if rung not in STAGED:
        raise Unsupported("it does not have this lesson's large tile")
    kernel, (warps, stages, staging) = kernels[rung.__name__], STAGED[rung]
    assert (kernel.warps, kernel.spills) == (warps, 0)
    assert kernel.shared // 1024 == stages * 48 + staging  # and some hundred bytes of barriers


STAGED = {tma_device: (8, 3, 64), tma_host: (8, 3, 64), subtiled: (8, 4, 32), warp_specialized: (12, 3, 64)}

SMALL, LARGE = ({"M": n, "N": n, "K": n} for n in (1024, 8192))

LESSON = Lesson(
    about=About(
        teaches="persistent kernels, flattened loops, descriptors and TMA, warp specialization, any shape and stride",
        hours=1.25,
        star=True,
        operator="matmul",
        pictures=("persistent_program", "grouped_order"),
    ),
    problem=PROBLEM,
    rungs=(persistent, tma_device, tma_host, subtiled, warp_specialized, matmul),
    predicted=(
        Prediction(
            rung=persistent,
            at=LARGE,
            tflop_per_s=490,
            why="As lesson 1's `pipelined`: the clock is higher than the 1.48 GHz behind 800 TFLOP/s, or L2 gives an "
            "SM more than 39 bytes per cycle.",
        ),
        Prediction(
            rung=tma_device,
            at=LARGE,
            tflop_per_s=650,
            why="As for `persistent`. At 1.98 GHz 81% of the peak are 870 TFLOP/s, and the power limit keeps the "
            "kernel below that.",
        ),
        Prediction(
            rung=tma_host,
            at=SMALL,
            times=1.06,
            over=tma_device,
            why="To write the descriptors in the kernel takes longer than the microsecond that is counted.",
        ),
        Prediction(rung=subtiled, at=LARGE, times=1.02, over=tma_host),
        Prediction(
            rung=warp_specialized,
            at={"M": 4096, "N": 4096, "K": 4096},
            times=1.026,
            over=tma_device,
            why="It is slower, and the cause is not known.",
        ),
        Prediction(rung=matmul, at=SMALL, times=1.68, over=subtiled),
    ),
    checks=(
        *PROBLEM.checks,
        case("rows of 16 bytes, all tiles cut off", M=77, N=88, K=72),
        case("one past a tile down, and tiles for each of the interpreter's 4 SMs twice", M=129, N=520, K=136, pad=8),
        case("b transposed, rows aligned", M=136, N=72, K=48, transposed="b"),
        case("a and b transposed, rows aligned", M=72, N=136, K=80, transposed="ab"),
        case("nothing aligned, but worth a copy", M=70, N=73, K=71),
        case("more tiles than SMs, and again", gib=0.5, M=3001, N=5000, K=136),
        case("offsets past 2^31 in a", gib=40, M=70_001, N=64, K=32_000),
        case("offsets past 2^31 in c", gib=40, M=70_001, N=32_000, K=32),
        case("two groups of tiles down (in fp32: 16 and one of 1); more tiles than SMs", M=1040, N=72, K=32),
    ),
    benches=(
        *PROBLEM.benches,
        *({"M": m, "N": n, "K": k} for m, n, k in LLM if m == 4096 and n != k),
    ),
    wrong=(
        Mutant("the grid comes only once", "persistent_kernel", "tl.num_programs(0)", "tiles", "persistent", "nan"),
        Mutant(
            "as many programs as half the SMs", "multiply_tiles", "tl.num_programs(0),", "2 * tl.num_programs(0),",
            "tma_host", "nan",
        ),
        Mutant("the last step left out", "multiply_tiles", "tl.cdiv(K, BLOCK_K)", "K // BLOCK_K", "subtiled"),
        Mutant("halves change places", "multiply_tiles", "left, right =", "right, left =", "subtiled"),
        Mutant("the corner of a transposed tile", "multiply_tiles", "load([col, k]).T", "load([k, col]).T", "matmul"),
        Mutant("rows of b as far apart as a's", "tma_device_kernel", "[stride_bk, 1]", "[stride_am, 1]", "tma_device"),
        Mutant("K rounded down", "multiply_tiles", "tl.cdiv(K, BLOCK_K)", "K // BLOCK_K", "warp_specialized"),
    ),
    claims={
        persistent: ("wgmma", "no spills"),
        tma_device: ("wgmma", "tma"),
        tma_host: ("wgmma", "tma"),
        subtiled: ("wgmma", "tma"),
        warp_specialized: ("wgmma", "tma"),
        matmul: ("wgmma", "tma", "no spills"),
    },
    passes={persistent: 1.17, tma_host: 1.17, matmul: 1.17},  # b comes once for each of 9 tiles down
    properties=(*PROBLEM.properties, what_hopper_makes_of_it),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
