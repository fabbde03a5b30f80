"""Which code a measured row came from: a hash of its source through every import, read and never imported.

A name of a function is followed to what it is bound to: in its file, in another module of the repository, in the .cu
beside the file and in the headers that the .cu includes. The names of modules do not count, so a lesson may be moved.
Comments, docstrings and the layout of C++ do not count either. Any folder can be read that holds a checkout.
"""

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

from lessonkit.base import cpp_text

# The part of the kit that reaches a kernel or its launch, or that makes a step's table. The rest declares, checks and
# times: the walk stops there.
VOCABULARY = {
    *("lessonkit", "lessonkit.base.device", "lessonkit.base.errors", "lessonkit.validate"),
    *("lessonkit.cuda", "lessonkit.cuda.extension", "lessonkit.modes.opaque", "lessonkit.modes.inductor"),
    *("lessonkit.measure.sweeps", "lessonkit.pages.listing"),
}
EXTENSION = ("lessonkit.cuda.extension", "extension")  # loads a program; the program is followed, the loader is not
DECLARATION = "LESSON"
GIVEN = {"inputs": ("inputs", "bench_dtype"), "work": ("work",)}  # what a row is of beside its code: fields that count
PROSE = ("why",)  # arguments that say something to a reader: they are no code, as docstrings are none
# Names that the kit gave otherwise when rows were measured. They count as they were then: a new name is no new code.
EARLIER = {"LESSONKIT_MODE": "LESSONKIT_LANE", "call_in_compiler": "elsewhere", "opaque": "again"}
# Functions that answer a bench on every GPU with rows as they did when these were measured. Now they also answer on
# other cards, or for options that those rows have not. They count as their words were then.
THEN = {
    "lessonkit.base.device": """
def architecture() -> int:
    if INTERPRETED:
        return 90
    import triton
    return int(triton.runtime.driver.active.get_current_target().arch)

def num_sms() -> int:
    if HAS_GPU:
        return torch.cuda.get_device_properties(0).multi_processor_count
    return 132 if COMPILE_ONLY else 4

def shared_memory() -> int:
    if not HAS_GPU:
        return 232448
    properties: Any = torch.cuda.get_device_properties(0)
    return int(properties.shared_memory_per_block_optin)

def name() -> str:
    return torch.cuda.get_device_name(0).lower().replace(" ", "-") if HAS_GPU else "cpu"
""",
    # With PyTorch's default settings, which all rows and random cases have: the same answers. Now a setting of
    # torch.backends counts too.
    "course_ops._common": """
def fp32_precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

def expect_tensor(name: str, t: object, advice: str = "") -> None:
    if not isinstance(t, Tensor):
        advice = advice or ("pass one" if t is None else "wrap it in torch.as_tensor")
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}: {advice}")
    if not is_dense(t):
        advice = f"pass the tensors of {name}.unbind() one by one" if t.is_nested else f"call {name}.to_dense()"
        raise TypeError(f"{name} has layout {t.layout}: {advice}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise RuntimeError(
            f"{name} has a tangent, and course_ops has no forward-mode derivatives: use reverse mode (backward)"
        )
""",
    "problems.matmul": """
def precision():
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
""",
    # Of tensors without the negative bit, outside torch.jit.trace: the same answers.
    "course_ops._registration": """
def unobserved(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    gradients = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and not (_plain_on_gpu(t) and not (gradients and t.requires_grad)):
            return False
    return (
        not torch.is_autocast_enabled("cuda")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
    )

def _plain_on_gpu(t: Tensor) -> bool:
    return t.is_cuda and type(t) in (Tensor, Parameter)
""",
    # With one head size and no softcap: the same inputs, work and answers.
    "problems.attention": """
def reference(q, k, v, causal=False, window=None, scale=None):
    (B, H, S_q, D), (_, H_kv, S_k, _) = (q.shape, k.shape)
    wide = torch.promote_types(q.dtype, torch.float32)
    o, lse = (torch.zeros_like(q), torch.empty(B, H, S_q, dtype=wide, device=q.device))
    hidden = ~visible(S_q, S_k, causal, window, q.device)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        s = q[b, h] @ k[b, h * H_kv // H].T * (1 / math.sqrt(D) if scale is None else scale)
        s = s.masked_fill(hidden, -math.inf)
        lse[b, h] = torch.logsumexp(s.to(wide), -1)
        p = s.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)
        o[b, h] = p @ v[b, h * H_kv // H]
    return (o, lse)

def inputs(B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout='bhsd', dtype=torch.float32):

    def make(H, S, mean):
        t = torch.randn(B, H, S, D, device=DEVICE) + mean
        t = t.to(dtype)
        if layout == 'bshd':
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([t, t + 1], -1)[..., 0] if layout == 'wide' else t
    S_k = S if S_k is None else S_k
    q, k, v = (make(H, S, 1.0), make(H_kv or H, S_k, -1.0), make(H_kv or H, S_k, 0.5))
    k += torch.linspace(-0.5, 0.5, S_k, device=DEVICE)[:, None].to(dtype)
    return (q, k, v, causal, window, scale)

def work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, **_):
    S_k = S if S_k is None else S_k
    bytes = (2 * B * H * S * D + 2 * B * (H_kv or H) * S_k * D) * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=4 * B * H * D * pairs(S, S_k, causal, window))

def reference_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    (B, H, S_q, D), (_, H_kv, S_k, _) = (q.shape, k.shape)
    dq, delta = reference_queries(grad_out, q, k, v, out, lse, causal, window, scale)
    scale, hidden = (scale or 1 / math.sqrt(D), ~visible(S_q, S_k, causal, window, q.device))
    dk, dv = torch.zeros(2, *k.shape, dtype=lse.dtype, device=q.device)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        kv = (b, h * H_kv // H)
        p = torch.exp(q[b, h] @ k[kv].T * scale - lse[b, h, :, None]).masked_fill(hidden, 0)
        ds = p * (grad_out[b, h] @ v[kv].T - delta[b, h, :, None])
        dk[kv] += ds.to(q.dtype).T @ q[b, h] * scale
        dv[kv] += p.to(q.dtype).T @ grad_out[b, h]
    return (dq, dk.to(q.dtype), dv.to(q.dtype))

def inputs_backward(*sizes, dtype=torch.float32, **options):
    q, k, v, *given = inputs(*sizes, dtype=dtype, **options)
    grad_out = torch.empty_like(q).copy_(torch.randn(q.shape, device=DEVICE) + 0.5)
    if DEVICE.type == 'meta':
        return (grad_out, q, k, v, torch.empty_like(q), torch.empty(q.shape[:-1], device=DEVICE), *given)
    wide = torch.float32 if DEVICE.type == 'cuda' else torch.float64
    out, lse = reference(*(t.to(wide) for t in (q, k, v)), *given)
    return (grad_out, q, k, v, out.to(dtype), lse.float(), *given)

def work_backward(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout=''):
    S_k = S if S_k is None else S_k
    bytes = B * D * (4 * H * S + 4 * (H_kv or H) * S_k) * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=10 * B * H * D * pairs(S, S_k, causal, window))
""",
}
EVERYTHING = "*"  # stands for all that a module binds

