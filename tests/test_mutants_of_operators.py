"""Every kernel of course_ops is named by a mutant that a check rejects; and the mutants of those without own tests.

WRONG has kernels whose problems are asked of them elsewhere; tests/operators/ has mutants of the others, and tests of
Hopper's kernels have their own. Kernels are interpreted, and Gluon's emulated, on one case that reaches them.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from lessonkit import Lesson, Mutant, device
from lessonkit.base.files import ROOT
from lessonkit.judge import check, mutants, operator_mutants

import pytest
import torch

from course_ops import testing
from course_ops.kernels import (
    _tiles,
    matmul_aligned,
    matmul_fp8_hopper,
    matmul_fp32_hopper,
    matmul_hopper,
    scan,
)
from problems import attention, dropout, gelu, grouped_matmul, linear, linear_cross_entropy, matmul, matmul_fp8
from problems import operators as answers
from problems import scan as scan_problem
from tests import (
    kernel_copies,
    test_attention_backward_192,
    test_attention_backward_wide,
    test_attention_backward_window,
    test_attention_forward_hopper,
    test_attention_varlen,
    test_matmul_plan,
    test_norm_backward_hopper,
)

pytestmark = pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py", "tests/operators/*.py")
FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
KERNELS = "course_ops.kernels"


# ---- Mutants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One case of a problem, which reaches the kernels of some file; call: by the operator's own dispatch."""

    call: object
    lesson: Lesson
    dtype: torch.dtype
    shape: dict


def asked(problem, call, dtype, **shape):
    return Question(call, Lesson(problem=problem, rungs=(call,), wrong=()), dtype, shape)


def by_copies(a, b):
    """The product of copies whose rows are aligned; copies are made on Hopper alone, so they are asked for by name.

    Without what lies between rows: some CPUs' products in bf16 read it.
    """
    return torch.matmul(*(t.clone(memory_format=torch.contiguous_format) for t in matmul_aligned.copier(a, b)(a, b)))


def fp8_of_rows(a, b, scale_a, scale_b):
    return matmul_fp8_hopper.fp8_sum_hopper(a, b, scale_a, scale_b, "rows")


def fp8_of_blocks(a, b, scale_a, scale_b):
    return matmul_fp8_hopper.fp8_promote_hopper(a, b, scale_a, scale_b, "blocks")


