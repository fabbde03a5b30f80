"""The prose of a file, in Python or C++: comments, docstrings and the strings of a declaration that a learner reads.

`passages(text, suffix)` finds it. A passage knows its messages and how it looks with other words, so that what is
extracted for translators and what is printed in their language come from one reading. A message is a paragraph with its
white space normalised: wrapping it anew changes no message. Code, drawings and tables stay as they are; of a table, the
cells that hold a phrase are messages.
"""

import ast
import io
import keyword
import re
import tokenize
import unicodedata
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from lessonkit.base.cpp_text import comments, without_comments

WIDTH = 118
Translate = Callable[[str], str]

# Calls of a declaration -> their arguments with prose, by position or by name.
_SPOKEN: dict[str, tuple[int | str, ...]] = {
    "Prediction": ("why",),
    "Lesson": ("passes_why",),
    "Table": (2, "note"),
    "Exercise": ("hints", "predicted"),
    "Wrong": (0, "why"),
    "case": (0, "why"),
}
_DIRECTIVE = re.compile(
    r"!|%%|noqa|type:|fmt:|ruff:|mypy:|pragma|jupyter:|NOLINT|clang-format|namespace \w+$|stub:|END\(\d"
    r"|The learner's file"
)
_TODO = re.compile(r"TODO\(\d+\): ")
_BULLET = re.compile(r" {0,3}(?:[-*]|(?P<number>\d{1,2})[.)]) +(?=\S)")
_RULE = re.compile(r"-{3,} (.+?)(?: -{3,})?$")  # the heading of a section
_HASHES = re.compile(r"#{1,6} +(?=\S)")  # a heading of Markdown
_UNDERLINE = re.compile(r"[=~-]{3,}$")
_DRAWN = re.compile(r"[\u2190-\u21ff\u2500-\u259f]|\S {3,}\S|^[|+].*[|+]$")
_HEAD = re.compile(r"New words \(|You (?:will )?(?:be able|need|learn)|(?:Run|Check|Time) it:|Needs |Without a GPU")
_LABEL = re.compile(r"[A-Z][A-Za-z ]{1,20}:(?=  |$)")  # `Check it:  python3 course.py check ...`
_NEW_WORDS = re.compile(r"New words \(GLOSSARY\.md\): ")  # generated: a list of terms
_CELL = re.compile(r"\S+(?: \S+)*")
_WORD = re.compile(r"[(\"'`]*[A-Za-z][a-z'-]+[.,;:!?)\"'`]*$")
_LINKING = re.compile(
    r"\b(?:a|an|the|of|is|are|was|be|in|to|and|for|with|from|by|as|at|on|it|its|this|that|these|each|no|not|or|than"
    r"|then|when|if|all|which|has|have|per|so|only|both|they|them|into|over|under|every|more|less|most|any|but|what"
    r"|how|where|while|after|before|again|there|once|does|do|can|may|must|will|already|none|between|without)\b"
)
_COMMAND = re.compile(
    r"(?:^|\s)--?[A-Za-z]|^(?:python3?|diff|git|export|open|pip|return)\b|^with .*:$|[A-Za-z]/\w+[/.]|[{}]"
)
_DRAWING = re.compile(r"[|^\u2190-\u21ff\u2500-\u259f]|---|===|-->|->$|\.{4}|\] *$|^\[|([A-Za-z])\1\1")
_HEADINGS = frozenset(("rung", "predicted", "scheme", "tool"))  # words that are said, though a file has the name
_FORMULA = re.compile(r"\w+ = \w+(?: [*+/-] [\w ]+)*|\w+ = \w+\([^()]*\)")


@dataclass(frozen=True)
class Passage:
    """text[start:stop] of a file, the messages in it, and what stands there when they are translated."""

    start: int
    stop: int
    messages: tuple[str, ...]
    render: Callable[[Translate], str]


@dataclass(frozen=True)
class _Line:
    """A line of a comment or docstring: where it begins in the file, its column there, what it says."""

    start: int
    column: int
    text: str

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


def passages(text: str, suffix: str) -> list[Passage]:
    """The prose of a file, in order. suffix: ".py", or one of C++."""
    found = list(_of_python(text) if suffix == ".py" else _of_cpp(text))
    return sorted(found, key=lambda passage: passage.start)


def messages(text: str, suffix: str) -> list[str]:
    """The messages of a file that are translated, in order, each once. Its list of new words is generated."""
    found = dict.fromkeys(message for passage in passages(text, suffix) for message in passage.messages)
    return [message for message in found if not _NEW_WORDS.match(message)]


