"""fp8 in Gluon: block scales, one warpgroup promotes while another multiplies
===========================================================================
Scales that change with k (lesson 5: A in 1 x 128 blocks, B in 128 x 128) end the tensor cores' sums every 128 of K, and
each is promoted: multiplied by its two scales and added to a sum in fp32 registers. Triton's loop does that in turn,
all warps together: a product, a wait for its end, a promotion. For a tile of 128 x 128 and 128 of K an SM has to do

    on its tensor cores    512 cycles    2,097,152 pairs, 4096 a cycle
    with its FMA units     128           16,384 multiply-adds, 128 a cycle
    besides                100           notice a product's end, meet, ask for the next one

so that a loop in turn has at most 70% of the tensor cores. None of the three needs what the others use: all that is
missing is another warpgroup's MMA at that time. Lesson 7b's warpgroups have sums of their own, so one can promote while
the other multiplies. The two get out of step by themselves: a warpgroup that waits for the tensor cores stays behind.

You will learn: what a promotion costs and where to hide it, registers as a limit of tiles, a third warpgroup.
Sources: DeepSeek-V3, section 3.3.2, for the scales and why to promote; DeepGEMM has two such warpgroups.
Needs a Hopper GPU to run; without one the rungs are compiled. The barriers are lesson 7b's, and so is their CPU model.
Run it:    python day3_matmul_tk/lesson07e_gluon_fp8_blocks.py
Check it:  python -m lessonkit check lesson07e_gluon_fp8_blocks
Time it:   python -m lessonkit bench lesson07e_gluon_fp8_blocks
"""

from lessonkit import About, Lesson, Mutant, Unsupported, case, needs, num_sms, tma_takes

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops.hopper import allocate_barriers, allocate_stages, ring_slot
from course_ops.matmul_fp8 import kernel_for
from problems.matmul_fp8 import FP8, PROBLEM, scheme_of

BLOCK_K = 128


# The order of tiles and the way of C to memory: lesson 7's.
@gluon.jit
def place(program, tiles_m, tiles_n, GROUP: gl.constexpr):
    """The tile (row, column) that comes `program`-th: in groups of GROUP rows of tiles, each column by column."""
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)  # the last group may be lower
    within = program % (GROUP * tiles_n)
    return first + within % height, within // height


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


# The warp that loads, as in lesson 7d; new: it asks for a step's scales of A, too, 64 for each warpgroup.
@gluon.jit
def load_partition(descs, ring, sizes, GROUP: gl.constexpr):
    a_desc, b_desc, scale_desc = descs
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, _ = sizes
    WGS: gl.constexpr = a_smem.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    OF_A: gl.constexpr = a_desc.block_type.nbytes + scale_desc.block_type.nbytes
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            stage, parity = ring_slot(turn, full.shape[0])
            mbarrier.wait(empty.index(stage), parity ^ 1)
            bar, k = full.index(stage), step * BLOCK_K
            mbarrier.expect(bar, WGS * OF_A + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(b_desc, [tile_n * BLOCK_N, k], bar, b_smem.index(stage))
            for which in gl.static_range(WGS):
                row, own = (tile_m * WGS + which) * 64, stage * WGS + which
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_smem.index(own))
                tma.async_copy_global_to_shared(scale_desc, [step, row], bar, scale_smem.index(own))
            turn += 1


# Rung 1. New: promotion. A product of [64, 128] has registers of its own, 64 a thread beside the sums. Scales of A come
# as tiles do: TMA copies this step's 64 into the stage, so no thread keeps addresses or waits for memory. TMA needs
# rows [K/128, M] at multiples of 16 bytes. Where M is no multiple of 4, the launch copies the scales to such rows.
@gluon.jit
def promote(acc, a, b, scale_smem, scale_b, full, parity):
    """acc + a @ b * scale_a * scale_b; a [64, 128], b [128, 128], both in shared memory, a scale of A for each row."""
    mbarrier.wait(full, parity)  # before each half: what is over takes no time, and keeps the compiler from mixing them
    p = warpgroup_mma(a, b.permute((1, 0)), gl.zeros_like(acc), use_acc=False, is_async=True)
    scale = scale_smem.load(gl.SliceLayout(1, acc.type.layout)) * scale_b
    p = warpgroup_mma_wait(0, deps=(p,))
    acc += p * scale[:, None]
    # Waits for nothing. But the compiler may not leave additions for later that have to be done here: it would, and the
    # next product, which takes the registers of this one, would find them in use.
    return warpgroup_mma_wait(0, deps=(acc,))


