"""C = A B on Hopper for shapes whose last wave of tiles is nearly empty, or whose rows begin within a sector of L2.

As in matmul_hopper, each SM has one CTA: a producer warp, and a consumer warpgroup for each 64 rows of a tile. New are

- tiles of 192 rows, by a third consumer: fewer bytes from L2 for a multiply-add.
- Stream-K (Osama et al. 2023, section 5.2). It takes the first tiles, more than a wave and less than two. Their steps
  along K lie in one row, and every CTA takes an equal share of it. The other tiles are a whole number of waves, and
  come whole:

      CTA 0   | tile 0             | tile 1: last steps -> sums |   5 CTAs, 7 tiles: 1.4 tiles each
      CTA 1   | tile 1: first | tile 2             | tile 3 ...

- Pairs of CTAs, from Triton 3.8 on. A pair has two tiles one above the other and does all of the above as one CTA
  would, with tiles twice as high. B's block is copied once for both (_matmul_plan says what that saves).

A CTA whose share begins inside a tile leaves its sums in global memory and sets a flag. The CTA with the tile's first
step waits for it, adds the sums in the order of K, and stores C. So the result is the same to the bit each time.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from course_ops._common import cdiv, num_sms, shared_memory
from course_ops._launch import launcher
from course_ops.hopper import aggregate, allocate_stages, ring_slot
from course_ops.kernels._matmul_hopper import (
    accumulator,
    as_operand,
    block_barrier,
    describer,
    load_for_both,
    release,
    ring_barriers,
    split_columns,
    swizzled_tile,
    wait_until_read,
)
from course_ops.kernels._matmul_plan import STEP, Plan, group_of, plan_of
from course_ops.kernels._tiles import stream_zeros
from course_ops.kernels.matmul_hopper import BLOCK_M, takes
from course_ops.versions import async_load, async_store

ROWS, PANEL = 64, 64  # rows of a consumer; columns of C that are stored at a time


@gluon.jit
def share_begin(cta, total, ctas):
    """The first of `total` steps in a CTA's share: shares differ by at most one. share_begin(ctas) is the end."""
    return cta * (total // ctas) + min(cta, total % ctas)


@gluon.jit
def unit_of(index, cta, ctas, begin, end, steps, shared_tiles):
    """Of a CTA's index-th piece of work the tile, its first step and the step after its last.

    begin, end: the CTA's share of the steps of the first `shared_tiles` tiles. After it come whole tiles.
    """
    tile = begin // steps + index
    first, last = max(begin - tile * steps, 0), min(end - tile * steps, steps)
    shared_units = (end + steps - 1) // steps - begin // steps
    if index >= shared_units:
        tile = shared_tiles + cta + (index - shared_units) * ctas
        first, last = 0, steps
    return tile, first, last


@gluon.jit
def units_of(cta, ctas, begin, end, steps, shared_tiles, tiles):
    """How many pieces of work a CTA has."""
    return (end + steps - 1) // steps - begin // steps + (tiles - shared_tiles - cta + ctas - 1) // ctas


@aggregate
class Work:
    """Which parts of which tiles this CTA multiplies."""

    cta: gl.tensor  # counted from the last program: see stream_k_hopper_kernel
    ctas: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    steps: gl.tensor  # of a tile
    shared_tiles: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    group: gl.tensor

    @gluon.jit
    def units(self):
        tiles = self.tiles_m * self.tiles_n
        return units_of(self.cta, self.ctas, self.begin, self.end, self.steps, self.shared_tiles, tiles)

    @gluon.jit
    def unit(self, index):
        """Tile (number, row, column), first step, step after the last."""
        tile, first, last = unit_of(
            index, self.cta, self.ctas, self.begin, self.end, self.steps, self.shared_tiles
        )  # fmt: skip
        tile_m, tile_n = swizzled_tile(tile, self.tiles_m, self.tiles_n, self.group)
        return tile, tile_m, tile_n, first, last


@aggregate
class PartitionArgs:
    """What the warps of a CTA share."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    c_desc: tma.tensor_descriptor
    a_smem: gl.shared_memory_descriptor  # [STAGES * CONSUMERS, ROWS, STEP], or transposed as in memory
    b_smem: gl.shared_memory_descriptor  # [STAGES, STEP, BLOCK_N]
    c_smem: gl.shared_memory_descriptor  # [2 * CONSUMERS, ROWS, PANEL]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    both_empty: gl.shared_memory_descriptor  # in CTA 0 of a pair
    sums_ptr: gl.tensor
    flags_ptr: gl.tensor
    work: Work
    CONSUMERS: gl.constexpr
    CTAS: gl.constexpr
    A_T: gl.constexpr
    B_T: gl.constexpr


@aggregate
class Cursor:
    """The next step that is to be loaded: which of all steps of this CTA, and where."""

    count: gl.tensor
    index: gl.tensor  # of the unit
    step: gl.tensor
    last: gl.tensor
    row: gl.tensor
    col: gl.tensor


@gluon.jit
def cursor_at(args, index, count):
    """A cursor before a unit's first step."""
    BLOCK_M: gl.constexpr = args.CONSUMERS * args.c_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = args.b_desc.block_type.shape[0 if args.B_T else 1]
    _, tile_m, tile_n, first, last = args.work.unit(min(index, args.work.units() - 1))
    return Cursor(
        count=gl.to_tensor(count), index=gl.to_tensor(index), step=first, last=last,
        row=tile_m * BLOCK_M, col=tile_n * BLOCK_N,
    )  # fmt: skip


# Past the end of A or B TMA fills a block with zeros and counts them as arrived bytes, so K needs no padding. In the
# first round every stage is empty: parity ^ 1 names the phase before the first, which counts as complete.
@gluon.jit
def load_next(args, at):
    """Load the cursor's step as soon as its stage is empty, and move the cursor on."""
    ROWS: gl.constexpr = args.c_desc.block_type.shape[0]
    STEP: gl.constexpr = args.a_desc.block_type.shape[0 if args.A_T else 1]
    OF_A: gl.constexpr = args.CONSUMERS * args.a_desc.block_type.nbytes // args.CTAS
    stage, parity = ring_slot(at.count, args.full.shape[0])
    wait_until_read(args, stage, parity ^ 1)
    full, k = args.full.index(stage), at.step * STEP
    mbarrier.expect(full, OF_A + args.b_desc.block_type.nbytes)
    load_for_both(args.b_desc, [at.col, k] if args.B_T else [k, at.col], full, args.b_smem.index(stage), args.CTAS)
    for i in gl.static_range(args.CONSUMERS):
        row = at.row + i * ROWS
        to = args.a_smem.index(stage * args.CONSUMERS + i)
        async_load(args.a_desc, [k, row] if args.A_T else [row, k], full, to)
    if at.step + 1 < at.last:
        at = Cursor(count=at.count + 1, index=at.index, step=at.step + 1, last=at.last, row=at.row, col=at.col)
    else:
        at = cursor_at(args, at.index + 1, at.count + 1)
    return at


@gluon.jit
def producer(args):
    at = cursor_at(args, 0, 0)
    while at.index < args.work.units():
        at = load_next(args, at)


# A consumer releases a stage one step late: after the next MMA has been issued and the wait says that the one before
# is complete. A unit's first MMA does not accumulate.
@gluon.jit
def consumer(args, WHICH: gl.constexpr, LOADS: gl.constexpr):
    """Multiply 64 rows of each tile. LOADS: also load, a step into a stage as soon as all consumers have read it."""
    ROWS: gl.constexpr = args.c_desc.block_type.shape[0]
    N: gl.constexpr = args.b_smem.shape[1 if args.B_T else 2]
    acc = gl.zeros((ROWS, N), gl.float32, accumulator(N, args.CTAS))
    units = args.work.units()
    if LOADS:
        at = cursor_at(args, 0, 0)
        for _ in range(args.full.shape[0]):
            if at.index < units:
                at = load_next(args, at)
    count = 0
    for index in range(units):
        tile, tile_m, tile_n, first, last = args.work.unit(index)
        previous = 0
        for step in range(first, last):
            stage, parity = ring_slot(count, args.full.shape[0])
            mbarrier.wait(args.full.index(stage), parity)
            a = as_operand(args.a_smem.index(stage * args.CONSUMERS + WHICH), args.A_T)
            b = as_operand(args.b_smem.index(stage), args.B_T)
            acc = warpgroup_mma(a, b, acc, use_acc=step > first, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            release(args, previous, step > first)
            if LOADS:  # noqa: SIM102 (decided by the compiler, apart from the next)
                if (step > first) & (at.index < units):
                    at = load_next(args, at)
            previous = stage
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(args, previous, True)
        if LOADS:  # noqa: SIM102
            if at.index < units:
                at = load_next(args, at)
        row, col = (tile_m * args.CONSUMERS + WHICH) * ROWS, tile_n * N
        if first > 0:
            leave_sums(args, acc, WHICH)
        elif last < args.work.steps:
            store_sum(args, acc, wait_for_helpers(args, tile, last, WHICH), row, col, WHICH, True)
        else:  # a path of its own, which needs fewer registers
            store_sum(args, acc, 0, row, col, WHICH, False)
    tma.store_wait(0)


@gluon.jit
def panels_of(acc):
    """acc [64, N] as panels of 64 columns."""
    panels = split_columns(acc)
    if acc.shape[1] == 256:
        panels = split_columns(panels[0]) + split_columns(panels[1])
    return panels


@constexpr_function
def in_order(elements, ctas):
    """The layout of a row of elements: 4 neighbours to a thread, 512 to a warpgroup. Of a pair each CTA has a half."""
    of_ctas = {"cga_layout": [[1]]} if ctas == 2 else {}
    return gl.BlockedLayout([elements], [32], [4], [0], **of_ctas)


# A thread of wgmma's layout holds, of every 8 columns, 2 neighbours in each of 2 rows. In this order its 4 elements
# are neighbours, and a warp's too: 16 bytes per thread, 512 in a row. No element moves between threads.
@gluon.jit
def in_a_row(panel, CTAS: gl.constexpr):
    """[64, 64] in each CTA -> [4096]."""
    HALVES: gl.constexpr = panel.shape[0] // 64
    x = panel.reshape((HALVES, 4, 2, 8, 8, 4, 2)).permute((0, 4, 1, 3, 5, 2, 6)).reshape((HALVES * 4096,))
    return gl.convert_layout(x, in_order(4, CTAS), assert_trivial=True)


@gluon.jit
def as_panel(x, like):
    """[4096] in each CTA -> [64, 64], in the layout of `like`: undoes in_a_row."""
    HALVES: gl.constexpr = x.shape[0] // 4096
    x = x.reshape((HALVES, 8, 4, 8, 4, 2, 2)).permute((0, 2, 5, 3, 1, 4, 6)).reshape((HALVES * 64, 64))
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def sums_of(args, cta, panel, WHICH: gl.constexpr):
    """Where consumer WHICH of a CTA leaves a panel's sums of the tile inside which its share begins."""
    SIZE: gl.constexpr = args.c_desc.block_type.shape[0] * args.b_smem.shape[1 if args.B_T else 2]
    OF_PANEL: gl.constexpr = args.CTAS * 4096
    first = (cta * args.CONSUMERS + WHICH) * SIZE + panel * OF_PANEL
    return args.sums_ptr + first + gl.arange(0, OF_PANEL, layout=in_order(4, args.CTAS))


@gluon.jit
def flag_of(args, cta, WHICH: gl.constexpr):
    """The flag of consumer WHICH of a CTA; of a pair one for each CTA."""
    first = (cta * args.CONSUMERS + WHICH) * args.CTAS
    return args.flags_ptr + first + gl.arange(0, args.CTAS, layout=in_order(1, args.CTAS))


@gluon.jit
def leave_sums(args, acc, WHICH: gl.constexpr):
    panels = panels_of(acc)
    for p in gl.static_range(len(panels)):
        gl.store(sums_of(args, args.work.cta, p, WHICH), in_a_row(panels[p], args.CTAS))
    block_barrier()  # one thread sets the flag: the others' stores must be done
    ones = gl.full([args.CTAS], 1, gl.int32, in_order(1, args.CTAS))
    gl.atomic_xchg(flag_of(args, args.work.cta, WHICH), ones, sem="release", scope="gpu")


# Each thread waits itself, so its later loads are not older than the flag.
@gluon.jit
def wait_until_set(flag):
    asm: gl.constexpr = """
        {
        .reg .pred unset;
        again:
        ld.acquire.gpu.global.b32 $0, [$1];
        setp.eq.s32 unset, $0, 0;
        @unset bra again;
        }
    """
    gl.inline_asm_elementwise(asm, "=r,l", [flag], gl.int32, is_pure=False, pack=1)


# A tile's steps after `last` belong to the next CTAs. Each consumer waits for its like, and clears the flag for the
# next launch when all of its threads have seen it.
@gluon.jit
def wait_for_helpers(args, tile, last, WHICH: gl.constexpr):
    """Wait until all steps of a tile are summed, and say how many of the next CTAs have had a part in it."""
    work = args.work
    helpers = 0
    while last < work.steps:
        helpers += 1
        flag = flag_of(args, work.cta + helpers, WHICH)
        wait_until_set(flag)
        block_barrier()
        gl.store(flag, 0)
        end = share_begin(work.cta + helpers + 1, work.shared_tiles * work.steps, work.ctas)
        last = min(end - tile * work.steps, work.steps)
    return helpers


# The last two panels of 64 x 64 are still being stored while the next tile is multiplied. store_wait(1): all panels but
# the last have left shared memory. The fence orders the threads' writes before TMA's reads. TMA writes nothing outside
# of C.
@gluon.jit
def store_sum(args, acc, helpers, row, col, WHICH: gl.constexpr, HELPED: gl.constexpr):
    """acc and, if HELPED, the helpers' sums to C, in panels of 64 columns, through two buffers in turns."""
    panels = panels_of(acc)
    for p in gl.static_range(len(panels)):
        x = panels[p]
        if HELPED:
            x = in_a_row(x, args.CTAS)
            for i in range(helpers):
                x += gl.load(sums_of(args, args.work.cta + 1 + i, p, WHICH), cache_modifier=".cg")  # read once
            x = as_panel(x, panels[p])
        panel = args.c_smem.index(2 * WHICH + p % 2)
        tma.store_wait(1)
        panel.store(x.to(args.c_desc.dtype))
        fence_async_shared()
        async_store(args.c_desc, [row, col + 64 * p], panel)


# Waiting ends: there are no more programs than SMs. If another kernel holds some SMs, programs still start by number,
# and a CTA waits for CTAs after it only. CTAs are counted from the last program, so those have started before.
@gluon.jit(do_not_specialize=["steps", "shared_tiles", "tiles_m", "tiles_n", "group"])
def stream_k_hopper_kernel(
    a_desc, b_desc, c_desc,
    sums_ptr, flags_ptr,  # [CTAs, CONSUMERS, ROWS * BLOCK_N] fp32; [CTAs, CONSUMERS] int32, 0 before and after
    steps, shared_tiles, tiles_m, tiles_n, group,
    CONSUMERS: gl.constexpr, CTAS: gl.constexpr, STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    ctas = gl.num_programs(0)
    cta = ctas - 1 - gl.program_id(0)
    total = shared_tiles * steps
    full, empty, both_empty = ring_barriers(STAGES, CONSUMERS, CTAS)
    args = PartitionArgs(
        a_desc=a_desc, b_desc=b_desc, c_desc=c_desc,
        a_smem=allocate_stages(a_desc, STAGES * CONSUMERS), b_smem=allocate_stages(b_desc, STAGES),
        c_smem=allocate_stages(c_desc, 2 * CONSUMERS),
        full=full, empty=empty, both_empty=both_empty,
        sums_ptr=sums_ptr, flags_ptr=flags_ptr,
        work=Work(
            cta=cta, ctas=ctas, begin=share_begin(cta, total, ctas), end=share_begin(cta + 1, total, ctas),
            steps=steps, shared_tiles=shared_tiles, tiles_m=tiles_m, tiles_n=tiles_n, group=group,
        ),
        CONSUMERS=CONSUMERS, CTAS=CTAS, A_T=A_T, B_T=B_T,
    )  # fmt: skip
    # The first partition runs in the kernel's own warps. Three consumers need all registers of an SM, 168 a thread, and
    # leave none for a producer: the first of them loads.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (args, 0, False)), (consumer, (args, 1, False)), (producer, (args,))
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (args, 0, True)), (consumer, (args, 1, False)), (consumer, (args, 2, False))
        ], [4, 4], [168, 168])  # fmt: skip


