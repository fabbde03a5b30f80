"""Attention of new tokens to a cache of keys and values that lies in pages, or in one piece a sequence: decoding."""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from course_ops._common import Unsupported, expect, expect_device, on_device, runs_kernel
from course_ops._registration import cast_under_autocast
from course_ops.attention import MAX_HEAD_DIM, _computed, _expect_types, at_most, checked_scale, visible_pairs
from course_ops.kernels import attention_paged as kernels
from course_ops.quantize import refuse_gradient


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """out [B, S_q, H, D_v] of q [B, S_q, H, D] on a cache: heads come after tokens, and causal is True by default.

    For inference: it has no gradient. The cache has the layout of FlashAttention and vLLM, in which a token's heads lie
    side by side: k_cache [num_blocks, block_size, H_kv, D] and v_cache [num_blocks, block_size, H_kv, D_v]. In
    course_ops.attention the heads come before the tokens, and causal is False by default. H is a multiple of H_kv, and
    query head h reads head h * H_kv // H.

    - block_table [B, max_blocks] int32: key j of sequence b is in block block_table[b, j // block_size], at place
      j % block_size. Blocks may come in any order, and sequences may share a block. None: sequence b has block b alone.
    - cache_seqlens [B] int32: how many keys each sequence has, with those of the new tokens. Nothing past them is used,
      in a block or in the table, so NaN may stand there.
    - causal: the last query stands at the sequence's last key, and each other query one key before the next query.
    - window: a query sees only the last `window` keys up to its own. It needs causal=True.
    - scale and softcap: as for course_ops.attention.

    A query that sees no key has out = 0. The result is the same to the bit each time.

    q and the cache have one dtype, fp32, fp16 or bf16, which torch.autocast leaves as it is. Strides and block_size may
    be any, D and D_v from 1 to 256. One kernel computes all of these. It is made for few queries; for many, use
    course_ops.attention. A FLOP counter cannot see the lengths, so it is told the FLOPs of a full table.

    Raises TypeError for a dtype, ValueError for a shape, a device, a value or a wanted gradient. On a GPU the entries
    of cache_seqlens and block_table are not checked, since the host would wait for them. There a sequence gets NaN if
    its length is negative or longer than the table, or if it uses a block outside the cache. No memory outside is read
    or written.
    Source: Kwon et al. 2023, PagedAttention.
    """
    _expect_types(causal, window, scale, softcap)
    _checked(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap)
    refuse_gradient("attention_paged", q=q, k_cache=k_cache, v_cache=v_cache)
    options = (causal, window, scale, softcap)
    return torch.ops.course_ops.attention_paged(q, k_cache, v_cache, cache_seqlens, block_table, *options)[0]


def _checked(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap) -> float:
    """The scale, or the error that a bad argument deserves."""
    expect(q=q, k_cache=k_cache, v_cache=v_cache, ndim=4)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}, but q is {q.dtype}: convert q, which is small")
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise ValueError(f"v_cache is {tuple(v_cache.shape)}, k_cache {tuple(k_cache.shape)}: a value for each key")
    (B, _, H, D), (num_blocks, block_size, H_kv, D_k) = q.shape, k_cache.shape
    if D_k != D:
        raise ValueError(f"k_cache has head_dim {D_k}, but q has {D}: make them equal")
    if H_kv == 0 or H % H_kv:
        raise ValueError(
            f"q has {H} heads, k_cache {H_kv}: expected 1 or more in k_cache, and a multiple of them in q "
            "(are both [.., tokens, heads, D]?)"
        )
    for name, t in (("q", q), ("v_cache", v_cache)):
        if not 0 < t.shape[-1] <= MAX_HEAD_DIM:
            raise Unsupported(f"{name} has head_dim {t.shape[-1]}, expected 1 to {MAX_HEAD_DIM}: no kernel has another")
    if block_size == 0:
        raise ValueError(f"k_cache is {tuple(k_cache.shape)}: expected a block_size of 1 or more")
    integers = {"cache_seqlens": cache_seqlens} | ({} if block_table is None else {"block_table": block_table})
    for name, t in integers.items():
        expect(**{name: t}, dtypes=(torch.int32,))
        expect_device(q=q, **{name: t})
    if tuple(cache_seqlens.shape) != (B,):
        raise ValueError(f"cache_seqlens is {tuple(cache_seqlens.shape)}, expected ({B},): a length for each sequence")
    if block_table is None and num_blocks != B:
        raise ValueError(f"k_cache has {num_blocks} blocks for {B} sequences: pass block_table, or one block for each")
    if block_table is not None and (block_table.ndim != 2 or block_table.shape[0] != B):
        raise ValueError(f"block_table is {tuple(block_table.shape)}, expected ({B}, max_blocks): a row a sequence")
    return checked_scale(D, causal, window, scale, softcap)


