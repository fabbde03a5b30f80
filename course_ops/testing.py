"""For tests without a GPU: run the operators' kernels in Triton's interpreter, or only compile them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import custom_op

import course_ops
from course_ops import _common


def interpreted() -> AbstractContextManager[None]:
    """Inside `with interpreted():` CPU tensors are computed by the kernels, one program after another, slowly.

    Raises RuntimeError unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if not _common.triton_interprets():
        raise RuntimeError("Triton decides at import: set TRITON_INTERPRET=1 in the environment, then start Python")
    return _common.interpreting()


@contextmanager
def kernels() -> Iterator[None]:
    """Inside `with kernels():`, or below `@kernels()`, kernels run: on a GPU, and interpreted where there is none.

    Raises RuntimeError without a GPU unless TRITON_INTERPRET=1 was set before Triton was imported.
    """
    if torch.cuda.is_available() and not _common.triton_interprets():
        yield
    else:
        with interpreted():
            yield


@contextmanager
def launchers() -> Iterator[None]:
    """Inside, calling an operator runs its launcher directly, on meta tensors too, and PyTorch records no gradient.

    For a process in which a launch only compiles: what the launcher asks of PyTorch and of Triton can be watched.
    """

    def launcher(operator: Any, *args: Any, **options: Any) -> Any:
        return operator._init_fn(*args, **options)

    with _common.interpreting(), mock.patch.object(_Operator, "__call__", launcher), torch.no_grad():
        yield


def calls() -> dict[str, Callable[[], None]]:
    """Calls on meta tensors that launch every operator's kernels, forward and backward, by name.

    For a process in which a launch only compiles. It is that process's to keep: from the first call on, operators
    there run their launchers where PyTorch asks for shapes alone.
    """
    return {name: partial(_launch, call) for name, call in _examples().items()}


def _launch(call: Callable[[], Tensor]) -> None:
    for module in [m for name, m in sys.modules.items() if name.startswith("course_ops.")]:
        for value in vars(module).values():
            if isinstance(value, _Operator):
                value.register_fake(value._init_fn)
    with _common.interpreting():
        out = call()
        if out.requires_grad:
            out.backward(torch.empty_like(out))


_Operator = type(custom_op("course_ops::nothing", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"))
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def _of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype in _common.FLOATS)


def _fp8(scheme: str) -> Tensor:
    n = 4096
    a_scale, b_scale = {"tensor": ((1, 1), (1, 1)), "rows": ((n, 1), (1, n)), "blocks": ((n, 32), (32, 32))}[scheme]
    scales = [torch.empty(shape, device="meta") for shape in (a_scale, b_scale)]
    a, b = _of(n, n, dtype=FP8), _of(n, n, dtype=FP8).t()
    return course_ops.matmul_fp8(a, scales[0], b, scales[1])


def _heads(D: int, S_q: int = 4096, dtype: torch.dtype = BF16) -> Tensor:
    q, k, v = _of(2, 32, S_q, D, dtype=dtype), _of(2, 8, 4096, D, dtype=dtype), _of(2, 8, 4096, D, dtype=dtype)
    if S_q < 4096:  # steps of decoding, whose gradient is not asked for
        q, k, v = q.detach(), k.detach(), v.detach()
    return course_ops.attention(q, k, v, causal=True)


def _pages(block_size: int, D: int = 128, S_q: int = 1, dtype: torch.dtype = BF16, **options: int) -> Tensor:
    q, k, v = (_of(*shape, D, dtype=dtype).detach() for shape in ((8, S_q, 32), *2 * ((4096, block_size, 8),)))
    lengths, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((8,), (8, 512)))
    return course_ops.attention_paged(q, k, v, lengths, table, **options)


def _packed(D: int, dtype: torch.dtype) -> Tensor:
    q, k, v = (_of(16384, H, D, dtype=dtype) for H in (32, 8, 8))
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta")
    return course_ops.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 4096, 4096, causal=True)


