"""Everything in reports/ that is not a measurement, the README's results, the paths: generated, never typed."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lessonkit import compiled, path_pages, plots, rows, verify
from lessonkit.cuda import counters, hardware
from lessonkit.lesson import ROOT, Lesson, Steps, Table, discover, kernels, shape_name, title
from lessonkit.markdown import filled, markdown
from lessonkit.paths import GUIDES
from lessonkit.plots import Picture
from lessonkit.rows import REPORTS, Row

# Memory bandwidth by datasheet, TB/s: what a memory-bound op's predicted time divides by.
GPUS = {"RTX 4090": 1.01, "A100 80GB": 2.04, "H100 SXM": 3.35, "H200": 4.8, "B200": 8.0}
WITHOUT_A_GPU = {  # folders of reports/ that are no GPU's
    "compiled": "what the compiler made of each rung (no GPU needed)",
    "emulated": "what each CUDA kernel asks of memory, counted (no GPU needed)",
    "traces": "",
    "cpu": "",
}


def device_folders() -> list[Path]:
    """The GPUs that have rows here: reports/<device>/. What a machine without one writes (cpu/) is for its owner."""
    return sorted(p for p in REPORTS.glob("*") if p.is_dir() and p.name not in WITHOUT_A_GPU)


def committed(lesson: str, table: str) -> list[dict[str, str]]:
    """A step's table as measured on a GPU and committed, for readers without one; [] when there is none."""
    for folder in device_folders():
        if found := rows.read_csv(folder / f"{lesson}.{table}.csv"):
            return found
    return []


def save_table(lesson: str, table: Table, device: str) -> Path:
    """Keep a step's table; its first line holds what the page and the plot need beside the rows."""
    path = REPORTS / device / f"{lesson}.{table.name}.csv"
    about = {"note": table.note, "x": table.x, "y": table.y, "by": table.by, **rows.machine()}
    rows.write_atomically(path, f"# {json.dumps(about, ensure_ascii=False)}\n{rows.to_csv(table.rows)}")
    return path


def save_compiled(name: str) -> Path:
    path = REPORTS / "compiled" / f"{name}.csv"
    rows.write_atomically(path, rows.to_csv(asdict(k) for k in compiled.kernels(name)))
    return path


def save_emulated(name: str, lesson: Lesson) -> Path:
    path = REPORTS / "emulated" / f"{name}.csv"
    rows.write_atomically(path, rows.to_csv(counters.rows(counters.traffic(lesson))))
    return path


def generate() -> dict[Path, str | Picture]:
    """Every generated file and what it should hold now."""
    lessons = dict(kernels())
    made: dict[Path, str | Picture] = {}
    for folder in device_folders():
        everything: list[Row] = []
        for path in sorted(folder.glob("*.csv")):
            if path.stem not in lessons:
                continue
            found = rows.read(path)
            everything += found
            made[folder / f"{path.stem}.md"] = _lesson_page(path.stem, lessons[path.stem], found)
            made[folder / f"{path.stem}.png"] = plots.speed(title(path.stem), found)
        made |= _step_pages(folder, made)
        if found_by_ncu := hardware.compared(hardware.path(folder)):
            made[hardware.path(folder).with_suffix(".md")] = _ncu_page(folder, found_by_ncu)
        if everything:
            made[folder / "roofline.png"] = plots.roofline(folder.name, everything)
    for name, lesson in lessons.items():
        if found_kernels := rows.read_csv(REPORTS / "compiled" / f"{name}.csv"):
            made[REPORTS / "compiled" / f"{name}.md"] = _compiled_page(name, lesson, found_kernels)
        if found_counts := rows.read_csv(REPORTS / "emulated" / f"{name}.csv"):
            made[REPORTS / "emulated" / f"{name}.md"] = _emulated_page(name, lesson, found_counts)
    made[REPORTS / "README.md"] = _index(list(made))
    pictures = [f"![every ladder]({p.relative_to(ROOT)})\n\n" for p in made if p.name.endswith(".ladders.png")]
    for language, readme in GUIDES.items():
        text = filled((ROOT / readme).read_text(), "paths", path_pages.overview(language))
        made[ROOT / readme] = filled(text, "results", "".join(pictures) + results(lessons, language))
        page = ROOT / readme.replace("README", "CONTRIBUTING")
        made[page] = filled(page.read_text(), "tiers", verify.tiers(language))
    return made | path_pages.pages()


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


