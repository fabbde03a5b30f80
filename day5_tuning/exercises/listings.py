"""The machine code that exercise03_read_sass reads: eight small kernels, compiled by Triton without a GPU.

    python -m day5_tuning.exercises.listings      (writes sass/*.sass anew, with the Triton that is installed)

They are committed, since compiling them takes longer than grading. A test compiles them again and compares their
figures (lessonkit.modes.compiled.row), since another Triton schedules other instructions for the same code.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lessonkit import DEVICE, compiled, rows
from lessonkit.modes.compile_server import call_in_compiler

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FOLDER = Path(__file__).parent / "sass"


@triton.jit
def scale_kernel(x_ptr, y_ptr, first, BLOCK: tl.constexpr):  # x, y: [n]; the part from `first` on
    at = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N]
    K, stride, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n, ks = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, BLOCK_K)
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, K, BLOCK_K):
        a, b = tl.load(a_ptr + m * stride + k + ks[None, :]), tl.load(b_ptr + (k + ks)[:, None] * stride + n)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(c_ptr + m * stride + n, acc)


@triton.jit
def tma_product_kernel(a_desc, b_desc, c_ptr, K, stride, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    acc = tl.zeros([M, N], tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([0, k]), b_desc.load([k, 0]), acc)
    tl.store(c_ptr + tl.arange(0, M)[:, None] * stride + tl.arange(0, N)[None, :], acc)


@triton.jit
def crowded_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # more values per thread than it has registers
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x / tl.sum(x))


def _tensor(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _scale(first: int, dtype: torch.dtype) -> None:
    x = _tensor(4096, dtype=dtype)
    scale_kernel[(1,)](x, x, first, 1024)


def _product(stages: int, dtype: torch.dtype = torch.float16, m: int = 64) -> None:
    a = _tensor(64, 64, dtype=dtype)
    product_kernel[(1,)](a, a, _tensor(64, 64, dtype=torch.float32), 64, 64, "ieee", m, 16, 16, num_stages=stages)


def _tma() -> None:
    a = _tensor(64, 64)
    descs = [TensorDescriptor.from_tensor(a, block) for block in ([64, 16], [16, 16])]
    tma_product_kernel[(1,)](*descs, _tensor(64, 64, dtype=torch.float32), 64, 64, 64, 16, 16, num_stages=3)


def _crowded() -> None:
    x = _tensor(4096, dtype=torch.float32)
    crowded_kernel[(1,)](x, x, 4096, num_warps=4, maxnreg=24)


# name -> (target, the launch)
KERNELS: dict[str, tuple[int, Callable[[], None]]] = {
    "scale": (90, lambda: _scale(16, torch.float32)),
    "scale_odd": (90, lambda: _scale(3, torch.float16)),
    "crowded": (90, _crowded),
    "product_fp32": (90, lambda: _product(1, torch.float32, 16)),
    "product_ampere": (80, lambda: _product(3)),
    "product_hopper": (90, lambda: _product(4)),
    "product_waiting": (90, lambda: _product(1)),
    "product_tma": (90, _tma),
}


def compile_here() -> dict[str, Any]:
    """{name: (listing, its row of lessonkit.modes.compiled)}; in the process that compiles."""
    found = {}
    for name, (target, launch) in KERNELS.items():
        with compiled.compiling(target) as made:
            launch()
            (kernel,) = made.values()
        found[name] = (_listing(kernel.asm["cubin"]), vars(compiled.inspect(name, kernel, target)))
    return found


def _listing(cubin: bytes) -> str:
    """Labels and instructions as nvdisasm prints them, without directives and the NOPs that fill the end up."""
    with compiled.as_file(cubin) as path:
        text = compiled.tool("nvdisasm", "-c", "-ndf", path)
    lines = re.findall(r"^(\.L_x_\d+:|\s+/\*[0-9a-f]{4,}\*/.*;)", text, re.MULTILINE)
    while lines[-1].startswith(".L") or " NOP" in lines[-1]:
        del lines[-1]
    return "".join(re.sub(r"^\s+(/\*\w+\*/)\s+", r"    \1 ", line).replace(" ;", ";") + "\n" for line in lines)


def fresh() -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: tuple(found) for name, found in call_in_compiler(__name__, "compile_here").items()}


def main() -> None:
    for name, (listing, _) in fresh().items():
        rows.write_atomically(FOLDER / f"{name}.sass", listing)


if __name__ == "__main__":
    from day5_tuning.exercises import listings  # by its name: the process that compiles imports it

    listings.main()