Chain = tuple[str, ...]  # ("hopper", "launch"); ("@day4.hopper", "launch") where a module is named by its full name


class NotFound(ValueError):
    """A module has no such function, or a lesson no such peer."""


@dataclass(frozen=True)
class Unit:
    """A piece of code that counts by itself: its words, and the names in it that something outside has to explain."""

    words: str
    chains: frozenset[Chain]
    strings: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()  # of f-strings, as regular expressions


@dataclass(frozen=True)
class Module:
    """What the top of a file binds: statements, or what an import names (module, attribute or "")."""

    package: str
    statements: dict[str, list[ast.stmt]]
    imports: dict[str, tuple[str, str]]
    units: dict[tuple[str, ...], Unit] = field(default_factory=dict)

    def unit(self, name: str, *, nameless: bool = False) -> Unit:
        """What a name is bound to, or all of the file for EVERYTHING. nameless: without the function's own name."""
        key = (name, "nameless" * nameless)
        if key not in self.units:
            every = [node for nodes in self.statements.values() for node in nodes]
            nodes = list(dict.fromkeys(every)) if name == EVERYTHING else self.statements[name]
            unit = _unit(*nodes, nameless=nameless)
            if name == EVERYTHING:
                unit = Unit(unit.words, unit.chains | {(name,) for name in self.imports}, unit.strings, unit.patterns)
            self.units[key] = unit
        return self.units[key]

    def binds(self, name: str) -> bool:
        return name == EVERYTHING or name in self.statements or name in self.imports

    def value(self, name: str) -> ast.expr | None:
        """The expression that the only assignment to a name gives it."""
        found = self.statements.get(name, [])
        return found[0].value if len(found) == 1 and isinstance(found[0], ast.Assign | ast.AnnAssign) else None

    def declared(self, keyword: str, name: str = DECLARATION) -> ast.expr | None:
        """The expression of one field of the declaration, or of another call that a name is bound to."""
        call = self.value(name)
        keywords = call.keywords if isinstance(call, ast.Call) else []
        return next((k.value for k in keywords if k.arg == keyword), None)

    def declares_all(self) -> bool:
        """Whether the declaration is Lesson(...) with all that it says written there."""
        call = self.value(DECLARATION)
        return (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ("Lesson", "Steps")
            and all(k.arg for k in call.keywords)
        )


