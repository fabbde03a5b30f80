"""A row's source fingerprint: what changes it, and what does not."""

import shutil

from lessonkit.base.files import ROOT
from lessonkit.lesson import kernels
from lessonkit.measure import fingerprint

import pytest

FILES = {
    "day1_some/lesson.py": """\
from lessonkit import Lesson, opaque, cuda, needs, specimen
from day1_some import shared, other as plain
from day1_some.shared import launch, WIDTH as W
import day1_some.deep as deep
import torch.nn.functional as F
from importlib import import_module
digits = import_module("day1_some.07_digits")
taken = specimen("day1_some.taken", "taken")
kernels = cuda.extension(__file__)
SCALE = 2
PEERS = {"torch": lambda x: F.softmax(x, -1), **shared.PEERS}
class Options:
    size = 4
def rung(x):
    place = 1
    wide = launch(x, W, why="as wide as half a word")
    return wide + shared.helper(x) + digits.tail(x) + deep.low(x) + SCALE + Options.size + place
def kernel(x):
    getattr(kernels, f"{name_of(x)}_{x.dtype}")(x)
    return _run("scale", x)
def name_of(x):
    return "scale"
def _run(name, x):
    return name
def marked(x):
    return shared.nowhere(x)
def operator(x):
    return x
def gradient(ctx, dy):
    return dy
operator.register_autograd(gradient, setup_context=lambda ctx, inputs, output: None)
@shared.wrapped
def decorated(x):
    import day1_some.lazily as lazily
    from day1_some.late import later
    return later(opaque(x))
def place(x):
    return unused
def unused(x):
    return x
def measured(x):
    return taken(x)
def inputs(n):
    return n + 1
LESSON = Lesson(inputs=inputs, work=plain.LESSON.work, rungs=(rung,), peers=PEERS, checks=(unused,))
""",
    "day1_some/shared.py": """\
from day1_some.deep import low
WIDTH = 8
def launch(x, w):
    "What it does."
    return low(x)  # the last
def helper(x):
    return x
def wrapped(f):
    return f
def _liger(x):
    return x + 1
PEERS = {"liger": _liger}
""",
    "day1_some/deep.py": "LOW = 1\ndef low(x):\n    return LOW\ndef unreached():\n    return 0\n",
    "day1_some/07_digits.py": "def tail(x):\n    return 7\n",
    "day1_some/late.py": "def later(x):\n    return x\n",
    "day1_some/taken.py": "def taken(x):\n    return x\ndef left(x):\n    return 3\n",
    "day1_some/lazily.py": "X = 1\n",
    "day1_some/other.py": "def _work(n):\n    return n\nLESSON = Lesson(work=_work, rungs=())\n",
    "day1_some/lesson.cu": """\
#include "some.cuh"
__global__ void scale_kernel(float* x) { x[0] = half_of(x[0]); }
void scale_float32(float* x) { scale_kernel<<<1, 1>>>(x); }
__global__ void other_kernel(float* x) { x[1] = 1; }
void other(float* x) { other_kernel<<<1, 1>>>(x); }
""",
    "cuda_src/include/some.cuh": """constexpr float HALF = 0.5f;
__device__ float half_of(float x) { return x * HALF; }
""",
    "lessonkit/__init__.py": "from lessonkit.modes.opaque import opaque\nfrom lessonkit.lesson import Lesson, needs\n"
    "from lessonkit import cuda\n",
    "lessonkit/modes/opaque.py": "def opaque(x):\n    return x\n",
    "lessonkit/lesson.py": "class Lesson:\n    pass\ndef needs(n):\n    return n\n",
    "lessonkit/cuda/__init__.py": "from lessonkit.cuda.extension import extension\n",
    "lessonkit/cuda/extension.py": "def extension(file):\n    return file\n",
}
LESSON = "day1_some.lesson"


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def changed(tree, file, old, new, mark):
    """Whether mark(tree) becomes another one by a change, which is then undone."""
    before, path = mark(tree), tree / file
    assert old in path.read_text(), old
    path.write_text(path.read_text().replace(old, new))
    after = mark(tree)
    path.write_text(FILES[file])
    assert mark(tree) == before
    return after != before