CAUSAL = {"B": 1, "H": 2, "S": 70, "D": 16, "S_k": 150, "H_kv": 1, "causal": True}
QUESTIONS = {
    "causal": asked(attention.PROBLEM, answers.attention_forward_call, FP32, **CAUSAL),
    "a window": asked(attention.PROBLEM, answers.attention_forward_call, FP32, **CAUSAL, window=75),
    "gradient": asked(attention.PROBLEM_BACKWARD, answers.attention_backward_call, FP32, **CAUSAL),
    "decoding in parts": asked(
        attention.PROBLEM, answers.attention_forward_call, FP32, B=1, H=4, S=1, D=16, S_k=300, H_kv=2, causal=True
    ),
    "linear": asked(linear.PROBLEM, answers.linear_call, FP32, M=130, N=70, K=40, residual=True, pad=3),
    "linear by TMA": asked(linear.PROBLEM, answers.linear_call, BF16, M=130, N=72, K=72, residual=True, pad=8),
    "linear of few rows": asked(linear.PROBLEM, answers.linear_call, FP32, M=5, N=520, K=8, residual=True, pad=3),
    "gradient of linear": asked(linear.PROBLEM_BACKWARD, answers.linear_backward_call, FP32, M=400, N=264, K=8, pad=3),
    "of few rows": asked(linear.PROBLEM_BACKWARD, answers.linear_backward_call, BF16, M=5, N=70, K=136),
    "matmul": asked(matmul.PROBLEM, answers.matmul_call, FP32, M=131, N=40, K=33),
    "matmul by TMA": asked(matmul.PROBLEM, answers.matmul_call, BF16, M=136, N=72, K=264, transposed="a"),
    "copies": asked(matmul.PROBLEM, by_copies, BF16, M=21, N=36, K=1060, transposed="b"),
    "matvec": asked(matmul.PROBLEM, answers.matmul_call, FP32, M=1, N=6, K=1100, transposed="b"),
    "shared tiles": asked(matmul.PROBLEM, answers.matmul_call, BF16, M=5, N=70, K=1030),
    "persistent": asked(matmul.PROBLEM, matmul_hopper.matmul_hopper, BF16, M=200, N=520, K=328),
    "exact fp32, Hopper": asked(matmul.PROBLEM, matmul_fp32_hopper.matmul_fp32, FP32, M=70, N=100, K=200),
    "fp8 in blocks": asked(matmul_fp8.PROBLEM, answers.matmul_fp8_call, FP8, M=130, N=136, K=200, scheme="blocks"),
    "fp8 by TMA": asked(matmul_fp8.PROBLEM, answers.matmul_fp8_call, FP8, M=130, N=136, K=256, scheme="rows"),
    "fp8 rows, Hopper": asked(matmul_fp8.PROBLEM, fp8_of_rows, FP8, M=130, N=136, K=768, scheme="rows"),
    "fp8 blocks, Hopper": asked(matmul_fp8.PROBLEM, fp8_of_blocks, FP8, M=100, N=520, K=256, scheme="blocks"),
    "groups": asked(
        grouped_matmul.PROBLEM, answers.grouped_matmul_call, FP32, T=70, E=3, K=40, N=70, before=3, after=2
    ),
    "groups by TMA": asked(
        grouped_matmul.PROBLEM, answers.grouped_matmul_call, BF16, T=70, E=3, K=72, N=136, before=3, after=2
    ),
    # Torch is told to be deterministic while a case is asked, and the operator then takes the three phases.
    "look-back": asked(scan_problem.PROBLEM, scan.scan_look_back, FP32, n=20000),
    "three phases": asked(scan_problem.PROBLEM, answers.scan_call, FP32, n=9000),
    "gelu": asked(gelu.PROBLEM, answers.gelu_call, FP32, n=2049),
    "gradient of gelu": asked(gelu.PROBLEM_BACKWARD, answers.gelu_backward_call, FP32, n=2049),
    "last layer": asked(
        linear_cross_entropy.PROBLEM_BACKWARD,
        answers.linear_cross_entropy_backward_call,
        FP32,
        M=9,
        K=37,
        V=131,
    ),
    "dropout": asked(dropout.PROBLEM, answers.dropout_call, FP32, n=2051, seed=2**40 + 5),
}

