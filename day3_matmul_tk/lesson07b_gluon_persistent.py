"""Gluon: warp specialization and a persistent kernel
==================================================
Lesson 7 ends with one MMA always in flight, but all eight warps do everything in step: they wait for tiles, issue
loads, multiply, and at a tile's end convert and store while the tensor cores are idle. An SM multiplies a tile
of 128 x 256 in 65,536 cycles at K = 4096, so each 1000 cycles around it are 1.5%. Here each warp has one role:

    1 producer warp        issues loads as soon as a stage is empty        40 registers a thread
    2 consumer warpgroups  multiply 64 x 256 each, and store it           232 registers a thread: 128 are sums

They meet at barriers alone, two for each stage: `full` (the copies have come) and `empty` (both have read). A
barrier's phase ends with its last arrival and byte. A wait names the parity of the phase whose end it needs.

You will learn: warp_specialize, which wait needs which parity, register budgets, persistence by hand.
Needs a Hopper GPU to run; without one the rungs are compiled, and a CPU model of the barriers runs, whose partitions
take turns in any order. Its mutants are mistakes that hang on a GPU, or give wrong results rarely.
Run it:    python day3_matmul_tk/lesson07b_gluon_persistent.py
Check it:  python -m lessonkit check lesson07b_gluon_persistent
Time it:   python -m lessonkit bench lesson07b_gluon_persistent
"""

import math

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs, num_sms
from lessonkit.judge.simulate import Barrier, ask_for, in_any_order

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

import course_ops
from course_ops.hopper import allocate_barriers, allocate_stages, tensor_descriptor
from problems.matmul import LLM, PROBLEM, TMA_CHECKS, empty_product

BLOCK_M, BLOCK_K, STAGES = 128, 64, 4


