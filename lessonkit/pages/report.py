"""Everything in reports/ that is not a measurement, the README's results, the paths: generated, never typed."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lessonkit.base import chips, renames
from lessonkit.base.files import REPORTS, ROOT
from lessonkit.base.markdown import filled, markdown
from lessonkit.cuda import build, sass, toolchain
from lessonkit.judge import verify
from lessonkit.lesson import Lesson, Steps, Table, discover, kernels, shape_name, title
from lessonkit.measure import fingerprint, ncu, rows
from lessonkit.measure.rows import Row
from lessonkit.measure.stale import WITHOUT_A_GPU, Today, device_folders, table_is_old
from lessonkit.modes import compiled
from lessonkit.pages import (
    final_report,
    glossary,
    guides,
    operators,
    path_pages,
    pivots,
    plots,
    predictions,
    readme_pictures,
    results,
    shipped,
    targets,
)
from lessonkit.pages.guides import GUIDES
from lessonkit.pages.plots import Picture

MARK = "\\*"  # at a figure that was measured before the code changed


def committed(lesson: str, table: str) -> list[dict[str, str]]:
    """A step's table as measured on a GPU and committed, for readers without one; [] when there is none."""
    return next((found for folder in device_folders() if (found := kept_table(folder, lesson, table))), [])


def kept_table(folder: Path, lesson: str, table: str) -> list[dict[str, str]]:
    """The rows of a step's table in reports/<device>; [] when there are none."""
    return rows.read_csv(renames.place(folder / _file_of(lesson, table)))


def save_table(lesson: str, table: Table, device: str, step: str = "") -> Path:
    """Keep a step's table; its first line holds what the page and the plot need beside the rows.

    step: the function that measured it; the program of the lesson if empty. It is what the table's `source` is of.
    """
    path = REPORTS / device / _file_of(lesson, table.name)
    source = fingerprint.step(ROOT, lesson, step)
    about = {"note": table.note, "x": table.x, "y": table.y, "by": table.by, **rows.machine()}
    about |= {"step": step, "source": source, "seal": rows.seal(table.rows, about["commit"])}
    rows.write_atomically(path, rows.with_head(about, rows.to_csv(table.rows)))
    return path


def _file_of(lesson: str, table: str, kind: str = "csv") -> str:
    return f"{lesson}.{table.replace(' ', '_')}.{kind}"


def save_compiled(name: str) -> Path:
    """Keep the compiled rows of a lesson, or of course_ops; their head says which rungs a target does not get."""
    path = REPORTS / "compiled" / f"{name}.csv"
    unfit = [[u.rung, u.target, u.why] for u in compiled.unfit(name)]
    about = compiled_by(name) | ({"unfit": unfit} if unfit else {})
    rows.write_atomically(path, rows.with_head(about, rows.to_csv(asdict(k) for k in compiled.kernels(name))))
    return path


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


def save_emulated(name: str, found: list[dict[str, Any]]) -> Path:
    """Keep the rows of a program (counters.rows)."""
    path = REPORTS / "emulated" / f"{name}.csv"
    about = {"emulator": fingerprint.folder(build.EMULATOR), "source": fingerprint.program(ROOT, name)}
    rows.write_atomically(path, rows.with_head(about, rows.to_csv(found)))
    return path


