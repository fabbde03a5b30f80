"""Training: where the time of a step goes
=======================================
An MLP of 64-512-512-10 needs 1.7 million FLOPs an image to train and launches about 20 kernels a step, whatever the
batch. At 5 to 10 us a kernel those launches cost a GPU 100 to 200 us, time in which it could compute thousands of
images: so on small batches the CPU wins, and what helps a GPU first is fewer launches, not faster arithmetic.

You will learn: a plain training loop on real data, CPU against GPU over batch sizes, and what TF32, bf16 autocast,
torch.compile, larger batches and CUDA graphs each change.
Run it:    python day1_pytorch/lesson03_training.py
Train:     python day1_pytorch/lesson03_training.py --data mnist --model cnn --epochs 5
"""

import contextlib
import math
import os
import re
import shutil
import sys
from enum import StrEnum
from typing import Annotated, NamedTuple

from lessonkit import DEVICE, Steps, Table, Unsupported, device
from lessonkit.lesson import ROOT
from lessonkit.report import committed

import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

NAME = "day1_pytorch.lesson03_training"
CPU, GPU = torch.device("cpu"), DEVICE.type == "cuda"


class Data(NamedTuple):
    train_x: torch.Tensor  # [N, C, H, W] in 0..1
    train_y: torch.Tensor  # [N] classes
    test_x: torch.Tensor
    test_y: torch.Tensor


def _digits():
    """1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn; a fifth is kept for the test."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return Data(x[train], y[train], x[test], y[test])


def _torchvision(name):
    """MNIST or CIFAR-10, downloaded once to data/."""
    try:
        from torchvision import datasets
    except ImportError:
        raise typer.BadParameter(
            f"{name} comes through torchvision, which is missing: pip install torchvision"
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


def _mlp(shape=(1, 8, 8), width=512):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def _cnn(shape=(1, 8, 8)):
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),  # the same head for 8, 28 and 32 pixels
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def _train(model, data, epochs, batch=64, lr=0.05):
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
def _accuracy(model, x, y):
    guesses = torch.cat([model(part.to(DEVICE)).argmax(-1) for part in x.split(1024)])
    return (guesses.cpu() == y).float().mean().item()


# ---- Does it learn? No time is worth a look before that -----------------------------------------------------------


def data():
    """1,437 digits to learn from and 360 others to be judged by."""
    print(f"  torch.cuda.is_available() = {torch.cuda.is_available()}: tensors go to {DEVICE}")
    found = _digits()
    assert found.train_x.shape == (1437, 1, 8, 8)
    assert found.test_x.shape == (360, 1, 8, 8)
    assert found.train_x.min() == 0
    assert found.train_x.max() == 1
    assert found.test_y.bincount().min() >= 20, "every class is in the test"


def mlp():
    """An untrained MLP's loss is ln 10 = 2.3, a guess among ten; trained, it names 95% of unseen digits or more."""
    _learns(_mlp(), epochs=15)


def cnn():
    """A CNN of 29 thousand parameters, a tenth of the MLP's, does as well: its weights are shared over the image."""
    assert sum(p.numel() for p in _cnn().parameters()) < sum(p.numel() for p in _mlp().parameters()) / 10
    _learns(_cnn(), epochs=8)


def _learns(model, epochs):
    torch.manual_seed(0)
    for layer in model:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    model, found = model.to(DEVICE), _digits()
    with torch.no_grad():
        start = F.cross_entropy(model(found.train_x.to(DEVICE)), found.train_y.to(DEVICE)).item()
    assert abs(start - math.log(10)) < 0.1
    losses = _train(model, found, epochs)
    reached = _accuracy(model, found.test_x, found.test_y)
    print(f"  loss {start:.2f} -> {losses[0]:.2f} (epoch 1) -> {losses[-1]:.3f} (epoch {epochs}), test {reached:.1%}")
    assert reached >= 0.95


# ---- What does a step cost? ---------------------------------------------------------------------------------------


class _Operators(TorchDispatchMode):
    """Counts operators that start a kernel: all but views, which only rewrite strides, and empty allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def _batch(size, where):
    """[size, 1, 8, 8] digits, repeated where there are not enough: real inputs, since zeros multiply faster."""
    found = _digits()
    rows = torch.arange(size) % len(found.train_y)
    return found.train_x[rows].to(where), found.train_y[rows].to(where)


def _stepper(model, loss_of):
    """step(x, y): one forward, backward and update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _plain(where):
    model = _mlp().to(where)
    return _stepper(model, lambda x, y: F.cross_entropy(model(x), y))