# The order of tiles, a step's copies, and the way of C to memory: lesson 7's.
@gluon.jit
def place(program, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes `program`-th: in groups of GROUP rows of tiles, each column by column."""
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


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


@gluon.jit
def store_tile(c_desc, c_smem, acc, row, col, FIRST: gl.constexpr):
    parts = halves(acc)
    if acc.shape[1] == 256:
        parts = halves(parts[0]) + halves(parts[1])
    # An even number: or the last panel of a tile and the first of the next would be the same buffer.
    gl.static_assert(len(parts) % 2 == 0)
    for p in gl.static_range(len(parts)):
        panel = c_smem.index(FIRST + p % 2)
        tma.store_wait(1)
        panel.store(parts[p].to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col + 64 * p], panel)


# The ring turns on from tile to tile, so its turns are counted, not a tile's steps.
@gluon.jit
def slot(turn, STAGES: gl.constexpr):
    """The stage of a turn of the ring, and the parity of its round."""
    return turn % STAGES, turn // STAGES & 1


# Rung 4. New: partitions. Each is a function that runs in warps of its own; what they share are shared memory, barriers
# and numbers. In the first round every stage is empty though nobody has said so: parity ^ 1 is then the parity of the
# phase before the first, which counts as over. (The loop over tiles comes round once here: as many programs as tiles.)
@gluon.jit
def load_partition(descs, ring, sizes, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr):
    a_desc, b_desc = descs
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps = sizes
    M: gl.constexpr = a_desc.block_type.shape[1 if A_T else 0]
    K: gl.constexpr = a_desc.block_type.shape[0 if A_T else 1]
    N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            stage, parity = slot(turn, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            a_to, b_to, bar = a_smem.index(stage), b_smem.index(stage), full.index(stage)
            load_step(a_desc, b_desc, a_to, b_to, bar, tile_m * M, tile_n * N, step * K, A_T, B_T)
            turn += 1


# A warpgroup has the upper (WHICH = 0) or lower half of the tile. A stage is given back one step late: when the product
# after it has been issued and wgmma's wait says that the one before is over. An arrival is one thread's, after all 128
# have met (the compiler sees to it), so `empty` counts 2.
@gluon.jit
def multiply_partition(
    c_desc, c_smem, ring, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr
):
    a_smem, b_smem, full, empty = ring
    tiles_m, tiles_n, steps = sizes
    HALF: gl.constexpr = c_desc.block_type.shape[0]
    N: gl.constexpr = b_smem.shape[1 if B_T else 2]
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((HALF, N), gl.float32, sums)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        before = 0
        for step in range(steps):
            stage, parity = slot(turn, full.shape[0])
            mbarrier.wait(full.index(stage), parity)
            a = turned(a_smem.index(stage), A_T).slice(WHICH * HALF, HALF)
            b = turned(b_smem.index(stage), B_T)
            # The first product of a tile does not add: no registers to be zeroed, and nothing of the last tile.
            acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), pred=step > 0)
            before = stage
            turn += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))
        # Panels of 64 x 64; the last two are on their way while the next tile is multiplied.
        store_tile(c_desc, c_smem, acc, (tile_m * 2 + WHICH) * HALF, tile_n * N, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def persistent_kernel(
    a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 4)  # panels of 64 x 64, two a warpgroup
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2)  # the producer's arrival; both warpgroups'
    ring = allocate_stages(a_desc, STAGES), allocate_stages(b_desc, STAGES), full, empty
    sizes = (tiles_m, tiles_n, steps)
    # The first partition runs in the kernel's own 4 warps and gets the registers that the others leave: of 65,536, 384
    # threads have 168 each at first; 128 keep 40 and 128 ask for 232, so 232 are left for these.
    gl.warp_specialize(
        [
            (multiply_partition, (c_desc, c_smem, ring, sizes, 0, GROUP, A_T, B_T)),
            (multiply_partition, (c_desc, c_smem, ring, sizes, 1, GROUP, A_T, B_T)),
            (load_partition, ((a_desc, b_desc), ring, sizes, GROUP, A_T, B_T)),
        ],
        [4, 1],
        [232, 40],
    )


# Predicted, rung 4: 0 to 2% on rung 3. A step costs its product and nothing else in both; but the warpgroups need not
# keep step, so one may be issuing or waiting while the other's product runs.
@needs(90, "TMA and wgmma", only=True)
def specialized(a, b):
    """[M, K], [K, N] -> [M, N], fp16 or bf16; rows or columns contiguous and 16 bytes aligned. A program a tile."""
    return _run(a, b, persistent=False)


# Rung 5. New: a grid that stays, and nothing else changes: a program for each SM, whose loop over tiles goes on. The
# producer is four steps into the next tile while the warpgroups store this one, and TMA still writes two panels of C
# when the next product begins. Predicted: nothing is left of a tile's start (1500 cycles), of its end what the
# conversion to 16 bits takes, about 1000; +4% at K = 4096, half of that at 8192, as far as power lets the clocks be.
# (Gluon has clusters whose blocks share loads by multicast, 13b's last step, from Triton 3.7 on.)
@needs(90, "TMA and wgmma", only=True)
def persistent(a, b):
    """As specialized, a program an SM."""
    return _run(a, b)


# Rung 6. New: the tile follows the shape. 1024 x 1024 is 32 tiles of 128 x 256, and 100 SMs would stand by; 64 of
# 128 x 128 multiply half as much each, with more bytes a product (H200: 3/4 of the time). Lesson 1's estimate decides.
@needs(90, "TMA and wgmma", only=True)
def matmul(a, b):
    """As persistent, tiles of 256 or 128 columns; what TMA cannot read (fp32, rows not 16-byte aligned): course_ops."""
    try:
        return _run(a, b, widths=(256, 128))
    except Unsupported:
        return course_ops.matmul(a, b)


def _run(a, b, widths=(256,), group=16, persistent=True):
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    _check_operands(a=a, b=b, c=c)
    block_n = min(widths, key=lambda n: _predicted_cycles(M, N, K, BLOCK_M, n, BLOCK_K))
    (a_desc, a_t), (b_desc, b_t) = _describe(a, BLOCK_M, BLOCK_K), _describe(b, BLOCK_K, block_n)
    c_desc, _ = _describe(c, BLOCK_M // 2, 64)
    tiles_m, tiles_n, steps = triton.cdiv(M, BLOCK_M), triton.cdiv(N, block_n), triton.cdiv(K, BLOCK_K)
    programs = tiles_m * tiles_n
    if persistent:  # no more than the rounds need: 512 tiles are 4 rounds for 132 programs, and for 128 as well
        programs = triton.cdiv(programs, triton.cdiv(programs, num_sms()))
    persistent_kernel[(programs,)](
        a_desc, b_desc, c_desc, tiles_m, tiles_n, steps, STAGES, group, a_t, b_t, num_warps=4
    )  # fmt: skip
    return c


def _predicted_cycles(M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, **_):
    """Cycles of a matmul in 16 bits on a Hopper GPU, if nothing but tensor cores and L2 were slow: to compare tiles."""
    tiles = math.ceil(M / BLOCK_M) * math.ceil(N / BLOCK_N)
    share = min(64, 5120 / min(tiles, num_sms()))  # bytes a cycle; an SM takes no more than 64, whoever else is idle
    step = max(BLOCK_M * BLOCK_N * BLOCK_K / 2048, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K / share)
    step += 300  # to wait for a stage, and to start on it: why steps should not be short
    ends = 1500 + 2 * BLOCK_M * BLOCK_N / share  # until the first tiles are there, and to write C
    return math.ceil(tiles / num_sms()) * (math.ceil(K / BLOCK_K) * step + ends)


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


# The CPU model: what lies between the barriers is PyTorch, small (32 x 48 x 16, 3 stages, 4 programs) so that the ring
# turns often. Partitions are generators that yield (barrier, parity) where the kernel's wait; any that need not wait
# may run next, and a copy may come at any time: until then its stage is NaN. The order is random, and always the same.
def twin(a, b):
    """As matmul, for any shape and dtype: persistent_kernel's loops and barriers, one wait at a time."""
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    x = F.pad(a.cpu().float(), (0, -K % 16, 0, -M % 32))  # with zeros, as TMA does
    w = F.pad(b.cpu().float(), (0, -N % 48, 0, -K % 16))
    out = torch.empty(x.shape[0], w.shape[1])
    for program in range(4):
        _program(program, x, w, out)
    return c.copy_(out[:M, :N])


def _program(program, x, w, out):
    tiles_m, tiles_n, steps = x.shape[0] // 32, w.shape[1] // 48, w.shape[0] // 16
    tiles = [place.fn(tile, tiles_m, tiles_n, 2) for tile in range(program, tiles_m * tiles_n, 4)]
    a_smem, b_smem = torch.full((3, 32, 16), math.nan), torch.full((3, 16, 48), math.nan)
    full, empty = [Barrier(1) for _ in range(3)], [Barrier(2) for _ in range(3)]
    copies = []  # on their way

    def load_partition():
        turn = 0
        for tile_m, tile_n in tiles:
            for step in range(steps):
                stage, parity = slot.fn(turn, 3)
                yield empty[stage], parity ^ 1
                a, b = x[32 * tile_m :, 16 * step :][:32, :16], w[16 * step :, 48 * tile_n :][:16, :48]
                ask_for(copies, full[stage], (a_smem[stage], a), (b_smem[stage], b))
                turn += 1

    def multiply_partition(which):
        half, turn = slice(16 * which, 16 * which + 16), 0
        for tile_m, tile_n in tiles:
            acc, before = torch.zeros(16, 48), 0
            for step in range(steps):
                stage, parity = slot.fn(turn, 3)
                yield full[stage], parity
                if step > 0:  # only now is that product over
                    acc += a_smem[before, half] @ b_smem[before]
                    empty[before].arrive()
                before, turn = stage, turn + 1
            acc += a_smem[before, half] @ b_smem[before]
            empty[before].arrive()
            out[32 * tile_m :, 48 * tile_n :][half, :48] = acc

    in_any_order([multiply_partition(0), multiply_partition(1), load_partition()], copies)


LESSON = Lesson(
    about=About(
        teaches="warp specialization, register budgets, persistence by hand, deadlocks found without a GPU",
        hours=0.75,
        operator="matmul",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(specialized, persistent, matmul),
    checks=(
        *PROBLEM.checks,
        *TMA_CHECKS,
        case("two rounds of the grid, the second begins in the middle of the ring", gib=0.1, M=1544, N=3080, K=72),
        case("4 rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=328),
        case("offsets past 2^31", gib=60, M=70_001, N=32_000, K=32_000),
    ),
    benches=(
        *PROBLEM.benches,
        *({"M": m, "N": n, "K": k} for m, n, k in LLM if m == 4096 and n != k),
    ),
    cpu_model=twin,
    wrong=(
        Mutant("stages taken before they are empty", "_program", "parity ^ 1", "2", "twin", "nan"),
        Mutant("at first nothing is empty", "_program", "parity ^ 1", "parity", "twin", "barrier"),
        Mutant("read before the copies have come", "_program", "full[stage], parity", "full[stage], 2", "twin", "nan"),
        Mutant("empty when one of two has read", "_program", "Barrier(2)", "Barrier(1)", "twin", "barrier"),
        Mutant("always the same round", "slot", "turn // STAGES & 1", "0", "twin", "barrier"),
        Mutant("K's tail left out", "_run", "triton.cdiv(K, BLOCK_K)", "K // BLOCK_K", "persistent"),
        Mutant("the tile before is added", "multiply_partition", "step > 0, is", "True, is", "persistent"),
        Mutant("both store the upper half", "multiply_partition", "* 2 + WHICH", "* 2", "matmul"),
    ),
    claims=dict.fromkeys((specialized, persistent, matmul), ("wgmma", "tma", "no spills")),
    dtypes=(torch.float16, torch.bfloat16),
)

if __name__ == "__main__":
    LESSON.main()
