"""What a reader of day 2 answered, who had never written a kernel: each wrong answer is refused, for its own reason."""

import re
from itertools import combinations

from lessonkit import device
from lessonkit.exercise import compile_check, grade, source
from lessonkit.judge.sentences import told

import pytest

pytestmark = [
    pytest.mark.kept("*/exercises/**/*"),
    pytest.mark.skipif(device.HAS_GPU, reason="exercises are graded where every address is watched"),
]
STUB = "the stub as it is"
MASK = ", mask=mask"
OFFSETS = "tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)"
FP32 = ".to(tl.float32)"
ZERO = "mask=mask, other=0.0"
GELU = "\n\n@triton.jit\ndef gelu_kernel"
GLOBAL = (GELU, f"\nHALF = 0.5\n{GELU}"), ("x * 0.5 * (1", "x * HALF * (1")
CHAINED = ("mask = offsets < n", "mask = 0 <= offsets < n")
IF_MASK = (f"x * y{MASK}", "x * y"), ("    tl.store(", "    if mask:\n        tl.store(")
LOGARITHM = ("x - tl.log(tl.sum(tl.exp(x)))", "tl.log(tl.exp(x) / tl.sum(tl.exp(x)))")
SQUARES = "tl.sum(centred * centred) / N"

# exercise -> what was answered, what refuses it, and the edits of the solution: (old, new), in all places.
ANSWERS = {
    "day2_triton_basics.exercise01_mul": [
        (STUB, "unwritten"),
        ("no mask at all", "out of bounds", (MASK, "")),
        ("a mask on the loads only", "out of bounds", (f"x * y{MASK}", "x * y")),
        ("the program's number is not multiplied by BLOCK", "unwritten",
         (f"= {OFFSETS}", f"= {OFFSETS.replace(' * BLOCK', '')}")),
        ("gradients exchanged", "gradient", ("mul(dz, y), mul(dz, x)", "mul(dz, x), mul(dz, y)")),
        ("a chained comparison", "error", CHAINED),
        ("`if` on a block", "error", *IF_MASK),
    ],
    "day2_triton_basics.exercise02_bias_relu": [
        ("axes of the grid exchanged", "unwritten",
         ("program_id(0).to", "program_id(2).to"), ("program_id(1)", "program_id(0)"),
         ("program_id(2)", "program_id(1)")),
        ("N as the stride of rows", "value", ("row * x_stride", "row * N")),
        ("tl.maximum drops NaN", "value", ("tl.where(y < 0, 0.0, y)", "tl.maximum(y, 0)")),
        ("the stride of x for z", "out of bounds", ("z_ptr + row * N", "z_ptr + row * x_stride")),
    ],
    "day2_triton_basics.exercise03_column_sum": [
        ("summed along the rows", "error", ("tl.sum(total, 0)", "tl.sum(total, 1)")),
        ("no `other` before the sum", "nan", (ZERO, "mask=mask")),
    ],
    "day2_triton_basics.exercise04_log_softmax": [
        ("no `other`", "nan", (', other=-float("inf")', "")),
        ("no maximum", "value", ("x -= tl.max(x)", "x -= 0")),
        ("the logarithm of the softmax", "value", LOGARITHM),
        ("a name that there is not", "error", ("x -= tl.max(x)", "x -= tl.max(rows)")),
    ],
    "day2_triton_basics.exercise05_gelu": [
        ("no conversion to fp32", "error", (FP32, "")),
        ("dy is not used", "gradient", ("dy * (cdf", "(cdf")),
        ("x is missing beside the density", "gradient", ("(cdf + x * pdf)", "(cdf + pdf)")),
        ("a global of the module", "compiler", *GLOBAL),
        ("a global, and a chained comparison", "error", *GLOBAL, CHAINED),
    ],
    "day2_triton_basics.exercise06_online_softmax": [
        ("no maximum", "nan", ("larger = tl.maximum(m, tl.max(x))", "larger = m * 0")),
        ("no rescaling", "value", ("s * tl.exp(m - larger) +", "s +")),
        ("the maximum of the last block", "nan", ("tl.maximum(m, tl.max(x))", "tl.max(x) + 0 * m")),
        ("no mask", "out of bounds", (', mask=cols < N, other=-float("inf")', "")),
        ("the maximum starts at -inf", "nan", ("m = LOWEST", 'm = -float("inf")')),
    ],
    "day2_triton_basics.exercise07_layernorm": [
        ("divided by BLOCK", "value", ("mean = tl.sum(x) / N", "mean = tl.sum(x) / BLOCK")),
        ("divided by BLOCK, with / sqrt", "value",
         ("mean = tl.sum(x) / N", "mean = tl.sum(x) / BLOCK"), (" * tl.rsqrt(var + eps)", " / tl.sqrt(var + eps)")),
        ("no `where` after the mean", "value", ("tl.where(mask, x - mean, 0.0)", "x - mean")),
        ("E[x^2] - E[x]^2", "value", (SQUARES, "tl.sum(x * x) / N - mean * mean")),
        ("divided by N - 1", "nan", (SQUARES, f"{SQUARES[:-1]}(N - 1)")),
        ("no `other` before the sum", "nan", (ZERO, "mask=mask")),
        ("no conversion to fp32", "value", (f"{ZERO}){FP32}", f"{ZERO})")),
    ],
    "day1_pytorch.exercise04_strides": [
        ("the step of the other dimension", "transpose", ("STRIDES_T = (2, 768)", "STRIDES_T = (1, 1536)")),
        ("the transpose exchanges offsets", "offsets", ("= 3 * 768 + 5, 3 * 768 + 5", "= 3 * 768 + 5, 5 * 768 + 3")),
        ("a split is counted as a copy", "reshapes", ("COPIES = {1, 3}", "COPIES = {1, 2, 3}")),
    ],
}  # fmt: skip
ASKED = [
    pytest.param(name, by, edits, id=f"{name}-{what}") for name, these in ANSWERS.items() for what, by, *edits in these
]
BROKEN = "day2_triton_basics.exercise11_broken_rmsnorm"


