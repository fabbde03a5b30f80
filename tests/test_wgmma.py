"""ptxas serializes no kernel's wgmma, at any shape that a lesson times, and at those that course_ops tells apart.

Nor does any of these kernels have what no kernel may have (compiled._wrong), as a register that nothing has set.

`python -m lessonkit compile` looks at the first shape of each kernel alone, and ptxas decides anew for each.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from lessonkit.base.errors import Unsupported
from lessonkit.cuda import sass
from lessonkit.lesson import kernels as lesson_kernels
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LESSONS = {
    name: lesson
    for day in ("day3", "day4")
    for name, lesson in lesson_kernels(day)
    if not lesson.extension and any("wgmma" in claim for claims in lesson.claims.values() for claim in claims)
}
OPERATORS = ("attention", "attention backward", "matmul", "linear", "matmul_fp8", "grouped_matmul")
DIMENSIONS = (64, 96, 128, 192, 256)


# ---- In the process that compiles ----------------------------------------------------------------------------------


def serialized(name: str, part: int) -> tuple[int, list[list[str]]]:
    """How many kernels with wgmma there are, and which are serialized or wrong, as [rung or call, kernel, a line].

    name: a lesson, at all of its shapes, or an operator; part: for attention the D.
    """
    count, found = 0, list[list[str]]()
    with compiled.compiling(90) as made:
        for call, launch in _operator(name, part) if name in OPERATORS else _rungs(name):
            made.clear()
            with suppress(Unsupported):  # a rung need not take every timed shape
                launch()
            for each in made.values():
                kernel = compiled.inspect(call, each, 90)
                count += kernel.wgmma > 0
                found += [[call, kernel.kernel, line] for line in compiled._wrong(call, 90, each, kernel.shared)]
                if sass.serialized(kernel):
                    found.append([call, kernel.kernel, f"{kernel.waits} waits for {kernel.wgmma} wgmma: {kernel}"])
    return count, found


def _rungs(lesson: str) -> Iterator[tuple[str, Callable[[], object]]]:
    for rung, without, launches in compiled._calls(lesson, 90, ()):
        yield from ((rung, launch) for launch in launches if not without)


def _of(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _operator(name: str, part: int) -> Iterator[tuple[str, Callable[[], object]]]:
    calls = {"attention": _attention, "attention backward": _attention_backward, "matmul": _matmul, "linear": _linear}
    calls |= {"matmul_fp8": _matmul_fp8, "grouped_matmul": _grouped_matmul}
    for call, function, *arguments in calls[name](part) if part else calls[name]():
        yield call, partial(function, *arguments)


def _heads(D: int) -> Iterator[tuple[str, tuple[torch.Tensor, ...], bool, int | None]]:
    """q, k and v of one head a group and of four, for TMA and for pointers, with each mask."""
    for H_kv in (8, 32):
        for causal, window in ((False, None), (True, None), (True, 1024)):
            tensors = tuple(_of(2, H, 4096, D) for H in (32, H_kv, H_kv))
            yield f"D={D} H_kv={H_kv} {causal=} {window=}", tensors, causal, window
    tensors = tuple(_of(2, H, 4096, D + 1)[..., :D] for H in (32, 8, 8))
    yield f"D={D} odd strides", tensors, True, None


def _attention(D: int) -> Iterator[tuple[Any, ...]]:
    from course_ops.attention import Call
    from course_ops.kernels import attention_forward, attention_forward_hopper

    for name, qkv, causal, window in _heads(D):
        yield f"portable {name}", attention_forward.attention_forward, *Call(*qkv, causal, window, 0.1)
        if attention_forward_hopper.takes(*qkv):
            yield f"hopper {name}", attention_forward_hopper.attention_forward, *Call(*qkv, causal, window, 0.1)


def _attention_backward(D: int) -> Iterator[tuple[Any, ...]]:
    from course_ops.kernels import attention_backward, attention_backward_hopper, attention_backward_wide_hopper

    for name, (q, k, v), causal, window in _heads(D):
        given = q, q, k, v, q, _of(*q.shape[:3], dtype=torch.float32)
        yield f"portable {name}", attention_backward.attention_backward, *given, causal, window, 0.1
        if attention_backward_hopper.takes(q, q, k, v):
            yield f"hopper {name}", attention_backward_hopper.attention_backward, *given, causal, 0.1, window
        if attention_backward_wide_hopper.takes(q, q, k, v):
            yield f"wide {name}", attention_backward_wide_hopper.attention_backward, *given, causal, window, 0.1


def _matmul() -> Iterator[tuple[Any, ...]]:
    from course_ops.kernels import matmul
    from course_ops.matmul import kernel_for

    for M, N, K in ((4096, 4096, 4096), (512, 4096, 4096), (64, 4096, 4096), (128, 512, 16384)):
        for a_t in (False, True):
            for b_t in (False, True):
                a, b = _of(K, M).t() if a_t else _of(M, K), _of(N, K).t() if b_t else _of(K, N)
                name = f"M={M} N={N} K={K} {a_t=} {b_t=}"
                for kernel in (kernel_for(a, b).launch, matmul.matmul_tma, matmul.matmul_pointers):
                    yield f"{name} {kernel.__name__}", kernel, a, b


def _linear() -> Iterator[tuple[Any, ...]]:
    from course_ops.kernels import linear

    for M, N, K in ((8192, 4096, 2048), (512, 1024, 1024)):
        x, w, bias, outer = _of(M, K), _of(N, K), _of(N), _of(M, N)
        for gelu in (False, True):
            for residual in (None, outer):
                for save in (None, outer):
                    name = f"M={M} {gelu=} residual={residual is not None} save={save is not None}"
                    given = x, w, bias, residual, save
                    for prepare in (linear.prepare_tma, linear.prepare_pointers):
                        yield f"{name} {prepare.__name__}", prepare(*given, gelu), *given


def _matmul_fp8() -> Iterator[tuple[Any, ...]]:
    from course_ops.matmul_fp8 import DISPATCH

    scales = {"tensor": ((1, 1), (1, 1)), "rows": ((4096, 1), (1, 4096)), "blocks": ((4096, 32), (32, 32))}
    a, b = _of(4096, 4096, dtype=FP8), _of(4096, 4096, dtype=FP8).t()
    for scheme, shapes in scales.items():
        for kernel in DISPATCH:
            if scheme in kernel.schemes:
                given = (_of(*shape, dtype=torch.float32) for shape in shapes)
                yield f"{scheme} {kernel.name}", kernel.launch, a, b, *given, scheme


def _grouped_matmul() -> Iterator[tuple[Any, ...]]:
    from course_ops.kernels import grouped_matmul

    for T, E in ((8192, 8), (512, 8), (64, 64)):
        for transposed in (False, True):
            x, offsets = _of(T, 4096), _of(E + 1, dtype=torch.int32)
            w = _of(E, 2048, 4096).transpose(1, 2) if transposed else _of(E, 4096, 2048)
            for kernel in (grouped_matmul.grouped_tma, grouped_matmul.grouped_pointers):
                yield f"T={T} E={E} {transposed=} {kernel.__name__}", kernel, x, w, offsets


# ---- The tests -----------------------------------------------------------------------------------------------------


def ask(name: str, part: int = 0) -> list[list[str]]:
    count, found = call_in_compiler("tests.test_wgmma", "serialized", name, part)
    assert count, "no kernel has wgmma"
    return found


@pytest.mark.night
@pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py")
@pytest.mark.parametrize(
    ("operator", "part"),
    [(name, D) for name in OPERATORS for D in (DIMENSIONS if name.startswith("attention") else (0,))],
)
def test_no_operator_is_serialized(operator, part):
    assert not (found := ask(operator, part)), found


@pytest.mark.night
@pytest.mark.kept
@pytest.mark.parametrize("name", LESSONS)
def test_a_rung_is_serialized_as_its_lesson_says(name):
    """A claim that is no longer true is a failure, too."""
    found = ask(name)
    claimed = {
        (rung, kernel) for rung, claims in LESSONS[name].claimed().items() for claim in claims
        for kernel, _, what in [claim.rpartition(": ")] if what == sass.SERIALIZED
    }  # fmt: skip
    assert {(rung, kernel) for rung, kernel, _ in found} == claimed, found


@pytest.mark.night
@pytest.mark.kept("course_ops/*.py", "course_ops/kernels/*.py")
def test_the_operators_first_shapes_are_not_serialized():
    """What `python -m lessonkit compile course_ops` looks at."""
    found = compiled.kernels(compiled.COURSE_OPS, (90,))
    assert any(kernel.wgmma for kernel in found)
    assert not sass.broken_claims(compiled.COURSE_OPS, {}, found)
