"""The CUDA part of the kit: launchers as functions, faults, builds kept by content, C++ read as text."""

import os
import re
import subprocess
from pathlib import Path

import lessonkit.base.device as device
from lessonkit import cuda
from lessonkit.base.cpp_text import definitions, reached
from lessonkit.base.errors import Unsupported
from lessonkit.base.files import ROOT
from lessonkit.cuda import build, sass, toolchain
from lessonkit.judge import check, counters
from lessonkit.lesson import kernels
from lessonkit.modes.interpreter import watched

import pytest
import torch

pytestmark = pytest.mark.kept("cuda_src/include/*", "cuda_src/binding.*", "cuda_src/emulator/**/*")
HERE = toolchain.lacks("g++", "Python.h", "ninja")
NVCC = toolchain.lacks("nvcc", "g++", "ninja")
emulated = pytest.mark.skipif(device.HAS_GPU or bool(HERE), reason=HERE or "kernels run on the GPU here")
PROGRAMS = [pytest.param(lesson.extension, id=name) for name, lesson in kernels() if lesson.extension]

PROGRAM = """
// Link: cublas
#include "course.cuh"
__global__ void shift_kernel(const float* x, float* y, int n, int by) {
    __shared__ float row[64];
    row[threadIdx.x] = x[threadIdx.x + by];
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = row[63 - threadIdx.x];
}
void shift(const float* x, float* y, int n, int by, cudaStream_t stream) {
    course::require(n <= 64, "n is more than a block has threads");
    shift_kernel<<<1, 64, 0, stream>>>(x, y, n, by);
    CUDA_CHECK(cudaGetLastError());
}
double half(double x, bool twice, cudaStream_t) { return twice ? x : x / 2; }
#ifndef COURSE_EMULATED
void tensor_cores(cudaStream_t) {}
#endif
COURSE_MODULE(m) {
    bind(m, "shift", shift);
    bind(m, "half", half);
#ifndef COURSE_EMULATED
    bind(m, "tensor_cores", tensor_cores);
#endif
}
"""


@pytest.fixture
def program(tmp_path):
    def write(text=PROGRAM):
        (tmp_path / "shift.cu").write_text(text)
        return cuda.extension(str(tmp_path / "shift.py"))

    return write


@emulated
def test_a_launcher_is_a_function_of_tensors(program):
    kernels = program()
    x, y = torch.randn(64), torch.empty(64)
    with watched() as traffic:
        kernels.shift(x, y, 64, 0)
    assert torch.equal(y, x.flip(0))
    assert (traffic.read, traffic.written, traffic.launches) == (256, 256, ["shift_kernel"])
    assert counters.measured(traffic.kernels, "wavefronts a shared access") == 1
    assert counters.measured(traffic.kernels, "shift_kernel: sectors a load") == 4
    assert counters.measured(traffic.kernels, "other_kernel: sectors a load") == 0
    assert kernels.half(3, False) == 1.5
    assert kernels.half(3.0, True) == 3.0


@emulated
def test_bad_calls_of_a_launcher(program):
    kernels = program()
    x = torch.randn(64)
    with pytest.raises(TypeError, match="shift takes 5 arguments"):
        kernels.shift(x, x)
    with pytest.raises(TypeError, match="argument 2 is a pointer or a whole number"):
        kernels.shift(x, x.clone(), 1.5, 0)
    with pytest.raises(ValueError, match="more than a block"):
        kernels.shift(x, x.clone(), 65, 0)
    with pytest.raises(AttributeError, match="binds no 'shove'"):
        kernels.shove(x)
    with pytest.raises(Unsupported, match="tensor_cores is not emulated"):
        kernels.tensor_cores()


FAULTS = [
    ("out of bounds", "", "", 1),  # read one past the end
    ("out of bounds", "y[threadIdx.x] = row", "y[64 + threadIdx.x] = row", 0),
    ("race", "__syncthreads();", "", 0),
    ("barrier", "__syncthreads();", "if (threadIdx.x % 32 < 7) __syncwarp(); __syncthreads();", 0),
    ("uninitialised", "row[threadIdx.x] = ", "if (threadIdx.x > 5) row[threadIdx.x] = ", 0),
]


@emulated
@pytest.mark.parametrize(("kind", "old", "new", "by"), FAULTS, ids=[f"{f[0]}-{f[2] or f[3]}" for f in FAULTS])
def test_a_fault_says_its_kind_and_line(program, kind, old, new, by):
    assert not old or PROGRAM.count(old) == 1
    kernels = program(PROGRAM.replace(old, new) if old else PROGRAM)
    with pytest.raises(cuda.Fault) as fault:
        kernels.shift(torch.randn(64), torch.empty(64), 64, by)
    assert fault.value.kind == kind
    assert "shift.cu:" in str(fault.value)
    with pytest.raises(check.Rejected) as rejected:
        check.answer(lambda x: kernels.shift(x, torch.empty(64), 64, by), (torch.randn(64),))
    assert rejected.value.caught_by == kind


