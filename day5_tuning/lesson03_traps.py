"""Traps: eight wrong results, and the line that mends each
=========================================================
Each step is an experiment. Something passes that should not, or is slow, or fails far away from its cause. The step
asserts that it does, mends it, and asserts that the fault is gone. All but the last run without a GPU.

The other traps are in other lessons:

    day2_triton_basics/lesson02_common_errors      inside a kernel
    day2_triton_basics/lesson17_green_but_wrong    around one: tolerances that accept zeros, launches timed by the host
    cuda_src/24_traps                              CUDA's own: barriers, races, alignment
    lesson04_neighbours                            one that needs a second process on the GPU
    lesson05_benchmark_traps                       those of measuring

Predict before you run: which of the eight does a GPU report by itself? Which does a CPU hide?
You will learn: to find an overflow without the memory for it, to read a precision from the compiled code, to check
strides and defaults.
Run it:    python3 course.py run lesson03_traps
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lessonkit import DEVICE, About, Steps, Table, check, compiled, specimen
from lessonkit.base.device import HAS_GPU, INTERPRETED
from lessonkit.base.errors import OutOfBounds
from lessonkit.base.files import ROOT
from lessonkit.cuda import sass, toolchain
from lessonkit.modes.compile_server import call_in_compiler
from lessonkit.modes.interpreter import watched

import pytest
import torch
import triton
import triton.language as tl


# ---- 1. Offsets of 32 bits ------------------------------------------------------------------------------------------
@triton.jit
def corner_kernel(x_ptr, z_ptr, stride, WIDE: tl.constexpr):  # x: rows of int8, z [1]
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(z_ptr, tl.load(x_ptr + (row + 2) * stride))


def offsets_of_32_bits():
    """Row 2 of rows 1.2 GB apart: 2 * stride passes 2^31. An allocation that is never touched costs no memory.

    Program ids and arguments below 2^31 are 32 bits, and so is their product, whatever the pointer is. Every tensor of
    a test is small, so every test passes. compute-sanitizer sees it only if the wrong address is in no allocation.
    """
    stride = 1_200_000_000
    if HAS_GPU and torch.cuda.mem_get_info()[0] < 3 * stride:
        print("  needs 4 GB of GPU memory")
        return
    x = torch.empty(2 * stride + 1, dtype=torch.int8, device=DEVICE)  # the system backs only pages that are written
    x[2 * stride] = 7
    z = torch.zeros(1, dtype=torch.int8, device=DEVICE)
    if INTERPRETED:  # on a GPU the wrong one may end the process
        with pytest.raises(OutOfBounds), watched():
            corner_kernel[(1,)](x, z, stride, WIDE=False)
    corner_kernel[(1,)](x, z, stride, WIDE=True)
    assert z.item() == 7
    # The audit that needs no large tensor: in TTIR, each offset added to a pointer should be 64 bits wide.
    assert call_in_compiler(__name__, "_offset_widths", False) == ["i32"]
    assert call_in_compiler(__name__, "_offset_widths", True) == ["i64"]


def _offset_widths(wide):
    """The types of the factors of corner_kernel's stride in TTIR; called in the compile process."""
    with compiled.compiling(90) as made:
        x = torch.empty(8, dtype=torch.int8, device=DEVICE)
        corner_kernel[(1,)](x, x, 1024, wide)
        return re.findall(r"arith\.muli .* : (i\d+)", made["corner_kernel"].asm["ttir"])


# ---- 2. A result laid out like its input ----------------------------------------------------------------------------
@triton.jit
def scale_kernel(x_ptr, z_ptr, stride_m, stride_n, M, N, BLOCK: tl.constexpr):  # x [M, N] any strides, z [M, N] dense
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at // N * stride_m + at % N * stride_n, mask=at < M * N)
    tl.store(z_ptr + at, 3 * x, mask=at < M * N)


def _scale(x, z):
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, z, *x.stride(), *x.shape, BLOCK=64)
    return z