# fmt: off
WRONG = {  # file of course_ops/kernels -> mutants; `rung` names the question
    "attention_forward": (
        Mutant("the diagonal is not masked", "attention_kernel", "part != 1", "part == 0", "causal"),
        Mutant("row sums are not rescaled", "attend_blocks", "l = l * alpha + ", "l = l + ", "causal"),
        Mutant("the diagonal of as many keys as queries", "attention_kernel", "offset = S_k - S_q", "offset = 0",
               "causal"),
        Mutant("lse of each head in the first one's place", "attention_kernel", "* H + h) * line", "* H) * line",
               "causal", "nan"),
        Mutant("the window's edge is left out", "attention_kernel", "part > 0 or WINDOW", "part > 0", "a window"),
    ),
    "attention_backward": (
        Mutant("delta without O", "delta_kernel", "o_tile.to(tl.float32) * do_tile", "do_tile", "gradient"),
        Mutant("delta of each head in the first one's place", "delta_kernel", "delta_ptr + head * S_q + rows",
               "delta_ptr + rows", "gradient", "nan"),
        Mutant("delta past the last row", "delta_kernel", "mask=rows < S_q", "mask=rows < S_q + 1", "gradient",
               "out of bounds"),
        Mutant("dQ without the scale", "dq_kernel", "dq * scale", "dq", "gradient"),
        Mutant("dS without delta", "add_keys", " - delta[:, None]", "", "gradient"),
        Mutant("lse by the natural logarithm", "dq_kernel", "other=0.0) * LOG2E", "other=0.0)", "gradient"),
        Mutant("one of the heads that share K and V", "dkdv_kernel", "h_kv * GROUP + GROUP)", "h_kv * GROUP + 1)",
               "gradient"),
        Mutant("the block of queries on the diagonal is left out", "query_bounds",
               "begin = tl.maximum(0, key - offset) // BLOCK_M",
               "begin = tl.cdiv(tl.maximum(0, key - offset), BLOCK_M)", "gradient"),
        Mutant("dV from dS", "add_queries", "tl.dot(p.to(do_tile", "tl.dot(ds.to(do_tile", "gradient"),
    ),
    "attention_decode": (
        Mutant("O is not rescaled", "decode_kernel", "acc * alpha[:, None], input", "acc, input", "decoding in parts"),
        Mutant("a key past the last", "decode_kernel", "<= last[:, None]", "<= last[:, None] + 1", "decoding in parts"),
        Mutant("the parts of one program in one place", "store_part", "tl.cast(program + owner, tl.int64)",
               "tl.cast(program, tl.int64)", "decoding in parts", "nan"),
        Mutant("the last part is not merged", "merge_kernel", "// share - writer + 1", "// share - writer",
               "decoding in parts", "nan"),
        Mutant("parts of the owner before", "merge_kernel", "place, writer + owner,", "place, writer,",
               "decoding in parts", "value or nan"),
    ),
    "linear": (
        Mutant("the residual's rows taken to be N apart", "pointers_kernel", "rows * stride_r", "rows * N", "linear"),
        Mutant("K's tail is not masked", "pointers_kernel", "(rows < M) & (ks < K)", "rows < M", "linear",
               "nan or out of bounds"),
        Mutant("the bias after the GELU", "pointers_kernel", "z = gelu(z)",
               "z = gelu(z - tl.load(bias_ptr + cols)) + tl.load(bias_ptr + cols)", "linear", "value or out of bounds"),
        Mutant("only the last step's product", "tma_kernel", ".T, acc)", ".T)", "linear by TMA"),
        Mutant("the right half in the left one's place", "tma_kernel", "col + half * (BLOCK_N // 2)", "col",
               "linear by TMA", "value or nan"),
        Mutant("the residual's rows taken to be N apart", "epilogue_kernel", "rows * stride_r", "rows * N",
               "linear of few rows"),
        Mutant("the bias of the first columns", "epilogue_kernel", "bias_ptr + cols,", "bias_ptr + cols % BLOCK_N,",
               "linear of few rows"),
        Mutant("only the last step's sums", "dz_and_sums_kernel", "total += dz", "total = dz", "gradient of linear"),
        Mutant("dy's rows taken to be N apart", "dz_and_sums_kernel", "rows * stride_dy", "rows * N",
               "gradient of linear"),
        Mutant("partial sums past the last", "column_sums_kernel", "(rows < M) & (cols < N)", "cols < N",
               "gradient of linear", "out of bounds"),
        Mutant("one of the partial sums", "column_sums_kernel", "tl.sum(total, axis", "tl.max(total, axis",
               "gradient of linear"),
        Mutant("rows past the last", "dz_sums_and_dw_kernel", "(rows < M) & (cols < N)", "cols < N", "of few rows",
               "out of bounds"),
        Mutant("dW of x's first columns", "dz_sums_and_dw_kernel", "x_desc.load([0, k])", "x_desc.load([0, 0])",
               "of few rows"),
    ),
    "matmul": (
        Mutant("B's strides exchanged", "pointers_kernel", "stride_bk, stride_bn, stride_cm, BLOCK",
               "stride_bn, stride_bk, stride_cm, BLOCK", "matmul", "value or out of bounds"),
        Mutant("tiles of the transposed C", "pointers_kernel", "tl.program_id(0), M, N, BLOCK",
               "tl.program_id(0), N, M, BLOCK", "matmul", "nan"),
        Mutant("A's blocks by rows where it lies by columns", "tma_kernel", "a_desc.load([k, row]).T",
               "a_desc.load([row, k]).T", "matmul by TMA"),
        Mutant("only the last step's product", "tma_kernel", "tl.dot(a, b, acc, input", "tl.dot(a, b, input",
               "matmul by TMA"),
        Mutant("the right half over the left one", "tma_kernel", "col + BLOCK_N // 2]", "col]", "matmul by TMA",
               "value or nan"),
    ),
    "matmul_aligned": (
        Mutant("the copy's rows as far apart as the matrix's", "copy_block", "row * (stride_to * UNIT)",
               "row * (stride_from * UNIT)", "copies", "nan"),
        Mutant("columns counted in units", "copy_block", "col < units * UNIT)", "col < units)", "copies", "nan"),
        Mutant("blocks of the second matrix counted from the first's", "copy_kernel", "copy_block(program - blocks, b",
               "copy_block(program, b", "copies", "nan"),
    ),
    "matmul_skinny": (
        Mutant("only the last step's products", "matvec_kernel", "acc += a[None", "acc = a[None", "matvec"),
        Mutant("K's tail is not masked", "matvec_kernel", "mask=ks < K,", "mask=ks < K + 1,", "matvec",
               "out of bounds"),
        Mutant("another program's part in place of the own", "stream_k_kernel", "acc += tl.load(parts_ptr",
               "acc = tl.load(parts_ptr", "shared tiles"),
        Mutant("the own part in place of the helper's", "stream_k_kernel", "parts_ptr + helper * BLOCK_M",
               "parts_ptr + me * BLOCK_M", "shared tiles", "nan"),
        Mutant("columns past the last", "store_tile", "(rows < M) & (columns < N)", "rows < M", "shared tiles",
               "value or out of bounds"),
    ),
    "matmul_hopper": (
        Mutant("a stage is released while wgmma reads it", "consumer", "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,",
               "persistent", "race"),
        Mutant("the sum of the tile before is not cleared", "consumer", "use_acc=step > 0", "use_acc=True",
               "persistent"),
        Mutant("the producer waits for the stage's other phase", "producer", "parity ^ 1", "parity", "persistent",
               "barrier"),
    ),
    "matmul_fp32_hopper": (
        Mutant("the producer waits for the stage's other phase", "producer", "parity ^ 1", "parity",
               "exact fp32, Hopper", "barrier"),
        Mutant("a stage is read before its copies are there", "consumer", "mbarrier.wait(full.index(stage), parity)",
               "pass", "exact fp32, Hopper", "race or barrier"),
        Mutant("a stage is released before it is read", "consumer", "acc = gl.zeros((BLOCK_M, BLOCK_N)",
               "mbarrier.arrive(empty.index(0)); acc = gl.zeros((BLOCK_M, BLOCK_N)", "exact fp32, Hopper",
               "race or barrier"),
        Mutant("only the last step's product", "consumer", "gl.dot_fma(a, b, acc)", "gl.dot_fma(a, b, acc * 0)",
               "exact fp32, Hopper"),
        Mutant("the last column is left out", "consumer", "(cols < N)", "(cols < N - 1)", "exact fp32, Hopper", "nan"),
    ),
    "matmul_fp8": (
        Mutant("A's first scale in every step", "pointers_kernel", " + step * stride_ak", "", "fp8 in blocks"),
        Mutant("the scale of B's first columns", "pointers_kernel", " + tile_n * stride_bn", "", "fp8 in blocks"),
        Mutant("only the last step's product", "tma_kernel", ".T, acc)", ".T)", "fp8 by TMA"),
        Mutant("the right half has the left one's scales", "tma_kernel", "cols = start + ", "cols = col + ",
               "fp8 by TMA"),
    ),
    "matmul_fp8_hopper": (
        Mutant("a stage is released while wgmma reads it", "sum_consumer", "warpgroup_mma_wait(1,",
               "warpgroup_mma_wait(2,", "fp8 rows, Hopper", "race"),
        Mutant("the lower rows have the upper ones' scales", "sum_consumer", "rows = row + ", "rows = tile_m * 128 + ",
               "fp8 rows, Hopper"),
        Mutant("the right half has the left one's scale", "promote_consumer", "scale_a, scale_right, bar",
               "scale_a, scale_left, bar", "fp8 blocks, Hopper"),
        Mutant("B's first scale in every step", "promote_consumer", "scale_left, scale_right = next_left, next_right",
               "pass", "fp8 blocks, Hopper"),
        Mutant("a stage is read before its copies are there", "promote", "mbarrier.wait(full, parity)", "pass",
               "fp8 blocks, Hopper", "race or barrier"),
    ),
    "grouped_matmul": (
        Mutant("a tile runs into the next group", "multiply_group", "end - begin, N, K, stride", "end, N, K, stride",
               "groups", "value or out of bounds"),
        Mutant("the first group's matrix", "multiply_group", "expert.to(tl.int64) * stride_we", "0", "groups"),
        Mutant("rows of no group are not cleared", "pointers_kernel",
               "zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)", "pass", "groups", "nan"),
        Mutant("a tile runs past the last group", "tma_kernel", "(rows < end)", "(rows < T)", "groups by TMA"),
        Mutant("the first group's matrix", "tma_kernel", "w_desc.load([expert, k, column])",
               "w_desc.load([0, k, column])", "groups by TMA"),
        Mutant("rows of no group are not cleared", "tma_kernel",
               "zero_rows_of_no_group(y_ptr, offsets_ptr, T, N, E)", "pass", "groups by TMA", "nan"),
    ),
    "scan": (
        Mutant("a sum's sign spreads over the state", "publish", " & 0xFFFFFFFF", "", "look-back"),
        Mutant("the tile whose prefix is known is not added", "look_back", "stop + 1, known", "stop, known",
               "look-back"),
        Mutant("elements past the last", "look_back_kernel", "tl.store(y_ptr + start + lanes, y, mask=lanes < size)",
               "tl.store(y_ptr + start + lanes, y)", "look-back", "out of bounds"),
        Mutant("an element past the last is added", "block_sums_kernel", "mask=offsets < n", "mask=offsets <= n",
               "three phases", "out of bounds"),
        Mutant("a block's sum without its first element", "block_sums_kernel", "tl.sum(x)",
               "tl.sum(tl.where(offsets > block * BLOCK, x, 0.0))", "three phases"),
        Mutant("sums before each block, not up to its end", "scan_sequential_kernel", "tl.cumsum(x) + carry",
               "tl.cumsum(x) - x + carry", "three phases"),
        Mutant("the sum up to the block's own end", "scan_blocks_kernel", "ends_ptr + block - 1", "ends_ptr + block",
               "three phases"),
    ),
    "gelu": (
        Mutant("an element past the last", "gelu_kernel", "mask = offsets < n", "mask = offsets < n + 1", "gelu",
               "out of bounds"),
        Mutant("the cube is a square", "gelu_kernel", "x * x * LINEAR_CUBIC", "x * LINEAR_CUBIC", "gelu"),
        Mutant("the cubic term's derivative without its factor", "gelu_backward_kernel", "(3 * CUBIC)", "CUBIC",
               "gradient of gelu"),
        Mutant("the gradient of the logistic function alone", "gelu_backward_kernel", "s + x * s * (1 - s)",
               "x * s * (1 - s)", "gradient of gelu"),
    ),
    "linear_cross_entropy": (
        Mutant("an element past the last", "scale_kernel", "mask = offsets < n", "mask = offsets < n + 1", "last layer",
               "out of bounds"),
        Mutant("the factor left out", "scale_kernel", "x * tl.load(factor_ptr)", "x", "last layer"),
        Mutant("the last program's elements left out", "scale_kernel", "offsets < n", "offsets < n - n % BLOCK",
               "last layer", "nan"),
    ),
    "dropout": (
        Mutant("a row's second call has the first one's counter", "dropout_kernel", "(first + pair) * 2 + 1",
               "(first + pair) * 2", "dropout"),
        Mutant("what is kept is not scaled", "dropout_kernel", "x * scale", "x", "dropout"),
        Mutant("the seed's high half is lost", "philox", "(seed.to(tl.uint64) >> 32)", "(seed.to(tl.uint64) >> 63)",
               "dropout"),
        Mutant("nine rounds", "philox", "static_range(10)", "static_range(9)", "dropout"),
    ),
}
# fmt: on

