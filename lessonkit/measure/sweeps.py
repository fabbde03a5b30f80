"""A sweep: one kernel in many configurations, what a small model predicts of each, and what a GPU says.

The model sees what the compiler made of a configuration (registers, shared memory, spills) and the size; it returns
microseconds and the name of what limits. A sweep is compiled anywhere; on a GPU it is timed, and rows keep what was
compiled and measured. Predictions are not kept: they are computed from the rows, by today's model, for every report.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lessonkit.base import device
from lessonkit.judge import check
from lessonkit.lesson import Lesson, Table
from lessonkit.measure import rows, timing
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import torch

Config = Mapping[str, int]
SHARED = 232448  # bytes that a program may have on Hopper; what asks for more compiles, and does not start


@dataclass(frozen=True)
class Machine:
    """What the models need of a GPU; the code is sm_90's for all of these."""

    name: str
    sms: int
    memory: float  # bytes/s that a copy reaches
    tensor: int = 4096  # FLOPs of an SM's tensor cores in a cycle, 16 bits
    clock: float = 1.5e9  # what tensor cores at work leave of the boost clock, at 700 W


# Memory and SMs by datasheet, memory less an eighth (a copy on an H200 reaches 4.2 of 4.8 TB/s).
H200 = Machine("H200", 132, 4.2e12)
FAMILY = (H200, Machine("H100 SXM", 132, 2.93e12), Machine("H100 PCIe", 114, 1.78e12), Machine("H20", 78, 3.5e12, 1024))


@dataclass(frozen=True)
class Figures:
    """What the compiler made of a configuration for sm_90."""

    warps: int
    registers: int
    shared: int
    spills: int
    wgmma: int

    @property
    def resident(self) -> int:
        """Programs that an SM holds at a time."""
        return compiled.resident(90, self.warps, self.registers, self.shared)


