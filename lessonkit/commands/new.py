"""`new`: the skeleton of a lesson, of its problem if that is new, and its line in the path of the course."""

import re
from pathlib import Path
from textwrap import dedent

from lessonkit.base.files import ROOT, WHOLE_COURSE, write_atomically

LIKE = "day2_triton_basics.lesson18_silu, or in CUDA C++ like cuda_src.25_silu"
LESSON = '''
    """TITLE: the idea in the field's words
    ==========================================
    What the operator computes, and the budget: bytes and FLOPs, and the time that they cannot beat.

    You will learn: ...
    Run it:    python3 course.py run STEM
    Check it:  python3 course.py check STEM
    Time it:   python3 course.py bench STEM
    """

    from lessonkit import About, Lesson, expect

    import torch
    import triton
    import triton.language as tl

    from problems.PROBLEM import PROBLEM


    # Rung 1. The idea in two or three sentences. Predicted: a figure in the unit of the report, and its reason.
    @triton.jit
    def WORD_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


    def WORD(x):
        """[...] -> [...], 1024 elements per program."""
        expect(x=x, contiguous=True)
        y = torch.empty_like(x)
        if x.numel():
            WORD_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y


    LESSON = Lesson(
        about=About(teaches="what the lesson settles, in one line", hours=0.5, operator="WORD"),
        problem=PROBLEM,
        rungs=(WORD,),
        wrong=(),  # Mutant(why, function, text as it is, text as it is wrong, rung, what the checks say: "nan")
    )

    if __name__ == "__main__":
        LESSON.main()
'''
CUDA_LESSON = '''
    """TITLE in CUDA C++: the idea in the field's words
    ==========================================
    The kernels and their predictions are in STEM.cu. This file wraps them as functions of tensors and checks them.

    Run it:    python3 course.py run STEM
    Check it:  python3 course.py check STEM
    Time it:   python3 course.py bench STEM
    """

    from lessonkit import About, Lesson, cuda, expect

    import torch

    from problems.PROBLEM import PROBLEM

    kernels = cuda.extension(__file__)  # STEM.cu, built at the first call


    def WORD(x):
        """[...] -> [...] float32, one thread per element."""
        expect(x=x, dtypes=[torch.float32], contiguous=True)
        y = torch.empty_like(x)
        kernels.WORD(x, y, y.numel())
        return y


    LESSON = Lesson(
        about=About(
            teaches="what the lesson settles, in one line", hours=0.5, operator="WORD", language="CUDA C++"
        ),
        problem=PROBLEM,
        extension=kernels,
        rungs=(WORD,),
        wrong=(),  # Mutant(why, function, text as it is, text as it is wrong, rung, what the checks say: "nan")
        dtypes=(torch.float32,),
        bench_dtype=torch.float32,
    )

    if __name__ == "__main__":
        LESSON.main()
'''
PROGRAM = """
    // TITLE: the idea in the field's words
    // ==========================================
    //
    // What the operator computes, and the budget: bytes and FLOPs, and the time that they cannot beat.
    //
    // You will learn: ...
    //
    // Compile:  nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o WORD cuda_src/STEM.cu
    // Run:      ./WORD                            (checks every version, then times them all)
    // No GPU:   python3 course.py run STEM        (the same kernels, emulated and checked against PyTorch)
    // Time it:  python3 course.py bench STEM
    #include "course.cuh"

    constexpr int THREADS = 256;  // a block

    // v1. The idea in two or three sentences. Predicted: a figure in the unit of the report, and its reason.
    __global__ void WORD_kernel(const float* x, float* y, int64_t n) {  // [n] each
        const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i];
    }

    void WORD(const float* x, float* y, int64_t n, cudaStream_t stream) {
        if (n == 0) return;  // a grid of no blocks is an error
        WORD_kernel<<<course::ceil_div(n, THREADS), THREADS, 0, stream>>>(x, y, n);
        CUDA_CHECK(cudaGetLastError());
    }

    COURSE_MODULE(m) { bind(m, "WORD", WORD); }

    #ifndef COURSE_EXTENSION
    int main() try {
        const int64_t n = course::small() ? 10'007 : 1 << 26;
        const std::vector<float> x = course::random(n, 1);
        std::vector<float> expected(n);
        for (int64_t i = 0; i < n; i++) expected[i] = x[i];  // the operator as a plain loop
        course::Buffer<float> dx(x), dy(n);
        dy.poison();
        WORD(dx, dy, n, nullptr);
        course::check("v1", dy.host(), expected, 1e-6);
        course::time_versions({{"v1", [&](cudaStream_t s) { WORD(dx, dy, n, s); }}}, {.bytes = 8.0 * n});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\\n", error.what());
        return 1;
    }
    #endif
"""
PROBLEM = '''
    """TITLE: what is computed, in one line.

    x [n], contiguous, of one floating-point dtype -> y [n] of that dtype.
    """

    from lessonkit import DEVICE, Problem, Refusal, Work, case

    import torch


    def reference(x):
        raise NotImplementedError("PROBLEM: the operator in readable PyTorch, the only definition of right")


    def inputs(n, dtype=torch.float32):
        return (torch.randn(n, device=DEVICE).to(dtype),)


    def work(n, dtype):
        return Work(bytes=2 * n * dtype.itemsize, flops=n)


    PROBLEM = Problem(
        reference=reference,
        inputs=inputs,
        work=work,
        checks=(
            case("nothing to do: an empty grid is an error in CUDA", n=0),
            case("a prime: no block divides it", n=1021),
            case("one past a block: a second program", n=1025),
        ),
        benches=({"n": 2**28},),
        peers={"torch": reference},
        refuses=(Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),),
    )
'''


