"""The stages of a compiled kernel, each line with the line of Python that it comes from, and a page of all of them.

Every stage of Triton's compiler carries source locations, and each writes them in its own way: TTIR and TTGIR as
`loc(#loc12)`, LLVM IR as `!dbg !7`, PTX as `.loc`, the disassembler as a comment. Here they become one number a line.
"""

import ast
import difflib
import html
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lessonkit.modes.compiled import as_file, tool

Line = tuple[str, int]  # the text, and the line of the kernel's file that it comes from (0: of none)
NAMES = {"python": "Python", "ast": "AST", "ttir": "TTIR", "ttgir": "TTGIR", "llir": "LLVM IR", "ptx": "PTX",
         "sass": "SASS"}  # fmt: skip


def stages(kernel: Any, compiled: Any) -> dict[str, list[Line]]:
    """{stage: its lines} of a jitted function and of what Triton made of it, from Python to machine code."""
    source, first = inspect.getsourcelines(kernel.fn)
    with as_file(compiled.asm["cubin"]) as cubin:
        disassembled = tool("nvdisasm", "-c", "-gi", cubin)
    return {
        "python": [(line.rstrip("\n"), first + i) for i, line in enumerate(source)],
        "ast": list(_ast(ast.parse(textwrap.dedent("".join(source))), first - 1)),
        "ttir": _mlir(compiled.asm["ttir"]),
        "ttgir": _mlir(compiled.asm["ttgir"]),
        "llir": _llvm(compiled.asm["llir"]),
        "ptx": _ptx(compiled.asm["ptx"]),
        "sass": _sass(disassembled),
    }


def _ast(node: ast.AST, before: int, depth: int = 0) -> Iterator[Line]:
    """A statement a line, with what it holds; the branches of an `if` and the body of a loop below it."""
    for statement in getattr(node, "body", []):
        nested = isinstance(statement, ast.FunctionDef | ast.For | ast.If)
        inner = ("body", "orelse", "decorator_list", "args") if nested else ()
        fields = [f"{name}={ast.dump(value)}" for name, value in ast.iter_fields(statement)
                  if name not in inner and isinstance(value, ast.AST)]  # fmt: skip
        fields = [re.sub(r", ctx=\w+\(\)|type_\w+=None", "", field) for field in fields]
        yield f"{'  ' * depth}{type(statement).__name__}({', '.join(fields)})", before + statement.lineno
        if nested:
            yield from _ast(statement, before, depth + 1)
            if otherwise := getattr(statement, "orelse", None):
                yield f"{'  ' * depth}else", before + otherwise[0].lineno
                yield from _ast(ast.Module(otherwise, []), before, depth + 1)


def _mlir(text: str) -> list[Line]:
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))

    def line(place: str) -> int:
        """A callsite counts where it stands in the kernel, not in Triton's library."""
        if found := re.search(r'"[^"]*":(\d+):\d+', place):
            return int(found[1])
        inner = re.findall(r"#loc\d*", place)
        return line(places[inner[-1]]) if inner and inner[-1] in places else 0

    kept = [found for found in text.splitlines() if found and not found.startswith("#loc")]
    return [
        (re.sub(r" loc\((?:\"\w+\"\()?#?\w+\)\)?", "", found), line(m[1]) if (m := _LOC.search(found)) else 0)
        for found in kept
    ]


_LOC = re.compile(r"loc\((#loc\d*)\)$")


def _llvm(text: str) -> list[Line]:
    location = r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+).*?(?:inlinedAt: (!\d+))?\)$"
    places = {n: (int(line), inlined) for n, line, inlined in re.findall(location, text, re.MULTILINE)}

    def line(place: str) -> int:
        number, inlined = places.get(place, (0, ""))
        return line(inlined) if inlined else number

    kept = [found for found in text.splitlines() if found and found[0] not in "!;"]
    return [
        (re.sub(r",? !dbg !\d+", "", found), line(m[1]) if (m := re.search(r"!dbg (!\d+)", found)) else 0)
        for found in kept
    ]


def _ptx(text: str) -> list[Line]:
    lines, now = list[Line](), 0
    for found in text.split("\t.section")[0].splitlines():
        if place := re.search(r"\.loc\s+\d+ (\d+) \d+(?:.*inlined_at \d+ (\d+))?", found):
            now = int(place[2] or place[1])
        elif (code := found.split("//")[0].rstrip()) and not code.startswith("$L__tmp"):
            lines.append((code.expandtabs(4), now))
    return lines


def _sass(text: str) -> list[Line]:
    lines, now = list[Line](), 0
    for found in text.splitlines():
        if "//## File" in found:
            now = int(re.findall(r"line (\d+)", found)[-1])
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", found):
            lines.append((code[1], now))
        elif re.match(r"\.L_x_\d+:", found):
            lines.append((found, 0))
    return lines


def changed(old: Sequence[Line], new: Sequence[Line]) -> list[str]:
    """A unified diff of two listings. Numbers of values are dropped: one more value renames all that follow."""
    before, after = ([re.sub(r"(%[a-z]+)[\w-]*", r"\1", text) for text, _ in lines] for lines in (old, new))
    return list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]


STYLE = """
body { margin: 0; font: 13px/1.5 system-ui, sans-serif; color: #1b1f24 }
header, details { padding: 8px 16px } h1 { font-size: 18px; margin: 4px 0 } p { max-width: 90ch; margin: 4px 0 }
main { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(380px, 1fr); overflow-x: auto }
section { border-left: 1px solid #d0d7de; min-width: 0 } h2 { font-size: 14px; margin: 0; padding: 6px 10px;
background: #f6f8fa; border-bottom: 1px solid #d0d7de } pre { margin: 0; font: 11px/1.45 ui-monospace, monospace }
main pre { height: calc(100vh - 150px); overflow: auto } pre span { display: block; padding: 0 10px; white-space: pre }
span.on { background: #ffe08a } .add { background: #dafbe1 } .del { background: #ffebe9 } [data-l] { cursor: pointer }
"""
SCRIPT = """
const pick = line => document.querySelectorAll('main pre').forEach(pane => {
  pane.querySelectorAll('.on').forEach(e => e.classList.remove('on'));
  const found = pane.querySelectorAll(`[data-l="${line}"]`);
  found.forEach(e => e.classList.add('on'));
  if (found.length) pane.scrollTop = found[0].offsetTop - pane.offsetTop - 60;
});
document.querySelector('main').addEventListener('click', e => e.target.dataset.l && pick(e.target.dataset.l));
"""


def page(title: str, about: str, listing: Mapping[str, Sequence[Line]], diffs: Mapping[str, Sequence[str]]) -> str:
    """One self-contained HTML page: the stages side by side, a click marks a line's ancestors and descendants."""
    panes = "".join(
        f"<section><h2>{NAMES[name]} <small>{len(lines)} lines</small></h2><pre>"
        + "".join(f"<span{f' data-l={n}' if n else ''}>{html.escape(text) or ' '}</span>" for text, n in lines)
        + "</pre></section>"
        for name, lines in listing.items()
    )
    kinds = {"+": " class=add", "-": " class=del"}
    below = "".join(
        f"<details><summary>{html.escape(name)}</summary><pre>"
        + "".join(f"<span{kinds.get(line[:1], '')}>{html.escape(line)}</span>" for line in lines)
        + "</pre></details>"
        for name, lines in diffs.items()
    )
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    intro = f"<header><h1>{html.escape(title)}</h1><p>{html.escape(about)}</p></header>"
    return f"{head}{intro}<main>{panes}</main>{below}<script>{SCRIPT}</script></html>\n"
