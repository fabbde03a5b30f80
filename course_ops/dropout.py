"""Dropout whose mask is computed from a seed and never stored."""

import torch
from torch import Tensor
from torch.library import custom_op

from course_ops._common import expect, expect_bool, expect_number, on_device, runs_kernel
from course_ops.kernels import dropout as kernels

_LOW = 0xFFFFFFFF


def dropout(x: Tensor, p: float, *, training: bool = True, seed: int | None = None) -> Tensor:
    """Each element is 0 with probability p, otherwise x / (1 - p), differentiable.

    - x: any shape and strides, in float32, float16 or bfloat16.
    - p: from 0 to 1.
    - seed: from 0 to 2^63 - 1. The same seed gives the same mask on every device, for every dtype, now and in later
      versions. For None the seed comes from PyTorch's CPU generator, so torch.manual_seed makes it reproducible. Each
      replay of a CUDA graph would have the seed that was there when it was captured: while one is captured, None is an
      error.

    Returns x itself if not training or if p is 0, otherwise a contiguous tensor of x's shape and dtype. The backward
    needs the seed alone. A dropped inf or NaN is 0; torch.nn.functional.dropout makes it NaN.
    Raises TypeError for another dtype, or an option of another type. Raises ValueError for a p or a seed out of range,
    and RuntimeError without a seed while a CUDA graph is captured.
    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3 (Philox).
    """
    expect(x=x)
    expect_number(p=p)
    expect_bool(training=training)
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}, expected a probability from 0 to 1")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is {seed!r}, expected an int or None")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}, expected an int from 0 to 2^63 - 1")
    if not training or p == 0:
        return x
    if seed is None and x.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph would repeat one mask: pass seed=..., or capture without dropout")
    # The seed is a tensor, so that a compiled graph gets a new one in each call. PyTorch's default device may be a GPU.
    cpu = torch.device("cpu")
    drawn = torch.randint(2**63 - 1, (), device=cpu) if seed is None else torch.tensor(seed, device=cpu)
    return _dropout(x, p, drawn)


@custom_op("course_ops::dropout", mutates_args=())
def _dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    x = x.contiguous()
    if not runs_kernel(x):
        keep = keep_mask(x.numel(), p, int(seed), x.device).view(x.shape)
        return torch.where(keep, x.float() / (1 - p) if p < 1 else 0.0, 0.0).to(x.dtype)
    with on_device(x):
        return kernels.dropout(x, p, int(seed))


def keep_mask(n: int, p: float, seed: int, device: torch.device) -> Tensor:
    """The mask of n elements in plain PyTorch: [n] bool, True where an element is kept."""
    kept = [torch.empty(0, dtype=torch.bool, device=device)]
    for call in torch.arange(-(-n // 4), device=device).split(2**20):  # in parts: int64 is 4 times the mask
        words = _philox((call & _LOW, call >> 32, call * 0, call * 0), (seed & _LOW, seed >> 32))
        kept.append(torch.stack(words, dim=-1).flatten() >= round(p * 2**32))
    return torch.cat(kept)[:n]


def _philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four int64 tensors and two ints, all below 2^32 -> four int64 tensors below 2^32."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products: int64 wraps, its bits are still right
        c0, c1, c2, c3 = (b >> 32) & _LOW ^ c1 ^ k0, b & _LOW, (a >> 32) & _LOW ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


_dropout.register_fake(lambda x, p, seed: x.new_empty(x.shape))


def _setup(ctx, inputs, output):
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


_dropout.register_autograd(lambda ctx, dy: (_dropout(dy, ctx.p, *ctx.saved_tensors), None, None), setup_context=_setup)
