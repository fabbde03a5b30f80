"""Everything in reports/ that is not a measurement, the README's results, the paths: generated, never typed."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lessonkit.base import chips, renames, words
from lessonkit.base.files import REPORTS, ROOT, write_atomically
from lessonkit.base.markdown import filled, markdown
from lessonkit.base.tables import head, read_csv, seal, to_csv, with_head
from lessonkit.base.words import later, listed, retold, said, sentences, speaking
from lessonkit.cuda import build, sass, toolchain
from lessonkit.judge import verify
from lessonkit.lesson import Lesson, Steps, Table, discover, kernels, shape_name, title
from lessonkit.measure import fingerprint, ncu, rows, sanitize
from lessonkit.measure.rows import Row
from lessonkit.measure.stale import WITHOUT_A_GPU, Today, device_folders, in_words, table_is_old
from lessonkit.modes import compiled
from lessonkit.pages import (
    final_report,
    first_calls,
    glossary,
    guides,
    kit,
    limits,
    operator_pages,
    path_pages,
    pivots,
    plots,
    predictions,
    readme_pictures,
    results,
    shares,
    shipped,
    stored,
    targets,
    watched,
)
from lessonkit.pages.guides import GUIDES
from lessonkit.pages.operator_pages import MARK
from lessonkit.pages.plots import Picture
from lessonkit.pages.results import BOUNDS

RATES = later("{unit}, and the ratio to the best peer (above 1: faster)")
TIMES = later("Time in ms (median), with the shares of the limit and of the data sheet")
DISTURBED = later(
    "The times of `{rung}` at {shape} lie far apart: those of the middle three fifths of its calls reach from {low} to "
    "{high} ms."
)
MEASURED = later("{where}. Measured {when}, {dtypes}, random inputs, L2 flushed, rungs and peers interleaved.")
HOW_TO_READ = later(
    "A rung is one version of the kernel, which adds one idea to the rung before; a peer is a library's. Rungs stand "
    "first, in the order of the lesson; the fastest of a line is bold. TB/s counts the least bytes that the op must "
    "move. Nothing exceeds the second share, which is of the bandwidth or the FLOPs that the card's data sheet states; "
    "the copy has this share alone."
)

UNITS = {  # columns of compiled kernels -> their heads
    "registers": later("registers (a thread)"),
    "shared": later("shared (bytes a program)"),
    "load_bytes": later("widest load (bytes a thread)"),
    "store_bytes": later("widest store (bytes a thread)"),
}
NO_GPU = {  # how to read the pages of what needs none
    "compiled": later(
        "A line is a kernel as compiled for one target. Registers are those of a thread; a spill is a register that "
        "had to go to memory. Shared memory and counts of instructions are those of one program."
    ),
    "emulated": later(
        "A line is a kernel; its columns count what it asked of memory on a small case. The fewer sectors a request "
        "and wavefronts a shared access, the better the warp's addresses lie together."
    ),
}


# Columns of tables whose rows are files: what more than one word says.
COLUMNS = (
    later("global load bytes"), later("global store bytes"), later("kernel"), later("warps"), later("spills"),
    later("registers"), later("shared"),
    later("occupancy"), later("barriers"), later("instructions"), later("blocks"), later("loads"), later("stores"),
    later("launches"), later("metric"), later("emulated"), later("ratio"),
)  # fmt: skip


def committed(lesson: str, table: str) -> list[dict[str, str]]:
    """A step's table as measured on a GPU and committed, for readers without one; [] when there is none."""
    return next((found for folder in device_folders() if (found := kept_table(folder, lesson, table))), [])


def committed_note(lesson: str, table: str) -> str:
    """What stands below that table."""
    places = (renames.place(folder / _file_of(lesson, table)) for folder in device_folders())
    return next((str(head(place).get("note", "")) for place in places if read_csv(place)), "")


def kept_table(folder: Path, lesson: str, table: str) -> list[dict[str, str]]:
    """The rows of a step's table in reports/<device>; [] when there are none."""
    return read_csv(renames.place(folder / _file_of(lesson, table)))


