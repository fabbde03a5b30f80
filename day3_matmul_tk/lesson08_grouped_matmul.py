"""Grouped matmul: many matmuls whose sizes only the GPU knows
============================================================
A batched matmul is E matmuls of one shape: one more axis of the grid. In a mixture of experts the shapes differ. A
router sends each of T tokens to one of E weights, and the tokens are sorted by expert: y[rows of e] = x[rows of e] @
w[e]. A tensor in GPU memory, offsets [E + 1], says which rows belong to expert e. A loop of torch.mm must copy the
offsets to the host first. So the host waits for all earlier work of the GPU, then launches E kernels, and a small one
does not fill the GPU. A grouped matmul is one launch, whose programs look up their work on the GPU:

    the rows of x   | expert 0         | expert 1 | expert 3              |     offsets [0, 300, 370, 370, 800]
    rows of a tile  | 128 | 128 | 44   | 70       | 128 | 128 | 128 | 46  |     expert 2 has no rows
    row of tiles      0     1     2      3          4     5     6     7
    tile_ends       [3, 4, 4, 8]     row of tiles 3: one group ends at 3 or before, so it belongs to expert 1

Padding costs little for large groups. 8192 tokens for 8 experts of 4096 x 14336 are 0.96 TFLOP, 1.3 ms at 760 TFLOP/s.
A group's last tile of 128 rows is half empty on average: 8 halves on 64 rows of tiles, 6%. 32768 tokens for 128 experts
are 256 rows each: 25%. And 64 tokens for 8 experts wait for 0.94 GB of weights: 0.22 ms.

You will learn: a grid for the worst case, a search for a program's tile, persistent programs, TMA with three axes.
Run it:    python3 course.py run lesson08_grouped_matmul
Check it:  python3 course.py check lesson08_grouped_matmul
Time it:   python3 course.py bench lesson08_grouped_matmul
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, device, expect, num_sms, tma_takes

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.grouped_matmul import PROBLEM
from problems.matmul import precision


# A tile of a matmul, and the order of tiles: lesson 1's.
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


@triton.jit
def multiply_group(  # a matmul with other pointers
    x_ptr, w_ptr, y_ptr, expert, begin, end, tile_m, tile_n, N, K, strides,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    stride_xt, stride_xk, stride_we, stride_wk, stride_wn = strides
    multiply_tile(
        x_ptr + begin.to(tl.int64) * stride_xt, w_ptr + expert.to(tl.int64) * stride_we, y_ptr + begin.to(tl.int64) * N,
        tile_m, tile_n, end - begin, N, K, stride_xt, stride_xk, stride_wk, stride_wn, N,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip


@triton.jit
def bounds(offsets_ptr, expert, T):
    """The group's first row and the row after its last, within 0 to T whatever the offsets are."""
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    return tl.minimum(tl.maximum(begin, 0), T), tl.minimum(tl.maximum(end, 0), T)


# Rows of no group are zeros: the host does not know the offsets, so it cannot refuse them. Usually there are none, and
# this is two loads and a branch. To clear all of y before would write 2 T N bytes more.
@triton.jit
def zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E):
    """Zero rows 0 to offsets[0] and offsets[E] to T of y; programs of the grid's first axis stride over them."""
    begin, _ = bounds(offsets_ptr, 0, T)
    _, end = bounds(offsets_ptr, E - 1, T)
    before, count = begin.to(tl.int64) * N, (begin + T - end).to(tl.int64) * N  # elements: rows of y are contiguous
    for start in range(tl.program_id(0).to(tl.int64) * 1024, count, tl.num_programs(0) * 1024):
        elements = start + tl.arange(0, 1024)
        elements = tl.where(elements < before, elements, elements + (end - begin).to(tl.int64) * N)
        tl.store(y_ptr + elements, 0.0, mask=start + tl.arange(0, 1024) < count)


