"""All kernels under compute-sanitizer and under Triton's own instrumentation, against a list of argued reports.

A report is an error unless sanitize.toml has it with an argument by the memory model why it is none. The tools see
different things: memcheck addresses, racecheck shared memory, initcheck global memory that nothing wrote, synccheck
barriers; `consan` and `iisan` are Triton's, compiled into the kernels. Day 5's lesson on sanitizers shows each.

`python -m lessonkit.measure.sanitize LESSON PART CASES` is what the tools are put around: it runs the rungs of a lesson
once each, or that part of them. Of course_ops it calls an operator with CASES, which launch each kernel of its dispatch
(operator_cases); a rung is a direction there. racecheck of a persistent kernel takes minutes, so a part may be one rung
at one small shape, as on a GPU of few SMs: each program still has several tiles, and each stage of its ring is used
again.
"""

import ast
import faulthandler
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lessonkit.base import device, process
from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.tables import read_csv, to_csv
from lessonkit.base.words import said
from lessonkit.cuda import toolchain
from lessonkit.judge import check
from lessonkit.lesson import Lesson
from lessonkit.measure import ncu, operator_cases, rows
from lessonkit.measure.operator_cases import Chosen

import torch

ARGUED = Path(__file__).with_suffix(".toml")
NAME = "sanitized.csv"
SECONDS = 900.0  # for one lesson under one tool
RUNG_SECONDS = 200
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # kernels ask for errors themselves, and tests make some on purpose
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
# A file of the course is found by its whole path. After so many reports a tool is silent about all kernels, and
# initcheck makes one a thread.
OPTIONS = ("--strip-paths", "no", "--print-limit", "100000")
INSTRUMENTED = ("consan", "iisan")  # TRITON_INSTRUMENTATION_MODE
ALL = (*TOOLS, *INSTRUMENTED)
# What a report of each tool begins with, after "Error: " or "Warning: ". Anything else that a tool says is no report.
BEGINNINGS = (
    *("Invalid __", "Misaligned", "Address ", "Race reported", "Potential ", "Uninitialized ", "Barrier error"),
    *("Invalid arguments", "Program hit", "Leaked ", "Malloc/Free error", "Unused memory", "Stack overflow"),
    "Host API ",
)
_HEAD = re.compile(rf"^=+ (?:Error: |ERROR: |Warning: |WARNING: )?((?:{'|'.join(BEGINNINGS)}).*)$")
_MORE = re.compile(r"^=+ {2,}(\S.*)$")
# `at add_kernel+0x150 in add.cu:12`, and before version 2022.4 `at 0x150 in add.cu:12:add_kernel(float *)`
_AT = re.compile(
    r"\bat (?:0x[0-9a-f]+ in [^\s:]+:\d+:(?P<before>.+)|(?P<now>.+?)\+0x[0-9a-f]+(?: in (?P<file>.*):(?P<line>\d+))?$)"
)
# `Host API memory access error at host access to 0x7f00 of size 35,632 bytes`, then who accessed it: cudaMemcpy
_API = re.compile(r"\bon access by (\w+)")
_OF_ONE_RUN = re.compile(r" to 0x[0-9a-f]+ of size [\d,]+ bytes")
_SUMMARY = re.compile(r"^=+ (?:[A-Z]+ )?SUMMARY: (\d+)", re.MULTILINE)
_ASSERTION = re.compile(r"^(\S+?):\d+: (\S+?): block: .* Assertion `(.*)` failed\.?$", re.MULTILINE)


class NotUnderstood(RuntimeError):
    """A tool that did not come to its end, or says something that this module cannot read: no verdict."""


@dataclass(frozen=True, order=True)
class Report:
    """What a tool says of a kernel, without addresses and threads; of accesses that race, with their lines of code."""

    tool: str
    kernel: str
    what: str


