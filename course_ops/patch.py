"""patch: replace a model's modules by this package's operators where they stand, and undo it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import course_ops
from course_ops._common import FLOATS, is_dense


# A module changes its class and nothing else: parameters, their names, hooks and the optimizer's state stay. PyTorch
# computes tensors that no kernel takes, as after model.double().
def _taken(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether kernels take x, dense and in their dtypes, and weights of its dtype or float32."""
    fit = all(w is None or w.dtype in (x.dtype, torch.float32) for w in weights)
    return fit and x.dtype in FLOATS and is_dense(x)


class _LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not _taken(input, self.weight, self.bias):
            return super().forward(input)
        return course_ops.layer_norm(input, self.weight, self.bias, self.eps)


class _RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return course_ops.rms_norm(x, self.weight, self.eps) if _taken(x, self.weight) else super().forward(x)


class _GELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return course_ops.gelu(input) if _taken(input) else super().forward(input)


class _CrossEntropyLoss(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        # PyTorch's: classes in the middle, and targets that are probabilities
        if input.ndim != 2 or target.dtype != torch.int64 or not _taken(input):
            return super().forward(input, target)
        loss = course_ops.cross_entropy(input, target, ignore_index=self.ignore_index, reduction=self.reduction)
        return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        given = input, self.weight, self.bias
        if not all(t is None or _taken(t) for t in given):
            return super().forward(input)
        return course_ops.linear(*given)


class _Dropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        if not _taken(input):
            return super().forward(input)
        return course_ops.dropout(input, self.p, training=self.training)


def _norm_refuses(module: nn.LayerNorm | nn.RMSNorm) -> str:
    if len(module.normalized_shape) != 1:
        return f"normalises {len(module.normalized_shape)} dimensions: the kernel takes the last one"
    return "no weight: set elementwise_affine=True" if module.weight is None else ""


def _gelu_refuses(module: nn.GELU) -> str:
    return "" if module.approximate == "tanh" else 'erf form: the kernel is GELU(approximate="tanh")'


def _loss_refuses(module: nn.CrossEntropyLoss) -> str:
    if module.weight is not None:
        return "class weights: the kernel has none"
    return "label smoothing: the kernel has none" if module.label_smoothing else ""


def _dropout_refuses(module: nn.Dropout) -> str:
    return "in place: the kernel writes a new tensor" if module.inplace else ""


class Replacement(NamedTuple):
    """Which class becomes which, by which function, and what of it stays with PyTorch."""

    new: type[nn.Module]
    function: str
    refuses: Callable[..., str]


def _never(module: nn.Module) -> str:
    return ""


# A GELU has no parameters of its own: in a model of float64 its input is float64 too.
def _odd_dtype(module: nn.Module, model: nn.Module) -> str:
    mine = [p.dtype for p in module.parameters()]
    odd = [d for d in mine if d not in FLOATS] or [p.dtype for p in model.parameters() if p.dtype == torch.float64]
    return f"{odd[0]} parameters: kernels take float32, float16 and bfloat16" if odd else ""


REPLACEMENTS = {
    nn.LayerNorm: Replacement(_LayerNorm, "layer_norm", _norm_refuses),
    nn.RMSNorm: Replacement(_RMSNorm, "rms_norm", _norm_refuses),
    nn.GELU: Replacement(_GELU, "gelu", _gelu_refuses),
    nn.CrossEntropyLoss: Replacement(_CrossEntropyLoss, "cross_entropy", _loss_refuses),
    nn.Linear: Replacement(_Linear, "linear", _never),
    nn.Dropout: Replacement(_Dropout, "dropout", _dropout_refuses),
}
DEFAULT = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.CrossEntropyLoss)
Others = Mapping[type[nn.Module], type[nn.Module]]


class Row(NamedTuple):
    """A module: its name in the model, its class, what replaces it ("" if nothing does), or why it stays.

    now: the function of this package, course_ops.layer_norm, or the class of the caller's own.
    """

    module: str
    was: str
    now: str
    why: str