def read_as(text: str, suffix: str, translate: Translate) -> str:
    """The file with its prose in other words. A passage whose words stay the same keeps its lines."""
    parts, at = [], 0
    for passage in passages(text, suffix):
        if all(translate(message) == message for message in passage.messages):
            continue
        parts += [text[at : passage.start], passage.render(translate)]
        at = passage.stop
    return _underlined("".join([*parts, text[at:]]))


def normal(text: str) -> str:
    return " ".join(text.split())


def is_prose(text: str) -> bool:
    """Whether a paragraph says something in English: two words, or one alone, or one behind a shape: `[n] each`.

    Shapes alone, names and code do not.
    """
    if _DIRECTIVE.match(text):
        return False
    tokens = re.sub(r"`[^`]*`", "", text).split()
    words = [token for token in tokens if _WORD.match(token)]
    if re.search(r"\] each\b|\], contiguous\b", text):
        return True
    return len(words) >= 2 or (len(words) == len(tokens) == 1 and len(words[0]) > 2)


def _is_phrase(cell: str, names: frozenset[str]) -> bool:
    """Whether a cell of a table, or a line beside a drawing, says something: no code, no figure, no name of the file.

    One word alone is a heading or a term, or the unit of a number: `latency`, `16 bytes`.
    """
    if _LABEL.fullmatch(cell) or _is_sentence(cell):
        return True
    if _COMMAND.search(cell) or _DRAWING.search(cell) or _FORMULA.fullmatch(cell):
        return False
    tokens = [token for token in re.sub(r"`[^`]*`", "", cell).split() if re.search("[A-Za-z]", token)]
    words = [token.strip("(\"'`.,;:!?)") for token in tokens if _WORD.match(token) or token == "a"]
    said = [word for word in words if (len(word) > 2 or word in ("a", "no")) and word not in names - _HEADINGS]
    if len(words) >= 2:
        return len(words) >= 0.5 * len(tokens) and bool(said)
    is_name = words and words[0][0].isupper() and not words[0].endswith("'s")
    return len(said) == 1 and not is_name and bool(_WORD.match(cell.split()[-1]))


def _is_sentence(cell: str) -> bool:
    """Whether hardly anything but words stands in a cell, and words that link others."""
    tokens = cell.split()
    words = [token.lower() for token in tokens if _WORD.match(token)]
    return len(words) >= 3 and len(words) >= 0.6 * len(tokens) and bool(_LINKING.search(" ".join(words)))


# ---- Where the prose of a file stands ----


def _of_python(text: str) -> Iterator[Passage]:
    offsets = _offsets(text)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    names = frozenset(token.string for token in tokens if token.type == tokenize.NAME) - set(keyword.kwlist)
    found = [(offsets[t.start[0] - 1] + t.start[1], t.string) for t in tokens if t.type == tokenize.COMMENT]
    for block in _blocks(text, found, "#"):
        yield from _paragraphs(text, block, names)
    lines = text.splitlines(True)

    def place(line: int, byte: int) -> int:
        return offsets[line - 1] + len(lines[line - 1].encode()[:byte].decode())

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                said = first.value
                if isinstance(said.value, str):
                    start, stop = (
                        place(said.lineno, said.col_offset),
                        place(said.end_lineno or 0, said.end_col_offset or 0),
                    )
                    yield from _docstring(text, start, stop, names)
        elif isinstance(node, ast.Call | ast.Assign):
            for string in _spoken(node) if isinstance(node, ast.Call) else _note(node):
                start = place(string.lineno, string.col_offset)
                stop = place(string.end_lineno or 0, string.end_col_offset or 0)
                yield _string(text, start, stop, str(string.value))


def _of_cpp(text: str) -> Iterator[Passage]:
    found = [(start, text[start:stop].rstrip()) for start, stop in comments(text) if text.startswith("//", start)]
    names = frozenset(re.findall(r"[A-Za-z_]\w*", without_comments(text)))
    for block in _blocks(text, found, "//"):
        yield from _paragraphs(text, block, names)


