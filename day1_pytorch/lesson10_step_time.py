"""Step time: where the time of a training step goes
=================================================
An MLP of 64-512-512-10 needs 1.7 million FLOPs per image to train and launches about 25 kernels per step, whatever the
batch. So a step takes about

    max(launches * time of a launch, FLOPs / rate)   on a GPU: the host launches ahead while the GPU computes
    launches * their overhead + FLOPs / rate         on a CPU, which does one after the other

At 5 to 10 us per launch the GPU's floor would be 125 to 250 us. Autograd and the optimiser around the launches add host
time (the measured floor is in reports/). In that time the GPU could compute thousands of images. So on small batches
the CPU is faster, and a GPU needs fewer launches there, not faster arithmetic.

You will learn: to predict the batch from which the GPU is faster than the CPU, and what TF32, bf16 autocast,
torch.compile and CUDA graphs each change. Writes the last part of day1_env_check.md.
Run it:    python3 course.py run lesson10_step_time
"""

import contextlib
import math
import os
import re
import shutil
from functools import cache

from lessonkit import DEVICE, About, Steps, Table, Unsupported, device
from lessonkit.base.files import ROOT
from lessonkit.base.markdown import markdown
from lessonkit.pages.report import committed
from lessonkit.pages.sections import write_sections

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from workloads.data import digits

CPU, GPU = torch.device("cpu"), DEVICE.type == "cuda"
ASSUMED_US = 5  # what a launch adds to an operator, assumed where there is no GPU


def make_mlp(width=512):
    """[N, 1, 8, 8] -> [N, 10] scores, three matrices."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


class _Operators(TorchDispatchMode):
    """Counts operators that start a kernel: all but views, which only rewrite strides, and empty allocations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def _batch(size, where):
    """[size, 1, 8, 8] digits, repeated where there are not enough: real inputs, since zeros multiply faster."""
    found = digits()
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


def _plain(where, width=512):
    model = make_mlp(width=width).to(where)
    return _stepper(model, lambda x, y: F.cross_entropy(model(x), y))


def _cost(batch):
    """(operators, FLOPs) of one training step."""
    step, (x, y) = _plain(CPU), _batch(batch, CPU)
    step(x, y)
    with _Operators() as operators, FlopCounterMode(display=False) as flops:
        step(x, y)
    return operators.count, flops.get_total_flops()


def _seconds(statement, **names):
    """The fastest fifth, since other processes disturb a laptop. Timer waits for the GPU where there is one."""
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return torch.tensor(timer.blocked_autorange(min_run_time=0.1).times).quantile(0.2).item()


def step_cost():
    """FLOPs grow with the batch, 1.7 million an image; the number of kernels does not grow at all."""
    (few, one), (many, thousand) = _cost(1), _cost(1000)
    assert few == many
    assert thousand == 1000 * one
    # Each weight is multiplied once forward and twice backward (its own gradient, its input's), 2 FLOPs each. The
    # images need no gradient, so the first layer has one matmul less.
    assert one == 6 * (64 * 512 + 512 * 512 + 512 * 10) - 2 * 64 * 512
    print(f"  {few} kernels a step, {one / 1e6:.2f} MFLOP an image")


def _pace(where):
    """(us of a step that computes next to nothing, us that one image's FLOPs take at the rate of a large matmul)."""
    step, (x, y) = _plain(where, width=1), _batch(1, where)  # the same operators on a network of width 1
    idle = _seconds("step(x, y)", step=step, x=x, y=y)
    rows = 256 if where == CPU else 16384
    matmul = _seconds("a @ b", a=torch.rand(rows, 512, device=where), b=torch.rand(512, 512, device=where))
    return idle * 1e6, _cost(1)[1] * matmul / (2 * rows * 512**2) * 1e6


@cache
def _measured():
    """Rows of the table below, for this machine."""
    launches, rows = _cost(1)[0], []
    for side, where in {"cpu": CPU, "gpu": DEVICE}.items() if GPU else [("cpu", CPU)]:
        idle_us, image_us = _pace(where)
        print(
            f"  {side}: {launches} operators of {idle_us / launches:.1f} us, {image_us:.3g} us of arithmetic an image"
        )
        for batch in (1, 4, 16, 64, 256, 1024, *((4096, 16384, 65536) if side == "gpu" else ())):
            step, (x, y) = _plain(where), _batch(batch, where)
            us, work = _seconds("step(x, y)", step=step, x=x, y=y) * 1e6, batch * image_us
            row = {"batch": batch, "where": f"{side} of {device.name()}" if GPU else "this cpu"}
            row |= {"us_per_step": round(us, 1), "images_per_s": round(batch / us * 1e6)}
            rows.append(row | {"predicted_us": round(max(idle_us, work) if side == "gpu" else idle_us + work, 1)})
    return rows