# Rung 1. The groups are one more axis of the grid. The host knows only that no group has more than T rows. So the grid
# is T rows high for each, and a program whose tile begins past the end of its group returns at once. Predicted: E times
# as many programs start as have work. An empty one takes 200 to 400 cycles, and two run on an SM at a time.
# For 8192 tokens and 8 experts that is 57,344 programs, up to 3% of the time. With 6% of padding, lesson 1's 490
# TFLOP/s for 128 x 128 become 450. For 32768 tokens and 128 experts it is 196,608 programs, 0.08 to 0.17 ms beside 0.15
# ms of work.
@triton.jit
def batched_kernel(
    x_ptr, w_ptr, offsets_ptr, y_ptr,  # [T, K], [E, K, N], [E + 1]: rows offsets[e] to offsets[e + 1] are e's; [T, N]
    T, N, K, strides,  # of x along T and K, of w along E, K and N
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), T, N, BLOCK_M, BLOCK_N, 8)
    expert = tl.program_id(1)
    begin, end = bounds(offsets_ptr, expert, T)
    if expert == 0:
        zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, tl.num_programs(1))
    if tile_m * BLOCK_M < end - begin:
        multiply_group(
            x_ptr, w_ptr, y_ptr, expert, begin, end, tile_m, tile_n, N, K, strides, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )


def batched(x, w, offsets):
    """x [T, K], w [E, K, N], any strides, offsets [E + 1] int32 -> y [T, N]; rows offsets[e] to offsets[e + 1] are e's.

    Rows before offsets[0] and from offsets[E] on are zeros. Offsets that descend or leave 0 to T are not detected: y is
    undefined then, but no address outside of x and y is read or written.
    """
    T, E, N, args = _prepare(x, w, offsets)
    block_m, block_n, block_k, warps = _tile(T, E, x.dtype)
    if E > 65535:
        raise Unsupported("a grid has at most 65,535 programs along its second axis")
    if T * N:
        grid = triton.cdiv(T, block_m) * triton.cdiv(N, block_n), E
        batched_kernel[grid](*args, block_m, block_n, block_k, precision(), num_warps=warps, num_stages=3)
    return args[3]


# Rung 2. New: a smaller grid. Each group wastes less than one tile, so T / 128 + E rows of tiles are enough for every
# routing. A program searches for its tile's group. It numbers the tiles of all groups in one sequence and computes the
# running sum of their counts (a cumsum in registers). The number of groups that end before its tile is its group.
# Predicted: T / 128 + E rows of tiles instead of E * T / 128, and a search costs as much as a step or two. At 32768
# tokens for 128 experts rung 1's empty programs go: 1.5 to 2.1 times as fast.
@triton.jit
def tile_ends(offsets_ptr, T, N, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr):
    """[MOST], a power of two no less than E: the number of tiles of each group and all groups before it."""
    experts = tl.arange(0, MOST)
    begin = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    end = tl.load(offsets_ptr + experts + 1, mask=experts < E, other=0)
    size = tl.maximum(tl.minimum(end, T) - tl.maximum(begin, 0), 0)
    return tl.cumsum(tl.cdiv(size, BLOCK_M) * tl.cdiv(N, BLOCK_N))