def generate() -> dict[Path, str | Picture]:
    """Every generated file and what it should hold now."""
    lessons = dict(kernels())
    today = Today(lessons.items())
    made: dict[Path, str | Picture] = {}
    for folder in device_folders():
        everything: list[Row] = []
        for path in sorted(folder.glob("*.csv")):
            name = renames.lesson(path.stem)
            if name not in lessons or not (found := rows.read(path)):
                continue
            everything += found
            made[folder / f"{name}.md"] = _lesson_page(name, lessons[name], found, today, absent(path, lessons[name]))
            made[folder / f"{name}.png"] = plots.speed(title(name), found)
        made |= operators.pages(folder, today)
        made |= final_report.pages(folder)
        made |= _step_pages(folder, made)
        if found_by_ncu := ncu.compared(ncu.path(folder)):
            made[ncu.path(folder).with_suffix(".md")] = _ncu_page(folder, found_by_ncu)
        if everything:
            made[folder / "roofline.png"] = plots.roofline(folder.name, everything)
    for name, lesson in lessons.items():
        if found_kernels := rows.read_csv(renames.place(REPORTS / "compiled" / f"{name}.csv")):
            made[REPORTS / "compiled" / f"{name}.md"] = _compiled_page(
                name, lesson, found_kernels, targets.reasons(REPORTS / "compiled" / f"{name}.csv")
            )
        if found_counts := rows.read_csv(renames.place(REPORTS / "emulated" / f"{name}.csv")):
            made[REPORTS / "emulated" / f"{name}.md"] = _emulated_page(name, lesson, found_counts)
    made[REPORTS / "cards.md"] = operators.cards(today)
    made[REPORTS / "README.md"] = _index(list(made))
    for language, readme in GUIDES.items():
        text = filled((ROOT / readme).read_text(), "paths", path_pages.overview(language))
        text = filled(text, "versions", targets.versions(language))
        made[ROOT / readme] = filled(text, "results", operators.overview(language, today))
        page = ROOT / readme.replace("README", "CONTRIBUTING")
        made[page] = filled(page.read_text(), "tiers", verify.tiers(language))
        guide = ROOT / "course_ops" / readme
        made[guide] = filled(guide.read_text(), "speed", shipped.speed(language, today))
    made[REPORTS / "compiled" / "targets.md"] = targets.page(lessons)
    made |= guides.pages() | path_pages.pages() | glossary.pages() | readme_pictures.pages()
    return made | _relinked(made)


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
    changed = {path: content for path, content in generate().items() if not same(path, content)}
    for path, content in changed.items():
        rows.write_atomically(path, content.png() if isinstance(content, Picture) else content)
    return list(changed)


def same(path: Path, content: str | Picture) -> bool:
    if not path.exists():
        return False
    return content.is_in(path.read_bytes()) if isinstance(content, Picture) else path.read_text() == content


def absent(path: Path, lesson: Lesson) -> dict[tuple[str, str], str]:
    """(peer, shape) -> why the peer was not timed there; of older rows absent.csv beside them knows."""
    found = {(row.rung, row.shape): row.reason for row in rows.read_all(path) if row.kind == rows.ABSENT}
    for line in rows.read_csv(path.with_name("absent.csv")):
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
            at = "" if len(where) == len(shapes) else f" at {', '.join(where)}"
            lines.append(f"Without {peer}{at} ({why}).")
    return "\n".join(lines) + "\n" if lines else ""


def _measured_before(found: list[Row], why: dict[Row, str]) -> str:
    """The lines of a page that say which of its rows are old."""
    groups: dict[tuple[str, str, str], int] = {}
    for row in found:
        if why[row]:
            key = row.rung, why[row], row.commit
            groups[key] = groups.get(key, 0) + 1
    lines = [
        f"{MARK} `{rung}`, {count} shape{'s' * (count != 1)}: measured at {commit}, before a change ({what})."
        for (rung, what, commit), count in groups.items()
    ]
    return "\n".join(lines) + "\n" if lines else ""


