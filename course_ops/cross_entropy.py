"""Cross-entropy of logits and class indices."""

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import as_rows, expect, expect_device, expect_int, on_device, runs_kernel
from course_ops._registration import once_differentiable
from course_ops.kernels import cross_entropy as kernels
from course_ops.kernels._rows import Choice, Rows, choose

FORWARD = (
    Choice(kernels.cross_entropy_packed, lambda r: r.N <= 1024, "several short rows a program, no loop"),
    Choice(
        kernels.cross_entropy_registers,
        lambda r: r.bytes <= 4608 and r.bytes % 16 == 0 and r.M // r.sms >= 16,
        "many short rows: a warp loads its whole row at once, where a loop would wait for memory two or three times",
    ),
    Choice(
        kernels.cross_entropy_warp,
        lambda r: r.N <= 65536 and r.M // r.sms >= 16,
        "many rows: a warp each, 16 or more on an SM, and none waits for another",
    ),
    Choice(kernels.cross_entropy_split, lambda r: True, "8 warps a program; few rows have several programs each"),
)
REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """logsumexp(logits) - logits[target], as torch.nn.functional.cross_entropy, differentiable.

    logits: [..., V] in float32, float16 or bfloat16, classes in the last dimension. targets: [...] int64; a target of
    ignore_index has no loss and no gradient. A target that is no class gives NaN, on a CPU too. reduction: "mean" over
    the targets that are not ignored (NaN if all are), "sum" or "none". Returns float32 whatever the logits are, as
    under autocast; a scalar, or [...] for "none".
    The logits are read once; two fp32 values a row are kept for the backward, which computes the softmax again. Each
    ignore_index compiles kernels of its own.
    TypeError for another dtype, ValueError for another shape or reduction.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    """
    expect(logits=logits)
    if isinstance(targets, Tensor) and targets.is_floating_point():
        raise TypeError(
            f"targets is {targets.dtype}, expected class indices in torch.int64: for probabilities call "
            "torch.nn.functional.cross_entropy"
        )
    expect(targets=targets, dtypes=(torch.int64,))
    expect_device(logits=logits, targets=targets)
    expect_int(ignore_index=ignore_index)
    if logits.ndim == 0 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected logits' {tuple(logits.shape)} without the last "
            "dimension, which is the classes: pass one target a row "
            "(are classes in dimension 1? logits.movedim(1, -1) moves them)"
        )
    if logits.shape[-1] == 0:
        raise ValueError("logits has no classes, its last dimension is 0: pass one at least")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")
    loss = _cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index)[0]
    if reduction == "none":
        return loss.view(targets.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (targets != ignore_index).sum()


@custom_op("course_ops::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss [M] and lse [M, 2]: the logsumexp in fp32, and what its rounding lost, which the backward needs."""
    if runs_kernel(logits):
        rows = as_rows(logits)
        with on_device(logits):
            return choose(FORWARD, Rows.of(rows))(rows, targets.contiguous(), ignore_index)
    x, (classes, inside) = logits.float(), _classes(targets, logits.shape[1])
    log_p = torch.log_softmax(x, -1)
    loss = torch.where(inside, -log_p.gather(1, classes)[:, 0], torch.nan)
    top = x.amax(-1)
    log_l = (x - top[:, None]).exp().sum(-1).log()
    lse = top + log_l
    of_log_l = lse - top  # TwoSum, as in the kernels
    rest = (top - (lse - of_log_l)) + (log_l - of_log_l)
    return torch.where(targets == ignore_index, 0.0, loss), torch.stack((lse, rest), 1)


@custom_op("course_ops::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    dlogits = _like_rows(logits)
    if runs_kernel(logits):
        rows = as_rows(logits)
        with on_device(logits):
            return kernels.cross_entropy_backward(
                dloss.contiguous(), rows, targets.contiguous(), lse, ignore_index, dlogits
            )
    classes, inside = _classes(targets, logits.shape[1])
    p = torch.exp(logits.float() - lse[:, :1] - lse[:, 1:])
    p.scatter_add_(1, classes, -torch.ones_like(p[:, :1]))
    scale = torch.where(targets == ignore_index, 0.0, torch.where(inside, dloss, torch.nan))
    return dlogits.copy_(p * scale[:, None])


def _classes(targets: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """Targets [M] as an index [M, 1] into V classes, and which of them are classes."""
    return targets.clamp(0, V - 1)[:, None], (targets >= 0) & (targets < V)


def _like_rows(logits: Tensor) -> Tensor:
    """An empty [M, V] for the gradient, whose rows start at the same place within 16 bytes as those of the logits.

    Wide loads can then be wide stores. Its rows are otherwise as close as they can be, whatever the logits are part of.
    """
    M, V = logits.shape
    apart = logits.stride(0) if logits.stride(1) == 1 else V  # as as_rows has it
    return logits.new_empty_strided((M, V), (V + (apart - V) % (16 // logits.element_size()), 1))


@_cross_entropy.register_fake
def _(logits, targets, ignore_index):
    M = logits.shape[0]
    return logits.new_empty(M, dtype=torch.float32), logits.new_empty((M, 2), dtype=torch.float32)


_cross_entropy_backward.register_fake(lambda dloss, logits, targets, lse, ignore_index: _like_rows(logits))


def _setup(ctx, inputs, output):
    logits, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


_cross_entropy.register_autograd(
    lambda ctx, dloss, _: (_cross_entropy_backward(dloss, *ctx.saved_tensors, ctx.ignore_index), None, None),
    setup_context=_setup,
)
once_differentiable(_cross_entropy_backward, "cross_entropy", "torch.nn.functional.cross_entropy")
