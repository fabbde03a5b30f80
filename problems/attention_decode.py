"""Decoding: attention of a few new queries to a cache of keys that is longer than what is in use.

q [B, H, S_q, D], k and v [B, H_kv, S_k, D]. The lengths, [B] int32, say how many keys of each sequence are in use; None
stands for all. With causal=True the last query stands at the last key in use. Results as in problems/attention.py: o
and lse.
"""

import functools
import math

from lessonkit import DEVICE, Problem, Refusal, case, expect

import torch

from problems import attention as heads


def reference(q, k, v, lengths=None, causal=True, scale=None):
    """Each sequence with the keys that it has; the last query stands at its last key."""
    if lengths is None:
        return heads.reference(q, k, v, causal, None, scale)
    used = ([t[b : b + 1, :, :n] for t in (k, v)] for b, n in enumerate(lengths.tolist()))
    parts = [heads.reference(q[b : b + 1], *kv, causal, None, scale) for b, kv in enumerate(used)]
    return tuple(torch.cat(found) for found in zip(*parts, strict=True))


def expect_cache(q, k, v, lengths, causal, scale):
    """As expect_heads, where of k and v each sequence has lengths [B] int32 keys in use, or None for all."""
    scale = heads.expect_heads(q, k, v, causal, None, scale)
    if lengths is not None:
        expect(lengths=lengths, ndim=1, dtypes=(torch.int32,), contiguous=True)
        if len(lengths) != len(q):
            raise ValueError(f"lengths has {len(lengths)} entries for {len(q)} sequences: pass one each")
    return scale


def inputs(B, H, S_k, D, H_kv=None, S=1, ragged=False, causal=True, scale=None, layout="bhsd", dtype=torch.float32):
    q, k, v, *_ = heads.inputs(B, H, S, D, S_k=S_k, H_kv=H_kv, layout=layout, dtype=dtype)
    lengths = None
    if ragged:  # from nothing to all of the cache; what lies past a length is poison
        lengths = (torch.arange(B, device=DEVICE) * S_k // max(1, B - 1)).to(torch.int32)
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:], v[b, :, n:] = math.nan, math.nan
    return q, k, v, lengths, causal, scale


# fmt: off
REFUSES = (
    Refusal("lengths for another batch", lambda f: f(*heads.bad(lambda *t: (*t, torch.ones(3, device=DEVICE).int()))),
            ValueError, "lengths has 3 entries for 1"),
    Refusal("lengths in 64 bits", lambda f: f(*heads.bad(lambda *t: (*t, torch.ones(1, device=DEVICE).long()))),
            TypeError, "lengths is torch.int64"),
    *(refusal for refusal in heads.REFUSES if "window" not in refusal.why),
)
# fmt: on

WORK = functools.partial(heads.work, S=1, causal=True)
LAST = {"B": 1, "H": 4, "S_k": 512, "D": 32, "H_kv": 1}
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=WORK,
    checks=(
        case("no sequences", B=0, H=2, S_k=8, D=16),
        case("an empty cache: zeros and -inf", B=2, H=2, S_k=0, D=16),
        case("one past a step, eight heads on one, D of 24", B=2, H=8, S_k=65, D=24, H_kv=1),
        case("three queries on a cache: each sees one key more", B=1, H=4, S_k=130, D=16, H_kv=2, S=3),
        case("three queries, two keys: the first sees nothing", B=1, H=4, S_k=2, D=16, H_kv=2, S=3),
        case("lengths from 0 to all, poison behind", B=4, H=4, S_k=200, D=16, H_kv=2, ragged=True, causal=False),
        case("as a cache [B, S, H, D] lies, and two queries", B=2, H=4, S_k=140, D=16, H_kv=2, S=2, layout="bshd"),
        case("D = 256", B=1, H=2, S_k=70, D=256, H_kv=1),
        case("more than 2^31 numbers of K", gib=70, B=33, H=8, S_k=65536, D=128),
        case("many parts", gib=0.5, B=3, H=32, S_k=10_007, D=128, H_kv=4),
        case("the bytes are counted here: 8 steps, 8 parts on the interpreter's 4 SMs", **LAST),
    ),
    benches=tuple(
        {"B": B, "H": 32, "S_k": S_k, "D": D, "H_kv": H_kv, "S": S}
        for B, S_k, H_kv, D, S in (
            (1, 8192, 8, 128, 1), (1, 131072, 8, 128, 1), (16, 8192, 8, 128, 1), (64, 2048, 8, 128, 1),
            (16, 8192, 32, 128, 1), (16, 8192, 1, 128, 1), (16, 8192, 8, 64, 1), (16, 8192, 8, 128, 4),
        )
    ),
    peers={name: lambda q, k, v, lengths, causal, scale, sdpa=sdpa: sdpa(q, k, v, q.shape[2] > 1, None, scale)
           for name, sdpa in (heads.PEERS | {"FA4": heads.fa4}).items()},
    refuses=REFUSES,
)  # fmt: skip
