"""The plan of a Hopper matmul: what each CTA multiplies, checked in Python at any shape, and what ptxas makes of it."""

import math
from itertools import pairwise

from lessonkit import Mutant, device
from lessonkit.base.errors import Fault
from lessonkit.cuda import sass
from lessonkit.judge import mutants
from lessonkit.modes import compiled
from lessonkit.modes import gluon as emulated
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_ops import testing, versions
from course_ops.kernels import (
    _matmul_hopper,
    _matmul_plan,
    matmul_aligned,
    matmul_stream_k_hopper,
    matmul_tiles_hopper,
)

SIZES = st.integers(1, 40_000)
SHAPES = {"M": SIZES, "N": SIZES, "K": SIZES, "a_aligned": st.booleans(), "b_aligned": st.booleans()}
SMS = st.sampled_from((4, 78, 114, 132, 144))  # of the H200 132


def work_of(plan, M, N, K, sms):
    """{tile: [(first step, step after the last, CTA)]}, by the functions that the kernel runs; CTA: or pair."""
    tiles = math.ceil(M / (plan.ctas * plan.block_m)) * math.ceil(N / plan.block_n)
    most = sms // plan.ctas
    steps, ctas = math.ceil(K / _matmul_plan.STEP), most if plan.shared_tiles else min(most, tiles)
    found = {}
    for cta in range(ctas):
        begin, end = (
            matmul_stream_k_hopper.share_begin.fn(which, plan.shared_tiles * steps, ctas) for which in (cta, cta + 1)
        )
        share = ctas, begin, end, steps, plan.shared_tiles
        for index in range(matmul_stream_k_hopper.units_of.fn(cta, *share, tiles)):
            tile, first, last = matmul_stream_k_hopper.unit_of.fn(index, cta, *share)
            found.setdefault(tile, []).append((first, last, cta))
    return found, tiles, steps


@settings(max_examples=60, deadline=None)
@given(**SHAPES, sms=SMS)
@example(M=5000, N=5000, K=5000, a_aligned=False, b_aligned=False, sms=132)
@example(M=1, N=1, K=1, a_aligned=True, b_aligned=True, sms=132)
def test_every_step_of_every_tile_is_multiplied_once(M, N, K, a_aligned, b_aligned, sms):
    M, N = min(M, 9000), min(N, 9000)
    for plan in _matmul_plan.plans(M, N, K, a_aligned, b_aligned, sms, pairs=True):
        if plan.other:  # by matmul_tiles_hopper
            continue
        found, tiles, steps = work_of(plan, M, N, K, sms)
        assert sorted(found) == list(range(tiles))
        for parts in found.values():
            parts.sort()
            assert (parts[0][0], parts[-1][1]) == (0, steps)
            assert all(first < last for first, last, _ in parts)
            assert all((b[0], b[2]) == (a[1], a[2] + 1) for a, b in pairwise(parts)), "the helpers are the next CTAs"


@settings(max_examples=60, deadline=None)
@given(**SHAPES, sms=SMS)
def test_a_cta_leaves_sums_of_one_tile_at_most_and_before_it_waits(M, N, K, a_aligned, b_aligned, sms):
    """So sums and flags have a place for each CTA, and no CTA waits for one that waits."""
    M, N = min(M, 9000), min(N, 9000)
    for plan in _matmul_plan.plans(M, N, K, a_aligned, b_aligned, sms, pairs=True):
        if plan.other:
            continue
        programs = sms // plan.ctas
        found, _, _ = work_of(plan, M, N, K, sms)
        left = [cta for parts in found.values() for first, _, cta in parts if first]
        assert len(left) == len(set(left))
        if not plan.shared_tiles:
            assert not left
            continue
        ctas = {cta for parts in found.values() for _, _, cta in parts}
        assert ctas == set(range(programs)), "there is work for every SM"
        for cta in left:
            begin = matmul_stream_k_hopper.share_begin.fn(
                cta, plan.shared_tiles * math.ceil(K / _matmul_plan.STEP), programs
            )
            tile, first, _ = matmul_stream_k_hopper.unit_of.fn(
                0, cta, programs, begin, begin + 1, math.ceil(K / _matmul_plan.STEP), plan.shared_tiles
            )
            assert first > 0, f"CTA {cta} leaves the sums of tile {tile} first"


