"""A lesson's own numbers, read from its source: tile sizes, stages, strides. A picture that shows one cannot drift.

Reading the text, not the module, costs no import of Triton, and finds what stands inside a launcher:
`number("day2_triton_basics/lesson01_vector_add.py", "BLOCK", inside="add_block")` is the 128 of its call.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from lessonkit.base.errors import Misdeclared
from lessonkit.base.files import ROOT

_KNOWN = {
    "min": min, "max": max, "len": len, "constexpr": lambda value: value, "sizeof": lambda size: size,
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length(), "cdiv": lambda a, b: -(-a // b),
}  # fmt: skip
_MODULES = ("gl", "tl", "triton")
_SIZES = {"float": 4, "double": 8, "float4": 16, "int": 4}


def text(path: str) -> str:
    """The source of a file of the course, relative to its root."""
    if not (ROOT / path).is_file():
        raise Misdeclared(f"a picture reads {path}, which does not exist: name the file that has the number now")
    return (ROOT / path).read_text(encoding="utf-8")


def number(path: str, name: str, *, inside: str = "", **given: Any) -> Any:
    """What a file binds to a name: a number or a tuple of them; `inside` a function first, then in the module.

    given: values of names that the expression uses and the file does not settle, as D in `4 if D == 64 else 2`.
    Raises Misdeclared, with the file and the name, if there is no such number.
    """
    source = text(path)
    if not path.endswith(".py"):
        return _cpp(path, source, name, given)
    for value, place in _bound(_parsed(source), name, inside):
        try:
            return _evaluate(path, value, given, place)
        except NameError:
            continue  # a call that passes a variable on; the number stands elsewhere
    where = f" in {inside}" if inside else ""
    raise Misdeclared(f"{path}{where} binds no number to {name}: say in lessonkit/pictures where it stands now")


def stated(path: str, pattern: str) -> float:
    """The number that the words of a file state: the pattern's one group, as in `(\\d+) a cycle`."""
    found = re.search(pattern, text(path))
    if not found:
        raise Misdeclared(f"{path} no longer states {pattern!r}: say in lessonkit/pictures how it is worded now")
    return float(found[1].replace(",", ""))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _evaluate(path: str, value: ast.expr, given: dict[str, Any], inside: str) -> Any:
    names: dict[str, Any] = {**_KNOWN, **given}
    for each in ast.walk(value):
        if isinstance(each, ast.Name) and each.id not in names and each.id not in _MODULES:
            found = [v for v, _ in _bound(_parsed(text(path)), each.id, inside) if v is not value]
            if not found:
                raise NameError(each.id)
            names[each.id] = _evaluate(path, found[0], given, inside)
    plain = ast.Expression(_Plain().visit(ast.parse(ast.unparse(value), mode="eval").body))
    try:
        return eval(compile(ast.fix_missing_locations(plain), path, "eval"), {"__builtins__": {}}, names)
    except (TypeError, AttributeError) as why:
        raise NameError(str(why)) from why


class _Plain(ast.NodeTransformer):
    """gl.constexpr(64) -> constexpr(64), triton.cdiv(a, b) -> cdiv(a, b)."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        here = isinstance(node.value, ast.Name) and node.value.id in _MODULES
        return ast.Name(node.attr, ast.Load()) if here else node


def _bound(tree: ast.Module, name: str, inside: str) -> Iterator[tuple[ast.expr, str]]:
    """Expressions that are bound to a name by assignment, keyword or default: in the function, then in the module."""
    if inside:
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == inside]
        for function in functions:
            yield from ((value, inside) for value in _bindings(function, name))
    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef) or not inside:
            yield from ((value, "") for value in _bindings(statement, name))


def _bindings(node: ast.AST, name: str) -> Iterator[ast.expr]:
    for each in ast.walk(node):
        if isinstance(each, ast.keyword) and each.arg == name:
            yield each.value
        elif isinstance(each, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in each.keys]
            yield from (value for key, value in zip(keys, each.values, strict=True) if key == name)
        elif isinstance(each, ast.AnnAssign) and each.value:
            yield from _assigned(each.target, each.value, name)
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                yield from _assigned(target, each.value, name)
        elif isinstance(each, ast.arguments):
            named = [a.arg for a in each.args]
            for arg, default in zip(named[len(named) - len(each.defaults) :], each.defaults, strict=True):
                if arg == name:
                    yield default


def _assigned(target: ast.expr, value: ast.expr, name: str) -> Iterator[ast.expr]:
    if isinstance(target, ast.Name) and target.id == name:
        yield value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for left, right in zip(target.elts, value.elts, strict=True):
            yield from _assigned(left, right, name)


def _cpp(path: str, source: str, name: str, given: dict[str, Any]) -> Any:
    """`constexpr int NAME = expression;` or `NAME = expression,` of such a list."""
    found = re.search(rf"constexpr [^;]*?\b{name} = ([^;,]+)[;,]", source)
    if not found:
        raise Misdeclared(f"{path} has no `constexpr int {name}`: say in lessonkit/pictures where it stands now")
    value = found[1].replace("/", "//")
    names = {**_KNOWN, **_SIZES, **given}
    for word in set(re.findall(r"\b[A-Za-z_]\w*", value)) - set(names):
        names[word] = _cpp(path, source, word, given)
    return eval(value, {"__builtins__": {}}, names)
