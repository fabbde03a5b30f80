"""What g++ cannot read in a .cu, put into words that it can: launches and shared variables. Nothing else changes.

    add<T, 4><<<grid, block, bytes, stream>>>(x, n)  ->  emu::Launch("add<T, 4>", grid, ...).run(add<T, 4>, x, n)
    __shared__ float tile[32][33], sum;              ->  auto& tile = emu::shared<float[32][33]>(...); auto& sum = ...
    extern __shared__ float values[];                ->  float* const values = emu::dynamic_shared<float>();

Lines stay where they are, so that errors and faults name the line of the .cu. What this step does not understand is an
error with file:line and what to write instead.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from lessonkit.base import cpp_text

OPEN, CLOSE = "([{", ")]}"
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

_WANTED = re.compile(r"<<<|\b(?:(?:extern|static)\s+)*__shared__\b|\b__noinline__\b")


class RewriteError(ValueError):
    """A place in a .cu that the emulated build cannot read: file:line, what is wrong, what to write."""


@dataclass
class _Source:
    """The text, and `code`: the same with comments, strings and characters blanked, so that places agree."""

    text: str
    name: str

    def __post_init__(self) -> None:
        self.code = cpp_text.bare(self.text)

    def error(self, at: int, message: str) -> RewriteError:
        return RewriteError(f"{self.name}:{self.text.count(chr(10), 0, at) + 1}: {message}")

    def closing(self, at: int) -> int:
        """The place of the bracket that closes the one at `at`."""
        depth = 0
        for i in range(at, len(self.code)):
            depth += (self.code[i] in OPEN) - (self.code[i] in CLOSE)
            if depth == 0:
                return i
        raise self.error(at, f"'{self.code[at]}' is never closed")

    def find(self, wanted: str, at: int) -> int:
        """The next place of `wanted` outside the brackets that open after `at`; -1 if the one around ends first."""
        depth = 0
        for i in range(at, len(self.code)):
            if depth == 0 and self.code.startswith(wanted, i):
                return i
            depth += (self.code[i] in OPEN) - (self.code[i] in CLOSE)
            if depth < 0:
                return -1
        return -1

    def split(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Places between the commas of code[begin:end], those within brackets and template arguments left alone."""
        parts, depth, angles, start = [], 0, 0, begin
        for i in range(begin, end):
            c = self.code[i]
            depth += (c in OPEN) - (c in CLOSE)
            if depth == 0:
                angles = max(0, angles + (c == "<") - (c == ">" and self.code[i - 1] != "-"))
                if c == "," and angles == 0:
                    parts.append((start, i))
                    start = i + 1
        return [*parts, (start, end)]


def _opening(code: str, end: int) -> int:
    """The place of the bracket that the one before `end` closes; within <...>, brackets may hold comparisons."""
    depth, i, angles = 0, end, code[end - 1] == ">"
    while i > 0:
        i -= 1
        if angles and code[i] in CLOSE:
            i = _opening(code, i + 1)
        elif angles:
            depth += (code[i] == ">") - (code[i] == "<")
        else:
            depth += (code[i] in CLOSE) - (code[i] in OPEN)
        if depth == 0:
            return i
    return -1


def _kernel(source: _Source, end: int) -> int:
    """Where the name before <<< begins: ns::kernel, kernel<T, (4 > 2)>, table[i], launcher.kernel."""
    code, i = source.code, end
    while i > 0 and code[i - 1].isspace():
        i -= 1
    while i > 0:
        if code[i - 1] == ">" or code[i - 1] in CLOSE:
            i = _opening(code, i)
        elif code[i - 1].isalnum() or code[i - 1] == "_":
            while i > 0 and (code[i - 1].isalnum() or code[i - 1] == "_"):
                i -= 1
            joined = re.search(r"(?:::|\.|->)\Z", code[:i])
            if not joined:
                return i
            i = joined.start()
            if code[:i].endswith((";", "{", "}", "(", ",", "\n", " ")):  # ::kernel, of no namespace
                return i
        else:
            break
    raise source.error(end, "no kernel's name before <<<: write name<<<...>>>(...) or name<T><<<...>>>(...)")


_SPECIFIERS = re.compile(
    r"\s*(?:(?:static|inline|extern|void|__global__|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))\s*)+(?P<name>\w+)\s*\("
)


def _templates(source: _Source) -> dict[str, int]:
    """Kernel templates, and how many template arguments of each have no default."""
    found = {}
    for match in re.finditer(r"\btemplate\s*<", source.code):
        depth, end = 1, match.end()
        while depth and end < len(source.code):
            depth += (source.code[end] == "<") - (source.code[end] == ">" and source.code[end - 1] != "-")
            end += 1
        declared = _SPECIFIERS.match(source.code, end)
        if declared and "__global__" in declared.group():
            parameters = [source.code[b:e] for b, e in source.split(match.end(), end - 1)]
            found[declared["name"]] = sum("=" not in p and "..." not in p for p in parameters)
    return found


def _deduced(source: _Source, kernel: str, templates: dict[str, int]) -> bool:
    """Does the launch leave template arguments of the kernel to be deduced?"""
    name, _, arguments = kernel.partition("<")
    needed = templates.get(IDENTIFIER.findall(name)[-1], 0)
    given = _Source(arguments, source.name).split(0, len(arguments.rstrip(" >"))) if arguments else []
    return len(given) < needed


