"""LayerNorm at every row length: short, long, longer than an SM
=============================================================
Lesson 7's row kernel moves the least, 2MN elements, and still loses bandwidth at both ends. A row of 256 is too little
work for a program; a row of 32768 in fp32 (128 KB) leaves room for one program an SM, and while that one computes its
statistics nothing of it is on the way. By Little's law 4.2 TB/s at about 800 ns is 3.4 MB on its way, 25 KB for each
of 132 SMs: so 50 KB or more should be resident, that one half may load while the other stores.

You will learn: several rows a program, keeping 16-bit data packed, statistics a lane, re-reading from L1.
Run it:    python day2_triton_basics/lesson07b_layernorm_lengths.py
Check it:  python -m lessonkit check lesson07b_layernorm_lengths
Time it:   python -m lessonkit bench lesson07b_layernorm_lengths
"""

from lessonkit import Lesson, Mutant, Unsupported, case

import triton
import triton.language as tl

from day2_triton_basics.lesson07_layernorm import (
    EPS,
    PEERS,
    REFUSES,
    inputs,
    normalize,
    prepare,
    reference,
    shift_and_scale_change_nothing,
    strange_numbers_stay_in_their_row,
    work,
)


# Rung 1. Lesson 7's row kernel with a second dimension: a program owns ROWS whole rows, about 4096 elements, 32 for
# each thread. Predicted: 2MN as before; at N = 256 a sixteenth of the programs, and w and b are asked for once a tile.
@triton.jit
def layernorm_tile_kernel(
    x_ptr,  # [M, N], rows stride_x elements apart
    w_ptr,  # [N]
    b_ptr,  # [N]
    y_ptr,  # [M, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    M,
    N,
    stride_x,
    eps,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1, keep_dims=True) / N
    centred = tl.where(cols < N, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / N + eps)
    tl.store(y_ptr + rows * N + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N), mask=mask)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def layernorm_tile(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32. Tiles of whole rows, N up to 32768."""
    M, N, y, mean, rstd = prepare(x, w, b)
    if N > 32768:
        raise Unsupported(f"a row of {N} does not fit one block: at most 32768")
    if y.numel():
        block = triton.next_power_of_2(N)
        rows = max(1, 4096 // block)
        layernorm_tile_kernel[(triton.cdiv(M, rows),)](
            x, w, b, y, mean, rstd, M, N, x.stride(0), eps, rows, block, num_warps=min(32, rows * block // 1024)
        )
    return y, mean, rstd


# Rung 2. New: a row as a list of chunks, 16 bytes a thread each, kept as they came. 16-bit elements stay packed two to
# a register, half of rung 1's fp32 copy; 12672 columns take 7 chunks of 2048 and waste 1664 lanes, where a power of
# two wastes 3712; and every load is on its way before the first use. For the statistics each lane keeps its own mean
# and m2 as the chunks arrive (Welford 1962), and at the end Chan merges the lanes.
# What does not fit, the front of a very long row, is read again, last chunk first: what was read last is the likeliest
# to be in L1 still. Predicted: to 128 KB a row 2MN; at N = 131072 half of x is asked for twice, but not from memory.
@triton.jit
def layernorm_kept_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N, stride_x, eps, front, sixteen,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # front: columns to read twice, a multiple of BLOCK; KEPT: chunks after them, of which the last may be ragged
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * N
    lanes = tl.arange(0, BLOCK)
    kept = ()
    for chunk in tl.static_range(KEPT):
        cols = front + chunk * BLOCK + lanes
        kept = kept + (tl.load(x_ptr + cols, mask=cols < N, other=0.0, eviction_policy="evict_first"),)  # noqa: RUF005
    count = 0.0
    lane_mean = tl.zeros((BLOCK,), tl.float32)
    lane_m2 = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, front, BLOCK):
        x = tl.load(x_ptr + start + lanes, eviction_policy="evict_last")
        count, lane_mean, lane_m2 = welford(x, count, lane_mean, lane_m2)
    for chunk in tl.static_range(KEPT - 1):
        count, lane_mean, lane_m2 = welford(kept[chunk], count, lane_mean, lane_m2)
    there = front + (KEPT - 1) * BLOCK + lanes < N  # lanes beyond the end have one element less
    _, last_mean, last_m2 = welford(kept[KEPT - 1], count, lane_mean, lane_m2)
    lane_mean = tl.where(there, last_mean, lane_mean)
    lane_m2 = tl.where(there, last_m2, lane_m2)
    lane_count = count + there.to(tl.float32)
    mean = tl.sum(lane_mean * lane_count, axis=0) / N
    delta = lane_mean - mean
    rstd = tl.rsqrt(tl.sum(lane_m2 + delta * delta * lane_count, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(KEPT):
        cols = front + chunk * BLOCK + lanes
        y = normalize(widen(kept[chunk], sixteen), mean, rstd, w_ptr, b_ptr, cols, cols < N)
        tl.store(y_ptr + cols, y, mask=cols < N)
    for back in range(BLOCK, front + BLOCK, BLOCK):
        cols = front - back + lanes
        x = tl.load(x_ptr + cols, eviction_policy="evict_first")
        tl.store(y_ptr + cols, normalize(x, mean, rstd, w_ptr, b_ptr, cols, cols < N))


@triton.jit
def welford(x, count, mean, m2):
    """One more element in every lane. No digits are lost: only differences from the running mean are squared."""
    delta = x.to(tl.float32) - mean
    mean += delta * (1.0 / (count + 1.0))
    return count + 1.0, mean, m2 + delta * (x.to(tl.float32) - mean)


@triton.jit
def widen(x, sixteen):
    # bf16 to fp32 by hand, by a shift whose width is an argument: the compiler cannot see that the result is that of
    # .to(tl.float32), which it had before; it would keep those values, and they take twice the registers.
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << sixteen).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


def layernorm_kept(x, w, b, eps=EPS):
    """As layernorm_tile, a program a row, any N."""
    M, N, y, mean, rstd = prepare(x, w, b)
    if y.numel():
        warps = 8 if N * x.element_size() <= 32768 else 16
        block = warps * 32 * 16 // x.element_size()
        chunks = triton.cdiv(N, block)
        kept = min(chunks, 16)  # 16 chunks are 64 of the 128 registers that each of 512 threads can have
        layernorm_kept_kernel[(M,)](
            x, w, b, y, mean, rstd, N, x.stride(0), eps, (chunks - kept) * block, 16, kept, block, num_warps=warps
        )
    return y, mean, rstd


# Rung 3. New: no kernel, the choice between the two. To 4096 columns a tile is full, and its fp32 copy fits; from
# there on the packed chunks leave room for more programs on an SM.
def layernorm_forward(x, w, b, eps=EPS):
    """x [M, N], w [N], b [N] -> y [M, N], mean [M] and rstd [M] in fp32. Any N, x read once from device memory."""
    return (layernorm_tile if x.shape[-1] <= 4096 else layernorm_kept)(x, w, b, eps)


# fmt: off
WRONG = (
    Mutant("the tile's last rows are not there", "layernorm_tile_kernel", "(rows < M) & (cols < N)",
           "(rows < M + 1) & (cols < N)", "layernorm_tile", "out of bounds"),
    Mutant("rows taken to be N apart", "layernorm_tile_kernel", "rows * stride_x", "rows * N", "layernorm_tile"),
    Mutant("variance by N - 1", "layernorm_tile_kernel", "keep_dims=True) / N + eps",
           "keep_dims=True) / tl.maximum(N - 1, 1) + eps", "layernorm_forward"),
    Mutant("lanes with no element count as zeros", "layernorm_kept_kernel", "tl.where(there, last_mean, lane_mean)",
           "last_mean", "layernorm_kept"),
    Mutant("lanes merged as if their means were equal", "layernorm_kept_kernel", "lane_m2 + delta * delta * lane_count",
           "lane_m2", "layernorm_kept"),
    Mutant("Welford with the new mean twice", "welford", "m2 + delta * (x.to(tl.float32) - mean)",
           "m2 + (x.to(tl.float32) - mean) * (x.to(tl.float32) - mean)", "layernorm_kept"),
    Mutant("the first chunk is not written", "layernorm_kept_kernel", "range(BLOCK, front + BLOCK, BLOCK)",
           "range(BLOCK, front, BLOCK)", "layernorm_forward", "nan"),
)
# fmt: on

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    rungs=(layernorm_tile, layernorm_kept, layernorm_forward),
    checks=(
        case("no rows", M=0, N=5),
        case("rows of nothing", M=3, N=0),
        case("one element a row: a tile of 4096 rows for 2", M=2, N=1),
        case("a prime: 27 of 128 lanes are padding, and 37 rows leave the second tile of 32 hanging over", M=37, N=101),
        case("rows 3 elements apart, so that most are not aligned", M=4, N=1025, pad=3),
        case("one past the tiles: a last chunk of one element", M=4, N=4097),
        case("seven chunks in 16 bits, the last ragged", M=3, N=12672),
        case("longer than what is kept, ragged: two chunks are read twice", M=2, N=17 * 4096 + 77),
        case("a row past element 2^31", gib=30, M=3, N=5, pad=2**30),
        case("whole tiles: the bytes are counted here", M=64, N=512),
    ),
    benches=tuple(
        {"M": m, "N": int(n)}
        for m, n in zip(
            (32768, 32768, 4096, 8192, 4096, 4096, 2048), (256, 1024, 4096, 8192, 12672, 32768, 131072), strict=True
        )
    ),
    work=work,
    wrong=WRONG,
    peers=PEERS,
    claims={layernorm_kept: ("16-byte loads", "16-byte stores", "no spills"), layernorm_forward: ("no spills",)},
    # w and b are counted too: they come with every row in rung 2, and once for 8 rows in a tile.
    passes={layernorm_tile: 1.125, layernorm_kept: 2.0, layernorm_forward: 1.125},
    properties=(shift_and_scale_change_nothing, strange_numbers_stay_in_their_row),
    refuses=REFUSES,
)

if __name__ == "__main__":
    LESSON.main()