@pytest.mark.parametrize(
    ("function", "file", "old", "new"),
    [
        ("rung", "day1_some/lesson.py", "SCALE = 2", "SCALE = 3"),
        ("rung", "day1_some/lesson.py", "size = 4", "size = 5"),
        ("rung", "day1_some/shared.py", "WIDTH = 8", "WIDTH = 16"),
        ("rung", "day1_some/shared.py", "return low(x)", "return low(x + 1)"),
        ("rung", "day1_some/shared.py", "def helper(x):\n    return x", "def helper(x):\n    return -x"),
        ("rung", "day1_some/deep.py", "LOW = 1", "LOW = 2"),
        ("operator", "day1_some/lesson.py", "    return dy", "    return 2 * dy"),
        ("operator", "day1_some/lesson.py", "output: None", "output: ctx.set_materialize_grads(False)"),
        ("rung", "day1_some/07_digits.py", "7", "8"),
        ("kernel", "day1_some/lesson.cu", "half_of(x[0])", "half_of(x[1])"),
        ("kernel", "day1_some/lesson.cu", "<<<1, 1>>>(x); }\n__global__ void o", "<<<2, 1>>>(x); }\n__global__ void o"),
        ("kernel", "cuda_src/include/some.cuh", "0.5f", "0.25f"),
        ("marked", "day1_some/shared.py", "x + 1", "x + 2"),
        ("decorated", "day1_some/shared.py", "return f", "return f or None"),
        ("decorated", "day1_some/late.py", "return x", "return x + 1"),
        ("decorated", "day1_some/lazily.py", "X = 1", "X = 2"),
        ("measured", "day1_some/taken.py", "return x", "return x + 1"),
        ("decorated", "lessonkit/modes/opaque.py", "return x", "return x * 1"),
    ],
)
def test_what_a_function_reaches_changes_its_fingerprint(tree, function, file, old, new):
    assert changed(tree, file, old, new, lambda root: fingerprint.source(root, LESSON, function))


@pytest.mark.parametrize(
    ("function", "file", "old", "new"),
    [
        ("rung", "day1_some/shared.py", '"What it does."', '"What it does, at length."'),
        ("rung", "day1_some/shared.py", "# the last", "# the very last"),
        ("rung", "day1_some/lesson.py", "half a word", "two bytes"),  # of a why
        ("rung", "day1_some/shared.py", "x + 1", "x + 2"),
        ("rung", "day1_some/deep.py", "return 0", "return 1"),
        ("rung", "day1_some/lesson.py", "return unused", "return unused + 1"),  # its `place` is a local name
        ("rung", "day1_some/lesson.cu", "half_of(x[0])", "half_of(x[1])"),
        ("rung", "day1_some/lesson.py", "def rung(", "def another("),
        ("kernel", "day1_some/lesson.cu", "x[1] = 1", "x[1] = 2"),
        ("kernel", "cuda_src/include/some.cuh", "x * HALF", "x  *  HALF /* a half */"),
        ("kernel", "lessonkit/cuda/extension.py", "return file", "return str(file)"),
        ("measured", "day1_some/taken.py", "return 3", "return 4"),
        ("decorated", "lessonkit/lesson.py", "return n", "return n + 1"),
    ],
)
def test_what_it_does_not_reach_changes_nothing(tree, function, file, old, new):
    def mark(root):
        there = f"def {function}(" in (root / "day1_some/lesson.py").read_text()
        return fingerprint.source(root, LESSON, function if there else "another")

    assert not changed(tree, file, old, new, mark)