def cross_over():
    """A GPU's step time is flat until work takes longer than launches, a CPU's grows much sooner: the curves cross."""
    rows, launches = _measured(), _cost(1)[0]
    gpu = {row["batch"]: row["us_per_step"] for row in rows if row["where"].startswith("gpu")}
    cpu = {row["batch"]: row["us_per_step"] for row in rows if not row["where"].startswith("gpu")}
    if GPU:  # a CPU's times are disturbed by other processes, so they are shown and not asserted
        assert cpu[1024] > 1.2 * cpu[1], "on a CPU a large batch is more work"
        assert gpu[256] < 2 * gpu[1], "on a GPU it fits under the launches"
        cpu_wins = [batch for batch in cpu if cpu[batch] <= gpu[batch]]
        gpu_wins = [batch for batch in cpu if cpu[batch] > gpu[batch]]
        print(f"  the CPU is faster at {cpu_wins or 'no batch'}, the GPU at {gpu_wins or 'no batch'}")
    else:
        batch = launches * ASSUMED_US / _pace(CPU)[1]
        print(
            f"  a GPU whose launches add {ASSUMED_US} us to an operator overtakes this CPU at about {batch:.0f} images"
        )
    note = (
        "Predicted by the two formulas at the head of this lesson, from a step of a network of width 1 (all of the "
        "launches, none of the arithmetic) and a large matmul's rate. What matters is the shape: a GPU's time is flat "
        "until work outlasts the launches, a CPU's has a slope from the start."
    )
    return Table("batch-size", _beside("batch-size", rows), note, x="batch", y="us_per_step", by="where")


def _beside(table, rows):
    """This machine's rows and, without a GPU, below them the committed rows of a GPU."""
    theirs = [] if GPU else committed(__name__, table)
    return rows + [{key: row.get(key, "") for key in rows[0]} for row in theirs]


# ---- Four ways to make a step faster ------------------------------------------------------------------------------
# Each rung turns a model and a batch into run(), one training step on that batch; `undo` restores global settings.


def _fp32(model, x, y, undo):
    step = _stepper(model, lambda x, y: F.cross_entropy(model(x), y))
    return lambda: step(x, y)


def _tf32(model, x, y, undo):
    if not GPU:
        raise Unsupported("TF32 is a mode of a GPU's tensor cores")
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
        raise Unsupported("a CUDA graph replays a recorded list of kernels with one launch")
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
        graph.replay()  # reads x and y at their addresses of the capture: copy new data into them
        return loss

    return run


RUNGS = {
    "fp32": (_fp32, "the baseline: a kernel for each operator"),
    "TF32": (_tf32, "GPU matmuls round to 10 bits: more FLOP/s, as many launches"),
    "AMP bf16": (_amp, "half the bytes, tensor cores (a CPU: AMX or AVX-512 BF16), but more launches: the casts"),
    "torch.compile": (_compiled, "elementwise chains become one kernel: fewer launches and fewer bytes"),
    "CUDA graph": (_cuda_graph, "one launch for the whole step: what is left is the kernels' own time"),
}


def rungs():
    """Launches decide at small batches and work at large ones; a rung helps where it lowers the one that decides."""
    rows, fp32 = [], {}
    for name, (build, changes) in RUNGS.items():
        for batch in (64, 65536 if GPU else 512):
            torch.manual_seed(0)
            model, (x, y) = make_mlp().to(DEVICE), _batch(batch, DEVICE)
            with contextlib.ExitStack() as undo:
                try:
                    run = build(model, x, y, undo)
                except Unsupported as why:
                    print(f"  {name} left out, no GPU or compiler here: {why}")
                    break
                for _ in range(30):
                    loss = run().item()
                count, us = _launches(run), _seconds("run()", run=run) * 1e6
            us0, count0, loss0 = fp32.setdefault(batch, (us, count, loss))
            # A faster step counts only if it learns the same. CUDA graphs take 3 steps more to warm up.
            assert loss < 0.5 * math.log(10)
            assert abs(loss - loss0) < 0.25, (name, batch, loss, loss0)
            if GPU and name in ("torch.compile", "CUDA graph"):
                assert count < count0
            rows.append({"where": device.name(), "rung": name, "batch": batch, "launches": count})
            rows[-1] |= {"us_per_step": round(us, 1), "images_per_s": round(batch / us * 1e6)}
            rows[-1] |= {"over_fp32": round(us0 / us, 2), "changes": changes}
    note = (
        "Launches: counted by the profiler on a GPU, as dispatched operators on a CPU (compiled C++ loops do not show "
        "there). At the small batch a GPU waits for the host: one launch for all is faster, casts are more of them. At "
        "the large one it follows FLOPs and bytes. The cheapest rung of all is a larger batch: as many launches. A CPU "
        "has cheap launches, so it gains little from any of them but bf16 where it has the instructions."
    )
    return Table("rungs", _beside("rungs", rows), note)


def _launches(run):
    """The launches of one step: kernels, copies, graphs. On a CPU: the operators dispatched."""
    if not GPU:
        with _Operators() as operators:
            run()
        return operators.count
    with torch.profiler.profile() as profile:
        run()
        torch.cuda.synchronize()
    calls = re.compile(r"cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Memset)")
    return sum(event.count for event in profile.key_averages() if calls.match(event.key))


def deliverable():
    """day1_env_check.md gets its training times: the time of a step over batch sizes on this machine."""
    rows = _measured()
    parts = {"training": markdown(rows[0], (row.values() for row in rows))}
    text = write_sections(ROOT / "day1_pytorch" / "day1_env_check.md", "Environment check", parts)
    assert str(rows[-1]["us_per_step"]) in text


LESSON = Steps(
    (step_cost, cross_over, rungs, deliverable),
    about=About(
        teaches="where a step's time goes: CPU and GPU over batch sizes, TF32, bf16, `torch.compile`, CUDA "
        "graphs; ends `day1_env_check.md`",
        hours=0.75,
        pictures=("launch_ahead",),
    ),
    alone=GPU,
    nightly=(rungs,),
)

if __name__ == "__main__":
    LESSON.main()
