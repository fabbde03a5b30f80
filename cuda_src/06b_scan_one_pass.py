"""Prefix sums in one pass: decoupled look-back
===============================================
The kernels and what they predict are in 06b_scan_one_pass.cu; here they are functions of tensors, checked against
torch.cumsum. How one block scans is 06_scan.

Run it:    python cuda_src/06b_scan_one_pass.py
Check it:  python -m lessonkit check 06b_scan_one_pass
Time it:   python -m lessonkit bench 06b_scan_one_pass
"""

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 06b_scan_one_pass.cu, built at the first call
SUFFIX = {torch.float32: "float", torch.int32: "int"}


def reference(x):
    return torch.cumsum(x, 0, dtype=x.dtype)  # reads n, writes n


def propagate(x):
    """[n] -> [n] float32 or int32: scan tiles, scan their sums, add those: 4n of traffic."""
    return _scan(kernels, "propagate", x)


def reduce_then_scan(x):
    """[n] -> [n] float32 or int32: sum tiles, scan the sums, scan tiles from there: 3n of traffic."""
    return _scan(kernels, "reduce_then_scan", x)


def look_back(x):
    """[n] -> [n] float32 or int32 in one pass, 2n of traffic. The last bits of float sums may differ between runs."""
    with cuda.together():
        return _scan(kernels, "look_back", x)


def _scan(kernels, name, x):
    expect(x=x, ndim=1, dtypes=list(SUFFIX), contiguous=True)
    y = torch.empty_like(x)
    scratch = torch.empty(x.numel() // 512 + 1024, dtype=x.dtype, device=x.device)
    getattr(kernels, f"{name}_{SUFFIX[x.dtype]}")(x, y, scratch, scratch.numel(), x.numel())
    return y


def _cub(x):
    if DEVICE.type != "cuda":
        raise ImportError("CUB needs nvcc and a GPU")
    return _scan(kernels, "cub", x)


def inputs(n, start=0, dtype=torch.float32):
    # Sums of normal values wander off to about sqrt(n): the prefix of a wrong tile is far outside the tolerance.
    # Integers are compared exactly, and differ in sign, so that their sums stay below 2^31. `start`: so many elements
    # into an allocation.
    if dtype == torch.int32:
        return (torch.randint(-1000, 1000, (start + n,), device=DEVICE, dtype=dtype)[start:],)
    return (torch.randn(start + n, device=DEVICE).to(dtype)[start:],)


def _work(n, dtype, start=0):
    return Work(bytes=2 * n * dtype.itemsize, flops=n)


def wraps_around(scan):
    """int32 sums past 2^31 wrap, as torch.cumsum's do."""
    x = torch.full((9000,), 2_000_000_011, dtype=torch.int32, device=DEVICE)
    assert torch.equal(scan(x), torch.cumsum(x.long(), 0).to(torch.int32))


def infinity_stays(scan):
    """After an infinity every sum is infinite, after its opposite NaN; nothing before it is touched."""
    x = torch.ones(9000, device=DEVICE)
    x[5000], x[7000] = float("inf"), float("-inf")
    y = scan(x)
    assert y[:5000].isfinite().all()
    assert (y[5000:7000] == float("inf")).all()
    assert y[7000:].isnan().all()


PROPERTIES = (wraps_around, infinity_stays)
PEERS = {"torch": reference, "CUB": _cub}
REFUSES = (
    Refusal("two dimensions", lambda f: f(inputs(8)[0].reshape(2, 4)), ValueError, "expected 1"),
    Refusal("not a float", lambda f: f(inputs(8)[0].half()), TypeError, "x is torch.float16"),
    Refusal("not a tensor", lambda f: f([1.0]), TypeError, "x must be a torch.Tensor"),
    Refusal("every second element", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
    Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_()), ValueError, "requires grad"),
)

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(propagate, reduce_then_scan, look_back),
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one element: no whole group of four", n=1),
        case("a prime: one tile, partly empty", n=1021),
        case("one past a tile: the first sum that is passed on", n=4097),
        case("one past a tile of look_back", n=8193),
        case("an address where no float4 may be", n=4100, start=1),
        case("35 tiles and a tail: more than one window to look back over", n=35 * 8192 + 1021),
        case("three levels of sums", gib=1, n=2**24 + 4097),
        case("offsets past 2^31", gib=60, n=2**31 + 1),
        case("whole tiles, on which requests are counted", n=16 * 4096),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26, 2**28)),
    work=_work,
    wrong=(
        Mutant("a SUM taken for a PREFIX", "look_back", "== PREFIX)", "!= EMPTY)", "look_back"),
        Mutant("the nearest predecessor forgotten", "look_back", "last = tile - 1", "last = tile - 2", "look_back"),
        Mutant(
            "lanes past the nearest prefix counted too",
            "look_back",
            "known & (prefix ^ (prefix - 1));",
            "known;",
            "look_back",
        ),
        Mutant(
            "the prefix without the tile itself",
            "look_back_kernel",
            "PREFIX, prefix + tile_sum",
            "PREFIX, prefix",
            "look_back",
        ),
        Mutant(
            "no barrier before the prefix is read",
            "look_back_kernel",
            "    __syncthreads();\n    part.store",
            "    part.store",
            "look_back",
            "race",
        ),
        Mutant(
            "words of the last scan in scratch",
            "look_back_with",
            "    CUDA_CHECK(cudaMemsetAsync(words, 0, size_t(tiles) * sizeof(Word), stream));\n",
            "",
            "look_back",
            "nan",
        ),
        Mutant("the first tile's sum added to itself", "add_kernel", "sums[tile - 1]", "sums[tile]", "propagate"),
        Mutant("the prefix itself is left out", "look_back", "(prefix ^ (prefix - 1))", "(prefix - 1)", "look_back"),
        Mutant(
            "a tile's own sum in its prefix",
            "scan_from_kernel",
            "sums[blockIdx.x - 1]",
            "sums[blockIdx.x]",
            "reduce_then_scan",
        ),
    ),
    properties=PROPERTIES,
    peers=PEERS,
    claims={
        "propagate_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "reduce_kernel": ("16-byte loads", "no spills"),
        "look_back_kernel": ("16-byte loads", "16-byte stores", "no spills"),
    },
    passes={propagate: 2.0, reduce_then_scan: 1.5, look_back: 1.0},
    refuses=REFUSES,
    dtypes=(torch.float32, torch.int32),
    bench_dtype=torch.float32,
)

if __name__ == "__main__":
    LESSON.main()
