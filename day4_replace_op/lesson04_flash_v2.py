"""Flash attention, version 2: queries outside, and fewer instructions beside the matmuls
======================================================================================
Version 1 moves O, m and l to HBM and back for each block of keys. With the loops exchanged they stay in registers (Dao,
"FlashAttention-2", 2023, section 3; the exchange is Phil Tillet's, in Triton's tutorial 06, as section 3.2 says):

                     version 1                     version 2
    a program        a head                        a head's block of BLOCK_M queries
    programs         B H                           B H S / BLOCK_M
    its loops        over keys, then queries       over keys

    steps in time      keys ->                       keys ->
    query         | 1  5  9 13 |                | 1  2  3  4 |   program 0
       |          | 2  6 10 14 |                | 1  2  3  4 |   program 1
       v          | 3  7 11 15 |                | 1  2  3  4 |   program 2
                  | 4  8 12 16 |                | 1  2  3  4 |   program 3

    HBM traffic      Q, O, m, l for each           Q, O and lse once;
                     column; K and V once          K and V for each row, mostly from L2

What remains is arithmetic. This is how many cycles an SM of Hopper takes for a tile of 128 x 128 scores, when nothing
overlaps:

    tensor cores: both matmuls                    4 * 128 * 128 * D / 4096          D = 64: 1024     D = 128: 2048
    exponentials, 16 a cycle                      128 * 128 / 16                            1024              1024
    each other instruction on a score, 128 a cycle                                           128               128
    each instruction on an element of O                                                       64               128

    rung        instructions      cycles beside the matmuls: exponentials + scores + O
                score    O        D = 64                         D = 128
    swapped     7.5      10       1024 + 960 + 640 = 2624        1024 + 960 + 1280 = 3264
    deferred    7.5       1       1024 + 960 +  64 = 2048        1024 + 960 +  128 = 2112
    folded      5.5       1       1024 + 704 +  64 = 1792        1024 + 704 +  128 = 1856
    tma         3.5       1       1024 + 448 +  64 = 1536        1024 + 448 +  128 = 1600

The 7.5 are the mask's comparison and selection, scale, maximum, difference, the factor log2(e) of exp, sum, and half a
conversion, which makes two 16-bit values at once. At D = 128 tma takes 2048 + 1600 = 3648 cycles per tile: 56% of the
tensor cores' peak. At D = 64 it is 40%. The work beside the matmuls cannot be reduced further. It can only overlap with
the matmuls of other warps: rung 5 here, and lesson 8.

You will learn: which loop to give to the grid, FLOPs outside matmuls, exp2, a separate tail block, autotuned tiles.
Run it:    python3 course.py run lesson04_flash_v2
Check it:  python3 course.py check lesson04_flash_v2
Time it:   python3 course.py bench lesson04_flash_v2
"""

import math

from lessonkit import (
    About,
    Lesson,
    Mutant,
    Prediction,
    Refusal,
    Unsupported,
    case,
    compiled,
    device,
    expect,
    needs,
    shared_memory,
    tma_takes,
)

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems import attention_plain as naive
from problems.attention_plain import PROBLEM_LSE, precision

WIDTHS = (16, 32, 64, 128)  # D: a power of two, so that a tile has no padding; lesson 5 takes any up to 256
LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
WIDE = {"B": 4, "H": 16, "S": 4096, "D": 128}


# Rung 1. New: version 1's loops exchanged, with the same arithmetic. The loop over queries becomes the grid. Predicted:
# Q, O, m and l are moved once instead of S / B_c times. At S = 16384 16 heads are 2048 programs, not 16, which fill all
# SMs.
@triton.jit
def swapped_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # [BH, S, D] each, lse [BH, S] in fp32
    scale, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)  # programs with the same head are neighbours: its K and V stay in L2
    head, rows = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = head * S * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + tile, mask=rows[:, None] < S, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block = head * S * D + keys[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + block, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + block, mask=keys[:, None] < S, other=0.0)
        acc, total, m = attend_normalized(acc, total, m, q, k, v, S - start, scale, PRECISION)
    lse = m + tl.log(total)
    tl.store(o_ptr + tile, acc, mask=rows[:, None] < S)
    tl.store(lse_ptr + head * S + rows, lse, mask=rows < S)