def save_table(lesson: str, table: Table, device: str, step: str = "") -> Path:
    """Keep a step's table; its first line holds what the page and the plot need beside the rows.

    step: the function that measured it; the program of the lesson if empty. It is what the table's `source` is of.
    """
    path = REPORTS / device / _file_of(lesson, table.name)
    source = fingerprint.step(ROOT, lesson, step)
    about = {"note": table.note, "x": table.x, "y": table.y, "by": table.by, **rows.machine()}
    about |= {"step": step, "source": source, "seal": seal(table.rows, about["commit"])}
    write_atomically(path, with_head(about, to_csv(table.rows)))
    return path


def _file_of(lesson: str, table: str, kind: str = "csv") -> str:
    return f"{lesson}.{table.replace(' ', '_')}.{kind}"


def save_compiled(name: str) -> list[Path]:
    """Keep the compiled rows of a lesson, or of course_ops; their head says which rungs a target does not get.

    Returns the file if it changes, as do save_emulated and write.
    """
    path = REPORTS / "compiled" / f"{name}.csv"
    unfit = [[u.rung, u.target, u.why] for u in compiled.unfit(name)]
    about = compiled_by(name) | ({"unfit": unfit} if unfit else {})
    return _written({path: with_head(about, to_csv(asdict(k) for k in compiled.kernels(name)))})


def compiled_by(name: str) -> dict[str, Any]:
    """What the compiled rows of a lesson come from: the compiler's version and the source of each rung."""
    if name == compiled.COURSE_OPS:
        import triton

        return {"triton": triton.__version__}
    lesson = dict(kernels())[name]
    if lesson.extension:
        return {"nvcc": toolchain.release(), "source": {"program": fingerprint.program(ROOT, name)}}
    import triton

    source = {r.__name__: fingerprint.source(ROOT, name, r.__name__) for r in lesson.rungs}
    return {"triton": triton.__version__, "source": source}


def save_emulated(name: str, found: list[dict[str, Any]]) -> list[Path]:
    """Keep the rows of a program (counters.rows)."""
    path = REPORTS / "emulated" / f"{name}.csv"
    about = {"emulator": fingerprint.folder(build.EMULATOR), "source": fingerprint.program(ROOT, name)}
    return _written({path: with_head(about, to_csv(found))})


def generate() -> dict[Path, str | Picture]:
    """Every generated file and what it should hold now. What these files say is English."""
    with speaking("en"):
        lessons = dict(kernels())
        today = Today(lessons.items())
        made = of_rows(lessons, today) | _beside_rows(today)
        return made | _relinked(made)


def of_rows(lessons: Mapping[str, Lesson], today: Today) -> dict[Path, str | Picture]:
    """The pages of reports/ and their plots, in the language of this process."""
    made: dict[Path, str | Picture] = {}
    for folder in device_folders():
        for path in sorted(folder.glob("*.csv")):
            name = renames.lesson(path.stem)
            if name not in lessons or not (found := rows.read(path)):
                continue
            page = _lesson_page(name, lessons[name], found, today, absent(path, lessons[name]))
            if picture := plots.speed(title(name), found, [rung.__name__ for rung in lessons[name].rungs]):
                made[folder / f"{name}.png"] = picture
                page += f"\n![{plots.alt(said(title(name)), found)}]({name}.png)\n"
            made[folder / f"{name}.md"] = page
        made |= operator_pages.pages(folder, today)
        made |= final_report.pages(folder, today)
        if costs := first_calls.page(folder):
            made[folder / first_calls.NAME] = costs
        if (sanitized := folder / sanitize.NAME).exists():
            made[sanitized] = sanitize.marked(folder, sanitize.argued())
            made[sanitized.with_suffix(".md")] = watched.page(folder, lessons)
        made |= _step_pages(folder, made)
        if counted := limits.page(folder):
            made[folder / limits.NAME] = counted
        if found_by_ncu := ncu.compared(ncu.path(folder)):
            made[ncu.path(folder).with_suffix(".md")] = _ncu_page(folder, found_by_ncu)
    for name, lesson in lessons.items():
        if found_kernels := read_csv(renames.place(REPORTS / "compiled" / f"{name}.csv")):
            made[REPORTS / "compiled" / f"{name}.md"] = _compiled_page(
                name, lesson, found_kernels, targets.reasons(REPORTS / "compiled" / f"{name}.csv")
            )
        if found_counts := read_csv(renames.place(REPORTS / "emulated" / f"{name}.csv")):
            made[REPORTS / "emulated" / f"{name}.md"] = _emulated_page(name, lesson, found_counts)
    made[REPORTS / "cards.md"] = operator_pages.cards(today)
    made[REPORTS / "README.md"] = _index(made)
    made[REPORTS / "compiled" / "targets.md"] = targets.page(lessons)
    return made


