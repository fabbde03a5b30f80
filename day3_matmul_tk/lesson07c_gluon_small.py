"""Gluon: split-K for outputs with fewer tiles than SMs
====================================================
128 tokens times a weight of 4096 columns: C has 32 tiles of 128 x 128, the GPU 132 SMs. So K is split as well,
SPLITS programs to a tile, which then add up their parts. In cycles, if an SM loads 40 bytes a cycle and memory
gives 2300:

    M = 128, N = K = 4096    loads of an SM    memory: b, 33.5 MB    parts, written and read    in all
    128 x 64,  K in 2        768 KB  19,700    14,600                 32 KB + 4000   5,000      24,700
    128 x 128, K in 4        512 KB  13,100    14,600                 64 KB + 4000   6,100      20,700
    128 x 256, K in 8        384 KB   9,800    14,600                128 KB + 4000   8,100      22,700

Loads and memory run at a time, parts come afterwards. 4000 are the trips to L2 that nothing hides: stores, the fence
behind them, a counter, loads. In a cluster they would be trips to another SM; Gluon has clusters from Triton 3.7 on.

You will learn: split-K in one launch, reduce-scatter between programs, counters that nobody resets, why waiting ends.
Needs a Hopper GPU to run; without one the rungs are compiled, and a CPU model of the meeting runs, in any order.
Run it:    python day3_matmul_tk/lesson07c_gluon_small.py
Check it:  python -m lessonkit check lesson07c_gluon_small
Time it:   python -m lessonkit bench lesson07c_gluon_small
"""

from contextlib import suppress
from functools import cache
from itertools import product

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs, num_sms
from lessonkit.judge.simulate import FREE, Barrier, in_any_order

import torch
import torch.nn.functional as F
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot, tensor_descriptor
from course_ops.matmul import kernel_for
from problems.matmul import LAYERS, PROBLEM, TMA_CHECKS, empty_product

everybody = getattr(gl, "barrier", None) or gl.thread_barrier  # all threads of a partition; Triton 3.7 renamed it


# A step's copies, as in lesson 7.
@gluon.jit
def load_step(a_desc, b_desc, a_smem, b_smem, full, row, col, k, A_T: gl.constexpr, B_T: gl.constexpr, pred=True):
    mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes, pred)
    tma.async_copy_global_to_shared(a_desc, [k, row] if A_T else [row, k], full, a_smem, pred)
    tma.async_copy_global_to_shared(b_desc, [col, k] if B_T else [k, col], full, b_smem, pred)


@gluon.jit
def turned(smem, T: gl.constexpr):
    return smem.permute((1, 0)) if T else smem


@gluon.jit
def halves(x):  # [M, N] -> the left and the right [M, N / 2]: a thread holds numbers of both, so nothing moves
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


# 7b's partitions, for one tile and part of K; the first steps are asked for before they start. A warpgroup meets those
# of the other programs that have the same 64 rows, and shares a counter with them.
@gluon.jit
def load(descs, ring, corner, part, turn, A_T: gl.constexpr, B_T: gl.constexpr):
    stage, _ = ring_slot(turn, ring[2].shape[0])
    a_to, b_to, bar = ring[0].index(stage), ring[1].index(stage), ring[2].index(stage)
    k, more = (part[0] + turn) * 64, turn < part[1]
    load_step(descs[0], descs[1], a_to, b_to, bar, corner[0], corner[1], k, A_T, B_T, more)


@gluon.jit
def load_partition(descs, ring, corner, part, A_T: gl.constexpr, B_T: gl.constexpr):
    for turn in range(ring[2].shape[0], part[1]):
        stage, parity = ring_slot(turn, ring[2].shape[0])
        mbarrier.wait(ring[3].index(stage), parity ^ 1)
        load(descs, ring, corner, part, turn, A_T, B_T)


