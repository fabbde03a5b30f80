"""requirements/: all that course.py installs is listed, with hashes, and pip takes nothing else."""

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata

from lessonkit.base.errors import Missing
from lessonkit.base.files import ROOT
from lessonkit.commands import lock

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LISTS = {path.name: path.read_text() for path in sorted(lock.FOLDER.glob("*.txt"))}
# The same machine with each Python that the course supports.
PYTHONS = [
    default_environment() | {"python_version": v, "python_full_version": f"{v}.0"} for v in ("3.11", "3.12", "3.13")
]


@pytest.fixture
def course(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_VENV", str(tmp_path / "venv"))
    spec = importlib.util.spec_from_file_location("course_under_test", ROOT / "course.py")
    course = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(course)
    return course


def listed(text, environment):
    """Package -> version, of the lines that are for this environment."""
    lines = re.findall(r"^([\w.-]+)==(\S+)(?: ; (.+?))?(?: \\)?$", text, re.MULTILINE)
    return {name: version for name, version, marker in lines if not marker or Marker(marker).evaluate(environment)}


def test_the_lists_are_those_that_are_installed(course, monkeypatch):
    monkeypatch.setattr(course.shutil, "which", lambda name: None)
    monkeypatch.setattr(course.Path, "exists", lambda path: False)
    assert {path.name for path in course.lists()} | {"torch.txt", "torch_cpu.txt", "browser.txt"} == set(LISTS)


def test_a_machine_with_a_browser_gets_what_its_tests_need(course, monkeypatch):
    """Once for each list, and only where there is a browser."""
    asked = []
    course.VENV.mkdir()
    monkeypatch.setattr(course, "pip", lambda *words, must: asked.append(words) or True)
    monkeypatch.setattr(course.shutil, "which", lambda name: None)
    course.browsers_tests()
    assert asked == []
    monkeypatch.setattr(course.shutil, "which", lambda name: name == "chromium")
    course.browsers_tests()
    course.browsers_tests()
    ((*_, path),) = asked
    assert path.endswith("browser.txt")


@pytest.mark.parametrize("name", LISTS)
def test_every_package_has_hashes_and_no_place(name):
    """Where packages come from is pip's setting."""
    for package, known in lock.hashes(LISTS[name]).items():
        assert known, package
    for line in LISTS[name].splitlines():
        assert re.fullmatch(r"#.*|[\w.-]+==[\w.+]+( ; [^\\]+)?( \\)?|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
        assert "://" not in line


def test_the_lists_have_the_versions_of_constraints_txt():
    """And the parts that change with the machine are apart: PyTorch, its CUDA libraries, the CUDA compiler."""
    everything = lock.pins("".join(LISTS.values())) | lock.pins(LISTS["torch.txt"])
    wanted = lock.pins((ROOT / "constraints.txt").read_text())
    assert {name: everything[name] for name in wanted} == wanted
    assert not [name for name in lock.pins(LISTS["course.txt"]) if name == "torch" or name.startswith(lock.CUDA)]
    assert {name for name in lock.pins(LISTS["torch.txt"]) if not name.startswith(lock.CUDA)} == {"torch"}
    assert lock.pins(LISTS["torch_cpu.txt"]) == {"torch": f"{wanted['torch']}+cpu"}
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["nvcc"]
    needs = {need.name: need.specifier for need in map(Requirement, extra)}
    assert all(needs[name].contains(version) for name, version in lock.pins(LISTS["nvcc.txt"]).items())
    assert lock.pins(LISTS["nvcc.txt"]).keys() == needs.keys()


@pytest.mark.parametrize("environment", PYTHONS, ids=lambda environment: environment["python_version"])
def test_nothing_is_missing(environment):
    """pip installs what is listed and resolves nothing: every need of the course, and theirs, must be there and fit.

    Needs of needs are those of the installed packages, which have the listed versions.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    first = [*project["dependencies"], *settings["build-system"]["requires"]]
    first += [need for extra in lock.EXTRAS for need in project["optional-dependencies"][extra]]
    there = {
        canonicalize_name(n): v for n, v in listed(LISTS["course.txt"] + LISTS["torch_cpu.txt"], environment).items()
    }
    todo, seen = [(Requirement(need), "the course") for need in first], set()
    while todo:
        need, of = todo.pop()
        extras = need.extras or {""}
        if need.marker and not any(need.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras)):
            continue
        name = canonicalize_name(need.name)
        assert name in there, f"{need} of {of} is in no list: {lock.AGAIN}"
        assert need.specifier.contains(there[name]), f"{need} of {of}, listed is {there[name]}: {lock.AGAIN}"
        if (name, frozenset(extras)) in seen or metadata.version(name) != there[name]:
            continue
        seen.add((name, frozenset(extras)))
        for line in metadata.requires(name) or ():
            more = Requirement(line)
            if not more.marker or any(more.marker.evaluate(environment | {"extra": e}) for e in ("", *need.extras)):
                more.marker = None
                todo.append((more, name))
    assert len(seen) > 40


def wheel(folder, text):
    """A package of one module."""
    path = folder / "listed-1.0-py3-none-any.whl"
    about = "listed-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("listed.py", text)
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: listed\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return path


def test_pip_takes_no_file_with_another_hash(course, tmp_path):
    """The file that was locked is installed; the same version with other content is not, nor what has no hash."""
    good = lock.hashlib.sha256(wheel(tmp_path, "ONE = 1").read_bytes()).hexdigest()
    (requirements := tmp_path / "list.txt").write_text(f"listed==1.0 --hash=sha256:{good}\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(tmp_path)]

    def install(target):
        command = [*pip, "--target", str(tmp_path / target), *course.HASHED, "-r", str(requirements)]
        return subprocess.run(command, capture_output=True, text=True)

    done = install("good")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "good" / "listed.py").exists()
    wheel(tmp_path, "ONE = 2")
    assert "DO NOT MATCH THE HASHES" in install("changed").stderr
    requirements.write_text("listed==1.0\n")
    assert "Hashes are required" in install("without").stderr
    assert not (tmp_path / "changed").exists()
    assert not (tmp_path / "without").exists()


@pytest.mark.parametrize(
    ("gpu", "has_cpu", "torch"), [(True, True, "torch.txt"), (False, True, ""), (False, False, "torch.txt")]
)
def test_what_is_installed(course, monkeypatch, gpu, has_cpu, torch):
    """All of it from lists, with hashes, but the course, which is built with what is installed and fetches nothing."""
    commands = []

    def run(command, check=True, **more):
        commands.append(command)
        refused = "torch_cpu.txt" in command[-1] and not has_cpu
        return subprocess.CompletedProcess(command, int(refused))

    course.VENV.mkdir()
    monkeypatch.setattr(course, "make_venv", lambda: None)
    monkeypatch.setattr(course.subprocess, "run", run)
    monkeypatch.setattr(course.shutil, "which", lambda name: "there" if name == "nvcc" or gpu else None)
    course.environment()
    installed = [command for command in commands if "install" in command]
    lists = [course.Path(command[-1]).name for command in installed if "--requirement" in command]
    assert lists == ["course.txt", "web.txt", *([] if gpu else ["torch_cpu.txt"]), *([torch] if torch else [])]
    for command in installed[:-1]:
        assert "--require-hashes" in command
    assert {"--no-deps", "--no-build-isolation", "--editable"} < set(installed[-1])
    assert commands[-1][-1] == "check"
    commands.clear()
    course.environment()
    assert not commands, "an environment that is complete is used as it is"


UV = r"""#!{python}
import re, sys
words = sys.argv
needs = open(words[-3]).read().split("\n")
out = words[-1]
before = open(out).read()
left = {{words[i + 1] for i, word in enumerate(words) if word == "--no-emit-package"}}
names = sorted({{re.match(r"[\w.-]*", need)[0] for need in needs}} - {{"", *left}})
pins = dict(line.split(" ")[0].split("==") for line in before.splitlines() if "==" in line)
pins |= dict(line.split("==") for line in open(words[words.index("--constraints") + 1]).read().split() if "==" in line)
open(out, "w").write("".join(f"{{n}}=={{pins.get(n, '1.0')}} \\\n    --hash=sha256:{{'a' * 64}}\n" for n in names))
"""


def test_a_lock_splits_by_machine_and_keeps_versions(monkeypatch, tmp_path):
    """With a uv that resolves nothing; a wheel that pip finds here adds its hash to those that the list had."""
    (tmp_path / "uv").write_text(UV.format(python=sys.executable))
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr(lock, "FOLDER", tmp_path / "requirements")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    run, content = subprocess.run, b"a wheel"

    def no_network(command, **more):
        if "pip" in command and "download" in command:
            (lock.Path(command[-2]) / "torch.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, 0)
        return run(command, **more)

    monkeypatch.setattr(lock.subprocess, "run", no_network)
    written = {path.name: path.read_text() for path in lock.lock(upgrade=False)}
    assert lock.pins(written["torch.txt"]).keys() == {"torch"}
    assert "torch" not in lock.pins(written["course.txt"])
    assert "ruff" in lock.pins(written["course.txt"])
    assert lock.pins(written["nvcc.txt"]).keys() == lock.pins(LISTS["nvcc.txt"]).keys()
    content = b"the wheel of another Python"
    assert len(lock.hashes(written["torch_cpu.txt"])["torch"]) == 1
    course = tmp_path / "requirements" / "course.txt"
    course.write_text(written["course.txt"].replace("scikit-learn", "scikit_learn").replace("mypy==1.0", "mypy==0.9"))
    again = {path.name: path.read_text() for path in lock.lock(upgrade=False)}
    assert len(lock.hashes(again["torch_cpu.txt"])["torch"]) == 2
    assert lock.pins(again["course.txt"])["mypy"] == "0.9", "a version that still fits stays"
    assert lock.pins({p.name: p.read_text() for p in lock.lock(upgrade=True)}["course.txt"])["mypy"] == "1.0"


def test_without_uv_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(lock.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(Missing, match="-m pip install uv"):
        lock.lock(upgrade=False)