@triton.jit
def find(tile, ends, offsets_ptr, T, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's index -> its expert, the group's first row and the row after its last, the tile's place in the group."""
    before = ends <= tile
    expert = tl.sum(before.to(tl.int32))
    begin, end = bounds(offsets_ptr, expert, T)
    tile_m, tile_n = place(tile - tl.max(tl.where(before, ends, 0)), end - begin, N, BLOCK_M, BLOCK_N, 8)
    return expert, begin, end, tile_m, tile_n


@triton.jit
def grouped_kernel(
    x_ptr, w_ptr, offsets_ptr, y_ptr, T, N, K, strides, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, MOST: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)
    ends = tile_ends(offsets_ptr, T, N, E, BLOCK_M, BLOCK_N, MOST)
    if PERSISTENT:  # rung 3
        for tile in range(tl.program_id(0), tl.max(ends), tl.num_programs(0)):
            found = find(tile, ends, offsets_ptr, T, N, BLOCK_M, BLOCK_N)
            multiply_group(x_ptr, w_ptr, y_ptr, *found, N, K, strides, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    elif tl.program_id(0) < tl.max(ends):
        found = find(tl.program_id(0), ends, offsets_ptr, T, N, BLOCK_M, BLOCK_N)
        multiply_group(x_ptr, w_ptr, y_ptr, *found, N, K, strides, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)


def grouped(x, w, offsets):
    """As batched, with one program for each tile that the worst routing has."""
    return _grouped(x, w, offsets, math.inf)


# Rung 3. New: a persistent kernel, two programs for each SM, which stride over the tiles of all groups. A program
# computes the running sum once, and none starts without work. In a loop the compiler takes 162 registers per thread
# instead of 110, and then one program fits on an SM where two did. With maxnreg=128 it takes 128 and spills nothing (on
# Hopper; elsewhere it would). Predicted: no gain by itself; the next rung builds on it.
def persistent(x, w, offsets):
    """As batched, with two programs for each SM."""
    return _grouped(x, w, offsets, 2 * num_sms(), maxnreg=128 if device.architecture() == 90 else None)


def _grouped(x, w, offsets, most, **options):
    T, E, N, args = _prepare(x, w, offsets)
    block_m, block_n, block_k, warps = _tile(T, E, x.dtype)
    if T * N:
        grid = (min(most, (T // block_m + E) * triton.cdiv(N, block_n)),)
        grouped_kernel[grid](
            *args, E, block_m, block_n, block_k, precision(), triton.next_power_of_2(E), most < math.inf,
            num_warps=warps, num_stages=3, **options,
        )  # fmt: skip
    return args[3]


# Rung 4. New: TMA. One instruction loads a tile, w's along three axes. Addresses take no registers, so 128 x 256 fits:
# 85 FLOPs for each byte from L2 where 128 x 128 has 64. And flatten=True (lesson 2): the next tile's first steps are
# loaded while this tile is stored. A descriptor does not know where a group ends, so a tile of x runs into the next
# group. That is harmless, since a row of y depends only on its own row of x. But the store must stop at the group's
# end, so it uses a mask and no TMA. A tile is no higher than an average group: 16 rows for groups of 8, where the time
# goes into loading w. Predicted at 8192 tokens: 85 / 64 = 1.33 times `grouped`.
@triton.jit
def grouped_tma_kernel(
    x_desc, w_desc, offsets_ptr, y_ptr, T, N, K, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MOST: tl.constexpr, W_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)
    ends = tile_ends(offsets_ptr, T, N, E, BLOCK_M, BLOCK_N, MOST)
    for tile in tl.range(tl.program_id(0), tl.max(ends), tl.num_programs(0), flatten=True):
        expert, begin, end, tile_m, tile_n = find(tile, ends, offsets_ptr, T, N, BLOCK_M, BLOCK_N)
        row, column = begin + tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            if W_TRANSPOSED:  # [E, N, K] in memory
                w = w_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc)
        rows = row + tl.arange(0, BLOCK_M)[:, None]
        columns = column + tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < end) & (columns < N)
        tl.store(y_ptr + rows.to(tl.int64) * N + columns, acc.to(y_ptr.dtype.element_ty), mask=mask)


def grouped_matmul(x, w, offsets):
    """As batched; by TMA where the GPU has it and bases and strides are multiples of 16 bytes, else as persistent."""
    T, E, N, args = _prepare(x, w, offsets)
    turned = w.stride(1) == 1 and w.stride(2) != 1
    stored = w.transpose(1, 2) if turned else w
    if device.architecture() < 90 or x.element_size() != 2 or not args[3].numel() or not tma_takes(x, stored):
        return persistent(x, w, offsets)
    block_m, block_n, block_k, warps = _tile(T, E, x.dtype)
    block_n = 256 if block_m == 128 and device.roomy() else block_n
    x_desc = TensorDescriptor.from_tensor(x, [block_m, block_k])
    w_desc = TensorDescriptor.from_tensor(stored, [1, block_n, block_k] if turned else [1, block_k, block_n])
    programs = min(num_sms() * (1 if block_m >= 64 else 2), (T // block_m + E) * triton.cdiv(N, block_n))
    grouped_tma_kernel[(programs,)](
        x_desc, w_desc, offsets, args[3], T, N, x.shape[1], E, block_m, block_n, block_k,
        triton.next_power_of_2(E), turned, num_warps=warps,
        num_stages=device.fitting_stages(4, 2 * (block_m + block_n) * block_k),
    )  # fmt: skip
    return args[3]


def _prepare(x, w, offsets):
    """T, E, N, and the first arguments of every kernel; the fourth is the output."""
    expect(x=x, ndim=2)
    expect(w=w, ndim=3)
    expect(x=x, w=w, same_dtype=True)
    expect(offsets=offsets, ndim=1, dtypes=(torch.int32,), contiguous=True)
    (T, K), (E, _, N) = x.shape, w.shape
    if w.shape[1] != K:
        raise ValueError(f"x has {K} columns and w[e] {w.shape[1]} rows, expected as many: is w transposed?")
    if len(offsets) != E + 1 or (T and not E):
        raise ValueError(f"{len(offsets)} offsets for {E} group(s) and {T} rows: expected one for each group, and T")
    y = x.new_empty(T, N)
    return T, E, N, (x, w, offsets, y, T, N, K, x.stride() + w.stride())


def _tile(T, E, dtype):
    """block_m, block_n, block_k, warps: as high as an average group, from 16 to 128 rows."""
    if dtype.itemsize == 4:  # no tensor cores: accumulator and operands take more registers
        return 64, 64, 32, 8
    block_m = min(128, max(16, triton.next_power_of_2(T // max(E, 1))))
    return block_m, 128, 64, 8 if block_m == 128 else 4


EIGHT = PROBLEM.benches[0]

LESSON = Lesson(
    about=About(
        teaches="mixture of experts: sizes that only the GPU knows, a search for a program's tile",
        hours=0.75,
        operator="grouped matmul",
        pictures=("grouped_tiles",),
    ),
    problem=PROBLEM,
    rungs=(batched, grouped, persistent, grouped_matmul),
    predicted=(
        Prediction(
            rung=batched,
            at=EIGHT,
            tflop_per_s=450,
            why="As in lesson 1, whose 490 TFLOP/s it takes: the clock is higher than 1.48 GHz, or L2 gives an SM more "
            "than 39 bytes per cycle.",
        ),
        Prediction(
            rung=grouped, at={"T": 32768, "E": 128, "K": 2048, "N": 768}, times=(1.5, 2.1), over=batched
        ),
        Prediction(rung=persistent, at=EIGHT, times=1, over=grouped),
        Prediction(rung=grouped_matmul, at=EIGHT, times=1.33, over=grouped),
    ),
    wrong=(
        Mutant("a group ends late", "multiply_group", "end - begin", "end - begin + 1", "grouped", "out of bounds"),
        Mutant("the end of a group is in the group", "find", "ends <= tile", "ends < tile", "grouped", "nan"),
        Mutant("too few rows of no group", "zero_rows_of_no_group", "(begin + T", "(T", "batched", "nan"),
        Mutant("all of them before the groups", "zero_rows_of_no_group", "< before,", ">= 0,", "grouped", "nan"),
        Mutant("no ragged tile", "tile_ends", "cdiv(size,", "cdiv(size - BLOCK_M + 1,", "persistent", "nan"),
        Mutant("always expert 0", "grouped_tma_kernel", "[expert, k, column]", "[0, k, column]", "grouped_matmul"),
        Mutant("stores no end", "grouped_tma_kernel", "rows < end", "rows >= 0", "grouped_matmul", "out of bounds"),
    ),
    claims={grouped: ("wgmma", "cp.async"), grouped_matmul: ("tma", "wgmma")},
    passes={batched: 1.29, grouped: 1.29, persistent: 1.29, grouped_matmul: 1.39},
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
