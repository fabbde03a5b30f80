"""How far may a gradient be off because a kernel rounds the operands of its matmuls to 16 bits?

PyTorch's own error is no measure where the products cancel: it may be exact there by luck.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DEVIATIONS = 7.5  # a sum of independent rounding errors is farther off once in 10^12 times: 2 exp(-7.5^2 / 2)
PLACE = 0.74  # of eps of a value is its last place in the root mean square, if mantissas are even in their logarithm


class _Multiplied(torch.autograd.Function):
    """a @ b; the gradients with an error as large as it gets if their operands are rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a @ b

    @staticmethod
    def backward(ctx: Any, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, b = ctx.saved_tensors
        return up @ b.mT + _off(up, b.mT, ctx.dtype), a.mT @ up + _off(a.mT, up, ctx.dtype), None


def _off(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a @ b may be off if a and b are rounded to dtype.

    An error is even between -h and h, half of the last place, and its standard deviation is h / sqrt(3). h is at most
    eps / 2 of the value, and PLACE of that in a sum of many. So the sum is off by DEVIATIONS of its own, and never by
    more than all h.
    """
    of_a, of_b = (_half_a_place(t, dtype) for t in (a, b))
    all_of_them = of_a @ b.abs() + a.abs() @ of_b
    variance = (of_a.square() @ b.square() + a.square() @ of_b.square()) / 3
    return torch.minimum(all_of_them, DEVIATIONS * PLACE * variance.sqrt())


def _half_a_place(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the last place of a value, which is largest just above a power of two; 0 of one that is exact in dtype."""
    info = torch.finfo(dtype)
    return torch.where(t.to(dtype).to(t.dtype) == t, 0.0, t.abs().clamp(min=info.tiny) * (info.eps / 2))


class OperandsOff(TorchFunctionMode):
    """Inside, the gradients of matmuls are off as far as a rounding of their operands to dtype makes them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return _Multiplied.apply(*args, self.dtype)
        return func(*args, **(kwargs or {}))
