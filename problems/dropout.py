"""Dropout whose mask is a function of (seed, position): y = x / (1 - p) where it keeps an element, 0 elsewhere.

x [n], contiguous, floating-point; p from 0 to 1; seed from 0 to 2^63 - 1 -> y [n] in x's dtype. Element i is kept if
word i % 4 of Philox4x32-10 (counter i // 4, key seed) is at least p * 2^32 (Salmon et al., SC 2011, section 4.3).
"""

import math
from functools import lru_cache

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, case

import torch
import torch.nn.functional as F

LOW = 0xFFFFFFFF  # the low 32 bits of an int64


def _philox_oracle(counter, key):
    """Philox4x32-10: four int64 tensors and two ints, all below 2^32 -> four int64 tensors below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products: int64 wraps, its bits are still right
        c0, c1, c2, c3 = (b >> 32) & LOW ^ c1 ^ k0, b & LOW, (a >> 32) & LOW ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def _keep_mask(n, p, seed, device):
    """[n] bool. Element i is kept if word i % 4 of Philox(counter i // 4, key seed) is at least p * 2^32."""
    kept = []
    for call in torch.arange(-(-n // 4), device=device).split(2**24):  # in parts: int64 is 4 times the output
        counter = (call & LOW, call >> 32, call * 0, call * 0)
        words = torch.stack(_philox_oracle(counter, (seed & LOW, seed >> 32)), dim=-1)
        kept.append(words.flatten() >= round(p * 2**32))
    return torch.cat(kept)[:n] if kept else torch.empty(0, dtype=torch.bool, device=device)


def reference(x, p, seed):
    # torch.dropout multiplies by a 0/1 mask, so a dropped inf turns into NaN; here a dropped element is 0.
    return torch.where(_keep_mask(x.numel(), p, seed, x.device).view(x.shape), x / (1 - p) if p < 1 else x, 0.0)


def inputs(n, p=0.3, seed=1234, dtype=torch.float32):
    # |x| >= 1, so that a dropped element differs from a kept one; 0.3, so that keep and drop cannot be exchanged.
    x = torch.randn(n, device=DEVICE)
    return (x + x.sign() + (x == 0)).to(dtype), p, seed


def _kept(rung, n, p, seed):
    return rung(torch.ones(n, device=DEVICE), p, seed) != 0


def _near(count, n, q):
    """A count of n draws with probability q is within 5 standard deviations of its mean."""
    assert abs(count - n * q) <= 5 * math.sqrt(n * q * (1 - q)), f"{count} of {n}, expected about {n * q:.0f}"


def known_answers(rung):
    """The oracle gives the published vectors (Random123, kat_vectors: philox4x32 10), and the rung its mask."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((LOW, LOW, LOW, LOW), (LOW, LOW), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(w) for w in _philox_oracle(tuple(torch.tensor(c) for c in counter), key)) == answer
    large = DEVICE.type == "cuda" and torch.cuda.mem_get_info()[1] > 60 * 2**30
    for n in (5000, 2**31 + 5) if large else (5000,):
        assert torch.equal(_kept(rung, n, 0.4, 7), _keep_mask(n, 0.4, 7, DEVICE))


def statistics(rung):
    """The share kept, the mean, and no correlation between seeds or between neighbours."""
    n, p = 2**15, 0.3
    kept = _kept(rung, n, p, 1)
    assert torch.equal(kept, _kept(rung, n, p, 1)), "the same seed gave another mask"
    _near(int(kept.sum()), n, 1 - p)
    for other in (2, 1 + 2**32):
        _near(int((kept == _kept(rung, n, p, other)).sum()), n, p * p + (1 - p) ** 2)
    for lag in (1, 2, 3, 4, 1024):
        _near(int((kept[lag:] == kept[:-lag]).sum()), n - lag, p * p + (1 - p) ** 2)
    mean = float(rung(torch.ones(n, device=DEVICE), p, 1).mean())
    assert abs(mean - 1) < 5 * math.sqrt(p / (1 - p) / n), f"mean {mean}, expected 1"


def extremes(rung):
    """p = 0 is the identity and p = 1 all zeros, also where x is inf or NaN."""
    x = torch.tensor([1.5, -math.inf, math.nan, 3.0, -2.0], device=DEVICE)
    assert torch.equal(rung(x, 0.0, 3).nan_to_num(7.0), x.nan_to_num(7.0))
    assert torch.equal(rung(x, 1.0, 3), torch.zeros_like(x))


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda n, dtype, **_: Work(bytes=2 * n * dtype.itemsize),
    checks=(
        case("nothing to do", n=0),
        case("one element, three words of its call unused", n=1),
        case("p = 0: everything kept, the scale is 1", n=130, p=0),
        case("p = 1: everything dropped, 1 / (1 - p) is no number", n=130, p=1),
        case("p a hair under 1: the threshold must not wrap to 0", n=130, p=1 - 2.0**-40),
        case("seed 1: Triton would make it a constant", n=129, seed=1),
        case("a seed of more than 32 bits: its high half is the second key", n=1021, seed=2**40 + 5),
        case("two blocks and a ragged end: a counter that restarts in each block shows", n=4099, p=0.5),
    ),
    benches=tuple({"n": n} for n in (2**20, 2**24, 2**26, 2**28)),
    peers={
        "torch": lambda x, p, seed: F.dropout(x, p),
        "torch.compile": by_inductor(lambda x, p, seed: F.dropout(x, p)),
    },
    peers_differ="they draw other random numbers",
    properties=(known_answers, statistics, extremes),
    refuses=(
        Refusal("no probability", lambda f: f(inputs(8)[0], 1.5, 0), ValueError, "p is 1.5"),
        Refusal("p is NaN", lambda f: f(inputs(8)[0], math.nan, 0), ValueError, "p is nan"),
        Refusal("negative seed", lambda f: f(inputs(8)[0], 0.5, -1), ValueError, "seed is -1"),
        Refusal("a float for a seed", lambda f: f(inputs(8)[0], 0.5, 1.0), ValueError, "seed is 1.0"),
        Refusal("not a float", lambda f: f(inputs(8)[0].long(), 0.5, 1), TypeError, "x is torch.int64"),
        Refusal("every second element", lambda f: f(inputs(8)[0][::2], 0.5, 1), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(inputs(8)[0].requires_grad_(), 0.5, 1), ValueError, "requires grad"),
    ),
)


def _torch_backward(dy, p, seed):
    """PyTorch's backward reads the mask that its forward stored, a byte an element."""
    return torch.ops.aten.native_dropout_backward(dy, _stored_mask(dy, p), 1 / (1 - p))


@lru_cache(maxsize=1)
def _stored_mask(dy, p):
    return torch.rand(dy.shape, device=dy.device) >= p


# The gradient of dropout is dropout of dy with the same mask. Asked of course_ops alone.
PROBLEM_BACKWARD = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda n, dtype, **_: Work(bytes=2 * n * dtype.itemsize),
    peers={"torch": _torch_backward},
    peers_differ="they draw other random numbers",
)