@settings(max_examples=100, deadline=None)
@given(**SHAPES, sms=SMS, pairs=st.booleans())
def test_the_best_plan_is_one_of_the_plans_and_aligned_rows_cost_no_more(M, N, K, a_aligned, b_aligned, sms, pairs):
    plans = list(_matmul_plan.plans(M, N, K, a_aligned, b_aligned, sms, pairs))
    best = _matmul_plan.best_plan(M, N, K, a_aligned, b_aligned, sms, pairs=pairs)
    assert best in plans
    assert _matmul_plan.LEAD * best.cycles <= min(plan.cycles for plan in plans)
    assert best.other or best.cycles == min(plan.cycles for plan in plans if not plan.other)
    assert _matmul_plan.LEAD * _matmul_plan.best_plan(M, N, K, True, True, sms, pairs=pairs).cycles <= best.cycles
    whole = _matmul_plan.best_plan(M, N, K, a_aligned, b_aligned, sms, whole_tiles_of=128, pairs=pairs)
    assert (whole.block_m, whole.shared_tiles, whole.ctas) == (128, 0, 1)
    # No plan multiplies faster than all SMs do without a pause.
    assert best.cycles >= M * N * K / (sms * _matmul_plan.MMA)


@settings(max_examples=100, deadline=None)
@given(tiles_m=st.integers(1, 400), tiles_n=st.integers(1, 40), tile=st.sampled_from(_matmul_plan.TILES), sms=SMS)
def test_groups_hold_every_tile_once_and_are_about_equally_high(tiles_m, tiles_n, tile, sms):
    group = _matmul_plan.group_of(tiles_m, *tile, sms)
    assert 1 <= group <= tiles_m
    order = [_matmul_hopper.swizzled_tile.fn(i, tiles_m, tiles_n, group) for i in range(tiles_m * tiles_n)]
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    groups = math.ceil(tiles_m / group)
    assert groups * group - tiles_m < groups or groups * (group - 1) < tiles_m


@pytest.mark.parametrize(
    ("shape", "aligned", "expected"),
    [
        ((4992, 4992, 4992), True, "six full waves of 128 x 256: whole tiles"),
        ((8192, 14336, 4096), True, "a 28th wave with 20 tiles: steps dealt out"),
        ((4097, 3072, 24576), True, "a last row of tiles, where 22 rows of 192 fit: tiles of 192 rows"),
        ((1000, 4608, 3584), True, "144 tiles of 128 x 256, and 128 of another width"),
        ((768, 3072, 32768), True, "72 tiles of 128 x 256, and 120 of another width"),
    ],
)
def test_what_the_plan_is_for(shape, aligned, expected):
    plan = _matmul_plan.best_plan(*shape, aligned, aligned, 132)
    if "whole" in expected:
        assert (plan.block_m, plan.block_n, plan.shared_tiles) == (128, 256, 0)
    if "dealt" in expected:
        assert plan.shared_tiles > 132
    if "192" in expected:
        assert plan.block_m == 192
    if "another width" in expected:
        tiles = math.ceil(shape[0] / plan.block_m) * math.ceil(shape[1] / plan.block_n)
        assert plan.other
        assert str(tiles) in expected or tiles <= 132


@pytest.mark.parametrize(
    ("shape", "tile", "why"),
    [
        ((282, 9008, 1472), (128, 256), "one wave, where tiles of 128 x 128 take two"),
        ((512, 4096, 1024), (128, 128), "one wave of 128 tiles, where 128 x 256 makes 64"),
        ((1000, 10240, 2560), (128, 320), "two waves, where 128 x 256 makes three"),
    ],
)
def test_linears_plan_has_registers_for_an_epilogue(shape, tile, why):
    assert _matmul_plan.linear_plan(*shape, True, True, 132)[:2] == tile, why
    whole = _matmul_plan.best_epilogue_plan(*shape, True, True, 132)
    assert _matmul_plan.linear_plan(*shape, True, True, 132).cycles > whole.cycles


def test_every_tile_has_room_for_three_stages_on_hopper():
    """With two, a step's copies begin when the MMAs of the step before are over, and take longer than its own."""
    stages = {tile: matmul_tiles_hopper.stages_of(*tile, 232448) for tile in _matmul_plan.OTHER_TILES}
    assert min(stages.values()) >= 3, stages
    assert matmul_tiles_hopper.stages_of(256, 192, 232448) == 2


