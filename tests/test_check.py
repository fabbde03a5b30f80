"""The checker itself: known-wrong kernels are refused, and by the right property."""

import dataclasses

from lessonkit import DEVICE, Lesson, Work, budget, case, stepwise
from lessonkit.base.errors import Misdeclared, Unsupported
from lessonkit.commands import show
from lessonkit.judge import check, products, rounding, verify
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


def test_changed_inputs_are_put_back():
    wide = torch.arange(12.0).view(3, 4)
    args = (wide[:, 1:3], torch.zeros(1).expand(5), 7)
    before = [a.clone() for a in args[:2]]

    def overwrite():
        args[0].zero_()
        args[1][0].fill_(1)

    with pytest.raises(check.Rejected, match="argument 0"), check.left_alone(args):
        overwrite()
    assert all(torch.equal(a, b) for a, b in zip(args[:2], before, strict=True))


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


def test_memory_between_the_rows_of_an_input_is_nan():
    def padded(n, dtype):
        x = torch.empty(3, n + 2, dtype=dtype, device=DEVICE)[:, :n]
        return (x.fill_(1),)

    def twice(x):
        return 2 * x

    def rows_taken_to_be_n_apart(x):
        return 2 * x.as_strided(x.shape, (x.shape[1], 1))

    lesson = Lesson(
        reference=twice, inputs=padded, checks=(), benches=(), rungs=(), wrong=(), work=lambda n, dtype: Work(n)
    )
    check.check(lesson, twice, {"n": 5}, torch.float32)
    with pytest.raises(check.Rejected) as rejected:
        check.check(lesson, rows_taken_to_be_n_apart, {"n": 5}, torch.float32)
    assert rejected.value.caught_by == "nan"


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


def test_the_last_rung_says_which_operator_takes_what_it_refuses(capsys):
    asked = dataclasses.replace(LESSON, rungs=(one_column, right))
    with pytest.raises(verify.LeftOut, match="more than one column"):  # it is not the last rung
        verify.right("", asked, one_column)
    with pytest.raises(AssertionError, match="the last rung refuses, and names no operator: rows of more"):
        verify.right("", dataclasses.replace(LESSON, rungs=(one_column,)), one_column)
    assert show.checks(dataclasses.replace(LESSON, rungs=(one_column,))) == 1, "the command says so too"
    assert "names no operator" in capsys.readouterr().out
    with pytest.raises(verify.LeftOut, match="softmax takes every length"):
        verify.right("", dataclasses.replace(LESSON, rungs=(one_column_and_where_to_go,)), one_column_and_where_to_go)


# ---- The budget -----------------------------------------------------------------------------------------------------


def asked(reference, *args, factor=1):
    """The question of a reference and inputs, without a lesson."""
    return check.judge(dataclasses.replace(LESSON, reference=reference, factor=factor), args)


def accepts(question, answer):
    try:
        check.compare(question, answer)
    except check.Rejected:
        return False
    return True


def row_scales(x):
    return x.var(-1, correction=0).rsqrt()