@dataclass(frozen=True)
class Argued:
    """Reports that are no errors, for one reason.

    kernels   their names
    reports   words of accesses: each access that a report names has some of them, or the whole report, if it names
              none; {kernel} is the name of the report's kernel
    argument  by which rule of the memory model the accesses are in order, and why the tool does not see it
    lessons   those that the argument is about, where it is not about every call of the kernels
    """

    kernels: tuple[str, ...]
    tool: str
    reports: tuple[str, ...]
    argument: str
    lessons: tuple[str, ...] = ()

    def covers(self, report: Report, lesson: str = "") -> bool:
        ours = report.tool == self.tool and report.kernel in self.kernels and lesson in (self.lessons or (lesson,))
        words = [each.replace("{kernel}", report.kernel) for each in self.reports]
        accesses = re.split(r"^Race reported between | and (?=(?:Read|Write) access)", report.what)
        return ours and all(any(map(partial(_names, each), words)) for each in accesses if each)


def _names(access: str, words: str) -> bool:
    """Whether the words are of this access. A bare "Write access" names only one without a line of the course."""
    return words == access if words in ("Read access", "Write access") else words in access


def argued(path: Path = ARGUED) -> list[Argued]:
    """The list. Raises ValueError, with the entry, if one lacks a word or names a tool that there is not."""
    *names, free = [field.name for field in fields(Argued)]
    lists = ("kernels", "reports", free)
    found = []
    for entry in tomllib.loads(path.read_text()).get("argued", []):
        whole = all(_words(words, several=name in lists) for name, words in entry.items())
        if {*entry, free} != {*names, free} or not whole:
            raise ValueError(
                f"{path.name}: {entry}: give {', '.join(names)}, {free} if need be, and nothing else; "
                f"{', '.join(lists)} are lists"
            )
        if entry["tool"] not in ALL:
            raise ValueError(f"{path.name}: tool={entry['tool']!r}: there are {', '.join(ALL)}")
        kernels, reports, lessons = (tuple(entry.get(name, ())) for name in lists)
        found.append(Argued(kernels, entry["tool"], reports, entry["argument"], lessons))
    return found


def _words(value: object, *, several: bool) -> bool:
    """Whether it is a text with a word in it, or a list of one or more of them."""
    if several:
        return isinstance(value, list) and bool(value) and all(_words(each, several=False) for each in value)
    return isinstance(value, str) and bool(value.strip())


def unargued(found: Iterable[Report], known: Sequence[Argued], lesson: str = "") -> list[Report]:
    """The reports of a lesson that nothing in the list covers: errors, until they are mended or argued."""
    return [report for report in found if not any(each.covers(report, lesson) for each in known)]


def parsed(tool: str, output: str) -> Counter[Report]:
    """The reports in a tool's words, and how many there are of each. Raises NotUnderstood."""
    if tool in INSTRUMENTED:
        return Counter(Report(tool, _kernel(found[1]), found[2]) for found in _ASSERTION.findall(output))
    blocks: list[list[str]] = []
    inside = False
    for line in output.splitlines():
        if head := _HEAD.match(line):
            blocks.append([head[1]])
            inside = True
        elif inside and (more := _MORE.match(line)):
            blocks[-1].append(more[1])
        else:
            inside = False
    summary = _SUMMARY.findall(output)
    if not summary:
        raise NotUnderstood(f"{tool} did not come to its end: {_last_words(output)}")
    if any(map(int, summary)) and not blocks:
        raise NotUnderstood(f"{tool} counts {', '.join(summary)} errors and none is understood: {_last_words(output)}")
    return Counter(_report(tool, block) for block in blocks)


def _report(tool: str, block: Sequence[str]) -> Report:
    """A report of its lines: the first says what and sometimes where, the others where, who, and what it races with."""
    where = next(filter(None, map(_AT.search, block)), None)
    parts = [line for i, line in enumerate(block) if not i or re.match(r"and (Read|Write) access", line)]
    text = " ".join(re.sub(r"\s*\[\d+ hazards?\]|\s*\[\d+\]$", "", line) for line in parts)
    text = " ".join(_AT.sub(_code, line) for line in re.split(r"(?= and (?:Read|Write) access)", text))
    if api := next(filter(None, map(_API.search, block)), None):
        return Report(tool, api[1], _OF_ONE_RUN.sub("", text))
    return Report(tool, _kernel((where["now"] or where["before"]) if where else ""), " ".join(text.split()))


