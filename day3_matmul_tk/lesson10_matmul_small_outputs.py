"""Matmul on Hopper: split-K for outputs with fewer tiles than SMs
===============================================================
128 tokens times a weight of 4096 columns: C has 32 tiles of 128 x 128, and the GPU has 132 SMs. So K is split as well:
SPLITS programs compute one tile, each over a part of K, and then add up their partial sums.

You will be able to: split K in one launch, synchronise programs through a counter that is never reset, and say why the
waiting ends. You need: lesson 9 (ring, warp specialization).
A Hopper GPU runs the rungs. Without one they are compiled, and a CPU model of the exchange runs, in any order.
Run it:    python3 course.py run lesson10_matmul_small_outputs
Check it:  python3 course.py check lesson10_matmul_small_outputs
Time it:   python3 course.py bench lesson10_matmul_small_outputs

Budget for M = 128, N = K = 4096, in cycles of 0.55 ns. An SM loads 40 bytes a cycle. HBM gives 2300 bytes a cycle to
all SMs together, which is 4.2 TB/s. The two overlap, so the longer one counts. The exchange comes afterwards: an SM
writes a tile of fp32 partial sums and reads as much, at 64 bytes a cycle, and waits 4000 cycles:

    tile, SPLITS     loads of an SM    HBM: b, 33.5 MB    exchange                         in all
    128 x 64,  2     768 KB  19,700    14,600              32 KB twice, 1000 + 4000        24,700
    128 x 128, 4     512 KB  13,100    14,600              64 KB twice, 2100 + 4000        20,700
    128 x 256, 8     384 KB   9,800    14,600             128 KB twice, 4100 + 4000        22,700

4000 cycles are four round trips to L2 that overlap with nothing: stores, the fence behind them, a counter, loads.

Reduce-scatter, SPLITS = 4. Each program has a partial sum of the whole tile. It keeps one share of the columns and
writes the other three for the programs that own them. When all have written, it adds up its share in the order of K:

    program 0   [own |  -> |  -> |  -> ]
    program 1   [ <- | own |  -> |  -> ]     then: share s = sum over programs p of (p's columns of share s)
    program 2   [ <- |  <- | own |  -> ]
    program 3   [ <- |  <- |  <- | own ]

Two questions before you read on. Why may the counter keep its value from call to call, and what if a call used another
number of splits? What would hang if a tile's programs were not neighbours and another kernel held half of the SMs?
"""

from contextlib import suppress
from functools import cache
from itertools import product

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, needs, num_sms
from lessonkit.judge.simulate import FREE, Barrier, in_any_order

import torch
import torch.nn.functional as F
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

from course_ops.hopper import (
    aggregate,
    allocate_barriers,
    allocate_stages,
    async_load,
    async_store,
    reinterpret,
    ring_slot,
    tensor_descriptor,
)
from course_ops.matmul import kernel_for
from problems.matmul import LAYERS, PROBLEM, TMA_CHECKS, empty_product

BLOCK_M, BLOCK_K = 128, 64
block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # all threads of a partition; renamed in Triton 3.7


@aggregate
class Ring:
    """Lesson 9's ring. A transposed matrix is copied in its own layout, and wgmma reads it by columns."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor
    b_smem: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    A_T: gl.constexpr
    B_T: gl.constexpr

    @gluon.jit
    def load(self, part, step):
        """Start the copies of a step of the program's part of K, if there is such a step."""
        stage, _ = ring_slot(step, self.full.shape[0])
        full, row, col, k = self.full.index(stage), part.row, part.col, (part.first + step) * 64
        pred = step < part.steps
        mbarrier.expect(full, self.a_desc.block_type.nbytes + self.b_desc.block_type.nbytes, pred)
        a_smem, b_smem = self.a_smem.index(stage), self.b_smem.index(stage)
        async_load(self.a_desc, [k, row] if self.A_T else [row, k], full, a_smem, pred)
        async_load(self.b_desc, [col, k] if self.B_T else [k, col], full, b_smem, pred)

    @gluon.jit
    def a(self, stage):
        return self.a_smem.index(stage).permute((1, 0)) if self.A_T else self.a_smem.index(stage)

    @gluon.jit
    def b(self, stage):
        return self.b_smem.index(stage).permute((1, 0)) if self.B_T else self.b_smem.index(stage)


