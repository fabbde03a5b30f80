"""GELU in its tanh form."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from course_ops._common import expect, on_device, runs_kernel
from course_ops._registration import once_differentiable
from course_ops.kernels import gelu as kernels


def gelu(x: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as F.gelu(x, approximate="tanh"), differentiable.

    x: any shape and strides, in float32, float16 or bfloat16. Returns a contiguous tensor of x's shape and dtype,
    computed in fp32 and rounded once. Saves x for the backward. One kernel serves all sizes: 1024 elements per program.
    TypeError for another dtype.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    expect(x=x)
    return _gelu(x)


@custom_op("course_ops::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    if not runs_kernel(x):
        return F.gelu(x.contiguous().float(), approximate="tanh").to(x.dtype)
    with on_device(x):
        return kernels.gelu(x.contiguous())


@custom_op("course_ops::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    if not runs_kernel(x):
        return torch.ops.aten.gelu_backward(dy.float(), x.float(), approximate="tanh").to(x.dtype)
    with on_device(x):
        return kernels.gelu_backward(dy, x)


_gelu.register_fake(lambda x: x.new_empty(x.shape))
_gelu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
_gelu.register_autograd(
    lambda ctx, dy: _gelu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
once_differentiable(_gelu_backward, "gelu", "torch.nn.functional.gelu")