@triton.jit
def scores(q, k, keys_left, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """q k^T [BLOCK_M, BLOCK_N]. MASKED: keys from keys_left on are past the end."""
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        s = tl.where(tl.arange(0, s.shape[1])[None, :] < keys_left, s, -float("inf"))
    return s


@triton.jit
def attend_normalized(acc, total, m, q, k, v, keys_left, scale, PRECISION: tl.constexpr):
    """Take a block of keys into acc [BLOCK_M, D], total [BLOCK_M] and m [BLOCK_M], as in algorithm 1."""
    s = scores(q, k, keys_left, True, PRECISION) * scale
    m_block = tl.max(s, axis=1)
    m_new = tl.maximum(m, m_block)
    p = tl.exp(s - m_block[:, None])
    old, new = tl.exp(m - m_new), tl.exp(m_block - m_new)
    total_new = old * total + new * tl.sum(p, axis=1)
    pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return ((total * old)[:, None] * acc + new[:, None] * pv) / total_new[:, None], total_new, m_new


def swapped(q, k, v):
    """q, k, v [B, H, S, D] contiguous, D 16, 32, 64 or 128 -> o [B, H, S, D], lse [B, H, S] in fp32."""
    return _run(swapped_kernel, q, k, v, 1.0)


# Rung 2. New: O is divided by the sum once, after the loop; the loop only rescales it to the new maximum. Rung 1 has
# ten instructions on each element of O: two multiplications, a sum, and a division of about eight. One is left: the
# tensor cores do the addition. Predicted: at D = 128 5312 cycles per tile become 4160. The machine code gains less,
# since rung 1's division by a sum is one reciprocal a row and one multiplication an element.
@triton.jit
def attend_deferred(acc, total, m, q, k, v, keys_left, scale, PRECISION: tl.constexpr):
    s = scores(q, k, keys_left, True, PRECISION) * scale
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp(s - m_new[:, None])
    old = tl.exp(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, total * old + tl.sum(p, axis=1), m_new


@triton.jit
def deferred_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # [BH, S, D] each, lse [BH, S] in fp32
    scale, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)  # programs with the same head are neighbours: its K and V stay in L2
    head, rows = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = head * S * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + tile, mask=rows[:, None] < S, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block = head * S * D + keys[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + block, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + block, mask=keys[:, None] < S, other=0.0)
        acc, total, m = attend_deferred(acc, total, m, q, k, v, S - start, scale, PRECISION)
    acc /= total[:, None]
    lse = m + tl.log(total)
    tl.store(o_ptr + tile, acc, mask=rows[:, None] < S)
    tl.store(lse_ptr + head * S + rows, lse, mask=rows < S)


def deferred(q, k, v):
    """As swapped."""
    return _run(deferred_kernel, q, k, v, 1.0)


# Rung 3. New: exp(scale s - m) = 2^(scale log2(e) s - m log2(e)). The hardware's exponential is a power of 2, so exp
# multiplies by log2(e) first. With that factor in the scale, and m kept in powers of 2, scale, difference and factor
# are one fused multiply-add. Predicted: two instructions per score less, 4160 cycles become 3904. The machine code
# gains more, since Triton's exp also compares, and multiplies twice, for results below 2^-126.
@triton.jit
def attend(acc, total, m, q, k, v, keys_left, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    s = scores(q, k, keys_left, MASKED, PRECISION)
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    old = tl.exp2(m - m_new)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return acc, total * old + tl.sum(p, axis=1), m_new


@triton.jit
def folded_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # [BH, S, D] each, lse [BH, S] in fp32
    scale, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)  # programs with the same head are neighbours: its K and V stay in L2
    head, rows = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = head * S * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + tile, mask=rows[:, None] < S, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, S, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block = head * S * D + keys[:, None] * D + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + block, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + block, mask=keys[:, None] < S, other=0.0)
        acc, total, m = attend(acc, total, m, q, k, v, S - start, scale, True, PRECISION)
    acc /= total[:, None]
    lse = (m + tl.log2(total)) * LN2
    tl.store(o_ptr + tile, acc, mask=rows[:, None] < S)
    tl.store(lse_ptr + head * S + rows, lse, mask=rows < S)


def folded(q, k, v):
    """As swapped."""
    return _run(folded_kernel, q, k, v, LOG2E)


# Rung 4. New: TMA, Hopper's copy unit, with descriptors of [BH, S, D]. One thread issues the load of a whole tile. TMA
# fills rows past S with zeros, so no program reads into the next head. Only the last block of keys is masked, if it is
# not whole. Predicted: two instructions per score less, and none for addresses: 3904 cycles become 3648, or less.
@triton.jit
def tma_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr,
    scale_log2, S, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK_M)
    head, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M
    q = q_desc.load([head, row, 0]).reshape(BLOCK_M, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    whole = S // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        k, v = k_desc.load([head, start, 0]).reshape(BLOCK_N, D), v_desc.load([head, start, 0]).reshape(BLOCK_N, D)
        acc, total, m = attend(acc, total, m, q, k, v, BLOCK_N, scale_log2, False, PRECISION)
    if whole < S:
        k, v = k_desc.load([head, whole, 0]).reshape(BLOCK_N, D), v_desc.load([head, whole, 0]).reshape(BLOCK_N, D)
        acc, total, m = attend(acc, total, m, q, k, v, S - whole, scale_log2, True, PRECISION)
    o_desc.store([head, row, 0], (acc / total[:, None]).to(o_desc.dtype).reshape(1, BLOCK_M, D))
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + head.to(tl.int64) * S + rows, (m + tl.log2(total)) * LN2, mask=rows < S)