# A warpgroup has 64 rows of a tile, and of those first the left and then the right half (rung 2). Scales of B are two
# numbers a step; those of the next are on their way under this one. A stage is given back when all of it has been
# multiplied.
@gluon.jit
def promote_partition(c_desc, c_smem, ring, scale_b_ptr, sizes, WHICH: gl.constexpr, GROUP: gl.constexpr):
    a_smem, b_smem, scale_smem, full, empty = ring
    tiles_m, tiles_n, steps, _, N = sizes
    WGS: gl.constexpr = a_smem.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    WIDE: gl.constexpr = BLOCK_N == 256
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row, col = (tile_m * WGS + WHICH) * 64, tile_n * BLOCK_N
        left_ptr = scale_b_ptr + col // 128 * steps
        right_ptr = left_ptr + (steps if col + 128 < N else 0)  # past N nothing is right, and nothing is stored
        scale_left, scale_right = gl.load(left_ptr), gl.load(right_ptr)
        left = gl.zeros((64, 128), gl.float32, sums)
        right = left
        for step in range(steps):
            later = gl.minimum(step + 1, steps - 1)
            next_left, next_right = gl.load(left_ptr + later), gl.load(right_ptr + later)
            stage, parity = ring_slot(turn, full.shape[0])
            bar = full.index(stage)
            a, b = a_smem.index(stage * WGS + WHICH), b_smem.index(stage)
            scale_a = scale_smem.index(stage * WGS + WHICH).reshape((64,))
            left = promote(left, a, b.slice(0, 128), scale_a, scale_left, bar, parity)
            if WIDE:
                right = promote(right, a, b.slice(128, 128), scale_a, scale_right, bar, parity)
            mbarrier.arrive(empty.index(stage))
            scale_left, scale_right = next_left, next_right
            turn += 1
        store_tile(c_desc, c_smem, left, row, col, 2 * WHICH)
        if WIDE:
            store_tile(c_desc, c_smem, right, row, col + 128, 2 * WHICH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "steps"])
