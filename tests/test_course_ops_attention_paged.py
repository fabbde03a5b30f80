"""course_ops.attention_paged: values against PyTorch, refusals, what is not in use, the division of the work."""

import math
from contextlib import nullcontext

from lessonkit import device

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops import _common, testing
from course_ops.kernels import attention_decode as decode
from course_ops.kernels import attention_paged as kernels
from course_ops.kernels import attention_tiles as tiles
from problems import attention_paged as problem

pytestmark = pytest.mark.kept
OP = torch.ops.course_ops.attention_paged


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=["pytorch", "an owner a program", "divided work"])
def computed(request, monkeypatch):
    """Where: by PyTorch on the CPU, or by the kernels, for which most shapes here are short."""
    if request.param == "divided work":
        monkeypatch.setattr(kernels, "ALONE", 0)
    inside = nullcontext if request.param == "pytorch" else testing.kernels
    with inside():
        yield torch.device("cpu") if request.param == "pytorch" else device.DEVICE


def pages(at, *args, dtype=torch.float32, **more):
    tensors = problem.inputs(*args, dtype=dtype, **more)[:5]
    return tuple(t if t is None else t.to(at) for t in tensors)


def close(found, expected, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0},
        {"window": 30},
        {"window": 30, "softcap": 2.0},
        {"window": 2**31 - 1},
        {"causal": False, "scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [16, 256])  # a step's keys in several pages, and in one
def test_values(computed, dtype, options, block_size):
    given = pages(
        computed, 3, 4, 150, 16, H_kv=2, S=2, block_size=block_size, spread="even", window=options.get("window"),
        dtype=dtype,
    )  # fmt: skip
    o, lse = OP(*given, **options)
    expected, expected_lse = problem.reference(*(t.double() if t.is_floating_point() else t for t in given), **options)
    close(o, expected.to(dtype), dtype)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-3, atol=1e-3)
    assert torch.equal(course_ops.attention_paged(*given, **options), o)