@needs(90, "TMA", interpreted=True)
def tma(q, k, v):
    """As swapped; TMA needs tensors that begin at a multiple of 16 bytes."""
    o, lse, (block_m, block_n) = _prepare(q, k, v)
    if not tma_takes(q, k, v):
        raise Unsupported("the TMA wants tensors that begin at 16 bytes")
    B, H, S, D = q.shape
    descs = [_descriptor(t, n) for t, n in ((q, block_m), (k, block_n), (v, block_n), (o, block_m))]
    tma_kernel[(B * H * triton.cdiv(S, block_m),)](
        *descs, lse, LOG2E / math.sqrt(D), S, D, block_m, block_n, precision(), num_warps=8, num_stages=2
    )
    return o, lse


def _descriptor(t, rows):
    return TensorDescriptor.from_tensor(t.flatten(0, 1), [1, rows, t.shape[-1]])


# Rung 5. New: the autotuner chooses among eight tiles. A tall tile reads less of K and V from L2 for each matmul. A
# program of 4 warps leaves room for a second one on the SM, whose matmuls run while this one computes exponentials.
# Predicted: at D = 128 between rung 4's 3648 cycles and, at best, the longer of 2048 and 1600.
def _set_blocks(named):
    D, block_m, block_n = (named[name] for name in ("D", "BLOCK_M", "BLOCK_N"))
    for name, rows in (("q_desc", block_m), ("k_desc", block_n), ("v_desc", block_n), ("o_desc", block_m)):
        named[name].block_shape = [1, rows, D]


def _prune(configs, named, **_):
    """The tiles that fit into shared memory, and into 208 of a thread's registers: acc, s, and p in half of s's."""
    size, D = named["q_desc"].base.element_size(), named["D"]

    def fits(c):
        m, n, threads = c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"], 32 * c.num_warps
        return (m + 2 * n * c.num_stages) * D * size <= shared_memory() and m * (2 * D + 3 * n) <= 2 * 208 * threads

    return list(filter(fits, configs))[: None if device.HAS_GPU else 1]


def _time(call, quantiles):  # without a GPU there is nothing to time, and one configuration to choose from
    return triton.testing.do_bench(call, quantiles=quantiles) if device.HAS_GPU else [0, 0, 0]


TILES = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (256, 64, 8, 3),
         (64, 128, 4, 2), (64, 64, 4, 3))  # fmt: skip
tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages, pre_hook=_set_blocks)
     for m, n, warps, stages in TILES],
    key=["S", "D"], prune_configs_by={"early_config_prune": _prune}, do_bench=_time,
)(tma_kernel)  # fmt: skip


def flash_v2(q, k, v):
    """As swapped; the first call for an S and a D times up to eight tiles and keeps the fastest."""
    # The tiles are for 227 KB of shared memory, as Hopper's SMs have.
    if device.architecture() < 90 or not device.roomy() or q.element_size() != 2 or not tma_takes(q, k, v):
        return folded(q, k, v)
    o, lse, _ = _prepare(q, k, v)
    B, H, S, D = q.shape
    grid = lambda tile: (B * H * triton.cdiv(S, tile["BLOCK_M"]),)  # noqa: E731
    descs = [_descriptor(t, 16) for t in (q, k, v, o)]
    tuned_kernel[grid](*descs, lse, LOG2E / math.sqrt(D), S, D, PRECISION=precision())
    return o, lse


def _run(kernel, q, k, v, unit):
    """Launch a kernel whose exponential is exp (unit 1) or exp2 (unit log2(e))."""
    o, lse, block = _prepare(q, k, v)
    B, H, S, D = q.shape
    if o.numel():
        kernel[(B * H * triton.cdiv(S, block[0]),)](
            q, k, v, o, lse, unit / math.sqrt(D), S, D, *block, precision(), num_warps=8, num_stages=2
        )
    return o, lse