def source(root: Path, module: str, function: str) -> str:
    """Hash of a function of a module (day2_triton_basics.lesson05_softmax) and of all that it reaches in root.

    Raises NotFound if the module binds no such name.
    """
    walk = _Walk(root)
    walk.begin(module, function)
    return walk.digest()


def contender(root: Path, lesson: str, label: str, *, peer: bool = False) -> str:
    """Hashes of a rung, or of a peer by its label, of the lesson's inputs, and of its work: three, with dots between.

    The dtype that is timed counts as one of the inputs. Raises NotFound if the lesson has no such rung or peer.
    """
    return f"{code(root, lesson, label, peer=peer)}.{given(root, lesson)}"


def code(root: Path, lesson: str, label: str, *, peer: bool = False) -> str:
    """Hash of a rung or of a peer: the beginning of what `contender` says of it."""
    return _contender(root, lesson, label, peer).digest()[:8]


def together(root: Path, lesson: str, labels: Iterable[str]) -> str:
    """Hash of several rungs, as `code` is of one. Raises NotFound if the lesson has no such rung."""
    walk = _Walk(root)
    for label in labels:
        walk.begin(lesson, label)
    return walk.digest()[:8]


def given(root: Path, lesson: str) -> str:
    """Hashes of a lesson's inputs and of its work: the end of what `contender` says of all its rungs."""
    return ".".join(walk.digest()[:8] for walk in _given(root, lesson).values())


def given_reaches(root: Path, lesson: str) -> dict[str, frozenset[str]]:
    """The full names of what the fingerprints of a lesson's inputs and of its work count."""
    return {part: walk.names() for part, walk in _given(root, lesson).items()}


def _given(root: Path, lesson: str) -> dict[str, "_Walk"]:
    walks = {part: _Walk(root) for part in GIVEN}
    for part, walk in walks.items():
        for name in GIVEN[part]:
            walk.field(lesson, name)
    return walks


def packages(root: Path, lesson: str, label: str, peer: Callable[..., Any]) -> set[str]:
    """The names of packages outside the repository that a peer imports: {"quack"}.

    A comprehension may make several peers, each of a function that is a default of its own. Then that function counts,
    and not all of them.
    """
    its_own = [f for f in getattr(peer, "__defaults__", None) or () if isinstance(f, FunctionType)]
    if not its_own:
        return _contender(root, lesson, label, peer=True).outside
    walk = _Walk(root)
    for f in its_own:
        walk.begin(f.__module__, f.__name__)
    return walk.outside


def _contender(root: Path, lesson: str, label: str, peer: bool) -> "_Walk":
    walk = _Walk(root)
    if peer:
        walk.peer(lesson, label)
    else:
        walk.begin(lesson, label)
    return walk


def reaches(root: Path, module: str, function: str) -> frozenset[str]:
    """The full names of what a function's fingerprint counts: "course_ops.hopper.ring_slot", and C++ functions'.

    Raises NotFound if the module binds no such name.
    """
    walk = _Walk(root)
    walk.begin(module, function)
    return walk.names()