def _matmuls(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    def grouped() -> Tensor:
        offsets = torch.empty(9, dtype=torch.int32, device="meta")
        return course_ops.grouped_matmul(
            _of(8192, 4096, dtype=dtype), _of(8, 4096, 4096, dtype=dtype).detach(), offsets
        )

    def linear() -> Tensor:
        x, w, bias, y = (_of(*shape, dtype=dtype) for shape in ((8192, 2048), (4096, 2048), (4096,), (8192, 4096)))
        return course_ops.linear(x, w, bias, activation="gelu_tanh", residual=y)

    def few_rows() -> Tensor:
        return course_ops.linear(*(_of(*shape, dtype=dtype) for shape in ((16, 2048), (4096, 2048), (4096,))))

    def matmul(M: int) -> Tensor:
        return course_ops.matmul(_of(M, 4096, dtype=dtype).detach(), _of(4096, 4096, dtype=dtype).detach())

    def transposed() -> Tensor:
        return course_ops.matmul(_of(1, 4096, dtype=dtype).detach(), _of(4096, 4096, dtype=dtype).detach().t())

    def copied() -> Tensor:  # rows of 10,000 bytes begin within a sector
        return course_ops.matmul(_of(5000, 5000, dtype=dtype).detach(), _of(5000, 5000, dtype=dtype).detach())

    # On Hopper in 16 bits: 3200 rows are tiles of 160 columns, 4608 are tiles of 192 rows.
    rows = (1, 16, 512, 4096) if dtype == FP32 else (1, 16, 512, 3200, 4096, 4608)
    named = {"grouped": grouped, "linear": linear, "linear M=16": few_rows}
    named |= {f"matmul M={M}": partial(matmul, M) for M in rows} | {"matmul M=1 transposed": transposed}
    if dtype == BF16:
        named["matmul M=5000"] = copied
    return {f"{name} {str(dtype)[6:]}": call for name, call in named.items()}


def _in_one_order() -> Tensor:
    """A scan of the same bits in every run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return course_ops.scan(_of(2**24))
    finally:
        torch.use_deterministic_algorithms(before)


# Lengths of rows that have kernels of their own.
LENGTHS = {
    "softmax": (4096, 12288, 50257, 131072, 2**23),
    "rms_norm": (1024, 4096, 12288, 50257, 131072, 2**23),
    "layer_norm": (1024, 4096, 12288, 50257, 131072, 2**23),
    "cross_entropy": (1024, 4096, 131072),
}


def _examples() -> dict[str, Callable[[], Tensor]]:
    """At sizes of the lessons' benches, and where another kernel serves: together they launch every kernel there is."""
    ops, found = course_ops, dict[str, Callable[[], Tensor]]()
    for N in sorted({N for lengths in LENGTHS.values() for N in lengths}):
        x, w, targets = _of(1024, N), _of(N), torch.empty(1024, dtype=torch.long, device="meta")
        of_length = {
            "softmax": partial(ops.softmax, x),
            "rms_norm": partial(ops.rms_norm, x, w),
            "layer_norm": partial(ops.layer_norm, x, w, w),
            "cross_entropy": partial(ops.cross_entropy, x, targets),
        }
        found |= {f"{name} N={N}": call for name, call in of_length.items() if N in LENGTHS[name]}
    narrow = _of(4096, 1024)
    found["add_norm N=1024"] = lambda: ops.add_norm(narrow, narrow, narrow[0], narrow[0])[0]
    x, w = _of(4096, 4096), _of(4096)
    found["add_norm"] = lambda: ops.add_norm(x, x, w, w)[0]
    found["gelu"] = partial(ops.gelu, x)
    found["dropout"] = partial(ops.dropout, x, 0.5, seed=1)
    found["scan"] = partial(ops.scan, _of(2**24))
    found["scan in one order"] = _in_one_order
    for D in (64, 128, 256):
        found[f"attention D={D} bfloat16"] = partial(_heads, D)
    for D, dtype in ((128, BF16), (64, FP32)):
        found[f"attention_varlen D={D} {str(dtype)[6:]}"] = partial(_packed, D, dtype)
    found["attention D=128 float32"] = partial(_heads, 128, dtype=FP32)
    found["attention decoding bfloat16"] = partial(_heads, 128, 1)
    found["attention decoding D=256 S_q=8 float32"] = partial(_heads, 256, 8, FP32)
    for size in (16, 64, 256):  # a step has keys of several blocks, or of one
        found[f"attention_paged block_size={size} bfloat16"] = partial(_pages, size)
    found["attention_paged window=1024 bfloat16"] = partial(_pages, 64, window=1024)
    found["attention_paged D=256 S_q=16 bfloat16"] = partial(_pages, 64, 256, 16)
    found["attention_paged D=64 float32"] = partial(_pages, 16, 64, dtype=FP32)
    found["attention_paged D=256 S_q=16 float32"] = partial(_pages, 16, 256, 16, FP32)
    found |= _matmuls(BF16) | _matmuls(FP32)
    for scheme in ("tensor", "rows", "blocks"):
        found[f"matmul_fp8 {scheme}"] = partial(_fp8, scheme)
    for scheme in ("tensor", "blocks"):
        found[f"quantize {scheme}"] = lambda scheme=scheme: ops.quantize(x.detach(), scheme)[1]
    return found
