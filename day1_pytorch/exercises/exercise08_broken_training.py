"""Debug: a training step with three mistakes
==========================================
This step runs, its loss falls, and it is wrong in three places. A broken training step rarely stops with an error: it
learns more slowly, or evaluates something else. Find the three; change as little as you can.

The contract: `train` takes `steps` steps of SGD, each on the mean of the gradients of `micro` micro-batches. It returns
the mean loss of each step as plain numbers that keep no graph alive. `evaluate` leaves the model in the mode it was in.
"""

import torch


def train(model, batches, micro, lr):
    """batches: [(x, t), ...], micro of them a step. -> [loss of each step]; the model's parameters change."""
    parameters = list(model.parameters())
    losses = []
    for first in range(0, len(batches), micro):
        for p in parameters:
            p.grad = None
        total = 0.0
        for x, t in batches[first : first + micro]:
            loss = torch.nn.functional.mse_loss(model(x), t) / micro
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for p in parameters:
                p -= lr * p.grad
        losses.append(total)
    return losses


def evaluate(model, x, t):
    """The loss with dropout off. -> a number."""
    was = model.training
    model.eval()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(x), t).item()
    model.train(was)
    return loss


# The learner's file ends here.
import copy

from lessonkit.exercise import Exercise, Wrong, same


def _start(micro, count=6):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return model, copy.deepcopy(model), [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(count)]


def _expected(model, batches, micro, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for first in range(0, len(batches), micro):
        x, t = (torch.cat(parts) for parts in zip(*batches[first : first + micro], strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), t).backward()
        optimizer.step()


def steps():
    """With one micro-batch a step, the weights equal those of torch.optim.SGD."""
    ours, theirs, batches = _start(1)
    train(ours, batches, 1, 0.1)
    _expected(theirs, batches, 1, 0.1)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same(f"{name} after {len(batches)} steps", a, b)


def accumulation():
    """Three micro-batches are one batch three times as large."""
    ours, theirs, batches = _start(3)
    train(ours, batches, 3, 0.1)
    _expected(theirs, batches, 3, 0.1)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same(f"{name} after two steps of three micro-batches", a, b)


def plain_losses():
    """Losses are numbers: a tensor with a history would keep the graph of every step in memory."""
    model, _, batches = _start(1)
    losses = train(model, batches, 1, 0.0)
    same("the losses' types", [type(loss).__name__ for loss in losses], ["float"] * len(batches))
    same(
        "losses of a model that does not move",
        [round(v, 5) for v in losses],
        [round(evaluate(model, x, t), 5) for x, t in batches],
    )


def evaluation():
    """evaluate switches dropout off and leaves the model as it was, in training or not."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    x, t = torch.randn(8, 64), torch.randn(8, 64)
    for mode in (True, False):
        model.train(mode)
        same(
            "loss without dropout",
            round(evaluate(model, x, t), 5),
            round(torch.nn.functional.mse_loss(model[0](x), t).item(), 5),
        )
        same("model.training afterwards", model.training, mode)


EXERCISE = Exercise(
    claims=(steps, accumulation, plain_losses, evaluation),
    hints=(
        "Run it in your head twice: what is left over from the first step when the second begins?",
        "backward() adds to .grad. A mean of means needs each divided. What does a loss hold on to?",
        "Clear .grad at the start of each step; divide each micro-batch's loss by `micro`; keep `loss.item()`.",
    ),
    wrong=(
        Wrong("gradients of the steps before are added", "p.grad = None", "p.requires_grad_()", "steps", planted=True),
        Wrong(
            "the gradients of micro-batches are summed, not averaged",
            "model(x), t) / micro",
            "model(x), t)",
            "accumulation",
            planted=True,
        ),
        Wrong(
            "the losses keep every graph alive",
            "loss.item()\n        with",
            "loss\n        with",
            "plain_losses",
            planted=True,
        ),
        Wrong("the model is left in eval mode", "    model.train(was)\n", "", "evaluation"),
        Wrong("dropout stays on", "    model.eval()\n", "", "evaluation"),
        Wrong("the step goes uphill", "p -= lr", "p += lr", "steps"),
    ),
)