def test_copies_pay_for_large_matrices_whose_rows_begin_within_sectors():
    def copies(n, *aligned, pairs=False):
        return _matmul_plan.copies_that_pay(n, n, n, *aligned, 132, pairs)

    assert any(copies(5000, False, False))
    assert not any(copies(5000, False, False, pairs=True)), "a pair copies half of b's rows"
    assert copies(1000, False, False) == (False, False), "a launch takes longer than the copies save"
    assert copies(5120, True, True) == (False, False)
    assert not copies(5000, True, False)[0], "a's rows begin at sectors"


@settings(max_examples=100, deadline=None)
@given(**SHAPES, sms=SMS)
def test_after_the_copies_that_pay_no_copy_pays(M, N, K, a_aligned, b_aligned, sms):
    a, b = _matmul_plan.copies_that_pay(M, N, K, a_aligned, b_aligned, sms)
    assert not (a and a_aligned), "nothing to mend"
    assert not (b and b_aligned)
    assert _matmul_plan.copies_that_pay(M, N, K, a_aligned or a, b_aligned or b, sms) == (False, False)


def test_rows_that_begin_at_sectors_are_seen_whichever_way_a_matrix_lies():
    def columns(n):
        return torch.empty(64, 128 + n, dtype=torch.bfloat16, device="meta")[:, :128]

    for t, aligned in ((columns(0), True), (columns(16), True), (columns(8), False), (columns(24), False)):
        assert _matmul_plan.aligned_rows(t) == aligned
        assert _matmul_plan.aligned_rows(t.t()) == aligned


# ---- The kernel's own Python, in any order of its partitions --------------------------------------------------------

emulated_here = pytest.mark.skipif(not device.INTERPRETED, reason="with a GPU nothing is emulated")
# On 5 SMs. The last two: tiles that more than two CTAs share, and CTAs with less than a tile and more than two.
PRODUCTS = (
    ((200, 520, 328), "", (128, 256), 0),
    ((390, 520, 136), "b", (192, 256), 0),
    ((200, 1032, 328), "", (128, 256), 5),
    ((390, 1032, 520), "", (192, 256), 7),
    ((504, 520, 1000), "a", (128, 128), 5),
    ((704, 520, 1000), "ab", (192, 128), 5),
    ((104, 264, 5000), "a", (128, 128), 3),
    ((1544, 520, 328), "b", (192, 256), 7),
)


def operands(M, N, K, transposed):
    torch.manual_seed(0)
    a = torch.randn((K, M) if "a" in transposed else (M, K), device=device.DEVICE).bfloat16()
    b = torch.randn((N, K) if "b" in transposed else (K, N), device=device.DEVICE).bfloat16()
    return a.t() if "a" in transposed else a, b.t() if "b" in transposed else b


@emulated_here
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 6))])
@pytest.mark.parametrize(("shape", "transposed", "tile", "shared_tiles"), PRODUCTS)
def test_the_kernel_is_right_in_every_order(monkeypatch, shape, transposed, tile, shared_tiles, seed):
    monkeypatch.setattr(matmul_stream_k_hopper, "num_sms", lambda _: 5)
    monkeypatch.setattr(emulated, "SEED", seed)
    flags = torch.zeros(20, dtype=torch.int32)
    monkeypatch.setattr(matmul_stream_k_hopper, "stream_zeros", lambda x, count, kind: flags[:count])
    a, b = operands(*shape, transposed)
    c = matmul_stream_k_hopper.by_plan(a, b, _matmul_plan.Plan(*tile, shared_tiles, 0.0))
    exact = a.float() @ b.float()
    torch.testing.assert_close(c.float(), exact, rtol=2**-8, atol=2**-9)  # rounded once
    assert not flags.any(), "left for the next launch"


@emulated_here
@pytest.mark.parametrize("transposed", ["b", "a"])
@testing.kernels()
def test_rows_that_tma_cannot_read_are_multiplied_after_a_copy(monkeypatch, transposed):
    monkeypatch.setattr(matmul_stream_k_hopper, "num_sms", lambda _: 5)
    a, b = operands(201, 136, 131, transposed)
    copies = matmul_aligned.copier(a, b)(a, b)
    c = matmul_stream_k_hopper.by_plan(*copies, _matmul_plan.Plan(192, 128, 0, 0.0))
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2**-8, atol=2**-9)


