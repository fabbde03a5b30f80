"""The paths can be walked: what they name exists, their times add up, the longest is the whole course."""

import re
from collections import Counter

from lessonkit import __main__
from lessonkit.base import words
from lessonkit.base.files import ROOT
from lessonkit.commands import show
from lessonkit.exercise import progress, source
from lessonkit.lesson import discover, names
from lessonkit.measure import stale
from lessonkit.pages import guides, path_pages, paths, report

import pytest
import typer
from typer.testing import CliRunner

ROUTES = {route.name: route for route in paths.routes()}
COMMANDS = sorted({command for route in ROUTES.values() for part in route.parts for command in part.commands})
NAMED = re.compile(r"`([\w/]+\.(?:py|cu|md|ipynb|pdf)|\w+_kernel|\w+/[\w/]+/)`")  # files, folders, a kernel
LESSONS = {"list", "run", "check", "bench", "compile", "count"}  # commands that take a lesson


def test_the_four_times_of_the_plan():
    assert list(ROUTES) == ["30min", "1h", "5d", "11w"]
    for name, minutes in (("30min", 30), ("1h", 60)):
        assert sum(part.minutes for part in ROUTES[name].parts) == minutes
    assert len(ROUTES["5d"].parts) == 5
    assert sum(part.units for part in ROUTES["11w"].parts) == 11


def apart(have, wanted):
    """What the plan of eleven weeks misses and has too often or without need, in one line; "" if nothing."""
    missing, extra = Counter(wanted) - Counter(have), Counter(have) - Counter(wanted)
    said = [f"lacks {', '.join(missing)}: give each its week"] * bool(missing)
    said += [f"has twice, or without need: {', '.join(extra)}"] * bool(extra)
    return f"paths/11w.toml {'; '.join(said)}" if said else ""


def test_eleven_weeks_are_the_whole_course():
    """Each lesson once and each exercise once; one that is written tomorrow is missing here until it has its week."""
    weeks = ROUTES["11w"]
    lessons = apart(weeks.lessons, names())
    exercises = apart([e.name for e in weeks.exercises], [e.name for e in source.discover()])
    assert not lessons, lessons
    assert not exercises, exercises


def test_what_the_eleven_weeks_miss_is_named():
    assert apart(["a", "b"], ["b", "a"]) == ""
    assert apart(["a", "b", "b"], ["a", "b", "c"]) == (
        "paths/11w.toml lacks c: give each its week; has twice, or without need: b"
    )


@pytest.mark.release
def test_parts_take_their_hours():
    assert not (warnings := [line for route in ROUTES.values() for line in route.warnings]), "\n".join(warnings)


def test_five_days_take_exercises_as_they_come():
    asked = [{e.path.parent.parent for e in part.items[i].exercises} for part in ROUTES["5d"].parts
             for i in range(len(part.items)) if part.items[i].boxed]  # fmt: skip
    with_exercises = {e.path.parent.parent for e in source.discover()} - {ROOT / "cuda_src"}
    assert set.union(*asked) == with_exercises


def test_every_path_asks_for_something_and_says_when_it_is_done():
    for route in ROUTES.values():
        assert any(part.hand_in for part in route.parts), route.name
        assert all(part.hand_in and part.checklist for part in route.parts) or not route.hours, route.name
        assert sum(len(part.checklist) for part in route.parts) >= 4, route.name


@pytest.mark.parametrize("language", guides.GUIDES)
def test_whatever_the_syllabus_names_is_handed_in_somewhere(language):
    """Every file of the left column of the syllabus's table."""
    page = ROOT / guides.GUIDES[language].replace("README", "SYLLABUS")
    cells = re.findall(r"^\| (.*?`.*?) \|", page.read_text(), re.MULTILINE)
    named = {name for cell in cells for name in NAMED.findall(cell)}
    assert len(named) >= 20
    mine = [ROOT / "paths" / guides.GUIDES[language].replace("README", name) for name in ROUTES]
    text = "".join(page for path, page in path_pages.pages().items() if path in mine)
    assert not {name for name in named if f"`{name}`" not in text}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    """As they stand on the page: the command, its lesson or exercise, and the rungs of a diff."""
    name, *words = command.split()
    found = typer.main.get_command(__main__.app).commands[name]
    if name == "exercise":
        subcommand, *words = words
        found = found.commands[subcommand]
    found.make_context(name, list(words))
    if name in LESSONS:
        assert list(discover(words[0]))
    if name == "exercise":
        assert all(source.find(word) or list(ROOT.glob(f"{word}_*/README.md")) for word in words)
    if name == "diff":
        with show.console.capture() as printed:
            done = CliRunner().invoke(__main__.app, command.split())
        assert done.exit_code == 0, done.exception
        assert re.search(r"^\+", printed.get(), re.MULTILINE)


def test_every_lesson_says_what_it_teaches_and_its_guides_have_a_row():
    for name, _ in discover():
        said = guides.about(name)
        assert said.teaches
        assert 0 < said.hours <= 7  # a ladder is a folder of files
        folder, _, stem = name.partition(".")
        for readme in guides.GUIDES.values():
            rows = (ROOT / folder / readme).read_text().count(f"| [{stem}](")
            assert rows == 1, f"{folder}/{readme} has {rows} rows of {stem}: python -m lessonkit report"