def stale_rows() -> list[str]:
    """Rows whose rung's code has changed since it was measured: they have to be measured again."""
    lessons = dict(kernels())
    stale = []
    for path in sorted(REPORTS.glob("*/*.csv")):
        if path.parent.name in WITHOUT_A_GPU or path.stem not in lessons:
            continue
        now = {r.__name__: rows.fingerprint(path.stem, r.__name__) for r in lessons[path.stem].rungs}
        for row in rows.read(path):
            if row.kind == "rung" and now.get(row.rung) != row.code:
                stale.append(f"{path.parent.name}: {row.lesson} {row.rung} at {row.shape}")
    return stale


def _pivot(found: list[Row], cell: Callable[[Row], str], keep: Callable[[Row], bool] = lambda row: True) -> str:
    """A table with a line for each contender and a column for each shape."""
    shapes = list(dict.fromkeys(row.shape for row in found))
    names = list(dict.fromkeys(row.rung for row in found if keep(row)))
    at = {(row.rung, row.shape): row for row in found}
    body = (
        [f"**{n}**" if _kind(found, n) == "rung" else n, *(cell(at[n, s]) if (n, s) in at else "" for s in shapes)]
        for n in names
    )
    return markdown(["", *shapes], body)


def _kind(found: list[Row], name: str) -> str:
    return next(row.kind for row in found if row.rung == name)


def _lesson_page(name: str, lesson: Lesson, found: list[Row]) -> str:
    order = [r.__name__ for r in lesson.rungs] + list(lesson.peers) + ["copy"]
    shapes = [shape_name(s) for s in lesson.benches]
    found = [row for row in found if row.rung in order and row.shape in shapes]
    found.sort(key=lambda row: (order.index(row.rung), shapes.index(row.shape)))
    where = sorted({f"{r.gpu}, driver {r.driver}, torch {r.torch}, triton {r.triton}, CUDA {r.cuda}" for r in found})
    when = sorted({f"{r.date} at commit {r.commit}" for r in found})
    dtypes = ", ".join(sorted({r.dtype for r in found}))
    return (
        f"# {title(name)}\n\n{'; '.join(where)}. Measured {'; '.join(when)}, {dtypes}, random inputs, L2 flushed, "
        "rungs and peers interleaved.\n"
        "Rungs in bold, slowest idea first; `copy` moves as many bytes as the op must.\n\n"
        "## Time in ms (median), and the rate: FLOPs where they are the limit, else the least bytes\n\n"
        + _pivot(found, lambda r: f"{r.ms_p50:.4g} ({r.rate})")
        + "\n## % of the limit: a copy of as many bytes, timed in the same rounds, or the FLOPs at cuBLAS's rate\n\n"
        + _pivot(found, lambda r: f"{r.percent_of_limit:.0f}%", lambda r: r.kind != "limit")
        + "\n## Against the best peer (above 1: faster)\n\n"
        + _pivot(found, lambda r: f"{r.ratio_to_best_peer:.2f}", lambda r: r.kind != "limit")
        + f"\n![speed against size]({name}.png)\n"
    )


def _compiled_page(name: str, lesson: Lesson, found: list[dict[str, str]]) -> str:
    claims = [f"- `{what}`: {', '.join(c)}" for what, c in lesson.claimed().items()]
    where = "" if lesson.extension else ", at the first bench shape that reaches it"
    floors = []
    for shape in lesson.benches:
        work = lesson.work(dtype=lesson.bench_dtype, **shape)
        floors.append(
            [shape_name(shape), f"{work.bytes / 1e6:.4g}", *(f"{work.bytes / bw * 1e-6:.4g}" for bw in GPUS.values())]
        )
    return (
        f"# {title(name)}: compiled, not run\n\n"
        f"What the compiler made of each kernel{where}; no GPU is needed here.\n"
        "Bytes and counts are those of one program; occupancy is resident warps over the SM's most.\n\n"
        + markdown([k.replace("_", " ") for k in found[0]], (line.values() for line in found))
        + ("\nAsserted by the tests for every target:\n\n" + "\n".join(claims) + "\n" if claims else "")
        + "\n## Predicted floor in us: least bytes over datasheet bandwidth\n\n"
        + markdown(["shape", "MB", *(f"{gpu} ({bw} TB/s)" for gpu, bw in GPUS.items())], floors)
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
        "one access of a warp: a sector for each 32 bytes of global memory that it touches (4 is the least for 32\n"
        "words), a wavefront for each time that the banks of shared memory must answer (1 is the least for words).\n\n"
        + markdown([key.replace("_", " ") for key in used], ([row[key] for key in used] for row in found))
        + ("\nAsserted by the tests:\n\n" + "\n".join(said) + "\n" if said else "")
    )