def _cost(batch):
    """(operators, FLOPs) of one training step."""
    step, (x, y) = _plain(CPU), _batch(batch, CPU)
    step(x, y)
    with _Operators() as operators, FlopCounterMode(display=False) as flops:
        step(x, y)
    return operators.count, flops.get_total_flops()


def step_cost():
    """FLOPs grow with the batch, 1.7 million an image; the number of kernels does not grow at all."""
    (few, one), (many, thousand) = _cost(1), _cost(1000)
    assert few == many
    assert thousand == 1000 * one
    # Each weight is multiplied once forward and twice backward (its own gradient, its input's), 2 FLOPs each; the
    # images themselves need no gradient, so the first layer's second product is left out.
    assert one == 6 * (64 * 512 + 512 * 512 + 512 * 10) - 2 * 64 * 512
    print(f"  {few} kernels a step, {one / 1e6:.2f} MFLOP an image")


def _seconds(statement, budget=0.1, **names):
    return (
        Timer(statement, globals=names, num_threads=torch.get_num_threads())
        .blocked_autorange(min_run_time=budget)
        .median
    )


def _operator_us(where):
    """What one operator costs when there is nothing to compute: Python, dispatch, the tape and, on a GPU, the launch."""
    return _seconds("f(x)", f=F.relu, x=torch.rand(1, device=where, requires_grad=True)) * 1e6


def cross_over():
    """A GPU's step is flat until work outlasts launches, a CPU's grows at once: they cross where the two are equal."""
    kernels, flops = _cost(1)
    rate = 2 * 256 * 512 * 512 / _seconds("a @ b", a=torch.rand(256, 512), b=torch.rand(512, 512))
    image_us = flops / rate * 1e6
    # Without a GPU, one that takes 7.5 us a kernel is assumed: 5 to 10 us is usual.
    cpu_us, gpu_us = _operator_us(CPU), _operator_us(DEVICE) if GPU else 7.5
    predicted = kernels * max(gpu_us - cpu_us, 0) / image_us
    print(f"  an operator: {cpu_us:.1f} us on the CPU, {gpu_us:.1f} us on {'the' if GPU else 'an assumed'} GPU")
    print(
        f"  x {kernels} against {image_us:.1f} us of CPU work an image: predicted cross-over at {predicted:.0f} images"
    )
    rows, cpu_wins, gpu_wins = [], [], []
    for batch in (1, 4, 16, 64, 256, 1024):
        expected = {"cpu": kernels * cpu_us + batch * image_us, "gpu": kernels * gpu_us}
        measured = {}
        for side, where in {"cpu": CPU, "gpu": DEVICE}.items() if GPU else [("cpu", CPU)]:
            step, (x, y) = _plain(where), _batch(batch, where)
            us = measured[side] = _seconds("step(x, y)", step=step, x=x, y=y) * 1e6
            rows.append({"batch": batch, "where": f"{side} of {device.name()}" if GPU else "this cpu"})
            rows[-1] |= {"us_per_step": round(us, 1), "predicted_us": round(expected[side], 1)}
            rows[-1] |= {"images_per_s": round(batch / us * 1e6)}
        (gpu_wins if measured.get("gpu", math.inf) < measured["cpu"] else cpu_wins).append(batch)
    if GPU:
        print(f"  measured: the CPU is faster at {cpu_wins or 'no batch'}, the GPU at {gpu_wins or 'no batch'}")
    note = (
        "Predicted: operators times what an empty one costs; on the CPU, FLOPs over its matmul rate are added. Python in "
        "modules and optimizer is left out, so real steps start higher. What matters is the shape: a GPU's time is "
        "flat, a CPU's has a slope, and they cross where the work of the batch equals the GPU's launches."
    )
    return Table("batch-size", _beside("batch-size", rows), note, x="batch", y="us_per_step", by="where")


def _beside(table, rows):
    """One's own rows and, on a machine without a GPU, under them the committed rows of one that has."""
    theirs = [] if GPU else committed(NAME, table)
    return rows + [{key: row.get(key, "") for key in rows[0]} for row in theirs]


# ---- Five ways to make a step faster ------------------------------------------------------------------------------
# Each rung turns a model and a batch into run(), one training step on that batch; `undo` restores global settings.


def _fp32(model, x, y, undo):
    step = _stepper(model, lambda x, y: F.cross_entropy(model(x), y))
    return lambda: step(x, y)


def _tf32(model, x, y, undo):
    undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("high")
    return _fp32(model, x, y, undo)


def _amp(model, x, y, undo):
    def loss_of(x, y):
        with torch.autocast(DEVICE.type, torch.bfloat16):  # matmuls in bf16, the loss in fp32; weights stay fp32
            return F.cross_entropy(model(x), y)

    step = _stepper(model, loss_of)
    return lambda: step(x, y)


