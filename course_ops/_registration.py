"""What is registered with an operator beside its fake: its rule under autocast, and that it has one derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import impl
from torch.nn import Parameter

from course_ops._common import after_autocast


def cast_under_autocast(operator: Any, *names: str) -> None:
    """Let torch.autocast cast the tensors of these names to its dtype, as it casts those of torch.matmul.

    Inside the operator autocast is off, so that a matmul of PyTorch there keeps the dtype that it is given.
    """
    overload = operator._opoverload
    places = [i for i, argument in enumerate(overload._schema.arguments) if argument.name in names]
    assert len(places) == len(names), f"{overload} has no such arguments: {names}"
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        impl(overload.name(), key, _casting(overload, places, device))


def _casting(overload: Any, places: list[int], device: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        args = tuple(_cast(a) if i in places and isinstance(a, Tensor) else a for i, a in enumerate(args))
        with torch.autocast(device, enabled=False):
            return overload(*args)

    return kernel


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether an operator's Python function may be called on these tensors directly, past PyTorch's dispatcher.

    The dispatcher costs the host as much as several launches. An operator needs it for tensors that are not on a GPU,
    for subclasses of Tensor, for views with the negative bit (z.conj().imag), and for a gradient. Autocast, modes,
    transforms, compilers, torch.jit.trace and profilers need it too.
    """
    if torch.compiler.is_compiling():  # first, since the compiler cannot trace what follows
        return False
    gradients = torch.is_grad_enabled()
    for t in tensors:  # a loop, since all() of a generator costs the host twice as much
        if t is not None and not (_plain_on_gpu(t) and not (gradients and t.requires_grad)):
            return False
    return (
        not torch.is_autocast_enabled("cuda")
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not torch.autograd._profiler_enabled()
    )


def _plain_on_gpu(t: Tensor) -> bool:
    return t.is_cuda and type(t) in (Tensor, Parameter) and not t.is_neg()


def _cast(t: Tensor) -> Tensor:
    return t.to(after_autocast(t))


def once_differentiable(operator: Any, name: str, instead: str) -> None:
    """Make a derivative of `operator`, which computes the gradient of course_ops.<name>, an error with advice."""

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(_advice(name, instead))

    operator.register_autograd(refuse)


def once(name: str, instead: str, gradient: Tensor, *origins: Tensor) -> Tensor:
    """A gradient of course_ops.<name> that no operator computes: its derivative is an error with advice.

    origins: what it depends on. Else torch.autograd.grad would find None for their derivative, and no error.
    """
    return _Once.apply(name, instead, gradient.requires_grad_(), *origins)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, instead: str, gradient: Tensor, *origins: Tensor) -> Tensor:
        ctx.advice = _advice(name, instead)
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(ctx.advice)


def _advice(name: str, instead: str) -> str:
    return (
        f"course_ops.{name} has no second derivative: where you differentiate twice (create_graph=True), "
        f"call {instead} instead"
    )