def _lesson_page(name: str, lesson: Lesson, found: list[Row], today: Today, absent: dict[tuple[str, str], str]) -> str:
    order = [r.__name__ for r in lesson.rungs] + list(lesson.peers) + ["copy"]
    shapes = [shape_name(s) for s in lesson.benches]
    found = [row for row in found if row.rung in order and row.shape in shapes]
    found.sort(key=lambda row: (order.index(row.rung), shapes.index(row.shape)))
    why = {row: today.why_old(row) for row in found}
    where = sorted({f"{r.gpu}, driver {r.driver}, torch {r.torch}, triton {r.triton}, CUDA {r.cuda}" for r in found})
    when = sorted({f"{r.date} at commit {r.commit}" for r in found})
    dtypes = ", ".join(sorted({r.dtype for r in found}))

    def mark(row: Row) -> str:
        return MARK if why[row] else ""

    def rate(row: Row) -> str:
        over = f" ({row.ratio_to_best_peer:.2f})" if row.ratio_to_best_peer and row.kind != "limit" else ""
        return f"{pivots.rate(row, unit)}{over}{mark(row)}"

    def time(row: Row) -> str:
        sheet = f", {results.of_sheet(row):.0f}%" if results.card(row) else ""
        return f"{row.ms_p50:.4g} ({row.percent_of_limit:.0f}%{sheet}){mark(row)}"

    unit, of = pivots.unit(found), results.operator(name)
    parts = [
        _without(found, absent),
        _measured_before(found, why),
        predictions.section(lesson, found, mark),
        f"## {unit}, and the ratio to the best peer (above 1: faster)\n\n" + pivots.pivot(found, rate),
        "## Time in ms (median), with the shares of the limit and of the data sheet\n\n" + pivots.pivot(found, time),
        f"![speed]({name}.png)\n",
    ]
    return (
        f"# {title(name)}\n\n{'; '.join(where)}. Measured {'; '.join(when)}, {dtypes}, random inputs, L2 flushed, "
        "rungs and peers interleaved.\n"
        "Rungs stand first, in the order of the lesson; the fastest of a line is bold. TB/s counts the least bytes\n"
        "that the op must move. The limit is a copy of as many bytes (`copy`) in the same rounds, or the FLOPs at\n"
        "cuBLAS's rate at a size of 8192. A copy reads and writes, so an op that mostly reads may exceed that limit.\n"
        "Nothing exceeds the second share, which is of the bandwidth or the FLOPs that the card's data sheet states.\n"
        f"The other lessons and languages: [{of}]({operators.file_name(of)}).\n\n" + "\n".join(filter(None, parts))
    )


def _compiled_page(name: str, lesson: Lesson, found: list[dict[str, str]], unfit: str) -> str:
    claims = [f"- `{what}`: {', '.join(c)}" for what, c in lesson.claimed().items()]
    where = "" if lesson.extension else ", at the first bench shape that reaches it"
    asked = ", ".join(chips.label(target) for target in (sass.TARGETS if lesson.extension else sass.CLAIMED))
    return (
        f"# {title(name)}: compiled, not run\n\n"
        f"What the compiler made of each kernel{where}; no GPU is needed here.\n"
        "Bytes and counts are those of one program; occupancy is resident warps over the SM's most, by the limits of\n"
        "the target's card.\n\n"
        + markdown([k.replace("_", " ") for k in found[0]], (line.values() for line in found))
        + unfit
        + (f"\nAsserted by the tests for {asked}:\n\n" + "\n".join(claims) + "\n" if claims else "")
        + predictions.not_measured(name, lesson)
        + "\n## Predicted floor in us, by the data sheet: least bytes over bandwidth, or FLOPs over their rate\n\n"
        + markdown(["shape", "MB", *(chip.name for chip in targets.CARDS)], targets.floors(lesson))
    )


def _emulated_page(name: str, lesson: Lesson, found: list[dict[str, str]]) -> str:
    said = [
        f"- `{rung.__name__}`: " + ", ".join(f"{value:g} {metric}" for metric, value in counts.items())
        for rung, counts in lesson.counts.items()
    ]
    used = [key for key in found[0] if any(row[key] not in ("0", "0.0") for row in found)]
    return (
        f"# {title(name)}: counted, not run\n\n"
        "What each kernel asks of memory, counted by the emulator on the last check that the rung takes. A request is\n"
        "one access of a warp. In global memory it counts a sector for each 32 bytes that it touches; 4 is the least\n"
        "for 32 words. In shared memory it counts a wavefront for each time that the banks must answer; 1 is the\n"
        "least.\n\n"
        + markdown([key.replace("_", " ") for key in used], ([row[key] for key in used] for row in found))
        + ("\nAsserted by the tests:\n\n" + "\n".join(said) + "\n" if said else "")
    )