def results_laid_out_like_their_input():
    """empty_like keeps strides: for a transposed x its result is transposed, and a kernel for rows fills columns."""
    x = torch.randn(8, 40, device=DEVICE).t()
    wrong = _scale(x, torch.empty_like(x))
    assert torch.empty_like(x).stride() == (1, 40)  # not (8, 1)
    assert sorted(wrong.flatten().tolist()) == sorted((3 * x).flatten().tolist())  # every value is there ...
    assert not torch.equal(wrong, 3 * x)  # ... and elsewhere: sums, means and norms agree
    assert torch.equal(_scale(x, torch.empty(x.shape, device=DEVICE)), 3 * x)
    assert torch.equal(_scale(x, torch.empty_like(x, memory_format=torch.contiguous_format)), 3 * x)
    # The opposite trap: x.contiguous() in a wrapper mends every stride, and reads and writes the tensor again. A
    # kernel that moves 2 n then moves 4 n, and its benchmark, on contiguous inputs, never shows it.
    with watched() as traffic:
        _scale(x, torch.empty(x.shape, device=DEVICE))
    assert not INTERPRETED or traffic.read + traffic.written == 2 * x.nbytes


# ---- 3. allclose on numbers that are small --------------------------------------------------------------------------
def allclose_on_tiny_numbers():
    """The gradient of a mean over N V softmaxed numbers is about 1 / (N V^2): at V = 1024 the defaults take zeros.

    assert_close(rtol=1.3e-6, atol=1e-5) in fp32: atol decides as soon as the numbers are below it.
    """
    table = []
    for N, V in ((4, 32), (4, 128), (4, 1024), (4, 8192)):
        torch.manual_seed(0)
        x, w = (torch.randn(N, V, device=DEVICE) for _ in range(2))
        (right,) = torch.autograd.grad((x.requires_grad_().softmax(-1) * w).mean(), x)
        zeros, largest = torch.zeros_like(right), right.abs().max().item()
        accepted = torch.allclose(zeros, right, rtol=1.3e-6, atol=1e-5)
        assert accepted == (V >= 1024)
        assert (zeros - right).norm() == right.norm()  # relative to its own norm the error is 100%, at any scale
        with pytest.raises(check.Rejected):
            check.compare(check.Truth((), (right.double(),), (right,), 1), zeros)
        table.append({"N": N, "V": V, "1 / (N V^2)": f"{1 / (N * V * V):.1e}", "largest": f"{largest:.1e}",
                      "allclose takes zeros": accepted})  # fmt: skip
    return Table("allclose on tiny numbers", table, "The same zeros each time; only the scale of the answer changes.")


# ---- 4. bf16 in Triton's interpreter --------------------------------------------------------------------------------
BARE = """
import torch, triton, triton.language as tl
@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))
torch.manual_seed(0)
for dtype in (torch.float16, torch.bfloat16):
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c)
    print((c - a.float() @ b.float()).abs().max().item())
"""


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr):  # [16, 16] each
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision=PRECISION))


def _dot(a, b, precision):
    c = torch.empty(16, 16, device=DEVICE)
    dot_kernel[(1,)](a, b, c, precision)
    return c


