"""How far do rounding errors move an exact answer? An absolute floor for the error budget, from the inputs themselves.

A gradient that is 0 because two terms cancel is exactly 0 in PyTorch where both terms round alike. Another kernel,
just as right, rounds them differently and answers 2e-7. No multiple of PyTorch's error allows that.

Monte Carlo arithmetic (Parker 1997) says what to expect. Compute the reference in float64. Disturb the result of each
operation and the terms of each sum by random rounding errors. See how far the answer moves. The errors are those of
fp32 arithmetic, in which kernels of 16-bit inputs compute too. They are injected 2^17 times smaller, and the movement
is scaled up, so that a comparison in the reference changes its outcome only where two values are equal.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 8  # of four, one element in 300 has moved by less than a fifth of what is usual; of eight one in 40,000
INJECTED = 2.0**-40  # relative; float64 itself rounds at 2^-53
FP32 = torch.finfo(torch.float32)
JUMP = 2.0**-20  # of the largest input or answer: what moves by more is asked whether it is a step of the reference
LESS = 64.0  # so much smaller errors move what is no step less far, if not quite so much less

ONE_BY_ONE = 4096  # a kernel adds up so many elements of a prefix sum one after the other; then blocks in a tree
OPERAND = 1 / 16  # of eps: a budget takes 16 times a movement, so that it takes twice the rounding, eps / 2
LOOKS = 16  # at the partial sums of a matmul, evenly along K

aten = torch.ops.aten
# One operation for PyTorch, several for a kernel, each with a rounding error of its own.
FUSED = get_decompositions(
    [
        aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
        aten.logsumexp, aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.sigmoid_backward,
        aten.tanh_backward, aten.native_layer_norm, aten.native_layer_norm_backward, aten.var, aten.var_mean, aten.std,
    ]
)  # fmt: skip
# What moves, chooses or converts values, and rounds nothing.
EXACT = frozenset(
    [
        "_to_copy", "abs", "amax", "amin", "arange", "argmax", "argmin", "cat", "ceil", "clamp", "clamp_max",
        "clamp_min", "clone", "constant_pad_nd", "copy", "cummax", "cummin", "embedding", "empty", "empty_like",
        "empty_strided", "expand_copy", "eye", "fill", "flip", "floor", "full", "full_like", "gather", "index",
        "index_copy", "index_put", "index_select", "lift_fresh_copy", "masked_fill", "masked_scatter",
        "masked_select", "max", "maximum", "min", "minimum", "neg", "new_empty", "new_empty_strided",
        "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randn", "randn_like",
        "relu", "repeat", "repeat_interleave", "roll", "round", "scalar_tensor", "scatter", "select_backward",
        "sign", "slice_backward", "slice_scatter", "sort", "stack", "topk", "tril", "triu", "trunc", "where",
        "zero", "zeros", "zeros_like",
    ]
)  # fmt: skip


# Each partial sum is rounded: as much as if each term was, or where terms of one sign add up or cancel, as much as the
# partial sums are large.
SUMS = frozenset(["addmm", "baddbmm", "bmm", "cumsum", "dot", "linalg_vector_norm", "mean", "mm", "mv", "sum"])
MATMULS = frozenset(["addmm", "baddbmm", "bmm", "mm"])


class _Disturbed(TorchDispatchMode):
    """Inside, what operations round in float64 carries a random relative error, up to `injected`."""

    def __init__(
        self, seed: int, injected: float, operands: torch.dtype | None, share: float, continued: int
    ) -> None:  # fmt: skip
        super().__init__()
        self.seed, self.injected, self.generators = seed, injected, dict[torch.device, torch.Generator]()
        self.operands, self.share, self.continued = operands, share, continued

    def errors(self, t: torch.Tensor) -> torch.Tensor:
        """The errors of t's values: half to all of `injected`, and of a value that fp32 may flush to 0 all of it."""
        generator = self.generators.get(t.device)
        if generator is None:
            generator = self.generators[t.device] = torch.Generator(t.device).manual_seed(self.seed)
        found = torch.rand(t.shape, generator=generator, dtype=torch.float64, device=t.device) - 0.5
        found += torch.copysign(torch.tensor(0.5, dtype=torch.float64, device=t.device), found)
        found *= self.injected * torch.where(t.isfinite(), t, 0.0)
        return torch.where(t.abs() < FP32.tiny, found / FP32.eps, found)

    def rounded(self, t: torch.Tensor) -> torch.Tensor:
        """An operand of a matmul in a gradient, which a kernel rounds to 16 bits if it has more."""
        if self.operands is None or torch.is_grad_enabled() or not _is_float64(t):
            return t
        info = torch.finfo(self.operands)
        size = torch.where(t.to(self.operands).double() == t, 0.0, t.abs().clamp(min=info.tiny))
        return t + self.errors(size) * (self.share * OPERAND * info.eps / FP32.eps)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUSED:
            with self:
                return FUSED[func](*args, **kwargs)
        if func.overloadpacket.__name__ in MATMULS:
            args = *args[:-2], *map(self.rounded, args[-2:])
        if func.overloadpacket.__name__ in SUMS:
            args = tuple(a + self.errors(a) if _is_float64(a) else a for a in args)
        result = func(*args, **kwargs)
        if func.overloadpacket is aten.cumsum and _is_float64(result) and result.ndim:
            # One partial sum after the other is rounded, and where they were largest the most: a random walk.
            steps = math.sqrt(max(1.0, min(result.shape[args[1]], ONE_BY_ONE) / 3))
            result.add_(self.errors(result.abs().cummax(args[1]).values) * steps)
        elif func.overloadpacket.__name__ in MATMULS and _is_float64(result):
            # Likewise: what sums that come down from larger ones keep of those, and what the last ones bring.
            a, b = args[-2:]
            steps = math.sqrt(min(a.shape[-1], ONE_BY_ONE) / 3)
            total, came_down = _partial_sums(a, b)
            result.add_(self.errors(came_down) * steps)
            # Of equal terms all are rounded to the same side. What is injected into several products has no such side.
            products = 1.0 if torch.is_grad_enabled() else self.continued**1.5
            terms = a.shape[-1] * products
            result.add_(self.errors(result) * torch.where(_of_equal_terms(a, b, total), terms / 128, steps / 4))
        elif func.overloadpacket in (aten.sum, aten.mean) and _is_float64(result):
            # Once at each level of a tree; equal terms are rounded alike there, so that the errors add up.
            levels = math.log2(max(args[0].numel() / max(result.numel(), 1), 2))
            result.add_(self.errors(result) * levels)
        if func.overloadpacket.__name__.rstrip("_") in EXACT:
            return result
        several = isinstance(result, tuple | list)
        for t, said in zip(result if several else [result], func._schema.returns, strict=False):
            fresh = said.alias_info is None or said.alias_info.is_write  # not a view of what is disturbed already
            if fresh and isinstance(t, torch.Tensor) and t.dtype == torch.float64:
                t.add_(self.errors(t))
        return result


