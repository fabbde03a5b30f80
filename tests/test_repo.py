"""The repository keeps its own promises: generated files are fresh, both languages are there, nothing private leaks."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import partial

from lessonkit.base import cpp_text
from lessonkit.base.files import ROOT, environment
from lessonkit.base.tables import head, read_csv
from lessonkit.cuda import sass, toolchain
from lessonkit.judge import mutants
from lessonkit.lesson import discover
from lessonkit.lesson import kernels as lesson_kernels
from lessonkit.measure import rows, stale
from lessonkit.pages import plots, report

import pytest
import triton
import triton.language as tl

# What .gitignore names, and what is hidden.
MADE = re.compile(r"(^|/)(\.|__pycache__/|[^/]*\.egg-info/)|^(data|answers|reports/cpu)/")


def tracked(root):
    """The files that git tracks; in an unpacked archive, or without git, all that nobody has made since."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True).stdout.split("\0")[
            :-1
        ]
    except FileNotFoundError:
        listed = []
    there = (p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    return sorted(root / name for name in listed or (name for name in there if not MADE.search(name)))


TRACKED = tracked(ROOT)
IN_BOTH = ("README.md", "GUIDE.md", "SYLLABUS.md", "GLOSSARY.md", "api_card.md")
CARDS = sorted(ROOT.glob("day2_triton_basics/api_card*.md"))


def test_the_repositorys_files_are_found(tmp_path, monkeypatch):
    """Also in an unpacked archive, without git."""
    assert len(TRACKED) > 100
    for name in ("README.md", "day1/lesson.py", ".venv/x.md", "day1/.cache/x", "data/raw", "day1/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ours = [tmp_path / "README.md", tmp_path / "day1/lesson.py"]
    assert tracked(tmp_path) == ours
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tracked(tmp_path) == ours


def test_each_file_of_tests_has_one_place_in_the_list_of_them():
    """The list in tests/conftest.py: one pattern names a file, and none names nothing."""
    text = (ROOT / "tests" / "conftest.py").read_text().split('"""')[1]
    patterns = [word for line in text.split("this list):\n\n")[1].splitlines() for word in line[16:].split()]
    files = [path.stem.removeprefix("test_") for path in sorted((ROOT / "tests").glob("test_*.py"))]
    places = {file: [pattern for pattern in patterns if fnmatch(file, pattern)] for file in files}
    assert not {file: found for file, found in places.items() if len(found) != 1}
    assert {pattern for found in places.values() for pattern in found} == set(patterns)


def test_generated_files_are_fresh():
    stale = [str(path) for path, content in report.generate().items() if not report.same(path, content)]
    assert not stale, f"run `python -m lessonkit report`: {stale}"


@pytest.mark.night
def test_each_kind_of_picture_can_be_drawn():
    """Whether a picture is fresh is seen without drawing it."""
    pictures = [found for found in report.generate().values() if isinstance(found, plots.Picture)]

    def code(draw):
        """Of the function that draws: inside of what gives it its axes, and of arguments that it has already."""
        while isinstance(draw, partial):
            draw = draw.args[0] if draw.func is plots._alone else draw.func
        return draw.__code__

    kinds = {code(picture.draw): picture for picture in pictures}
    assert len(kinds) > 3
    for picture in kinds.values():
        assert picture.is_in(picture.png())


@pytest.mark.release
def test_rows_come_from_this_code():
    old = [*map(str, stale.old(stale.released())), *stale.old_tables(stale.released())]
    assert not old, "measure again, or show their machine code to be equal: `python -m lessonkit stale`"


def test_every_rung_has_a_compiled_row():
    """Of CUDA C++ every kernel that the program defines, not every rung."""
    for name, lesson in lesson_kernels():
        path = rows.REPORTS / "compiled" / f"{name}.csv"
        found = {row["rung"] for row in read_csv(path)}
        if lesson.extension:
            wanted = sass.declared(lesson.extension.source)
            if "ThunderKittens" in toolchain.comment_line(lesson.extension.source, "Needs"):
                found.discard("kernel")  # the library's own
        else:
            wanted = {rung.__name__ for rung in lesson.rungs}
        assert found == wanted, f"run `python -m lessonkit compile {name}`"
        about = head(path)
        assert {"triton", "nvcc"} & set(about), name
        assert set(about["source"]) == ({"program"} if lesson.extension else found), name


@pytest.mark.parametrize(
    "readme",
    [p for p in TRACKED if p.name in IN_BOTH and p.parent.name != "reports"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_both_languages(readme):
    assert readme.with_suffix(".zh-CN.md").exists()


@pytest.mark.parametrize("page", [p for p in TRACKED if p.suffix == ".md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", page.read_text())  # `kernel[grid](...)` is no link
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_every_lesson_is_in_its_days_guide(readme):
    for name, _ in discover():
        day, stem = name.split(".")
        assert stem in (ROOT / day / readme).read_text(), (
            f"{day}/{readme} does not mention {stem}: python -m lessonkit report"
        )


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.name)
def test_api_card_names_exist(card):
    """The card names nothing that this Triton does not have."""
    names = set(re.findall(r"`(?:@)?((?:tl|triton)(?:\.\w+)+)", card.read_text()))
    assert len(names) > 30
    for name in names:
        found = {"tl": tl, "triton": triton}[name.split(".")[0]]
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_no_registry_host_is_named():
    hosts = re.compile(
        "|".join(["py" + r"pi\.org", "download" + r"\.pytorch", "files" + r"\.pythonhosted", "conda" + r"\.anaconda"])
    )
    for path in TRACKED:
        if path.exists() and path.suffix in (".md", ".py", ".toml", ".txt", ""):
            assert not hosts.search(path.read_text()), path


@pytest.mark.parametrize("name", [name for name, _ in discover("day2")])
def test_script_imports_by_itself(name):
    """Run without TRITON_INTERPRET set, as a learner does: lessonkit must come before triton in the file."""
    text = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    if "import triton" in text:
        assert text.index("lessonkit import") < text.index("import triton")


RUN_CHECKS_ONLY = """
import runpy, lessonkit.commands.show as show
show.resources = show.timed = lambda *anything: None
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.night
def test_a_script_runs_from_anywhere(tmp_path):
    code = RUN_CHECKS_ONLY.format(script=str(ROOT / "day2_triton_basics" / "lesson01_vector_add.py"))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_name_has_a_space():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [name for name in listed.splitlines() if " " in name]


def test_every_rung_is_named_by_a_mutant():
    """Of its own kernel or launcher; also those that one kind of GPU alone can judge."""
    unnamed = [
        f"{name}.{rung.__name__}"
        for name, lesson in lesson_kernels()
        for rung in lesson.rungs
        if rung.__name__ not in {mutant.rung for mutant in lesson.wrong}
    ]
    assert not unnamed, f"no wrong version of {', '.join(unnamed)} is known to be caught: add a Mutant to its lesson"


# Rungs whose lesson has no mutant of device code for them, and where it is.
MUTANT_ELSEWHERE = {
    "day3_matmul_tk.lesson01_matmul.autotuned": "tests/test_day3.py",
    # Of PyTorch's calls and a kernel of course_ops.
    "day4_replace_op.lesson20_add_norm_backward.norm_then_add": "tests/operators/layer_norm.py",
}


def changes_device_code(name, mutant):
    """Whether the function that the mutant changes is of Triton, of Gluon, or CUDA C++ for a GPU."""
    before = mutants._texts(name, mutant.rung)
    after = mutants.changed(before, name, mutant)
    ((path, text),) = [(path, text) for path, text in before if after[path] != text]
    if path.suffix == ".py":
        found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == mutant.where]
        return any("jit" in ast.unparse(decorator) for decorator in found[0].decorator_list)
    codes = [text[d.start : d.stop] for d in cpp_text.definitions(text) if d.name == mutant.where]
    return any(mutant.old in code and re.search("__(global|device)__", code) for code in codes)


def test_every_rung_is_named_by_a_mutant_of_its_kernel():
    """A rung may share the kernel, or a device function, with another: that the mutant is rejected shows it runs."""
    unnamed = {
        f"{name}.{rung.__name__}"
        for name, lesson in lesson_kernels()
        for rung in lesson.rungs
        if not any(m.rung == rung.__name__ and changes_device_code(name, m) for m in lesson.wrong)
    }
    assert unnamed == {*MUTANT_ELSEWHERE}, "add a Mutant whose `where` is a kernel to the lessons of these rungs"
    assert all((ROOT / path).is_file() for path in MUTANT_ELSEWHERE.values())


@pytest.mark.parametrize(
    ("lesson", "why", "is_device_code"),
    [
        ("day2_triton_basics.lesson05_softmax", "no maximum subtracted", True),
        ("day2_triton_basics.lesson05_softmax", "x divided, not exp(x - m)", False),
        ("cuda_src.04_parallel_reduction", "no barrier between steps", True),  # in a struct of device functions
        ("cuda_src.04_parallel_reduction", "blocks rounded down", False),
        ("cuda_src.18_layernorm_backward", "dw of the raw x", True),  # in a header
        ("cuda_src.05_stream_overlap", "the last chunk forgotten", False),
    ],
)
def test_a_mutant_of_a_launcher_is_none_of_its_kernel(lesson, why, is_device_code):
    (mutant,) = [m for m in dict(lesson_kernels())[lesson].wrong if m.why == why]
    assert bool(changes_device_code(lesson, mutant)) is is_device_code
