"""The checker itself: known-wrong kernels are refused, and by the right property."""

import dataclasses

from lessonkit import DEVICE, Lesson, Work, case
from lessonkit.base.errors import Misdeclared, Unsupported
from lessonkit.judge import check, verify
from lessonkit.lesson import Grad

import pytest
import torch


def inputs(n, dtype=torch.float32):
    return (torch.randn(3, n, device=DEVICE).to(dtype),)


def reference(x):
    return x.exp()


LESSON = Lesson(
    reference=reference, inputs=inputs, checks=(case("odd", n=37),), benches=(), rungs=(), wrong=(),
    work=lambda n, dtype: Work(6 * n * dtype.itemsize),
)  # fmt: skip


def right(x):
    return x.float().exp().to(x.dtype)


def unwritten_tail(x):
    y = torch.empty_like(x)
    y[:, :-1] = right(x)[:, :-1]
    return y


def unwritten(x):
    return torch.empty_like(x)


def is_nan(x):
    return right(x) * torch.nan


def coarse(x):
    return right(x).to(torch.float8_e5m2).to(x.dtype)


def other_dtype(x):
    return right(x).double()


def other_shape(x):
    return right(x)[:, :-1]


def in_place(x):
    return x.exp_()


def off_by_one(x):
    y = right(x)
    y[:, -1] = 0
    return y


def two_results(x):
    return right(x), right(x)


def zeros(x):
    return torch.zeros_like(x)


WRONG = [
    (unwritten_tail, "nan"),
    (unwritten, "nan"),
    (is_nan, "nan"),
    (coarse, "value"),
    (other_dtype, "dtype"),
    (other_shape, "shape"),
    (in_place, "changed input"),
    (off_by_one, "value"),
    (two_results, "shape"),
    (zeros, "value"),
]


def test_a_case_that_the_inputs_do_not_take_is_named():
    lesson = dataclasses.replace(LESSON, rungs=(right,), grad=Grad(right))
    says = f"{__name__}: the case 'm=37': .*; the lesson's inputs take n$"
    for ask in (check.truth, check.check_grad):
        with pytest.raises(Misdeclared, match=says):
            ask(lesson, {"m": 37}, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_right_passes(dtype):
    check.check(LESSON, right, {"n": 37}, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("wrong", "caught_by"), WRONG)
def test_wrong_is_rejected(wrong, caught_by, dtype):
    with pytest.raises(check.Rejected) as rejected:
        check.check(LESSON, wrong, {"n": 37}, dtype)
    assert rejected.value.caught_by == caught_by


def test_low_precision_accumulator_is_rejected():
    lesson = Lesson(
        reference=lambda x: x.sum(1), inputs=lambda n, dtype: (torch.rand(4, n, device=DEVICE).to(dtype),),
        checks=(), benches=(), rungs=(), wrong=(), work=lambda n, dtype: Work(n),
    )  # fmt: skip

    def sequential(x):
        total = x.new_zeros(x.shape[0])
        for column in x.unbind(1):
            total = total + column
        return total

    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(check.Rejected):
            check.check(lesson, sequential, {"n": 1000}, dtype)


def test_nan_and_infinity_must_be_where_torch_has_them():
    x = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan]], device=DEVICE)
    question = check.judge(LESSON, (x,))
    check.compare(question, right(x))
    for i in range(1, 4):
        y = right(x)
        y[0, i] = 1.0
        with pytest.raises(check.Rejected):
            check.compare(question, y)


STRIDES = {
    "a column": lambda t: t[:3].view(3, 1),
    "one": lambda t: t[:1].view(1, 1),
    "a scalar": lambda t: t[0],
    "a row, transposed": lambda t: t[:3].view(1, 3).t(),
    "transposed": lambda t: t[:12].view(4, 3).t(),
    "expanded": lambda t: t[:3].view(3, 1).expand(3, 5),
    "every other": lambda t: t[:6:2].view(1, 3)[:, :1],
    "a stride that does not matter": lambda t: t.as_strided((3, 1), (1, 7)),
    "nothing": lambda t: t[:0].view(0, 1),
}


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.bool, torch.int64], ids=str
)
@pytest.mark.parametrize("lie", STRIDES.values(), ids=STRIDES)
def test_a_changed_input_is_seen_whatever_its_strides(dtype, lie):
    def alone(x):
        return x.float()

    def changes(x):
        x.as_strided((1,), (1,)).copy_(torch.zeros(1))
        return x.float()

    x = lie(torch.ones(20).to(dtype))
    check.answer(alone, (x,))
    if x.numel():
        with pytest.raises(check.Rejected, match="argument 0 is not what it was"):
            check.answer(changes, (x,))


def one_column(x):
    raise Unsupported("rows of more than one column")


def one_column_and_where_to_go(x):
    raise Unsupported("rows of more than one column: course_ops.softmax takes every length")


def test_the_last_rung_says_which_operator_takes_what_it_refuses():
    asked = dataclasses.replace(LESSON, rungs=(one_column, right))
    with pytest.raises(verify.LeftOut, match="more than one column"):  # it is not the last rung
        verify.right("", asked, one_column)
    with pytest.raises(AssertionError, match="the last rung refuses, and names no operator: rows of more"):
        verify.right("", dataclasses.replace(LESSON, rungs=(one_column,)), one_column)
    with pytest.raises(verify.LeftOut, match="softmax takes every length"):
        verify.right("", dataclasses.replace(LESSON, rungs=(one_column_and_where_to_go,)), one_column_and_where_to_go)
