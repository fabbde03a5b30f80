"""linear: x W^T with bias, GELU and residual in the matmul's epilogue, differentiable."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import Unsupported, expect, left_operand, num_sms, on_device, runs_kernel
from course_ops._launch import remembered
from course_ops._registration import cast_under_autocast, once_differentiable, unobserved
from course_ops.kernels import linear as kernels
from course_ops.kernels._matmul_plan import aligned_rows, linear_plan
from course_ops.kernels.matmul_hopper import takes
from course_ops.kernels.matmul_tiles_hopper import planned
from course_ops.matmul import _matmul, as_matrix
from course_ops.matmul import prepare as prepare_product

ACTIVATIONS = ("gelu_tanh",)


# Dispatch: the first condition that holds chooses the kernel.
# - There is no epilogue: matmul's own dispatch.
# - A last stride is not 1: copies, then as below.
# - x has 128 rows or fewer: matmul_skinny and a kernel for the epilogue, since tiles of 128 rows would leave SMs idle.
# - There is no residual, and the Hopper kernels take x and w: matmul_tiles_hopper.
# - TMA takes the strides: tma_kernel. Otherwise pointers_kernel.
def _prepare(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, z: Tensor | None, gelu: bool
) -> kernels.Run:
    """gelu(x w^T + bias) + residual for tensors that lie as these do; x w^T + bias goes to z."""
    if bias is None and residual is None and not gelu:
        product = prepare_product(x, w.t())
        return lambda x, w, *_: product(x, w.t())
    given = x, w, bias, residual
    copies = [_unit_stride(t) for t in given]
    if any(copy is not t for copy, t in zip(copies, given, strict=True)):
        x, w, *others = copies
        run = _prepare(x, w, *others, z, gelu)
        return lambda *given: run(*map(_unit_stride, given[:4]), given[4])
    if x.shape[0] <= 128:
        return kernels.prepare_few_rows(x, w, bias, residual, z, gelu)
    if residual is None and takes(x, w.t()):
        plan = linear_plan(len(x), *w.shape, aligned_rows(x), aligned_rows(w), num_sms(x.device))
        tiles = planned(x, w.t(), plan, x.new_empty(x.shape[0], w.shape[0], device="meta"), gelu, z)
        return lambda x, w, bias, _, z: tiles(x, w, x.new_empty(x.shape[0], w.shape[0]), bias, z)
    choose = kernels.prepare_tma if kernels.tma_fits(x, w, residual) else kernels.prepare_pointers
    return choose(x, w, bias, residual, z, gelu)


def _unit_stride(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


# z = x W^T + bias is a second result: the gradient of GELU needs it, and y does not give it back.
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, z: Tensor | None
) -> Tensor:
    gelu = activation == "gelu_tanh"
    if runs_kernel(x):
        with on_device(x):
            y: Tensor = remembered(_prepare, x, weight, bias, residual, z, gelu)(x, weight, bias, residual, z)
            return y
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if z is not None:
        z.copy_(y)
    y = F.gelu(y, approximate="tanh") if gelu else y
    return (y if residual is None else y + residual.float()).to(x.dtype)


def _result(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    """y and z; z is empty without `save`."""
    z = x.new_empty((x.shape[0], weight.shape[0]) if save else 0)
    return _forward(x, weight, bias, residual, activation, z if save else None), z


_linear = torch.library.custom_op("course_ops::linear", _result, mutates_args=())


@_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


@torch.library.custom_op("course_ops::linear_epilogue_backward", mutates_args=())
def _epilogue_backward(dy: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """dz = dy gelu'(z) and its sums over rows; without z only the sums of dy, beside an empty tensor."""
    if runs_kernel(dy):
        with on_device(dy):
            dz, sums = remembered(_prepare_dz_and_sums, dy, z)(dy, z)
    else:
        dz, sums = _dz_and_sums(dy, z)
    return dy.new_empty(0) if z is None else dz, sums


