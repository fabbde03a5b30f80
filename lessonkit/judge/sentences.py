"""What the judge, the interpreter and the grader say of a kernel: raised in English, shown in the reader's language."""

import re

from lessonkit.base.words import later, said
from lessonkit.cuda.toolchain import MEND

SENTENCES = (
    later(
        "{wrong} of {all} lanes {what} outside every tensor of the launch: "
        "the first is element {element} of {name}, whose shape is {shape}: mask them"
    ),
    later("{wrong} of {all} lanes {what} outside every tensor of the launch: mask them"),
    later(
        "a block of shape {shape} is no single truth value, which if, while, and, or, not, min and max need. Choose "
        "for each element with tl.where, join masks with &, | and ~, compare with tl.minimum and tl.maximum, or "
        "reduce the block to one value with tl.max"
    ),
    later(
        "{wrong} of {all} wrong, all in {box}, the first at {first}: "
        "expected {expected}, got {got}, more off than {limit}"
    ),
    later("{wrong} of {all} wrong, the first at {first}: expected {expected}, got {got}, more off than {limit}"),
    later("{wrong} of {all} wrong, all in {box}, the first at {first}: expected {expected}, got {got}"),
    later("{wrong} of {all} wrong, the first at {first}: expected {expected}, got {got}"),
    later("the first wrong one is at {first}: expected {expected}, got {got}"),
    later("NaN at {first}: computed from a NaN, or never written"),
    later("{rung} moves {times} times the least bytes on the last check; `passes` says {predicted}"),
    later("argument {number} is not what it was"),
    later("rejected by {check}, on {where}"),
    later("the kernel did not end in {seconds} s"),
    later("needs a GPU with {size} GiB"),
    later("needs {size} GiB of GPU memory"),
    later("needs sm_{target}: {needed}"),
    later("needs sm_{target}"),
    later("this kernel needs {needed}, which sm_{target} has; this GPU is sm_{here}"),
    later("{name} is not emulated: it needs a GPU"),
    later("this mutant is emulated; on a GPU it would be a build by nvcc"),
    later("races and deadlocks are found without a GPU, in any order of the hardware"),
    later("addresses are watched in the interpreter; on a GPU compute-sanitizer does it"),
    later("{got} is a little too large"),
    later("{got} is a little too small"),
    later("{got} is 2 to 10 times too large"),
    later("{got} is 2 to 10 times too small"),
    later("{got} is more than 10 times too large"),
    later("{got} is more than 10 times too small"),
    later("{got} is wrong, even its sign"),
    later("{got} is wrong"),
    later("{got} is no prediction"),
    later("write a number, got {got}"),
    later("expected {count} of them, got {got}"),
    later("expected shape {expected}, got {got}"),
    later("expected a tensor, got {got}"),
    later("expected {expected}, got {got}"),
    later("{got} results, expected {expected}"),
    *MEND.values(),
)


def told(text: str) -> str:
    """A text in the reader's language, from the first part on that is one of SENTENCES: `value: 3 of 5 wrong, ...`."""
    for at in (0, *(mark.end() for mark in re.finditer(": ", text))):
        for sentence in SENTENCES:
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>(?:(?!: ).)+)", re.escape(sentence))
            if found := re.fullmatch(pattern, text[at:]):
                named = found.groupdict()
                if "needed" in named:
                    named["needed"] = said(named["needed"])
                return text[:at] + said(sentence).format(**named)
    return text