interpreted_here = pytest.mark.skipif(not device.INTERPRETED, reason="mutants are interpreted, as without a GPU")


@pytest.fixture(autouse=True)
def _flags_of_its_own(monkeypatch):
    """What a mutant leaves in the flags that calls share meets no other call."""
    monkeypatch.setattr(_tiles, "_zeros", {})


def ask(question):
    with testing.kernels():
        check.check(question.lesson, question.call, question.shape, question.dtype)


@interpreted_here
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_kernels_themselves_are_right(name):
    ask(QUESTIONS[name])


def change(monkeypatch, folder, file, mutant):
    """Every module of course_ops has the mutant's device functions in place of those of the file."""
    module = import_module(f"{KERNELS}.{file}")
    path = Path(module.__file__)
    wrong = kernel_copies.written(module, mutants.changed(((path, path.read_text()),), file, mutant)[path], folder)
    for name in {f.name for f in functions(module.__name__) if f.is_device_code} & {*vars(module)}:
        right = getattr(module, name)
        for other in [m for key, m in sys.modules.items() if key.startswith("course_ops.")]:
            for key in [key for key, value in vars(other).items() if value is right]:
                monkeypatch.setattr(other, key, getattr(wrong, name))


@interpreted_here
@pytest.mark.parametrize(
    ("file", "mutant"),
    [pytest.param(file, mutant, id=f"{file}: {mutant.why}") for file, found in WRONG.items() for mutant in found],
)
def test_mutants_are_rejected(monkeypatch, tmp_path, file, mutant):
    """By the property that each names, or by one of the two."""
    change(monkeypatch, tmp_path, file, mutant)
    with pytest.raises(check.Rejected) as rejected:
        ask(QUESTIONS[mutant.rung])
    assert rejected.value.caught_by in mutant.caught_by.split(" or "), str(rejected.value)


