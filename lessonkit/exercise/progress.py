"""What a learner has done, kept in answers/progress.json, which git ignores, beside their answers."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from lessonkit.base import renames
from lessonkit.base.files import ROOT, changing, write_atomically
from lessonkit.base.words import said
from lessonkit.exercise.source import Source, discover


class Damaged(ValueError):
    """The file of progress is no longer what was written; says where it is and what to do."""


@dataclass
class Record:
    """One exercise.

    seed    of the inputs that the last answer failed on; they are asked again until it passes
    at      when a command was last about it, in seconds since 1970
    """

    checks: int = 0
    hints: int = 0
    passed: str = ""  # the day
    seed: int | None = None
    at: float = 0


def folder() -> Path:
    """Where the learner's files lie: answers/ in the course, or where COURSE_ANSWERS says."""
    return Path(os.environ.get("COURSE_ANSWERS") or ROOT / "answers")


def _file() -> Path:
    return folder() / "progress.json"


def load() -> dict[str, Record]:
    """Everything kept so far. Raises Damaged."""
    try:
        kept = [(name, Record(**fields)) for name, fields in json.loads(_file().read_text()).items()]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        words = said("{file} is damaged ({error}): mend it, or remove it to start anew")
        raise Damaged(words.format(file=_file(), error=error)) from None
    return {renames.exercise(name): record for name, record in sorted(kept, key=lambda each: each[1].at)}


def save(records: dict[str, Record]) -> None:
    write_atomically(_file(), json.dumps({name: asdict(r) for name, r in records.items()}, indent=1) + "\n")


def of(source: Source) -> Record:
    return load().get(source.name, Record())


def update(source: Source, **fields: object) -> None:
    """Change what is known of one exercise, which is then where the learner is: `update(source, hints=2)`."""
    with changing(_file()):  # `watch` may run in one terminal, `hint` in another
        records = load()
        records[source.name] = Record(**{**asdict(records.get(source.name, Record())), "at": time.time(), **fields})
        save(records)


def by_folder() -> dict[str, list[Record]]:
    """The record of every exercise that there is now, by its folder; {} where none has been begun."""
    records, found = load(), dict[str, list[Record]]()
    for source in discover():
        found.setdefault(source.path.parent.parent.name, []).append(records.get(source.name, Record()))
    return found if any(r.checks or r.hints or r.passed for of in found.values() for r in of) else {}


def waiting(sources: Sequence[Source]) -> Source | None:
    """Where the learner is: the exercise that a command was last about, or the first after it that has not passed.

    After the last comes the first; None if all have passed.
    """
    records = load()
    state = [records.get(source.name, Record()) for source in sources]
    here = max(range(len(state)), key=lambda i: state[i].at)
    order = [*range(here, len(state)), *range(here)]
    return next((sources[i] for i in order if not state[i].passed), None)


def today() -> str:
    return date.today().isoformat()


def answer_file(source: Source) -> Path:
    """The learner's file; one that lies under an older name of the exercise is moved to the new one."""
    path = folder() / source.answer_name
    for old in () if path.exists() else renames.earlier("exercises", source.name):
        before = folder() / f"{old.replace('.', '/')}{path.suffix}"
        if before.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            before.rename(path)
            break
    return path


def start(source: Source) -> Path:
    """The learner's file, made from the stub if it is not there yet."""
    path = answer_file(source)
    if not path.exists():
        write_atomically(path, source.stub)
    return path
