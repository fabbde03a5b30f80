"""CUDA C++ emulated: each fault is found in the broken kernel and not in its fix; costs are counted right."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import lessonkit.base.device  # noqa: F401  (decides the mode before anything else is imported)
from lessonkit.cuda import build, toolchain
from lessonkit.cuda.rewrite import RewriteError, rewrite

import pytest

pytestmark = pytest.mark.kept("tests/emulated/*", "cuda_src/include/*", "cuda_src/emulator/**/*")
FOLDER = Path(__file__).parent / "emulated"
LACKS = toolchain.lacks("g++", "ninja")
needs_compiler = pytest.mark.skipif(bool(LACKS), reason=str(LACKS))

# The kind of fault that each broken kernel has; those of race.cu and barrier.cu have their file's.
KINDS = {
    "past_the_end": "out of bounds",
    "before_the_begin": "out of bounds",
    "shared_past_the_end": "out of bounds",
    "dynamic_too_small": "out of bounds",
    "host_pointer": "out of bounds",
    "after_free": "out of bounds",
    "masked_lane": "out of bounds",
    "never_written": "uninitialised",
    "uninitialised_global": "uninitialised",
    "forgotten_wait": "uninitialised",
    "misaligned_float4": "misaligned",
    "misaligned_double": "misaligned",
    "partial_shuffle": "wrong",
}


def named(stem: str) -> list[str]:
    """The cases of a file, from its text: a build is not wanted to list the tests."""
    found = []
    for both, one in re.findall(r'\bBOTH\((\w+),|\{"(\w+)",\s*\[\]', (FOLDER / f"{stem}.cu").read_text()):
        found += [one] if one else [f"{both}_broken", f"{both}_fixed"]
    return found


@cache
def program(stem: str, sanitized: bool = False) -> Path:
    product = build.emulated_program(FOLDER / f"{stem}.cu", sanitized)
    build.build([product])
    return product.path


@cache
def output(stem: str) -> str:
    done = subprocess.run([str(program(stem))], capture_output=True, text=True, timeout=600, check=True)
    return done.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("stem", "case"), [(stem, case) for stem in ("race", "memory", "barrier", "programs") for case in named(stem)]
)
def test_faults(stem, case):
    rows = [line.split("\t") for line in output(stem).splitlines()]
    found = {int(seed): (kind, text) for name, seed, kind, text in rows if name == case}
    assert len(found) >= 3, "each case runs under several orders of threads"
    name, _, state = case.rpartition("_")
    wanted = "none" if state == "fixed" else KINDS.get(name, stem)
    for kind, text in found.values():
        assert kind == wanted, text
        if wanted not in ("none", "wrong"):
            assert re.search(r"thread \(\d+,\d+,\d+\) of block \(\d+,\d+,\d+\)", text), text
            assert kind == "barrier" or re.search(rf"{stem}\.cu:\d+", text), text


@needs_compiler
def test_faults_name_the_line():
    lines = (FOLDER / "race.cu").read_text().splitlines()
    text = next(line for line in output("race").splitlines() if line.startswith("missing_barrier_broken"))
    read, written = "y[threadIdx.x] = tile[127 - threadIdx.x]", "tile[threadIdx.x] = x[threadIdx.x]"
    places = {lines[int(number) - 1].strip().rstrip(";") for number in re.findall(r"race\.cu:(\d+)", text)}
    assert places == {read, written}


@needs_compiler
def test_a_seed_decides_everything():
    again = subprocess.run([str(program("race"))], capture_output=True, text=True, timeout=600, check=True).stdout
    assert again == output("race")


REQUESTS = [  # kernel, what, requests, sectors or wavefronts, bytes that the lanes ask for
    ("strided<1>", "global_load", 1, 4, 128),
    ("strided<2>", "global_load", 1, 8, 128),
    ("strided<32>", "global_load", 1, 32, 128),
    ("broadcast", "global_load", 1, 1, 128),
    ("shifted", "global_load", 1, 5, 128),
    ("vectorised", "global_load", 1, 16, 512),
    ("vectorised", "global_store", 1, 16, 512),
    ("halves", "global_load", 1, 2, 64),
    ("vector_used_in_parts", "global_load", 1, 16, 512),
    ("loop", "global_load", 8, 32, 1024),
    ("divergent", "global_load", 3, 3, 32 + 128 + 64),
    ("transposed<32>", "shared_load", 1, 32, 128),
    ("transposed<33>", "shared_load", 1, 1, 128),
    ("transposed<33>", "shared_store", 32, 32, 4096),
    ("shared_vectors", "shared_store", 1, 4, 512),
    ("shared_doubles", "shared_store", 1, 2, 256),
    ("atomics", "global_atomic", 1, 2, 128),
]


@needs_compiler
@pytest.mark.parametrize(("kernel", "what", "requests", "transactions", "size"), REQUESTS)
def test_counters(kernel, what, requests, transactions, size):
    counted = {row["kernel"]: row for row in json.loads(output("counters"))}[kernel]
    passes = "wavefronts" if what.startswith("shared") else "sectors"
    assert [counted[f"{what}_{name}"] for name in ("requests", passes, "bytes")] == [requests, transactions, size]
    space, op = what.split("_")
    lines = [line for line in counted["lines"] if (line["space"], line["op"]) == (space, op)]
    assert sum(line["transactions"] for line in lines) == transactions
    assert {line["file"] for line in lines} == {"counters.cu"}


@needs_compiler
@pytest.mark.night
@pytest.mark.parametrize("case", ["local", "shared", "overflow"])
def test_sanitizers(case):
    fixed, broken = (
        subprocess.run(
            [str(program("sanitized", True)), f"{case}_{state}"], capture_output=True, text=True, timeout=600
        )
        for state in ("fixed", "broken")
    )
    assert (fixed.returncode, fixed.stdout) == (0, "none\n"), fixed.stderr
    assert broken.returncode != 0
    assert "sanitized.cu" in broken.stderr
    assert "AddressSanitizer" in broken.stderr or "runtime error" in broken.stderr


def rewritten(text: str) -> str:
    first, _, rest = rewrite(text, "x.cu").partition("\n")
    assert first == '#line 1 "x.cu"'
    assert rest.count("\n") == text.count("\n"), "lines stay where they are"
    return " ".join(rest.split())


LAUNCHES = {
    "k<<<1, 32>>>();": 'emu::Launch("k", 1, 32).run(k);',
    "k <<< g, b >>> (x, y);": 'emu::Launch("k", g, b ). run(k, x, y);',
    "ns::k<float, 4><<<g, b, 0, s>>>(x, f(1, 2));": (
        'emu::Launch("ns::k<float, 4>", g, b, 0, s).run(ns::k<float, 4>, x, f(1, 2));'
    ),
    "if (a < b) k<T, (N > 2), P<Q<int>>><<<dim3(a, b), h(c)>>>(x);": (
        'if (a < b) emu::Launch("k<T, (N > 2), P<Q<int>>>", dim3(a, b), h(c)).run(k<T, (N > 2), P<Q<int>>>, x);'
    ),
    "return table[i](0)<<<g, b>>>(x);": 'return emu::Launch("table[i](0)", g, b).run(table[i](0), x);',
    'f("a<<<b>>>(c)"); // k<<<1, 1>>>()': 'f("a<<<b>>>(c)"); // k<<<1, 1>>>()',
    "/* k<<<1, 1>>>() */ '\"' k<<<1, 1>>>(x /* , */);": (
        '/* k<<<1, 1>>>() */ \'"\' emu::Launch("k", 1, 1).run(k, x /* , */);'
    ),
    "#define RUN(N) \\\n    k<N><<<1, N>>>(x)": '#define RUN(N) \\ emu::Launch("k<N>", 1, N).run(k<N>, x)',
    "f([&] { k<<<a, b>>>(x); });": 'f([&] { emu::Launch("k", a, b).run(k, x); });',
    "template <typename T, int N> __global__ void k(T* x) {}\nk<float, 2><<<1, 1>>>(x);": (
        'template <typename T, int N> __global__ void k(T* x) {} emu::Launch("k<float, 2>", 1, 1).run(k<float, 2>, x);'
    ),
    "template <int N, typename T> __global__ void __launch_bounds__(f(N)) k(T* x) {}\nk<2><<<1, 1>>>(x);": (
        "template <int N, typename T> __global__ void __launch_bounds__(f(N)) k(T* x) {} "
        'emu::Launch("k<2>", 1, 1).run_deduced([](auto... emu_given) { k<2>(emu_given...); }, x);'
    ),
    "template <typename T, int N = 2> __global__ void k(T* x) {}\nk<T><<<1, 1>>>(x);": (
        'template <typename T, int N = 2> __global__ void k(T* x) {} emu::Launch("k<T>", 1, 1).run(k<T>, x);'
    ),
}

SHARED = {
    "__shared__ float s[32][N + 1];": 'auto& s = emu::shared<float[32][N + 1]>("s", [] {});',
    "__shared__ int a, b[f(2, 3)];": (
        'auto& a = emu::shared<int>("a", [] {}); auto& b = emu::shared<int[f(2, 3)]>("b", [] {});'
    ),
    "__shared__ alignas(16) volatile float s[4];": 'auto& s = emu::shared<volatile float[4]>("s", [] {}, (16));',
    "__shared__ __align__(128) P<T, 4> s;": 'auto& s = emu::shared<P<T, 4>>("s", [] {}, (128));',
    "static __shared__ unsigned long long n;": 'auto& n = emu::shared<unsigned long long>("n", [] {});',
    "extern __shared__ float s[];": "float* const s = emu::dynamic_shared<float>();",
    "extern __shared__ __align__(16) unsigned char s[];": (
        "unsigned char* const s = emu::dynamic_shared<unsigned char>();"
    ),
    "__shared__ float\n    s[2];": 'auto& s = emu::shared<float[2]>("s", [] {});',
}


@pytest.mark.parametrize(("text", "wanted"), LAUNCHES.items())
def test_launches(text, wanted):
    assert rewritten(text) == wanted


@pytest.mark.parametrize(("text", "wanted"), SHARED.items())
def test_shared(text, wanted):
    assert rewritten(f"__global__ void k() {{ {text} }}") == f"__global__ void k() {{ {wanted} }}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n__shared__ float s[4];", r"x\.cu:2: a __shared__ variable outside a function"),
        ("void f() {\n k<<<1, 2;\n}", r"x\.cu:2: <<< without >>>"),
        ("void f() {\n\n k<<<1, 2>>>;\n}", r"x\.cu:3: after >>> the kernel's arguments are wanted"),
        ("void f() { k<<<1>>>(x); }", r"x\.cu:1: between <<< and >>> stand grid, block"),
        ("void f() { = <<<1, 2>>>(x); }", r"x\.cu:1: no kernel's name before <<<"),
        ("void f() { __shared__ int a = 3; }", r"x\.cu:1: cannot read '__shared__ int a = 3;'"),
        ("void f() { extern __shared__ int a[4]; }", r"x\.cu:1: dynamic shared memory is declared `extern"),
        ("void f() { __shared__ int a[]; }", r"x\.cu:1: a\[\] has no size"),
    ],
)
def test_what_cannot_be_rewritten(text, message):
    with pytest.raises(RewriteError, match=message):
        rewrite(text, "x.cu")
