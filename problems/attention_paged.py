"""Decoding from pages: attention of a few new queries to keys and values that lie in blocks, in any order.

q [B, S_q, H, D]; k_cache and v_cache [num_blocks, block_size, H_kv, D]. lengths [B] int32: how many keys of each
sequence are in use. table [B, max_blocks] int32: key j of sequence b is in block table[b, j // block_size], at
j % block_size. table None: sequence b has block b. causal: the last query stands at the last key in use. window: each
query sees the last `window` keys up to its own. Results: o [B, S_q, H, D_v], lse [B, H, S_q] in fp32.
"""

import math
from importlib import import_module

from lessonkit import DEVICE, Problem, Refusal, Unsupported, Work, case

import torch
import torch.nn.functional as F

from problems import attention as heads


def gathered(cache, lengths, table):
    """The keys or values in use of each sequence, [H_kv, length, D]."""
    for b, n in enumerate(lengths.tolist()):
        blocks = [b] if table is None else table[b, : -(-n // cache.shape[1])].tolist()
        yield cache[blocks].flatten(0, 1)[:n].transpose(0, 1)


def reference(q, k_cache, v_cache, lengths, table=None, causal=True, window=None, scale=None, softcap=None):
    """Each sequence alone, with the keys that it has."""
    (B, S_q, H, _), D_v = q.shape, v_cache.shape[-1]
    o = q.new_empty(B, S_q, H, D_v)
    lse = q.new_empty(B, H, S_q, dtype=torch.promote_types(q.dtype, torch.float32))
    kv = zip(gathered(k_cache, lengths, table), gathered(v_cache, lengths, table), strict=True)
    for b, (k, v) in enumerate(kv):
        low = max(0, k.shape[1] - S_q + 1 - window) if window else 0  # what lies before may be gone
        k, v = k[:, low:], v[:, low:]
        found, lse[b] = heads.reference(q[b : b + 1].transpose(1, 2), k[None], v[None], causal, window, scale, softcap)
        o[b] = found[0].transpose(0, 1)
    return o, lse


def sequence_lengths(B, S_k, spread):
    """All S_k; or from nothing to S_k ("even"), or one of S_k among many of S_k / 16 ("one long")."""
    if spread == "even":
        return [b * S_k // max(1, B - 1) for b in range(B)]
    return [S_k] + [S_k // 16 if spread == "one long" else S_k] * (B - 1) if B else []


def inputs(
    B, H, S_k, D, H_kv=None, block_size=16, S=1, spread="", causal=True, window=None, scale=None, D_v=None,
    paged=True, poison=True, dtype=torch.float32,
):  # fmt: skip
    # Blocks in a random order, two of them in no table. What is not in use is NaN: other blocks, what lies past a
    # length and, with a window, before it. The entries of the table past a length are outside the cache.
    used = sequence_lengths(B, S_k, spread)
    max_blocks = -(-S_k // block_size) + 1
    needed = [-(-n // block_size) for n in used]
    order = torch.randperm(sum(needed) + 2).to(torch.int32)
    table = torch.full((B, max_blocks), 2**31 - 1, dtype=torch.int32)
    for b, row in enumerate(order[: sum(needed)].split(needed)):
        table[b, : len(row)] = row
    shape = (len(order), block_size) if paged else (B, S_k)
    kv_heads = H_kv or H
    q = (torch.randn(B, S, H, D, device=DEVICE) + 1).to(dtype)
    caches = []
    for mean, columns in ((-1.0, D), (0.5, D_v or D)):
        cache = torch.randn(*shape, kv_heads, columns, dtype=dtype, device=DEVICE).add_(mean)
        if poison:
            whole = torch.full_like(cache, math.nan)
            for b, n in enumerate(used):
                low = max(0, n - S + 1 - window) if window else 0
                at = torch.arange(low, n)
                blocks, slots = (table[b, at // block_size].long(), at % block_size) if paged else (b, at)
                whole[blocks, slots] = cache[blocks, slots]
            cache = whole
        caches.append(cache)
    lengths = torch.tensor(used, dtype=torch.int32).to(DEVICE)
    return q, *caches, lengths, table.to(DEVICE) if paged else None, causal, window, scale


def work(
    B, H, S_k, D, dtype, H_kv=None, block_size=16, S=1, spread="", causal=True, window=None, D_v=None, paged=True, **_
):
    """Keys that some query sees, and the table's entries of their blocks, are read once."""
    used, columns = sequence_lengths(B, S_k, spread), D + (D_v or D)
    seen = [min(n, S - 1 + window) if window else n for n in used]
    flops = sum(2 * H * columns * heads.pairs(S, n, causal, window) for n in used)
    bytes = (B * S * H + (H_kv or H) * sum(seen)) * columns * dtype.itemsize + 4 * B * H * S + 4 * B
    return Work(bytes=bytes + (4 * sum(-(-n // block_size) for n in seen) if paged else 0), flops=flops)


def a_block_belongs_to_whom_the_table_says(rung):
    """Blocks that change places, and the table with them, change nothing, to the bit. A shared block is read twice."""
    q, k, v, lengths, table, *rest = inputs(2, 4, 100, 16, H_kv=2, dtype=torch.float16)
    before = rung(q, k, v, lengths, table, *rest)
    order = torch.randperm(len(k), device=DEVICE)
    place = order.argsort().to(torch.int32)
    moved = torch.where(table < len(k), place[table.clamp(max=len(k) - 1).long()], table)
    after = rung(q, k[order], v[order], lengths, moved, *rest)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    table[1] = table[0]
    q[1] = q[0]
    o, lse = rung(q, k, v, lengths, table, *rest)
    torch.testing.assert_close(o[1], o[0], rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(lse[1], lse[0])


def a_sequence_is_alone(rung):
    """Neither the length of another sequence nor its keys change a result by more than the order of additions."""
    q, k, v, lengths, table, *rest = inputs(3, 2, 130, 16, spread="even", dtype=torch.float16)
    whole = rung(q, k, v, lengths, table, *rest)
    for b in range(3):
        one = slice(b, b + 1)
        alone = rung(q[one], k, v, lengths[one], table[one], *rest)
        for a, e in zip(alone, whole, strict=True):
            torch.testing.assert_close(a, e[one], rtol=4e-3, atol=4e-3)


def same_each_time(rung):
    """Two runs agree to the bit: parts are merged in their order."""
    args = inputs(2, 4, 300, 16, H_kv=1, spread="one long", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(rung(*args), rung(*args), strict=True))


# ---- Peers ----------------------------------------------------------------------------------------------------------


def fa4(q, k_cache, v_cache, lengths, table, causal, window, scale):
    """FlashAttention in CuTe's Python with page_table, or with a cache in one piece a sequence."""
    return import_module("flash_attn.cute").flash_attn_varlen_func(
        q, k_cache, v_cache, seqused_k=lengths, page_table=table, causal=causal, softmax_scale=scale,
        window_size=(window and window - 1, None), return_lse=True,
    )[:2]  # fmt: skip


def sdpa_gathered(q, k_cache, v_cache, lengths, table, causal, window, scale):
    """Every block of the table copied to its place, then PyTorch's attention with a mask: what paging saves."""
    if q.shape[1] > 1 or window:
        raise Unsupported("this peer is asked for one query and no window")
    if table is not None:
        k_cache, v_cache = (t[table.clamp(0, len(t) - 1).long()].flatten(1, 2) for t in (k_cache, v_cache))
    mask = torch.arange(k_cache.shape[1], device=q.device) < lengths[:, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    o = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=scale, enable_gqa=True)
    return o.transpose(1, 2).masked_fill((lengths == 0)[:, None, None, None], 0), None


PEERS = {"FA4": fa4, "SDPA gathered": sdpa_gathered}


def _bad(**changes):
    names = ("q", "k_cache", "v_cache", "lengths", "table", "causal", "window", "scale")
    given = dict(zip(names, inputs(2, 4, 40, 16, H_kv=2, block_size=8), strict=True))
    return [change(given[name]) if (change := changes.get(name)) else t for name, t in given.items()]


# fmt: off
REFUSES = (
    Refusal("a table in 64 bits", lambda f: f(*_bad(table=lambda t: t.long())), TypeError,
            "block_table is torch.int64"),
    Refusal("lengths in 64 bits", lambda f: f(*_bad(lengths=lambda t: t.long())), TypeError,
            "cache_seqlens is torch.int64"),
    Refusal("a table for another batch", lambda f: f(*_bad(table=lambda t: t[:1])), ValueError,
            r"block_table is \(1, 6\)"),
    Refusal("a length too few", lambda f: f(*_bad(lengths=lambda t: t[:1])), ValueError, r"cache_seqlens is \(1,\)"),
    Refusal("a cache without a table", lambda f: f(*_bad(table=lambda t: None)), ValueError, "pass block_table"),
    Refusal("heads and tokens exchanged", lambda f: f(*_bad(q=lambda t: t[:, :, :3])), ValueError, "q has 3 heads"),
    Refusal("head_dim of k", lambda f: f(*_bad(k_cache=lambda t: t[..., :8])), ValueError, "k_cache has head_dim 8"),
    Refusal("a block too few of v", lambda f: f(*_bad(v_cache=lambda t: t[1:])), ValueError, "v_cache is"),
    Refusal("a cache in another dtype", lambda f: f(*_bad(k_cache=lambda t: t.half())), TypeError,
            "k_cache is torch.float16"),
    Refusal("another device", lambda f: f(*_bad(table=lambda t: t.to("meta"))), ValueError, "block_table is on meta"),
    Refusal("a window without causal", lambda f: f(*_bad(causal=lambda t: False, window=lambda t: 4)), ValueError,
            "needs causal=True"),
    Refusal("gradient lost", lambda f: f(*_bad(q=lambda t: t.requires_grad_())), ValueError, "q requires grad"),
)
# fmt: on
LAST = {"B": 2, "H": 8, "S_k": 512, "D": 32, "H_kv": 2, "block_size": 64}

PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=work,
    checks=(
        case("no sequences", B=0, H=2, S_k=8, D=16),
        case("nothing in use: zeros and -inf", B=2, H=2, S_k=0, D=16),
        case("one key", B=2, H=2, S_k=1, D=16),
        case("exactly a block, and a step", B=2, H=4, S_k=64, D=16, H_kv=2, block_size=64),
        case("a key past a block; eight heads on one, D of 24", B=2, H=8, S_k=65, D=24, H_kv=1, block_size=64),
        case("blocks of 5, which no step is a multiple of", B=1, H=2, S_k=137, D=16, block_size=5),
        case("blocks of one key", B=1, H=2, S_k=70, D=16, block_size=1),
        case("lengths from 0 to all", B=4, H=4, S_k=1200, D=16, H_kv=2, spread="even"),
        case("one long among short ones: its parts are merged", B=5, H=2, S_k=1300, D=16, spread="one long"),
        case("more queries than keys: the first see nothing", B=2, H=4, S_k=2, D=16, H_kv=2, S=3),
        case("three queries, lengths from 0 on, blocks longer than a step", B=3, H=4, S_k=300, D=16, H_kv=2, S=3,
             block_size=256, spread="even"),
        case("more rows than a tile: 5 heads times 20 queries", B=1, H=5, S_k=130, D=16, H_kv=1, S=20),
        case("all queries see all keys", B=2, H=2, S_k=77, D=16, S=4, causal=False),
        case("a window, before which blocks are gone", B=3, H=2, S_k=260, D=16, window=70, S=2, spread="even"),
        case("a window of one: o is v", B=2, H=2, S_k=67, D=16, window=1),
        case("values shorter than keys; a scale of one's own", B=2, H=2, S_k=90, D=48, D_v=16, scale=0.3),
        case("D = 256, blocks of 32", B=1, H=2, S_k=70, D=256, H_kv=1, block_size=32),
        case("no pages: a block a sequence", B=3, H=4, S_k=140, D=16, H_kv=2, spread="even", paged=False),
        case("more than 2^31 numbers of K", gib=40, B=33, H=8, S_k=65536, D=128, poison=False),
        case("many parts", gib=0.5, B=7, H=32, S_k=10_007, D=128, H_kv=4, spread="even", poison=False),
        case("the bytes are counted here: 16 or 32 steps for the interpreter's 4 SMs", **LAST),
    ),
    benches=({"B": 64, "H": 32, "S_k": 4096, "D": 128, "H_kv": 8, "block_size": 16},),
    peers=PEERS,
    properties=(a_block_belongs_to_whom_the_table_says, a_sequence_is_alone, same_each_time),
    refuses=REFUSES,
)  # fmt: skip
