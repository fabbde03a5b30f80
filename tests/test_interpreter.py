"""What lessonkit mends and watches in Triton's interpreter."""

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from lessonkit import DEVICE, device
from lessonkit.base.errors import BlockAsCondition, OutOfBounds
from lessonkit.judge.sentences import told
from lessonkit.modes.interpreter import watched

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = [
    pytest.mark.skipif(not device.INTERPRETED, reason="this machine has a GPU: nothing is interpreted"),
    pytest.mark.kept,
]


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):  # [N, N] each
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, N: tl.constexpr):  # [N] each
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(y_ptr + tl.arange(0, N), tl.where(x > 0, x * 3 + x, -x))


@triton.jit
def sum_kernel(x_ptr, columns_ptr, every_ptr, M: tl.constexpr, N: tl.constexpr):  # [M, N], [N], [1]
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(columns_ptr + tl.arange(0, N), tl.sum(x, 0))
    tl.store(every_ptr, tl.sum(x))


@triton.jit
def narrow_kernel(x_ptr, y_ptr, N: tl.constexpr):  # [N] float32 -> bfloat16
    tl.store(y_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)).to(tl.bfloat16))


@triton.jit
def shifted_kernel(x_ptr, y_ptr, SHIFT: tl.constexpr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N) + SHIFT))


def test_bf16_dot_is_right():
    a, b = (torch.randn(32, 32, device=DEVICE).bfloat16() for _ in range(2))
    c = torch.empty(32, 32, device=DEVICE)
    dot_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float())


def test_bf16_arithmetic_is_right():
    x = torch.randn(64, device=DEVICE).bfloat16()
    y = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, N=64)
    torch.testing.assert_close(y, torch.where(x > 0, x * 3 + x, -x), rtol=2**-8, atol=0)


def test_a_bf16_sum_is_right():
    x = torch.randint(-4, 5, (32, 8), device=DEVICE).bfloat16()
    columns, every = torch.empty(8, device=DEVICE).bfloat16(), torch.empty(1, device=DEVICE).bfloat16()
    sum_kernel[(1,)](x, columns, every, M=32, N=8)
    torch.testing.assert_close(columns, x.sum(0), rtol=0, atol=0)  # exact: whole numbers up to 256
    torch.testing.assert_close(every[0], x.sum(), rtol=2**-6, atol=2)


def test_bf16_rounds_to_nearest_even():
    bits = torch.randint(0, 2**31 - 1, (1024,), dtype=torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, 0.0, -0.0, 1.00390625])
    x = torch.cat([bits.view(torch.float32)[: 1024 - len(special)], special]).to(DEVICE)
    y = torch.empty(1024, dtype=torch.bfloat16, device=DEVICE)
    narrow_kernel[(1,)](x, y, N=1024)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shift", [1, -1, 1000])
def test_reading_outside_is_named(shift):
    x = torch.randn(3, 64, device=DEVICE)[1]  # a view: the memory around it exists, but is not the kernel's
    y = torch.empty(64, device=DEVICE)
    with watched(), pytest.raises(OutOfBounds, match="load outside every tensor"):
        shifted_kernel[(1,)](x, y, SHIFT=shift, N=64)


def test_bytes_are_counted():
    x, y = torch.randn(64, device=DEVICE), torch.empty(64, device=DEVICE)
    with watched() as traffic:
        shifted_kernel[(1,)](x, y, SHIFT=0, N=64)
    assert (traffic.read, traffic.written, traffic.launches) == (256, 256, ["shifted_kernel"])


@triton.jit
def swap_kernel(x_ptr, AT: tl.constexpr):  # [1] int32
    tl.atomic_cas(x_ptr + AT, 0, 7)


