"""Mutants of an exercise's solution: small slips of a pen, each of which the grader has to refuse.

Of Python one node of the syntax tree is changed, of CUDA C++ one token of the text, and only in the learner's regions.
Where that gives fewer than ten, a statement is left out, or exchanged with the next.
Where an exercise has none (its stub is a broken program) its kernels are changed. The order is drawn by a seed, so that
a sample is the same on every machine.
"""

import ast
import copy
import random
import re
from collections import Counter
from dataclasses import dataclass

SEED = 20261124
ENOUGH = 10
OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
CALLS = {
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "sum": "max", "exp": "exp2",
    "log": "log2", "sqrt": "rsqrt", "rsqrt": "sqrt", "zeros_like": "ones_like", "zeros": "empty", "cdiv": "max",
    "median": "mean",
}  # fmt: skip
SYMMETRIC = ("max", "min", "maximum", "minimum", "hypot", "mse_loss")
TYPES = {"float32": "float16", "int64": "int32"}
TEXT = (  # of CUDA C++: a pattern, and what may stand in its place
    (r" \+ ", (" - ",)), (r" - ", (" + ",)), (r" \* ", (" + ",)), (r" / ", (" * ",)), (r" % ", (" / ",)),
    (r" < ", (" <= ", " > ")), (r" >= ", (" > ", " < ")), (r" > ", (" >= ", " < ")), (r" == ", (" != ",)),
    (r" && ", (" || ",)), (r" \|\| ", (" && ",)), (r"\+=", ("-=", "=")), (r"/=", ("*=",)), (r"\+\+", ("--",)),
    (r"\b0\b", ("1",)), (r"\b1\b", ("0", "2")), (r"\b([2-9]|\d\d+)\b", ("1",)), (r"\b0\.0f\b", ("1.0f",)),
    (r"\.x\b", (".y",)), (r"\.y\b", (".x",)), (r"\brows\b", ("cols",)), (r"\bcols\b", ("rows",)),
    (r"__syncthreads\(\);", ("",)), (r"__shfl_down_sync", ("__shfl_up_sync",)), (r"\bint64_t\(", ("int8_t(",)),
)  # fmt: skip


@dataclass(frozen=True)
class Slip:
    """One mutant: `said` names it in the list of survivors."""

    said: str
    text: str


def slips(source):
    """Every mutant of an exercise's solution, in the order in which a sample is drawn."""
    text = source.solution
    lines = _lines(source, text)
    found = list(_of_cpp(text) if source.is_cuda else _of_python(text, lines))
    if len(found) < ENOUGH and not source.is_cuda:
        found += _of_statements(text, lines)
    unique = list(_named_apart({slip.text: slip for slip in found if slip.text != text}.values()))
    random.Random(f"{SEED} {source.name}").shuffle(unique)
    return unique


def _named_apart(found):
    """A second slip of the same words in the same line gets a number."""
    said = Counter()
    for slip in found:
        said[slip.said] += 1
        yield Slip(slip.said + f" (number {said[slip.said]})" * (said[slip.said] > 1), slip.text)


def _lines(source, text):
    """The numbers of the lines that a learner writes: between TODO and END, or those of all kernels (or functions)."""
    wanted, inside = set(), False
    for number, line in enumerate(text.splitlines(), 1):
        inside = (inside or bool(re.match(r"\s*(#|//) TODO\(\d", line))) and not re.match(r"\s*(#|//) END\(", line)
        wanted |= {number} if inside else set()
    if wanted or source.is_cuda:
        return wanted
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    kernels = [node for node in functions if any("jit" in ast.unparse(d) for d in node.decorator_list)]
    return {line for node in kernels or functions for line in range(node.body[0].lineno, node.end_lineno + 1)}


# ---- Python -------------------------------------------------------------------------------------------------------


def _of_python(text, lines):
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.AugAssign) or node.lineno not in lines:
            continue
        for replacement in _replacements(node):
            new = _spliced(text, node, ast.unparse(ast.fix_missing_locations(replacement)))
            before, after = ast.unparse(node), ast.unparse(replacement)
            line = text.splitlines()[node.lineno - 1].strip()
            yield Slip(f"{before} -> {after} in: {line}", new)


