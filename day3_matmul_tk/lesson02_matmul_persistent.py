"""Matmul: persistent kernel, TMA, warp specialization
===================================================
Lesson 1's loop multiplies at the pace of L2, while it runs. Around it lies what no tile size cures: a program starts
with an empty pipeline (about 1500 cycles until its first tiles are there), ends with writing C (64 KB for 128 x 256,
1700 cycles), and its threads, while they multiply, compute addresses: 48 KB a step are 3072 copies of 16 bytes, each
with a pointer and a mask. A tile of 128 x 256 at K = 4096 multiplies for 65,536 cycles (80,000 at the pace of L2): the
ends are 4% of it, and 14% at K = 1024. This lesson takes them away one by one.

    rung              what a program's threads do beside multiplying      stages of 48 KB, and C's staging, in 227 KB
    persistent        addresses and masks of every 16 bytes; its ends     (128 x 128, 4 of 32 KB: registers)
    tma_device        one thread asks for a tile; writing C               3, 64
    tma_host          the same, and no descriptor to write first          3, 64
    subtiled          the same, C in halves                               4, 32
    warp_specialized  writing C, while other warps load what comes next   3, 64

You will learn: persistent grids, flattened loops, tensor descriptors and the TMA, what an epilogue takes from shared
memory, warp specialisation and how to see that it happened, and a matmul for any shape and stride.
Run it:    python day3_matmul_tk/lesson02_matmul_persistent.py
Check it:  python -m lessonkit check lesson02_matmul_persistent
Time it:   python -m lessonkit bench lesson02_matmul_persistent
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

GROUP = 16  # rows of tiles: 16 x 8.25 tiles of 128 x 256 at once are 2048 x 2112 numbers of C, close to a square


# A tile of C by pointers, and the order of tiles: lesson 1's.
@triton.jit
def multiply_tile(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N]
    tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # int64 before any stride: a row number times a stride passes 2^31 as soon as the matrix does.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    b_ptrs = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :] * stride_bn
    a_step = tl.full([], BLOCK_K, tl.int64) * stride_ak
    b_step = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        # Past K both sides are 0: one alone would not do, for 0 * inf is NaN.
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


# Rung 1. New: as many programs as SMs, each coming back for the tile 132 further on. Predicted: nothing, or little. 132
# starts instead of 2048 at 8192; but the pipeline still runs dry at the end of a tile and fills anew for the next, and
# at four stages no second program fits on the SM to use that time. A grid that stays is what the next rungs stand on.
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
    """[M, K], [K, N] -> [M, N], any strides; a program an SM. Four stages, or three where a block has 99 KB."""
    c = empty_product(a, b)
    block = (128, 128, 64) if a.element_size() == 2 else (64, 64, 32)
    if c.numel():
        persistent_kernel[_grid(c, block)](
            a, b, c, *c.shape, a.shape[1], *a.stride(), *b.stride(), c.stride(0), *block, precision(), GROUP,
            num_warps=8, num_stages=min(4, shared_memory() // ((128 + 128) * 64 * 2)),
        )  # fmt: skip
    return c


# What the other rungs share: tiles by descriptor. A descriptor tells the TMA, the SM's copy engine, in 128 bytes of a
# tensor: address, shape, strides, the block's shape. One thread then names a corner, [row, column], and the engine
# computes the addresses, writes 0 for what lies outside and stores nothing there: no masks, no pointers, no registers.
# In return rows must begin at multiples of 16 bytes.
@triton.jit
def multiply_tiles(
    a_desc, b_desc, c_desc,  # [M, K] or, if A_T, [K, M]; [K, N] or, if B_T, [N, K]; [M, N]
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SPECIALIZE: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    FLAT: tl.constexpr = not SPECIALIZE  # Hopper's warp specialisation knows no flattened loops, and needs none
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT, warp_specialize=SPECIALIZE):
        tile_m, tile_n = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            # .T costs nothing: wgmma reads a 16-bit tile in either order from shared memory.
            a = a_desc.load([k, row]).T if A_T else a_desc.load([row, k])
            b = b_desc.load([col, k]).T if B_T else b_desc.load([k, col])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if PARTS == 1:
            c_desc.store([row, col], acc.to(c_desc.dtype))
        else:
            # A thread of wgmma's layout has columns of both halves: the split moves nothing between threads.
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))


# Rung 2. New, two things. Descriptors, written by the kernel itself into memory that `set_allocator` provides (every
# program writes its own three, and waits until the TMA can see them: a microsecond, which counts at 1024). And
# flatten=True: the loop over tiles and the loop over K become one, pipelined as one: while the last steps of a tile are
# multiplied and C is written, the first steps of the next are on their way. (With pointers that does not go well: what
# the compiler knew of their alignment is lost where they pass from one tile to the next, and so are 16-byte copies.)
# Predicted: no register holds an address, so that 128 x 256 fits, 81% of the peak instead of 61%; and of a tile's two
# ends only the writing of C is left.
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
    """[M, K], [K, N] -> [M, N], rows of all three 16-byte aligned; a program an SM, descriptors made by the kernel."""
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


# Rung 3. New: descriptors made on the host and passed as arguments of the kernel, in constant memory. Predicted: a
# microsecond less, and nothing to allocate; the same loop.
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


# Rung 4. New: C leaves in two halves. TMA stores from shared memory, so a tile of C needs 64 KB there, beside the
# stages, whose next tiles are already arriving. In halves it needs 32 KB, and a fourth stage fits: 192 + 32 of 227 KB.
# Predicted: a little, where loads come late (an L2 miss is 600 cycles and more, a step 1024).
def subtiled(a, b):
    """As tma_host, C stored in halves and a stage more."""
    return tma_host(a, b, parts=2)


# Rung 5. New: warps of one program with different work. So far 8 warps waited for a stage, multiplied, and then, all of
# them, wrote C, while the tensor cores had nothing to do. Now 4 warps load and do nothing else (24 registers each;
# setmaxnreg gives theirs to the others), and two warpgroups of 4 multiply and write 64 x 256 each: the compiler splits
# the program by itself, if num_warps=4 and the descriptors are made in the kernel. With num_warps=8 Triton 3.6 and 3.7
# compile the very same code as without it, and say nothing: look at the number of warps (12) in the compiled kernel.
# Predicted: loads never wait for an epilogue. What pays is K: few steps to a tile, many ends to hide. (Not for use on a
# GPU that is shared: Triton's compiler errs, and beside another process some answers are wrong. Day 5, lesson 4.)
def warp_specialized(a, b):
    """As tma_device, with a warpgroup that loads and two that multiply."""
    return tma_device(a, b, specialize=True)


# Rung 6. New: any shape, stride and dtype, and a tile that fits the shape.
# Tiles: a wave is 132 tiles, and the last wave costs as much as a full one, so _predicted_cycles (lesson 1) decides: at
# 1024 128 tiles of 64 x 128, not 32 of 128 x 256; at 2048 128 of 128 x 256, one wave, not 512 small ones, four waves.
# A tile of 64 rows is one warpgroup's, and its steps are twice as long, since a short step waits more than it does.
# Strides: a transposed operand is a descriptor of its transpose. Rows that are not 16-byte aligned go through a copy:
# that is 4 bytes a number, and a product uses each number M or N times. Where these are small, rung 1's pointers do.
TILES = ((128, 256, 64), (128, 128, 64), (64, 128, 128))


def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """Cycles of a matmul in 16 bits on a Hopper GPU, if nothing but tensor cores and L2 were slow: to compare tiles."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes a cycle; an SM takes no more than 64, whoever else is idle
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # to wait for a stage, and to start on it: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first tiles are there, and to write C
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
    """As large, not yet written, with rows that begin at multiples of 16 bytes."""
    return t.new_empty(t.shape[0], t.shape[1] + -t.shape[1] % 8)[:, : t.shape[1]]