@aggregate
class Part:
    """What a program computes: the tile at (row, col) of C, over `steps` steps of K from step `first` on."""

    row: gl.tensor
    col: gl.tensor
    first: gl.tensor
    steps: gl.tensor
    M: gl.tensor


@aggregate
class Meeting:
    """Where the SPLITS programs of a tile exchange partial sums, and the counter on which they wait."""

    parts_ptr: gl.tensor
    counters_ptr: gl.tensor
    tile: gl.tensor
    split: gl.tensor
    SPLITS: gl.constexpr


@gluon.jit
def producer(ring, part):
    for step in range(ring.full.shape[0], part.steps):  # the kernel has filled the ring once
        stage, parity = ring_slot(step, ring.full.shape[0])
        mbarrier.wait(ring.empty.index(stage), parity ^ 1)
        ring.load(part, step)


# A consumer owns the upper (WHICH = 0) or lower 64 rows of the tile. It exchanges partial sums with the consumers of
# the other splits that own the same rows.
@gluon.jit
def consumer(c_desc, ring, part, meeting, WHICH: gl.constexpr):
    SPLITS: gl.constexpr = meeting.SPLITS
    N: gl.constexpr = ring.b_smem.shape[1 if ring.B_T else 2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((64, N), gl.float32, LAYOUT)
    previous = 0
    for step in range(part.steps):
        stage, parity = ring_slot(step, ring.full.shape[0])
        mbarrier.wait(ring.full.index(stage), parity)
        a = ring.a(stage).slice(WHICH * 64, 64)
        acc = warpgroup_mma(a, ring.b(stage), acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(ring.empty.index(previous), pred=step > 0)
        previous = stage
    acc = warpgroup_mma_wait(0, deps=(acc,))
    row, col = part.row + WHICH * 64, part.col
    if row < part.M:  # with 64 rows or fewer the lower half does not exist
        if SPLITS == 1:
            store(c_desc, ring, acc, row, col, WHICH)
        else:
            parts_ptr = meeting.parts_ptr + (meeting.tile * 2 + WHICH) * SPLITS * 64 * N
            counter_ptr = meeting.counters_ptr + meeting.tile * 2 + WHICH
            x = reduce_scatter(acc, parts_ptr, counter_ptr, meeting.split, SPLITS)
            store(c_desc, ring, x, row, col + meeting.split * (N // SPLITS), WHICH)


@gluon.jit
def split_columns(x):
    """[M, N] -> the left and the right [M, N / 2]. A thread holds columns of both, so nothing moves."""
    return x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()


# TMA stores C in panels of 64 columns, through the stages of A: each consumer uses the half that it has read.
@gluon.jit
def store(c_desc, ring, x, row, col, WHICH: gl.constexpr):
    panels = (x,)
    if x.shape[1] >= 128:
        panels = split_columns(x)
    if x.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    WIDTH: gl.constexpr = c_desc.block_type.shape[1]
    for p in gl.static_range(len(panels)):
        stage = reinterpret(ring.a_smem.index(p), c_desc.dtype, [128 // WIDTH, 64, WIDTH], c_desc.layout)
        panel = stage.index(WHICH * (64 // WIDTH))
        panel.store(panels[p].to(c_desc.dtype))
        fence_async_shared()
        async_store(c_desc, [row, col + 64 * p], panel)
    tma.store_wait(0)


# In wgmma's layout a thread holds, of every 8 columns, 2 neighbours in each of 2 rows. This permutation makes its 4
# elements contiguous, and a warp's 128: a thread stores 16 bytes and a warp 512. No element moves between threads.
@gluon.jit
def to_shares(x, SPLITS: gl.constexpr):
    """[64, N] -> [SPLITS, 64 * N / SPLITS]: shares of N / SPLITS columns."""
    x = x.reshape((4, 2, 8, SPLITS, x.shape[1] // SPLITS // 8, 4, 2)).permute((3, 4, 0, 2, 5, 1, 6))
    return x.reshape((SPLITS, x.numel // SPLITS))


@gluon.jit
def from_share(x):
    """One share, back: [64 * N] -> [64, N]."""
    return x.reshape((x.numel // 512, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, x.numel // 64))


@gluon.jit
def complete_at(counter, SPLITS: gl.constexpr):
    """What the counter shows when all SPLITS programs of this call have arrived.

    It is never reset. A call adds SPLITS, a power of two, so a call begins at a multiple of SPLITS.
    """
    return (counter | SPLITS - 1) + 1


@gluon.jit
def arrive_and_wait(ptr, SPLITS: gl.constexpr):
    block_barrier()  # one thread counts for all: every thread's stores must be done
    count = complete_at(gl.atomic_add(ptr, 1, sem="acq_rel", scope="gpu"), SPLITS)
    asm: gl.constexpr = "ld.acquire.gpu.global.b32 $0, [$1];"  # each thread acquires: its later loads see the stores
    while gl.inline_asm_elementwise(asm, "=r,l", [ptr], gl.int32, is_pure=False, pack=1) - count < 0:
        pass  # a difference: right when the counter has passed 2^31, too


@gluon.jit
def reduce_scatter(acc, parts_ptr, counter_ptr, split, SPLITS: gl.constexpr):
    """Write the other splits' shares of acc, wait, and return the sum of this split's share, in the order of K."""
    x = to_shares(acc, SPLITS)
    SIZE: gl.constexpr = x.shape[1]
    each = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    number = gl.arange(0, SIZE, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    gl.store(parts_ptr + (each * SPLITS + split) * SIZE + number, x, mask=each != split)
    mine = gl.sum(gl.where(each == split, x, 0.0), axis=0)
    arrive_and_wait(counter_ptr, SPLITS)
    ptrs = parts_ptr + (split * SPLITS + each) * SIZE + number
    theirs = gl.load(ptrs, mask=each != split, other=0.0, cache_modifier=".cg")  # read once: not into L1
    return from_share(gl.sum(gl.where(each == split, mine[None, :], theirs), axis=0))


# The waiting ends, since there are no more programs than SMs. If another kernel occupies some SMs, GPUs still start
# programs in the order of their ids, though CUDA does not promise it, and a tile's programs are neighbours. So at most
# one tile lacks programs: all other tiles complete, end, and free SMs for them.
@gluon.jit(do_not_specialize=["tiles_m", "steps", "M"])
def split_k_kernel(
    a_desc, b_desc, c_desc,
    parts_ptr, counters_ptr,  # [tiles, 2, SPLITS (of the share), SPLITS (that wrote it), SIZE] fp32; [tiles, 2] int32
    tiles_m, steps, M, STAGES: gl.constexpr, SPLITS: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)
    ring = Ring(
        a_desc=a_desc,
        b_desc=b_desc,
        a_smem=allocate_stages(a_desc, STAGES),
        b_smem=allocate_stages(b_desc, STAGES),
        full=full,
        empty=empty,
        A_T=A_T,
        B_T=B_T,
    )
    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    row, col = tile % tiles_m * 128, tile // tiles_m * b_desc.block_type.shape[0 if B_T else 1]
    first = split * steps // SPLITS
    part = Part(row=row, col=col, first=first, steps=(split + 1) * steps // SPLITS - first, M=M)
    for step in gl.static_range(STAGES):
        ring.load(part, step)
    meeting = Meeting(parts_ptr=parts_ptr, counters_ptr=counters_ptr, tile=tile, split=split, SPLITS=SPLITS)
    gl.warp_specialize([
        (consumer, (c_desc, ring, part, meeting, 0)),
        (consumer, (c_desc, ring, part, meeting, 1)),
        (producer, (ring, part)),
    ], [4, 1], [240, 24])  # fmt: skip


# Rung 1. K is not split. Predicted for N = 4096: 32 programs load 2 MB each, 52,400 cycles, and 100 SMs are idle.
@needs(90, "TMA and wgmma", only=True)
def whole(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16; rows or columns contiguous and 16 bytes aligned. Deterministic."""
    return _run(a, b, (128,), (1,))


# Rung 2. New: K in 2, 4 or 8 parts, and the reduce-scatter. Predicted: 20,700 cycles for N = 4096, 2.5 times as fast.
# No change for 14336 columns, which are 112 tiles.
@needs(90, "TMA and wgmma", only=True)
def split_k(a, b):
    """As whole."""
    return _run(a, b, (128,))


# Rung 3. New: the tile follows the shape as well. One wave of 128 x 256 holds 28672 columns, and also 2048 x 2048. A
# product of 1024 x 1024 is 128 tiles of 128 x 64, and K is not split. Predicted for that: 9,800 cycles where 128 x 128
# in two parts takes 12,600.
# Lesson 3's kernel keeps products of up to 64 rows, and of up to 128 where the estimate is less than 55,000 cycles.
@needs(90, "TMA and wgmma", only=True)
def fitted(a, b):
    """As split_k; where that is no gain, or not possible, course_ops chooses lesson 3's kernel or lesson 9's."""
    with suppress(Unsupported):
        return _run(a, b, (64, 128, 256), least=55_000)
    return kernel_for(a, b).launch(a, b)


def _cycles(N, K, block_n, splits):  # as in the table
    meeting = 4000 + 2 * 4 * 128 * block_n / 64 if splits > 1 else 0  # parts are written and read at 64 bytes per cycle
    return max(2 * (128 + block_n) * K / splits / 40, 2 * N * K / 2300) + meeting


# One set for each stream, whose calls run one after another, and for each SPLITS: then every call that counts there
# leaves a multiple of SPLITS.
@cache
def _counters(place, _splits):
    return torch.zeros(2 * num_sms(), dtype=torch.int32, device=place.device)


def _run(a, b, widths, parts=(1, 2, 4, 8), least=0):
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    _check_operands(a=a, b=b, c=c)
    tiles_m, steps = triton.cdiv(M, BLOCK_M), triton.cdiv(K, BLOCK_K)
    most = {n: min(num_sms() // (tiles_m * triton.cdiv(N, n)), steps) for n in widths}
    choices = {(n, s): _cycles(N, K, n, s) for n in widths for s in parts if s <= most[n]}
    block_n, splits = min(choices, key=choices.__getitem__, default=(0, 0))
    if not splits or (least and (M <= 64 or (M <= 128 and choices[block_n, splits] < least))):
        raise Unsupported("more than a wave of tiles, or so little to do that lesson 3's kernel is the faster one")
    (a_desc, a_t), (b_desc, b_t) = _describe(a, BLOCK_M, BLOCK_K), _describe(b, BLOCK_K, block_n)
    c_desc, _ = _describe(c, 64, min(64, block_n // splits))
    tiles = tiles_m * triton.cdiv(N, block_n)
    sums = torch.empty(tiles * splits if splits > 1 else 0, 128, block_n, dtype=torch.float32, device=a.device)
    shared = a.is_cuda and not torch.cuda.is_current_stream_capturing()  # a CUDA graph, replayed any time, has its own
    place = torch.cuda.current_stream(a.device) if shared else a
    counters = (_counters if shared else _counters.__wrapped__)(place, splits)
    stages = 224 * 1024 // (128 * (128 + block_n))
    split_k_kernel[(tiles * splits,)](
        a_desc, b_desc, c_desc, sums, counters, tiles_m, steps, M, stages, splits, a_t, b_t, num_warps=4
    )
    return c


def _check_operands(**matrices):
    """Raise Unsupported if TMA cannot copy one of them, or wgmma cannot multiply it, in its layout."""
    for name, t in matrices.items():
        if t.element_size() != 2:
            raise Unsupported(f"{name} is {t.dtype}: this wgmma multiplies elements of 16 bits")
        if 1 not in t.stride() or max(t.stride()) % 8 or t.data_ptr() % 16:
            raise Unsupported(
                f"{name} begins at {t.data_ptr() % 16} past 16 bytes and has strides {t.stride()}: "
                "TMA wants one to be 1 and the other and the address multiples of 16 bytes"
            )


def _describe(t, rows, cols):
    """A TMA descriptor for blocks of rows x cols, and whether the matrix is stored transposed."""
    if t.stride(1) != 1:
        return tensor_descriptor(t.t(), [cols, rows]), True
    return tensor_descriptor(t, [rows, cols]), False


# The CPU model of the exchange: the 4 programs of a tile of 32 x 48 at a time. Where one program waits, another may
# run. A row that is stored may arrive at any time, and until then its place holds NaN.
def cpu_model(a, b):
    """As the rungs, for any shape and dtype: what split_k_kernel does around its main loop."""
    x, w = a.cpu().float(), b.cpu().float()
    out, counter = torch.empty(x.shape[0] + 31, w.shape[1] + 47), Counter()  # one for all tiles, as for call after call
    for row, col in product(range(0, x.shape[0], 32), range(0, w.shape[1], 48)):
        tile = x[row:][:32], w[:, col:][:, :48], torch.full((4, 4, 32, 12), torch.nan), counter, out[row:, col:]
        copies = []
        in_any_order([_program(split, *tile, copies) for split in range(4)], copies)
    return empty_product(a, b).copy_(out[: x.shape[0], : w.shape[1]])


def _program(split, x, w, parts, counter, out, copies):
    steps, stored = triton.cdiv(x.shape[1], 16), Barrier(128)
    for _ in range(40 * split):  # the programs do not finish together
        yield FREE
    ks = slice(16 * (split * steps // 4), 16 * ((split + 1) * steps // 4))
    acc = F.pad(x[:, ks] @ w[ks], (0, 48 - w.shape[1], 0, 32 - x.shape[0])).view(32, 4, 12)
    copies += [(parts[i, split, row], acc[row, i], stored) for i in range(4) for row in range(32)]
    yield stored, 0
    count, counter.shows = complete_at.fn(counter.shows, 4), counter.shows + 1
    yield counter, count
    out[:32, 12 * split :][:, :12] = parts[split].sum(0)


class Counter:
    """The counter in global memory, as a barrier of the simulation."""

    shows = 0

    def over(self, count):
        return self.shows - count >= 0


LAYER = {"M": 128, "N": 4096, "K": 4096, "transposed": "b"}

# The answers: a call adds SPLITS, a power of two, so the next call begins at a multiple of SPLITS. After a call with
# 2 splits, a call with 4 would begin at 2 and wait for 4. Its programs would go on when only two of them have
# arrived. If a tile's programs were not neighbours, every tile could have programs that hold SMs and wait for others
# that have none: the kernel would hang.
LESSON = Lesson(
    about=About(
        teaches="outputs with fewer tiles than SMs: split-K in one launch, reduce-scatter through L2, what the "
        "exchange costs",
        hours=1,
        operator="matmul",
        language="Gluon",
        pictures=("reduce_scatter",),
    ),
    problem=PROBLEM,
    cpu_model=cpu_model,
    rungs=(whole, split_k, fitted),
    predicted=(
        Prediction(rung=whole, at=LAYER, ms=0.0287),
        Prediction(
            rung=split_k,
            at=LAYER,
            times=2.5,
            over=whole,
            why="The budget leaves out a kernel's start and end. A copy of as many bytes takes 13.5 us, where the "
            "table's 14,600 cycles are 8 us. The exchange of 3.3 us comes on top. The other 4 us are not explained.",
        ),
        Prediction(rung=fitted, at={"M": 1024, "N": 1024, "K": 1024}, times=1.28, over=split_k),
    ),
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
        Mutant("counts before it has stored", "_program", "yield stored, 0", "yield FREE", "cpu_model", "nan"),
        Mutant(
            "waits for one less", "_program", "yield counter, count", "yield counter, count - 1", "cpu_model", "nan"
        ),
        Mutant(
            "always the first call's count", "complete_at", "(counter | SPLITS - 1) + 1", "SPLITS", "cpu_model", "nan"
        ),
        Mutant("one more than will come", "complete_at", "SPLITS - 1) + 1", "SPLITS - 1) + 2", "cpu_model", "barrier"),
        Mutant("K's tail left out", "_run", "triton.cdiv(K, BLOCK_K)", "K // BLOCK_K", "split_k"),
        Mutant("whole: no stage is released", "consumer", "pred=step > 0", "pred=step < 0", "whole", "hang"),
        Mutant("whole: the upper half of A twice", "consumer", "slice(WHICH * 64", "slice(0 * 64", "whole"),
        Mutant(
            "whole: the lower half at the upper half's rows",
            "consumer",
            "part.row + WHICH * 64",
            "part.row + 0 * 64",
            "whole",
            "value or nan",
        ),
        Mutant(
            "every split adds up the first share", "reduce_scatter", "(split * SPLITS + each)", "each", "split_k", "nan"
        ),
        Mutant(
            "the programs of a tile wait for one more",
            "complete_at",
            "SPLITS - 1) + 1",
            "SPLITS - 1) + 2",
            "split_k",
            "hang",
        ),
        Mutant(
            "all shares in the first columns",
            "consumer",
            "col + meeting.split",
            "col + 0 * meeting.split",
            "split_k",
            "nan",
        ),
        Mutant(
            "the last step of each part left out",
            "split_k_kernel",
            "// SPLITS - first,",
            "// SPLITS - first - 1,",
            "fitted",
        ),
    ),
    claims=dict.fromkeys((whole, split_k, fitted), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