def test_swaps_are_watched():
    x = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with watched() as traffic:
        swap_kernel[(2,)](x[1:2], AT=0)
    assert x.tolist() == [0, 7, 0]
    assert traffic.written == 8
    with watched(), pytest.raises(OutOfBounds, match="update outside every tensor"):
        swap_kernel[(1,)](x[1:2], AT=1)
    assert x.tolist() == [0, 7, 0]


@triton.jit
def fp8_kernel(x_ptr, q_ptr, y_ptr, N: tl.constexpr):  # [N] float32 -> float8 -> float32
    q = tl.load(x_ptr + tl.arange(0, N)).to(tl.float8e4nv)
    tl.store(q_ptr + tl.arange(0, N), q)
    tl.store(y_ptr + tl.arange(0, N), q.to(tl.float32))


def test_fp8_rounds_as_torch_does():
    x = torch.randn(1024, device=DEVICE) * torch.exp2(torch.randint(-12, 9, (1024,)).float())
    x[:4] = torch.tensor([448.0, -448.0, torch.nan, 0.0])
    x = x.clamp(-448, 448)
    q, y = torch.empty(1024, dtype=torch.float8_e4m3fn, device=DEVICE), torch.empty(1024, device=DEVICE)
    fp8_kernel[(1,)](x, q, y, N=1024)
    torch.testing.assert_close(q.float(), x.to(q.dtype).float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(y, q.float(), rtol=0, atol=0, equal_nan=True)


def test_types_of_blocks_are_made_once():
    """Shape and element type decide them; a mistake is still Triton's to name."""
    one, same, other = (tl.core.block_type(tl.float32, shape) for shape in ([4, 8], (tl.constexpr(4), 8), [8, 4]))
    assert one is same
    assert one is not other
    assert (one.shape, one.numel, one.scalar) == ((4, 8), 32, tl.float32)
    assert tl.core.block_type(tl.int32, [4, 8]).scalar == tl.int32
    with pytest.raises(TypeError, match="0d block_type"):
        tl.core.block_type(tl.float32, [])
    x, y = tl.core.tensor(1, one), tl.core.tensor(2, one)
    assert (x.handle, y.handle) == (1, 2)
    assert list(x.shape) == list(y.shape) == [4, 8]


@triton.jit
def mixed_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):  # x [M], y [M, N]: rows broadcast along columns
    row, col = tl.arange(0, M), tl.arange(0, N)
    at = row[:, None] * N + col[None, :]
    x = tl.load(x_ptr + row)
    tl.store(y_ptr + at, (x[:, None] + x[:, None]) * col[None, :] + (at < N))


@triton.jit
def mismatch_kernel(y_ptr, M: tl.constexpr, N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, N), tl.arange(0, M) + tl.arange(0, N))


def same_as_torch(dtype):
    x = torch.arange(1, 5, device=DEVICE).to(dtype)
    y = torch.empty(4, 8, dtype=dtype, device=DEVICE)
    mixed_kernel[(1,)](x, y, M=4, N=8)
    expected = (x + x)[:, None].double() * torch.arange(8, device=DEVICE) + (torch.arange(4) == 0)[:, None].to(DEVICE)
    return torch.equal(y, expected.to(dtype))


def test_operators_promote_and_broadcast_as_before():
    assert all(same_as_torch(dtype) for dtype in (torch.int8, torch.int32, torch.float16, torch.float32))


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="incompatible dimensions at index 0: 4 and 8"):
        mismatch_kernel[(1,)](torch.empty(8, device=DEVICE), M=4, N=8)


@triton.jit
def ones_kernel(y_ptr, n, N: tl.constexpr):  # y [N]: only the program that `n` names writes
    tl.store(y_ptr + tl.arange(0, N), 1, mask=tl.program_id(0) == n)


def test_a_comparison_of_scalars_is_a_mask():
    """As integers Triton 3.9 refuses it."""
    kinds = []

    class Native:
        def store(self, ptrs, value, mask):
            kinds.append(mask.dtype)
            return native.store(ptrs, value, mask)

        def __getattr__(self, name):
            return getattr(native, name)

    native = interpreter._interpreter
    with mock.patch.object(interpreter, "_interpreter", Native()):
        y = torch.zeros(8, device=DEVICE)
        ones_kernel[(2,)](y, 1, N=8)
    assert y.sum() == 8
    assert kinds == [bool, bool]