def _blocks(a):
    return (128, 256 if device.roomy() else 128, 64) if a.element_size() == 2 else (64, 64, 32)


def _stages(a, block, parts):
    """As many as shared memory holds beside a part of C, 4 at most."""
    (m, n, k), size = block, a.element_size()
    return max(1, min(4, (shared_memory() - 1024 - m * n * size // parts) // ((m + n) * k * size)))


def _grid(c, block):
    return (min(num_sms(), triton.cdiv(c.shape[0], block[0]) * triton.cdiv(c.shape[1], block[1])),)


def what_hopper_makes_of_it(rung):
    """For sm_90: no spills, stages and C's staging in shared memory, and warps that are specialised where asked for."""
    kernels = {k.rung: k for k in compiled.kernels(__name__, (90,))}
    if rung not in STAGED:
        raise Unsupported("it has not this lesson's large tile")
    kernel, (warps, stages, staging) = kernels[rung.__name__], STAGED[rung]
    assert (kernel.warps, kernel.spills) == (warps, 0)
    assert kernel.shared // 1024 == stages * 48 + staging  # and some hundred bytes of barriers


STAGED = {tma_device: (8, 3, 64), tma_host: (8, 3, 64), subtiled: (8, 4, 32), warp_specialized: (12, 3, 64)}

LARGE = {"M": 8192, "N": 8192, "K": 8192}

LESSON = Lesson(
    about=About(
        teaches="grids that stay, flattened loops, descriptors and the TMA, specialised warps, any shape and stride",
        hours=1.25,
        star=True,
        operator="matmul",
    ),
    problem=PROBLEM,
    rungs=(persistent, tma_device, tma_host, subtiled, warp_specialized, matmul),
    predicted=(
        Prediction(rung=tma_device, at=LARGE, tflop_per_s=650),
        Prediction(rung=tma_host, at={"M": 1024, "N": 1024, "K": 1024}, times=1.06, over=tma_device),
        Prediction(rung=subtiled, at=LARGE, times=1.02, over=tma_host),
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