@custom_op("course_ops::attention_paged", mutates_args=())
def _attention_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None,
    causal: bool = True, window: int | None = None, scale: float | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, S_q, H, D_v], and lse [B, H, S_q] in fp32."""
    scale = _checked(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap)
    if not runs_kernel(q):
        return _on_cpu(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap)
    if block_table is not None and block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    heads_first = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    window = at_most(window, k_cache.shape[1] * (1 if block_table is None else block_table.shape[1]))
    lengths = cache_seqlens.contiguous()
    with on_device(q):
        out, lse = kernels.attention_paged(*heads_first, lengths, block_table, causal, window, scale, softcap)
    return out.transpose(1, 2), lse


def _on_cpu(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap):
    """A sequence at a time, on a copy of the keys and values that it has."""
    (B, S_q, H, _), (num_blocks, block_size, _, D_v) = q.shape, v_cache.shape
    out, lse = q.new_empty(B, S_q, H, D_v), q.new_empty(B, H, S_q, dtype=torch.float32)
    capacity = block_size * (1 if block_table is None else block_table.shape[1])
    for b, n in enumerate(cache_seqlens.tolist()):
        if not 0 <= n <= capacity:
            raise ValueError(f"cache_seqlens[{b}] is {n}, expected 0 to {capacity}: what the blocks of a sequence hold")
        low = 0 if window is None else max(0, n - S_q + 1 - window)  # blocks before the window may be gone
        first = low // block_size
        blocks = [b] if block_table is None else block_table[b, first : -(-n // block_size)].tolist()
        for i, block in enumerate(blocks, first):
            if not 0 <= block < num_blocks:
                raise ValueError(
                    f"block_table[{b}, {i}] is {block}, expected 0 to {num_blocks - 1}, a block of k_cache"
                )
        used = slice(low, n) if block_table is None else slice(low - first * block_size, n - first * block_size)
        k, v = (t[blocks].flatten(0, 1)[used].transpose(0, 1)[None] for t in (k_cache, v_cache))
        o, lse[b] = _computed(q[b : b + 1].transpose(1, 2), k, v, causal, window, scale, softcap)
        out[b] = o[0].transpose(0, 1)
    return out, lse


@_attention_paged.register_fake
def _(q, k_cache, v_cache, cache_seqlens, block_table=None, causal=True, window=None, scale=None, softcap=None):
    _checked(q, k_cache, v_cache, cache_seqlens, block_table, causal, window, scale, softcap)
    B, S_q, H, _ = q.shape
    return q.new_empty(B, S_q, H, v_cache.shape[-1]), q.new_empty(B, H, S_q, dtype=torch.float32)


cast_under_autocast(_attention_paged)  # nothing is cast, and autocast is off inside


@register_flop_formula(torch.ops.course_ops.attention_paged)
def _flops(
    q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any = None,
    causal: bool = True, window: int | None = None, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """As if every sequence had as many keys as its blocks hold: the lengths are not known."""
    (B, S_q, H, D), S_k = q, k_cache[1] * (1 if block_table is None else block_table[1])
    return int(B * H * (2 * D + 2 * v_cache[3]) * visible_pairs(S_q, S_k, causal, window))
