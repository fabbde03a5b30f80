"""LayerNorm at every row length: short, long, longer than an SM
=============================================================
Lesson 7's row kernel moves the least, 2MN elements, and still loses bandwidth at both ends. A row of 256 is too little
work for a program; a row of 32768 in fp32 (128 KB) leaves room for one program an SM, and while that one computes its
statistics nothing of it is on the way. By Little's law 4.2 TB/s at about 800 ns is 3.4 MB on its way, 25 KB for each
of 132 SMs: so 50 KB or more should be resident, that one half may load while the other stores.

You will learn: several rows a program, 16-bit data that stays 16 bits wide, statistics a lane, programs that share a
row and tell each other their statistics.
Run it:    python day2_triton_basics/lesson07b_layernorm_lengths.py
Check it:  python -m lessonkit check lesson07b_layernorm_lengths
Time it:   python -m lessonkit bench lesson07b_layernorm_lengths
"""

import math
from functools import partial

from lessonkit import DEVICE, About, Lesson, Mutant, Unsupported, case, expect, num_sms, opaque

import torch
import triton
import triton.language as tl

from problems.layer_norm import EPS, PROBLEM


# Rung 1. Lesson 7's row kernel with a second dimension: a program owns ROWS whole rows, about 2048 elements, 16 for
# each thread. Predicted: 2MN as before; at N = 256 an eighth of the programs, and w and b are asked for once a tile.
@triton.jit
def layernorm_tile_kernel(
    x_ptr,  # [M, N], rows stride_x elements apart
    w_ptr, b_ptr,  # [N] each
    y_ptr,  # [M, N]
    mean_ptr, rstd_ptr,  # [M] each, fp32
    M, N, stride_x, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    mean = tl.sum(x.to(tl.float32), axis=1, keep_dims=True) / N
    x = opaque(x) if AGAIN else x  # rung 2
    centred = tl.where(cols < N, x.to(tl.float32) - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    x = opaque(x) if AGAIN else x
    tl.store(y_ptr + rows * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


@triton.jit
def normalize(x, mean, rstd, w_ptr, b_ptr, cols, mask):
    # Every row asks for w and b, so they should outlive the streams of x and y in the caches.
    w = tl.load(w_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, eviction_policy="evict_last").to(tl.float32)
    return (x.to(tl.float32) - mean) * rstd * w + b


def layernorm_tile(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32. Tiles of whole rows, N up to 16384."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if N > 16384:
        raise Unsupported(f"a row of {N} does not fit one block: at most 16384")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // block)
        layernorm_tile_kernel[(triton.cdiv(M, rows),)](
            x, w, b, y, mean, rstd, M, N, x.stride(0), eps, rows, block, AGAIN=False, num_warps=rows * block // 512
        )
    return y, mean, rstd


# Rung 2. New: the row stays in registers as it came. The compiler would keep its fp32 copy, 32 bits an element, from
# one use to the next; opaque() makes it keep the 16 bits. So a thread can own 32 elements in 16 registers, four 16-byte
# loads at once, and 64 registers a thread suffice: four rows of 8192 on an SM, 64 KB. Predicted: nothing for short
# rows, short of nothing (measured: 2 to 5% slower); at 8192, where rung 1 has three rows an SM, close to a copy.
def layernorm_packed(x, w, b, eps=EPS):
    """As layernorm_tile, N up to 8192."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if N > 8192:
        raise Unsupported(f"a row of {N}: here at most 8192, a power of two would waste too many lanes")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 2048 // block)
        each = 16 if N <= 2048 else 64 // x.element_size()
        layernorm_tile_kernel[(triton.cdiv(M, rows),)](
            x, w, b, y, mean, rstd, M, N, x.stride(0), eps, rows, block, AGAIN=True,
            num_warps=rows * block // (32 * each), maxnreg=64,
        )  # fmt: skip
    return y, mean, rstd


# Rung 3. New: a row as a list of chunks, 16 bytes a thread each: 12672 columns take 7 chunks of 2048 and waste 1664
# lanes, where a power of two wastes 3712; and every load is on its way before the first use. For the statistics each
# lane keeps its own mean and m2 as the chunks arrive (Welford 1962), and at the end Chan merges the lanes.
# Predicted: 2MN, most gained just above a power of two. At 32768 two rows would fill an SM's registers: too few.
@triton.jit
def layernorm_kept_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, sixteen,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,  # KEPT chunks, of which the last may be ragged
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    lanes = tl.arange(0, BLOCK)
    kept = ()
    for chunk in tl.static_range(KEPT):
        cols = chunk * BLOCK + lanes
        kept = kept + (tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first"),)  # noqa: RUF005
    lane_mean = tl.zeros((BLOCK,), tl.float32)
    lane_m2 = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(KEPT - 1):
        lane_mean, lane_m2 = welford(kept[chunk], chunk, lane_mean, lane_m2)
    there = (KEPT - 1) * BLOCK + lanes < N  # lanes beyond the end have one element less
    last_mean, last_m2 = welford(kept[KEPT - 1], KEPT - 1, lane_mean, lane_m2)
    lane_mean = tl.where(there, last_mean, lane_mean)
    lane_m2 = tl.where(there, last_m2, lane_m2)
    lane_count = (KEPT - 1) + there.to(tl.float32)
    mean = tl.sum(lane_mean * lane_count, axis=0) / N
    delta = lane_mean - mean
    rstd = tl.rsqrt(tl.sum(lane_m2 + delta * delta * lane_count, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(KEPT):
        cols = chunk * BLOCK + lanes
        y = normalize(widen(kept[chunk], sixteen), mean, rstd, w_ptr, b_ptr, cols, cols < N)
        tl.store(y_ptr + cols, y, mask=cols < N)


@triton.jit
def widen(x, sixteen):
    # opaque() in arithmetic: the compiler cannot see that a shift by an argument is .to(tl.float32). It may not move
    # opaque()'s instruction, so with many chunks it kept the w and b of all of them as well: twice the registers.
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << sixteen).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def welford(x, count, mean, m2):
    """One more element in every lane. No digits are lost: only differences from the running mean are squared."""
    delta = x.to(tl.float32) - mean
    mean += delta * (1.0 / (count + 1.0))
    return mean, m2 + delta * (x.to(tl.float32) - mean)


def layernorm_kept(x, w, b, eps=EPS):
    """As layernorm_tile, a program a row, N up to 16384."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if N > 16384:
        raise Unsupported(f"a row of {N} leaves no registers for a second program: at most 16384")
    if y.numel():
        warps = 8 if N * x.element_size() <= 32768 else 16
        block = warps * 32 * 16 // x.element_size()
        layernorm_kept_kernel[(M,)](
            x, w, b, y, mean, rstd, N, x.stride(0), eps, 16, triton.cdiv(N, block), block, num_warps=warps
        )
    return y, mean, rstd


# Rung 4. New: a long row is shared by programs of 4096 columns, so that an SM holds parts of several rows and one part
# loads while another stores. A part leaves its (mean, m2) as one note of 8 bytes, written and read whole, so no fence
# is needed; it waits until all notes of the row are there, and Chan merges them. Predicted: x is read once from memory
# at any length. A copy's time stays out of reach: w and b, twice the bytes of x, come from L2 for every row.
#
# Why the wait ends: GPUs start programs in the order of their ids. So if a part of the oldest unfinished row has not
# started, no later row's has, and it is next as soon as there is room; its row needs room for PARTS programs, and the
# host sees to it that so many fit. CUDA does not promise this order; CUB's single-pass scan relies on it as well.
@triton.jit
def layernorm_shared_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,
    notes_ptr,  # [M, PARTS], all -1 at first: two NaNs with every bit set, which arithmetic on a GPU never makes
    M, N, stride_x, stride_y, eps, PARTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    # A tile of one row, whose mask says that the row is there, as it always is: so the compiler takes fewer registers.
    rows = (tl.program_id(0) // PARTS).to(tl.int64) + tl.arange(0, 1)
    cols = part * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
    count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
    mean = tl.sum(x.to(tl.float32), axis=1) / count
    x = opaque(x)
    centred = tl.where((cols < N)[None, :], x.to(tl.float32) - mean[:, None], 0.0)
    m2 = tl.sum(centred * centred, axis=1)
    note = (mean.to(tl.int32, bitcast=True).to(tl.int64) << 32) | m2.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(notes_ptr + rows * PARTS + part, note, mask=rows < M, sem="relaxed")
    slots = tl.arange(0, SLOTS)
    at = notes_ptr + rows[:, None] * PARTS + slots[None, :]
    there = (rows < M)[:, None] & (slots < PARTS)[None, :]
    # volatile: each look goes to the L2, where the other SMs' notes arrive, and not to this SM's L1.
    notes = tl.load(at, mask=there, other=0, volatile=True)
    if WAIT:
        while tl.max(tl.max((notes == -1).to(tl.int32), axis=1), axis=0) == 1:
            notes = tl.load(at, mask=there, other=0, volatile=True)
    counts = tl.minimum(tl.maximum(N - slots * BLOCK_N, 0), BLOCK_N).to(tl.float32)  # 0 past the last part
    means = (notes >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    m2s = notes.to(tl.int32).to(tl.float32, bitcast=True)
    mean = tl.sum(means * counts[None, :], axis=1) / N
    delta = means - mean[:, None]
    rstd = tl.rsqrt(tl.sum(m2s + delta * delta * counts[None, :], axis=1) / N + eps)
    w = tl.load(w_ptr + cols, mask=cols < N, eviction_policy="evict_last").to(tl.float32)[None, :]
    b = tl.load(b_ptr + cols, mask=cols < N, eviction_policy="evict_last").to(tl.float32)[None, :]
    y = (opaque(x).to(tl.float32) - mean[:, None]) * rstd[:, None] * w + b
    tl.store(y_ptr + rows[:, None] * stride_y + cols[None, :], y, mask=mask)
    if part == 0:
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def layernorm_forward(x, w, b, eps=EPS):
    """As layernorm_tile for every N: a tile to 2048, packed to 8192, kept to 16384, shared, past a million chunked."""
    N, parts = x.shape[-1], triton.cdiv(x.shape[-1], 4096)
    if N <= 16384:
        return (layernorm_tile if N <= 2048 else layernorm_packed if N <= 8192 else layernorm_kept)(x, w, b, eps)
    if parts > 2 * num_sms():  # two programs of 128 threads fit on an SM, whatever registers they take
        return _layernorm_chunked(x, w, b, eps)
    M, N, y, mean, rstd = _prepare(x, w, b)
    if M:
        notes = torch.full((M, parts), -1, dtype=torch.int64, device=x.device)
        # The interpreter runs programs in turn, where a wait would never end: a first round leaves all the notes.
        for wait in (False, True) if DEVICE.type == "cpu" else (True,):
            layernorm_shared_kernel[(M * parts,)](
                x, w, b, y, mean, rstd, notes, M, N, x.stride(0), y.stride(0), eps,
                parts, _slots_for(parts, 4), 4096, wait, num_warps=4,
            )  # fmt: skip
    return y, mean, rstd


def _slots_for(parts, warps):
    """Lanes to look at `parts` notes with: a power of two that is either within one warp or fills all of them.

    In between, several warps would hold the same note and look at it at different moments, and the sum over the notes
    could take the look that came too early.
    """
    slots = triton.next_power_of_2(parts)
    return slots if slots <= 32 else max(slots, 32 * warps)


# Lesson 7's last rung, for the rows that are too long to be shared: x is read twice.
@triton.jit
def layernorm_chunked_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, BLOCK: tl.constexpr
):  # shapes as in rung 1
    row = tl.program_id(0).to(tl.int64)
    count, mean, m2 = 0.0, 0.0, 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0).to(tl.float32)
        chunk_count = tl.minimum(N - start, BLOCK).to(tl.float32)
        chunk_mean = tl.sum(x, axis=0) / chunk_count
        centred = tl.where(cols < N, x - chunk_mean, 0.0)
        delta = chunk_mean - mean
        m2 += tl.sum(centred * centred, axis=0) + delta * delta * (count * chunk_count / (count + chunk_count))
        count += chunk_count
        mean += delta * (chunk_count / count)
    rstd = tl.rsqrt(m2 / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N)
        tl.store(y_ptr + row * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=cols < N)


def _layernorm_chunked(x, w, b, eps=EPS):
    """As layernorm_tile, a program a row, any N: x is read twice."""
    M, N, y, mean, rstd = _prepare(x, w, b)
    if y.numel():
        layernorm_chunked_kernel[(M,)](x, w, b, y, mean, rstd, N, x.stride(0), eps, BLOCK=4096, num_warps=8)
    return y, mean, rstd


def _prepare(x, w, b):
    expect(x=x, ndim=2, unit_stride=True)
    expect(w=w, b=b, ndim=1, same_shape=True, contiguous=True)
    expect(x=x, w=w, b=b, same_dtype=True)
    if w.shape[0] != x.shape[1]:
        raise ValueError(f"w has {w.shape[0]} elements, but a row of x has {x.shape[1]}: make them equal")
    M, N = x.shape
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    make = torch.empty if N else partial(torch.full, fill_value=math.nan)  # as torch.var_mean has it
    mean, rstd = (make((M,), dtype=torch.float32, device=x.device) for _ in range(2))
    return M, N, y, mean, rstd


# fmt: off
WRONG = (
    Mutant("the tile's last rows are not there", "layernorm_tile_kernel", "(rows < M) & (cols < N)",
           "(rows < M + 1) & (cols < N)", "layernorm_tile", "out of bounds"),
    Mutant("rows taken to be N apart", "layernorm_tile_kernel", "rows * stride_x", "rows * N", "layernorm_packed"),
    Mutant("variance by N - 1", "layernorm_tile_kernel", "keep_dims=True) / N + eps",
           "keep_dims=True) / tl.maximum(N - 1, 1) + eps", "layernorm_forward"),
    Mutant("lanes with no element count as zeros", "layernorm_kept_kernel", "tl.where(there, last_mean, lane_mean)",
           "last_mean", "layernorm_kept"),
    Mutant("lanes merged as if their means were equal", "layernorm_kept_kernel", "lane_m2 + delta * delta * lane_count",
           "lane_m2", "layernorm_kept"),
    Mutant("Welford with the new mean twice", "welford", "m2 + delta * (x.to(tl.float32) - mean)",
           "m2 + (x.to(tl.float32) - mean) * (x.to(tl.float32) - mean)", "layernorm_kept"),
    Mutant("parts merged as if their means were equal", "layernorm_shared_kernel", "m2s + delta", "m2s + 0 * delta",
           "layernorm_forward"),
    Mutant("a ragged part weighs as much as a full one", "layernorm_shared_kernel",
           "tl.minimum(tl.maximum(N - slots * BLOCK_N, 0), BLOCK_N)", "tl.where(slots < PARTS, BLOCK_N, 0)",
           "layernorm_forward"),
)
# fmt: on

LESSON = Lesson(
    about=About(teaches="short rows, long rows, rows longer than an SM holds", hours=0.5, operator="layernorm"),
    problem=PROBLEM,
    rungs=(layernorm_tile, layernorm_packed, layernorm_kept, layernorm_forward),
    checks=(
        *PROBLEM.checks,
        case("37 rows leave the third tile of 16 hanging over", M=37, N=101),
        case("one past a power of two: half the lanes of a row of one program are padding", M=4, N=4097),
        case("five programs share a row, the last has one element", M=3, N=16385, pad=7),
        case("more parts than fit on the interpreter's 4 SMs: chunked", M=2, N=32769),
        case("more parts than fit on a GPU", gib=1, M=2, N=2_000_000),
        case("a row past element 2^31, kept", gib=13, M=3, N=8195, pad=2**30),
        case("and shared", gib=13, M=3, N=16387, pad=2**30),
        case("whole tiles: the bytes are counted here", M=64, N=512),
    ),
    wrong=WRONG,
    claims={
        layernorm_packed: ("16-byte loads", "16-byte stores"),
        layernorm_kept: ("16-byte loads", "16-byte stores", "no spills"),
        layernorm_forward: ("16-byte loads", "16-byte stores"),
    },
    # w and b are counted too: they come with every row in rung 3, and once for 4 rows in a tile.
    passes={layernorm_tile: 1.25, layernorm_packed: 1.25, layernorm_kept: 2.0, layernorm_forward: 1.25},
)

if __name__ == "__main__":
    LESSON.main()