def _ncu_page(folder: Path, found: list[dict[str, str]]) -> str:
    about = json.loads(hardware.path(folder).read_text().splitlines()[0].removeprefix("# "))
    same = [row["metric"] for row in found if row["ratio"] == "1.00"]
    cost, cost_same = (sum(m in hardware.RATIOS for m in ms) for ms in ([row["metric"] for row in found], same))
    measured = "{gpu}, driver {driver}, CUDA {cuda}, {ncu}, {date} at commit {commit}.".format(**about)
    head = f"# The emulator's counts beside the GPU's\n\n{measured}\n\n{hardware.ABOUT}\n"
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
            plot = folder / f"{lesson}.{table.name.replace(' ', '_')}.png"
            made[plot] = plots.of_table(table)
            part += f"\n![{table.name}]({plot.name})\n"
        pages.setdefault(lesson, []).append(part)

    for path in sorted(folder.glob("*.*.*.csv")):
        lesson, name = path.stem.rsplit(".", 1)
        if lesson in known:
            about = json.loads(path.read_text().splitlines()[0].removeprefix("# "))
            measured = "Measured on {gpu}, torch {torch}, triton {triton}, {date} at commit {commit}.\n\n"
            table = Table(name, list(rows.read_csv(path)), about["note"], about["x"], about["y"], about["by"])
            add(lesson, table, measured.format(**about))
    for lesson, steps in known.items():
        for compare in steps.compares if isinstance(steps, Steps) else ():
            if (compared := compare(folder)) and compared.rows:
                add(lesson, compared)
    for lesson, parts in pages.items():
        page = folder / f"{lesson}.md"
        head = others.get(page, f"# {title(lesson)}\n")
        assert isinstance(head, str)
        made[page] = head + "\n" + "\n".join(parts)
    return made


def _index(made: list[Path]) -> str:
    """reports/README.md: every page, by machine."""
    lines = ["# Reports", "", "Generated by `python -m lessonkit report` from the rows beside them.", ""]
    pages = sorted(p for p in made if p.suffix == ".md" and p.parent.parent == REPORTS)
    for folder in sorted({p.parent.name for p in pages}):
        lines += [f"## {folder}: {WITHOUT_A_GPU.get(folder, 'measured')}", ""]
        lines += [f"- [{p.stem}]({folder}/{p.name})" for p in pages if p.parent.name == folder]
        if (roof := REPORTS / folder / "roofline.png") in made:
            lines.append(f"- [roofline of every lesson]({folder}/{roof.name})")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


RESULTS = {
    "en": ["lesson", "largest shape", "ms", "rate", "% of limit", "over the first rung", "over the best peer"],
    "zh": ["课", "最大的形状", "ms", "速率", "占极限 %", "相对第一级", "相对最好的对手"],
}


def results(lessons: dict[str, Lesson], language: str) -> str:
    """For each lesson its last rung at the largest shape, and how it stands to the best peer over all shapes."""
    header = RESULTS[language]
    parts = []
    for folder in device_folders():
        body = []
        for name, lesson in lessons.items():
            found = rows.read(folder / f"{name}.csv")
            last = [row for row in found if row.rung == lesson.rungs[-1].__name__]
            if not last:
                continue
            big = max(last, key=lambda row: row.bytes)
            here = {row.rung: row for row in found if row.shape == big.shape}
            first = here.get(lesson.rungs[0].__name__)
            ratios = [row.ratio_to_best_peer for row in last if row.ratio_to_best_peer]
            body.append(
                [
                    f"[{title(name)}](reports/{folder.name}/{name}.md)",
                    f"{big.shape} {big.dtype}",
                    f"{big.ms_p50:.4g}",
                    big.rate,
                    f"{big.percent_of_limit:.0f}%",
                    f"{first.ms_p50 / big.ms_p50:.1f}x" if first else "",
                    f"{min(ratios):.2f}x to {max(ratios):.2f}x in {len(ratios)} shapes" if ratios else "",
                ]
            )
        if body:
            parts.append(f"### {folder.name}\n\n" + markdown(header, body))
    return "\n".join(parts) or "No GPU has been measured yet.\n"


__all__ = ["committed", "generate", "save_table", "stale_rows", "write"]