def text(path: Path, language: str) -> str:
    """A guide or page as it stands; of reports/, which holds English, in a language."""
    return path.read_text() if language == "en" else _pages_in(language).get(path) or path.read_text()


@cache
def _pages_in(language: str) -> dict[Path, str]:
    """The pages of reports/ in a language."""
    with speaking(language):
        lessons = dict(kernels())
        made = of_rows(lessons, Today(lessons.items()))
        return {path: text for path, text in made.items() if isinstance(text, str)}


def _beside_rows(today: Today) -> dict[Path, str | Picture]:
    """What is made of rows and fields outside of reports/."""
    made: dict[Path, str | Picture] = {}
    for language, readme in GUIDES.items():
        text = filled((ROOT / readme).read_text(), "paths", path_pages.overview(language))
        text = filled(text, "versions", targets.versions(language))
        made[ROOT / readme] = filled(text, "results", operator_pages.overview(language, today))
        page = ROOT / "lessonkit" / readme
        text = filled(page.read_text(), "tiers", verify.tiers(language))
        text = filled(text, "lines", kit.lines(language))
        made[page] = filled(text, "modules", kit.modules()) if language == "en" else text
        ops = ROOT / "course_ops" / readme
        made[ops] = filled(ops.read_text(), "speed", shipped.brief(language))
        guide = ops.with_name(readme.replace("README", "GUIDE"))
        made[guide] = filled(guide.read_text(), "ratios", shipped.speed(language, today))
    return made | guides.pages() | path_pages.pages() | glossary.pages() | readme_pictures.pages()


