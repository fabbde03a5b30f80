"""Triton, Gluon, ThunderKittens, CUDA: one matmul, four languages
===============================================================
C = A B in bf16 on a Hopper GPU is the same machine work in every language. TMA fills a ring of stages in shared memory,
and mbarriers say full and empty. Warpgroups issue wgmma on tiles of 128 x 256 with the accumulator in registers, and C
is stored while the next tile is loaded. The languages differ in what you decide: a tile's place and swizzle, when a
copy is issued and waited for, each warp's role and registers.

When to choose which:

    Triton           first, on any GPU, until a profile shows that its compiler decided wrongly
    Gluon            when you need another schedule, or clusters with multicast (Triton 3.8), and want to stay in Python
    ThunderKittens   when the program is C++ and the library has the tiles that you need
    CUDA C++         for a new instruction or another ring; and to know what the others do

Predict before you run: how many lines do you expect of each, and how much of cuBLAS's speed do they differ by?
New words (GLOSSARY.md): cluster.
You will learn: to compare languages by what they decide for you.
Run it:    python3 course.py run lesson16_side_by_side
"""

import ast
import inspect
import textwrap
from pathlib import Path

from lessonkit import About, Steps, Table, rows, specimen
from lessonkit.base import cpp_text
from lessonkit.cuda import build

# language: lesson, rung, and what decides about layout, copies and barriers, registers and warps
WAYS = {
    "Triton": ("day3_matmul_tk.lesson02_matmul_persistent", "subtiled", "compiler", "compiler", "compiler"),
    "Gluon": ("day3_matmul_tk.lesson09_matmul_hopper", "persistent", "you name it", "you", "you"),
    "ThunderKittens": ("day3_matmul_tk.lesson14_thunderkittens_matmul", "matmul_persistent", "library", "you", "you"),
    "CUDA C++": ("cuda_src.23_hopper_matmul_persistent", "matmul_persistent", "you, in bits", "you", "you"),
}
LADDERS = (
    "day3_matmul_tk.lesson01_matmul",
    "day3_matmul_tk.lesson02_matmul_persistent",
    "day3_matmul_tk.lesson09_matmul_hopper",
    "day3_matmul_tk.lesson13_tiles",
    "day3_matmul_tk.lesson14_thunderkittens_matmul",
    "cuda_src.22_hopper_matmul",
    "cuda_src.23_hopper_matmul_persistent",
)
COUNTED = ("day", "problems.", "course_ops.")  # modules whose functions a user of the language has to write
SIZES = tuple(f"M={n} N={n} K={n}" for n in (4096, 8192, 16384))


def lines_of_code():
    """Lines of kernel and launch that you write yourself: fewest in Triton, most in CUDA; comments do not count."""
    counted = {way: _lines(*about[:2]) for way, about in WAYS.items()}
    assert counted["Triton"] < counted["Gluon"] < counted["CUDA C++"]
    assert counted["Triton"] < counted["ThunderKittens"] < counted["CUDA C++"]
    for way, lines in counted.items():
        print(f"  {way:15} {lines} lines")


def _lines(lesson, rung):
    module = inspect.getmodule(specimen(lesson, rung))
    program = Path(module.__file__).with_suffix(".cu")
    return _cpp_lines(program, rung) if program.exists() else _python_lines(module, rung)


def _python_lines(module, name):
    """Lines of a function and of all functions and classes of the course that it uses, the kit's not; no docstrings."""
    todo, seen = [(module, name)], {}
    while todo:
        module, name = todo.pop()
        found = vars(module).get(name)
        function = getattr(found, "fn", found)
        is_code = inspect.isfunction(function) or inspect.isclass(function)
        if not is_code or not function.__module__.startswith(COUNTED) or function in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        seen[function] = sum(bool(line) for line in ast.unparse(tree).splitlines())
        home = inspect.getmodule(function)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                todo.append((home, node.id))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # first.place
                other = vars(home).get(node.value.id)
                todo += [(other, node.attr)] if inspect.ismodule(other) else []
    return sum(seen.values())


def _cpp_lines(program, launcher):
    """Lines of a launcher and of all that it reaches in the program and its headers; course.cuh is the course's own."""
    files = [
        path for path in build.local_files(program) if path.name != "course.cuh" and path.suffix in (".cu", ".cuh")
    ]
    names = cpp_text.reached(files, {launcher})
    total = 0
    for text in (cpp_text.without_comments(path.read_text()) for path in files):
        for found in cpp_text.definitions(text):
            if found.name in names:
                total += sum(bool(line.strip()) for line in text[found.start : found.stop].splitlines())
    return total


def one_product_four_ways(folder):
    """For each language: what decides, lines of code, and the share of cuBLAS in one GPU's rows."""
    table = []
    for way, (lesson, rung, layout, copies, registers) in WAYS.items():
        speed = {size: _of_cublas(folder, lesson, rung, size) for size in SIZES}
        row = {"": way, "layout": layout, "copies, barriers": copies, "registers, warps": registers}
        row |= {"lines": _lines(lesson, rung)}
        row |= {f"% of cuBLAS at {size.rsplit('=')[-1]}": found for size, found in speed.items()}
        table.append(row)
    note = (
        "Lines: kernel and launch, with all of the course's own code that they use, comments not counted. "
        "Each way was timed in the same rounds as cuBLAS, in its own lesson."
    )
    return Table("one product, four ways", table, note)


def percent_of_cublas_by_rung(folder):
    """Every rung of every matmul ladder of the day, in the order of the course."""
    table = []
    for lesson in LADDERS:
        for rung in specimen(lesson, "LESSON").rungs:
            for size in SIZES[:2]:
                if (found := _of_cublas(folder, lesson, rung.__name__, size)) != "":
                    label = f"{lesson.split('.')[1].split('_')[0]} {rung.__name__}"
                    table.append({"rung": label, "size": size.rsplit("=")[-1], "% of cuBLAS": found})
    note = "bf16, square; 100% is as fast as cuBLAS in the same rounds."
    return Table("percent of cuBLAS by rung", table, note, x="rung", y="% of cuBLAS", by="size")


def _of_cublas(folder, lesson, rung, size):
    ms = {row.rung: row.ms_p50 for row in rows.read(folder / f"{lesson}.csv") if row.shape == size}
    return round(100 * ms["torch"] / ms[rung], 1) if rung in ms and "torch" in ms else ""


# The answers: Triton needs the fewest lines, Gluon and ThunderKittens more than twice as many, CUDA C++ almost six
# times as many. On an H200 all four are within 6% of cuBLAS: the table `one product, four ways` has the figures.
LESSON = Steps(
    about=About(
        teaches="one matmul in Triton, Gluon, ThunderKittens and CUDA: lines, ownership, share of cuBLAS by "
        "rung, when to choose which",
        hours=0.75,
        star=True,
    ),
    steps=(lines_of_code,),
    compares=(one_product_four_ways, percent_of_cublas_by_rung),
)

if __name__ == "__main__":
    LESSON.main()