def lesson(name: str, problem: str, after: str, root: Path = ROOT) -> list[Path]:
    """Write the skeleton of a lesson; the files made or changed, the lesson first.

    name     in full, day2_triton_basics.lesson18_silu; of cuda_src its program too, cuda_src.25_silu
    problem  the name of a file of problems/, which is made too if it is not there
    after    the lesson, in full, that stands before it in the path of the whole course
    Raises ValueError if a name does not do, or if something stands there already, and OSError if a file cannot be
    written. Nothing is left then.
    """
    if not (named := re.fullmatch(r"(?:day\d_\w+\.(lesson)|cuda_src\.)\d\d_([a-z][a-z0-9_]*)", name)):
        raise ValueError(f"name: {name!r} is not like {LIKE}: folder, number, words")
    before, word = named[1] or "", named[2]
    folder, _, stem = name.partition(".")
    if not (root / folder).is_dir():
        raise ValueError(f"name: there is no folder {folder!r}")
    if taken := sorted(root.glob(f"{folder}/{stem.partition('_')[0]}_*")):
        last = max(int(path.stem.removeprefix(before)[:2]) for path in root.glob(f"{folder}/{before}[0-9][0-9]_*"))
        free, there = f"{before}{last + 1:02}", taken[0].relative_to(root)
        raise ValueError(f"name: {there} is there already; the first number after all others is {free}")
    file = root / folder / f"{stem}.py"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", problem):
        raise ValueError(f"problem: {problem!r} cannot be a file of problems/: use small letters, digits and _")
    path = (root / WHOLE_COURSE).read_text()
    if not (line := re.search(rf'^( *)"{re.escape(after)}",\n', path, re.MULTILINE)):
        raise ValueError(f"after: {WHOLE_COURSE} has no line with {after!r}; give a lesson's full name")
    path = f'{path[: line.end()]}{line[1]}"{name}",\n{path[line.end() :]}'

    texts = {file: CUDA_LESSON, file.with_suffix(".cu"): PROGRAM} if folder == "cuda_src" else {file: LESSON}
    if not (asked := root / "problems" / f"{problem}.py").exists():
        texts[asked] = PROBLEM
    elif not re.search(r"^PROBLEM\b", asked.read_text(), re.MULTILINE):
        raise ValueError(f"problem: problems/{problem}.py binds no PROBLEM: choose another name")
    words = {"FOLDER": folder, "STEM": stem, "WORD": word, "TITLE": word.replace("_", " ").capitalize()}
    try:
        for place, text in texts.items():
            text = dedent(text).lstrip().replace("problems.PROBLEM", f"problems.{problem}")
            for key, value in words.items():
                text = re.sub(rf"(?<![A-Z]){key}(?![A-Z])", value, text)
            write_atomically(place, text.replace('"PROBLEM: the', f'"problems/{problem}.py: the'))
        write_atomically(root / WHOLE_COURSE, path)
    except OSError:  # nothing is left half begun
        for place in texts:
            place.unlink(missing_ok=True)
        raise
    return [*texts, root / WHOLE_COURSE]
