"""Sum: many programs, one answer
================================
The sum of x reads n elements and writes one, so only the read counts. On an H200, at a copy's 4.2 TB/s, n = 2^28 in
fp32 (1.07 GB) takes 0.26 ms. Reads alone may be a few percent faster than a copy. The additions are no limit: in that
time the GPU could do 27 times as many (132 SMs, 128 per cycle each, 1.7 GHz).

Two things are hard. Programs share nothing but memory. And floating-point addition is not associative, so the order of
the additions decides the error. It also decides whether two runs agree in the last bit.

    the rung            which program adds what                                             same bits in each run
    sum_one_program     one program adds everything                                         yes
    sum_atomic          each program adds its block to one total in memory                  no
    sum_tree            each program adds its block; then one program the partial sums      yes
    sum_persistent      264 programs, two per SM, add many blocks each; the last program    yes
                        to finish adds the partial sums

tl.sum adds inside a program in three steps. Each thread adds its own elements. Each warp adds the sums of its 32
threads. The warps then exchange their sums through shared memory (fast memory on the SM).

New words (GLOSSARY.md): tile, atomic operation, persistent kernel, shared memory, L1, L2, pipeline, stage.
You will be able to: sum inside a program and over programs, and choose between atomics, a tree and a persistent grid.
You need: lesson 1 (programs, masks). Rung 4 is advanced: skip it at the first reading.
Run it:    python3 course.py run lesson04_sum
Check it:  python3 course.py check lesson04_sum
Time it:   python3 course.py bench lesson04_sum

Answer before you read on. What is 256 + 1 in bf16? 65,536 programs add to one address: how many can do so at once?
"""

import functools

from lessonkit import About, Grad, Lesson, Mutant, Prediction, Unsupported, case, expect, num_sms

import torch
import triton
import triton.language as tl

from problems.sum import PROBLEM, inputs


# Rung 1. One program walks over all of x. It keeps 4096 running sums, one per lane, and adds those up once at the end.
# A sum per block would need a reduction across the warps in every step. Sums are fp32 for every dtype of x: bf16 keeps
# 8 significant bits, so 256 + 1 is 256 there.
# Predicted: the least bytes, but read by one of 132 SMs, so 4.2 / 132 = 0.032 TB/s.
@triton.jit
def sum_one_program_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # x [n], y []
    lanes = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.cdiv(n, BLOCK)):
        offsets = block * BLOCK + lanes  # Triton passes n past 2^31 as 64 bits, and block has n's type: no overflow
        # other=0 adds nothing. Without it the value of a masked lane is undefined.
        acc += tl.load(x_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    tl.store(y_ptr, tl.sum(acc))


def sum_one_program(x):
    """[n] -> [], one program."""
    y = _prepare(x)
    sum_one_program_kernel[(1,)](x, y, x.numel(), BLOCK=4096, num_warps=8)
    return y


# Rung 2. New: one program per block. Each adds its sum to one total in memory by an atomic, an addition that no other
# program can interrupt.
# Predicted: read speed, because all SMs read. The n / 4096 additions go to one address, and L2 does them one after
# another. Their order differs from run to run, and so does the last bit. Each addition rounds the total, so errors grow
# with n.
@triton.jit
def sum_atomic_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):  # x [n], total [] in fp32, zero to begin with
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    # relaxed: no other memory access depends on this one, so none has to be ordered with it.
    tl.atomic_add(total_ptr, tl.sum(x), sem="relaxed")


def sum_atomic(x):
    """[n] -> [], 4096 elements per program. Not deterministic: programs arrive in any order."""
    _prepare(x)
    if x.numel() > 2**28:
        raise Unsupported("more than 65,536 additions to one fp32 total, each rounded, lose digits that a tree keeps")
    # A 16-bit total would be rounded at every addition, and 16-bit atomics are slow: add in fp32, convert once.
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    if x.numel():
        sum_atomic_kernel[(triton.cdiv(x.numel(), 4096),)](x, total, x.numel(), BLOCK=4096, num_warps=8)
    return total.to(x.dtype)


