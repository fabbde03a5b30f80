"""Sort: keys [n], int32 or uint32, contiguous -> [n], ascending."""

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch


def reference(keys):
    return torch.sort(keys)[0]


def inputs(n, dtype=torch.int32):
    # Of all lengths and both signs: a digit that is skipped or compared without its sign shows, and many are equal.
    keys = torch.randint(-(2**31), 2**31, (n,), device=DEVICE) >> torch.randint(0, 32, (n,), device=DEVICE)
    return (keys.to(dtype),)


def work(n, dtype):
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


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("nothing to do: an empty grid is an error in CUDA", n=0),
        case("one key", n=1),
        case("two keys: the smallest network", n=2),
        case("a prime: no tile divides it, and no power of two is near", n=1021),
        case("one past a tile of 2048", n=2049),
        case("one past a tile of 4096", n=4097),
        case("counts of more tiles than a block scans at a time", gib=1, n=1024 * 4096 + 4097),
        case("as many keys as torch.sort takes: bytes past 2^33", gib=60, n=2**31 - 1),
    ),
    benches=tuple({"n": n} for n in (98432, 2**20, 2**22, 2**24, 2**26, 2**28)),
    peers={"torch": reference},
    properties=(unsigned_keys, extreme_keys),
    refuses=(
        Refusal("two dimensions", lambda f: f(inputs(8)[0].reshape(2, 4)), ValueError, "expected 1"),
        Refusal("64-bit keys", lambda f: f(inputs(8)[0].long()), TypeError, "keys is torch.int64"),
        Refusal("not a tensor", lambda f: f([1]), TypeError, "keys must be a torch.Tensor"),
        Refusal("every second key", lambda f: f(inputs(8)[0][::2]), ValueError, "contiguous"),
    ),
    dtypes=(torch.int32,),
    bench_dtype=torch.int32,
)