def _spliced(text, node, new):
    """The text with the node's own replaced; columns count bytes. An expression is put into parentheses if need be."""
    lines = [line.encode() for line in text.splitlines(True)]
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    plain = isinstance(node, ast.Call | ast.Name | ast.Attribute | ast.Constant | ast.AugAssign | ast.Subscript)
    return (whole[:start] + (new if plain else f"({new})").encode() + whole[stop:]).decode()


def _replacements(node):
    """Other nodes that a slip might put in its place."""

    def changed(**fields):
        other = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    if isinstance(node, ast.BinOp | ast.AugAssign):
        yield from (changed(op=op()) for op in OPERATORS.get(type(node.op), ()))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv):
        yield changed(left=node.right, right=node.left)
    if isinstance(node, ast.Compare):
        yield from (changed(ops=[op()]) for op in COMPARISONS.get(type(node.ops[0]), ()))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield changed(value=node.value + 1 if abs(node.value) < 64 else 2 * node.value)
        if node.value:
            yield changed(value=0 * node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    if isinstance(node, ast.Attribute) and node.attr in TYPES:
        yield changed(attr=TYPES[node.attr])
    if isinstance(node, ast.Subscript) and ast.unparse(node.slice) in ("(:, None)", "(None, :)"):
        yield changed(slice=ast.Tuple(node.slice.elts[::-1], ast.Load()))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and (other := CALLS.get(node.func.attr)):
            yield changed(func=ast.Attribute(node.func.value, other, ast.Load()))
        for nth in range(len(node.keywords)):  # a missing mask, `other` or dtype
            yield changed(keywords=[*node.keywords[:nth], *node.keywords[nth + 1 :]])
        if len(node.args) > 1 and ast.unparse(node.func).split(".")[-1] not in SYMMETRIC:
            yield changed(args=[node.args[1], node.args[0], *node.args[2:]])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and (other := _other_name(node.id)):
        yield changed(id=other)


def _other_name(name):
    """The name of the other dimension: M for N, rows for cols, BLOCK_M for BLOCK_N."""
    for one, other in (("M", "N"), ("rows", "cols"), ("m", "n")):
        for mine, its in ((one, other), (other, one)):
            if name == mine or name.endswith(f"_{mine}"):
                return name.removesuffix(mine) + its
    return ""


def _of_statements(text, lines):
    """One statement that is a call or an assignment left out, or two neighbours exchanged."""
    rows = text.splitlines(True)
    bodies = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.For)]
    for body in bodies:
        plain = [node for node in body if isinstance(node, ast.Expr | ast.Assign) and node.lineno in lines]
        plain = [node for node in plain if not isinstance(node.value, ast.Constant)]  # a docstring is no statement
        for nth, node in enumerate(plain):
            start, stop = node.lineno - 1, node.end_lineno
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                left = " " * node.col_offset + "pass\n"
                yield Slip(f"left out: {ast.unparse(node)}", "".join([*rows[:start], left, *rows[stop:]]))
            if nth + 1 < len(plain) and plain[nth + 1].lineno == stop + 1:
                end = plain[nth + 1].end_lineno
                said = f"exchanged: {ast.unparse(node)}; {ast.unparse(plain[nth + 1])}"
                yield Slip(said, "".join([*rows[:start], *rows[stop:end], *rows[start:stop], *rows[end:]]))


# ---- CUDA C++ -----------------------------------------------------------------------------------------------------


def _of_cpp(text):
    lines = text.splitlines(True)
    inside, any_todo = False, "TODO(" in text
    for at, line in enumerate(lines):
        inside = (inside or "// TODO(" in line) and "// END(" not in line
        code = line.split("//")[0]
        if any_todo and not inside:
            continue
        if code.lstrip().startswith(("#", "COURSE_MODULE")):
            continue
        for pattern, others in TEXT:
            for found in re.finditer(pattern, code):
                for other in others:
                    new = line[: found.start()] + other + line[found.end() :]
                    said = f"{found[0].strip()} -> {other.strip()} at {found.start()} in: {code.strip()}"
                    yield Slip(said, "".join([*lines[:at], new, *lines[at + 1 :]]))
