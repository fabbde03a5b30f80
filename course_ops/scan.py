"""scan: prefix sums of a vector, from either end, differentiable."""

from typing import Any

import torch
from torch import Tensor

from course_ops._common import expect, expect_bool, on_device, runs_kernel
from course_ops.kernels.scan import scan_look_back, scan_three_phase


@torch.library.custom_op("course_ops::scan", mutates_args=())
def _scan(x: Tensor, reverse: bool) -> Tensor:
    if runs_kernel(x):
        # One pass is up to 1.5 times as fast as three phases, but the order of its additions varies from run to run.
        launch = scan_three_phase if torch.are_deterministic_algorithms_enabled() else scan_look_back
        with on_device(x):
            return launch(x.contiguous(), reverse)
    wide = x.flip(0) if reverse else x
    y = wide.cumsum(0, dtype=torch.float32).to(x.dtype)
    return y.flip(0) if reverse else y


@_scan.register_fake
def _(x: Tensor, reverse: bool) -> Tensor:
    return x.new_empty(x.shape)


# x[i] is in y[i], y[i + 1], ...: its gradient is the sum of dy from i on, a scan from the other end.
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return _scan(dy, not ctx.reverse), None


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.reverse = inputs[1]


_scan.register_autograd(_backward, setup_context=_setup_context)


def scan(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Inclusive prefix sums: y[i] = x[0] + ... + x[i], or x[i] + ... + x[n - 1] if reverse.

    x: [n], fp32, fp16 or bf16, any stride. Returns [n] in its dtype, summed in fp32. Differentiable, any order.
    Two runs on a GPU agree to rounding; to the bit under torch.use_deterministic_algorithms(True), which reads x twice.
    Raises TypeError for a dtype, ValueError unless x has one dimension.
    Source: Merrill and Garland 2016, decoupled look-back.
    """
    expect(x=x)
    if x.ndim != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [n]: for sums along a dimension call torch.cumsum")
    expect_bool(reverse=reverse)
    return _scan(x, reverse)