def _launch(source: _Source, at: int, templates: dict[str, int]) -> tuple[int, int, str]:
    code, text = source.code, source.text
    end = source.find(">>>", at + 3)
    if end < 0:
        raise source.error(at, "<<< without >>>")
    opening = end + 3 + len(code[end + 3 :]) - len(code[end + 3 :].lstrip())
    if code[opening : opening + 1] != "(":
        raise source.error(end, "after >>> the kernel's arguments are wanted: kernel<<<grid, block>>>(...)")
    closing = source.closing(opening)
    begin = _kernel(source, at)
    kernel = text[begin:at].strip()
    configuration = text[at + 3 : end]
    if len(source.split(at + 3, end)) not in (2, 3, 4):
        raise source.error(
            at, "between <<< and >>> stand grid, block and, if wanted, bytes of shared memory and a stream"
        )
    between = text[end + 3 : opening]
    given = text[opening + 1 : closing]
    label = " ".join(kernel.split()).replace("\\", " ").replace('"', r"\"")
    call = f"run({kernel}"
    if _deduced(source, kernel, templates):
        call = f"run_deduced([](auto... emu_given) {{ {kernel}(emu_given...); }}"
    comma = ", " if code[opening + 1 : closing].strip() else ""
    # Rewritten from the inside: an argument may hold a launch only within a lambda, which rewrite() meets afterwards.
    return begin, closing + 1, f'emu::Launch("{label}", {configuration}).{between}{call}{comma}{given})'


def _shared(source: _Source, begin: int, at: int) -> tuple[int, int, str]:
    """`begin`: where the declaration begins, perhaps with `extern`; `at`: after __shared__."""
    code, text = source.code, source.text
    end = source.find(";", at)
    if end < 0:
        raise source.error(at, "a __shared__ declaration without its ';'")
    prefix = code[begin:at]
    declared = re.sub(r"\b(?:extern|static|__shared__)\b", "", prefix) + code[at:end]
    newlines = "\n" * text.count("\n", begin, end)
    alignment = re.search(r"\b(?:alignas|__align__)\s*(\([^()]*(?:\([^()]*\)[^()]*)*\))", declared)
    parts = source.split(at, end)
    first = code[parts[0][0] : parts[0][1]]
    first = re.sub(r"\b(?:alignas|__align__)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)|\bextern\b|\bstatic\b", "", first)
    declarators = [first, *(code[b:e] for b, e in parts[1:])]
    written, kind = [], ""
    for i, declarator in enumerate(declarators):
        match = re.fullmatch(r"\s*(.*?)\b([A-Za-z_]\w*)\s*((?:\[.*\]\s*)?)", declarator, re.DOTALL)
        if not match or (i == 0 and not match[1].strip()) or (i > 0 and match[1].strip()):
            raise source.error(
                begin, f"cannot read '__shared__{declarator};': write one plain `__shared__ type name[size];`"
            )
        kind = " ".join(match[1].split()) if i == 0 else kind
        name, sizes = match[2], " ".join(match[3].split())
        if "extern" in prefix.split() or re.search(r"\bextern\b", code[at:end]):
            if not re.fullmatch(r"\[\s*\]", sizes):
                raise source.error(begin, "dynamic shared memory is declared `extern __shared__ type name[];`")
            written.append(f"{kind}* const {name} = emu::dynamic_shared<{kind}>();")
        else:
            if re.match(r"\[\s*\]", sizes):
                raise source.error(begin, f"{name}[] has no size: write it, or `extern __shared__` for dynamic memory")
            align = f", {alignment[1]}" if alignment else ""
            written.append(f'auto& {name} = emu::shared<{kind}{sizes}>("{name}", [] {{}}{align});')
    return begin, end + 1, " ".join(written) + newlines


def _outside_functions(source: _Source, at: int) -> bool:
    """Is the place at the level of the file, counting only braces that belong to no namespace?"""
    depth: list[bool] = []
    for match in re.finditer(r"[{}]", source.code[:at]):
        if match.group() == "{":
            before = source.code[: match.start()].rstrip()
            line = re.split(r"[;{}]", before)[-1]
            depth.append(not re.search(r"\bnamespace\b|\bextern\s*$", line))
        elif depth:
            depth.pop()
    in_define = re.search(r"^\s*#\s*define\b(?:[^\n]*\\\n)*[^\n]*\Z", source.code[:at], re.MULTILINE)
    return not any(depth) and not in_define


def rewrite(text: str, name: str) -> str:
    """The text of a .cu as g++ reads it; `name` (a path) is what errors and #line call the file."""
    templates = _templates(_Source(text, name))
    at = 0
    while match := _WANTED.search((source := _Source(text, name)).code, at):
        if match.group() == "<<<":
            begin, end, new = _launch(source, match.start(), templates)
        elif match.group() == "__noinline__":  # no macro: the C++ library's headers use the word
            begin, end, new = *match.span(), "__attribute__((noinline))"
        elif _outside_functions(source, match.start()):
            raise source.error(match.start(), "a __shared__ variable outside a function: declare it in the kernel")
        else:
            begin, end, new = _shared(source, match.start(), match.end())
        text = text[:begin] + new + text[end:]
        at = begin + 1
    return f'#line 1 "{name}"\n{text}'


def main() -> None:
    parser = argparse.ArgumentParser(description="Rewrite a .cu for the emulated build.")
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.write_text(rewrite(arguments.source.read_text(), str(arguments.source)))


if __name__ == "__main__":
    main()
