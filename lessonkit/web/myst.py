"""A file as a reader meets it: what its docstring and comments at the margin say, and the code between them.

Their prose is plain text: paragraphs, lists by a dash, drawings and tables set apart by an indent. Here it becomes
Markdown (MyST) in which nothing is markup by accident.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from lessonkit.base.prose import normal, unwrapped

PROSE, CODE = "prose", "code"
_RUNG = re.compile(
    r"(?:Rung (?P<en>\d+[a-z]?)|第\s*(?P<zh>\d+[a-z]?)\s*级)(?P<more>[,，（(][^.。]{1,40})?[.。：:]\s*", re.ASCII
)
_PREDICTED = re.compile(r"(?:(?<=[.:?)])\s+|(?<=[。？）])\s*)(?=Predicted[: ]|预测[:：])")
_LABEL = re.compile(
    r"(?P<label>[A-Z][A-Za-z ]{1,20}|[\u4e00-\u9fff][\u4e00-\u9fffA-Za-z ]{1,12}|Needs)[:：](?P<gap> *)(?P<said>\S.*)"
)
_HEAD = re.compile(
    r"New words \(|You (?:will )?(?:be able|need|learn)|(?:Run|Check|Time) it:|Needs |Without a GPU|"
    r"(?:学完|你将|你?需要[:：]|运行|检查|计时)"
)
_SECTION = re.compile(r"-{4} (?P<title>\S.*?) -{4,}")
_BULLET = re.compile(r" {0,3}[-*] +(?=\S)")
_NUMBER = re.compile(r"(?P<number>\d{1,2})[.)] +(?=\S)")
_DRAWN = re.compile(r"[\u2190-\u21ff\u2500-\u259f]|\S {3,}\S|^[|+].*[|+]$")
_IDENTIFIER = re.compile(r"(?<![\w`./\\-])((?:tl|gl|torch|triton)\.\w[\w.]*\w|[A-Za-z]\w+_\w+(?:\.\w+)*)(?![\w`/])")


@dataclass(frozen=True)
class Part:
    """Some lines of a file that belong together. kind: PROSE (without comment marks) or CODE."""

    kind: str
    text: str


def parts(text: str, suffix: str) -> list[Part]:
    """The prose at the margin of a file in Python (".py") or C++, and the code between, in order."""
    mark, found, prose, code = "#" if suffix == ".py" else "//", list[Part](), list[str](), list[str]()

    def close(kind: str, lines: list[str]) -> None:
        if said := "\n".join(lines).strip("\n"):
            found.append(Part(kind, said))
        lines.clear()

    if suffix == ".py" and (docstring := _docstring(text)):
        found.append(Part(PROSE, docstring[0]))
        text = text[docstring[1] :]
    for line in text.splitlines():
        if line.startswith(mark) and not re.match(r"#!|# (?:fmt|ruff|mypy|type|noqa)\b|//!|#\w", line):
            close(CODE, code)
            prose.append(line.removeprefix(mark).removeprefix(" "))
        elif prose and not line.strip():
            close(PROSE, prose)
        else:
            close(PROSE, prose)
            code.append(line)
    close(PROSE, prose)
    close(CODE, code)
    return found


def _docstring(text: str) -> tuple[str, int] | None:
    """What the docstring of a module says, and where the text goes on after it."""
    body = ast.parse(text).body
    said = ast.get_docstring(ast.parse(text))
    if said is None:
        return None
    return said, sum(len(line) for line in text.splitlines(True)[: body[0].end_lineno])


def rung(said: str) -> tuple[str, str, str] | None:
    """(number, what stands behind it, the rest) of prose that begins a rung: "Rung 3, advanced. New: ..."."""
    found = _RUNG.match(said)
    if not found:
        return None
    return found["en"] or found["zh"], (found["more"] or "").strip(",，（() "), said[found.end() :]


def title(said: str) -> tuple[str, str]:
    """(title, the rest) of prose that begins with an underlined title, or with a sentence in a paragraph of its own."""
    first, _, rest = said.partition("\n")
    under, _, below = rest.partition("\n")
    if re.fullmatch(r"[=-]{3,}", under.strip()):
        return first.strip(), below.strip("\n")
    if not under.strip():
        return first.strip().rstrip(".。"), below.strip("\n")
    return "", said


def sentence(said: str) -> str:
    """The first sentence, without its stop."""
    return re.split(r"\.\s|[.。]$|。", normal(unwrapped(said.split("\n\n")[0])), maxsplit=1)[0]


def escaped(text: str) -> str:
    """Plain text as Markdown: what stands between backticks stays, names with an underscore become code."""
    made = []
    for i, piece in enumerate(re.split(r"(`[^`\n]+`)", text)):
        if i % 2:
            made.append(piece)
            continue
        for j, word in enumerate(_IDENTIFIER.split(piece)):
            made.append(f"`{word}`" if j % 2 else re.sub(r"([\\`*_\[\]<>#|$~{}&^!])", r"\\\1", word))
    said = re.sub(r"^([-+] )", r"\\\1", "".join(made))
    return re.sub(r"^(\d+)([.)] )", r"\1\\\2", said)


def markdown(said: str) -> str:
    """The prose of a comment or docstring as MyST."""
    blocks = list[str]()
    for block in _blocks(said.splitlines()):
        if block.startswith("```") and blocks and re.search(r"[:：]\n::::$", blocks[-1]):
            blocks[-1] = f"{blocks[-1].removesuffix('::::')}\n{block}\n::::"  # the table that a prediction announces
        else:
            blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line.strip() or re.fullmatch(r"[=~-]{3,}", line.strip()):
            at += 1
            continue
        begin = at
        if section := _SECTION.fullmatch(line):
            at += 1
            yield f"## {escaped(section['title'])}"
        elif _BULLET.match(line):
            items = list[str]()
            while at < len(lines) and (_BULLET.match(lines[at]) or (lines[at].startswith("  ") and lines[at].strip())):
                if bullet := _BULLET.match(lines[at]):
                    items.append(lines[at][bullet.end() :])
                else:
                    items[-1] += "\n" + lines[at].strip()
                at += 1
            yield "\n".join(f"- {escaped(normal(unwrapped(item)))}" for item in items)
        elif numbered := _numbered(lines[at:]):
            yield "\n".join(f"{i}. {escaped(normal(unwrapped(item)))}" for i, item in numbered)
            at += sum(1 + item.count("\n") for _, item in numbered)
        elif _apart(line) and not _labelled(line):
            at += 1
            while at < len(lines) and not _labelled(lines[at]) and (
                _apart(lines[at]) or (not lines[at].strip() and _apart_after(lines, at))
            ):  # fmt: skip
                at += 1
            yield fence("text", textwrap.dedent("\n".join(lines[begin:at])).rstrip())
        elif _labelled(line):
            rows = list[str]()
            while at < len(lines) and _labelled(lines[at]):
                found = _LABEL.match(lines[at])
                assert found is not None
                rows.append(f"- **{escaped(found['label'])}** {_command(found['said'])}")
                at += 1
            yield "\n".join(rows)
        else:
            at += 1
            while at < len(lines) and lines[at].strip() and not (
                _apart(lines[at]) or _labelled(lines[at]) or _BULLET.match(lines[at]) or _HEAD.match(lines[at])
                or re.fullmatch(r"[=~-]{3,}", lines[at].strip()) or _SECTION.fullmatch(lines[at])
            ):  # fmt: skip
                at += 1
            for said in _PREDICTED.split(unwrapped("\n".join(each.strip() for each in lines[begin:at]))):
                yield _predicted(said) if re.match(r"Predicted[: ]|预测[:：]", said) else escaped(said)


def _numbered(lines: list[str]) -> list[tuple[int, str]]:
    """The items at the beginning of some lines, two or more, that count up; each may go on in lines below, indented."""
    items = list[tuple[int, str]]()
    for line in lines:
        found = _NUMBER.match(line)
        if found and not _apart(line) and (not items or int(found["number"]) == items[-1][0] + 1):
            items.append((int(found["number"]), line[found.end() :]))
        elif items and line.startswith("   ") and line.strip():
            items[-1] = items[-1][0], f"{items[-1][1]}\n{line.strip()}"
        else:
            break
    return items if len(items) > 1 else []


def _predicted(said: str) -> str:
    return f"::::{{container}} prediction\n{escaped(said)}\n::::"


def _apart(line: str) -> bool:
    return bool(line.strip()) and (line.startswith("  ") or bool(_DRAWN.search(line)))


def _apart_after(lines: list[str], at: int) -> bool:
    """Whether the drawing goes on behind empty lines."""
    rest = next((line for line in lines[at:] if line.strip()), "")
    return _apart(rest) and not _labelled(rest)


def _labelled(line: str) -> bool:
    """A label and a command apart from it: `Run it:    python ...`."""
    found = _LABEL.match(line)
    return found is not None and len(found["gap"]) >= 2


def _command(said: str) -> str:
    command, _, rest = said.partition("   ")
    return f"`{command.strip()}`" + (f" {escaped(rest.strip())}" if rest.strip() else "")


def fence(language: str, text: str, options: str = "") -> str:
    """A code block, fenced by more backticks than stand in it."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    head = f"{{code-block}} {language}\n{options}" if options else language
    return f"{ticks}{head}\n{text}\n{ticks}"


def code(text: str, suffix: str) -> str:
    """A code block; lines that a rung marks as new are lit."""
    new = [str(i) for i, line in enumerate(text.splitlines(), 1) if re.search(r"(?:#|//) (?:New|新)[:：]", line)]
    options = f":emphasize-lines: {','.join(new)}\n" if new else ""
    return fence("python" if suffix == ".py" else "cuda", text, options)


def folded(summary: str, body: str, kind: str, *, unfolded: bool = False) -> str:
    """Markdown behind a line (as HTML) that unfolds it. kind: classes by which a page's style knows it."""
    opened = " open" * unfolded
    return f'<details class="fold {kind}"{opened}><summary>{summary}</summary>\n\n{body}\n\n</details>'