def test_it_is_attention_of_the_gathered_keys(computed):
    """The same conventions as course_ops.attention, but for the layout."""
    q, k, v, lengths, table = pages(computed, 2, 4, 96, 16, H_kv=2, S=3)
    found = course_ops.attention_paged(q, k, v, lengths, table)
    k, v = (torch.stack(list(problem.gathered(t, lengths, table))) for t in (k, v))
    expected = course_ops.attention(q.transpose(1, 2), k, v, causal=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_any_strides(computed):
    """A cache with the heads before the tokens, every second entry of a table, queries out of a projection."""
    q, k, v, lengths, table = pages(computed, 3, 4, 70, 16, H_kv=2, spread="even")
    expected = course_ops.attention_paged(q, k, v, lengths, table)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    table = torch.stack([table, -table], -1)[..., 0]
    lengths = torch.stack([lengths, lengths + 7], -1)[..., 0]
    q = torch.cat([q, q], 2)[:, :, :4]
    assert torch.equal(course_ops.attention_paged(q, k, v, lengths, table), expected)


def test_a_cache_in_one_piece_a_sequence(computed):
    given = pages(computed, 3, 4, 90, 16, H_kv=2, spread="even", paged=False)
    torch.testing.assert_close(OP(*given), problem.reference(*given), rtol=1e-5, atol=1e-5)


def test_other_sequences_do_not_matter_at_any_number_of_them(computed):
    """Past 128, lengths take more than an element a thread."""
    q, k, v, lengths, table = pages(computed, 130, 1, 20, 16, spread="even", block_size=8)
    found = course_ops.attention_paged(q, k, v, lengths, table)
    last = course_ops.attention_paged(q[-1:], k, v, lengths[-1:], table[-1:])
    torch.testing.assert_close(found[-1:], last, rtol=1e-5, atol=1e-5)
    assert not found[0].any()


# ---- Wrong entries --------------------------------------------------------------------------------------------------


def wrong(which, at, D=16):
    q, k, v, lengths, table = pages(at, 3, 4, 90, D, H_kv=2, block_size=32)
    if which == "block":
        table[1, 2] = len(k)
    elif which == "negative block":
        table[1, 0] = -1
    else:
        lengths[1] = {"negative": -1, "long": table.shape[1] * 32 + 1}[which]
    return q, k, v, lengths, table


WRONG = {
    "block": r"block_table\[1, 2\] is 11, expected 0 to 10",
    "negative block": r"block_table\[1, 0\] is -1, expected 0 to 10",
    "negative": r"cache_seqlens\[1\] is -1, expected 0 to 128",
    "long": r"cache_seqlens\[1\] is 129, expected 0 to 128",
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_entry_is_an_error_on_the_cpu(which):
    with pytest.raises(ValueError, match=WRONG[which]):
        course_ops.attention_paged(*wrong(which, torch.device("cpu")))


@pytest.mark.parametrize("D", [16, 256])  # a step's keys in several pages, and in one
@pytest.mark.parametrize("which", WRONG)
def test_a_kernel_makes_it_nan_and_leaves_other_sequences_alone(which, D):
    with testing.kernels():
        out = course_ops.attention_paged(*wrong(which, device.DEVICE, D))
    assert [bool(t.isnan().all()) for t in out] == [False, True, False]
    assert out[::2].isfinite().all()


# ---- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", problem.REFUSES, ids=lambda bad: bad.why)
def test_refusals(bad):
    def call(q, k_cache, v_cache, lengths, table=None, causal=True, window=None, scale=None):
        given = (q, k_cache, v_cache, lengths, table)
        return course_ops.attention_paged(*given, causal=causal, window=window, scale=scale)

    with pytest.raises(bad.error, match=bad.says):
        bad.call(call)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": 0}, ValueError, "window = 0"),
        ({"window": 2.5}, TypeError, "window is 2.5"),
        ({"scale": -1.0}, ValueError, "pass -q"),
        ({"scale": "1"}, TypeError, "scale is '1'"),
        ({"softcap": 0.0}, ValueError, "softcap = 0.0"),
        ({"softcap": "50"}, TypeError, "softcap is '50'"),
    ],
)
def test_options_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        course_ops.attention_paged(*pages(torch.device("cpu"), 1, 2, 20, 16), **options)


def test_head_dims_that_no_kernel_keeps():
    with pytest.raises(course_ops.Unsupported, match="q has head_dim 257"):
        course_ops.attention_paged(*pages(torch.device("cpu"), 1, 1, 5, 257))
    with pytest.raises(course_ops.Unsupported, match="v_cache has head_dim 300"):
        course_ops.attention_paged(*pages(torch.device("cpu"), 1, 1, 5, 16, D_v=300))


def test_a_gradient_is_an_error_where_one_is_wanted():
    q, *others = pages(torch.device("cpu"), 1, 2, 20, 16)
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"q requires grad, but attention_paged has no gradient .*: pass q\.detach"):
        course_ops.attention_paged(q, *others)
    with torch.no_grad():
        course_ops.attention_paged(q, *others)


# ---- The operator ---------------------------------------------------------------------------------------------------