def promote_kernel(
    a_desc, b_desc, c_desc, scale_desc, scale_a_ptr, scale_b_ptr, tiles_m, tiles_n, steps, M, N, STAGES: gl.constexpr,
    GROUP: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    c_smem = allocate_stages(c_desc, 2 * WGS)
    full, empty = allocate_barriers(STAGES, 1), allocate_barriers(STAGES, WGS)
    a_smem, scale_smem = allocate_stages(a_desc, STAGES * WGS), allocate_stages(scale_desc, STAGES * WGS)
    ring = a_smem, allocate_stages(b_desc, STAGES), scale_smem, full, empty
    sizes = (tiles_m, tiles_n, steps, M, N)
    if WGS == 2:
        gl.warp_specialize([
            (promote_partition, (c_desc, c_smem, ring, scale_b_ptr, sizes, 0, GROUP)),
            (promote_partition, (c_desc, c_smem, ring, scale_b_ptr, sizes, 1, GROUP)),
            (load_partition, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (promote_partition, (c_desc, c_smem, ring, scale_b_ptr, sizes, 0, GROUP)),
            (promote_partition, (c_desc, c_smem, ring, scale_b_ptr, sizes, 1, GROUP)),
            (promote_partition, (c_desc, c_smem, ring, scale_b_ptr, sizes, 2, GROUP)),
            (load_partition, ((a_desc, b_desc, scale_desc), ring, sizes, GROUP)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip


@needs(90, "TMA and wgmma", only=True)
def promoted(a, b, scale_a, scale_b):
    """a [M, K], b [K, N] (b.t() contiguous) in e4m3, fp32 scales [M, K/128] and [K/128, N/128] -> [M, N] in bf16.

    K/128 and N/128 are rounded up. TypeError, ValueError for what is not so; Unsupported for other scales, and where
    rows of a, b.t() or the result do not begin at multiples of 16 bytes.
    """
    return _promote(a, b, scale_a, scale_b, (128, 128))


# Rung 2. New: 128 x 256, whose bytes serve a third more products. 64 x 256 sums take 128 registers a thread, and
# as many again for their product would be more than there are: it comes in halves, 128 + 64 of 232. Predicted: rung 1
# asks for 32 KB in 512 cycles, and L2 takes 840 to bring them, 61% of the peak; now 48 KB in 1024, and L2 takes 1260.
@needs(90, "TMA and wgmma", only=True)
def wide(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, (128, 256))


# Rung 3. New: three warpgroups, 192 x 128. Of two both may promote at a time, and then the tensor cores stand still. Of
# three one promotes while one multiplies and one waits in line. 160 registers each are enough for 64 x 128 sums and a
# product. Predicted: no pause between products, for 40 KB in 768 cycles, a tenth more than rung 2's 48 in 1024. On an
# H200 6% faster at 8192, level with PyTorch's; at 4096 704 tiles are 5.3 rounds of 132, and rung 2's 512 are 3.9.
@needs(90, "TMA and wgmma", only=True)
def three_warpgroups(a, b, scale_a, scale_b):
    """As promoted."""
    return _promote(a, b, scale_a, scale_b, (192, 128))


# Rung 4. New: the tile follows the shape, and each scheme has its kernel. Tried and slower: turns, by which a
# warpgroup asks for a product only when the other has asked for its own, or when half of that is over: a product in
# two parts, so that its half can be waited for, has a pause in it.
@needs(90, "TMA and wgmma", only=True)
def matmul_fp8(a, b, scale_a, scale_b):
    """As promoted, and all that lesson 5's fp8_blocks takes: course_ops has the kernels of lessons 7d and 5."""
    try:
        return _promote(a, b, scale_a, scale_b, (128, 256), (192, 128), (128, 128))
    except Unsupported:
        scheme = scheme_of(a, b, scale_a, scale_b)
        return kernel_for(a, b, scheme).launch(a, b, scale_a, scale_b, scheme)


def _promote(a, b, scale_a, scale_b, *tiles):
    if (scheme := scheme_of(a, b, scale_a, scale_b)) != "blocks":
        raise Unsupported(f"what has the scales of {scheme} need not be promoted: lesson 7d is faster")

    def sums_of_an_sm(tile):
        count = triton.cdiv(a.shape[0], tile[0]) * triton.cdiv(b.shape[1], tile[1])
        return triton.cdiv(count, num_sms()) * tile[0] * tile[1]

    tile = min(tiles, key=sums_of_an_sm)
    return _launch(promote_kernel, a, b, scale_a, scale_b, tile, WGS=tile[0] // 64)


def _launch(kernel, a, b, scale_a, scale_b, tile, group=16, **options):
    """Describe operands that scheme_of takes and start a program an SM; Unsupported for what TMA cannot copy.

    tile: rows and columns of C, 64 rows for each warpgroup.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if not tma_takes(a, b.t(), c):
        raise Unsupported(f"strides {a.stride()}, {b.stride()}, {c.stride()}: TMA wants rows at multiples of 16 bytes")
    block_m, block_n = tile
    a_desc, b_desc = _describe(a, 64, BLOCK_K), _describe(b.t(), block_n, BLOCK_K)
    # As rows, [K/128, M] and [N/128, K/128]: how PyTorch wants scales to lie.
    scale_a, scale_b = _aligned_rows(scale_a.t()), scale_b.t().contiguous()
    c_desc, scale_desc = _describe(c, 64, 64), _describe(scale_a, 1, 64)
    tiles_m, tiles_n, steps = triton.cdiv(M, block_m), triton.cdiv(N, block_n), triton.cdiv(K, BLOCK_K)
    programs = triton.cdiv(tiles_m * tiles_n, triton.cdiv(tiles_m * tiles_n, num_sms()))
    kernel[(programs,)](
        a_desc, b_desc, c_desc, scale_desc, scale_a, scale_b, tiles_m, tiles_n, steps, M, N,
        5 if tile == (128, 128) else 4, group, num_warps=4, **options,
    )  # fmt: skip
    return c


def _describe(t, *block):
    """What TMA must know of a matrix to copy blocks of it; rows of 128 bytes are swizzled, scales are not."""
    dtype = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16}.get(t.dtype)
    if dtype:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), dtype)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(t, list(block), layout)


def _aligned_rows(scales):
    """fp32 scales [K/128, M] as they lie if TMA can copy them, else a copy whose rows begin at multiples of 16 bytes.

    TMA must also enter them there, so all of them as one row, entered at step * M, would not do.
    """
    if tma_takes(scales):
        return scales
    steps, M = scales.shape
    return scales.new_empty(steps, triton.cdiv(M, 4) * 4)[:, :M].copy_(scales)


LESSON = Lesson(
    about=About(
        teaches="promotion under other warpgroups' products, with two of them and with three",
        hours=0.75,
        operator="fp8 matmul",
        language="Gluon",
    ),
    problem=PROBLEM,
    rungs=(promoted, wide, three_warpgroups, matmul_fp8),
    checks=(
        *PROBLEM.checks,
        case("the ring goes round within a tile, and so does the grid", M=200, N=520, K=1040, scheme="blocks"),
        case("three rounds of the grid, the second half of the last tiles cut", gib=0.1, M=1544, N=6280, K=272,
             scheme="blocks"),
        case("four rounds of 6 steps; two groups of 16 rows of tiles", gib=1.5, M=4096, N=4096, K=656, scheme="blocks"),
    ),
    benches=tuple({"M": n, "N": n, "K": n, "scheme": s} for s in ("tensor", "rows", "blocks") for n in (4096, 8192)),
    wrong=(
        Mutant("the first scales of K for all", "promote_partition", "left_ptr + later)", "left_ptr)", "promoted"),
        Mutant("the left half's scales for both", "promote_partition", "scale_a, scale_right", "scale_a, scale_left",
               "wide"),
        Mutant("a scale on all sums before", "promote", "acc += p * scale[:, None]", "acc = (acc + p) * scale[:, None]",
               "wide"),
        Mutant("two have the same rows of A", "promote_partition", "a, b = a_smem.index(stage * WGS + WHICH)",
               "a, b = a_smem.index(stage * WGS + WHICH // 2)", "three_warpgroups"),
        Mutant("given back when one of all has read", "promote_kernel", "allocate_barriers(STAGES, WGS)",
               "allocate_barriers(STAGES, 1)", "three_warpgroups"),
    ),
    claims=dict.fromkeys((promoted, wide, three_warpgroups, matmul_fp8), ("wgmma", "tma", "no spills")),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
