"""Gluon, third part: outputs too small for the GPU
===============================================
128 tokens times a weight of 4096 columns: C has 32 tiles of 128 x 128, the GPU 132 SMs. So K is shared out as well,
SPLITS programs to a tile, and somebody adds up. In cycles, if an SM loads 40 bytes a cycle and memory gives 2300:

    M = 128, N = K = 4096    loads of an SM    memory: b, 33.5 MB    parts, written and read    in all
    128 x 64,  K in 2        768 KB  19,700    14,600                 32 KB + 4000   5,000      24,700
    128 x 128, K in 4        512 KB  13,100    14,600                 64 KB + 4000   6,100      20,700
    128 x 256, K in 8        384 KB   9,800    14,600                128 KB + 4000   8,100      22,700

Loads and memory run at a time, parts come afterwards; 4000 are four trips to L2: stores, the fence behind them, a
counter, loads. A launch costs as much again, and here each microsecond is 5% of the answer: so there are no partitions
to start and no descriptor of C to fetch, and the machine code, which comes from memory too, is a third of 7b's.

You will learn: reduce-scatter between programs, counters that are never reset, why waiting ends, prefetching into L2.
Needs a Hopper GPU to run; a slow twin of the meeting runs without one.
Run it:    python day3_matmul_tk/lesson07c_gluon_small.py
Check it:  python -m lessonkit check lesson07c_gluon_small
Time it:   python -m lessonkit bench lesson07c_gluon_small
"""

import math
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import product

from lessonkit import Lesson, Mutant, Unsupported, case, needs, num_sms

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from day3_matmul_tk import lesson07_gluon_matmul as first
from day3_matmul_tk.lesson01_matmul import LAYERS, PEERS, empty_product, inputs, work
from day3_matmul_tk.lesson07_gluon_matmul import check_operands, describe
from day3_matmul_tk.lesson07b_gluon_persistent import FREE, Barrier, in_any_order, slot

everybody = getattr(gl, "barrier", None) or gl.thread_barrier  # all threads of a program; Triton 3.7 renamed it


@gluon.jit
def share(i, K, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr):  # the first step of part i of K
    return i * ((K + BLOCK_K - 1) // BLOCK_K) // SPLITS


# What the rungs share: lesson 7's ring and its product in flight, over one part of K of one tile.
@gluon.jit
def multiply_part(a_desc, b_desc, row, col, begin, steps, STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr):
    N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, N, 16])
    a_smem, b_smem, full = first.stages(a_desc, STAGES), first.stages(b_desc, STAGES), first.barriers(STAGES, 1)
    for i in range(min(STAGES, steps)):  # not unrolled: the shorter the code, the sooner it is there
        to = a_smem.index(i), b_smem.index(i), full.index(i)
        first.load_step(a_desc, b_desc, to[0], to[1], to[2], row, col, (begin + i) * 64, A_T, B_T)
    acc = gl.zeros((128, N), gl.float32, sums)
    for step in range(steps):
        stage, parity = slot(step, STAGES)
        mbarrier.wait(full.index(stage), parity)
        a, b = first.turned(a_smem.index(stage), A_T), first.turned(b_smem.index(stage), B_T)
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the product before this one is over, and its stage free
        later = step - 1 + STAGES
        to = a_smem.index(later % STAGES), b_smem.index(later % STAGES), full.index(later % STAGES)
        more = (step > 0) & (later < steps)
        first.load_step(a_desc, b_desc, to[0], to[1], to[2], row, col, (begin + later) * 64, A_T, B_T, more)
    return warpgroup_mma_wait(0, deps=(acc,))


