"""How fast the operators of course_ops are: from operators.csv, or else from the lessons whose last rungs they ship."""

from pathlib import Path

from lessonkit.base.markdown import markdown
from lessonkit.measure import operator_rows
from lessonkit.measure.stale import Today, device_folders
from lessonkit.pages import results

# The operators of results.OPERATORS that each function computes, forward first.
SHIPPED = {
    "attention": ("attention", "attention backward", "decoding"),
    "softmax": ("softmax", "softmax backward"),
    "layer_norm": ("layernorm", "layernorm backward"),
    "rms_norm": ("rmsnorm", "rmsnorm backward"),
    "add_norm": ("add + layernorm", "add + layernorm backward"),
    "cross_entropy": ("cross-entropy", "cross-entropy backward"),
    "gelu": ("GELU",),
    "dropout": ("dropout",),
    "matmul": ("matmul", "skinny matmul"),
    "linear": ("epilogue", "epilogue backward"),
    "grouped_matmul": ("grouped matmul",),
    "matmul_fp8": ("fp8 matmul",),
    "quantize": ("quantisation",),
    "scan": ("scan",),
}
LANGUAGES = ("Triton", "Gluon")  # what course_ops' kernels are written in
MARK = "\\*"
HEADS = {
    "en": ["course_ops.", "operator", "shape", "ms", "best peer", "its ms", "ratio"],
    "zh": ["course_ops.", "算子", "形状", "ms", "最快的对手", "对手的 ms", "比值"],
}
MARKED = {
    "en": f"{MARK} Measured before the code, the inputs or a peer of that line changed.",
    "zh": f"{MARK} 测量之后，这一行的代码、输入或对手改过。",
}
FROM_LESSONS = {
    "en": """\
Rows of the lessons at large shapes: the fastest rung there, whose kernel is in this package, beside the fastest peer
that was timed in the same rounds. Above a ratio of 1 ours is faster. The host's time of a call is not in the rows: it
is hidden behind a kernel that takes longer, and shows at small shapes (day 1, lesson 8 measures it).
""",
    "zh": """\
下表取自各课在大形状上的实测行：该形状下最快的一级（它的 kernel 就在本包里），以及同一轮中测得的最快的对手。
比值大于 1 表示我们更快。每次调用的主机开销不计入表中：kernel 耗时更长时它被隐藏，形状小时才显现
（第 1 天第 8 课测的就是它）。
""",
}
FROM_ROWS = {
    "en": """\
[operators.csv](../reports/{device}/operators.csv) has each operator, timed in the same rounds as its peers. The
shapes are sizes of published models, sizes that hurt, and random ones that change with each release. A ratio is
the fastest peer's time over ours: above 1 ours is faster. Shapes under 20 microseconds have rows and are not judged
here. The host's time of a call is not in the rows: it is hidden behind a kernel that takes longer.
""",
    "zh": """\
[operators.csv](../reports/{device}/operators.csv) 中，每个算子都在已发布模型的尺寸、棘手的尺寸、
以及每次发布都会更换的随机尺寸上，与对手在同一轮次里计时。比值是最快对手的时间除以我们的时间：大于 1 表示我们更快。
短于 20 微秒的形状有记录，但不在这里评判。记录不含主机一侧的调用时间：它藏在耗时更长的 kernel 后面。
""",
}
HEADS_OF_ROWS = {
    "en": [
        "course_ops.",
        "direction",
        "shapes",
        "mean ratio",
        "worst",
        "at",
        "its best peer",
        "under 0.97",
        "no ratio",
    ],
    "zh": ["course_ops.", "方向", "形状数", "平均比值", "最差", "形状", "那里最快的对手", "低于 0.97", "没有比值"],
}


def speed(language: str, today: Today) -> str:
    """A table for each GPU: of operators.csv where there is one, else of the lessons' rows."""
    parts = []
    for folder in device_folders():
        table = from_rows(folder, language) or from_lessons(folder, language, today)
        if table:
            parts.append(f"### {folder.name}\n\n{table}")
    return "\n".join(parts) or "No GPU has been measured yet.\n"


def from_rows(folder: Path, language: str) -> str:
    """Each operator and direction over all of its shapes: geometric mean, the worst shape, what is behind the peers.

    Rows of shapes that are asked no longer, the random ones of the last release, do not count.
    """
    asked = operator_rows.cases()
    keys = {case.key for case in asked}
    found = [row for row in operator_rows.read(folder / operator_rows.FILE) if row.key in keys]
    old = {case.key for case in operator_rows.missing(found, asked)} & {row.key for row in found}
    body = []
    for s in operator_rows.summaries(found):
        is_old = any(key[:2] == (s.operator, s.direction) for key in old)
        line = [f"`{s.operator}`", s.direction, f"{s.shapes}{f' {MARK}' * is_old}", f"{s.mean:.2f}" if s.shapes else ""]
        if s.worst:
            at = f"{s.worst.shape} {s.worst.dtype}" + f", {s.worst.data}" * (s.worst.data != "random")
            line += [f"{s.worst.ratio:.2f}", at, s.worst.best_peer, f"{s.share_behind:.0%}"]
        else:
            line += [""] * 4
        body.append([*line, str(s.failed or "")])
    if not body:
        return ""
    return (
        FROM_ROWS[language].format(device=folder.name)
        + "\n"
        + markdown(HEADS_OF_ROWS[language], body)
        + f"\n{MARKED[language]}\n" * bool(old)
    )


def from_lessons(folder: Path, language: str, today: Today) -> str:
    """Each operator at the largest shape that most of its lessons measured, beside its best peer.

    ms: of the fastest rung there, whose kernel course_ops ships. ratio: the peer's ms over ours.
    """
    found = {contest.name: contest for contest in results.contests(folder, LANGUAGES)}
    body = []
    for function, operators in SHIPPED.items():
        for contest in (found[name] for name in operators if name in found):
            best, peer = contest.best, contest.peer
            if peer is None:
                continue
            old = f" {MARK}" * bool(today.why_old(best) or today.why_old(peer))
            line = [f"`{function}`", contest.name, f"{contest.shape} {contest.dtype}", f"{best.ms_p50:.4g}{old}"]
            ratio = f"{best.ratio_to_best_peer:.2f}" if best.ratio_to_best_peer else ""  # a peer was not there
            body.append([*line, peer.rung, f"{peer.ms_p50:.4g}", ratio])
    if not body:
        return ""
    marked = f"\n{MARKED[language]}\n" * any(line[3].endswith(MARK) for line in body)
    return FROM_LESSONS[language] + "\n" + markdown(HEADS[language], body) + marked