def _compiled(model, x, y, undo):
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise Unsupported("torch.compile writes C++ (and Triton its launcher): install g++, or name a compiler in CXX")
    # On a CPU one compilation serves both batches (dynamic), since a C++ compiler needs seconds for each.
    loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), dynamic=not GPU)
    step = _stepper(model, loss_of)
    return lambda: step(x, y)


def _cuda_graph(model, x, y, undo):
    if not GPU:
        raise Unsupported("CUDA graphs need a GPU: they replay a recorded list of kernels with one launch")
    step = _stepper(model, lambda x, y: F.cross_entropy(model(x), y))
    side = torch.cuda.Stream()  # warm up on a side stream: libraries allocate on first use, which a capture forbids
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(x, y)

    def run():
        graph.replay()  # reads x and y where they lay at capture: new data is copied into them
        return loss

    return run


RUNGS = {
    "fp32": (_fp32, "the baseline: a kernel for each operator"),
    "TF32": (_tf32, "GPU matmuls round to 10 bits: more FLOP/s, as many launches; a CPU ignores it"),
    "AMP bf16": (_amp, "half the bytes, tensor cores (a CPU: AMX or AVX-512 BF16), but more launches: the casts"),
    "torch.compile": (_compiled, "elementwise chains become one kernel: fewer launches and fewer bytes"),
    "CUDA graph": (_cuda_graph, "one launch for the whole step: what is left is the kernels' own time"),
}


def rungs():
    """Small batches pay for launches and large ones for work: a rung helps where it lowers what is being paid."""
    rows, fp32_us, fp32_count, fp32_loss = [], {}, {}, {}
    for name, (build, changes) in RUNGS.items():
        for batch in (64, 65536 if GPU else 1024):
            torch.manual_seed(0)
            model, (x, y) = _mlp().to(DEVICE), _batch(batch, DEVICE)
            with contextlib.ExitStack() as undo:
                try:
                    run = build(model, x, y, undo)
                except Unsupported as why:
                    print(f"  {name} left out: {why}")
                    break
                for _ in range(30):
                    loss = run().item()
                # Faster only counts if it still learns the same. CUDA graphs took 3 steps more to warm up.
                assert loss < 0.5 * math.log(10)
                assert abs(loss - fp32_loss.setdefault(batch, loss)) < 0.1
                count = _launches(run)
                us = _seconds("run()", run=run) * 1e6
            rows.append(
                {"where": device.name(), "rung": name, "batch": batch, "launches": count, "us_per_step": round(us, 1)}
            )
            rows[-1] |= {
                "images_per_s": round(batch / us * 1e6),
                "over_fp32": round(fp32_us.setdefault(batch, us) / us, 2),
            }
            rows[-1] |= {"changes": changes}
            if GPU and name in ("torch.compile", "CUDA graph"):
                assert count < fp32_count[batch]
            fp32_count.setdefault(batch, count)
    assert len(set(fp32_count.values())) == 1, "a larger batch needs no more launches: the cheapest rung of all"
    note = (
        "Launches are counted, by the profiler on a GPU and as dispatched operators on a CPU (compiled C++ loops do not "
        "show there). At the small batch a GPU follows the launches: fewer is faster, and TF32 or bf16 change little. At "
        "the large one it follows FLOPs and bytes. Images/s from the small batch to the large one is the rung `larger "
        "batch`. A CPU has cheap launches, so it gains little from any of them but bf16 where it has the instructions."
    )
    return Table("rungs", _beside("rungs", rows), note)


def _launches(run):
    """What the host hands to the GPU in one step: kernels, copies, graphs. On a CPU: the operators dispatched."""
    if not GPU:
        with _Operators() as operators:
            run()
        return operators.count
    with torch.profiler.profile() as profile:
        run()
        torch.cuda.synchronize()
    calls = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Memset)")
    return sum(event.count for event in profile.key_averages() if calls.match(event.key))


LESSON = Steps((data, mlp, cnn, step_cost, cross_over, rungs))


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
    found = _digits() if data == Source.digits else _torchvision(data.value)
    torch.manual_seed(0)
    net = {"mlp": _mlp, "cnn": _cnn}[model.value](found.train_x.shape[1:]).to(DEVICE)
    for epoch, loss in enumerate(_train(net, found, epochs, batch, lr), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    print(f"test accuracy {_accuracy(net, found.test_x, found.test_y):.2%} on {DEVICE}")


if __name__ == "__main__":
    typer.run(_command) if len(sys.argv) > 1 else LESSON.main()