@gluon.jit
def multiply_partition(
    c_desc, ring, corner, part, meeting, WHICH: gl.constexpr, SPLITS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr
):  # fmt: skip
    a_smem, b_smem, full, empty = ring
    parts_ptr, counters_ptr, tile, split, M = meeting
    N: gl.constexpr = b_smem.shape[1 if B_T else 2]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((64, N), gl.float32, sums)
    before = 0
    for turn in range(part[1]):
        stage, parity = ring_slot(turn, full.shape[0])
        mbarrier.wait(full.index(stage), parity)
        a = turned(a_smem.index(stage), A_T).slice(WHICH * 64, 64)
        acc = hopper.warpgroup_mma(a, turned(b_smem.index(stage), B_T), acc, use_acc=turn > 0, is_async=True)
        acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before), pred=turn > 0)
        before = stage
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    row, col = corner[0] + WHICH * 64, corner[1]
    if row < M:  # with 64 rows or fewer the lower half is nobody's
        if SPLITS == 1:
            store(c_desc, a_smem, acc, row, col, WHICH, A_T)
        else:
            parts_ptr += (tile * 2 + WHICH) * SPLITS * 64 * N
            x = add_share(acc, parts_ptr, counters_ptr + tile * 2 + WHICH, split, SPLITS)
            store(c_desc, a_smem, x, row, col + split * (N // SPLITS), WHICH, A_T)


# C leaves by TMA, in panels of 64 columns, through the stages in which A came: of each, this half is nobody else's.
# (Threads that store for themselves, 4 bytes each, write half sectors of 32 bytes: that was slower.)
@gluon.jit
def store(c_desc, a_smem, x, row, col, WHICH: gl.constexpr, A_T: gl.constexpr):
    panels = (x,)
    if x.shape[1] >= 128:
        panels = halves(x)
    if x.shape[1] == 256:
        panels = halves(panels[0]) + halves(panels[1])
    for p in gl.static_range(len(panels)):
        panel = a_smem.index(p).slice(WHICH * 64, 64, dim=1 if A_T else 0)
        panel = panel._reinterpret(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
        panel.store(panels[p].to(c_desc.dtype))
        hopper.fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col + 64 * p], panel)
    tma.store_wait(0)


# Parts go through L2 in this order. A thread of wgmma's layout holds, of every 8 columns, 2 neighbours in each of 2
# rows; here its 4 are neighbours, and so are a warp's threads: 16 bytes each, 512 in a row. Nothing moves for it.
@gluon.jit
def in_order(x, SPLITS: gl.constexpr):  # [64, N] -> [SPLITS, 64 * N / SPLITS]: shares of N / SPLITS columns
    x = x.reshape((4, 2, 8, SPLITS, x.shape[1] // SPLITS // 8, 4, 2)).permute((3, 4, 0, 2, 5, 1, 6))
    return x.reshape((SPLITS, x.numel // SPLITS))


@gluon.jit
def as_tile(x):  # a share, back: [64 * N] -> [64, N]
    return x.reshape((x.numel // 512, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, x.numel // 64))


# A counter is never reset: a call adds SPLITS to it, a power of two, so a call begins at a multiple.
@gluon.jit
def due(counter, SPLITS: gl.constexpr):  # what it will show when all have come, from what it shows before
    return (counter | SPLITS - 1) + 1


@gluon.jit
def meet(ptr, SPLITS: gl.constexpr):
    everybody()  # one thread counts: the others' stores must be done
    count = due(gl.atomic_add(ptr, 1, sem="acq_rel", scope="gpu"), SPLITS)
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"  # by each thread: what it loads afterwards is not older
    while gl.inline_asm_elementwise(asm, "=r,l", [ptr], gl.int32, is_pure=False, pack=1) - count < 0:
        pass  # a difference: right when the counter has passed 2^31, too


# Reduce-scatter: a program keeps one share of its columns, leaves the others where their programs find them, and adds
# up its own, always in the order of K. What was slower: one owner that reads all parts alone, as in lesson 3; numbers
# that are their own flags, NaN until they are there, for who waits so reads all of them again and again.
@gluon.jit
def add_share(acc, parts_ptr, counter_ptr, split, SPLITS: gl.constexpr):
    x = in_order(acc, SPLITS)
    SIZE: gl.constexpr = x.shape[1]
    each = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(parts_ptr + (each * SPLITS + split) * SIZE + number, x, mask=each != split)
    mine = gl.sum(gl.where(each == split, x, 0.0), axis=0)
    meet(counter_ptr, SPLITS)
    ptrs = parts_ptr + (split * SPLITS + each) * SIZE + number
    theirs = gl.load(ptrs, mask=each != split, other=0.0, cache_modifier=".cg")  # not from L1: it may be old
    return as_tile(gl.sum(gl.where(each == split, mine[None, :], theirs), axis=0))


# Does the waiting end? There are no more programs than SMs. And if another kernel holds some: programs start by number,
# a tile's are neighbours, so all tiles but one have all theirs, end, and make room for that one's.
@gluon.jit(do_not_specialize=["tiles_m", "steps", "M"])
def split_kernel(
    a_desc, b_desc, c_desc,
    parts_ptr, counters_ptr,  # [tiles, 2, SPLITS (whose share), SPLITS (from whom), SIZE] fp32; [tiles, 2] int32
    tiles_m, steps, M, STAGES: gl.constexpr, SPLITS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = allocate_stages(a_desc, STAGES), allocate_stages(b_desc, STAGES), full, empty
    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    corner = tile % tiles_m * 128, tile // tiles_m * b_desc.block_type.shape[0 if B_T else 1]
    part = split * steps // SPLITS, (split + 1) * steps // SPLITS - split * steps // SPLITS  # first step, and how many
    for turn in gl.static_range(STAGES):
        load((a_desc, b_desc), ring, corner, part, turn, A_T, B_T)
    meeting = parts_ptr, counters_ptr, tile, split, M
    gl.warp_specialize([
        (multiply_partition, (c_desc, ring, corner, part, meeting, 0, SPLITS, A_T, B_T)),
        (multiply_partition, (c_desc, ring, corner, part, meeting, 1, SPLITS, A_T, B_T)),
        (load_partition, ((a_desc, b_desc), ring, corner, part, A_T, B_T)),
    ], [4, 1], [240, 24])  # fmt: skip


# Rung 1. K whole. Predicted for N = 4096: 32 programs load 2 MB each, 52,400 cycles, while 100 SMs stand by.
@needs(90, "TMA and wgmma", only=True)
def whole(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16; rows or columns contiguous and 16 bytes aligned. Deterministic."""
    return _run(a, b, (128,), (1,))


# Rung 2. New: K in 2, 4 or 8 parts, and a meeting. Predicted: 20,700 cycles; nothing new for 14336 columns, 112 tiles.
# On an H200 28.2 us become 22.7, cuBLAS takes 21.3; at K = 14336 73.9 become 45.9, cuBLAS 46.3: the gap is a meeting's.
@needs(90, "TMA and wgmma", only=True)
def reduce_scatter(a, b):
    """As whole."""
    return _run(a, b, (128,))


# Rung 3. New: the tile follows as well: 28672 columns, and 2048 x 2048, are one wave of 128 x 256; 1024 x 1024 is 128
# tiles of 128 x 64 that need not meet. On an H200 all three are up to 2% ahead of cuBLAS. Lesson 3's kernel keeps 64
# rows, and 128 where it estimates less than 55,000 cycles: up to 1% faster. (Asking L2 for b ahead of TMA was slower.)
@needs(90, "TMA and wgmma", only=True)
def fitted(a, b):
    """As reduce_scatter; for what is not worth it, or not possible, course_ops chooses: lesson 3's kernel, or 7b's."""
    with suppress(Unsupported):
        return _run(a, b, (64, 128, 256), least=55_000)
    return kernel_for(a, b).launch(a, b)


def _cycles(N, K, block_n, splits):  # as in the table
    meeting = 4000 + 2 * 4 * 128 * block_n / 64 if splits > 1 else 0  # parts are written and read at 64 bytes a cycle
    return max(2 * (128 + block_n) * K / splits / 40, 2 * N * K / 2300) + meeting


# Of the stream, whose calls run in turn, and of SPLITS, so that all who count there leave a multiple of it.
@cache
def _counters(place, _splits):
    return torch.zeros(2 * num_sms(), dtype=torch.int32, device=place.device)


def _run(a, b, widths, parts=(1, 2, 4, 8), least=0):
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    _check_operands(a=a, b=b, c=c)
    tiles_m, steps = triton.cdiv(M, 128), triton.cdiv(K, 64)
    most = {n: min(num_sms() // (tiles_m * triton.cdiv(N, n)), steps) for n in widths}
    choices = {(n, s): _cycles(N, K, n, s) for n in widths for s in parts if s <= most[n]}
    block_n, splits = min(choices, key=choices.__getitem__, default=(0, 0))
    if not splits or (least and (M <= 64 or (M <= 128 and choices[block_n, splits] < least))):
        raise Unsupported("more than a wave of tiles, or so little to do that lesson 3's kernel is the faster one")
    (a_desc, a_t), (b_desc, b_t) = _describe(a, 128, 64), _describe(b, 64, block_n)
    c_desc, _ = _describe(c, 64, min(64, block_n // splits))
    tiles = tiles_m * triton.cdiv(N, block_n)
    sums = torch.empty(tiles * splits if splits > 1 else 0, 128, block_n, dtype=torch.float32, device=a.device)
    shared = a.is_cuda and not torch.cuda.is_current_stream_capturing()  # a CUDA graph, replayed any time, has its own
    place = torch.cuda.current_stream(a.device) if shared else a
    counters = (_counters if shared else _counters.__wrapped__)(place, splits)
    stages = 224 * 1024 // (128 * (128 + block_n))
    split_kernel[(tiles * splits,)](
        a_desc, b_desc, c_desc, sums, counters, tiles_m, steps, M, stages, splits, a_t, b_t, num_warps=4
    )
    return c


def _check_operands(**matrices):
    """Raise Unsupported if one of them is none that TMA can copy and wgmma multiply as it lies."""
    for name, t in matrices.items():
        if t.element_size() != 2:
            raise Unsupported(f"{name} is {t.dtype}: this wgmma multiplies numbers of 16 bits")
        if 1 not in t.stride() or max(t.stride()) % 8 or t.data_ptr() % 16:
            raise Unsupported(
                f"{name} begins at {t.data_ptr() % 16} past 16 bytes and has strides {t.stride()}: "
                "TMA wants one to be 1 and the other and the address multiples of 16 bytes"
            )


def _describe(t, rows, cols):
    """What TMA must know of a matrix to copy blocks of rows x cols, and whether it lies transposed."""
    if t.stride(1) != 1:
        return tensor_descriptor(t.t(), [cols, rows]), True
    return tensor_descriptor(t, [rows, cols]), False


# The CPU model of the meeting, with lesson 7b's barriers: the 4 programs of a tile of 32 x 48 at a time. Where one
# waits another may run, and a row that is stored comes at any time; until then there is NaN.
def twin(a, b):
    """As the rungs, for any shape and dtype: what split_kernel does before and after it multiplies."""
    x, w = a.cpu().float(), b.cpu().float()
    out, counter = torch.empty(x.shape[0] + 31, w.shape[1] + 47), Counter()  # one for all tiles, as for call after call
    for row, col in product(range(0, x.shape[0], 32), range(0, w.shape[1], 48)):
        tile = x[row:][:32], w[:, col:][:, :48], torch.full((4, 4, 32, 12), torch.nan), counter, out[row:, col:]
        copies = []
        in_any_order([_program(split, *tile, copies) for split in range(4)], copies)
    return empty_product(a, b).copy_(out[: x.shape[0], : w.shape[1]])


def _program(split, x, w, parts, counter, out, copies):
    steps, stored = triton.cdiv(x.shape[1], 16), Barrier(128)
    for _ in range(40 * split):  # they are not done together
        yield FREE
    ks = slice(16 * (split * steps // 4), 16 * ((split + 1) * steps // 4))
    acc = F.pad(x[:, ks] @ w[ks], (0, 48 - w.shape[1], 0, 32 - x.shape[0])).view(32, 4, 12)
    copies += [(parts[i, split, row], acc[row, i], stored) for i in range(4) for row in range(32)]
    yield stored, 0
    count, counter.shows = due.fn(counter.shows, 4), counter.shows + 1
    yield counter, count
    out[:32, 12 * split :][:, :12] = parts[split].sum(0)


class Counter:
    shows = 0

    def over(self, count):
        return self.shows - count >= 0


LESSON = Lesson(
    about=About(
        teaches="outputs of few tiles: K shared out, programs that meet, reduce-scatter through L2, what a "
        "meeting costs",
        hours=0.5,
        operator="matmul",
        language="Gluon",
    ),
    problem=PROBLEM, cpu_model=twin,
    rungs=(whole, reduce_scatter, fitted),
    checks=(
        *PROBLEM.checks,
        *TMA_CHECKS,
        case("9 tiles down: a group of 8 and one of 1", gib=0.1, M=1030, N=520, K=520),
        case("offsets past 2^31", gib=60, M=70_001, N=32_000, K=32_000),
        case("8 parts of two steps, all cut off", gib=0.1, M=100, N=1000, K=1000),
        case("offsets past 2^31 in one wave", gib=60, M=128, N=2**14, K=2**17 + 8),
    ),
    benches=(
        *({"M": 128, "N": N, "K": K, "transposed": "b"} for N, K in LAYERS),
        *({"M": 128, "N": N, "K": 4096} for N in (4096, 14336)),
        *({"M": n, "N": n, "K": n} for n in (1024, 2048)),
    ),
    wrong=(
        Mutant("counts before it has stored", "_program", "yield stored, 0", "yield FREE", "twin", "nan"),
        Mutant("waits for one less", "_program", "yield counter, count", "yield counter, count - 1", "twin", "nan"),
        Mutant("always the first call's count", "due", "(counter | SPLITS - 1) + 1", "SPLITS", "twin", "nan"),
        Mutant("one more than will come", "due", "SPLITS - 1) + 1", "SPLITS - 1) + 2", "twin", "barrier"),
        Mutant("K's tail left out", "_run", "triton.cdiv(K, 64)", "K // 64", "reduce_scatter"),
    ),
    claims=dict.fromkeys((whole, reduce_scatter, fitted), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