WRONG_STREAM_K = (  # function, old, new, and what the emulator says
    ("load_next", "parity ^ 1", "parity", "wait for each other"),
    ("consumer", "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,", "this is over: a wgmma of"),
    ("store_sum", "fence_async_shared()", "pass", "no fence_async_shared after this"),
    ("leave_sums", "gl.full([args.CTAS], 1,", "gl.full([args.CTAS], 0,", "waits for a flag"),
)


@emulated_here
@pytest.mark.parametrize(("function", "old", "new", "says"), WRONG_STREAM_K)
def test_a_mistake_in_it_is_found(monkeypatch, function, old, new, says):
    wrong = mutants.build(matmul_stream_k_hopper.__name__, Mutant("wrong", function, old, new, "by_plan"))
    monkeypatch.setitem(wrong.__globals__, "num_sms", lambda _: 5)
    monkeypatch.setitem(wrong.__globals__, "stream_zeros", lambda *_: torch.zeros(20, dtype=torch.int32))
    with pytest.raises(Fault, match=says):
        wrong(*operands(390, 1032, 520, ""), _matmul_plan.Plan(192, 256, 7, 0.0))


# Of two parts, with one panel in the second or two; 128 rows for each consumer; fewer programs than tiles.
PARTS = (
    ((200, 520, 328), "", (128, 160)),
    ((200, 520, 136), "b", (128, 288)),
    ((392, 1032, 200), "a", (128, 320)),
    ((392, 520, 136), "ab", (256, 128)),
    ((520, 200, 72), "", (256, 160)),
    ((130, 264, 72), "b", (128, 64)),
)


def by_parts(of, shape, transposed, tile, epilogue=False):
    """(C, z) by a kernel of matmul_tiles_hopper, and in fp32; rows of C and z are longer than used."""
    a, b = operands(*shape, transposed)
    M, N, K = shape
    c, z = (torch.full((M, N + 8), math.nan).bfloat16()[:, :N] for _ in "cz")
    bias = torch.randn(N).bfloat16() if epilogue else None
    b = (b / math.sqrt(K)).bfloat16().t().contiguous().t() if "b" in transposed else (b / math.sqrt(K)).bfloat16()
    of(a, b, _matmul_plan.Plan(*tile, 0, 0.0), c, bias, epilogue, z if epilogue else None)
    exact = a.float() @ b.float() + (bias.float() if epilogue else 0)
    return c, z, exact


@emulated_here
@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 6))])
@pytest.mark.parametrize(("shape", "transposed", "tile"), PARTS)
def test_tiles_of_two_parts_are_right_in_every_order(monkeypatch, shape, transposed, tile, seed, epilogue):
    monkeypatch.setattr(matmul_tiles_hopper, "num_sms", lambda _: 3)
    monkeypatch.setattr(emulated, "SEED", seed)
    c, z, exact = by_parts(matmul_tiles_hopper.by_plan, shape, transposed, tile, epilogue)
    if epilogue:
        torch.testing.assert_close(z.float(), exact, rtol=2**-8, atol=2**-9)
        exact = torch.nn.functional.gelu(exact, approximate="tanh")
    torch.testing.assert_close(c.float(), exact, rtol=2**-8, atol=2**-9)


WRONG_TILES = (  # function, old, new, and what the emulator says
    ("producer", "parity ^ 1", "parity", "wait for each other"),
    ("consumer", "warpgroup_mma_wait(2,", "warpgroup_mma_wait(3,", "this is over: a wgmma of"),
    ("store_panel", "fence_async_shared()", "pass", "no fence_async_shared after this"),
    ("store_panel", "tma.store_wait(1)", "pass", "this is over: TMA reads"),
    ("consumer", "tma.store_wait(0)  # of", "tma.store_wait(1)  # of", "this is over: TMA reads"),
)


@emulated_here
@pytest.mark.parametrize(("function", "old", "new", "says"), WRONG_TILES)
def test_a_mistake_in_tiles_of_two_parts_is_found(monkeypatch, function, old, new, says):
    wrong = mutants.build(matmul_tiles_hopper.__name__, Mutant("wrong", function, old, new, "by_plan"))
    monkeypatch.setitem(wrong.__globals__, "num_sms", lambda _: 2)
    with pytest.raises(Fault, match=says):
        by_parts(wrong, (390, 800, 520), "", (128, 160))


# ---- Pairs of CTAs, emulated as Triton 3.8 compiles them -------------------------------------------------------------


