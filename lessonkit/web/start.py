"""The start page: what the course is, where to begin, ladders that race, a figure to move, the paths and the days."""

import html
from collections.abc import Sequence

from lessonkit import pictures
from lessonkit.base.files import ROOT
from lessonkit.base.prose import unwrapped
from lessonkit.base.words import listed, said, sentences, speaking
from lessonkit.lesson import Lesson, discover, names
from lessonkit.measure import rows
from lessonkit.measure.stale import device_folders
from lessonkit.pages import path_pages, paths, results
from lessonkit.pages.guides import GUIDES
from lessonkit.pages.paths import Route
from lessonkit.web import exercise_pages, myst, places

# Lessons whose rungs lead to the speed of the best library: the first kernel of all, and two ladders that take days.
LADDERS = (
    ("day2_triton_basics.lesson01_vector_add",),
    ("cuda_src.03_matrix_multiply", "cuda_src.06_matrix_multiply_registers"),
    (
        "day4_replace_op.lesson01_attention",
        "day4_replace_op.lesson04_flash_v2",
        "day4_replace_op.lesson08_flash_hopper",
    ),
)
_END = {"en": ".", "zh": "。"}  # of a sentence


def text(language: str) -> str:
    with speaking(language):
        routes = paths.routes()
        first = routes[0]
        lesson = next(name for name in first.lessons if any(p.figure for p in pictures.of(name)))
        what, without = _readme(language)
        commands = ("doctor", f"path {first.name}", "web")
        begin = said("Start here, without a GPU: {path}").format(path=first.title[language])
        shown = [
            f"# {said('GPU kernels in five days')}",
            f'<div class="start-lead">\n\n{what}\n\n</div>',
            without,
            f'<p class="start-go"><a href="paths/{first.name}.html">{html.escape(begin)}</a></p>',
            _race(language),
            f"## {said('A path for the time you have')}",
            _routes(routes, language),
            f"## {said('Try it: what a kernel is launched on')}",
            _figure(lesson, language),
            f"## {said('On your own machine')}",
            said("Unpack or clone the course's repository, then run these commands in its folder, beside `course.py`."),
            myst.fence("bash", "\n".join(f"{exercise_pages.COURSE} {each}" for each in commands)),
            said("The first installs the course, the second shows your path, the third serves this book: exercises and "
                 "quizzes are graded in their pages then."),
            f"## {said('The days')}",
            _days(language),
        ]  # fmt: skip
        about = said("Commands, modes, and why to believe a result")
        more = [(about, places.COURSE), (said("Results"), "reports/index"), (said("Roofline"), "roofline"),
                (said("Glossary"), "glossary")]  # fmt: skip
        shown.append(" · ".join(f"[{words}]({page}.md)" for words, page in more))
    return "\n\n".join(shown) + "\n"


def _readme(language: str) -> tuple[str, str]:
    """The first sentence of the README, and what it says of a machine without a GPU."""
    path = ROOT / GUIDES[language]
    _, what, without, *_ = places.without_language(path.read_text()).split("\n\n")
    end = _END[language]
    return unwrapped(what).partition(end if language == "zh" else f"{end} ")[0] + end, unwrapped(without)


def _routes(routes: list[Route], language: str) -> str:
    cards = []
    for route in routes:
        minutes = sum(part.minutes for part in route.parts)
        takes = said("{count} minutes") if minutes <= 60 else said("{count} hours")
        counts = said("lessons: {lessons}, exercises: {exercises}").format(
            lessons=len(route.lessons), exercises=path_pages.some(route, language)
        )
        cards.append(
            f'<li><a href="paths/{route.name}.html">{html.escape(route.title[language])}</a>'
            f"<span>{takes.format(count=round(minutes if minutes <= 60 else minutes / 60))} · {counts}</span>"
            f"<span>{html.escape(route.ends[language])}</span></li>"
        )
    return f'<ul class="start-paths">\n{chr(10).join(cards)}\n</ul>'


def _figure(lesson: str, language: str) -> str:
    picture = next(p for p in pictures.of(lesson) if p.figure)
    words = said("From {lesson}").format(lesson=f"[{lesson.partition('.')[2]}]({places.lesson_page(lesson)}.md)")
    figure = f'<figure class="picture">{picture.moving(language)}</figure>'
    end = _END[language]
    line = sentences(f"**{myst.escaped(picture.title(language))}**{end}", f"{words}{end}")
    return f"{line}\n\n``````{{raw}} html\n{figure}\n``````"


def _days(language: str) -> str:
    folders = dict.fromkeys(name.partition(".")[0] for name in names())
    titles = {folder: (ROOT / folder / GUIDES[language]).read_text().partition("\n")[0] for folder in folders}
    return "\n".join(f"- [{title.removeprefix('# ')}]({folder}/index.md)" for folder, title in titles.items())


# ---- The race -------------------------------------------------------------------------------------------------------


def _race(language: str) -> str:
    """Bars of how far each rung of a ladder is when the fastest has finished; static/start.js starts them anew."""
    ladders = [_ladder(contest, language) for names in LADDERS if (contest := of_lessons(names))]
    if not ladders:
        return ""
    words = exercise_pages.attribute({"again": said("Again"), "ladder": said("ladder")})
    caption = said("Measured: how far each kernel is when the fastest has finished")
    return (
        f'<figure class="race" data-words="{words}"><figcaption>{html.escape(caption)}</figcaption>\n'
        f"{chr(10).join(ladders)}\n</figure>"
    )


def of_lessons(names: Sequence[str]) -> results.Contest | None:
    """The rungs of these lessons at the largest shape that most of them measured."""
    folder = next((each for each in device_folders() if each.name == rows.MACHINE), None)
    found = [(name, lesson, rows.read(folder / f"{name}.csv")) for name in names for _, lesson in discover(name)
             if folder and isinstance(lesson, Lesson)]  # fmt: skip
    size = results.main_size(found)
    return results.Contest(results.operator(names[0]), *size, tuple(found)) if size else None


def _ladder(contest: results.Contest, language: str) -> str:
    ladder, peer = contest.rungs, contest.peer
    bars = [*ladder, *([peer] if peer else [])]
    fastest = min(row.ms_p50 for row in bars)
    title = said("{operator}: {times} times as fast from the first kernel to the last").format(
        operator=said(contest.name), times=f"{ladder[0].ms_p50 / ladder[-1].ms_p50:.0f}"
    )
    shown = [
        f'<li class="{"race-peer" * (row is peer)}"><code>{html.escape(row.rung)}</code>'
        f'<span class="race-bar"><span style="--share:{fastest / row.ms_p50:.5f}"></span></span>'
        f"<span>{row.ms_p50:.3g} ms</span></li>"
        for row in bars
    ]
    card = results.card(contest.best)
    where = f"{card.name if card else contest.best.gpu}, {contest.best.shape}, {contest.best.dtype}{_END[language]}"
    grey = said("Grey: the fastest library.") if peer else ""
    named = ((places.lesson_page(name), name.partition(".")[2]) for name, _, _ in contest.lessons)
    links = (f'<a href="{page}.html">{lesson}</a>' for page, lesson in named)
    said_below = sentences(html.escape(where), html.escape(grey), said("From {lesson}").format(lesson=listed(links)))
    return (
        f'<div class="race-ladder" data-title="{html.escape(said(contest.name))}"><p><strong>'
        f"{html.escape(title)}</strong></p>\n<ol>\n{chr(10).join(shown)}\n</ol>\n"
        f"<p>{said_below}</p></div>"
    )
