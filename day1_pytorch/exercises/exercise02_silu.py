"""A backward that remembers less
==============================
silu(x) = x * sigmoid(x). With two operators autograd saves x, and sigmoid(x) twice: for the multiplication and for the
sigmoid itself. Both share one storage, so 2n elements in all. A torch.autograd.Function that saves x alone and computes
sigmoid(x) again saves n. A fused kernel does the same: it spends arithmetic to save memory.

Predict: silu'(x) at 0, and its limits at both ends. Is silu monotonic?
"""

import torch


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        # TODO(1): keep what the backward needs, and nothing else; return x * sigmoid(x).
        # stub: return x * torch.sigmoid(x)
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)
        # END(1)

    @staticmethod
    def backward(ctx, dy):
        # TODO(2): dy times silu'(x), from x alone.
        # stub: return dy
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * s * (1 + x * (1 - s))
        # END(2)


def silu(x):
    """x * sigmoid(x), keeping x and nothing else for the backward."""
    return Silu.apply(x)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same


def values():
    """The forward is right, also where exp(-x) would overflow."""
    x = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4])
    same("silu([-1e4, -100, -1, 0, 1, 100, 1e4])", silu(x), torch.nn.functional.silu(x))


def gradient():
    """The backward is silu'(x) dy, also far from 0."""
    x = torch.tensor([-1e4, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    up = torch.randn(len(x))
    silu(ours).backward(up)
    torch.nn.functional.silu(theirs).backward(up)
    same("dx at x = [-1e4, -20, -1, 0, 1, 20, 1e4]", ours.grad, theirs.grad)


def keeps_one_tensor():
    """The backward's only saved tensor is x itself: n elements, where the two operators save 2n."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = silu(x)
    assert kept.requires_grad
    assert storages, (
        "nothing was kept by ctx.save_for_backward; a tensor that is kept as an attribute of ctx is not seen by "
        "autograd's hooks, nor by its check for tensors that were changed in place"
    )
    same("bytes kept for 1000 elements", sum(storages.values()), 4000)


EXERCISE = Exercise(
    claims=(values, gradient, keeps_one_tensor),
    hints=(
        "s = sigmoid(x) has s' = s (1 - s). Write d(x s)/dx with x and s only.",
        "`ctx.save_for_backward(x)` in forward; `(x,) = ctx.saved_tensors` in backward, and compute s again.",
        "silu'(x) = s + x s (1 - s) = s (1 + x (1 - s)).",
    ),
    predicted=(
        "silu'(0) is 1/2. The limits are 0 on the left and 1 on the right. silu is not monotonic: it falls "
        "down to x = -1.28 and rises from there."
    ),
    wrong=(
        Wrong("dy is forgotten", "return dy * s", "return s", "gradient"),
        Wrong("the product rule's second term is missing", "s * (1 + x * (1 - s))", "s", "gradient"),
        Wrong("the sign of x", "(1 + x *", "(1 - x *", "gradient"),
        Wrong(
            "what is kept is a part of something twice as large, and keeps all of it alive",
            "ctx.save_for_backward(x)",
            "ctx.save_for_backward(torch.stack([x, x])[0])",
            "keeps_one_tensor",
        ),
    ),
)
