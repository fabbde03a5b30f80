"""Vector add in CUDA C++: one thread per element, a grid-stride loop, 16 bytes per load
==================================================================================
The kernels and their predictions are in 02_vector_add.cu. This file wraps them as functions of tensors and checks them
against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator watches every address,
barrier and race.

Run it:    python3 course.py run 02_vector_add
Check it:  python3 course.py check 02_vector_add
Time it:   python3 course.py bench 02_vector_add
"""

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect

import torch

from problems.vector_add import PROBLEM, inputs

kernels = cuda.extension(__file__)  # 02_vector_add.cu, built at the first call


def add_one(x, y):
    """[...] + [...] -> [...] float32, one thread per element."""
    z = _prepare(x, y)
    kernels.add_one(x, y, z, z.numel())
    return z


def add_grid_stride(x, y):
    """[...] + [...] -> [...] float32, eight blocks per SM, each thread taking every (grid size)-th element."""
    z = _prepare(x, y)
    kernels.add_grid_stride(x, y, z, z.numel())
    return z


def add_vectorized(x, y):
    """[...] + [...] -> [...] float32, 16 bytes per thread and array, wherever the arrays begin."""
    z = _prepare(x, y)
    kernels.add_vectorized(x, y, z, z.numel())
    return z


def _prepare(x, y):
    expect(x=x, y=y, dtypes=[torch.float32], same_shape=True, contiguous=True)
    return torch.empty_like(x)


def head_and_tail(add):
    """A result that begins where x and y do, `start` floats past a multiple of 16 bytes, has head, body and tail."""
    for start in range(4):
        for n in (0, 1, 2, 3, 4, 5, 11, 1031):
            x, y = inputs(n, start)
            z = torch.full((start + n + 1,), -7.0, device=DEVICE)
            getattr(kernels, add.__name__)(x, y, z[start : start + n], n)
            assert torch.equal(z[start : start + n], x + y), f"start {start}, n {n}"
            assert (z[:start] == -7).all(), "written before the beginning"
            assert z[-1] == -7, "written past the end"


LARGE = {"n": 2**28}

LESSON = Lesson(
    about=About(
        teaches="device memory, transfers pageable, pinned and managed; grid-stride loops; 16 bytes per load; "
        "bytes in flight",
        hours=1.25,
        star=True,
        operator="vector add",
        language="CUDA C++",
        pictures=("coordinates",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(add_one, add_grid_stride, add_vectorized),
    predicted=(
        Prediction(
            rung=add_one,
            at=LARGE,
            percent_of_limit=64,
            why="800 ns is the latency of a memory that is fully loaded; with 16 KB in flight on an SM it answers "
            "sooner.",
        ),
        Prediction(rung=add_grid_stride, at=LARGE, times=1, over=add_one),
        Prediction(rung=add_vectorized, at=LARGE, percent_of_limit=100),
    ),
    checks=(
        *PROBLEM.checks,
        case("more than the emulated machine's 32 blocks: the grid-stride loop turns twice", n=8192 + 300),
        case("whole blocks, on which requests are counted", n=4096),
    ),
    wrong=(
        Mutant("one thread too many", "add_one_kernel", "i < n", "i <= n", "add_one", "out of bounds"),
        Mutant("the last element is nobody's", "add_one_kernel", "i < n", "i < n - 1", "add_one", "nan"),
        Mutant(
            "blocks rounded down",
            "add_one",
            "course::ceil_div(n, THREADS)",
            "std::max<int64_t>(1, n / THREADS)",
            "add_one",
            "nan",
        ),
        Mutant("the loop turns once", "add_grid_stride_kernel", "i += stride", "i += n", "add_grid_stride", "nan"),
        Mutant("x twice", "add_vectorized_kernel", "a.w + b.w", "a.w + a.w", "add_vectorized"),
        Mutant("no tail", "add_vectorized_kernel", "t < n", "t < 4 * quads", "add_vectorized", "nan"),
        Mutant(
            "a float4 wherever x begins",
            "add_vectorized",
            "if (past(x) != past(z) || past(y) != past(z))",
            "if (false)",
            "add_vectorized",
            "misaligned",
        ),
    ),
    properties=(head_and_tail,),
    claims={
        "add_one_kernel": ("no spills", "no shared memory"),
        "add_vectorized_kernel": ("16-byte loads", "16-byte stores", "no spills"),
    },
    passes={add_one: 1.0, add_grid_stride: 1.0, add_vectorized: 1.0},
    counts={
        add_one: {"sectors a request": 4.0},
        add_grid_stride: {"sectors a request": 4.0},
        add_vectorized: {"sectors a request": 16.0},
    },
    refuses=(
        *PROBLEM.refuses,
        Refusal("not float32", lambda f: f(*(t.half() for t in inputs(8))), TypeError, "x is torch.float16"),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)

if __name__ == "__main__":
    LESSON.main()
