"""course_ops as a package of its own: its wheel, what it needs, its version, its types."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser

from lessonkit.base.files import ROOT, environment

import pytest

import course_ops

pytestmark = pytest.mark.kept("pyproject.toml", "LICENSE", "CHANGELOG.md", "course_ops/**/*")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = tomllib.loads((ROOT / "course_ops/pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
USE = """
import sys
for name in ("lessonkit", "problems", "numpy", "pytest", "matplotlib", "sklearn", "typer", "rich", "babel", "pybind11"):
    sys.modules[name] = None  # its import fails
import torch, course_ops
assert course_ops.__file__.startswith(sys.argv[1]), course_ops.__file__
x = torch.randn(3, 5, requires_grad=True, device="cpu")
course_ops.softmax(x).square().sum().backward()
assert x.grad is not None
print(course_ops.__version__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "course_ops", folder / "course_ops", ignore=left_out)
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=folder / "course_ops", check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_every_file_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as files:
        found = {name for name in files.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/LICENSE") for name in files.namelist())
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "course_ops").rglob("*.py") if "build" not in path.parts}
    assert found == there | {"course_ops/py.typed"}


def test_the_wheel_needs_torch_and_triton_alone(wheel):
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("METADATA"))
        head = Parser().parsestr(files.read(metadata).decode())
    needed = [need for need in head.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(re.match(r"[\w-]+", need)[0] for need in needed) == ["torch", "triton"]
    assert head["Version"] == course_ops.__version__


def test_the_wheel_says_whose_it_is_and_its_description_links_nowhere(wheel):
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("METADATA"))
        head = Parser().parsestr(files.read(metadata).decode())
    assert head["License-Expression"] == "MIT"
    assert head["Author"] in (ROOT / "LICENSE").read_text()
    classifiers = head.get_all("Classifier")
    assert {"Typing :: Typed", "Environment :: GPU :: NVIDIA CUDA", "Operating System :: POSIX :: Linux"} <= {
        *classifiers
    }
    assert head["Description-Content-Type"] == "text/markdown"
    description = head.get_payload()
    assert "course_ops.attention" in description
    assert "](" not in description


def test_it_computes_where_nothing_else_is_installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
    env = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", USE, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env | {"PYTHONPATH": str(tmp_path)}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == course_ops.__version__


def test_course_and_package_have_one_version_and_one_range_of_torch_and_triton():
    assert course_ops.__version__ == PROJECT["version"]
    assert set(OWN["dependencies"]) <= set(PROJECT["dependencies"])
    assert OWN["requires-python"] == PROJECT["requires-python"]
    assert (ROOT / "course_ops/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == course_ops.__version__


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_first_example_of_the_guide_runs_as_it_stands(page, capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "course_ops" / page).read_text(), re.DOTALL)[1]
    found = {}
    exec(compile(code, page, "exec"), found)
    assert found["x"].grad.shape == found["x"].shape
    assert found["out"].shape == found["q"].shape
    assert capsys.readouterr().out.splitlines() == [
        "0: LayerNorm -> course_ops.layer_norm",
        "1: GELU -> course_ops.gelu",
    ]


def test_the_guide_lists_every_operator():
    for page in ("README.md", "README.zh-CN.md"):
        listed = set(re.findall(r"^\| `(\w+)\(", (ROOT / "course_ops" / page).read_text(), re.MULTILINE))
        assert listed == set(course_ops.__all__) - {"Unsupported", "patch"}, page


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_says_where_the_rest_stands(page):
    text = (ROOT / "course_ops" / page).read_text()
    guide = page.replace("README", "GUIDE")
    lines = (ROOT / "course_ops" / guide).read_text().splitlines()
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    linked = set(re.findall(rf"\({re.escape(guide)}#([^)]+)\)", text))
    assert linked
    assert linked <= anchors, linked - anchors