def test_a_result_of_one_dimension_is_judged_by_magnitude():
    """A few reciprocal deviations of 285 are no reason to accept 7% off in those of 0.02."""
    scales = torch.tensor([1.0, 1 / 300, 50.0], device=DEVICE)[torch.arange(96, device=DEVICE) % 3]
    question = asked(row_scales, torch.randn(96, 257, device=DEVICE) * scales[:, None] + scales[:, None] * 50)
    usual = question.usual[0]
    check.compare(question, usual)
    check.compare(question, (usual.double() * (1 + 2e-7)).float())
    for wrong in (1.07, 1.001):
        assert not accepts(question, torch.where(usual < 0.1, usual * wrong, usual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_negative_tail_of_gelu_counts(dtype):
    x = torch.linspace(-4, 30, 2000, device=DEVICE).to(dtype)
    question = asked(torch.nn.functional.gelu, x)
    y = question.usual[0]
    check.compare(question, (0.5 * x.float() * (1 + torch.erf(x.float() * 0.5**0.5))).to(dtype))
    assert not accepts(question, torch.where(x < -2, 0, y))
    assert not accepts(question, torch.where(x < -2, y * 1.1, y))


def sums(x):
    return x.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_cancels_may_be_off_as_its_terms_are(dtype):
    """Each row's sum is near 0 by chance or built to be; adding one after the other rounds otherwise than PyTorch."""
    x = torch.randn(64, 1000, device=DEVICE).to(dtype)
    x[:8, 500:] = -x[:8, :500]
    question = asked(sums, x)
    one_by_one = torch.zeros(64, device=DEVICE)
    for column in x.float().unbind(1):
        one_by_one += column
    check.compare(question, one_by_one.to(dtype))
    assert not accepts(question, (x[:, :-1].float().sum(-1)).to(dtype))


def test_equal_terms_of_a_product_may_round_alike():
    """The H200's dK of a key: 3 heads of 4096 queries, all of them 1, so that 12288 equal ds are added up in fp32."""
    ds = torch.tensor([[0.0140495477]], device=DEVICE).expand(12288, 1)
    q = torch.full((1, 12288), 0.25, device=DEVICE)
    total = torch.zeros(1, 1, device=DEVICE)
    for _ in range(12288):
        total += ds[0] * 0.25
    question = asked(torch.matmul, q, ds, factor=4)  # attention's
    question = dataclasses.replace(question, usual=(torch.tensor([[43.160168]], device=DEVICE),))
    assert 0.005 < (total - question.exact[0]).item() < 0.01
    check.compare(question, total)
    assert not accepts(question, question.exact[0].float() + 0.2)
    ds = ds + 1e-4 * torch.randn(12288, 1, device=DEVICE)  # terms that differ
    question = asked(torch.matmul, q, ds, factor=4)
    assert not accepts(question, question.exact[0].float() + 0.0073)


def test_small_terms_of_a_long_sum_may_be_lost():
    """Each term but the first is below half of the sum's last place: added one after the other they change nothing."""
    n = rounding.ONE_BY_ONE
    terms = torch.full((1, n), 1e-8, device=DEVICE)
    terms[0, 0] = 5.0
    question = asked(torch.matmul, terms, torch.ones(n, 1, device=DEVICE))
    question = dataclasses.replace(question, usual=(question.exact[0].float(),))
    check.compare(question, torch.full((1, 1), 5.0, device=DEVICE))
    assert not accepts(question, torch.full((1, 1), 5.001, device=DEVICE))


def softmax_gradient(x, dy):
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(leaf.softmax(-1), leaf, dy)[0]


@pytest.mark.parametrize("n", [1, 2])
def test_a_gradient_that_cancels_may_be_off_by_rounding(n):
    """The softmax of one element is 1 whatever it is: its gradient is dy - dy, of numbers that were rounded."""
    x, dy = torch.ones(5, n, device=DEVICE), torch.full((5, n), 3.0, device=DEVICE)
    question = asked(softmax_gradient, x, dy)
    assert (question.exact[0] == 0).all()
    check.compare(question, question.usual[0] + 2e-7)
    assert not accepts(question, question.usual[0] + 1e-4)
    assert not accepts(dataclasses.replace(question, asked=None), question.usual[0] + 2e-7)


def test_a_sample_that_moves_nothing_by_luck_refuses_nothing(monkeypatch):
    errors = rounding._Disturbed.errors
    monkeypatch.setattr(rounding._Disturbed, "errors", lambda self, t: errors(self, t) * (self.seed > 0))
    question = asked(softmax_gradient, torch.ones(1, 1, device=DEVICE), torch.full((1, 1), 3.0, device=DEVICE))
    check.compare(question, question.usual[0] + 2e-7)
    assert not accepts(question, question.usual[0] + 1e-4)


def layernorm_gradient(x, dy):
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(torch.nn.functional.layer_norm(leaf, x.shape[-1:]), leaf, dy)[0]


def test_the_gradient_of_a_row_of_one_is_zero_up_to_rounding():
    x, dy = torch.full((4, 1), 3.0, device=DEVICE), torch.randn(4, 1, device=DEVICE)
    question = asked(layernorm_gradient, x, dy)
    check.compare(question, question.usual[0] + 1e-6)
    assert not accepts(question, dy)


def falling(s, v):
    return s.softmax(-1) @ v


def test_what_fp32_flushes_to_zero_is_no_error():
    """exp(-87.5) is a denormal; a kernel that flushes it has 0 where PyTorch has 1e-38 times a value."""
    s = torch.tensor([[0.0, -87.5]], device=DEVICE)
    v = torch.tensor([[0.0], [1000.0]], device=DEVICE)
    question = asked(falling, s, v)
    assert 0 < question.exact[0].item() < 1e-34
    check.compare(question, torch.zeros(1, 1, device=DEVICE))
    assert not accepts(question, torch.full((1, 1), 1e-30, device=DEVICE))


def distance(x):
    return x.amax(-1) - x[:, 0]


def test_inputs_are_exact():
    """What an fp32 rounding of the inputs would do is no excuse: they are what they are."""
    x = torch.tensor([[1e4, 1e4 + 1]], device=DEVICE)
    assert not accepts(asked(distance, x), torch.tensor([1.0005], device=DEVICE))


def half_steps(x):
    return (x / 0.5).round() * 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 12, 64, 700])
