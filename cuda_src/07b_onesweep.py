"""Radix sort in one sweep a digit
===================================
The kernels and what they predict are in 07b_onesweep.cu; here they are functions of tensors, checked against
torch.sort. Where radix sort comes from is 07_sort.

Run it:    python cuda_src/07b_onesweep.py
Check it:  python -m lessonkit check 07b_onesweep
Time it:   python -m lessonkit bench 07b_onesweep
"""

import os
from contextlib import contextmanager

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 07b_onesweep.cu, built at the first call
FLIP = {torch.int32: 1 << 31, torch.uint32: 0}  # inverted, the sign bit orders negative numbers before the others


def reference(keys):
    return torch.sort(keys)[0]


def radix_ordered(keys):
    """[n] -> [n] int32 or uint32, ascending; three kernels a digit, keys put in order within a tile before writing."""
    return _sort("radix_ordered", keys)


def onesweep(keys):
    """[n] -> [n] int32 or uint32, ascending; one kernel a digit, 256 decoupled look-backs side by side."""
    with _together():
        return _sort("onesweep", keys)


@contextmanager
def _together():
    """Emulated, blocks run one after the other unless told otherwise, and nobody would ever have to look far back."""
    os.environ["COURSE_EMU_BLOCKS"] = "7"
    try:
        yield
    finally:
        del os.environ["COURSE_EMU_BLOCKS"]


def _sort(name, keys):
    expect(keys=keys, ndim=1, dtypes=list(FLIP), contiguous=True)
    out = torch.empty_like(keys)
    scratch = torch.empty(2 * keys.numel() + 16384, dtype=torch.int32, device=keys.device)
    getattr(kernels, name)(keys, out, scratch, scratch.numel(), keys.numel(), FLIP[keys.dtype])
    return out


def _cub(keys):
    if DEVICE.type != "cuda":
        raise ImportError("CUB needs nvcc and a GPU")
    return _sort("cub", keys)


def inputs(n, dtype=torch.int32):
    # Of all lengths and both signs: a digit that is skipped or compared without its sign shows, and many are equal.
    keys = torch.randint(-(2**31), 2**31, (n,), device=DEVICE) >> torch.randint(0, 32, (n,), device=DEVICE)
    return (keys.to(dtype),)


def unsigned_keys(sort):
    """As uint32 the same bits have another order: those with the highest bit come last."""
    (keys,) = inputs(1000)
    bits = sort(keys.view(torch.uint32)).view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(bits, (keys.long() & 0xFFFFFFFF).sort()[0])


def extreme_keys(sort):
    """The largest key is what missing keys are taken for: as a key it must not be lost. All equal, sorted, reversed."""
    least, most = -(2**31), 2**31 - 1
    for keys in ([most] * 700, [least] * 300 + [most] * 5, list(range(-400, 400)), list(range(400, -400, -1)), [0, -1]):
        t = torch.tensor(keys, dtype=torch.int32, device=DEVICE)
        assert torch.equal(sort(t), t.sort()[0]), f"{len(keys)} keys from {keys[0]}"


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(radix_ordered, onesweep),
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one key", n=1),
        case("a prime: one tile, partly empty", n=1021),
        case("one past radix_ordered's tile", n=4097),
        case("emulated: three whole tiles of onesweep, and a key", n=3 * 1536 + 1),
        case("counts of more tiles than a block scans at a time", gib=1, n=1024 * 4096 + 4097),
        case("counts that a look-back word cannot hold", gib=30, n=2**30 + 1),
        case("as many keys as torch.sort takes: bytes past 2^33", gib=60, n=2**31 - 1),
        case("whole tiles, on which requests are counted", n=3 * 4096),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26, 2**28)),
    work=lambda n, dtype: Work(bytes=2 * n * dtype.itemsize),
    wrong=(
        Mutant(
            "a COUNT taken for a SUM: tiles write over each other",
            "onesweep_kernel",
            "(word[k] & SUM) != 0",
            "word[k] != EMPTY",
            "onesweep",
            "race",
        ),
        Mutant(
            "a SUM without the tile itself: two tiles write to one place",
            "onesweep_kernel",
            "SUM | (before + count)",
            "SUM | before",
            "onesweep",
            "race",
        ),
        Mutant(
            "where the tile's digit begins is not taken off",
            "onesweep_kernel",
            "before - begin",
            "before",
            "onesweep",
            "race",
        ),
        Mutant(
            "no barrier before the warps' counts are added up",
            "order",
            "    __syncthreads();\n    unsigned count",
            "    unsigned count",
            "radix_ordered",
            "race",
        ),
        Mutant("missing keys written too", "write", "if (place < keys) ", "", "radix_ordered", "out of bounds"),
        Mutant(
            "the counts of other warps left out",
            "order",
            "            next += here;\n",
            "",
            "radix_ordered",
            "race",
        ),
        Mutant(
            "digits counted without their sign",
            "onesweep_with",
            "starts, n, flip);",
            "starts, n, 0);",
            "onesweep",
            "out of bounds",
        ),
        Mutant("the last pass is missing", "onesweep_with", "pass < PASSES; pass++", "pass < 2; pass++", "onesweep"),
    ),
    properties=(unsigned_keys, extreme_keys),
    peers={"torch": reference, "CUB": _cub},
    claims={
        "histogram_kernel": ("no spills",),
        "ordered_kernel": ("no spills",),
    },
    refuses=(
        Refusal("two dimensions", lambda f: f(inputs(8)[0].reshape(2, 4)), ValueError, "expected 1"),
        Refusal("64-bit keys", lambda f: f(inputs(8)[0].long()), TypeError, "keys is torch.int64"),
        Refusal("not a tensor", lambda f: f([1]), TypeError, "keys must be a torch.Tensor"),
        Refusal("every second key", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
    ),
    dtypes=(torch.int32,),
    bench_dtype=torch.int32,
)

if __name__ == "__main__":
    LESSON.main()