def test_a_lesson_that_says_nothing_is_named(monkeypatch):
    monkeypatch.setattr(guides, "_about", lambda text: None)
    with pytest.raises(ValueError, match=r"vector_add\.py does not say what it teaches: add about=About\(teaches"):
        guides.about("day2_triton_basics.lesson01_vector_add")


def test_some_lessons_of_a_folder_make_a_table():
    lines = guides.table("day2_triton_basics", "zh", "02", "03").splitlines()
    assert lines[0] == "| 课 | 学时 | 内容 |"
    assert [line.partition("]")[0] for line in lines[2:]] == ["| [lesson02_common_errors", "| [lesson03_gelu"]
    assert words.translated("no catalogue has this", "zh") == "no catalogue has this"


@pytest.mark.release
def test_what_lessons_teach_is_said_in_chinese():
    assert not guides.untranslated("zh")


MINIMAL = """
minutes = 20
title = { en = "a", zh = "b" }
ends = { en = "a", zh = "b" }
about = { en = "a", zh = "b" }
[[part]]
title = { en = "a", zh = "b" }
plan = [{ exercises = ["mul"] }]
"""


def read(tmp_path, text):
    (path := tmp_path / "x.toml").write_text(text)
    return paths.load(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("minutes = 20", "minutes = 21", "its steps take 20 minutes, not 21"),
        (
            '{ exercises = ["mul"] }',
            '"day2_triton_basics.lesson99_none"',
            "no lesson 'day2_triton_basics.lesson99_none'",
        ),
        ('["mul"]', '["mull"]', "no exercise 'mull'"),
        ('["mul"]', '["softmax"]', "no exercise 'softmax'"),  # two have it in their name
        ('["mul"]', '["day9"]', "no exercise 'day9'"),
    ],
)
def test_a_path_that_cannot_be_walked_is_an_error(tmp_path, old, new, says):
    assert read(tmp_path, MINIMAL).items[0].exercises[0].short == "mul"
    with pytest.raises(ValueError, match=rf"x\.toml: .*{re.escape(says)}"):
        read(tmp_path, MINIMAL.replace(old, new))


PARTS = """
hours = [1, 2]
title = { en = "a", zh = "b" }
ends = { en = "a", zh = "b" }
about = { en = "a", zh = "b" }
"""


def test_a_part_with_too_much_or_too_little_is_a_warning(tmp_path, monkeypatch):
    text = PARTS
    for name, hours, weeks in (("full", 4.5, 2), ("empty", 0.5, 1), ("right", 1.5, 1)):
        text += f"[[part]]\nweeks = {weeks}\ntitle = {{ en = '{name}', zh = 'c' }}\nplan = [{{ hours = {hours} }}]\n"
    route = read(tmp_path, text)
    assert route.warnings == [
        "paths/x.toml: 'full' takes 4.5 hours, expected 2 to 4: "
        "move 0.5 hours or more to 'empty', which has room for 1.5",
        "paths/x.toml: 'empty' takes 0.5 hours, expected 1 to 2: move 0.5 hours or more here from 'full', the fullest",
    ]
    monkeypatch.setattr(paths, "routes", lambda: [route])
    monkeypatch.setattr(report, "write", list)
    monkeypatch.setattr(stale, "old", list)
    for typed in (["path"], ["path", "x"], ["report"]):
        with show.console.capture() as printed:
            done = CliRunner().invoke(__main__.app, typed)
        assert done.exit_code == 0, done.exception
        assert " ".join((printed.get() + done.output).split()).count("warning: paths/x.toml: ") == 2


def test_a_folder_stands_for_what_is_not_named(tmp_path):
    text = MINIMAL.replace('"mul"] }', '"mul"] }, { exercises = ["day2"] }')
    text = text.replace("minutes = 20", f"minutes = {20 * len(source.find('day2'))}")
    named, others = (item.exercises for item in read(tmp_path, text).items)
    assert [e.short for e in named] == ["mul"]
    assert [*named, *others] == source.find("day2")


def test_pages_say_time_exercises_and_what_is_handed_in():
    made = {path.name: text for path, text in path_pages.pages().items()}
    hour = ROUTES["1h"]
    first, second = hour.parts[:2]
    begin, end = first.minutes, first.minutes + second.minutes
    assert f"## {begin:g} to {end:g} minutes: {second.title['en']}" in made["1h.md"]
    assert f"## {begin:g} 至 {end:g} 分钟：{second.title['zh']}" in made["1h.zh-CN.md"]
    assert re.search(r"\| \d:\d\d \| \[lesson02_tensors\]\(\.\./day1_pytorch/lesson02_tensors\.py\): \w", made["5d.md"])
    assert re.search(r"\| \d[.\d]* \| \[02_vector_add\]\(\.\./cuda_src/02_vector_add\.cu\)", made["11w.md"])
    assert "- [ ] `day1_env_check.md`" in made["5d.md"]
    assert f"[{hour.title['en']}](paths/1h.md)" in path_pages.overview("en")


def test_path_command_ticks_what_has_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_ANSWERS", str(tmp_path))

    def run(*words):
        with show.console.capture() as printed:
            done = CliRunner().invoke(__main__.app, ["path", *words])
        return done.exit_code, printed.get() + done.output

    assert all(name in run()[1] for name in ROUTES)
    code, text = run("1h")
    assert code == 0
    assert "0 of 1" in text
    assert "exercise next mul" in text
    progress.update(source.find("mul")[0], passed="2026-01-01")
    _, text = run("1h")
    assert "1 of 1" in text
    assert "Next exercise" not in text
    assert run("2h")[0] == 2