class Patched:
    """What patch() did. rows: a Row for each module of the classes asked for; print it to see them."""

    def __init__(self, model: nn.Module, classes: Sequence[type[nn.Module]], others: Others) -> None:
        self.rows: list[Row] = []
        self._before: list[tuple[nn.Module, type[nn.Module], type[nn.Module]]] = []
        own = {old: Replacement(new, "", getattr(new, "refuses", _never)) for old, new in others.items()}
        replacements = {old: REPLACEMENTS[old] for old in classes} | own
        before = {r.new: old for old, r in replacements.items()}
        for name, module in model.named_modules():
            old = type(module)
            if old in before:
                self.rows.append(Row(name or "(the model)", before[old].__name__, "", "already patched"))
            if old not in replacements:  # a subclass has a forward of its own
                continue
            new, function, refuses = replacements[old]
            now = f"course_ops.{function}" if function else new.__name__
            why = refuses(module) or _odd_dtype(module, model)
            self.rows.append(Row(name or "(the model)", old.__name__, "" if why else now, why))
            if not why:
                self._before.append((module, old, new))
                module.__class__ = new

    def undo(self) -> None:
        """Give every replaced module its class back. A second call does nothing."""
        while self._before:
            module, old, new = self._before.pop()
            if type(module) is new:
                module.__class__ = old

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [
            f"{r.module}: {r.was} -> {r.now}" if r.now else f"{r.module}: {r.was} stays: {r.why}" for r in self.rows
        ]
        return "\n".join(lines) or "no module of the classes asked for"

    __repr__ = __str__  # what a notebook shows


def patch(model: nn.Module, classes: Sequence[type[nn.Module]] = DEFAULT, others: Others | None = None) -> Patched:
    """Replace the model's modules of these classes by course_ops' functions, in place.

        with course_ops.patch(model) as patched:   # or patched = patch(model), later patched.undo()
            print(patched)
            train(model)

    classes: by default nn.LayerNorm, nn.RMSNorm, nn.GELU (approximate="tanh") and nn.CrossEntropyLoss. On request also
    nn.Linear, and nn.Dropout, which then draws other masks. Their subclasses are left alone. Modules that no kernel
    takes stay with PyTorch, and the result says why. In each call PyTorch computes tensors that no kernel takes.
    Parameters stay the same objects, so checkpoints and optimizers fit. Compile the model after patching it. A deep
    copy or a pickle of a model that is patched stays patched: undo() does not reach it.
    Under autocast norms return their input's dtype; PyTorch's return float32. A target that is no class makes the loss
    NaN; PyTorch raises an error.
    others: for modules of the model's own, {class: subclass}. The subclass has the same parameters and another forward;
    its method refuses(self), if it has one, returns why a module stays as it is, or "".
    Raises TypeError for what is no module, no sequence of classes or no subclass, ValueError for a class that has no
    replacement.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(classes, type):
        raise TypeError(f"classes is {classes.__name__}, expected a sequence of classes: pass ({classes.__name__},)")
    if classes is None:
        raise TypeError("classes is None, expected a sequence of classes: leave it out for the default")
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise TypeError(f"classes is {classes!r}, expected a sequence of classes: pass (torch.nn.GELU,)")
    classes = tuple(classes)
    if unknown := [c for c in classes if c not in REPLACEMENTS]:
        known = ", ".join(c.__name__ for c in REPLACEMENTS)
        raise ValueError(f"classes has {unknown[0]!r}, which nothing replaces: choose of nn's {known}")
    if not isinstance(others, Mapping | None):
        raise TypeError(f"others is {others!r}, expected a mapping {{class: subclass}}")
    for old, new in (others or {}).items():
        classes_alone = isinstance(old, type) and isinstance(new, type)
        if not (classes_alone and issubclass(old, nn.Module) and issubclass(new, old)):
            raise TypeError(f"others has {new!r} for {old!r}: expected a subclass of a module's class")
    return Patched(model, classes, others or {})