def _code(at: re.Match[str]) -> str:
    """The line of the course that an access is in, as "in `lines[i] = x`": its number changes more often."""
    path = Path(at["file"] or "")
    if not (path.is_relative_to(ROOT) and path.is_file()):
        return ""
    lines = path.read_text().splitlines()
    return f"in `{lines[int(at['line']) - 1].strip()[:60]}`" if int(at["line"]) <= len(lines) else ""


def _kernel(name: str) -> str:
    """`void <unnamed>::add_kernel<float>(float *)` -> add_kernel."""
    return ncu.base(name) or re.split(r"[<(]", name.replace("<unnamed>::", "").replace("void ", ""))[0].strip()


def _last_words(output: str) -> str:
    return " ".join(output.split())[-400:] or "it says nothing"


# ---- On a GPU -------------------------------------------------------------------------------------------------------


def lacks(tool: str) -> str:
    """The one line that says why this machine has nothing to say, or an empty string."""
    if not device.HAS_GPU:
        return said("No GPU was found: the sanitizers watch kernels that run. `check` watches addresses without one.")
    if tool in INSTRUMENTED:
        return "" if tool in instrumented() else said("this Triton has no {tool}").format(tool=tool)
    if not toolchain.find_tool("compute-sanitizer"):
        return said("no compute-sanitizer: it comes with the CUDA toolkit; put its folder on PATH")
    return ""


def instrumented() -> list[str]:
    """The modes of instrumentation that this Triton's compiler for NVIDIA knows."""
    import triton.backends.nvidia.compiler as compiler

    return [mode for mode in INSTRUMENTED if mode in inspect.getsource(compiler)]


@dataclass(frozen=True)
class Part:
    """What of a lesson a tool watches; by itself everything.

    rung   by name; of all
    shape  the sizes of one case, in place of the lesson's checks
    sms    as many SMs as kernels shall fill, in place of the GPU's own count
    """

    rung: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    sms: int = 0

    @classmethod
    def of(cls, words: str) -> "Part":
        """The part that is written so."""
        rung = "" if "=" in words.partition(" ")[0] else words.partition(" ")[0]
        shape = shape_of(words.removeprefix(rung))
        return cls(rung, shape, shape.pop("sms", 0))

    def __str__(self) -> str:
        words = [self.rung, *(f"{name}={value}" for name, value in self.shape.items())]
        return " ".join(filter(None, [*words, f"sms={self.sms}" * bool(self.sms)]))


def shape_of(words: str) -> dict[str, Any]:
    """The sizes in B=1 S=384 causal=True layout=bshd. Raises ValueError with the word that is none."""
    found: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.partition("=")
        if not (name.isidentifier() and value):
            words_ = said("shape: {word} is no size: write NAME=VALUE, as in {example}")
            raise ValueError(words_.format(word=repr(word), example="'B=1 S=384 causal=True'"))
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a name of a layout
            found[name] = value
    return found


def run(name: str, tool: str, part: Part = Part(), seconds: float = SECONDS) -> Counter[Report]:
    """The reports of a tool on the rungs of a lesson, each run once in a process of its own. Raises NotUnderstood."""
    command = [sys.executable, "-m", "lessonkit.measure.sanitize", name, json.dumps(vars(part))]
    command.append(json.dumps([*map(asdict, cases(name, part))]))
    # Each tensor an allocation of its own: past its end begins nothing else that is valid.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if tool in INSTRUMENTED:
        code, out, err = process.output(command, seconds, **env, TRITON_INSTRUMENTATION_MODE=tool)
        found = parsed(tool, out + err)
        if code and not found:
            raise NotUnderstood(f"{name} under {tool}: exit code {code}: {_last_words(out + err)}")
        return found
    around = [toolchain.find_tool("compute-sanitizer"), *OPTIONS, "--tool", tool, *TOOLS[tool]]
    code, out, err = process.output([*around, *command], seconds, **env)
    if DONE not in out:
        raise NotUnderstood(f"{name} under {tool}: not every rung ran (exit code {code}): {_last_words(out + err)}")
    return parsed(tool, out + err)


