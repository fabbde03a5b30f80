"""What the operators of a run cost: calls, time, FLOPs, bytes, and the roof that these make (day 1, lesson 6)."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from lessonkit.base import device
from lessonkit.base.device import DEVICE
from lessonkit.base.tables import digits
from lessonkit.measure import timing

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import flop_registry

GPU = DEVICE.type == "cuda"
ACTIVITIES = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * GPU


class Work(TorchDispatchMode):
    """FLOPs and bytes of every operator called inside, by the profiler's name for it; views and allocations do none.

    work: name -> calls, flops, bytes, and roof: the seconds it takes at least at `flop_rate` FLOP/s and `bandwidth`
    bytes/s. FLOPs are those of matmuls and attention; bytes are those of its arguments and results, each once.
    """

    namespaces = ("aten", "course_ops")

    def __init__(self, flop_rate: float = 1.0, bandwidth: float = 1.0) -> None:
        super().__init__()
        self.flop_rate, self.bandwidth = flop_rate, bandwidth
        self.work: dict[str, Counter[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in self.namespaces and not func.is_view and func._opname not in ("empty", "_unsafe_view"):
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            moved = _bytes(tree_leaves((args, kwargs, out)))
            cost: dict[str, Any] = {"calls": 1, "flops": flops, "bytes": moved}
            cost["roof"] = max(flops / self.flop_rate, moved / self.bandwidth)
            self.work.setdefault(func._schema.name, Counter()).update(cost)
        return out


def _bytes(values: Iterable[Any]) -> int:
    """Each tensor once; a dimension of stride 0 was repeated for free."""
    return sum(
        t.element_size() * torch.Size(n for n, s in zip(t.shape, t.stride(), strict=True) if s).numel()
        for t in values
        if isinstance(t, torch.Tensor)
    )


def operators(run: Callable[[], Any], steps: int = 3) -> list[dict[str, Any]]:
    """A row for each operator of run(), the slowest first: calls, time, FLOPs, bytes, and the roof that they make.

    The column ms is the time of its kernels on a GPU, else of the CPU, each at its best of `steps` runs. The column
    roof ms is a prediction: the larger of FLOPs / FLOP rate and bytes / bandwidth of this machine.
    """
    run()
    with Work(*limits()) as counted:
        run()
    best: dict[str, float] = {}
    for _ in range(steps):
        with profile(activities=ACTIVITIES) as seen:
            run()
            if GPU:
                torch.cuda.synchronize()
        spent: Counter[str] = Counter()
        for event in host_events(seen):
            if event.name in counted.work and not _within(event, counted.work):  # to_copy's copy_ is to_copy's time
                spent[event.name] += (event.device_time_total if GPU else event.cpu_time_total) * 1e-3
        best = {name: min(ms, best.get(name, ms)) for name, ms in spent.items()}
    rows, total = [], sum(best.values())
    for name, ms in sorted(best.items(), key=lambda item: -item[1]):
        work = counted.work[name]
        row = {"where": device.name(), "operator": name, "calls": work["calls"], "ms": digits(ms)}
        row |= {"time": f"{ms / total:.1%}", "GFLOP": digits(work["flops"] / 1e9), "MB": digits(work["bytes"] / 1e6)}
        rows.append(row | {"roof ms": digits(work["roof"] * 1e3)})
    return rows


def host_events(seen: profile) -> list[Any]:
    """The calls, with the host's time; what the GPU did stands in events of its own."""
    return [e for e in seen.events() or () if e.device_type == torch._C._autograd.DeviceType.CPU]


def _within(event: Any, names: Iterable[str]) -> bool:
    """Does it run inside an operator of one of these names?"""
    while event := event.cpu_parent:
        if event.name in names:
            return True
    return False


def limits() -> tuple[float, float]:
    """(FLOP/s, bytes/s) of this machine at its best. A CPU's caches hold what a small model's step moves."""
    if GPU:
        found = timing.limits()
        return found.matmul["bf16"], found.copy
    a, b, large = torch.randn(512, 512), torch.randn(512, 512), torch.randn(2**21)
    copy = _seconds("y.copy_(x)", x=large, y=torch.empty_like(large))
    return 2 * 512**3 / _seconds("a @ b", a=a, b=b), 2 * large.nbytes / copy


def _seconds(statement: str, **names: Any) -> float:
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)


def limit(flops: float, moved: float, flop_rate: float, bandwidth: float) -> str:
    """The roofline's verdict: what an operator waits for if it does everything else for nothing."""
    return "compute" if flops / flop_rate > moved / bandwidth else "memory"