@emulated
def test_after_a_fault_the_next_launch_is_right(program):
    kernels, x, y = program(), torch.randn(64), torch.empty(64)
    with pytest.raises(cuda.Fault):
        kernels.shift(x, y, 64, 1)
    kernels.shift(x, y, 64, 0)
    assert torch.equal(y, x.flip(0))


@emulated
def test_a_program_that_does_not_compile_says_where(program):
    with pytest.raises(build.BuildError, match=r"shift\.cu:10:.*error"):
        _ = program(PROGRAM.replace("cudaStream_t stream", "cudaStream stream", 1)).module


@emulated
def test_builds_are_kept_by_content(program, monkeypatch, tmp_path):
    (first,) = build.build([program().product()])
    monkeypatch.setattr(build, "_ninja", lambda products: pytest.fail("built again"))
    assert build.build([program().product()]) == [first]
    changed = program(PROGRAM.replace("63 - threadIdx.x", "threadIdx.x")).product()
    assert changed.path != first
    header = PROGRAM.replace('#include "course.cuh"', '#include "course.cuh"\n#include "own.cuh"')
    (tmp_path / "own.cuh").write_text("constexpr int OWN = 1;\n")
    before = program(header).product().path
    (tmp_path / "own.cuh").write_text("constexpr int OWN = 2;\n")
    assert program(header).product().path != before, "a header of the program's own counts"


@pytest.fixture
def variants(tmp_path, monkeypatch):
    """Of texts of shift.cu and own.cuh their extensions, as of a lesson's mutants; and names of what is built."""
    monkeypatch.setattr(build, "MUTANTS", tmp_path)
    ninja, built = build._ninja, []
    monkeypatch.setattr(build, "_ninja", lambda products: built.extend(p.name for p in products) or ninja(products))

    def write(*texts):
        for i, (program, header) in enumerate(texts):
            (tmp_path / str(i)).mkdir()
            (tmp_path / f"{i}/shift.cu").write_text(program)
            (tmp_path / f"{i}/own.cuh").write_text(header)
        sources = [tmp_path / f"{i}/shift.cu" for i in range(len(texts))]
        monkeypatch.setattr(build, "TOGETHER", dict.fromkeys(sources, tuple((s, "shift") for s in sources)))
        return [cuda.extension(str(source.with_suffix(".py"))) for source in sources], built

    return write


OWN = "#pragma once\n#include <numeric>\n#ifndef BY\n#define BY 2\n#endif\nconstexpr int FIRST = 63;\n"
WITH_OWN = (
    PROGRAM.replace('course.cuh"', 'course.cuh"\n#include "own.cuh"').replace("63 -", "FIRST -").replace("/ 2", "/ BY")
)


@emulated
def test_mutants_of_a_program_are_built_as_one(variants):
    """Each keeps its own code, constants and macros, and its launchers beside that of its rung."""
    texts = (WITH_OWN, OWN), (WITH_OWN, OWN.replace("BY 2", "BY 4")), (WITH_OWN.replace("= row[", "= 2 * row["), OWN)
    mutants, built = variants(*texts)
    x = torch.randn(64)
    for mutant, factor, half in zip(mutants, (1, 1, 2), (1.5, 0.75, 1.5), strict=True):
        mutant.shift(x, y := torch.empty(64), 64, 0)
        assert torch.equal(y, factor * x.flip(0))
        assert mutant.half(3.0, False) == half
    assert "shift.so" not in built


@emulated
def test_a_mutant_that_does_not_compile_is_named_alone(variants):
    mutants, _ = variants((WITH_OWN, OWN), (WITH_OWN.replace("cudaStream_t stream", "cudaStream stream", 1), OWN))
    mutants[0].shift(x := torch.randn(64), y := torch.empty(64), 64, 0)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(build.BuildError, match=r"shift\.so:\n(.*\n)*.*shift\.cu:11:.*error"):
        mutants[1].shift(x, y, 64, 0)


def test_link_line(tmp_path):
    (tmp_path / "p.cu").write_text(PROGRAM)
    assert toolchain.comment_line(tmp_path / "p.cu", "Link") == ["cublas"]


CPP = """// kernel<1>() { in a comment
template <typename T, int N = 4>
__global__ void __launch_bounds__(256, (2)) first_kernel(const T* x) { if (x) { helper("}"); } }
namespace { struct Pair { int a; void f() { } }; }
__constant__ float table[3][4];
constexpr int WIDE = 3;
template <> __device__ float helper<float>(float a) { return a * WIDE; }
#define ROW(a) \\
    (a + 1)
void launch(cudaStream_t s) { first_kernel<float><<<1, ROW(2), 0, s>>>(nullptr); }
"""