def test_operands_in_16_bits_move_a_gradient_less_far_than_is_allowed(n, dtype):
    torch.manual_seed(n)
    up, b = torch.randn(3000, n, dtype=torch.float64), torch.randn(8, n, dtype=torch.float64).to(dtype).double()

    def gradients(dy):
        a, w = torch.zeros(3000, 8, dtype=torch.float64, requires_grad=True), b.clone().requires_grad_()
        return torch.autograd.grad(a @ w, (a, w), dy)

    with products.OperandsOff(dtype):
        allowed = gradients(up)
        none = gradients(up.to(dtype).double())
    for right, off, rounded in zip(gradients(up), allowed, gradients(up.to(dtype).double()), strict=True):
        assert ((rounded - right).abs() <= off - right).all()
    da = gradients(up)[0]
    info = torch.finfo(dtype)
    worst = info.eps / 2 * (up.abs().clamp(min=info.tiny) @ b.abs().T)
    assert (allowed[0] - da <= (1 + 1e-9) * worst).all()  # not all roundings are the largest, nor of one sign
    assert n < 700 or (allowed[0] - da < 0.25 * worst).all()
    for mine, theirs in zip(none, gradients(up.to(dtype).double()), strict=True):
        assert torch.equal(mine, theirs)  # exact operands


def test_a_step_of_the_reference_is_no_rounding_error():
    """Values halfway between two steps go either way when they are disturbed: that must not excuse a whole step."""
    x = torch.arange(40, device=DEVICE).float() / 4
    question = asked(half_steps, x)
    check.compare(question, question.usual[0])
    assert not accepts(question, question.usual[0] + 0.5)


def test_a_rounding_error_that_is_multiplied_by_a_million_is_none_the_less_one():
    """LayerNorm's dx of a row of one element is rstd (g - g): with eps = 1e-12 a GPU's fused product makes it 1e6 ulp.

    A dx of rstd g, with nothing subtracted, is wrong.
    """

    def dx(dy, x, w):
        leaf = x.requires_grad_()
        with torch.enable_grad():
            y = torch.nn.functional.layer_norm(leaf, w.shape, w, eps=1e-12)
        return torch.autograd.grad(y, leaf, dy)

    dy, x, w = (
        torch.tensor(v, device=DEVICE) for v in ([[-1.5494], [6.4899], [4.7]], [[-48.44], [-153.2], [-3.0]], [0.3923])
    )
    question = asked(dx, dy, x, w)
    rounded = dy * w
    missed = (dy.double() * w.double() - rounded.double()).float() * 1e6  # what a fused multiply-add leaves over
    assert 0.01 < missed.abs().max() < 2
    assert (question.moved()[0] > missed.abs() / 16).all()  # PyTorch's own error is 0 on some devices, so no help
    check.compare(question, missed)
    assert not accepts(question, missed + 1e6 * dy)


def layernorm_of_little(x):
    return 100 * torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-12)


def test_equal_values_may_differ_from_their_mean_by_its_rounding():
    """1 / sqrt(eps) makes it a million times as large. It is no step: an error of a 64th moves the answer by a 64th."""
    x = torch.full((2, 700), 3.1, device=DEVICE)
    question = asked(layernorm_of_little, x)
    off = 100 * (3.1 * 2**-24) / (1e-12) ** 0.5
    check.compare(question, question.usual[0] + off)
    spread = torch.randn(2, 700, device=DEVICE)
    question = asked(layernorm_of_little, spread)
    assert not accepts(question, question.usual[0] + 0.1)


def test_the_floor_leaves_infinities_and_the_random_state_alone():
    x = torch.tensor([[1.0, -torch.inf, 2.0]], device=DEVICE)
    question, before = asked(lambda x: x.exp().cumsum(-1), x), torch.get_rng_state()
    moved = question.moved()[0]
    assert moved.isfinite().all()
    assert (moved[:, [0, 2]] > 0).all()
    assert torch.equal(torch.get_rng_state(), before)