def _partial_sums(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a @ b; and how much larger its partial sums were than each element, in the root mean square."""
    step = max(1, -(-a.shape[-1] // LOOKS))
    total = squares = a.new_zeros(*a.shape[:-1], b.shape[-1])
    parts = list(zip(a.split(step, -1), b.split(step, -2), strict=True))
    for left, right in parts:
        total = total + left @ right
        squares = squares + total.square() / len(parts)
    return total, (squares - total.square()).clamp(min=0).sqrt()


def _of_equal_terms(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Whether all terms along K of an element of a @ b, which is total, are equal.

    A partial sum is rounded by a quarter of its last place or so. Terms that differ make a random walk of that. Equal
    terms are rounded alike for as long as the sum keeps its exponent, n / 2 of them in the end. So such a sum is off by
    n / 8 roundings or so, and a budget takes 16 times a movement.
    """
    return a.shape[-1] * (a.square() @ b.square()) <= (1 + 1e-6) * total.square()  # Cauchy and Schwarz: at least


def moved(
    answer: Callable[..., Sequence[torch.Tensor]],
    args: Sequence[Any],
    exact: Sequence[torch.Tensor],
    samples: int = SAMPLES,
    operands: torch.dtype | None = None,
    share: float = 1.0,
    continued: int = 1,
) -> tuple[torch.Tensor, ...]:
    """How far fp32 rounding errors move each element of `exact`, which is answer(*args), in the root mean square.

    args: the inputs in float64. operands: a dtype of 16 bits, to which a gradient's operands of matmuls are rounded
    besides; share: of that rounding, what is injected. continued: a kernel adds up the terms of so many of a gradient's
    matmuls one after the other. A result that is no floating-point tensor does not move. Neither
    does what jumps: a step of the reference is as high for a smaller error. Of what only moves far, as the quotient of
    two values that nearly cancel, fp32 keeps no digit, and no answer can be right in one.
    """
    largest = max((_largest(a) for a in args if _is_float64(a)), default=0.0)
    total = [torch.zeros_like(e, dtype=torch.float64) for e in exact]

    def by(seed: int, injected: float) -> list[torch.Tensor | None]:
        with _Disturbed(seed, injected, operands, share, continued):
            found = answer(*args)
        both = zip(found, exact, strict=True)
        return [
            (f.double() - e.double()).abs().nan_to_num(0.0, 0.0) if e.is_floating_point() else None for f, e in both
        ]

    for seed in range(samples):
        moves = by(seed, INJECTED)
        limits = [JUMP * max(largest, _largest(e)) for e in exact]
        far = any(m is not None and bool((m > limit).any()) for m, limit in zip(moves, limits, strict=True))
        smaller = by(seed, INJECTED / LESS) if far else moves
        for sum_, move, less, limit in zip(total, moves, smaller, limits, strict=True):
            if move is not None and less is not None:
                jumps = (move > limit) & (less > 8 / LESS * move)
                sum_ += torch.where(jumps, 0.0, move).square()
    return tuple((sum_ / samples).sqrt() * (FP32.eps / INJECTED) for sum_ in total)


def _is_float64(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def _largest(t: torch.Tensor) -> float:
    return t.double().abs().nan_to_num(0.0, 0.0).amax().item() if t.numel() else 0.0