def _ncu_page(folder: Path, found: list[dict[str, str]]) -> str:
    about = rows.head(ncu.path(folder))
    same = [row["metric"] for row in found if row["ratio"] == "1.00"]
    cost, cost_same = (sum(m in ncu.RATIOS for m in ms) for ms in ([row["metric"] for row in found], same))
    measured = "{gpu}, driver {driver}, CUDA {cuda}, {ncu}, {date} at commit {commit}.".format(**about)
    head = f"# The emulator's counts beside the GPU's\n\n{measured}\n\n{ncu.ABOUT}\n"
    head += f"{len(same)} of {len(found)} figures are the same to 0.5%, of those that say what one access costs "
    head += f"{cost_same} of {cost}; the ratios of the others are in bold.\n\n"
    bold = [row | {"ratio": row["ratio"] if row["ratio"] == "1.00" else f"**{row['ratio']}**"} for row in found]
    return head + markdown(found[0], (row.values() for row in bold))


def _step_pages(folder: Path, others: dict[Path, str | Picture]) -> dict[Path, str | Picture]:
    """A page, or the end of one, for all tables that a lesson has measured on one machine; plots where asked for."""
    made: dict[Path, str | Picture] = {}
    pages: dict[str, list[str]] = {}
    known = dict(discover())

    def add(lesson: str, table: Table, measured: str = "") -> None:
        part = f"## {table.name}\n\n{table.note}\n\n{measured}"
        part += markdown(table.rows[0], (row.values() for row in table.rows))
        if table.x or table.draw:
            plot = folder / _file_of(lesson, table.name, "png")
            made[plot] = plots.of_table(table)
            part += f"\n![{table.name}]({plot.name})\n"
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
    for lesson, name in sorted(place, key=lambda key: declared.index(key) if key in compared else -1):
        if lesson in known:
            about = rows.head(path := place[lesson, name])
            measured = "Measured on {gpu}, torch {torch}, triton {triton}, {date} at commit {commit}"
            measured += ", before the step's code changed.\n\n" if table_is_old(lesson, about) else ".\n\n"
            table = Table(name, list(rows.read_csv(path)), about["note"], about["x"], about["y"], about["by"])
            add(lesson, compared.pop((lesson, name), table), measured.format(**about))
    for (lesson, _), table in compared.items():
        add(lesson, table)
    for lesson, parts in pages.items():
        page = folder / f"{lesson}.md"
        parts = [renames.relinked(page, part) for part in parts]  # notes are as they were when the rows were measured
        head = others.get(page, f"# {title(lesson)}\n")
        assert isinstance(head, str)
        made[page] = head + "\n" + "\n".join(parts)
    return made


def _index(made: list[Path]) -> str:
    """reports/README.md: every page, by machine."""
    lines = ["# Reports", "", "Generated by `python -m lessonkit report` from the rows beside them.", ""]
    lines += [
        "[Every card](cards.md), a column each. How to add yours: [CONTRIBUTING.md](../CONTRIBUTING.md#your-card).",
        "",
    ]
    pages = sorted(p for p in made if p.suffix == ".md" and p.parent.parent == REPORTS)
    for folder in sorted({p.parent.name for p in pages}):
        lines += [f"## {folder}: {WITHOUT_A_GPU.get(folder, 'measured')}", ""]
        here = [p for p in pages if p.parent.name == folder]
        if (final := REPORTS / folder / "final_report.md") in here:
            lines += [f"[What was built and how fast it is]({folder}/{final.name}), in two pages. By operator:", ""]
        if of_operators := [p for p in here if "." not in p.stem and p != final]:
            lines += [", ".join(f"[{p.stem}]({folder}/{p.name})" for p in of_operators), ""]
        lines += [f"- [{p.stem}]({folder}/{p.name})" for p in here if p not in (*of_operators, final)]
        if (roof := REPORTS / folder / "roofline.png") in made:
            lines.append(f"- [roofline of every lesson]({folder}/{roof.name})")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


__all__ = ["committed", "device_folders", "generate", "save_table", "write"]
