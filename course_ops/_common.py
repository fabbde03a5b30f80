"""What every operator needs: does a kernel run here, for which chip is it compiled, words for a bad argument."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

NUMBERS = int, float, torch.SymInt, torch.SymFloat  # compilers pass symbols
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HOPPERS_SHARED_MEMORY = 232448
_UNCHANGED = nullcontext()
_interpreted: ContextVar[bool] = ContextVar("course_ops_interpreted", default=False)


class Unsupported(ValueError):
    """No kernel here takes that combination; the text names the argument and what to do."""


def triton_interprets() -> bool:
    """Whether Triton was told to interpret kernels before it was imported: it decides once, at import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside, operators run their launchers on tensors that no GPU holds, too (course_ops.testing)."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def runs_kernel(x: Tensor) -> bool:
    """Whether x is computed by a kernel: on a GPU always, elsewhere only for tests (course_ops.testing)."""
    return x.is_cuda or (x.device.type in ("cpu", "meta") and _interpreted.get())


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make that the device of x."""
    if not x.is_cuda or torch.cuda.current_device() == x.device.index:
        return _UNCHANGED
    return torch.cuda.device(x.device)


def architecture(device: torch.device) -> int:
    """Compute capability as one number (90 for Hopper), 0 for AMD; without a GPU that of the target.

    Interpreted it is 90.
    """
    if device.type == "cuda":
        return 0 if torch.version.hip else _gpu(device)[2]
    if triton_interprets():
        return 90
    import triton

    arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else 0


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start while the last programs of the one before still run: programmatic dependent launch."""
    return architecture(device) >= 90 and not triton_interprets()


def runs_gluon(x: Tensor) -> bool:
    """Whether kernels with wgmma run: sm_90 alone has it, and Triton's interpreter has no Gluon."""
    return architecture(x.device) == 90 and not triton_interprets()


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device or of the target's card; 4 when interpreted."""
    if device.type == "cuda":
        return _gpu(device)[0]
    return 4 if triton_interprets() else _of_target("multiprocessor_count")


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have on the device or the target's card; Hopper's when interpreted."""
    if device.type == "cuda" and not torch.version.hip:
        return _gpu(device)[1]
    return HOPPERS_SHARED_MEMORY if triton_interprets() else _of_target("max_shared_mem")


@cache  # each launch asks
def _gpu(device: torch.device) -> tuple[int, int, int]:
    """A GPU's multiprocessors, the shared memory of a block in bytes, its compute capability as one number."""
    properties = torch.cuda.get_device_properties(device)
    memory = 0 if torch.version.hip else properties.shared_memory_per_block_optin
    return properties.multi_processor_count, memory, 10 * properties.major + properties.minor


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up. triton.cdiv, which device code can call too, costs the host some microseconds."""
    return -(-n // d)


def left_operand(a: Tensor) -> Tensor:
    """a [M, K] as the left operand of PyTorch's matmul; on a CPU in bf16 a copy whose rows end with zeros, if needed.

    oneDNN with AMX reads each row of a bf16 matrix to a multiple of 32 elements, and NaN or inf behind it makes NaN.
    """
    K = a.shape[1]
    if not a.is_cpu or a.dtype != torch.bfloat16 or K % 32 == 0 or (K > 1 and a.stride(1) != 1):
        return a
    return torch.nn.functional.pad(a, (0, -K % 32))[:, :K]


def roomy(device: torch.device) -> bool:
    """Whether a block may have about as much shared memory as on Hopper, 227 KB, for which the large tiles are made."""
    return shared_memory(device) > 200_000


def fitting_stages(stages: int, bytes_a_stage: int, device: torch.device, beside: int = 0) -> int:
    """The stages of a pipeline where its chip is roomy; elsewhere as many of them as fit, with `beside` bytes more."""
    fitting = (shared_memory(device) - 1024 - beside) // bytes_a_stage
    return stages if roomy(device) else max(1, min(stages, fitting))


def _of_target(limit: str) -> int:
    """What Triton's driver says of the current GPU, or of the card that is compiled for."""
    import triton

    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())[limit]