# Parts go through L2 in this order. A thread of wgmma's layout holds, of every 8 columns, 2 neighbours in each of 2
# rows; here its 4 are neighbours, and so are a warp's threads: 16 bytes each, 512 in a row. Nothing moves for it.
@gluon.jit
def in_order(x, SPLITS: gl.constexpr):  # [128, N] -> [SPLITS, 128 * N / SPLITS]: shares of N / SPLITS columns
    x = x.reshape((8, 2, 8, SPLITS, x.shape[1] // SPLITS // 8, 4, 2)).permute((3, 4, 0, 2, 5, 1, 6))
    return x.reshape((SPLITS, x.numel // SPLITS))


@gluon.jit
def as_tile(x):  # a share, back: [128 * N] -> [128, N]
    x = x.reshape((x.numel // 1024, 8, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5))
    return x.reshape((128, x.numel // 128))


@gluon.jit
def store(c_ptr, x, row, col, M, N):
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))[:, None].to(gl.int64)
    cols = col + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(c_ptr + rows * N + cols, x.to(c_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


# A counter for each tile, and nobody resets it: a call adds SPLITS, a power of two, so it begins at a multiple.
@gluon.jit
def due(counter, SPLITS: gl.constexpr):  # what it will show when all have come, from what it shows before
    return (counter | SPLITS - 1) + 1


@gluon.jit
def look(counter_ptr):  # acquire, by each thread for itself: what it loads afterwards is not older
    return gl.inline_asm_elementwise("ld.acquire.gpu.b32 $0, [$1];", "=r,l", [counter_ptr], gl.int32, False, 1)


# Rung 1. Split-K in one launch, as lesson 3's stream_k. All write their parts, in shares of columns, and say so; the
# tile's first program adds up, always in the same order. Predicted at 4096: it reads 256 KB alone, 3000 cycles more.
# Rung 2. New: reduce-scatter. Each of the SPLITS programs adds up one share: SPLITS readers at a time, 64 KB each.
# Does the waiting end? There are no more programs than SMs; and if another kernel holds some: programs start by number,
# a tile's are neighbours, so all tiles but one have all theirs, end, and make room for that one's.
@gluon.jit(do_not_specialize=["tiles_m", "M", "K"])
def split_kernel(
    a_desc, b_desc,
    b_ptr, c_ptr,  # [K, N], [M, N]
    parts_ptr, counters_ptr,  # [tiles, SPLITS (of which share), SPLITS (from which part of K), SIZE] fp32; [tiles]
    tiles_m, M, N, K, stride_bk, stride_bn, STAGES: gl.constexpr, SPLITS: gl.constexpr, SCATTER: gl.constexpr,
    AHEAD: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    row, col = tile % tiles_m * 128, tile // tiles_m * BLOCK_N
    begin, end = share(split, K, 64, SPLITS), share(split + 1, K, 64, SPLITS)
    if AHEAD > 0:
        prefetch(b_ptr, stride_bk, stride_bn, begin * 64, col, min(end * 64, K), N, BLOCK_N, AHEAD, B_T)
    counters_ptr += tile
    if SPLITS > 1:  # now, while there is time
        count = due(look(counters_ptr), SPLITS)
    acc = multiply_part(a_desc, b_desc, row, col, begin, end - begin, STAGES, A_T, B_T)
    if SPLITS == 1:
        store(c_ptr, acc, row, col, M, N)
    else:
        x = in_order(acc, SPLITS)
        SIZE: gl.constexpr = x.shape[1]
        each = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
        number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, x.type.layout))[None, :]
        parts_ptr += tile * SPLITS * SPLITS * SIZE
        gl.store(parts_ptr + (each * SPLITS + split) * SIZE + number, x)
        everybody()  # one thread counts: the others' stores must be done
        gl.atomic_add(counters_ptr, 1, sem="release", scope="gpu")
        mine, others = (split, split + 1) if SCATTER else (0, gl.where(split == 0, SPLITS, 0))
        for which in range(mine, others):
            while look(counters_ptr) - count < 0:  # a difference: right when the counter has passed 2^31, too
                pass
            x = gl.load(parts_ptr + (which * SPLITS + each) * SIZE + number, cache_modifier=".cg")  # not L1, it is old
            store(c_ptr, as_tile(gl.sum(x, axis=0)), row, col + which * (BLOCK_N // SPLITS), M, N)


@needs(90, "TMA and wgmma", only=True)
def owner_adds(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16; rows or columns contiguous and 16 bytes aligned. Deterministic."""
    return _run(a, b, scatter=False)


@needs(90, "TMA and wgmma", only=True)
def reduce_scatter(a, b):
    """As owner_adds."""
    return _run(a, b)


# Rung 3. New: tile and parts follow the shape, by the table's arithmetic. Predicted: nothing new for N = 4096 and 14336
# (112 whole tiles); 28672 is one wave of 128 x 256; 1024 is 128 tiles of 128 x 64 whose programs need not meet.
@needs(90, "TMA and wgmma", only=True)
def fitted(a, b, lines=0):
    """As reduce_scatter, tile and parts by _cycles; what it does not take goes to lesson 3's or lesson 7b's matmul."""
    rows = empty_product(a, b).shape[0]
    if rows > 64:
        with suppress(Unsupported):
            return _run(a, b, (64, 128, 256), lines=lines)
    if rows <= 128:
        return import_module("day3_matmul_tk.lesson03_matmul_skinny").matmul_skinny(a, b)
    return import_module("day3_matmul_tk.lesson07b_gluon_persistent").matmul(a, b)


# Rung 4. New: before anything else a program asks L2 for the first 256 KB of its part of b, line by line in the order
# in which they lie: memory works while barriers are made and descriptors and code come in. Predicted: up to 1 us.
@gluon.jit
def prefetch(b_ptr, stride_k, stride_n, k, n, K, N, BLOCK_N: gl.constexpr, STEPS: gl.constexpr, B_T: gl.constexpr):
    line = gl.arange(0, BLOCK_N * STEPS, layout=gl.BlockedLayout([1], [32], [8], [0]))  # of 128 bytes: 64 of K, or of N
    ks = gl.minimum(k + (line % STEPS * 64 if B_T else line // (BLOCK_N // 64)), K - 1).to(gl.int64)
    ns = gl.minimum(n + (line // STEPS if B_T else line % (BLOCK_N // 64) * 64), N - 1).to(gl.int64)
    ptrs = b_ptr + ks * stride_k + ns * stride_n
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], gl.int32, False, 1)


@needs(90, "TMA and wgmma", only=True)
def prefetched(a, b):
    """As fitted, with a prefetch."""
    return fitted(a, b, lines=2048)


def _run(a, b, widths=(128,), scatter=True, lines=0):
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    check_operands(a=a, b=b)
    tiles_m = triton.cdiv(M, 128)
    most = {n: min(num_sms() // (tiles_m * triton.cdiv(N, n)), triton.cdiv(K, 64)) for n in widths}
    choices = [(n, splits) for n in widths for splits in (1, 2, 4, 8) if splits <= most[n]]
    if not choices:
        raise Unsupported("more tiles than SMs: a grid that stays, lesson 7b's, is for these")
    block_n, splits = min(choices, key=lambda choice: _cycles(N, K, *choice))
    tiles = tiles_m * triton.cdiv(N, block_n)
    (a_desc, a_t), (b_desc, b_t) = describe(a, 128, 64), describe(b, 64, block_n)
    eager = (
        a.is_cuda and not torch.cuda.is_current_stream_capturing()
    )  # a CUDA graph, replayed at any time, has its own
    place = torch.cuda.current_stream(a.device) if eager else a
    counters = (_counters if eager else _counters.__wrapped__)(place, splits)
    parts = torch.empty(tiles * splits if splits > 1 else 0, 128, block_n, dtype=torch.float32, device=a.device)
    split_kernel[(tiles * splits,)](
        a_desc, b_desc, b, c, parts, counters, tiles_m, M, N, K, *b.stride(),
        224 * 1024 // (128 * (128 + block_n)), splits, scatter, lines // block_n, a_t, b_t, num_warps=8,
    )  # fmt: skip
    return c


def _cycles(N, K, block_n, splits):
    meeting = 4000 + 2 * 4 * 128 * block_n / 64 if splits > 1 else 0  # written and read at 64 bytes a cycle
    return max(2 * (128 + block_n) * K / splits / 40, 2 * N * K / 2300) + meeting


# Of the stream, whose calls run one after another, and of SPLITS, so that all who count leave a multiple of it.
@cache
def _counters(place, _splits):
    return torch.zeros(num_sms(), dtype=torch.int32, device=place.device)


# The slow twin of the meeting, with lesson 7b's barriers: the 4 programs of a tile of 32 x 48 at a time. Where one
# waits another may run, and a row that is stored comes at any time; until then there is NaN.
def twin(a, b):
    """As the rungs, for any shape and dtype: what split_kernel does before and after it multiplies."""
    x, w = a.cpu().float(), b.cpu().float()
    out, counter = empty_product(x, w), Counter()  # one for all tiles, as for call after call
    for row, col in product(range(0, x.shape[0], 32), range(0, w.shape[1], 48)):
        tile = (
            x[row:][:32],
            w[:, col:][:, :48],
            torch.full((4, 4, 32, 12), math.nan),
            counter,
            out[row:, col:][:32, :48],
        )
        copies = []
        in_any_order([_program(split, *tile, copies) for split in range(4)], copies)
    return out.to(a.device, a.dtype)


def _program(split, x, w, parts, counter, out, copies):
    for _ in range(40 * split):  # they do not start together
        yield FREE
    count, stored = due.fn(counter.shows, 4), Barrier(128)
    ks = slice(*(16 * share.fn(i, x.shape[1], 16, 4) for i in (split, split + 1)))
    acc = F.pad(x[:, ks] @ w[ks], (0, 48 - w.shape[1], 0, 32 - x.shape[0]))
    for rows, part in zip(parts[:, split], acc.view(32, 4, 12).transpose(0, 1), strict=True):
        copies += ((row, numbers, stored) for row, numbers in zip(rows, part, strict=True))
    yield stored, 0
    counter.shows += 1
    yield counter, count
    mine = out[:, 12 * split :][:, :12]
    mine[:] = parts[split].sum(0)[: mine.shape[0], : mine.shape[1]]


class Counter:
    shows = 0

    def over(self, count):
        return self.shows - count >= 0


LESSON = Lesson(
    reference=first.reference,
    inputs=inputs,
    rungs=(owner_adds, reduce_scatter, fitted, prefetched),
    checks=(
        *first.LESSON.checks,
        case("8 parts of two steps, all cut off", gib=0.1, M=100, N=1000, K=1000),
        case("offsets past 2^31 in one wave", gib=60, M=128, N=2**14, K=2**17 + 8),
    ),
    benches=(
        *({"M": 128, "N": N, "K": K, "transposed": "b"} for N, K in LAYERS),
        *({"M": 128, "N": N, "K": 4096} for N in (4096, 14336)),
        *({"M": n, "N": n, "K": n} for n in (1024, 2048)),
    ),
    work=work, twin=twin,
    wrong=(
        Mutant("counts before it has stored", "_program", "yield stored, 0", "yield FREE", "twin", "nan"),
        Mutant("waits for one less", "_program", "yield counter, count", "yield counter, count - 1", "twin", "nan"),
        Mutant("always the first call's count", "due", "(counter | SPLITS - 1) + 1", "SPLITS", "twin", "nan"),
        Mutant("looks too late", "_program", "counter, count", "counter, due.fn(counter.shows, 4)", "twin", "barrier"),
        Mutant("K's tail left out", "share", "(K + BLOCK_K - 1) // BLOCK_K", "K // BLOCK_K", "twin"),
        Mutant("everybody adds up the first share", "split_kernel", "(which * SPL", "(0 * SPL", "reduce_scatter"),
    ),
    peers=PEERS,
    claims=dict.fromkeys((owner_adds, reduce_scatter, fitted, prefetched), ("wgmma", "tma", "no spills")),
    properties=first.LESSON.properties,
    refuses=first.LESSON.refuses,
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