def _offsets(text: str) -> list[int]:
    """Where each line begins."""
    offsets = [0]
    for line in text.splitlines(True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _blocks(text: str, found: list[tuple[int, str]], mark: str) -> Iterator[list[_Line]]:
    """Comments that follow each other in one column are a block. Only the first may stand behind code."""
    block: list[_Line] = []
    last, last_column = -2, 0
    for start, comment in found:
        begin = text.rfind("\n", 0, start) + 1
        number, column = text.count("\n", 0, start), start - begin
        said = comment.removeprefix(mark)
        inset = len(mark) + said.startswith(" ")
        line = _Line(start + inset, column + inset, said.removeprefix(" ").rstrip())
        alone = not text[begin:start].strip()
        if block and not (alone and number == last + 1 and column == last_column):
            yield block
            block = []
        block.append(line)
        last, last_column = number, column
    if block:
        yield block


def _docstring(text: str, start: int, stop: int, names: frozenset[str]) -> Iterator[Passage]:
    """The paragraphs of a docstring; one that is put together of several strings has none."""
    found = re.fullmatch(r'([rR]?"""|[rR]?")(.*?)("""|")', text[start:stop], re.DOTALL)
    if not found:
        return
    inside = start + len(found[1])
    lines, at = list[_Line](), inside
    margin = min(
        (len(each) - len(each.lstrip()) for each in found[2].splitlines()[1:] if each.strip()),
        default=start - text.rfind("\n", 0, start) - 1,
    )
    for number, each in enumerate(found[2].splitlines(True)):
        if number == 0:
            lines.append(_Line(at, inside - text.rfind("\n", 0, inside) - 1, each.rstrip()))
        else:
            cut = min(margin, len(each) - len(each.lstrip(" ")))
            lines.append(_Line(at + cut, cut, each[cut:].rstrip()))
        at += len(each)
    yield from _paragraphs(text, lines, names, margin)


def _spoken(call: ast.Call) -> Iterator[ast.Constant]:
    """The strings of a declaration that a learner reads."""
    wanted = _SPOKEN.get(call.func.id, ()) if isinstance(call.func, ast.Name) else ()
    given: list[ast.expr] = [call.args[i] for i in wanted if isinstance(i, int) and i < len(call.args)]
    given += [keyword.value for keyword in call.keywords if keyword.arg in wanted]
    for value in given:
        for each in value.elts if isinstance(value, ast.Tuple) else [value]:
            if isinstance(each, ast.Constant) and isinstance(each.value, str) and is_prose(each.value):
                yield each


def _note(assigned: ast.Assign) -> Iterator[ast.Constant]:
    """The string of `note = "..."`, the words below a table that a step returns."""
    (target, *more), value = assigned.targets, assigned.value
    is_note = not more and isinstance(target, ast.Name) and target.id == "note"
    if is_note and isinstance(value, ast.Constant) and is_prose(str(value.value)):
        yield value


# ---- From lines to messages ----


def _paragraphs(text: str, lines: list[_Line], names: frozenset[str], margin: int | None = None) -> Iterator[Passage]:
    """names: those that the file's code has. margin: the column at which further lines begin; of a comment that of its
    first line."""
    at = 0
    while at < len(lines):
        line = lines[at]
        begin = at
        at += 1
        if not line.text.strip() or _UNDERLINE.match(line.text):
            continue
        if _DIRECTIVE.match(line.text):
            while line.text.endswith(":") and at < len(lines) and lines[at].indent:  # the settings of a notebook
                at += 1
            continue
        if todo := _TODO.match(line.text):
            yield from _paragraph(text, [line], todo.end(), margin)
            continue
        if rule := _RULE.match(line.text):
            heading = _Line(line.start, line.column, line.text[: rule.end(1)])
            yield from _paragraph(text, [heading], rule.start(1), margin)
            continue
        if hashes := _HASHES.match(line.text):
            yield from _paragraph(text, [line], hashes.end(), margin)
            continue
        if (end := _row_end(lines, begin)) > begin:
            rows, known = list[list[_Line]](), set[int]()
            while end > begin:
                rows.append(lines[begin:end])
                known |= {cell.start() for cell in _cells(lines[begin])[1:]}
                begin = end
                end = _row_end(lines, begin, known)
            at = begin
            yield from _table(text, rows, margin, names)
            continue
        bullet = _bullet(lines, begin)
        hang = bullet.end() if bullet else 0
        while at < len(lines) and _goes_on(lines[at], hang) and not _begins_list(lines[at - 1], lines[at], hang):
            at += 1
        yield from _paragraph(text, lines[begin:at], hang, margin)


def _bullet(lines: list[_Line], at: int) -> re.Match[str] | None:
    """The mark of an item that begins here; a paragraph may begin with a number."""
    bullet = _BULLET.match(lines[at].text)
    if not bullet or not bullet["number"] or at + 1 == len(lines):
        return bullet
    return bullet if not _goes_on(lines[at + 1], 0) or _counts(bullet, lines[at + 1]) else None


def _row_end(lines: list[_Line], at: int, known: Set[int] = frozenset()) -> int:
    """Where the row of a table that begins here ends; `at` if none begins. known: columns of the rows above."""
    if at == len(lines):
        return at
    line, end = lines[at], at + 1
    if any(mark.match(line.text) for mark in (_UNDERLINE, _DIRECTIVE, _TODO, _RULE, _HASHES)) or _bullet(lines, at):
        return at
    is_like_those_above = bool(known & {cell.start() for cell in _cells(line)[1:]})
    is_row = _set_apart(line) or is_like_those_above or (end < len(lines) and _is_row(line, lines[end]))
    if not line.text.strip() or not is_row:
        return at
    while end < len(lines) and _continues(line, lines[end - 1], lines[end]):
        end += 1
    return end


def _set_apart(line: _Line) -> bool:
    return line.indent >= 2 or bool(_DRAWN.search(line.text)) or _is_labelled(line.text)


def _is_labelled(text: str) -> bool:
    """Whether a command stands behind a word, apart from it."""
    return bool(re.match(rf"{_LABEL.pattern} *\S", text))


def _is_row(line: _Line, following: _Line) -> bool:
    """Whether a line is the first of a table without an indent: `term  what it means`, continued below."""
    cells = _cells(line)
    return len(cells) > 1 and following.indent > 0 and following.indent in {cell.start() for cell in cells[1:]}


def _goes_on(line: _Line, hang: int) -> bool:
    """Whether a line belongs to the paragraph above it."""
    if not line.text.strip() or _UNDERLINE.match(line.text) or _DIRECTIVE.match(line.text) or _TODO.match(line.text):
        return False
    if (
        _HASHES.match(line.text)
        or _is_item(line)
        or _HEAD.match(line.text)
        or _DRAWN.search(line.text)
        or _is_labelled(line.text)
    ):
        return False
    return line.indent == hang


def _is_item(line: _Line) -> bool:
    """Whether a line is an item of a list by its dash; a number may stand there by chance."""
    bullet = _BULLET.match(line.text)
    return bullet is not None and bullet["number"] is None


def _begins_list(above: _Line, line: _Line, hang: int) -> bool:
    """Whether a number at the beginning of a line counts items: in a list, or after a colon."""
    bullet = _BULLET.match(line.text)
    return bullet is not None and bullet["number"] is not None and (hang > 0 or above.text.endswith(":"))


def _counts(bullet: re.Match[str], following: _Line) -> bool:
    """Whether the next line begins with the next number: a list, of which an item takes one line."""
    after = _BULLET.match(following.text)
    return after is not None and after["number"] is not None and int(after["number"]) == int(bullet["number"]) + 1


def _cells(line: _Line) -> list[re.Match[str]]:
    return list(_CELL.finditer(line.text))


def _continues(line: _Line, last: _Line, following: _Line) -> bool:
    """Whether the next line holds nothing but more of one cell, in that cell's column. last: the line before it.

    A label has its line for itself: below `Run it:  python a.py` begins something else.
    """
    cells = _cells(following)
    if len(cells) != 1:
        return False
    above = {cell.start(): cell[0] for cell in _cells(line) if not _LABEL.fullmatch(cell[0])}
    if cells[0].start() not in above or not _worded(above[cells[0].start()]):
        return False
    in_a_sentence = last is not line and last.text[-1] not in ".:;?!" and is_prose(cells[0][0])
    return in_a_sentence or _worded(cells[0][0])


def _worded(cell: str) -> bool:
    """Whether a part of a phrase may be this."""
    tokens = cell.split()
    return sum(bool(_WORD.match(token)) for token in tokens) >= 0.5 * len(tokens)


def _paragraph(text: str, lines: list[_Line], hang: int, margin: int | None) -> Iterator[Passage]:
    first, last = lines[0], lines[-1]
    message = normal(" ".join([first.text[hang:], *(line.text for line in lines[1:])]))
    if not is_prose(message):
        return
    start, stop = first.start + hang, last.start + len(last.text)
    column = first.column + hang
    rest = _rest(text, first, margin) + " " * (0 if _TODO.match(first.text) else hang)

    def render(translate: Translate) -> str:
        return f"\n{rest}".join(wrapped(translate(message), WIDTH - len(rest), WIDTH - column))

    yield Passage(start, stop, (message,), render)


def _rest(text: str, first: _Line, margin: int | None) -> str:
    """What stands before each further line of a block."""
    if margin is not None:
        return " " * margin
    begin = text.rfind("\n", 0, first.start) + 1
    mark = text[begin : first.start].split()[-1]
    return " " * (first.column - 1 - len(mark)) + mark + " "


@dataclass(frozen=True)
class _Cell:
    """A cell of a table: its column, its lines below each other, and whether what they say is a message."""

    column: int
    lines: tuple[str, ...]
    is_spoken: bool

    @property
    def message(self) -> str:
        return normal(" ".join(self.lines))


def _row(lines: list[_Line], names: frozenset[str]) -> list[_Cell]:
    """The cells of a line set apart, with the lines that go on in one of them."""
    more = tuple(line.text.strip() for line in lines[1:])
    row = list[_Cell]()
    for cell in _cells(lines[0]):
        said = (cell[0], *(more if more and cell.start() == lines[1].indent else ()))
        row.append(_Cell(cell.start(), said, _is_phrase(normal(" ".join(said)), names)))
    return row


def _table(text: str, rows: list[list[_Line]], margin: int | None, names: frozenset[str]) -> Iterator[Passage]:
    """Rows below each other: the phrases in their cells are messages. Cells of one column stay in one column."""
    first, last = rows[0][0], rows[-1][-1]
    table = [_row(lines, names) for lines in rows]
    spoken = tuple(cell.message for row in table for cell in row if cell.is_spoken)
    if not spoken:
        return
    rest = _rest(text, first, margin)

    def shown(row: list[_Cell], translate: Translate) -> list[tuple[str, ...]]:
        """The lines of each cell. One that had several lines is wrapped anew, before the cell behind it."""
        made = list[tuple[str, ...]]()
        for cell, behind in zip(row, [*row[1:], None], strict=True):
            said = translate(cell.message) if cell.is_spoken else cell.message
            room = (behind.column - 3 if behind else WIDTH - first.column) - cell.column
            room = max(room, 12 if behind else 40)
            if said == cell.message:
                made.append(cell.lines)
            else:
                made.append(tuple(wrapped(said, room, room)) if len(cell.lines) > 1 else (said,))
        return made

    def render(translate: Translate) -> str:
        cells = [shown(row, translate) for row in table]
        places = _places(table, cells)
        lines = list[str]()
        for row, said in zip(table, cells, strict=True):
            for nth in range(max(map(len, said))):
                line = ""
                for cell, parts in zip(row, said, strict=True):
                    if nth < len(parts):
                        line += " " * (places[cell.column] - columns(line)) + parts[nth]
                lines.append(line)
        return f"\n{rest}".join(lines)

    yield Passage(first.start, last.start + len(last.text), spoken, render)


def _places(table: list[list[_Cell]], cells: list[list[tuple[str, ...]]]) -> dict[int, int]:
    """Column in the source -> column of a table with other words: moved to the right where a cell needs the room."""
    before = dict[int, list[tuple[int, int]]]()  # column -> (column, width) of the cells in front of it
    for row, said in zip(table, cells, strict=True):
        for cell, parts, behind in zip(row, said, row[1:], strict=False):
            before.setdefault(behind.column, []).append((cell.column, max(map(columns, parts))))
    places, moved = dict[int, int](), 0
    for column in sorted({cell.column for row in table for cell in row}):
        ends = (places[left] + width for left, width in before.get(column, []))
        moved = max(moved, max(ends, default=-2) + 2 - column)
        places[column] = column + moved
    return places


def _string(text: str, start: int, stop: int, said: str) -> Passage:
    """A string of a declaration; a long one is put together of several, below each other."""
    indent = " " * (start - text.rfind("\n", 0, start) - 1)
    is_statement = text.endswith(" = ", 0, start)  # outside parentheses a string ends with its line

    def render(translate: Translate) -> str:
        lines = wrapped(translate(normal(said)), WIDTH - len(indent) - 4, WIDTH - len(indent) - 4, keep_spaces=True)
        if is_statement and len(lines) > 1:
            return f"(\n{indent}" + f"\n{indent}".join(map(_quoted, lines)) + ")"
        return f"\n{indent}".join(map(_quoted, lines))

    return Passage(start, stop, (normal(said),), render)


def _quoted(said: str) -> str:
    return '"' + said.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- Lines of a width, where a Chinese character is two columns wide ----

_WIDE = r"\u2e80-\u9fff\uf900-\ufaff\uff01-\uff60\u3000-\u303f\u2014\u2018\u2019\u201c\u201d\u2026"
_MARKS = r"\uff01-\uff0f\uff1a-\uff20\u3001-\u3011"  # no space stands beside these
_BROKEN = re.compile(rf"(?<=[{_WIDE}])\n(?=[{_WIDE}])|(?<=[{_MARKS}])\n|\n(?=[{_MARKS}])")
_CLOSING = "，。；：？！、）》」』”’…—"
_WHOLE = rf"[（《「『“‘]*(?:`[^`]{{1,40}}`|[{_WIDE}]|[^\s{_WIDE}`]+|`[^\s{_WIDE}]*)[{_CLOSING}]*"
_ATOM = re.compile(rf" +|{_WHOLE}")
_PIECE = re.compile(rf" +|{_WHOLE}(?: *(?:[-*+]|\d{{1,2}}[.)])(?= ))*")  # with marks of items: x - m


def columns(text: str) -> int:
    """How many columns a terminal takes for it."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def atoms(text: str) -> list[str]:
    """The pieces of a text that `wrapped` does not break, spaces among them."""
    return _ATOM.findall(text)


def wrapped(text: str, width: int, first: int, *, keep_spaces: bool = False) -> list[str]:
    """Lines of a width, the first one's its own. A line may end between two Chinese characters, not before a comma.

    None ends before a minus or "3.", which at the start of a line would begin a list.
    keep_spaces: a space at which a line breaks stays at its end, as strings need it that are put together again.
    """
    lines, line, taken, room = list[str](), "", 0, first
    for atom in _PIECE.findall(text):
        if line and taken + columns(atom.rstrip()) > room:
            lines.append(line if keep_spaces else line.rstrip())
            line, taken, room = "", 0, width
            if not atom.strip():
                if keep_spaces:
                    lines[-1] += atom
                continue
        line, taken = line + atom, taken + columns(atom)
    return [*lines, line if keep_spaces else line.rstrip()]


def unwrapped(text: str) -> str:
    """The lines of a paragraph as one; between two Chinese characters stands no space."""
    return _BROKEN.sub("", text).replace("\n", " ")


def flowed(text: str, width: int) -> str:
    """The paragraphs of a docstring in lines of another width. Indented lines and drawings stay lines of their own.

    A line that ends a sentence, and has room for the next line's first word, ends there in the other width, too.
    """
    made, paragraph = list[str](), list[str]()

    def close() -> None:
        if paragraph:
            made.extend(wrapped(unwrapped("\n".join(paragraph)), width, width))
            paragraph.clear()

    for line in text.split("\n"):
        if not line.strip() or line.startswith(" ") or _DRAWN.search(line):
            close()
            more = " " * (len(line) - len(line.lstrip()) + 4)
            pieces = wrapped(line, width - len(more), width)
            made.append(f"\n{more}".join(pieces))
            continue
        if paragraph and re.search(r"[.:?!。：？！]$", paragraph[-1]):
            first = atoms(line)[0]
            if columns(f"{paragraph[-1]} {first}") <= WIDTH - 8:
                close()
        paragraph.append(line)
    close()
    return "\n".join(made)


def breaks(text: str, width: int) -> list[int]:
    """Where a line is broken so that each piece fits into a width, with the space behind it; a long piece is cut."""
    found, taken = list[int](), 0
    for atom in _ATOM.finditer(text):
        wide = columns(atom[0]) + text.startswith(" ", atom.end())
        if taken and taken + wide > width:
            found.append(atom.start())
            taken = 0
        if columns(atom[0]) <= width:
            taken += columns(atom[0])
            continue
        for nth, letter in enumerate(atom[0]):
            if taken and taken + columns(letter) > width:
                found.append(atom.start() + nth)
                taken = 0
            taken += columns(letter)
    return found


def _underlined(text: str) -> str:
    """Titles underlined in their own width."""
    lines = text.split("\n")
    for i in range(1, len(lines)):
        mark = re.fullmatch(r"(\s*(?:#|//)? ?)(={3,})", lines[i])
        above = lines[i - 1].lstrip('r"')
        if mark and re.search(rf"[{_WIDE}]", above):
            lines[i] = mark[1] + "=" * (
                columns(above) - len(mark[1] if above.startswith(mark[1].strip() or "\0") else "")
            )
    return "\n".join(lines)