def _prepare(q, k, v):
    """Empty results, and a tile of 128 queries and 128 keys, or of 64 in fp32, whose operands need more registers."""
    expect(q=q, k=k, v=v, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    if q.shape[-1] not in WIDTHS:
        raise ValueError(f"q has D = {q.shape[-1]}, expected one of {WIDTHS}: lesson05_flash_options takes up to 256")
    block = (128, 128) if q.element_size() == 2 else (64, 64)
    return torch.empty_like(q), torch.empty(q.shape[:-1], device=q.device), block


def inputs(B, H, S, D, dtype=torch.float32):
    return naive.inputs(B, H, S, D, dtype=dtype)[:3]


def what_hopper_makes_of_it(rung):
    """For sm_90: no spills, and wgmma reads Q, K and V where TMA wrote them. Shared memory holds Q, two stages of K and
    V, and barriers, to the kilobyte: there is no second copy."""
    kernel = next(k for k in compiled.kernels(__name__, (90,)) if k.rung == rung.__name__)
    assert (kernel.warps, kernel.spills) == (8, 0)
    if rung is tma:
        assert kernel.shared // 1024 == (128 + 4 * 128) * 64 * 2 // 1024


LESSON = Lesson(
    about=About(
        teaches="loops exchanged, one division, powers of 2, TMA, tiles by timing: where version 2's gain comes from",
        hours=1.5,
        star=True,
        operator="attention",
        pictures=("score_sweeps",),
    ),
    problem=PROBLEM_LSE,
    inputs=inputs,  # no mask yet
    rungs=(swapped, deferred, folded, tma, flash_v2),
    predicted=(  # 4096 FLOPs per cycle are the limit, so 2048 cycles over those of the table
        Prediction(rung=swapped, at=WIDE, percent_of_limit=38.6),
        Prediction(
            rung=deferred, at=WIDE, percent_of_limit=49.2,
            why="Triton's exp takes five instructions per score more than exp2, not two, as the compiled kernels of "
            "rungs 2 and 3 show: 384 cycles, a third of what is missing. Cause of the rest not found: no spills.",
        ),
        Prediction(rung=folded, at=WIDE, percent_of_limit=52.5),
        Prediction(rung=tma, at=WIDE, percent_of_limit=56.1),
        Prediction(rung=flash_v2, at=WIDE, percent_of_limit=(56.1, 100)),
    ),
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("one token: the softmax is 1, all other keys of the block must not count", B=2, H=1, S=1, D=16),
        case("one past a block of 64", B=1, H=1, S=65, D=32),
        case("two heads, a prime", B=1, H=2, S=67, D=16),
        case("many blocks, a tail", gib=0.3, B=1, H=3, S=1021, D=128),
        case("many blocks", gib=0.3, B=2, H=3, S=1024, D=64),
        case("offsets past 2^31", gib=110, B=1, H=8200, S=2100, D=128),
        case("in 16 bits one past a tile of 128: a tail of one key, a program with one query", B=1, H=2, S=129, D=16),
        case("two blocks of 128 and no tail; the bytes are counted here", B=1, H=1, S=256, D=16),
    ),
    benches=tuple(
        {"B": 16384 // S, "H": 2048 // D, "S": S, "D": D} for D in (64, 128) for S in (512, 2048, 4096, 16384)
    ),
    wrong=(
        Mutant("the block's own maximum forgotten", "attend_normalized", "new[:, None] * pv", "pv", "swapped"),
        Mutant("O is not rescaled", "attend_deferred", "acc * old[:, None]", "acc", "deferred"),
        Mutant("the sum is not rescaled", "attend", "total * old", "total", "folded"),
        Mutant("e and 2 mixed up", "attend", "old = tl.exp2", "old = tl.exp", "folded"),
        Mutant("lse in powers of 2", "folded_kernel", "tl.log2(total)) * LN2", "tl.log2(total))", "folded"),
        Mutant("the last block left out", "tma_kernel", "if whole < S", "if whole > S", "tma", "nan"),
        Mutant("the tail is not masked", "tma_kernel", "S - whole, scale_log2, True", "S - whole, scale_log2, False",
               "flash_v2"),
    ),
    claims={
        swapped: ("wgmma", "16-byte loads"),
        deferred: ("wgmma", "cp.async"),
        folded: ("wgmma", "cp.async", "no spills"),
        tma: ("wgmma", "tma", "no spills"),
        flash_v2: ("wgmma", "tma", "no spills"),
    },
    # S / 128 = 2 times K and V, once Q and O, of four parts; and lse.
    passes=dict.fromkeys((swapped, deferred, folded, tma, flash_v2), 6 / 4 + 4 / (4 * 16 * 2)),
    properties=(what_hopper_makes_of_it,),
    refuses=(
        *PROBLEM_LSE.refuses,
        Refusal("D of 96", lambda f: f(*inputs(1, 1, 4, 96)), ValueError, "D = 96, expected one of"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
