"""What orders the accesses to shared memory of a kernel with gl.warp_specialize, read from its PTX.

Two rules. The arguments in lessonkit/measure/sanitize.toml rest on them, and `broken` names each instruction that
breaks one. Every path through the kernel is followed, whether or not it can be taken.

Partition numbers. The compiler keeps the number of each warp's partition in shared memory, a byte each. Between a store
and a load, and between a load and the next store, all warps of the CTA execute `barrier.sync 1`.

Arrivals. One thread arrives on an mbarrier for all threads of its partition. Between what these threads read or wrote
and that arrival, they meet: at a bar.sync, or at a bar.warp.sync if the partition is one warp.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lessonkit.base.files import ROOT

WAIT, ARRIVAL, ACCESS, NUMBER_STORED, NUMBER_READ = "wait", "arrival", "access", "number stored", "number read"
ALL, BLOCK, WARP, JUMP, END = "barrier of all warps", "barrier", "barrier of a warp", "jump", "end"
KINDS = {
    ALL: r"barrier\.sync\s+1;",
    BLOCK: r"bar\.sync\s+\d+, \d+;",
    WARP: r"bar\.warp\.sync\s+-1;",
    WAIT: r"mbarrier\.try_wait\.",
    ARRIVAL: r"mbarrier\.arrive\.",
    ACCESS: r"(?:ld|st)\.(?:volatile\.)?shared|(?:ld|st)matrix\.|(?:atom|red)\.\S*shared|wgmma\.mma_async",
    JUMP: r"bra|brx",
    END: r"ret;",
}
# From here, what an instruction of ORDERED leads to. The first partition runs in the kernel's own warps: they store the
# numbers and meet (1, 2), run, meet (3), and store the number that means "leave". The other warps read a number between
# two barriers. They return after they have read that number, and not in a partition.
ORDER = {
    "start": {NUMBER_STORED: "own 0", ALL: "other 1"},
    "own 0": {NUMBER_STORED: "own 0", ALL: "own 1"},
    "own 1": {ALL: "own runs"},
    "own runs": {ALL: "own 3"},
    "own 3": {NUMBER_STORED: "own 4"},
    "own 4": {NUMBER_STORED: "own 4", ALL: "own 5"},
    "own 5": {END: "own 5"},
    "other 1": {NUMBER_READ: "other 2"},
    "other 2": {ALL: "other runs", END: "other 2"},
    "other runs": {ALL: "other 0"},
    "other 0": {ALL: "other 1"},
}
ORDERED = (NUMBER_STORED, NUMBER_READ, ALL, END)


@dataclass(frozen=True)
class Instruction:
    """line: its own in the PTX; code: the course's line that it comes from; targets: of a jump."""

    kind: str
    line: int
    text: str
    code: str = ""
    targets: tuple[str, ...] = ()
    always: bool = True  # a jump without a condition


def instructions(ptx: str, warps: list[int]) -> tuple[list[Instruction], dict[str, int]]:
    """Those of KINDS in order, and for each label how many come before it."""
    found, labels, tables, code, table = list[Instruction](), dict[str, int](), dict[str, tuple[str, ...]](), "", ""
    threads = int(_one(r"\.reqntid (\d+)\s", ptx))
    numbers = int(_one(r"ld\.shared\.b8\s+%rs?\d+, \[%r\d+\+(\d+)\];", ptx))  # where that of warp 0 would be
    files = {number: lines_of(Path(path)) for number, path in re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx)}
    for line, text in enumerate(map(str.strip, ptx.splitlines()), 1):
        if at := re.match(r"\.loc\s+(\d+) (\d+) ", text):
            lines = files[at[1]]
            code = lines[int(at[2]) - 1].strip() if 0 < int(at[2]) <= len(lines) else ""
        elif label := re.match(r"(\$L\w+):\s*(\.branchtargets)?", text):
            labels[label[1]] = len(found)
            table = label[1] if label[2] else ""
            tables[table] = ()
        elif table:
            tables[table] += tuple(re.findall(r"\$L\w+", text))
            table = "" if ";" in text else table
        elif known := re.match(rf"(@!?%\w+ )?\s*(?:{'|'.join(f'({words})' for words in KINDS.values())})", text):
            kind = list(KINDS)[next(i for i, words in enumerate(known.groups()[1:]) if words)]
            targets = tuple(re.findall(r"\$L\w+", text))
            if kind == JUMP and not targets:
                continue  # a wait's own loop
            if at := re.search(r"\[(?:global_smem|%r\d+)\+(\d+)\]", text) if kind == ACCESS else None:
                if int(at[1]) == numbers:
                    kind = NUMBER_READ
                elif "global_smem" in text and numbers + warps[0] <= int(at[1]) < numbers + threads // 32:
                    kind = NUMBER_STORED
            targets = tables.get(targets[0], targets) if targets else ()
            found.append(Instruction(kind, line, text, code, targets, not known[1]))
    return found, labels