def fp32_precision() -> str:
    """How tl.dot multiplies fp32: exactly, or in TF32 (10 bits, on tensor cores) where PyTorch is told to.

    torch.get_float32_matmul_precision would raise where torch.backends.fp32_precision or a backend's own was set.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def tma_takes(*tensors: Tensor) -> bool:
    """Whether TMA can copy each tensor in place: unit last stride, base and other strides multiples of 16 bytes."""

    for t in tensors:
        *outer, inner = t.stride()
        if inner != 1 or t.numel() == 0 or t.data_ptr() % 16:
            return False
        size = t.element_size()
        for stride in outer:
            if stride <= 0 or stride * size % 16:
                return False
    return True


def expect(
    *,
    ndim: int | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    same_shape: bool = False,
    same_dtype: bool = False,
    **tensors: Tensor,
) -> None:
    """Check tensors, given by name, against what an operator takes: `expect(x=x, weight=w, same_dtype=True)`.

    ndim: dimensions each must have. dtypes: allowed. same_shape, same_dtype: as the first tensor has it, dtypes as
    they are after torch.autocast. All must be on the device of the first. Raises TypeError for a type or dtype,
    ValueError for a device or a shape.
    """
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        expect_tensor(name, t)
        _expect_device(name, t, first_name, first)
        if t.dtype not in dtypes:
            names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise TypeError(f"{name} is {t.dtype}, this operator takes {names}: convert it with {name}.to(...)")
        if ndim is not None and t.ndim != ndim:
            raise ValueError(f"{name} has {t.ndim} dimension(s) {tuple(t.shape)}, expected {ndim}: reshape it first")
        if same_shape and t.shape != first.shape:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, but {first_name} has {tuple(first.shape)}: make them equal"
            )
        if same_dtype and t.dtype != first.dtype and after_autocast(t) != after_autocast(first):
            raise TypeError(f"{name} is {t.dtype}, but {first_name} is {first.dtype}: convert one of them")


def expect_tensor(name: str, t: object, advice: str = "") -> None:
    """TypeError unless the argument of that name is a dense tensor: PyTorch's dispatcher would refuse in other words.

    RuntimeError for a tangent: the operators would drop it, and a derivative would be 0.
    """
    if not isinstance(t, Tensor):
        advice = advice or ("pass one" if t is None else "wrap it in torch.as_tensor")
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}: {advice}")
    if not is_dense(t):
        if t.is_nested:  # its layout may be torch.strided
            raise TypeError(f"{name} is a nested tensor: pass the tensors of {name}.unbind() one by one")
        raise TypeError(f"{name} has layout {t.layout}: call {name}.to_dense()")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        raise RuntimeError(
            f"{name} has a tangent, and course_ops has no forward-mode derivatives: use reverse mode (backward)"
        )


def is_dense(t: Tensor) -> bool:
    """Whether t is neither sparse nor nested; a nested tensor may have the layout of a dense one."""
    return t.layout is torch.strided and not t.is_nested


def expect_number(**numbers: object) -> None:
    """TypeError unless each option, given by name, is a number and no bool."""
    for name, n in numbers.items():
        if isinstance(n, bool) or not isinstance(n, NUMBERS):
            raise TypeError(f"{name} is {n!r}, expected a number")


def expect_int(**numbers: object) -> None:
    """TypeError unless each option is an int and no bool, ValueError if it has more than 64 bits."""
    for name, n in numbers.items():
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"{name} is {n!r}, expected an int")
        if isinstance(n, int) and not -(2**63) <= n < 2**63:
            raise ValueError(f"{name} is {n}, expected an int of 64 bits")


def expect_bool(**flags: object) -> None:
    """TypeError unless each option is a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{name} is {flag!r}, expected True or False")


def expect_eps(eps: object) -> None:
    """TypeError unless eps is a number, ValueError if it is negative or NaN."""
    expect_number(eps=eps)
    if not eps >= 0:  # type: ignore[operator]
        raise ValueError(f"eps is {eps}, expected 0 or more")


def expect_device(**tensors: Tensor) -> None:
    """ValueError unless all are on the device of the first: of tensors whose dtypes are expected one by one."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        _expect_device(name, t, first_name, first)


def _expect_device(name: str, t: Tensor, first_name: str, first: Tensor) -> None:
    if t.device != first.device:
        raise ValueError(f"{name} is on {t.device}, but {first_name} is on {first.device}: move one of them")


def expect_dtype_of(x: Tensor, **tensors: Tensor) -> None:
    """TypeError unless each has the dtype of x, which is named x, or float32."""
    for name, t in tensors.items():
        if t.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{name} is {t.dtype}, expected {x.dtype}, as x, or torch.float32: convert it")


def after_autocast(t: Tensor) -> torch.dtype:
    """The dtype of t in an operator whose tensors torch.autocast casts; float64 and integers stay, as in PyTorch."""
    device = t.device.type
    if t.dtype in FLOATS and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return t.dtype


def as_rows(x: Tensor) -> Tensor:
    """[..., N] -> [M, N] whose columns are neighbours in memory; a view of x where that is possible."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def expect_rows(x: Tensor, **weights: Tensor | None) -> None:
    """Check x [..., N], named x, and weights [N], given by name: of x's dtype or float32; `weight` may not be None."""
    given = {name: w for name, w in weights.items() if w is not None}
    expect(x=x, **given)
    if x.ndim == 0:
        raise ValueError("x is a scalar, and this operator works along the last dimension: pass x[None]")
    if "weight" in weights and "weight" not in given:
        expect_tensor("weight", None, f"pass torch.ones({x.shape[-1]})")
    for name, w in given.items():
        if w.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(w.shape)}, expected {tuple(x.shape[-1:])}: one element a column")
        expect_dtype_of(x, **{name: w})


def in_one_dtype(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As they are if their dtypes are alike; else both in float32, since kernels give both gradients one dtype."""
    if bias is None or bias.dtype == weight.dtype:
        return weight, bias
    return weight.float(), bias.float()