def watched(
    folder: Path, name: str, tool: str, part: Part, known: Sequence[Argued], seconds: float = SECONDS
) -> tuple[Counter[Report], list[Report]]:  # fmt: skip
    """Run a tool and keep what it says: all reports, and those that are not argued. Raises NotUnderstood."""
    found = run(name, tool, part, seconds)
    save(folder, name, tool, found, known, part)
    return found, unargued(found, known, name)


def cases(name: str, part: Part) -> tuple[Chosen, ...]:
    """Of an operator and one direction, what it is called with in place of a lesson's checks."""
    if not operator_cases.is_operator(name):
        return ()
    chosen = operator_cases.chosen(name, part.rung, large=False)
    return (replace(chosen[0], shape=part.shape),) if part.shape else chosen


def save(
    folder: Path, name: str, tool: str, found: Counter[Report], known: Sequence[Argued], part: Part = Part()
) -> None:  # fmt: skip
    """Keep what a tool said of a lesson or a part of it, in place of what it said before; a clean one has a row too."""
    about = {"lesson": name, "part": str(part), **rows.machine()}
    source = {"source": operator_cases.source(name, part.rung)}
    open_ = unargued(found, known, name)
    new = [
        {**about, **asdict(report), "count": count, "argued": "" if report in open_ else "yes", **source}
        for report, count in sorted(found.items())
    ]
    new = new or [{**about, **asdict(Report(tool, "", "")), "count": 0, "argued": "", **source}]
    with changing(folder / NAME):
        before = [dict.fromkeys(new[0], "") | row for row in read_csv(folder / NAME)]
        kept = [row for row in before if (row["lesson"], row["part"], row["tool"]) != (name, str(part), tool)]
        write_atomically(folder / NAME, to_csv([*kept, *new]))


def marked(folder: Path, known: Sequence[Argued]) -> str:
    """The kept rows, each marked by today's list of arguments."""
    found = []
    for row in read_csv(folder / NAME):
        report = Report(row["tool"], row["kernel"], row["what"])
        found.append(row | {"argued": "yes" if row["what"] and not unargued([report], known, row["lesson"]) else ""})
    return to_csv(found)


# ---- The driver, run under a tool -----------------------------------------------------------------------------------

DONE = "every rung ran"


def main(name: str, part: Part, cases: Sequence[Chosen] = ()) -> None:
    if part.sms:  # before the lesson takes the name
        vars(sys.modules["lessonkit"])["num_sms"] = lambda: part.sms
        common = importlib.import_module("course_ops._common")
        vars(common)["_gpu"] = lambda device, gpu=common._gpu: (part.sms, *gpu(device)[1:])
    if operator_cases.is_operator(name):
        ran = _operator(name, part, cases)
    else:
        ran = _lesson(importlib.import_module(name).LESSON, part)
    faulthandler.cancel_dump_traceback_later()
    if ran or part == Part():
        print(DONE, flush=True)
    else:
        print(f"no rung of {name} takes {part}")


def _lesson(lesson: Lesson, part: Part) -> int:
    """How many calls ran."""
    shapes = [part.shape] if part.shape else [case.shape for case in lesson.checks if not case.gib]
    ran = 0
    for rung in lesson.rungs:
        if part.rung not in ("", rung.__name__):
            continue
        if check.cannot_run(lesson, rung, lesson.checks[0], lesson.dtypes[0]):
            continue
        faulthandler.dump_traceback_later(RUNG_SECONDS, exit=True)
        for shape in shapes:
            try:
                rung(*check.inputs(lesson, shape, lesson.dtypes[-1]))
            except Unsupported:
                continue
            torch.cuda.synchronize()
            ran += 1
    return ran


def _operator(name: str, part: Part, cases: Sequence[Chosen]) -> int:
    """How many calls ran."""
    (lesson,) = (each for _, each in operator_cases.lessons(name) if each.rungs[0].__name__ == part.rung)
    for case in cases:
        faulthandler.dump_traceback_later(RUNG_SECONDS, exit=True)
        with case.mode():
            lesson.rungs[0](*case.inputs(lesson))
        torch.cuda.synchronize()
    return len(cases)


if __name__ == "__main__":
    main(sys.argv[1], Part(**json.loads(sys.argv[2])), [Chosen(**each) for each in json.loads(sys.argv[3])])