def test_the_operator_is_sound(computed):
    """opcheck: schema and fake agree with what it does, and no result shares memory."""
    for more in ({}, {"S": 3, "D_v": 24}, {"paged": False}):
        given = pages(computed, 2, 4, 40, 16, H_kv=2, poison=False, **more)
        torch.library.opcheck(OP, given, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
    q, *others = given
    torch.library.opcheck(OP, (q.transpose(1, 2).contiguous().transpose(1, 2), *others))


def test_flops_are_those_of_a_full_table():
    q, *others = pages(torch.device("cpu"), 2, 4, 40, 16, H_kv=2, spread="even")
    with FlopCounterMode(display=False) as counter:
        course_ops.attention_paged(q, *others)
    assert counter.get_total_flops() == 2 * 4 * (4 * 16) * others[-1].shape[1] * 16


# ---- The model ------------------------------------------------------------------------------------------------------


def test_shares_are_equal_or_end_where_owners_do():
    """An owner's start counts as two steps."""
    assert kernels.choose_share([10, 3, 7], 2, 8, 0) == 7  # 52 in all, 8 programs
    assert kernels.choose_share([64] * 64, 8, 264, 0) == 132  # 128 would be equal; 132 is two owners, and no part
    assert kernels.choose_share([63, 64], 8, 4, 0) == 262  # unlike each other: nothing ends together
    assert kernels.choose_share([1], 1, 264, 0) == 1


def test_large_parts_make_larger_shares():
    """64 rows of 128 in fp32 are as many bytes as a step of 64 keys; 4 rows are none to speak of."""
    heavy, light = (kernels.part_weight(rows * 128 * 4, 64 * 256 * 2, 132) for rows in (64, 4))
    assert kernels.choose_share([254], 1, 264, heavy) == math.ceil((256 * heavy) ** 0.5) == 3
    assert kernels.choose_share([254], 1, 264, light) == 1


@pytest.mark.skipif(device.HAS_GPU, reason="with a GPU nothing is interpreted")
@pytest.mark.parametrize("spread", ["one long", "even", ""])
def test_the_gpu_divides_the_work_as_the_model_says(monkeypatch, spread):
    """Where each owner begins and ends, in programs: spans, as paged_kernel has written them."""
    seen, empty = [], torch.empty

    def kept(*args, **kwargs):
        made = empty(*args, **kwargs)
        if kwargs.get("dtype") == torch.int32 and made.ndim == 2:
            seen.append(made)
        return made

    q, k, v, lengths, table = pages(torch.device("cpu"), 4, 2, 700, 128, H_kv=1, spread=spread)
    monkeypatch.setattr(torch, "empty", kept)
    with testing.interpreted():
        course_ops.attention_paged(q, k, v, lengths, table)
    monkeypatch.undo()
    (spans,) = seen
    start, steps = kernels.START.value, [max(1, -(-n // 32)) for n in lengths.tolist()]  # of 16 KB
    programs = 4 * kernels.PROGRAMS_PER_SM
    share = kernels.choose_share(steps, 1, programs, kernels.part_weight(2 * 128 * 4, 32 * 256 * 4, 4))
    expected, begin = [], 0
    for n in steps:
        expected.append([(begin + start) // share, (begin + start + n - 1) // share])
        begin += start + n
    assert spans.tolist() == expected


@pytest.mark.parametrize("memory", [64 * 1024, 99 * 1024, 163 * 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_steps_fit_the_shared_memory_of_every_chip(monkeypatch, memory, dtype, D):
    """A tile of queries, the steps on the way, and a step's probabilities: of AMD, of GeForce, of an A100."""
    monkeypatch.setattr(_common, "shared_memory", lambda at: memory)
    q, size = torch.empty(1, 64, 16, D, dtype=dtype, device="meta"), dtype.itemsize
    rows, block_n = decode.most_rows(q), min(128, decode.TILE_BYTES // (D * size))
    ahead = decode.steps_ahead(q, rows, block_n, D, D)
    assert 16 <= rows <= decode.MAX_ROWS
    assert 1 <= ahead <= decode.AHEAD
    of_q = 0 if memory == 64 * 1024 else rows * D * size  # AMD's compiler keeps it in registers
    assert of_q + (2 * ahead * block_n * D + rows * block_n) * size <= memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_values_beside_wide_keys_get_wide_tiles(dtype):
    """In 16 bits both tiles of a step lie in one layout, whatever the widths: see tile_widths."""
    k, narrow, wide = (torch.empty(1, 1, 8, D, dtype=dtype, device="meta") for D in (40, 17, 200))
    assert tiles.tile_widths(k, k) == (64, 64)
    assert tiles.tile_widths(narrow, narrow) == (32, 32)
    assert tiles.tile_widths(k, narrow) == ((64, 64) if dtype == torch.bfloat16 else (64, 32))
    assert tiles.tile_widths(narrow, wide) == ((64, 256) if dtype == torch.bfloat16 else (32, 256))