def _relinked(made: dict[Path, str | Picture]) -> dict[Path, str | Picture]:
    """The pages that somebody wrote with a link to what has another name now, and the links brought up to date."""
    found: dict[Path, str | Picture] = {}
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*_*/*.md")] if renames.known() else ():
        text = made.get(page, page.read_text())
        if isinstance(text, str) and (new := renames.relinked(page, text)) != text:
            found[page] = new
    return found


def write() -> list[Path]:
    """Bring every generated file up to date; return those that changed."""
    return _written(generate())


def _written(files: Mapping[Path, str | Picture]) -> list[Path]:
    changed = {path: content for path, content in files.items() if not same(path, content)}
    for path, content in changed.items():
        write_atomically(path, content.png() if isinstance(content, Picture) else content)
    return list(changed)


def same(path: Path, content: str | Picture) -> bool:
    if not path.exists():
        return False
    return content.is_in(path.read_bytes()) if isinstance(content, Picture) else path.read_text() == content


def absent(path: Path, lesson: Lesson) -> dict[tuple[str, str], str]:
    """(peer, shape) -> why the peer was not timed there; of older rows absent.csv beside them knows."""
    found = {(row.rung, row.shape): row.reason for row in rows.read_all(path) if row.kind == rows.ABSENT}
    for line in read_csv(path.with_name("absent.csv")):
        if renames.lesson(line["lesson"]) == renames.lesson(path.stem):
            found[line["peer"], line["shape"]] = line["reason"]
    return {key: why for key, why in found.items() if key[0] in lesson.peers}


def _without(found: list[Row], absent: dict[tuple[str, str], str]) -> str:
    """The lines of a page that name the peers which are not in its tables."""
    shapes = list(dict.fromkeys(row.shape for row in found))
    lines = []
    for peer in dict.fromkeys(peer for peer, _ in absent):
        reasons: dict[str, list[str]] = {}
        for shape in shapes:
            if why := absent.get((peer, shape)):
                reasons.setdefault(why, []).append(shape)
        for why, where in reasons.items():
            everywhere, some = said("Without {peer} ({why})."), said("Without {peer} at {shapes} ({why}).")
            sentence = everywhere if len(where) == len(shapes) else some
            lines.append(
                sentence.format(peer=peer, shapes=listed(where), why=retold(why, rows.REASONS, words.language()))
            )
    for peer in dict.fromkeys(row.rung for row in found if row.of_no_version):
        where = [row.shape for row in found if row.rung == peer and row.of_no_version]
        everywhere = said("Incomplete: no row says which version of {peer} was measured, so no ratio is shown.")
        some = said("Incomplete at {shapes}: no row says which version of {peer} was measured, so no ratio is shown.")
        sentence = everywhere if len(where) == len(shapes) else some
        lines.append(sentence.format(peer=peer, shapes=listed(where)))
    return "\n".join(lines) + "\n" if lines else ""


def _measured_before(found: list[Row], why: dict[Row, str]) -> str:
    """The lines of a page that say which of its rows are old."""
    groups: dict[tuple[str, str, str], int] = {}
    for row in found:
        if why[row]:
            key = row.rung, why[row], row.commit
            groups[key] = groups.get(key, 0) + 1
    one = said("`{rung}`, 1 shape: measured at {commit}, before a change ({what}).")
    many = said("`{rung}`, {count} shapes: measured at {commit}, before a change ({what}).")
    lines = [
        f"{MARK} {(one if count == 1 else many).format(rung=rung, count=count, commit=commit, what=in_words(what))}"
        for (rung, what, commit), count in groups.items()
    ]
    return "\n".join(lines) + "\n" if lines else ""


def _disturbed(found: list[Row]) -> str:
    """A line for each row whose times lie far apart, which its median does not show."""
    lines = [
        said(DISTURBED).format(rung=row.rung, shape=row.shape, low=f"{row.ms_p20:.4g}", high=f"{row.ms_p80:.4g}")
        for row in found
        if row.disturbed and row.kind != "limit"
    ]
    return "".join(f"\n{line}\n" for line in lines)


def _lesson_page(name: str, lesson: Lesson, found: list[Row], today: Today, absent: dict[tuple[str, str], str]) -> str:
    order = [r.__name__ for r in lesson.rungs] + list(lesson.peers) + ["copy"]
    shapes = [shape_name(s) for s in lesson.benches]
    found = [row for row in found if row.rung in order and row.shape in shapes]
    found.sort(key=lambda row: (shapes.index(row.shape), order.index(row.rung)))
    why = {row: today.why_old(row) for row in found}
    machine, day = (
        said("{gpu}, driver {driver}, torch {torch}, triton {triton}, CUDA {cuda}"),
        said("{date} at commit {commit}"),
    )
    where = sorted({machine.format(**vars(row)) for row in found})
    when = sorted({day.format(**vars(row)) for row in found})
    dtypes = listed(sorted({r.dtype for r in found}))

    def mark(row: Row) -> str:
        return MARK if why[row] else ""

    def rate(row: Row) -> str:
        over = f" ({row.ratio_to_best_peer:.2f})" if row.ratio_to_best_peer and row.kind != "limit" else ""
        return f"{pivots.rate(row, unit)}{over}{mark(row)}"

    def time(row: Row) -> str:
        sheet = f", {found}" if (found := shares.of_sheet(row)) else ""
        return f"{row.ms_p50:.4g} ({shares.of_limit(row)}{sheet}){mark(row)}"

    unit, of = pivots.unit(found), results.operator(name)
    parts = [
        _without(found, absent),
        _measured_before(found, why),
        predictions.section(lesson, found, mark),
        f"## {said(RATES).format(unit=unit)}\n\n" + pivots.pivot(pivots.rated(found, unit), rate, order=order),
        f"## {said(TIMES)}\n\n" + pivots.pivot(found, time, order=order) + shares.below(found) + _disturbed(found),
    ]
    about = said(MEASURED).format(where=listed(where, ";"), when=listed(when, ";"), dtypes=dtypes)
    others = said("The other lessons and languages: [{operator}]({file}).")
    others = others.format(operator=said(of), file=operator_pages.file_name(of))
    return (
        f"# {said(title(name))}\n\n{about}\n\n{sentences(said(HOW_TO_READ), said(shares.LIMIT), others)}\n\n"
        + "\n".join(filter(None, parts))
    )


def _compiled_page(name: str, lesson: Lesson, found: list[dict[str, str]], unfit: str) -> str:
    claims = [f"- `{what}`: {listed(map(_claim, c))}" for what, c in lesson.claimed().items()]
    asked = listed(chips.label(target) for target in (sass.TARGETS if lesson.extension else sass.CLAIMED))
    made = (
        said("What the compiler made of each kernel; no GPU is needed here.")
        if lesson.extension
        else said(
            "What the compiler made of each kernel, at the first bench shape that reaches it; no GPU is needed here."
        )
    )
    units = said(
        "Counts are those of one program. [Occupancy](../../GLOSSARY.md#occupancy) is resident warps over the SM's "
        "most, by the limits of the target's card. A [spill](../../GLOSSARY.md#spill) is a load or store of a register "
        "that did not fit. Shared is [shared memory](../../GLOSSARY.md#shared-memory)."
    )
    asserted = said("Asserted by the tests for {targets}:").format(targets=asked)
    floor = said("Predicted floor in us, by the data sheet: least bytes over bandwidth, or FLOPs over their rate")
    return (
        f"# {said('{lesson}: compiled, not run').format(lesson=said(title(name)))}\n\n{sentences(made, units)}\n\n"
        + _lean(found)
        + unfit
        + (f"\n{asserted}\n\n" + "\n".join(claims) + "\n" if claims else "")
        + predictions.not_measured(name, lesson)
        + f"\n## {floor}\n\n"
        + markdown([said("shape"), "MB", *(chip.name for chip in targets.CARDS)], targets.floors(lesson))
    )


def _emulated_page(name: str, lesson: Lesson, found: list[dict[str, str]]) -> str:
    claims = [
        f"- `{rung.__name__}`: " + listed(f"{value:g} {said(metric)}" for metric, value in counts.items())
        for rung, counts in lesson.counts.items()
    ]
    about = said(
        "What each kernel asks of memory, counted by the emulator on the last check that the rung takes. A request is "
        "one access of a warp. In global memory it counts a sector for each 32 bytes that it touches; 4 is the least "
        "for 32 words. In shared memory it counts a wavefront for each time that the banks must answer; 1 is the least."
    )
    return (
        f"# {said('{lesson}: counted, not run').format(lesson=said(title(name)))}\n\n{about}\n\n"
        + _lean(found)
        + (f"\n{said('Asserted by the tests:')}\n\n" + "\n".join(claims) + "\n" if claims else "")
    )


def _claim(claim: str) -> str:
    """A claim on machine code: "no spills", "4 tcgen05.mma of two CTAs", "add_kernel: no spills"."""
    kernel, colon, rest = claim.rpartition(": ")
    number, _, what = rest.partition(" ")
    return f"{kernel}{colon}{f'{number} {said(what)}' if number.isdigit() else said(rest)}"


def _heads(keys: Iterable[str]) -> list[str]:
    return [said(UNITS.get(key) or key.replace("_", " ")) for key in keys]


def _lean(found: Sequence[Mapping[str, str]]) -> str:
    """Rows as a table, and what is the same in all of them as a sentence below it."""
    lines = [{key: _figure(key, value) for key, value in row.items()} for row in found]
    same = {key: value for key, value in lines[0].items() if all(line[key] == value for line in lines)}
    zero = [key for key, value in same.items() if value in ("0", "0%")]
    fixed = [key for key in same if key not in (*zero, "rung", "kernel") and len(lines) > 1]
    shown = [key for key in lines[0] if key not in (*zero, *fixed)]
    words = []
    if fixed:
        each = listed(f"{head} {same[key]}" for head, key in zip(_heads(fixed), fixed, strict=True))
        words.append(said("The same in every line: {columns}.").format(columns=each))
    if zero:
        words.append(said("Zero in every line: {columns}.").format(columns=listed(_heads(zero))))
    table = markdown(_heads(shown), ([line[key] for key in shown] for line in lines))
    return table + f"\n{sentences(*words)}\n" * bool(words)


def _figure(key: str, value: str) -> str:
    """A cell: a count without decimals, a share in percent, a target under its compiler's name."""
    if key == "occupancy":
        return f"{100 * float(value):.3g}%"
    if key == "target":
        return chips.label(int(value) if value.isdigit() else value)
    return value.removesuffix(".0")


def _ncu_page(folder: Path, found: list[dict[str, str]]) -> str:
    about = head(ncu.path(folder))
    same = [row["metric"] for row in found if row["ratio"] == "1.00"]
    cost, cost_same = (sum(m in ncu.RATIOS for m in ms) for ms in ([row["metric"] for row in found], same))
    measured = said("{gpu}, driver {driver}, CUDA {cuda}, {ncu}, {date} at commit {commit}.").format(**about)
    counts = said(
        "{same} of {all} figures are the same to 0.5%, of those that say what one access costs {cost_same} of {cost}; "
        "the ratios of the others are in bold."
    ).format(same=len(same), all=len(found), cost_same=cost_same, cost=cost)
    title = said("The emulator's counts beside the GPU's")
    bold = [
        row
        | {
            "metric": said(row["metric"]),
            "ratio": row["ratio"] if row["ratio"] == "1.00" else f"**{said(row['ratio'])}**",
        }
        for row in found
    ]
    return f"# {title}\n\n{measured}\n\n{ncu.about()}\n\n{counts}\n\n" + markdown(
        _heads(found[0]), (row.values() for row in bold)
    )


def _step_pages(folder: Path, others: dict[Path, str | Picture]) -> dict[Path, str | Picture]:
    """A page, or the end of one, for all tables that a lesson has measured on one machine; plots where asked for."""
    made: dict[Path, str | Picture] = {}
    pages: dict[str, list[str]] = {}
    known = dict(discover())

    def add(lesson: str, table: Table, measured: str = "") -> None:
        part = _table_in_words(table, measured)
        if table.x or table.draw:
            plot = folder / _file_of(lesson, table.name, "png")
            made[plot] = plots.of_table(table)
            part += f"\n![{plots.alt_of_table(table)}]({plot.name})\n"
        pages.setdefault(lesson, []).append(part)

    compared = {
        (lesson, table.name): table
        for lesson, steps in known.items()
        for compare in (steps.compares if isinstance(steps, Steps) else ())
        if (table := compare(folder)) and table.rows
    }
    declared = [*compared]
    place: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.glob("*.*.*.csv")):
        lesson, name = path.stem.rsplit(".", 1)
        place[renames.lesson(lesson), name.replace("_", " ")] = path

    def nth(key: tuple[str, str]) -> tuple[int, int]:
        """Tables of steps in the order of the lesson's steps, then comparisons as they are declared."""
        lesson, step = known.get(key[0]), head(place[key]).get("step")
        steps = [each.__name__ for each in lesson.steps] if isinstance(lesson, Steps) else []
        return declared.index(key) if key in compared else -1, steps.index(step) if step in steps else -1

    for lesson, name in sorted(place, key=nth):
        if lesson in known:
            about = head(path := place[lesson, name])
            measured = (
                said(
                    "Measured on {gpu}, torch {torch}, triton {triton}, {date} at commit {commit}, before the step's "
                    "code changed."
                )
                if table_is_old(lesson, about)
                else said("Measured on {gpu}, torch {torch}, triton {triton}, {date} at commit {commit}.")
            )
            table = Table(name, list(read_csv(path)), about["note"], about["x"], about["y"], about["by"])
            add(lesson, compared.pop((lesson, name), table), f"{measured.format(**about)}\n\n")
    for (lesson, _), table in compared.items():
        add(lesson, table)
    for lesson, parts in pages.items():
        page = folder / f"{lesson}.md"
        parts = [renames.relinked(page, part) for part in parts]  # notes are as they were when the rows were measured
        top = others.get(page, f"# {said(title(lesson))}\n")
        assert isinstance(top, str)
        made[page] = top + "\n" + "\n".join(parts)
    return made


def _table_in_words(table: Table, measured: str) -> str:
    """A table under its heading and its note, with a footnote for each mark in it. measured: where and when it was."""
    cells = [[shares.marked(name, str(cell(value))) for name, value in operator_pages.marked(row).items()]
             for row in table.rows]  # fmt: skip
    exceeded = {name for line in cells for name, cell in zip(table.rows[0], line, strict=True)
                if name in shares.COLUMNS and shares.BEYOND in cell}  # fmt: skip
    part = f"## {stored.told(table.name)}\n\n{stored.told(table.note)}\n\n{measured}"
    part += markdown(map(stored.head, table.rows[0]), cells)
    part += "".join(f"\n{why}\n" for why in sorted({said(shares.COLUMNS[name]) for name in exceeded}))
    return part + operator_pages.footnotes(" ".join(cell for line in cells for cell in line))


def cell(value: Any) -> Any:
    """A cell of a step's table; words are said in the reader's language, if a catalogue has them."""
    worded = isinstance(value, str) and (" " in value or value in BOUNDS or value in stored.WORDS)
    return stored.told(value) if worded else value


def _index(made: Collection[Path]) -> str:
    """reports/README.md: how fast it is, then each GPU's lessons, then what needs no GPU."""
    generated = said("Generated by `python -m lessonkit report` from the rows beside them.")
    every_card = said(
        "[Every card](cards.md), a column each. Add yours: [lessonkit/README.md](../lessonkit/README.md#your-card)."
    )
    parts = [f"# {said('Reports')}", generated, f"## {said('How fast is it?')}", every_card]
    gpus, by_lesson = device_folders(), list[str]()
    computed = {operator_pages.file_name(op): op for op in (results.operator(name) for name, _ in kernels())}
    for gpu in gpus:
        if gpu / "final_report.md" in made:
            words = said("{gpu}: [what was built and how fast it is]({file}), in two pages.")
            parts.append(words.format(gpu=gpu.name, file=f"{gpu.name}/final_report.md"))
        if (roof := gpu / "day5_tuning.lesson10_roofline.roofline.png") in made:
            words = said("Each operator, beside the [roofline of every lesson]({file}):")
            parts.append(words.format(file=f"{gpu.name}/{roof.name}"))
        parts.append("".join(_link(gpu / file, said(op)) for file, op in computed.items() if gpu / file in made))
        if gpu / first_calls.NAME in made:
            words = said("`course_ops`: [seconds of a first call, and peak memory]({file}).")
            parts.append(words.format(file=f"{gpu.name}/{first_calls.NAME}"))
        if gpu / limits.NAME in made:
            words = said("[Shares of the limit above 100%]({file}), counted by their causes.")
            parts.append(words.format(file=f"{gpu.name}/{limits.NAME}"))
        if (tools := (gpu / sanitize.NAME).with_suffix(".md")) in made:
            words = said("Is it right? [Which sanitizer has watched which kernel]({file}).")
            parts.append(words.format(file=f"{gpu.name}/{tools.name}"))
        by_lesson.append(f"## {said('{gpu}, by lesson').format(gpu=gpu.name)}")
        by_lesson += [f"### {day}\n\n{links}" for day, links in _days(gpu, made)]
    parts += by_lesson
    for name, how in NO_GPU.items():
        parts += [f"## {name}: {said(WITHOUT_A_GPU[name])}", said(how)]
        if (every := REPORTS / name / "targets.md") in made:
            parts.append(_link(every, said("Every kernel and every target")))
        checked = [ncu.path(gpu).with_suffix(".md") for gpu in gpus if name == "emulated"]
        words = said("The emulator's counts checked with Nsight Compute")
        parts += [_link(page, f"{words}: {page.parent.name}") for page in checked if page in made]
        for day, links in _days(REPORTS / name, made):
            parts += [f"<details><summary>{day}</summary>", links, "</details>"]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _days(folder: Path, made: Collection[Path]) -> Iterator[tuple[str, str]]:
    """(day, links to its lessons under their titles), in the order of the course."""
    lessons = [name for name, _ in discover() if folder / f"{name}.md" in made]
    for day, of in groupby(lessons, lambda name: name.partition(".")[0]):
        yield day, "".join(_link(folder / f"{name}.md", said(title(name))) for name in of)


def _link(page: Path, words: str) -> str:
    return f"- [{words}]({page.relative_to(REPORTS)})\n"


__all__ = ["committed", "device_folders", "generate", "save_table", "write"]