@triton.jit
def far_kernel(x_ptr, y_ptr, FAR: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    for _ in range(2):
        y_ptr += FAR // 2
    tl.store(y_ptr + at, tl.load(x_ptr + at))


@pytest.mark.parametrize("order", [1, -1])
def test_a_fault_names_the_pointer_and_not_what_lies_nearest(order):
    """Wherever the heap puts tensors: the store begins at x, and is one of y."""
    memory = torch.zeros(64, device=DEVICE)
    x, y = (memory[:16], memory[48:])[::order]
    far = (x.data_ptr() - y.data_ptr()) // 4 - order * 14  # two elements of x, and fourteen of no tensor
    with watched(), pytest.raises(OutOfBounds, match=r"the first is element -?\d+ of y_ptr, whose shape is \(16,\)"):
        far_kernel[(1,)](x, y, FAR=far, N=16)


@triton.jit
def nan_kernel(x_ptr, y_ptr, KEEP: tl.constexpr, N: tl.constexpr):  # x [N] -> y [5, N]
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    keep: tl.constexpr = tl.PropagateNan.ALL if KEEP else tl.PropagateNan.NONE
    tl.store(y_ptr + i, tl.maximum(x, 0.0, propagate_nan=keep))
    tl.store(y_ptr + N + i, tl.minimum(x, 0.0, propagate_nan=keep))
    tl.store(y_ptr + 2 * N + i, tl.clamp(x, -1.0, 1.0, propagate_nan=keep))
    tl.store(y_ptr + 3 * N + i, tl.max(x, 0))
    tl.store(y_ptr + 4 * N + i, tl.min(x, 0))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_dropped_as_a_gpu_does(keep, dtype):
    """max.f32 and min.f32 give the other operand, max.NaN.f32 gives NaN; tl.max and tl.min are made of the first."""
    nan, inf = torch.nan, torch.inf
    x = torch.tensor([nan, -2.0, 2.0, inf], dtype=dtype, device=DEVICE)
    y = torch.empty(5, 4, dtype=dtype, device=DEVICE)
    nan_kernel[(1,)](x, y, KEEP=keep, N=4)
    kept = torch.tensor([[nan if keep else 0], [nan if keep else 0], [nan if keep else -1]], dtype=dtype)
    expected = torch.cat([kept, torch.tensor([[0, 2, inf], [-2, 0, 0], [-1, 1, 1]], dtype=dtype)], 1)
    torch.testing.assert_close(y[:3].cpu(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(y[3:, 0].cpu(), torch.tensor([inf, -2], dtype=dtype), rtol=0, atol=0)


@triton.jit
def undefined_kernel(x_ptr, y_ptr, n, OTHER: tl.constexpr, N: tl.constexpr):  # x [n] -> y [N]
    i = tl.arange(0, N)
    if OTHER:
        x = tl.load(x_ptr + i, mask=i < n, other=0)
        scalar = tl.load(x_ptr + n, mask=n < 0, other=0)
    else:
        x = tl.load(x_ptr + i, mask=i < n)
        scalar = tl.load(x_ptr + n, mask=n < 0)
    tl.store(y_ptr + i, x)
    tl.store(y_ptr + N, scalar)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_what_a_load_leaves_undefined_is_garbage(dtype):
    """NaN, or what tl.max and tl.min do not drop; with `other`, and of a scalar that is 0 too, it is `other`."""
    x, y = torch.ones(3, device=DEVICE).to(dtype), torch.zeros(9, device=DEVICE).to(dtype)
    largest = torch.finfo(dtype).max
    for poison, undefined in ((0, [torch.nan] * 6), (1, [-largest, *[largest, -largest] * 2, largest])):
        with watched(poison=poison):
            undefined_kernel[(1,)](x, y, 3, OTHER=False, N=8)
        got = y.double().tolist()
        assert got[:3] == [1, 1, 1]
        torch.testing.assert_close(got[3:], undefined, rtol=0, atol=0, equal_nan=True)
        if dtype.itemsize == 1:  # `other=0` has no such type in the interpreter
            continue
        with watched(poison=poison):
            undefined_kernel[(1,)](x, y, 3, OTHER=True, N=8)
        assert y.double().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_undefined_integers_are_large_and_odd(dtype):
    x, y = torch.ones(3, device=DEVICE, dtype=dtype), torch.zeros(9, device=DEVICE, dtype=dtype)
    with watched():
        undefined_kernel[(1,)](x, y, 3, OTHER=False, N=8)
    assert set(y[3:].tolist()) == {torch.iinfo(dtype).max}


@triton.jit
def truth_of(block):
    return 1 if block else 0


@triton.jit
def truth_kernel(y_ptr, n, KIND: tl.constexpr, N: tl.constexpr):  # y [1]
    i = tl.arange(0, N)
    found = n
    if KIND == "if":
        if i < n:
            found += 1
    elif KIND == "while":
        while i < n:
            i += 1
    elif KIND == "and":
        found = tl.sum(((i > 0) and (i < n)).to(tl.int32))
    elif KIND == "not":
        found = tl.sum((not (i < n)) + i)
    elif KIND == "min":
        found = tl.sum(min(i, n))
    elif KIND == "called":
        found = truth_of(i < n)
    tl.store(y_ptr, found)


@pytest.mark.parametrize("inside", [watched, nullcontext])
@pytest.mark.parametrize("kind", ["if", "while", "and", "not", "min", "called"])
def test_a_block_is_no_truth_value(kind, inside, monkeypatch):
    """To Triton's interpreter it is true. What is said names the line, in the reader's language."""
    marks = {"if": "if i < n:", "while": "while i < n:", "called": "return 1 if block"}
    code = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(code, 1) if text.strip().startswith(marks.get(kind, "found = tl.sum(")))
    line += {"not": 2, "min": 4}.get(kind, 0)
    with inside(), pytest.raises(BlockAsCondition) as raised:
        truth_kernel[(1,)](torch.zeros(1, device=DEVICE), 4, KIND=kind, N=8)
    says = str(raised.value)
    assert says.startswith(f"tests/test_interpreter.py:{line}: a block of shape (8,) is no single truth value")
    assert "tl.where" in says
    assert "tl.max" in says
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert told(says).startswith(f"tests/test_interpreter.py:{line}: 形状为 (8,) 的块")


def test_a_block_of_one_element_is_a_truth_value():
    y = torch.zeros(1, device=DEVICE)
    truth_kernel[(1,)](y, 4, KIND="if", N=1)
    assert y.item() == 5


@triton.jit
def scalars_kernel(y_ptr, n, CHOSEN: tl.constexpr):  # y [1]
    found = 0
    if n > 3 and not (n == 5 or n == 6):
        found += 1
    if n < 0 or CHOSEN:
        found += 10
    while found < 100 and n > 0:
        found += 20
        n -= 1
    tl.store(y_ptr, found + 1000 * min(n, 3) + (1 if CHOSEN else 0))


@pytest.mark.parametrize("chosen", [True, 1, np.bool_(True), np.int64(3), tl.constexpr(1)])
def test_scalars_are_truth_values(chosen):
    y = torch.zeros(1, device=DEVICE)
    scalars_kernel[(1,)](y, 7, CHOSEN=chosen)
    assert y.item() == 11 + 5 * 20 + 1000 * 2 + 1
    scalars_kernel[(1,)](y, 5, CHOSEN=False)
    assert y.item() == 5 * 20