# ---- Every kernel has one ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function, or a method, of a file: where its text begins and ends, and the names that it uses."""

    module: str
    name: str
    start: int
    stop: int
    uses: frozenset
    is_device_code: bool


@cache
def text_of(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


@cache
def functions(module: str) -> tuple[Function, ...]:
    lines, found = text_of(module).splitlines(keepends=True), []
    for node in ast.walk(ast.parse(text_of(module))):
        if isinstance(node, ast.FunctionDef):
            start, stop = (sum(map(len, lines[:line])) for line in (node.lineno - 1, node.end_lineno))
            uses = frozenset(getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node)) - {""}
            jit = any("jit" in ast.unparse(each) for each in node.decorator_list)
            found.append(Function(module, node.name, start, stop, uses, jit))
    return tuple(found)


@cache
def imports(module: str) -> dict[str, tuple[str, str]]:
    """What a file calls device code of others: name -> (module, its name there)."""
    froms = [node for node in ast.walk(ast.parse(text_of(module))) if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in froms
        if node.module.startswith((f"{KERNELS}.", "course_ops.hopper"))
        for alias in node.names
    }


def reached(kernel: Function) -> set[Function]:
    """The kernel and what it calls, whatever stands in between."""
    seen, todo = set(), [kernel]
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            for name in function.uses:
                module, name_there = imports(function.module).get(name, (function.module, name))
                todo += [f for f in functions(module) if f.name == name_there and f.is_device_code]
    return seen