def test_cpp_definitions():
    found = {d.name: CPP[d.start : d.stop] for d in definitions(CPP)}
    assert set(found) == {"first_kernel", "Pair", "table", "WIDE", "helper", "ROW", "launch"}
    assert found["first_kernel"].startswith("template")
    assert found["first_kernel"].endswith("} }")
    assert found["Pair"] == "struct Pair { int a; void f() { } };"


def test_a_mark_sees_the_code_that_a_launcher_reaches(tmp_path):
    path = tmp_path / "p.cu"
    path.write_text(CPP)
    before = reached([path], {"launch"})
    assert set(before) == {"launch", "first_kernel", "helper", "WIDE", "ROW"}
    path.write_text(CPP.replace("{ if (x)", "{  // why\n  if (x)").replace("table[3]", "table[5]"))
    assert reached([path], {"launch"}) == before
    path.write_text(CPP.replace("WIDE = 3", "WIDE = 4"))
    assert reached([path], {"launch"}) != before


def test_the_kernels_of_a_program_are_known_by_name(tmp_path):
    (tmp_path / "p.cu").write_text(
        "template <int N> __global__ void a_kernel() {}\n__global__ void b_kernel();\nint f();"
    )
    assert sass.declared(tmp_path / "p.cu") == {"a_kernel", "b_kernel"}


@pytest.mark.skipif(bool(NVCC), reason=NVCC)
def test_machine_code_of_templates(tmp_path):
    (tmp_path / "p.cu").write_text(
        "namespace { template <int N, bool B> __global__ void __launch_bounds__(N)"
        "copy_kernel(const float4* x, float4* y) { __shared__ float4 s[N]; s[threadIdx.x] = x[threadIdx.x];"
        "__syncthreads(); y[threadIdx.x] = s[N - 1 - threadIdx.x]; } }"
        "void f() { copy_kernel<128, true><<<1, 128>>>(0, 0); copy_kernel<64, false><<<1, 64>>>(0, 0); }"
    )
    found = sass.kernels(tmp_path / "p.cu")
    assert [(k.target, k.kernel, k.warps, k.shared) for k in found if k.target == 90] == [
        (90, "copy_kernel<128, true>", 4, 2048),
        (90, "copy_kernel<64, false>", 2, 1024),
    ]
    assert {(k.rung, k.load_bytes, k.store_bytes, k.barriers) for k in found} == {("copy_kernel", 16, 16, 1)}


@pytest.mark.skipif(bool(NVCC), reason=NVCC)
def test_normalised_machine_code_of_nvcc(tmp_path):
    """Names, order and lines do not count, a constant in the code or in a table does."""
    text = (
        "__constant__ float table[2] = {1, 2};\n"
        "__global__ void first_kernel(float* x) { x[threadIdx.x] *= table[threadIdx.x % 2]; }\n"
        "__global__ void other_kernel(float* x) { x[threadIdx.x] += 3; }\n"
    )
    swapped = "\n".join(text.splitlines()[index] for index in (2, 0, 1))
    texts = [text, f"// a line\n{swapped}".replace("first", "zeroth").replace("table", "values")]
    texts += [text.replace("+= 3", "+= 4"), text.replace("{1, 2}", "{1, 3}")]
    for i, each in enumerate(texts):
        (tmp_path / f"p{i}.cu").write_text(each)
    cubins = build.build(build.cubin(tmp_path / f"p{i}.cu", 90) for i in range(4))
    first, same, *others = (sass.normalised(cubin.read_bytes()) for cubin in cubins)
    assert first == same
    assert len({first, *others}) == 3


def run(product) -> str:
    (path,) = build.build([product])
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the emulator keeps its fibers to the end
    done = subprocess.run([path], capture_output=True, text=True, timeout=1800, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.night
@pytest.mark.parametrize("extension", PROGRAMS)
def test_program_runs(extension):
    """Its main finds every version right: on the GPU; or in the emulator, one thread after the other, where
    AddressSanitizer and UBSan find nothing in host and device code."""
    if why := extension.lacks():
        pytest.skip(why)
    source: Path = extension.source
    assert "right" in run(build.program(source) if device.HAS_GPU else build.emulated_program(source, sanitized=True))


def test_a_name_that_no_trap_has_is_refused():
    """`./traps missing_barrier` is a form of no trap: it would print nothing, as if all were right."""
    if why := toolchain.lacks("g++", "ninja"):
        pytest.skip(why)
    (program,) = build.build([build.emulated_program(ROOT / "cuda_src/24_traps.cu")])
    done = subprocess.run([program, "missing_barrier"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "missing_barrier is no name; ./traps alone lists the names\n"


@pytest.mark.parametrize("extension", PROGRAMS)
def test_a_programs_table_names_its_versions_as_it_prints_them(extension):
    """A reader looks up in the table what `v8 pipelined` took."""
    text = extension.source.read_text()
    printed = set(re.findall(r'"(v\d+ [^"]*)"', text))
    table = re.findall(r"^//\s{2,}(v\d+ .*?)(?:\s{2,}|$)", text, re.MULTILINE)
    assert {*table} <= printed, {*table} - printed