@cache
def lines_of(path: Path) -> list[str]:
    """The lines of a file of the course, which a compiler's cache may name as another checkout's; of others none."""
    tails = (ROOT.joinpath(*path.parts[i:]) for i in range(1, len(path.parts)))
    return next((tail.read_text().splitlines() for tail in tails if tail.is_file()), [])


def _one(pattern: str, ptx: str) -> str:
    (found,) = re.findall(pattern, ptx)
    return str(found)


@dataclass(frozen=True)
class Place:
    """A place in a kernel: the next instruction, how a warp came to it, and what its threads have not yet agreed on."""

    at: int
    state: str = "start"  # of ORDER
    warps: int = 0  # of the partition
    access: int = 0  # the PTX's line of an access since the last barrier
    waited: bool = False  # nothing but accesses since the last wait


def broken(ptx: str, warps: list[int]) -> list[str]:
    """What breaks a rule, a line each. warps: of each partition, the kernel's own first."""
    code, labels = instructions(ptx, warps)
    wrong, seen, todo = set[str](), set[Place](), [Place(0, warps=warps[0])]
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        each = code[place.at]
        access, waited, state = place.access, place.waited, place.state
        if each.kind in ORDERED:
            state = ORDER[state].get(each.kind, "")
            if not state:
                wrong.add(f"line {each.line}, {each.text}: after {place.state!r}")
                continue
        if each.kind == ARRIVAL and access:
            wrong.add(f"line {each.line}, {each.text}: no barrier after the access in line {access}")
        if each.kind == ACCESS:
            access = access or each.line
            if ".mailbox." in each.code and ".load(" in each.code and not waited:
                wrong.add(f"line {each.line}, {each.text}: the mailbox is read without a wait for its mbarrier")
        elif each.kind == ALL or _meet(each, place.warps):
            access = 0
        if each.kind not in (ACCESS, JUMP):
            waited = each.kind == WAIT
        for at, of in _next(place, each, labels, warps):
            todo.append(Place(at, state, of, access, waited))
    return sorted(wrong)


def mailbox(ptx: str, warps: list[int]) -> list[Instruction]:
    """The accesses to a tile scheduler's mailbox."""
    return [each for each in instructions(ptx, warps)[0] if ".mailbox." in each.code]


def _meet(each: Instruction, warps: int) -> bool:
    """Whether all threads of a partition of so many warps execute this barrier, and no others."""
    return each.text.endswith(f", {32 * warps};") if each.kind == BLOCK else each.kind == WARP and warps == 1


def _next(place: Place, each: Instruction, labels: dict[str, int], warps: list[int]) -> Iterator[tuple[int, int]]:
    """Where a warp may go on, and of how many warps its partition is."""
    of = [place.warps] * len(each.targets)
    if each.text.startswith("brx") and place.state == "other 2":  # to the partition whose number was read
        of = [*warps[1:], *of[len(warps) - 1 :]]  # the others are of warps that fill up a warpgroup
    yield from ((labels[target], n) for target, n in zip(each.targets, of, strict=True))
    if each.kind != END and not (each.kind == JUMP and each.always):
        yield place.at + 1, place.warps