def program(root: Path, lesson: str) -> str:
    """Hash of all of the .cu beside a lesson and of the headers that it includes."""
    walk = _Walk(root)
    walk.programs[walk.path(lesson).with_suffix(".cu")] = {EVERYTHING}
    return walk.digest()


def step(root: Path, lesson: str, name: str) -> str:
    """Hash of the step that measured a table.

    If the lesson's file does not bind the name, it is the hash of all of the lesson. If the name is empty, it is that
    of the lesson's program. Raises NotFound without such a lesson.
    """
    if not name:
        return program(root, lesson)
    module = _Walk(root).module(lesson)
    return source(root, lesson, name if module and name in module.statements else EVERYTHING)


def problem(root: Path, module: str, name: str, field: str) -> str:
    """Hash of one field of the Problem that a module binds to a name, wherever its value is defined.

    Raises NotFound if the declaration does not write the field out.
    """
    return _problem(root, module, name, field).digest()


def problem_reaches(root: Path, module: str, name: str, field: str) -> frozenset[str]:
    """The full names of what that hash counts."""
    return _problem(root, module, name, field).names()


def _problem(root: Path, module: str, name: str, field: str) -> "_Walk":
    walk = _Walk(root)
    found = walk.module(module)
    if found is None or (value := found.declared(field, name)) is None:
        raise NotFound(f"{module} declares no {field} of {name}")
    walk.value(module, value, field)
    return walk


def folder(path: Path) -> str:
    """Hash of every file in a folder, comments aside."""
    words = [" ".join(_cpp_words(p.read_text())) for p in sorted(path.rglob("*")) if p.suffix in (".cpp", ".h", ".cuh")]
    return _hash(words)


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:12]


