"""Training: a plain loop on real images
=====================================
Forward, loss, backward, update: these four lines are in every training script. Here they train an MLP and a CNN on
1,437 handwritten digits. An untrained classifier of ten classes guesses, so its loss is ln 10 = 2.30. Trained for a few
epochs, it names more than 95% of 360 other digits. Lesson 10 measures what a step costs: first make sure that a model
learns.

You will learn: data on the device, the loop, what keeps the host from waiting, and how to tell that it learns.
Run it:    python3 course.py run lesson04_training
Train:     .venv/bin/python day1_pytorch/lesson04_training.py --data mnist --model cnn --epochs 5
"""

import math
import sys
from enum import StrEnum
from typing import Annotated

from lessonkit import DEVICE, About, Steps
from lessonkit.base.files import ROOT

import torch
import torch.nn.functional as F
import typer
from torch import nn

from workloads.data import Data, digits


def _torchvision(name):
    """MNIST or CIFAR-10, downloaded once to data/."""
    try:
        from torchvision import datasets
    except ImportError:
        raise typer.BadParameter(
            f'{name} comes through torchvision, which is missing: .venv/bin/pip install -e ".[data]"'
        ) from None
    kind = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    parts = []
    for train in (True, False):
        try:
            found = kind(ROOT / "data", train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise typer.BadParameter(f"{name} could not be downloaded to {ROOT / 'data'}: {error}") from None
        x = torch.as_tensor(found.data).float() / 255
        parts += [x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2), torch.as_tensor(found.targets)]
    return Data(*parts)


def make_mlp(shape=(1, 8, 8), width=512):
    """[N, *shape] -> [N, 10] scores, three matrices: 301 thousand parameters for digits."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def make_cnn(shape=(1, 8, 8)):
    """[N, *shape] -> [N, 10] scores, for images of any size."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),  # the same head for 8, 28 and 32 pixels
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(model, data, epochs, batch=64, lr=0.05):
    """The whole loop: shuffle, forward, backward, update. Returns the mean loss of each epoch."""
    x, y = data.train_x.to(DEVICE), data.train_y.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True)
    shuffle = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(epochs):
        total = torch.zeros((), device=DEVICE)
        for rows in torch.randperm(len(y), generator=shuffle).to(DEVICE).split(batch):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)  # stays on the device: .item() here would make the host wait each step
        losses.append(total.item() / len(y))
    return losses


@torch.no_grad()
def accuracy(model, x, y):
    """The share of images whose highest score is at their class."""
    guesses = torch.cat([model(part.to(DEVICE)).argmax(-1) for part in x.split(1024)])
    return (guesses.cpu() == y).float().mean().item()


def data():
    """1,437 digits for training and 360 others for the test."""
    print(f"  torch.cuda.is_available() = {torch.cuda.is_available()}: tensors go to {DEVICE}")
    found = digits()
    assert found.train_x.shape == (1437, 1, 8, 8)
    assert found.test_x.shape == (360, 1, 8, 8)
    assert found.train_x.min() == 0
    assert found.train_x.max() == 1
    assert found.test_y.bincount().min() >= 20, "every class is in the test"


def overfit():
    """A model that cannot overfit 8 images has a bug: 60 steps on one batch bring its loss near 0."""
    torch.manual_seed(0)
    few = Data(*(part[:8] for part in digits()))
    losses = train(make_mlp().to(DEVICE), few, epochs=60)
    assert losses[0] > 1.5
    assert losses[-1] < 0.05
    print(f"  loss {losses[0]:.2f} -> {losses[-1]:.4f}")


def mlp():
    """An untrained MLP's loss is ln 10 = 2.3, a guess among ten; trained, it names 95% of unseen digits or more."""
    _learns(make_mlp, epochs=15)


def cnn():
    """A CNN with 29 thousand parameters, a tenth of the MLP's, does as well: it shares its weights over the image."""
    assert sum(p.numel() for p in make_cnn().parameters()) < sum(p.numel() for p in make_mlp().parameters()) / 10
    _learns(make_cnn, epochs=8)


def _learns(make, epochs):
    torch.manual_seed(0)  # before the weights are initialised
    model, found = make().to(DEVICE), digits()
    with torch.no_grad():
        start = F.cross_entropy(model(found.train_x.to(DEVICE)), found.train_y.to(DEVICE)).item()
    assert abs(start - math.log(10)) < 0.1
    losses = train(model, found, epochs)
    reached = accuracy(model, found.test_x, found.test_y)
    print(f"  loss {start:.2f} -> {losses[0]:.2f} (epoch 1) -> {losses[-1]:.3f} (epoch {epochs}), test {reached:.1%}")
    assert reached >= 0.95


LESSON = Steps(
    (data, overfit, mlp, cnn),
    about=About(teaches="a plain training loop that learns, and how to tell that it does", hours=0.75),
)


class Source(StrEnum):
    digits = "digits"
    mnist = "mnist"
    cifar10 = "cifar10"


class Model(StrEnum):
    mlp = "mlp"
    cnn = "cnn"


def _command(
    data: Annotated[Source, typer.Option(help="digits needs no download; the others need torchvision")] = Source.digits,
    model: Annotated[Model, typer.Option()] = Model.cnn,
    epochs: Annotated[int, typer.Option(min=1)] = 5,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    lr: Annotated[float, typer.Option(min=0)] = 0.05,
):
    """Train one model and print its losses and its accuracy on the test images."""
    found = digits() if data == Source.digits else _torchvision(data.value)
    torch.manual_seed(0)
    net = {"mlp": make_mlp, "cnn": make_cnn}[model.value](found.train_x.shape[1:]).to(DEVICE)
    for epoch, loss in enumerate(train(net, found, epochs, batch, lr), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    print(f"test accuracy {accuracy(net, found.test_x, found.test_y):.2%} on {DEVICE}")


if __name__ == "__main__":
    typer.run(_command) if len(sys.argv) > 1 else LESSON.main()
