"""Autograd by hand
================
h = relu(x @ w1 + b1), y = h @ w2, loss = mean((y - t)^2). Write what autograd does: from the loss back, each step is
the transpose of the forward's step. Two matmuls forward are four backward, or three here, since dx is not needed.

Predict: the FLOPs of the backward over those of the forward, without dx and with it.
"""

import torch


def loss_and_gradients(x, w1, b1, w2, t):
    """x [N, D], w1 [D, H], b1 [H], w2 [H, C], t [N, C] -> (loss, dw1, db1, dw2). No autograd in here."""
    with torch.no_grad():
        a = x @ w1 + b1
        h = torch.relu(a)
        y = h @ w2
        loss = ((y - t) ** 2).mean()
        # TODO(1): the gradient of the loss with respect to y, [N, C].
        # stub: dy = torch.zeros_like(y)
        dy = 2 * (y - t) / y.numel()
        # END(1)
        # TODO(2): dw2 [H, C] and dh [N, H].
        # stub: dw2, dh = torch.zeros_like(w2), torch.zeros_like(h)
        dw2, dh = h.T @ dy, dy @ w2.T
        # END(2)
        # TODO(3): through the ReLU, then dw1 [D, H] and db1 [H].
        # stub: dw1, db1 = torch.zeros_like(w1), torch.zeros_like(b1)
        da = dh * (a > 0)
        dw1, db1 = x.T @ da, da.sum(0)
        # END(3)
        return loss, dw1, db1, dw2


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same

from torch.utils.flop_counter import FlopCounterMode


def _both(N, D, H, C):
    x, t = torch.randn(N, D), torch.randn(N, C)
    w1, b1, w2 = (torch.randn(*s).requires_grad_() for s in ((D, H), (H,), (H, C)))
    ours = loss_and_gradients(x, w1, b1, w2, t)
    loss = ((torch.relu(x @ w1 + b1) @ w2 - t) ** 2).mean()
    return ours, (loss.detach(), *torch.autograd.grad(loss, (w1, b1, w2)))


def _agrees(which):
    for shape in ((1, 1, 1, 1), (5, 3, 7, 2), (16, 8, 4, 3)):
        ours, theirs = _both(*shape)
        same(f"{('loss', 'dw1', 'db1', 'dw2')[which]} for N D H C = {shape}", ours[which], theirs[which])


def second_layer():
    """dw2 agrees with autograd: it takes dy and h."""
    _agrees(3)


def first_layer():
    """dw1 agrees with autograd: its gradient passes through w2 and the ReLU."""
    _agrees(1)


def bias():
    """db1 agrees with autograd: b1 was added to every row."""
    _agrees(2)


def no_more_work():
    """Two matmuls forward, three backward: as many FLOPs as autograd's, without autograd."""
    N, D, H, C = 16, 8, 4, 3
    x, t, w1, b1, w2 = (torch.randn(*s) for s in ((N, D), (N, C), (D, H), (H,), (H, C)))
    with FlopCounterMode(display=False) as counter:
        loss_and_gradients(x, w1, b1, w2, t)
    same("FLOPs, forward and backward", counter.get_total_flops(), 2 * (2 * N * D * H + 3 * N * H * C))


EXERCISE = Exercise(
    claims=(second_layer, first_layer, bias, no_more_work),
    hints=(
        "A gradient has the shape of what it belongs to: let the shapes choose the transposes.",
        "c = a @ b has da = dc @ b.T and db = a.T @ dc. A mean over n numbers gives each 1/n. What was spread over "
        "rows is "
        "summed over rows.",
        "dy = 2 (y - t) / y.numel(); dw2 = h.T @ dy; dh = dy @ w2.T; da = dh where a > 0, else 0; dw1 = x.T @ da; "
        "db1 = da.sum(0).",
    ),
    predicted=(
        "With dx each matmul of the forward has two in the backward: 2 times the FLOPs. Without dx the factor "
        "is (D + 2C) / (D + C), so 1.5 if D = C."
    ),
    wrong=(
        Wrong("the mean is over rows only", "/ y.numel()", "/ len(y)", "second_layer"),
        Wrong("the square's 2 is forgotten", "2 * (y - t)", "(y - t)", "second_layer"),
        Wrong("the ReLU is left out of the way back", "dh * (a > 0)", "dh", "first_layer"),
        Wrong("the ReLU asks dh instead of a", "dh * (a > 0)", "torch.relu(dh)", "first_layer"),
        Wrong("the bias's gradient is the mean over rows", "da.sum(0)", "da.mean(0)", "bias"),
        Wrong("a product more than needed", "h = torch.relu(a)", "h = torch.relu(x @ w1 + b1)", "no_more_work"),
    ),
)