class _Walk:
    """From a few names to all that they reach in one checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: set[str] = set()
        self.seen: set[tuple[str, ...]] = set()
        self.taken: set[tuple[str, str]] = set()
        self.units: list[Unit] = []  # whose words may name a launcher of a program
        self.programs: dict[Path, set[str]] = {}  # the names reached in each; EVERYTHING for all
        self.outside: set[str] = set()  # packages that are imported and not of the repository
        self.reached: set[tuple[Path, str]] = set()  # functions of programs: a program's path, and their names
        self.modules: dict[str, Module | None] = {}

    def names(self) -> frozenset[str]:
        """The full names of all that was taken in, functions of programs too."""
        self.digest()  # which finds the latter
        python = {f"{owner}.{bound}" for owner, bound in self.taken}
        return frozenset(
            python | {f"{'.'.join(p.relative_to(self.root).with_suffix('').parts)}.{name}" for p, name in self.reached}
        )

    def path(self, name: str) -> Path:
        return self.root / f"{name.replace('.', '/')}.py"

    def module(self, name: str) -> Module | None:
        """The module of the repository that has this name, if it is a file."""
        if name not in self.modules:
            path = self.path(name)
            package = path.with_suffix("") / "__init__.py"
            own = path if path.is_file() else package if package.is_file() else None
            inside = name if own == package else name.rpartition(".")[0]
            found = self.modules[name] = _parsed(own.read_text(), inside) if own else None
            if found and name in THEN:
                found.statements.update(_parsed(THEN[name], inside).statements)
        return self.modules[name]

    def is_here(self, name: str) -> bool:
        return self.module(name) is not None or self.path(name).with_suffix("").is_dir()

    def digest(self) -> str:
        texts = set(self.texts)
        for path, launchers in self.programs.items():
            texts |= self.cpp_texts(path, launchers)
        return _hash(texts)

    def begin(self, name: str, function: str) -> None:
        """Take in a function, whatever it is called, and all that it reaches."""
        module = self.module(name)
        if module is None:
            raise NotFound(f"{self.root} has no module {name!r}")
        if not module.binds(function):
            raise NotFound(f"{name} binds no {function!r}")
        self.follow(name, (function,), nameless=True)

    def follow(self, name: str, chain: Chain, *, nameless: bool = False) -> None:
        """Take in what a chain of names means in a module, and all that this reaches."""
        todo = [(name, chain)]
        while todo:
            name, chain = todo.pop()
            if (name, *chain) in self.seen:
                continue
            self.seen.add((name, *chain))
            if not (at := self.resolve(name, chain)):
                continue
            owner, bound, attributes = at
            module = self.module(owner)
            assert module is not None
            if bound == DECLARATION and attributes and module.declares_all():
                self.field(owner, attributes[0])
            elif bound != EVERYTHING and self.is_program(owner, module.value(bound)):
                self.programs.setdefault(self.path(owner).with_suffix(".cu"), set()).update(attributes[:1])
            elif (owner, bound) not in self.taken:
                self.taken.add((owner, bound))
                todo += [(owner, each) for each in self.take(module.unit(bound, nameless=nameless))]
                nameless = False

    def take(self, unit: Unit) -> list[Chain]:
        """Count a unit; the chains that are to be followed from it."""
        self.texts.add(unit.words)
        self.units.append(unit)
        return sorted(unit.chains)

    def expression(self, owner: str, value: ast.expr, label: str) -> None:
        unit = _unit(value)
        for chain in self.take(Unit(f"{label}: {unit.words}", unit.chains, unit.strings, unit.patterns)):
            self.follow(owner, chain)

    def field(self, lesson: str, name: str) -> None:
        """Take in one field of a declaration; all of the declaration if it is not written out."""
        module = self.module(lesson)
        if module is None or DECLARATION not in module.statements:
            raise NotFound(f"{lesson} declares no lesson")
        if not module.declares_all():
            self.follow(lesson, (DECLARATION,))
        elif found := self.asked(lesson, name):
            self.value(*found, name)

    def value(self, owner: str, value: ast.expr, name: str) -> None:
        """Take in the value of a field; where a function stands does not count."""
        if (chain := _chain(value)) and self.resolve(owner, chain):
            self.follow(owner, chain, nameless=True)
        else:
            self.expression(owner, value, "" if chain else name)

    def asked(self, lesson: str, name: str) -> tuple[str, ast.expr] | None:
        """The module and the expression of a field: the declaration's own, or its problem's."""
        module = self.module(lesson)
        if module is None:
            return None
        if (own := module.declared(name)) is not None:
            return lesson, own
        problem = module.declared("problem")
        if problem is None or not (at := self.resolve(lesson, _chain(problem))):
            return None
        place, bound, _ = at
        module = self.module(place)
        assert module is not None
        value = module.declared(name, bound)
        return None if value is None else (place, value)

    def peer(self, lesson: str, label: str) -> None:
        declared = self.asked(lesson, "peers")
        if declared is None:
            raise NotFound(f"{lesson} declares no peers")
        found = self.entry(*declared, label)
        if found is None:
            raise NotFound(f"{lesson} declares no peer {label!r}")
        owner, value, exactly = found
        self.expression(owner, value, "" if exactly else label)

    def entry(self, owner: str, value: ast.expr, label: str) -> tuple[str, ast.expr, bool] | None:
        """What a dict that is written in code has under a label, or the whole expression where that cannot be told."""
        if isinstance(value, ast.Dict):
            for key, item in zip(reversed(value.keys), reversed(value.values), strict=True):
                if key is None:
                    if found := self.entry(owner, item, label):
                        return found
                elif not isinstance(key, ast.Constant):
                    return owner, value, False
                elif key.value == label:
                    return owner, item, True
            return None
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
            return self.entry(owner, value.right, label) or self.entry(owner, value.left, label)
        if (chain := _chain(value)) and (at := self.resolve(owner, chain)):
            place, bound, attributes = at
            module = self.module(place)
            assert module is not None
            if not attributes:
                inner = module.value(bound)
            elif bound != DECLARATION:
                inner = module.declared(attributes[0], bound)
            else:
                place, inner = self.asked(place, attributes[0]) or (place, None)
            if inner is not None:
                return self.entry(place, inner, label)
        return owner, value, False

    def is_program(self, owner: str, value: ast.expr | None) -> bool:
        """Whether an expression is cuda.extension(__file__)."""
        if not (isinstance(value, ast.Call) and len(value.args) == 1 and _chain(value.args[0]) == ("__file__",)):
            return False
        chain = _chain(value.func)
        return bool(chain and self.resolve(owner, chain, loader=True) == (*EXTENSION, ()))

    def resolve(self, name: str, chain: Chain, *, loader: bool = False) -> tuple[str, str, Chain] | None:
        """(module, what it binds, attributes of that) of a chain; None outside the repository and where the walk stops.

        An import from outside counts by what it names, so that another function under the old name is seen.
        """
        here = name  # the module in which the next name is looked up
        if chain[0].startswith("@"):
            here, chain = chain[0][1:], chain[1:]
            if not self.is_here(here):
                self.outside.add(here.partition(".")[0])
                return None
        elif (module := self.module(name)) is None or not module.binds(chain[0]):
            return None
        for _ in range(100):
            if not chain or chain == (EVERYTHING,):
                return None if self.stops(here) else (here, EVERYTHING, ()) if self.module(here) else None
            module = self.module(here)
            if module is not None and chain[0] in module.imports:
                target, attribute = module.imports[chain[0]]
                itself = target == here and attribute  # a package that imports its own part
                if not self.is_here(target):
                    self.texts.add(f"{chain[0]} = {target} {attribute}")
                    self.outside.add(target.partition(".")[0])
                    return None
                chain = (*([attribute] if attribute else []), *chain[1:])
                here = target
                if itself:
                    here, chain = f"{here}.{attribute}", chain[1:]
            elif module is not None and (named := _imported(module.value(chain[0]))):
                if not self.is_here(named[0]):
                    self.texts.add(f"{chain[0]} = {named[0]}")
                    self.outside.add(named[0].partition(".")[0])
                    return None
                here, chain = named[0], (*named[1:], *chain[1:])
            elif module is not None and chain[0] in module.statements:
                if self.stops(here) or ((here, chain[0]) == EXTENSION and not loader):
                    return None
                return here, chain[0], chain[1:]
            elif self.is_here(f"{here}.{chain[0]}"):
                here, chain = f"{here}.{chain[0]}", chain[1:]
            elif module is not None:
                by_name = here == "lessonkit"  # a module of the kit that lessons name without its group
                return None if by_name or self.stops(here) else (here, EVERYTHING, ())
            else:
                return None
        raise ValueError(f"{name}: {'.'.join(chain)} is imported in a circle")

    def stops(self, name: str) -> bool:
        return name.partition(".")[0] == "lessonkit" and name not in VOCABULARY

    def cpp_texts(self, path: Path, launchers: set[str]) -> set[str]:
        """What the launchers named reach in a program; all of it where no name leads to one."""
        files = cpp_text.local_files(path, self.root / "cuda_src/include")
        texts = tuple(file.read_text() for file in files)
        if EVERYTHING not in launchers:
            units = self.units
            words = {w for unit in units for w in (*unit.strings, *unit.words.split())} | launchers
            names = _defined(texts)
            prefixes = tuple(f"{s}_" for unit in units for s in unit.strings if s.isidentifier())
            for pattern in {p for unit in units for p in unit.patterns}:
                free = pattern.startswith(r"\w+")
                words |= {n for n in names if re.fullmatch(pattern, n) and (not free or n.startswith(prefixes))}
            if found := _reached(texts, frozenset(words & names)):
                self.reached |= {(path, name) for name in found}
                return {f"C++ {code}" for code in found.values()}
        return {f"C++ {' '.join(_cpp_words(text))}" for text in texts}


@lru_cache(None)
def _defined(texts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for text in texts for name in cpp_text.codes(text))


@lru_cache(None)
def _reached(texts: tuple[str, ...], words: frozenset[str]) -> dict[str, str]:
    return cpp_text.reached_in(texts, words)


def _cpp_words(text: str) -> list[str]:
    return cpp_text.tokens(cpp_text.without_comments(text))


@lru_cache(None)
def _parsed(text: str, package: str) -> Module:
    """The module that a text is. `package` is what its relative imports begin from."""
    module = Module(package, {}, {})
    for node in ast.parse(text).body:
        for name in (*_bound(node, module), *_backward_of(node)):
            module.statements.setdefault(name, []).append(node)
    return module


def _bound(node: ast.stmt, module: Module) -> Iterator[str]:
    """The names that a statement at the top binds; those that it imports go to the module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            module.imports[alias.asname or first] = (alias.name if alias.asname else first, "")
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            module.imports[alias.asname or alias.name] = (_from(node, module.package), alias.name)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for inner in (n for target in targets for n in ast.walk(target)):
            if isinstance(inner, ast.Name):
                yield inner.id
    else:
        for child in ast.iter_child_nodes(node):
            inside = child.body if isinstance(child, ast.ExceptHandler) else [child]
            for inner in inside:
                if isinstance(inner, ast.stmt):
                    yield from _bound(inner, module)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id


