"""The last layer of a language model and its loss: the mean cross-entropy of x W^T.

x [M, K], W [V, K], targets [M] int64, -100 for a row that is ignored -> loss [] in fp32. PROBLEM_BACKWARD asks for the
loss and the gradients dx [M, K], dW [V, K] at once, as one step of training needs them. Asked of course_ops alone; its
tests hold the small cases.
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Problem, Work, by_inductor

import torch
import torch.nn.functional as F

LUCK = 16  # the loss is one number: where PyTorch's rounding cancels by chance, it is no measure of ours


def reference(x, w, targets):
    logits = x @ w.t()  # [M, V]: at 8192 x 128256 2 GB in 16 bits, and twice that in fp32
    return F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), targets)


def inputs(M, K, V, dtype=torch.float32):
    # Logits spread by 2, so that no class has all of a row; every fifth row is ignored.
    x, w = torch.randn(M, K, device=DEVICE), torch.randn(V, K, device=DEVICE) * (2 / math.sqrt(K))
    targets = V - 1 - torch.arange(M, device=DEVICE) * 7919 % V
    targets[2::5] = -100
    return x.to(dtype), w.to(dtype), targets


def reference_backward(x, w, targets):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = reference(*leaves, targets)
        return loss.detach(), *torch.autograd.grad(loss, leaves)


def _liger(gradients):
    def call(x, w, targets):
        forward = import_module("liger_kernel.ops.fused_linear_cross_entropy").fused_linear_cross_entropy_forward
        answer = forward(x, w, targets, compute_gradients=gradients, weight_requires_grad=gradients)
        return (answer[0], *answer[4:6]) if gradients else answer[0]

    return call


# As it comes: its search would time 44 configurations of each of the matmuls and epilogues that a call chains, and it
# takes no shorter list (problems/quack_search.py).
def _quack(x, w, targets):
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy(*leaves, targets, tuned=False)
        return loss.detach(), *torch.autograd.grad(loss, leaves)


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda M, K, V, dtype: Work(bytes=(M * K + V * K) * dtype.itemsize + 8 * M + 4, flops=2 * M * K * V),
    peers={"torch": reference, "torch.compile": by_inductor(reference), "liger": _liger(False)},
    factor=LUCK,
)
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs,
    work=lambda M, K, V, dtype: Work(bytes=2 * (M * K + V * K) * dtype.itemsize + 8 * M + 4, flops=6 * M * K * V),
    peers={"torch": reference_backward, "liger": _liger(True), "quack": _quack},
    factor=LUCK,
)