@pytest.mark.parametrize(
    ("wave", "shape", "pays"),
    [
        ((64, 1), (1024, 1024, 1024, True, True), False),  # 9.1 us by split-K's kernel, 11.2 by pairs, on an H200
        ((128, 1), (953, 1880, 1304, False, False), True),  # 18.4 and 17.8 us
    ],
)
def test_pairs_start_later_than_the_kernel_of_one_wave(wave, shape, pays):
    assert _matmul_plan.plan_pays(*wave, *shape, 132, pairs=True) == pays
    assert not _matmul_plan.plan_pays(*wave, *shape, 132, pairs=False)


emulated_pairs = pytest.mark.skipif(
    not (device.INTERPRETED and versions.HAS_PAIRS), reason="pairs are emulated without a GPU, from Triton 3.7 on"
)
# On 5 SMs, of which a fifth is idle: whole tiles of one part and of two, shared tiles, fewer rows than a pair has.
PAIRS = (
    (matmul_tiles_hopper, (520, 520, 328), "", (128, 160), 0),
    (matmul_tiles_hopper, (392, 1032, 200), "a", (128, 320), 0),
    (matmul_tiles_hopper, (704, 520, 136), "ab", (256, 128), 0),
    (matmul_tiles_hopper, (130, 264, 72), "b", (128, 256), 0),
    (matmul_stream_k_hopper, (390, 520, 136), "b", (128, 256), 0),
    (matmul_stream_k_hopper, (200, 1032, 328), "", (128, 256), 5),
    (matmul_stream_k_hopper, (504, 520, 1000), "a", (128, 128), 10),
    (matmul_stream_k_hopper, (104, 264, 3000), "ab", (128, 128), 3),
)


def of_a_pair(monkeypatch, module, shape, transposed, tile, shared_tiles):
    """C by pairs, and in fp32."""
    monkeypatch.setattr(emulated, "_arrives_at_home", lambda: False)
    monkeypatch.setattr(module, "num_sms", lambda _: 5)
    a, b = operands(*shape, transposed)
    plan = _matmul_plan.Plan(*tile, shared_tiles, 0.0, ctas=2)
    if module is matmul_stream_k_hopper:
        flags = torch.zeros(20, dtype=torch.int32)
        monkeypatch.setattr(module, "stream_zeros", lambda x, count, kind: flags[:count])
        c = module.by_plan(a, b, plan)
        assert not flags.any(), "left for the next launch"
    else:
        c = module.by_plan(a, b, plan, torch.full((len(a), b.shape[1]), math.nan).bfloat16())
    return c, a.float() @ b.float()


@emulated_pairs
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(1, 6))])
@pytest.mark.parametrize(("module", "shape", "transposed", "tile", "shared_tiles"), PAIRS)
def test_pairs_are_right_in_every_order(monkeypatch, module, shape, transposed, tile, shared_tiles, seed):
    monkeypatch.setattr(emulated, "SEED", seed)
    c, exact = of_a_pair(monkeypatch, module, shape, transposed, tile, shared_tiles)
    torch.testing.assert_close(c.float(), exact, rtol=2**-8, atol=2**-8)


WRONG_PAIRS = (  # function, old, new, and what the emulator says
    ("wait_until_read", "mbarrier.wait(args.both_empty.index(stage), parity)", "pass", "consumer of CTA 1 reads"),
    ("wait_until_read", "mbarrier.wait(args.empty.index(stage), parity)", "pass", "more than its 1 arrivals"),
    ("release", "mbarrier.arrive(args.both_empty.index(stage), pred=pred)", "pass", "wait for each other"),
    ("load_for_both", ", multicast=True", "", "TMA writes|arrivals"),
    ("ring_barriers", "both_empty.index(i), count=CONSUMERS", "both_empty.index(i), count=1", "wait for each other"),
)


@emulated_pairs
@pytest.mark.parametrize("module", [matmul_tiles_hopper, matmul_stream_k_hopper])
@pytest.mark.parametrize(("function", "old", "new", "says"), WRONG_PAIRS)
def test_a_mistake_in_a_pair_is_found(monkeypatch, module, function, old, new, says):
    wrong = mutants.build(_matmul_hopper.__name__, Mutant("wrong", function, old, new, function))
    monkeypatch.setattr(module, function, wrong)
    emulated._plain.cache_clear()  # which has the kernel with the right function
    try:
        with pytest.raises(Fault, match=says):
            of_a_pair(monkeypatch, module, (504, 520, 1000), "a", (128, 128), 0)
    finally:
        emulated._plain.cache_clear()