def test_a_rung_has_its_inputs_and_work_and_a_peer_its_function(tree):
    def rung(root):
        return fingerprint.contender(root, LESSON, "rung")

    def liger(root):
        return fingerprint.contender(root, LESSON, "liger", peer=True)

    for mark in (rung, liger):
        assert changed(tree, "day1_some/lesson.py", "return n + 1", "return n + 2", mark), "inputs"
        assert changed(tree, "day1_some/other.py", "return n", "return 2 * n", mark), "work, in another lesson"
        assert not changed(tree, "day1_some/lesson.py", "checks=(unused,)", "checks=()", mark)
        assert changed(tree, "day1_some/lesson.py", "checks=", "bench_dtype=1, checks=", mark)
    assert changed(tree, "day1_some/shared.py", "x + 1", "x + 2", liger)
    assert not changed(tree, "day1_some/lesson.py", "softmax(x, -1)", "softmax(x, 0)", liger)
    torch_ = lambda root: fingerprint.contender(root, LESSON, "torch", peer=True)  # noqa: E731
    assert changed(tree, "day1_some/lesson.py", "softmax(x, -1)", "softmax(x, 0)", torch_)
    assert changed(tree, "day1_some/lesson.py", "torch.nn.functional as F", "torch.special as F", torch_)


def test_a_moved_lesson_keeps_its_fingerprint(tree):
    before = fingerprint.contender(tree, LESSON, "rung"), fingerprint.contender(tree, LESSON, "kernel")
    shutil.move(tree / "day1_some", tree / "day2_other")
    for path in (tree / "day2_other").glob("*.py"):
        path.write_text(path.read_text().replace("day1_some", "day2_other"))
    (tree / "day2_other/lesson.py").rename(tree / "day2_other/lesson09.py")
    (tree / "day2_other/lesson.cu").rename(tree / "day2_other/lesson09.cu")
    now = "day2_other.lesson09"
    assert (fingerprint.contender(tree, now, "rung"), fingerprint.contender(tree, now, "kernel")) == before


def test_what_is_not_there_is_named(tree):
    with pytest.raises(fingerprint.NotFound, match="binds no 'nobody'"):
        fingerprint.source(tree, LESSON, "nobody")
    with pytest.raises(fingerprint.NotFound, match=r"no module 'day1_some\.no'"):
        fingerprint.source(tree, "day1_some.no", "rung")
    with pytest.raises(fingerprint.NotFound, match="no peer 'quack'"):
        fingerprint.contender(tree, LESSON, "quack", peer=True)


def test_every_rung_and_peer_of_the_course_has_one():
    """Each of its own: a fingerprint that did not see the function would be the same for all rungs of a lesson."""
    for name, lesson in kernels():
        marks = {rung.__name__: fingerprint.contender(ROOT, name, rung.__name__) for rung in lesson.rungs}
        marks |= {label: fingerprint.contender(ROOT, name, label, peer=True) for label in lesson.peers}
        assert len(set(marks.values())) == len(marks), name


def test_a_problem_counts_as_if_its_lesson_said_it(tree):
    """Moving inputs and work out of a lesson into a problem changes nothing; changing them there does."""
    lesson, asked = tree / "day1_some/lesson.py", tree / "problems/asked.py"
    before = fingerprint.contender(tree, LESSON, "rung")
    text = lesson.read_text().replace("def inputs(n):\n    return n + 1\n", "")
    text = text.replace("Lesson(inputs=inputs, work=plain.LESSON.work, ", "Lesson(problem=asked.PROBLEM, ")
    lesson.write_text(f"from problems import asked\n{text}")
    asked.parent.mkdir()
    problem = "from lessonkit import Problem\nfrom day1_some import other\ndef inputs(n):\n    return n + 1\n"
    problem += "PROBLEM = Problem(inputs=inputs, work=other.LESSON.work, factor=1)\n"
    for old, new, same in (("", "", True), ("factor=1", "factor=2", True), ("return n + 1", "return n + 2", False)):
        asked.write_text(problem.replace(old, new) if old else problem)
        assert (fingerprint.contender(tree, LESSON, "rung") == before) is same, new