def _backward_of(node: ast.stmt) -> Iterator[str]:
    """The operator to which a statement at the top gives a backward: `operator.register_autograd(backward, ...)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and (chain := _chain(call.func))[1:] == ("register_autograd",):
        yield chain[0]


def _from(node: ast.ImportFrom, package: str) -> str:
    """The module that `from ... import` names, in full."""
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _imported(value: ast.AST | None) -> Chain:
    """The module that import_module("...") names, or the module and the name that specimen("...", "...") names."""
    count = {"import_module": 1, "specimen": 2}
    if isinstance(value, ast.Call) and (chain := _chain(value.func)) and chain[-1] in count:
        named = [a.value for a in value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return tuple(named[: count[chain[-1]]])
    return ()


def _chain(node: ast.AST) -> Chain:
    """a.b.c as ("a", "b", "c"); of import_module("x.y").f as ("@x.y", "f"); () of anything else."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (*before, node.attr) if (before := _chain(node.value)) else ()
    return (f"@{named[0]}", *named[1:]) if isinstance(node, ast.Call) and (named := _imported(node)) else ()


def _unit(*nodes: ast.AST, nameless: bool = False) -> Unit:
    words, strings, patterns = list[str](), set[str](), set[str]()
    for node in nodes:
        words += _words(node)
        if nameless and isinstance(node, ast.FunctionDef):
            words.remove(node.name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                strings.add(inner.value)
            elif isinstance(inner, ast.JoinedStr):
                parts = (re.escape(str(v.value)) if isinstance(v, ast.Constant) else r"\w+" for v in inner.values)
                patterns.add("".join(parts))
    chains = frozenset(chain for node in nodes for chain in _free(node, frozenset()))
    return Unit(" ".join(words), chains, frozenset(strings), frozenset(patterns))


def _words(node: ast.AST) -> Iterator[str]:
    """The code under a node in order, the same on every Python version: node types, names, constants; no docstrings."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                continue
            if isinstance(item, ast.keyword) and item.arg in PROSE:
                continue
            if isinstance(item, ast.AST):
                yield from _words(item)
            elif item is not None and name not in ("kind", "type_comment", "ctx"):
                item = EARLIER.get(item, item) if isinstance(item, str) else item
                yield item if name in ("id", "name", "attr", "arg") else repr(item)


def _free(node: ast.AST, local: frozenset[str]) -> Iterator[Chain]:
    """The chains of names under a node whose first name no function around it binds, and what it imports itself."""
    if chain := _chain(node):
        if chain[0] not in local:
            yield chain
    elif isinstance(node, ast.ImportFrom):
        yield from ((f"@{node.module}", alias.name) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((f"@{alias.name}",) for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        body = node.body if isinstance(node.body, list) else [node.body]
        arguments = node.args
        outside: list[ast.AST | None] = [*arguments.defaults, *arguments.kw_defaults]
        outside += [*node.decorator_list, node.returns] if not isinstance(node, ast.Lambda) else []
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        named = [argument for argument in every if argument]
        outside += [argument.annotation for argument in named]
        for each in outside:
            if each is not None:
                yield from _free(each, local)
        inside = local | {argument.arg for argument in named} | set(_stored(body))
        for statement in body:
            yield from _free(statement, frozenset(inside))
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        inside = local | {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        for child in ast.iter_child_nodes(node):
            yield from _free(child, frozenset(inside))
    else:
        for child in ast.iter_child_nodes(node):
            yield from _free(child, local)


def _stored(body: Iterable[ast.AST]) -> Iterator[str]:
    """The names that a function's body binds; what it says of functions inside of it is theirs."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            continue
        else:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.ExceptHandler) and node.name:
                yield node.name
            yield from _stored(ast.iter_child_nodes(node))