# ---- What the compiler makes of it ---------------------------------------------------------------------------------


def compiled_plans(transposed):
    """[registers, shared memory, serialized?] of every tile. In a process that compiles."""
    a, b = (torch.empty(5000, 5000, dtype=torch.bfloat16, device="meta") for _ in "ab")
    a, b = a.t() if "a" in transposed else a, b.t() if "b" in transposed else b
    found = []
    with compiled.compiling(90) as made:
        for tile in _matmul_plan.TILES:
            made.clear()
            matmul_stream_k_hopper.by_plan(a, b, _matmul_plan.Plan(*tile, 140, 0.0))
            for each in made.values():
                kernel = compiled.inspect("", each, 90)
                found.append([kernel.registers * 32 * kernel.warps, kernel.shared, sass.serialized(kernel)])
    return found


def compiled_parts(transposed):
    """As compiled_plans, of every tile of matmul_tiles_hopper, with and without the epilogue, and spills."""
    a, b = (torch.empty(5000, 5000, dtype=torch.bfloat16, device="meta") for _ in "ab")
    a, b = a.t() if "a" in transposed else a, b.t() if "b" in transposed else b
    c, bias = a.new_empty(5000, 5000), a.new_empty(5000)
    found = []
    with compiled.compiling(90) as made:
        for tile in _matmul_plan.OTHER_TILES:
            for epilogue in ((None, False, None), (bias, True, torch.empty_like(c))):
                made.clear()
                matmul_tiles_hopper.by_plan(a, b, _matmul_plan.Plan(*tile, 0, 0.0), c, *epilogue)
                for each in made.values():
                    kernel = compiled.inspect("", each, 90)
                    found.append([kernel.spills, kernel.shared, sass.serialized(kernel)])
    return found


def compiled_pairs(transposed):
    """[spills, shared memory, serialized?] of every tile that a pair may have, by the kernel that has it."""
    a, b = (torch.empty(5000, 5000, dtype=torch.bfloat16, device="meta") for _ in "ab")
    a, b = a.t() if "a" in transposed else a, b.t() if "b" in transposed else b
    c, found = a.new_empty(5000, 5000), []
    with compiled.compiling(90) as made:
        for plan in _matmul_plan.plans(5000, 5000, 5000, True, True, 132, pairs=True):
            if plan.ctas == 1:
                continue
            made.clear()
            if plan.other:
                matmul_tiles_hopper.by_plan(a, b, plan, c)
            else:
                matmul_stream_k_hopper.by_plan(a, b, plan)
            (each,) = made.values()
            kernel = compiled.inspect("", each, 90)
            found.append([kernel.spills, kernel.shared, sass.serialized(kernel)])
    return found


@pytest.mark.skipif(not versions.HAS_REMOTE_ARRIVE, reason="Triton before 3.8 compiles no pairs")
@pytest.mark.parametrize("transposed", ["b", pytest.param("a", marks=pytest.mark.night)])
def test_every_tile_of_a_pair_fits_on_its_sms_and_its_mmas_overlap(transposed):
    found = call_in_compiler("tests.test_matmul_plan", "compiled_pairs", transposed)
    assert len(found) >= len(_matmul_plan.OTHER_TILES)
    for spills, shared, serialized in found:
        assert spills == 0
        assert shared <= 232448
        assert not serialized


@pytest.mark.parametrize("transposed", ["b", pytest.param("a", marks=pytest.mark.night)])
def test_every_tile_of_two_parts_fits_on_an_sm_and_its_mmas_overlap(transposed):
    found = call_in_compiler("tests.test_matmul_plan", "compiled_parts", transposed)
    assert len(found) == 2 * len(_matmul_plan.OTHER_TILES)
    for spills, shared, serialized in found:
        assert spills == 0
        assert shared <= 232448
        assert not serialized


@pytest.mark.parametrize("transposed", ["", pytest.param("ab", marks=pytest.mark.night)])
def test_every_tile_fits_on_an_sm_and_its_mmas_overlap(transposed):
    found = call_in_compiler("tests.test_matmul_plan", "compiled_plans", transposed)
    assert len(found) == len(_matmul_plan.TILES)
    for registers, shared, serialized in found:
        assert registers <= 65536
        assert shared <= 232448
        assert not serialized
