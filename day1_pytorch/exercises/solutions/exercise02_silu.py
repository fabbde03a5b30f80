"""Exercise 2: a backward that remembers less
==========================================
silu(x) = x * sigmoid(x). Written with two operators, autograd keeps x, and sigmoid(x) twice over: once for the
product, once for the sigmoid itself (the same storage, so 2n elements in all). A torch.autograd.Function that keeps
x alone and computes sigmoid(x) again keeps n: that trade, memory for arithmetic, is what a fused kernel makes.

Predict: silu'(x) at 0, and its limits at both ends. Is silu monotonic?
Run it:    python day1_pytorch/exercises/exercise02_silu.py
Hints:     in the day's README. A solution: solutions/exercise02_silu.py
"""

from lessonkit import Steps, show

import torch


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        # Yours:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)
        # End of yours.

    @staticmethod
    def backward(ctx, dy):
        # Yours:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))
        # End of yours.


def silu(x):
    """x * sigmoid(x), keeping x and nothing else for the backward."""
    return _Silu.apply(x)


def values():
    """The forward is right, also where exp(-x) would overflow."""
    x = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4])
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))


def gradient():
    """The backward agrees with finite differences in float64, and with PyTorch's own in float32."""
    x = torch.linspace(-6, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(silu, x)
    wide = torch.tensor([-1e4, -20.0, 0.0, 20.0, 1e4])
    ours, theirs = wide.clone().requires_grad_(), wide.clone().requires_grad_()
    up = torch.randn(5)
    silu(ours).backward(up)
    torch.nn.functional.silu(theirs).backward(up)
    torch.testing.assert_close(ours.grad, theirs.grad)


def keeps_one_tensor():
    """What is saved for the backward is x itself: n elements, where the two operators keep 2n."""

    def kept(fn):
        storages = {}

        def pack(t):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(1000, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = fn(x)
        return sum(storages.values()), out

    least, two_operators = kept(silu)[0], kept(lambda x: x * torch.sigmoid(x))[0]
    assert two_operators == 8000
    assert least == 4000, f"{least} bytes are kept, expected the 4000 of x"


EXERCISE = Steps(steps=(values, gradient, keeps_one_tensor))

if __name__ == "__main__":
    show.steps("__main__", EXERCISE)
