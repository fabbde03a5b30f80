"""Sorting 32-bit keys: bitonic networks, then radix sort
==========================================================
The kernels and what they predict are in 07_sort.cu; here they are functions of tensors, checked against torch.sort.
The fast one is 07b_onesweep.

Run it:    python cuda_src/07_sort.py
Check it:  python -m lessonkit check 07_sort
Time it:   python -m lessonkit bench 07_sort
"""

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 07_sort.cu, built at the first call
FLIP = {torch.int32: 1 << 31, torch.uint32: 0}  # inverted, the sign bit orders negative numbers before the others


def reference(keys):
    return torch.sort(keys)[0]


def bitonic(keys):
    """[n] -> [n] int32 or uint32, ascending; log2(n) (log2(n) + 1) / 2 steps, each through all of memory."""
    return _sort(kernels, "bitonic", keys)


def bitonic_shared(keys):
    """[n] -> [n] int32 or uint32, ascending; the steps within 2048 keys take place in shared memory."""
    return _sort(kernels, "bitonic_shared", keys)


def radix(keys):
    """[n] -> [n] int32 or uint32, ascending; four digits, three kernels each: count, scan, scatter."""
    return _sort(kernels, "radix", keys)


def _sort(kernels, name, keys):
    expect(keys=keys, ndim=1, dtypes=list(FLIP), contiguous=True)
    out = torch.empty_like(keys)
    scratch = torch.empty(2 * keys.numel() + 16384, dtype=torch.int32, device=keys.device)
    getattr(kernels, name)(keys, out, scratch, scratch.numel(), keys.numel(), FLIP[keys.dtype])
    return out


def inputs(n, dtype=torch.int32):
    # Of all lengths and both signs: a digit that is skipped or compared without its sign shows, and many are equal.
    keys = torch.randint(-(2**31), 2**31, (n,), device=DEVICE) >> torch.randint(0, 32, (n,), device=DEVICE)
    return (keys.to(dtype),)


def _work(n, dtype):
    return Work(bytes=2 * n * dtype.itemsize)


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


PROPERTIES = (unsigned_keys, extreme_keys)
REFUSES = (
    Refusal("two dimensions", lambda f: f(inputs(8)[0].reshape(2, 4)), ValueError, "expected 1"),
    Refusal("64-bit keys", lambda f: f(inputs(8)[0].long()), TypeError, "keys is torch.int64"),
    Refusal("not a tensor", lambda f: f([1]), TypeError, "keys must be a torch.Tensor"),
    Refusal("every second key", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
)

LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(bitonic, bitonic_shared, radix),
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one key", n=1),
        case("two keys: the smallest network", n=2),
        case("a prime: the network's right half is partly missing", n=1021),
        case("one past a bitonic tile: a step between tiles", n=2049),
        case("one past a radix tile", n=4097),
        case("counts of more tiles than a block scans at a time", gib=1, n=1024 * 4096 + 4097),
        case("as many keys as torch.sort takes: bytes past 2^33", gib=60, n=2**31 - 1),
        case("whole tiles, on which requests are counted", n=4096),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26)),
    work=_work,
    wrong=(
        Mutant("compares past the end", "bitonic_step_kernel", "right < n", "right <= n", "bitonic", "out of bounds"),
        Mutant("no mirror image in the first step", "long_steps", "half == run / 2", "false", "bitonic"),
        Mutant("stops when runs of n / 2 are sorted", "bitonic", "run < 2 * n", "run < n", "bitonic"),
        Mutant(
            "missing keys are small",
            "bitonic_tile_kernel",
            ": ~flip",
            ": flip",
            "bitonic_shared",
        ),
        Mutant(
            "no barrier between steps",
            "bitonic_tile_kernel",
            "half /= 2) {\n            __syncthreads();",
            "half /= 2) {",
            "bitonic_shared",
            "race",
        ),
        Mutant("the sign is a number", "compare_exchange", "(a ^ flip) > (b ^ flip)", "a > b", "bitonic_shared"),
        Mutant(
            "ranks within a warp only: the warps' keys fall on one another",
            "scatter_kernel",
            "place += count;",
            "",
            "radix",
            "race",
        ),
        Mutant(
            "no barrier before the warps' counts are read",
            "scatter_kernel",
            "flip);\n    __syncthreads();\n    unsigned place",
            "flip);\n    unsigned place",
            "radix",
            "race",
        ),
        Mutant(
            "missing keys written too", "scatter_kernel", "+ tile.place(k) < n", "+ 0 < n", "radix", "out of bounds"
        ),
    ),
    properties=PROPERTIES,
    peers={"torch": reference},
    claims={
        "bitonic_step_kernel": ("no spills", "no shared memory"),
        "bitonic_tile_kernel": ("no spills",),
        "scatter_kernel": ("no spills",),
    },
    refuses=REFUSES,
    dtypes=(torch.int32,),
    bench_dtype=torch.int32,
)

if __name__ == "__main__":
    LESSON.main()