@cache
def every_kernel() -> dict[Function, set[Function]]:
    """The kernels of course_ops, each with what it reaches."""
    files = [f"{KERNELS}.{path.stem}" for path in sorted(ROOT.glob("course_ops/kernels/*.py"))]
    found = [f for file in files for f in functions(file) if f.is_device_code and f.name.endswith("_kernel")]
    return {kernel: reached(kernel) for kernel in found}


def changes() -> Iterator[tuple[str, str, str]]:
    """Of each mutant that some test judges: the file, the function or "", and the text that it replaces."""
    for file, found in WRONG.items():
        yield from ((f"{KERNELS}.{file}", mutant.where, mutant.old) for mutant in found)
    every_file = [f"{KERNELS}.{path.stem}" for path in sorted(ROOT.glob("course_ops/kernels/*.py"))]
    for path in sorted(ROOT.glob("tests/operators/[a-z]*.py")):
        for lesson in operator_mutants.declared(f"tests.operators.{path.stem}").values():
            for mutant in lesson.wrong:  # it names no file: its text stands in one
                yield from ((file, mutant.where, mutant.old) for file in every_file)
    for tests, kernels in (
        (test_attention_backward_192, "attention_backward_192_hopper"),
        (test_attention_backward_wide, "attention_backward_wide_hopper"),
        (test_attention_backward_window, "attention_backward_hopper"),
        (test_norm_backward_hopper, "norm_backward_hopper"),
    ):
        yield from ((f"{KERNELS}.{kernels}", "", old) for old, *_ in tests.MUTANTS.values())
    yield from ((module.__name__, "", old) for module, old, *_ in test_attention_varlen.WRONG.values())
    forward = f"{KERNELS}.attention_forward_hopper"
    yield from ((forward, function, old) for _, function, old, *_ in test_attention_forward_hopper.WRONG)
    stream_k, tiles = f"{KERNELS}.matmul_stream_k_hopper", f"{KERNELS}.matmul_tiles_hopper"
    yield from ((stream_k, function, old) for function, old, *_ in test_matmul_plan.WRONG_STREAM_K)
    yield from ((tiles, function, old) for function, old, *_ in test_matmul_plan.WRONG_TILES)