def bf16_in_the_interpreter():
    """TRITON_INTERPRET=1 multiplies bf16 by its bit patterns, as integers: errors of 1e10, and nothing is raised.

    A project whose CPU tests run the interpreter finds its right kernel wrong, or leaves bf16 out. NumPy has no bf16;
    lessonkit.modes.interpreter.mend_bfloat16 computes in fp32 and rounds, and so do all lessons here.
    """
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder, "bare.py")).write_text(BARE)
        env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"  this Triton's interpreter does not run here: {done.stderr.strip().splitlines()[-1]}")
    else:
        half, bf16 = map(float, done.stdout.split())
        print(f"  the bare interpreter is off by {half:.1e} in fp16, by {bf16:.1e} in bf16")
        assert half < 1e-2
        assert bf16 > 1e3 or bf16 < 1e-2  # a small error: this version of Triton computes it correctly
    a, b = (torch.randn(16, 16, device=DEVICE).bfloat16() for _ in range(2))
    torch.testing.assert_close(_dot(a, b, "ieee"), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


# ---- 5. TF32 by default ---------------------------------------------------------------------------------------------
def tf32_by_default():
    """tl.dot of fp32 is TF32 by default, thousands of times less exact; PyTorch and the interpreter take fp32.

    So a kernel that does not set input_precision passes on the CPU and fails on the GPU. Take it from PyTorch's setting
    (day3_matmul_tk.lesson01_matmul.precision). Predicted error: sqrt(2) * 0.212 * 2^-10 (lesson02_numerics).
    """
    silent, asked = (call_in_compiler(__name__, "_precision_compiled", p) for p in (None, "ieee"))
    assert silent == {"ttir": "tf32", "ptx has tf32": True}
    assert asked == {"ttir": "ieee", "ptx has tf32": False}
    a, b = (torch.randn(16, 16, device=DEVICE) for _ in range(2))
    exact, scale = a.double() @ b.double(), 4
    off = {p: ((_dot(a, b, p) - exact).square().mean().sqrt() / scale).item() for p in ("tf32", "ieee")}
    print(f"  off by {off['tf32']:.1e} with the default, by {off['ieee']:.1e} when asked for fp32")
    assert off["ieee"] < 1e-6
    assert (off["tf32"] < 1e-6) == INTERPRETED
    assert INTERPRETED or 0.5 < off["tf32"] / (math.sqrt(2) * 0.212 * 2**-10) < 4


def _precision_compiled(precision):
    """The instruction that dot_kernel's tl.dot became; called in the compile process."""
    with compiled.compiling(90) as made:
        x = torch.empty(16, 16, device=DEVICE)
        dot_kernel[(1,)](x, x, x, precision)
        asm = made["dot_kernel"].asm
    said = re.search(r"inputPrecision = (\w+)", asm["ttir"])
    return {"ttir": said[1] if said else "ieee", "ptx has tf32": ".tf32" in asm["ptx"]}


# ---- 6. sm_90 is not sm_90a -----------------------------------------------------------------------------------------
def sm_90_is_not_sm_90a():
    """wgmma is not part of sm_90: the assembler refuses it there. sm_90a means this architecture, and no later one.

    With nvcc: -gencode arch=compute_90a,code=sm_90a. `-arch=sm_90` compiles everything else, so the error names an
    instruction. A library that was built for sm_90 alone silently lacks its Hopper kernels.
    """
    says = {arch: call_in_compiler(__name__, "_assemble", arch) for arch in ("sm_90a", "sm_90", "sm_100a")}
    assert says["sm_90a"] == ""
    assert re.search(r"wgmma.*not supported|requires .*sm_90a|Feature", says["sm_90"]), says["sm_90"]
    assert says["sm_100a"], "Blackwell has other tensor cores, and no wgmma"
    rows = [{"for": arch, "ptxas": said[:110] or "assembles"} for arch, said in says.items()]
    return Table("architectures", rows, "The same PTX with a wgmma in it, assembled for three targets.")


def _assemble(arch):
    """ptxas's answer to a kernel with wgmma for an architecture; called in the compile process."""
    product_kernel = specimen("day5_tuning.lesson01_compile_pipeline", "product_kernel")
    with compiled.compiling(90) as made:
        a = torch.empty(4096, 4096, dtype=torch.float16, device=DEVICE)
        product_kernel[(64, 64)](a, a, a, 4096, 4096, 4096, 4096, 4096, 64, 64, 64, False)
        ptx = made["product_kernel"].asm["ptx"]
    ptxas = triton.knobs.nvidia.ptxas_blackwell if "100" in arch else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(re.sub(r"\.target sm_90a", f".target {arch}", ptx))
        done = subprocess.run(
            [ptxas.path, f"-arch={arch}", path, "-o", Path(folder, "out")], capture_output=True, text=True
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
    return lines[0].split(";")[-1].strip() if done.returncode else ""


# ---- 7. A register that nothing has set -----------------------------------------------------------------------------
@triton.jit
def two_products_kernel(q_ptr, k_ptr, v_ptr, z_ptr, n, stride, D_V: tl.constexpr):  # q [64, 64], k [n, 64], v [n, D_V]
    rows, keys, d, d_v = tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 64), tl.arange(0, D_V)
    q = tl.load(q_ptr + rows[:, None] * 64 + d)
    z = tl.zeros([64, D_V], tl.float32)
    for start in range(0, n, 128):
        at = start + keys
        k = tl.load(k_ptr + at * stride + d[:, None], at < n, 0)
        p = tl.dot(q, k).to(k.dtype)
        v = tl.load(v_ptr + at[:, None] * stride + d_v, at[:, None] < n, 0)
        z = tl.dot(p, v, z)
    tl.store(z_ptr + rows[:, None] * D_V + d_v, z)


def a_register_that_nothing_has_set():
    """ptxas can be wrong: of this kernel, which is right, version 12.8.93 makes code that multiplies by the wrong V.

    Rows of an odd stride cannot be loaded asynchronously. So the tiles of K and V use one place in shared memory, one
    after the other. The instruction wgmma finds a tile by a descriptor of 64 bits. Its lower half is the address, its
    upper half says how the rows are laid out. K's rows have 128 bytes. With 16 columns V's rows have 32, and another
    layout. The assembler makes V's descriptor from a copy of the address, and loses the copy. So the machine code adds
    to a register that nothing has written.

    An attention kernel then reads zeros for most of V. A test finds it only if V has few columns and an odd stride. The
    cure is a tile of 64 columns for V, of which 48 are masked: then both layouts are the same.
    """
    table = []
    for columns in (16, 64):
        version, unset = call_in_compiler(__name__, "registers_never_set", columns)
        table.append({"ptxas": version, "columns of V's tile": columns, "read, never set": ", ".join(unset) or "none"})
    assert table[1]["read, never set"] == "none"
    assert version != "12.8.93" or table[0]["read, never set"] != "none"
    return Table("registers", table, "Uniform registers that the machine code reads where no way has set them.")


def registers_never_set(columns):
    """ptxas's version, and the registers of two_products_kernel with so many columns of V; in the compile process."""
    q, k, v = (torch.empty(shape, dtype=torch.float16, device=DEVICE) for shape in ((64, 64), (999, 73), (999, 73)))
    with compiled.compiling(90) as made:
        two_products_kernel[(1,)](q, k, v, q, 999, 73, columns)
    (code,) = sass.read(sass.functions(made["two_products_kernel"].asm["cubin"]).values(), 90)
    return re.search(r"V([\d.]+)", toolchain.version(triton.knobs.nvidia.ptxas.path))[1], code.unset


# ---- 8. An error that is reported elsewhere -------------------------------------------------------------------------
FAULT = "from day5_tuning import lesson03_traps; lesson03_traps._fault()"


# Writes 2^42 bytes past the start of z, where no memory is.
@triton.jit
def astray_kernel(z_ptr, far):
    tl.store(z_ptr + far.to(tl.int64) * 1024, 1.0)


def _fault():
    """A kernel that writes to an illegal address, then a harmless addition. Afterwards the process has lost its GPU."""
    z, harmless = (torch.zeros(4, device=DEVICE) for _ in range(2))
    try:
        astray_kernel[(1,)](z, 2**30)
    except Exception:
        return print("at the launch")
    try:
        harmless += 1
        torch.cuda.synchronize()
    except Exception:
        print("at the addition after it")


def errors_arrive_late():
    """A launch returns before its kernel runs, so a later call reports the illegal address.

    CUDA_LAUNCH_BLOCKING=1 makes every launch wait, so that the traceback names it; compute-sanitizer names the line.
    """
    if not HAS_GPU:
        print("  GPU only: the interpreter runs a kernel before the launch returns, so its traceback is right.")
        return None
    table = []
    for blocking, where in (("0", "at the addition after it"), ("1", "at the launch")):
        env = os.environ | {"CUDA_LAUNCH_BLOCKING": blocking, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", FAULT], env=env, capture_output=True, text=True, timeout=120)
        said = done.stdout.strip()
        table.append({"CUDA_LAUNCH_BLOCKING": blocking, "the error is raised": said})
        assert said == where, (said, done.stderr[-500:])
    return Table("late errors", table, "One kernel writes astray; who is blamed?")


# The answers: a GPU reports the eighth by itself, and late. It reports the first only if the wrong address lies in no
# allocation, and the seventh only if it lies outside shared memory. A CPU hides three. The interpreter's tl.dot is
# exact, which hides the fifth. It runs no machine code, which hides the seventh. A launch there returns when its kernel
# has run, which hides the eighth.
LESSON = Steps(
    about=About(
        teaches="32-bit offsets, strides that empty_like keeps, allclose on tiny numbers, bf16 interpreted, TF32 "
        "unasked, sm_90 and sm_90a, an error of ptxas, late errors",
        hours=0.75,
        star=True,
    ),
    steps=(
        offsets_of_32_bits,
        results_laid_out_like_their_input,
        allclose_on_tiny_numbers,
        bf16_in_the_interpreter,
        tf32_by_default,
        sm_90_is_not_sm_90a,
        a_register_that_nothing_has_set,
        errors_arrive_late,
    ),
)

if __name__ == "__main__":
    LESSON.main()
