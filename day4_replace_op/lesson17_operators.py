"""Operators of our own: attention, LayerNorm, GELU and cross-entropy as PyTorch sees them
======================================================================================
Three declarations make a kernel an operator (day 1, lesson 8):

- A schema, read from type hints.
- A fake, which returns shapes, dtypes and strides without data.
- A backward, here an operator itself, so that a compiler sees one node in either direction.

A profiler needs two more things: the operator's FLOPs, declared for FLOP counters, and its bytes. The bytes are those
of its arguments and results.

GELU is written out below, from its two kernels to its gradient. The finished operators are in course_ops, one file
each, with the same declarations: read course_ops/layer_norm.py, 140 lines, after this lesson. There PyTorch computes
CPU tensors; inside course_ops.testing.kernels() the kernels run on a CPU too, interpreted.

What each operator saves for its backward, per token, with D features, H heads and V classes in bf16:

    attention        q, k, v, out and lse    8 D + 4 H bytes; the T x T weights are computed again
    layer_norm       x, mean, rstd           2 D + 8 bytes; y is computed again, if it is needed
    gelu             x                       2 bytes per feature
    cross_entropy    logits, lse             2 V + 4 bytes; the softmax, 4 V more in eager PyTorch, is computed again

A call of an operator takes host time too, as day 1's lesson 8 measures. While a kernel of 100 us runs, the host
prepares the next call. If kernels take 5 us, the host's time is the limit.

You will learn: operators that survive autograd, torch.compile and opcheck; what to save; what a FLOP counter counts.
Run it:    python3 course.py run lesson17_operators
"""

import math

from lessonkit import DEVICE, About, Steps

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, opcheck
from torch.utils.flop_counter import FlopCounterMode

import course_ops
from course_ops.attention import visible_pairs
from course_ops.testing import kernels

# ---- A kernel and its gradient (day 2, lesson 3): gelu(x) = x s, s = logistic(2u), u = SLOPE (x + CUBIC x^3) ---------
CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(math.sqrt(2 / math.pi))
LINEAR = tl.constexpr(-2 * SLOPE.value * math.log2(math.e))  # exp(-2u) as a power of 2
LINEAR_CUBIC = tl.constexpr(LINEAR.value * CUBIC.value)


@triton.jit
def gelu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    y = x / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def gelu_backward_kernel(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):  # [n] each
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptr + offsets, mask=mask).to(tl.float32)
    s = 1 / (1 + tl.exp2(x * (x * x * LINEAR_CUBIC + LINEAR)))
    slope = (x * x * (3 * CUBIC) + 1) * (2 * SLOPE)
    tl.store(dx_ptr + offsets, dy * (s + x * s * (1 - s) * slope), mask=mask)


# ---- The operator -------------------------------------------------------------------------------------------------


# The schema is read from the type hints. mutates_args=() promises that no argument is written to. A result must not
# share memory with an argument or with another result, since a compiler may reuse the memory of either.
@custom_op("course::gelu", mutates_args=())
def gelu(x: Tensor) -> Tensor:
    """[...] -> [...], the tanh form."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():  # an empty grid is an error in CUDA
        gelu_kernel[(triton.cdiv(x.numel(), 1024),)](x.contiguous(), y, x.numel(), BLOCK=1024)
    return y


# A gradient may have any strides: that of a sum is expanded, with strides of 0.
@custom_op("course::gelu_backward", mutates_args=())
def gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        gelu_backward_kernel[grid](x.contiguous(), dy.contiguous(), dx, x.numel(), BLOCK=1024)
    return dx


# The fakes return what torch.compile has to know: shape, dtype, device and strides of the results. As y is contiguous,
# so is x.new_empty(x.shape). With torch.empty_like(x), which has x's strides, opcheck would fail for a transposed x.
gelu.register_fake(lambda x: x.new_empty(x.shape))
gelu_backward.register_fake(lambda dy, x: x.new_empty(x.shape))
gelu.register_autograd(
    lambda ctx, dy: gelu_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ---- Claims -------------------------------------------------------------------------------------------------------


def _operator_calls():
    """An operator, its arguments, and PyTorch's answer; sizes at which no tile is full."""
    shipped = torch.ops.course_ops
    q, k, v = (torch.randn(2, h, s, 64, device=DEVICE) for h, s in ((4, 3), (2, 5), (2, 5)))
    x, w, b = torch.randn(2, 3, 37, device=DEVICE), torch.rand(37, device=DEVICE) + 0.5, torch.randn(37, device=DEVICE)
    logits, targets = torch.randn(5, 131, device=DEVICE), torch.tensor([0, 130, -100, 7, 7], device=DEVICE)
    seen = torch.ones(3, 5, dtype=torch.bool, device=DEVICE).tril(2)  # lower right: is_causal=True would be upper left
    by_pytorch = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    yield shipped.attention.default, (q, k, v, True, None, None), by_pytorch
    yield shipped.layer_norm.default, (x, w, b, 1e-5), F.layer_norm(x, (37,), w, b)
    yield gelu, (x,), F.gelu(x, approximate="tanh")
    yield gelu, (x.mT,), F.gelu(x.mT, approximate="tanh")
    yield shipped.gelu.default, (x,), F.gelu(x, approximate="tanh")
    yield shipped.cross_entropy.default, (logits, targets, -100), F.cross_entropy(logits, targets, reduction="none")


@kernels()
def operators_are_sound():
    """Each answer is PyTorch's, and opcheck confirms that schema, fake and gradient agree with the kernel."""
    for op, args, expected in _operator_calls():
        found = op(*args)
        torch.testing.assert_close(found if isinstance(found, Tensor) else found[0], expected, rtol=1e-4, atol=1e-5)
        leaves = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        assert set(opcheck(op, tuple(leaves)).values()) == {"SUCCESS"}


@kernels()
def work_is_known():
    """A FLOP counter sees 4 D per visible pair and head forward, and 10 D backward; a causal mask halves the pairs."""
    for causal in (False, True):
        q, k, v = (torch.randn(1, 2, 16, 64, device=DEVICE, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as flops:
            course_ops.attention(q, k, v, causal=causal).sum().backward()
        assert visible_pairs(16, 16, causal) == (16 * 17 // 2 if causal else 16**2)
        assert flops.get_total_flops() == 14 * 2 * visible_pairs(16, 16, causal) * 64


LESSON = Steps(
    (operators_are_sound, work_is_known),
    about=About(
        teaches="a kernel becomes an operator: schema, fake, backward, opcheck; what each operator of "
        "[course_ops](../course_ops/README.md) saves, and its FLOPs",
        hours=0.75,
        star=True,
    ),
)

if __name__ == "__main__":
    LESSON.main()