def pays(a: Tensor, b: Tensor) -> bool:
    """Whether this kernel takes a and b, and the plan is not whole tiles of one CTA with 128 rows: matmul_hopper's."""
    if not takes(a, b):
        return False
    plan = plan_of(a, b, num_sms(a.device))
    return not plan.other and (plan.shared_tiles > 0 or plan.block_m != BLOCK_M or plan.ctas > 1)


def matmul_stream_k_hopper(a: Tensor, b: Tensor) -> Tensor:
    """[M, K], [K, N] -> [M, N] in 16 bits, as the plan has it; operands as for matmul_hopper; deterministic."""
    return prepare(a, b)(a, b)


def prepare(a: Tensor, b: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_stream_k_hopper for operands that lie as a and b do."""
    return planned(a, b, plan_of(a, b, num_sms(a.device)))


def by_plan(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    """As matmul_stream_k_hopper, by a given plan."""
    return planned(a, b, plan)(a, b)


def planned(a: Tensor, b: Tensor, plan: Plan) -> Callable[[Tensor, Tensor], Tensor]:
    """by_plan for operands that lie as a and b do."""
    M, N, sms = a.shape[0], b.shape[1], num_sms(a.device)
    consumers, block_m, block_n, ctas = plan.block_m // ROWS, plan.ctas * plan.block_m, plan.block_n, plan.ctas
    (of_a, a_t), (of_b, b_t) = describer(a, ctas * ROWS, STEP, plan.rows_apart), describer(b, STEP, block_n, plan.same)
    of_c, _ = describer(a.new_empty(M, N, device="meta"), ctas * ROWS, PANEL, plan.rows_apart)
    tiles_m, tiles_n = cdiv(M, block_m), cdiv(N, block_n)
    programs = sms // ctas if plan.shared_tiles else min(sms // ctas, tiles_m * tiles_n)
    partial = programs * block_m * block_n if plan.shared_tiles else 0
    beside = 2 * consumers * ROWS * PANEL * 2 + 1024  # bytes: panels of C, barriers
    stages = min(6, (shared_memory(a.device) - beside) // (2 * STEP * (plan.block_m + block_n)))
    group = group_of(tiles_m, block_m, block_n, sms // ctas)
    sizes = cdiv(a.shape[1], STEP), plan.shared_tiles, tiles_m, tiles_n, group, consumers, ctas, stages, a_t, b_t
    empty = a.new_empty(0, dtype=torch.float32), a.new_empty(0, dtype=torch.int32)
    go = launcher(stream_k_hopper_kernel, (programs,), num_warps=4, num_ctas=ctas)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c, (sums, flags) = a.new_empty(M, N), empty
        if partial:
            sums = a.new_empty(partial, dtype=torch.float32)
            flags = stream_zeros(a, 4 * sms, "stream-k hopper")
        go(of_a(a), of_b(b), of_c(c), sums, flags, *sizes)
        return c

    return run