# Rung 3. New: every program writes its own partial sum, and the kernel of rung 1 adds those in a fixed order. The
# additions form a tree of two levels. When a kernel has ended, the next one sees all that it wrote.
# Predicted at n = 2^28: 0.256 ms for the first kernel, at read speed. The second is one program again, with 65,536
# values of 4 bytes at rung 1's 0.032 TB/s: 0.008 ms.
@triton.jit
def sum_blocks_kernel(x_ptr, partial_ptr, n, BLOCK: tl.constexpr):  # x [n], partial [ceil(n / BLOCK)]
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0).to(tl.float32)
    tl.store(partial_ptr + program, tl.sum(x))


def sum_tree(x):
    """[n] -> [], 4096 elements per program, then one program for the partial sums. Deterministic."""
    y = _prepare(x)
    programs = triton.cdiv(x.numel(), 4096)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    if programs:
        sum_blocks_kernel[(programs,)](x, partial, x.numel(), BLOCK=4096, num_warps=8)
    sum_one_program_kernel[(1,)](partial, y, programs, BLOCK=4096, num_warps=8)
    return y


# Rung 4, advanced. New: a persistent grid that finishes in one launch.
# - There are two programs per SM, 264 on an H200. Each takes every 264th tile (here a block of 8192 elements) and keeps
#   its sums in registers: one partial sum per program.
#
#       program 0      tile 0, tile 264, tile 528, ...    -> partial[0]   --+
#       program 1      tile 1, tile 265, tile 529, ...    -> partial[1]   --+--> the last program to finish adds them
#       program 263    tile 263, tile 527, ...            -> partial[263] --+    in the order 0, 1, 2, ...
#
# - Only the tail has a mask. With a mask on every tile, 16-byte loads become 4-byte loads when n is no multiple of 4.
# - A counter in memory tells a program that it is the last to finish.
# - Where n is large, the loop is pipelined: 3 stages keep the loads of the next two tiles in flight to shared memory.
#   Two tiles of 8192 fp32 elements are 64 KB for each program, and by Little's law 25 KB per SM are enough (lesson 1).
# - Where n is small, a program has too few tiles to fill that pipeline. Twice the warps load straight to registers.
# - x is read once. evict_first lets L2 give up the bytes of x before others.
# Predicted: read speed where n is large. Where n is small, the launch and the last program's work show.
@triton.jit
def sum_persistent_kernel(
    x_ptr,  # [n]
    partial_ptr,  # [programs]
    count_ptr,  # [], 0 before and after
    y_ptr,  # []
    n,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,  # a power of two, no less than the number of programs
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    whole = n // BLOCK
    acc = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(program, whole, programs, num_stages=STAGES):
        acc += tl.load(x_ptr + tile * BLOCK + lanes, eviction_policy="evict_first").to(tl.float32)
    tail = whole * BLOCK + lanes
    end = tl.where(program == whole % programs, n, 0)  # one program loads the tail; the others load nothing
    acc += tl.load(x_ptr + tail, mask=tail < end, other=0).to(tl.float32)
    tl.store(partial_ptr + program, tl.sum(acc))
    # Release: the partial sum is visible before the count is. Acquire: the program that sees the last count also
    # sees every partial sum. The thread that stores the sum is the one that counts.
    before_me = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if before_me == programs - 1:
        ids = tl.arange(0, MOST)
        # .cg reads from L2, which all SMs share. An SM's own L1 could hold an older value.
        partial = tl.load(partial_ptr + ids, mask=ids < programs, other=0, cache_modifier=".cg")
        tl.store(y_ptr, tl.sum(partial))
        tl.store(count_ptr, 0)  # ready for the next call, which then needs no memset


def sum_persistent(x):
    """[n] -> [], two programs per SM, 8192 elements per step. Deterministic (for a given number of SMs)."""
    y = _prepare(x)
    if x.numel() == 0:
        return y.zero_()
    programs = min(2 * num_sms(), triton.cdiv(x.numel(), 8192))
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    count = _counter(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
    most = triton.next_power_of_2(2 * num_sms())
    stages, warps = (1, 16) if x.numel() <= 2**26 else (3, 8)
    sum_persistent_kernel[(programs,)](
        x, partial, count, y, x.numel(), BLOCK=8192, MOST=most, STAGES=stages, num_warps=warps
    )
    return y


@functools.cache
def _counter(device, stream):
    # One per stream. Calls on one stream run one after another; on two streams they may overlap.
    return torch.zeros((), dtype=torch.int32, device=device)


def _prepare(x):
    expect(x=x, ndim=1, contiguous=True)
    return torch.empty((), dtype=x.dtype, device=x.device)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.numel()
        return sum_persistent(x)

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(ctx.n)  # every element has slope 1: no kernel, and no memory either


def total(x):
    """The sum of a vector, with a gradient."""
    return _Sum.apply(x)


def same_bits_every_time(rung):
    """Deterministic rungs: the same bits from ten runs."""
    if rung is sum_atomic:
        raise Unsupported("atomic additions come in any order")
    x = inputs(8192 * 9 + 5)[0] * 1e3
    assert len({rung(x).item() for _ in range(10)}) == 1


# Which one to choose? An atomic is the shortest code. It is enough where additions to one address are few, and where
# the last bit may differ. The tree gives the same bits each time, at the price of a second launch. The persistent grid
# gives them in one launch, at the price of a counter and of the most code.
#
# The answers: 256 + 1 is 256 in bf16. One program at a time can add to one address.
LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="many programs, one answer: atomics, trees, persistent grids, the order of additions",
        hours=0.75,
        star=True,
        operator="sum",
        pictures=("partial_sums",),
    ),
    problem=PROBLEM,
    rungs=(sum_one_program, sum_atomic, sum_tree, sum_persistent),
    predicted=(
        Prediction(
            rung=sum_one_program,
            at=LARGE,
            tb_per_s=0.032,
            why="A step loads 16 KB and waits for it, because the 32 registers of a thread hold no second step. At "
            "800 ns per step that is 0.02 TB/s, and the additions come on top.",
        ),
        Prediction(rung=sum_atomic, at=LARGE, percent_of_limit=100),
        Prediction(rung=sum_tree, at=LARGE, ms=0.264),
        Prediction(rung=sum_persistent, at=LARGE, percent_of_limit=100),
    ),
    checks=(
        *PROBLEM.checks,
        case("more tiles than programs, and a tail", n=8192 * 19 + 5),
    ),
    wrong=(
        Mutant("last block left out", "sum_one_program_kernel", "tl.cdiv(n, BLOCK)", "n // BLOCK", "sum_one_program"),
        Mutant("each block replaces the sums", "sum_one_program_kernel", "acc +=", "acc =", "sum_one_program"),
        Mutant("the largest block wins", "sum_atomic_kernel", "tl.atomic_add", "tl.atomic_max", "sum_atomic"),
        Mutant("the total starts anywhere", "sum_atomic", "torch.zeros", "torch.empty", "sum_atomic", "nan"),
        Mutant("a lane too many", "sum_blocks_kernel", "offsets < n", "offsets <= n", "sum_tree", "out of bounds"),
        Mutant("partial sums in 16 bits", "sum_tree", "dtype=torch.float32", "dtype=torch.bfloat16", "sum_tree"),
        Mutant("everybody adds the tail", "sum_persistent_kernel", "tail < end", "tail < n", "sum_persistent"),
        Mutant("nobody is the last", "sum_persistent_kernel", "programs - 1", "programs", "sum_persistent", "nan"),
        Mutant(
            "counter left as it is",
            "sum_persistent_kernel",
            "(count_ptr, 0)",
            "(count_ptr, 1)",
            "sum_persistent",
            "nan",
        ),
    ),
    claims={sum_persistent: ("16-byte loads", "no spills")},
    passes={sum_one_program: 1.0, sum_atomic: 1.0, sum_tree: 1.0, sum_persistent: 1.0},
    properties=(same_bits_every_time, *PROBLEM.properties),
    grad=Grad(total),
)

if __name__ == "__main__":
    LESSON.main()