def named(name):
    return next(each for each in source.discover() if each.name == name)


@pytest.mark.parametrize(("name", "caught_by", "edits"), ASKED)
def test_a_readers_answer_is_refused(name, caught_by, edits):
    exercise = named(name)
    answer = exercise.solution if edits else exercise.stub
    for old, new in edits:
        assert old in answer, f"the solution has no {old!r} any more"
        answer = answer.replace(old, new)
    if caught_by == "compiler" and compile_check.lacks_compiler():
        pytest.skip(compile_check.lacks_compiler())
    verdict = grade.grade_and_compile(exercise, answer, targets=[90])
    assert verdict.caught_by == caught_by, verdict
    if caught_by == "compiler":
        number = int(re.search(r" in line (\d+): ", verdict.why)[1])
        assert verdict.why.endswith(answer.splitlines()[number - 1].strip())


@pytest.mark.parametrize("edits", [IF_MASK, (CHAINED,)], ids=["if", "chained"])
def test_a_block_as_a_condition_is_explained(edits, monkeypatch):
    """The learner reads which line asks it for a truth value and what to write, in English and in Chinese."""
    exercise = named("day2_triton_basics.exercise01_mul")
    answer = exercise.solution
    for old, new in edits:
        answer = answer.replace(old, new)
    verdict = grade.grade(exercise, answer)
    line = next(n for n, text in enumerate(answer.splitlines(), 1) if "if mask:" in text or "0 <= offsets" in text)
    assert verdict.why.startswith(f"your file:{line}: a block of shape (1024,) is no single truth value"), verdict
    assert "tl.where" in verdict.why
    monkeypatch.setenv("COURSE_LANG", "zh")
    assert told(verdict.why).startswith(f"your file:{line}: 形状为 (1024,) 的块")


@pytest.mark.parametrize("seed", range(5))
def test_no_seed_lets_a_sum_without_rescaling_pass(seed):
    exercise = named("day2_triton_basics.exercise06_online_softmax")
    answer = exercise.solution.replace("s * tl.exp(m - larger) +", "s +")
    assert not grade.grade(exercise, answer, seed=seed).right


PLANTED = [wrong for wrong in named(BROKEN).exercise.wrong if wrong.planted]


LEFT = [left for count in (1, 2, 3) for left in combinations(PLANTED, count)]


@pytest.mark.parametrize("left", LEFT, ids=lambda left: "; ".join(wrong.why for wrong in left))
def test_a_broken_kernel_is_refused_until_the_last_mistake_is_mended(left):
    exercise = named(BROKEN)
    answer = exercise.solution
    for wrong in left:
        assert wrong.old in answer
        answer = answer.replace(wrong.old, wrong.new)
    assert not grade.grade(exercise, answer).right
