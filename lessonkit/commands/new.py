"""`new`: the skeleton of a Triton lesson, of its problem if that is new, and its line in the path of the course."""

import re
from pathlib import Path
from textwrap import dedent

from lessonkit.base.files import ROOT, WHOLE_COURSE, write_atomically

CUDA = "For CUDA C++ copy cuda_src/02_vector_add.cu and .py"
LESSON = '''
    """TITLE: the idea in the field's words
    ==========================================
    What the operator computes, and the budget: bytes and FLOPs, and the time that they cannot beat.

    You will learn: ...
    Run it:    python3 course.py run STEM
    Check it:  python3 course.py check STEM
    Time it:   python3 course.py bench STEM
    """

    from lessonkit import About, Lesson, expect

    import torch
    import triton
    import triton.language as tl

    from problems.PROBLEM import PROBLEM


    # Rung 1. The idea in two or three sentences. Predicted: a figure in the unit of the report, and its reason.
    @triton.jit
    def WORD_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


    def WORD(x):
        """[...] -> [...], 1024 elements per program."""
        expect(x=x, contiguous=True)
        y = torch.empty_like(x)
        if x.numel():
            WORD_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y


    LESSON = Lesson(
        about=About(teaches="what the lesson settles, in one line", hours=0.5, operator="WORD"),
        problem=PROBLEM,
        rungs=(WORD,),
        wrong=(),  # Mutant(why, function, line as it is, line as it is wrong, rung): what each check must catch
    )

    if __name__ == "__main__":
        LESSON.main()
'''
PROBLEM = '''
    """TITLE: what is computed, in one line.

    x [n], contiguous, of one floating-point dtype -> y [n] of that dtype.
    """

    from lessonkit import DEVICE, Problem, Refusal, Work, case

    import torch


    def reference(x):
        raise NotImplementedError("PROBLEM: the operator in readable PyTorch, the only definition of right")


    def inputs(n, dtype=torch.float32):
        return (torch.randn(n, device=DEVICE).to(dtype),)


    def work(n, dtype):
        return Work(bytes=2 * n * dtype.itemsize, flops=n)


    PROBLEM = Problem(
        reference=reference,
        inputs=inputs,
        work=work,
        checks=(
            case("nothing to do: an empty grid is an error in CUDA", n=0),
            case("a prime: no block divides it", n=1021),
            case("one past a block: a second program", n=1025),
        ),
        benches=({"n": 2**28},),
        peers={"torch": reference},
        refuses=(Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),),
    )
'''


def lesson(name: str, problem: str, after: str, root: Path = ROOT) -> list[Path]:
    """Write the skeleton of a lesson; the files made or changed, the lesson first.

    name     in full, day2_triton_basics.lesson18_silu
    problem  the name of a file of problems/, which is made too if it is not there
    after    the lesson, in full, that stands before it in the path of the whole course
    Raises ValueError if a name does not do, or if something stands there already, and OSError if a file cannot be
    written. Nothing is left then.
    """
    if not (named := re.fullmatch(r"(day\d_\w+)\.(lesson\d\d_([a-z][a-z0-9_]*))", name)):
        raise ValueError(f"name: {name!r} is not like day2_triton_basics.lesson18_silu: folder, number, words. {CUDA}")
    folder, stem, word = named.groups()
    if not (root / folder).is_dir():
        raise ValueError(f"name: there is no folder {folder!r}")
    number = stem.partition("_")[0]
    if taken := sorted(root.glob(f"{folder}/{number}_*")):
        last = max(int(path.stem[6:8]) for path in root.glob(f"{folder}/lesson[0-9][0-9]_*"))
        there = taken[0].relative_to(root)
        raise ValueError(f"name: {there} is there already; the first number after all others is lesson{last + 1:02}")
    file = root / folder / f"{stem}.py"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", problem):
        raise ValueError(f"problem: {problem!r} cannot be a file of problems/: use small letters, digits and _")
    path = (root / WHOLE_COURSE).read_text()
    if not (line := re.search(rf'^( *)"{re.escape(after)}",\n', path, re.MULTILINE)):
        raise ValueError(f"after: {WHOLE_COURSE} has no line with {after!r}; give a lesson's full name")
    path = f'{path[: line.end()]}{line[1]}"{name}",\n{path[line.end() :]}'

    texts = {file: LESSON}
    if not (asked := root / "problems" / f"{problem}.py").exists():
        texts[asked] = PROBLEM
    elif not re.search(r"^PROBLEM\b", asked.read_text(), re.MULTILINE):
        raise ValueError(f"problem: problems/{problem}.py binds no PROBLEM: choose another name")
    words = {"FOLDER": folder, "STEM": stem, "WORD": word, "TITLE": word.replace("_", " ").capitalize()}
    try:
        for place, text in texts.items():
            text = dedent(text).lstrip().replace("problems.PROBLEM", f"problems.{problem}")
            for key, value in words.items():
                text = re.sub(rf"(?<![A-Z]){key}(?![A-Z])", value, text)
            write_atomically(place, text.replace('"PROBLEM: the', f'"problems/{problem}.py: the'))
        write_atomically(root / WHOLE_COURSE, path)
    except OSError:  # nothing is left half begun
        for place in texts:
            place.unlink(missing_ok=True)
        raise
    return [*texts, root / WHOLE_COURSE]