def gelu_in_steps(x):
    return 0.5 * (x * (1 + torch.erf(x * 0.5**0.5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rung_that_rounds_each_step_says_so(dtype):
    """1 + erf(x) is rounded where it is nearly 0: a chain of kernels loses digits that one kernel keeps."""
    lesson = dataclasses.replace(
        LESSON, reference=torch.nn.functional.gelu, inputs=lambda n, dtype: (torch.linspace(-4, 30, n).to(dtype),)
    )
    with pytest.raises(check.Rejected):
        check.check(lesson, lambda x: gelu_in_steps(x), {"n": 999}, dtype)
    check.check(lesson, stepwise(lambda x: gelu_in_steps(x)), {"n": 999}, dtype)
    with pytest.raises(check.Rejected):
        check.check(lesson, stepwise(lambda x: gelu_in_steps(x) * 1.1), {"n": 999}, dtype)


def test_a_rung_has_a_budget_of_its_own():
    lesson = dataclasses.replace(LESSON, reference=lambda x: x.exp().mean(-1))

    def off(x):
        return x.exp().mean(-1) * (1 + 2e-5)

    with pytest.raises(check.Rejected):
        check.check(lesson, off, {"n": 37}, torch.float32)
    check.check(lesson, budget(20, "it is off")(off), {"n": 37}, torch.float32)


def sum_of_rounded(x, w):
    return (x * w).sum(0)


def test_where_torch_rounds_each_step_its_sums_may_be_off_alike():
    """A column whose sum is nearly 0 is off by as much as the others, whose terms are rounded to 16 bits as its are."""
    x, w = (torch.randn(256, 64, device=DEVICE).bfloat16() for _ in range(2))
    x[128:, :4], w[128:, :4] = -x[:128, :4], w[:128, :4]
    question = asked(sum_of_rounded, x, w)
    columns = torch.arange(64, device=DEVICE)
    check.compare(question, (question.exact[0] + 0.005 * (columns < 4)).bfloat16())
    assert not accepts(question, question.usual[0] + 0.5 * (columns < 4))


class Doubled(torch.autograd.Function):
    """2x, whose backward does what it should not."""

    fault = ""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        if Doubled.fault == "input":
            x.data.add_(1)
        if Doubled.fault == "upstream":
            dy.add_(1)
            return 2 * (dy - 1)
        if Doubled.fault == "address":
            raise check.OutOfBounds("1 of 4 lanes load outside every tensor")
        return 2 * dy


@pytest.mark.parametrize(
    ("fault", "caught_by"), [("input", "changed input"), ("upstream", "changed input"), ("address", "out of bounds")]
)
def test_gradients_are_watched_as_results_are(monkeypatch, fault, caught_by):
    lesson = dataclasses.replace(LESSON, reference=lambda x: 2 * x, rungs=(right,), grad=Grad(Doubled.apply))
    check.check_grad(lesson, {"n": 37}, torch.float32)
    monkeypatch.setattr(Doubled, "fault", fault)
    with pytest.raises(check.Rejected) as rejected:
        check.check_grad(lesson, {"n": 37}, torch.float32)
    assert rejected.value.caught_by == caught_by


# ---- Results for which a GPU's memory has no room besides -----------------------------------------------------------


def rounded_at_each_step(x):
    """GELU as eager PyTorch computes it in 16 bits."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.fixture
def little_memory(monkeypatch):
    """Parts of 1,000 elements, and no memory for how far more than that move."""
    moved = rounding.moved

    def of_a_part(answer, args, exact, *more):
        if any(e.numel() > 1000 for e in exact):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return moved(answer, args, exact, *more)

    monkeypatch.setattr(check, "PART", 1000)
    monkeypatch.setattr(rounding, "moved", of_a_part)


def test_of_a_result_too_large_parts_tell_how_far_they_move(little_memory):
    """The answer needs it: it lies outside of the budget that PyTorch's own errors give."""
    torch.manual_seed(0)
    question = asked(gelu, (3 * torch.randn(5000, device=DEVICE)).bfloat16())
    y = rounded_at_each_step(question.args[0])
    check.compare(question, y, stepwise=True)
    y[4321] *= 1.1
    with pytest.raises(check.Rejected, match="from 4000 on: 1 of 1000 wrong"):
        check.compare(question, y, stepwise=True)
    with pytest.raises(check.Rejected):  # and without it is refused
        check.compare(dataclasses.replace(question, asked=None), rounded_at_each_step(question.args[0]), stepwise=True)


def test_rows_that_follow_from_others_too_do_not_say_how_far_they_move():
    question = asked(lambda x: x.cumsum(0), torch.randn(64, 3, device=DEVICE))
    assert question.moved_rows(0, slice(0, 8), 2) is not None, "the first rows follow from themselves"
    assert question.moved_rows(0, slice(8, 16), 2) is None
    product = asked(torch.matmul, torch.randn(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE))
    assert product.moved_rows(0, slice(0, 8), 2) is None, "both matrices have as many rows as the result"
    sums = asked(lambda x: x.sum(0), torch.randn(64, 64, device=DEVICE))
    assert sums.moved_rows(0, slice(0, 8), 2) is None


def test_one_row_is_compared_in_parts_of_it(little_memory):
    x = torch.randn(1, 6, 500, device=DEVICE)
    question = asked(torch.exp, x)
    check.compare(question, question.usual[0])
    wrong = question.usual[0].clone()
    wrong[0, 5, 7] += 1
    with pytest.raises(check.Rejected, match=r"in 0: from 4 on: 1 of 1000 wrong, .*the first at \(1, 7\)"):
        check.compare(question, wrong)