def kernel_of(module: str, where: str, old: str) -> Function | None:
    """The kernel that is another with this text replaced; None if that changes no kernel, or more than one.

    So a mutant of what several kernels call is a mutant of none: the test may have run any of them.
    """
    for function in functions(module):
        if where in ("", function.name) and old in text_of(module)[function.start : function.stop]:
            (kernel, *others) = [k for k, parts in every_kernel().items() if function in parts] or [None]
            return None if others else kernel
    return None


# What neither the interpreter nor the emulator runs. A mutant of it would be for a GPU to judge.
OF_A_GPU = {
    "matmul_split_k.split_k_kernel": "its CTAs wait for each other; the emulator runs one after the other",
}


def test_every_kernel_is_named_by_a_mutant():
    """The change lies in the kernel, or in what it alone calls."""
    named = {kernel_of(*change) for change in changes()}
    unnamed = {f"{k.module}.{k.name}".removeprefix(f"{KERNELS}.") for k in every_kernel() if k not in named}
    assert unnamed == {*OF_A_GPU}, "add a Mutant to WRONG for each of these, of which no wrong version is tested"


def test_a_mutant_of_what_several_kernels_call_names_none():
    portable = f"{KERNELS}.matmul"
    assert kernel_of(portable, "tma_kernel", "c_desc.store([row, col], left").name == "tma_kernel"
    assert kernel_of(f"{KERNELS}.attention_forward", "attend_blocks", "if MASKED:").name == "attention_kernel"
    assert kernel_of(f"{KERNELS}._tiles", "multiply_tile", "a_ptrs += a_step") is None
    assert kernel_of(portable, "matmul_tma", "out = c if") is None
