"""Cross-entropy by hand: its gradient is one formula
======================================================
loss = mean over rows of log(sum(exp(z))) - z[target]. Its gradient is (softmax(z) - onehot(target)) / N, without a
logarithm. With V = 50,000 columns the logits are the largest tensor of a language model, so a fused kernel overwrites
them with the gradient. Here you write it in PyTorch, safe for any logits.

Predict: the sum of the gradient over a row.
"""

import torch


def cross_entropy(z, target):
    """z [N, V], target [N] int64 (-100: this row does not count) -> (loss, dz), both of z's dtype; no autograd."""
    # TODO(1): the loss: a maximum first, then log-sum-exp. Rows with target -100 add nothing.
    # stub: loss = z.new_zeros(())
    counts = target != -100
    m = z.amax(1, keepdim=True)
    e = (z - m).exp()
    lse = (m + e.sum(1, keepdim=True).log()).squeeze(1)
    at = torch.where(counts, target, 0)
    rows = torch.arange(len(z))
    loss = torch.where(counts, lse - z[rows, at], 0).sum() / counts.sum()
    # END(1)
    # TODO(2): its gradient.
    # stub: dz = torch.zeros_like(z)
    # On paper exp(z - lse) is the same. At logits of 1000, lse has lost the digits that matter.
    dz = e / e.sum(1, keepdim=True)
    dz[rows, at] -= 1
    dz *= (counts / counts.sum())[:, None]
    # END(2)
    return loss, dz


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same


def _questions(scale=1.0, ignored=False):
    for N, V in ((1, 2), (4, 7), (16, 100)):
        z, target = scale * torch.randn(N, V), torch.randint(V, (N,))
        if ignored and N > 1:
            target[::3] = -100
        z.requires_grad_()
        loss = torch.nn.functional.cross_entropy(z, target)
        (dz,) = torch.autograd.grad(loss, z)
        yield f"N={N} V={V} logits to {scale:g}", cross_entropy(z.detach(), target), loss.detach(), dz


def loss():
    """The loss is PyTorch's."""
    for what, ours, theirs, _ in _questions():
        same(f"loss for {what}", ours[0], theirs)


def large_logits():
    """Logits of 1000 overflow exp in fp32; with the maximum subtracted they do not."""
    for what, ours, theirs, _ in _questions(1000.0):
        same(f"loss for {what}", ours[0], theirs)


def ignored_rows():
    """A row whose target is -100 adds nothing, and the mean is over the others."""
    for what, ours, theirs, _ in _questions(ignored=True):
        same(f"loss for {what}, every third row ignored", ours[0], theirs)


def gradient():
    """dz is (softmax - onehot) / rows that count, and 0 in the others."""
    for scale, ignored in ((1.0, False), (1.0, True), *((1000.0, False),) * 20):
        for what, ours, _, dz in _questions(scale, ignored):
            same(f"dz for {what}{', every third row ignored' * ignored}", ours[1], dz)


EXERCISE = Exercise(
    claims=(loss, large_logits, ignored_rows, gradient),
    hints=(
        "Write log-sum-exp as m + log(sum(exp(z - m))). d lse / dz is the softmax.",
        "`z[rows, target]` picks one column of each row. -100 is a valid index in Python only by accident: replace "
        "it first.",
        "e = exp(z - m), softmax = e / e.sum(1, keepdim=True); subtract 1 at [row, target]; multiply rows that count "
        "by 1 / their number, "
        "others by 0.",
    ),
    predicted="The sum is 0: a softmax adds up to 1, and so does onehot.",
    wrong=(
        Wrong("no maximum is subtracted", "m = z.amax(1, keepdim=True)", "m = torch.zeros(len(z), 1)", "large_logits"),
        Wrong("the maximum is not added back", "(m + e.sum", "(e.sum", "loss"),
        Wrong(
            "exp(z - lse): a large lse is rounded to more than the answer may be off",
            "dz = e / e.sum(1, keepdim=True)",
            "dz = (z - lse[:, None]).exp()",
            "gradient",
        ),
        Wrong("ignored rows count in the mean", "0).sum() / counts.sum()", "0).mean()", "ignored_rows"),
        Wrong("ignored rows count in the gradient", "(counts / counts.sum())[:, None]", "1 / counts.sum()", "gradient"),
        Wrong("the gradient is of the sum", "counts / counts.sum()", "counts * 1.0", "gradient"),
        Wrong("the one-hot is not subtracted", "dz[rows, at] -= 1", "dz[rows, at] -= 0", "gradient"),
    ),
)