@dataclass(frozen=True)
class Sweep:
    """lesson: whose inputs and oracle are used. launch(args, config) runs the kernel and returns its result.

    predict(size, config, figures, machine) -> (microseconds, what limits). axes: (y, x) of the heat map, from a config.
    """

    lesson: Lesson
    module: str
    sizes: tuple[dict[str, Any], ...]
    configs: Callable[[Mapping[str, Any]], Sequence[Config]]
    launch: Callable[[tuple[Any, ...], Config], Any]
    predict: Callable[[Mapping[str, Any], Config, Figures, Machine], tuple[float, str]]
    axes: Callable[[Config], tuple[str, str]]

    def compiled(self) -> list[dict[str, Any]]:
        """A row for each size and configuration: what it is, and its figures."""
        return [dict(row) for row in self._compiled]

    @cached_property
    def _compiled(self) -> list[dict[str, Any]]:
        """Two processes compile every other kernel each."""
        with ThreadPoolExecutor(2) as pool:
            figures = dict(
                pair
                for part in pool.map(partial(call_in_compiler, self.module, "compile_here"), (0, 1))
                for pair in part
            )
        return [
            {"size": name(size), **config, **figures[self.code(size, config)]}
            for size in self.sizes
            for config in self.configs(size)
        ]

    def compile_here(self, part: int) -> list[tuple[str, dict[str, int]]]:
        """(code, its figures) of every other kernel, in a process that compiles."""
        todo = {self.code(size, config): (size, config) for size in self.sizes for config in self.configs(size)}
        found = []
        with compiled.compiling(90) as made:
            for code, (size, config) in list(todo.items())[part::2]:
                made.clear()
                self.launch(self.lesson.inputs(dtype=self.lesson.bench_dtype, **size), config)
                (kernel,) = made.values()
                k = compiled.inspect("", kernel, 90)
                found.append((code, {n: getattr(k, n) for n in ("warps", "registers", "shared", "spills", "wgmma")}))
        return found

    def code(self, size: Mapping[str, Any], config: Config) -> str:
        """Sizes with the same code share a kernel: of a size only D, or the block that holds a row, is a constexpr."""
        return name(dict(config) | {key: size[key] for key in ("D", "N") if key in size and "K" not in size})

    def measured(self) -> list[dict[str, Any]]:
        """Rows with their median in us, all configurations of a size in turns. A wrong result is an error."""
        table = self.compiled()
        for size in self.sizes:
            fitting = {
                str(i): row for i, row in enumerate(table) if row["size"] == name(size) and row["shared"] <= SHARED
            }
            question = check.truth(self.lesson, size, self.lesson.bench_dtype)
            calls = {i: partial(self.launch, question.args, self.config(row)) for i, row in fitting.items()}
            for call in calls.values():
                check.compare(question, call())
            for i, t in timing.measure(calls, rounds=40, budget_s=4.0).items():
                fitting[i]["us"] = round(t.p50 * 1e3, 2)
            torch.cuda.empty_cache()
        return [row for row in table if "us" in row]

    def predicted(self, row: Mapping[str, Any], machine: Machine = H200) -> tuple[float, str]:
        size = next(s for s in self.sizes if name(s) == row["size"])
        return self.predict(size, self.config(row), figures(row), machine)

    def ranked(self, size: Mapping[str, Any], machine: Machine = H200) -> list[dict[str, Any]]:
        """The compiled rows of a size, the fastest first as the model has them."""
        mine = [row for row in self.compiled() if row["size"] == name(size)]
        return sorted(mine, key=lambda row: self.predicted(row, machine)[0])

    def config(self, row: Mapping[str, Any]) -> dict[str, int]:
        return {key: int(row[key]) for key in self.configs(self.sizes[0])[0]}

    def step(self) -> Table:
        """The sweep on this machine: measured on a GPU, predicted elsewhere."""
        if device.HAS_GPU:
            return Table("sweep", self.measured(), "Medians, L2 flushed, all configurations of a size interleaved.")
        best = []
        for size in self.sizes:
            ranked = self.ranked(size)
            for place in (0, 1, len(ranked) // 2, len(ranked) - 1):
                row = ranked[place]
                us, limit = self.predicted(row)
                best.append({"size": name(size), "rank": f"{place + 1} of {len(ranked)}", "config": show(self, row),
                             "registers": row["registers"], "spills": row["spills"],
                             "programs an SM": figures(row).resident, "predicted us": round(us, 1),
                             "limit": limit})  # fmt: skip
        return Table("predicted", best, "For an H200, from the compiled code alone: the best, middle and worst.")


def name(size: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in size.items())


def figures(row: Mapping[str, Any]) -> Figures:
    return Figures(*(int(row[key]) for key in ("warps", "registers", "shared", "spills", "wgmma")))


def show(sweep: Sweep, row: Mapping[str, Any]) -> str:
    y, x = sweep.axes(sweep.config(row))
    return f"{y}, {x}"


def together(times: Mapping[str, float]) -> tuple[float, str]:
    """Limits that are far apart cost the larger; close ones both, since neither always waits: 19% where two are equal.

    Returns the time and the name of the largest.
    """
    return sum(t**4 for t in times.values()) ** 0.25, max(times, key=lambda limit: times[limit])


def waves(programs: int, resident: int, sms: int) -> int:
    """Rounds that the GPU needs; the last one costs as much as a full one."""
    return math.ceil(programs / max(1, resident * sms))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, ties sharing theirs. 1: the same order, 0: none, -1: reversed."""

    def ranks(x: Sequence[float]) -> torch.Tensor:
        t = torch.tensor(x, dtype=torch.float64)
        return (t[None] < t[:, None]).sum(1) + ((t[None] == t[:, None]).sum(1) + 1) / 2

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def read(folder: Path, module: str) -> list[dict[str, str]]:
    return rows.read_csv(folder / f"{module}.sweep.csv")


def sizes(found: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["size"] for row in found))