def _prepare_dz_and_sums(dy: Tensor, z: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """dz = dy gelu'(z), or dy itself without z, and its sums over rows, for tensors that lie as these do."""
    if z is None:
        sums = kernels.prepare_column_sums(dy.contiguous())
        return lambda dy, z: (dy, sums(dy.contiguous()))
    if dy.stride(-1) == 1:
        return kernels.prepare_gelu_backward(dy, z)
    run = kernels.prepare_gelu_backward(dy.contiguous(), z)
    return lambda dy, z: run(dy.contiguous(), z)


def _dz_and_sums(dy: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """As _prepare_dz_and_sums, by PyTorch."""
    dz = dy if z is None else torch.ops.aten.gelu_backward(dy, z, approximate="tanh")
    return dz, dz.sum(0)


@_epilogue_backward.register_fake
def _(dy: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    return dy.new_empty(0) if z is None else torch.empty_like(z), dy.new_empty(dy.shape[1])


# One operator makes all gradients. Where nothing observes it (see unobserved), it is called as a function. To call an
# operator costs the host as much as launching kernels, and with few rows the GPU waits for the host.
def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and dbias; an empty tensor for each that is not needed."""
    if runs_kernel(dy):
        with on_device(dy):
            run = remembered(_prepare_gradients, dy, x, weight, z, needs_x, needs_weight, needs_bias)
            gradients: tuple[Tensor, Tensor, Tensor] = run(dy, x, weight, z)
            return gradients
    dz, dbias = _dz_and_sums(dy, z)
    return (
        left_operand(dz) @ weight if needs_x else dy.new_empty(0),
        left_operand(dz.t()) @ x if needs_weight else dy.new_empty(0),
        dbias if needs_bias else dy.new_empty(0),
    )


def _prepare_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """_gradients for tensors that lie as these do."""
    epilogue = needs_bias or (z is not None and (needs_x or needs_weight))
    if epilogue and needs_weight and dy.stride(-1) == 1 and kernels.outer_fits(x, weight):
        return _prepare_gradients_of_few_rows(dy, x, weight, z, needs_x, needs_bias)
    of_dz = _prepare_dz_and_sums(dy, z) if epilogue else lambda dy, z: (dy, None)
    dz = dy if z is None else torch.empty_like(z)
    of_x = prepare_product(dz, weight) if needs_x else None
    of_weight = prepare_product(dz.t(), x) if needs_weight else None

    def run(dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dz, dbias = of_dz(dy, z)
        dx = of_x(dz, weight) if of_x else dy.new_empty(0)
        dw = of_weight(dz.t(), x) if of_weight else dy.new_empty(0)
        return dx, dw, dbias if needs_bias else dy.new_empty(0)

    return run


def _prepare_gradients_of_few_rows(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, needs_x: bool, needs_bias: bool
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """As _prepare_gradients, where dw is wanted and is written by the launch that makes dz and its sums."""
    outer = kernels.prepare_outer(dy, x, z)
    of_x = prepare_product(dy if z is None else torch.empty_like(z), weight) if needs_x else None

    def run(dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dz, dbias, dw = outer(dy, x, z)
        dx = of_x(dz, weight) if of_x else dy.new_empty(0)
        return dx, dw, dbias if needs_bias else dy.new_empty(0)

    return run


_linear_backward = torch.library.custom_op("course_ops::linear_backward", _gradients, mutates_args=())


@_linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        dy.new_empty(x.shape if needs_x else 0),
        dy.new_empty(weight.shape if needs_weight else 0),
        dy.new_empty(weight.shape[0] if needs_bias else 0),
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, activation, save = inputs
    ctx.gelu, ctx.has_bias = activation == "gelu_tanh", bias is not None
    if ctx.gelu and not save and any(ctx.needs_input_grad[:3]):
        raise ValueError("save must be True where a gradient through the activation is wanted: call course_ops.linear")
    ctx.save_for_backward(x, weight, output[1] if ctx.gelu else None)
    ctx.mark_non_differentiable(output[1])


# Each gradient that is not needed costs nothing: two matmuls, and a pass over dy for dz and the sums of it.
def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, z = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (dy, x, weight))):
        call = _gradients if unobserved(dy, x, weight, z) else _linear_backward
        dx, dw, dbias = call(dy, x, weight, z, needs_x, needs_weight, needs_bias)
        return (
            dx if needs_x else None,
            dw if needs_weight else None,
            dbias if needs_bias else None,
            dy if needs_residual else None,
            None,
            None,
        )
    dz, sums = dy, None  # create_graph=True: by operators of which some have derivatives
    if (ctx.gelu and (needs_x or needs_weight)) or needs_bias:
        dz, sums = _epilogue_backward(dy, z)
        dz = dz if ctx.gelu else dy
    return (
        _matmul(dz, weight) if needs_x else None,
        _matmul(dz.t(), x) if needs_weight else None,
        sums if needs_bias else None,
        dy if needs_residual else None,
        None,
        None,
    )


_linear.register_autograd(_backward, setup_context=_setup_context)
once_differentiable(_epilogue_backward, "linear with a bias or an activation", "torch.nn.functional.linear")
once_differentiable(_linear_backward, "linear", "torch.nn.functional.linear")
cast_under_autocast(_linear, "x", "weight", "bias", "residual")


@register_flop_formula(torch.ops.course_ops.linear_backward)
def _flops_backward(
    dy_shape: Any, x_shape: Any, weight_shape: Any, z: Any, needs_x: bool, needs_weight: bool, *_: Any, **__: Any
) -> int:
    return int(2 * (needs_x + needs_weight) * x_shape[0] * x_shape[1] * weight_shape[0])


@register_flop_formula(torch.ops.course_ops.linear)
def _flops(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
    return int(2 * x_shape[0] * x_shape[1] * weight_shape[0])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x W^T + bias) + residual, summed in fp32 and rounded once.

    x: [..., K], weight: [N, K] as nn.Linear keeps it, bias: [N], residual: [..., N]. All have one dtype: fp32, fp16 or
    bf16. Under torch.autocast they are cast to its dtype.
    activation: None or "gelu_tanh" (F.gelu(approximate="tanh")). Returns [..., N]. Differentiable in all tensors; with
    an activation and a gradient to come x W^T + bias is kept for the backward, [..., N] in x's dtype.
    In fp32 the products are exact (IEEE). The gradients, and a forward without bias, activation and residual, are those
    of course_ops.matmul, which takes TF32 where torch.set_float32_matmul_precision allows it.
    Raises TypeError for a dtype, ValueError for a shape or a device, Unsupported for another activation.
    Source: Hendrycks and Gimpel 2016, section 2 (GELU's tanh form).
    """
    others = {"bias": bias, "residual": residual}
    expect(x=x, weight=weight, **{name: t for name, t in others.items() if t is not None}, same_dtype=True)
    if activation is not None and activation not in ACTIVATIONS:
        raise Unsupported(
            f"activation is {activation!r}, expected None or 'gelu_tanh': apply another to linear's result"
        )
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: expected [..., K] and [N, K] (is weight transposed?)"
        )
    shape = (*x.shape[:-1], weight.shape[0])
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}: expected [N] = ({len(weight)},), one for each row of weight"
        )
    if residual is not None and residual.shape != shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}: expected {shape}, the result's; expand it first")
    given = as_matrix(x), weight, bias, None if residual is None else as_matrix(residual), activation or ""
    if unobserved(x, weight, bias, residual):
        y = _forward(*given, None)
    else:
        wants_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        y, _ = _linear(*given, bool(activation) and wants_gradient)
    return y if x.ndim == 2 else y.view(shape)
