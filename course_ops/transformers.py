"""Attention for models of Hugging Face transformers, by name: attn_implementation="course_ops".

    import course_ops.transformers
    course_ops.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="course_ops")

or model.set_attn_implementation("course_ops") for a model that stands. Nothing is patched.

A static cache, sequences that are packed by their position_ids, and a mask that is neither causal, nor a causal window,
nor full raise ValueError. Inside torch.compile no values are read: there the last two are not seen, and the result is
wrong without an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_ops.attention import attention

NAME = "course_ops"
Mask = Callable[..., Any]  # batch, head, query, key -> whether the query sees the key


def register() -> None:
    """Put our attention into transformers' tables, under NAME. Once or more often.

    Raises ImportError if transformers is missing or older than 5.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as missing:
        raise ImportError(
            f"course_ops.transformers needs transformers 5 or newer ({missing}): pip install 'transformers>=5'"
        ) from missing
    ALL_ATTENTION_FUNCTIONS.register(NAME, model_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, model_mask)


def model_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    q_length: int = 0,
    q_offset: int | Tensor | None = 0,
    cache_position: Tensor | None = None,
    mask_function: Mask,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    """attention_mask [B, S_k], 1 for tokens and 0 for padding, or None if there is no padding.

    Raises ValueError for a mask_function that the operator does not compute, and for a static cache. The first
    versions 5 of transformers give cache_position, the later ones q_length and q_offset. local_size: of a window or a
    chunk; the config says which.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    compiling = torch.compiler.is_compiling()
    if cache_position is not None:
        device, q_length = cache_position.device, len(cache_position)
        q_offset = None if compiling else int(cache_position[0])
    if mask_function is not bidirectional_mask_function:
        if isinstance(q_offset, Tensor) or (q_offset is not None and q_offset + q_length != kv_offset + kv_length):
            raise ValueError(
                "keys after the last query, as a static cache has them, are not there: use a dynamic cache "
                "(no cache_implementation), or attn_implementation='sdpa'"
            )
        alone = local_size == 1 == getattr(config, "sliding_window", None)
        probe = mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, device, alone
        if not (compiling or mask_function is causal_mask_function) and (use_vmap or not _is_causal(*probe)):
            raise ValueError(
                "the mask of packed sequences, of chunks, or of tokens that see later ones is not there: pass an "
                "attention_mask with one sequence a row, call course_ops.attention_varlen, or use "
                "attn_implementation='sdpa' for this model"
            )
    if attention_mask is None:
        return None
    padding = attention_mask[:, -kv_length:]
    return None if padding.shape[1] == kv_length and padding.all() else padding


def _is_causal(
    visible: Mask, B: int, S_q: int, S_k: int, q_offset: int, kv_offset: int, device: Any, alone: bool
) -> bool:
    """Whether each query sees the key before its own, and none sees the key after it.

    alone: of a window of 1, in which no query sees the key before its own either.
    On the CPU, so that a GPU need not be waited for, unless the mask computes with tensors of a GPU.
    """

    def probed(at: Any) -> bool:
        batch, head = torch.arange(B, device=at)[:, None], torch.tensor(0, device=at)
        queries = torch.arange(q_offset, q_offset + S_q, device=at)[None]
        second, not_last = queries[:, queries[0] > kv_offset], queries[:, queries[0] + 1 < kv_offset + S_k]
        before = visible(batch, head, second, second - 1) != alone
        return bool(before.all()) and not bool(visible(batch, head, not_last, not_last + 1).any())

    try:
        return probed("cpu")
    except RuntimeError:
        return probed(device)


def model_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S_q, D], key and value [B, H_kv, S_k, D] -> out [B, S_q, H, D] and no weights.

    attention_mask [B, S_k]: 1 for tokens, 0 for padding at the ends, or None. A padded sequence is computed by itself
    without its padding, which costs a launch a sequence and a wait for the mask's values; queries that are padding get
    zeros. softcap as in course_ops.attention. Raises ValueError for what the operator does not do: dropout, scores that
    are added, packed sequences, a mask with holes.
    """
    if dropout:
        raise ValueError(f"dropout = {dropout} in attention is not there: set it to 0 in the config, or call eval()")
    if odd := [name for name in ("position_bias", "s_aux", "head_mask") if others.get(name) is not None]:
        raise ValueError(f"{odd[0]} is not there: use attn_implementation='eager' for this model")
    if others.get("cu_seq_lens_q") is not None:
        raise ValueError("cu_seq_lens_q (packed sequences) is not there: call course_ops.attention_varlen")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"causal": causal, "window": sliding_window, "scale": scaling, "softcap": softcap}
    if attention_mask is None:
        out = attention(query, key, value, **options)
    else:
        out = _padded(query, key, value, attention_mask, options)
    return out.transpose(1, 2), None


def _padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Each sequence by itself, without its padding."""
    S_q, S_k = query.shape[2], key.shape[2]
    if mask.shape != (len(query), S_k):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, expected {(len(query), S_k)}: 1 for tokens, 0 for padding"
        )
    out = []
    for b, row in enumerate(mask.bool().tolist()):  # the host waits here
        start, count = (row.index(True), sum(row)) if any(row) else (0, 0)
        if not all(row[start : start + count]):
            raise ValueError(f"attention_mask of sequence {b} has a hole: padding has to be at the ends")
        # Causal: queries are the last S_q positions. In cross-attention they have positions of their own.
        causal = options["causal"]
        first, last = (max(0, start - (S_k - S_q)), start + count - (S_k - S_q)) if causal else (0, S_q)
        if first >= last:  # nothing but padding here
            out.append(torch.zeros_like(query[b, None]))
            continue
        keys, values = (t[b, None, :, start : start + count] for t in (key, value))
        answer = attention(query[b, None, :, first:last], keys, values, **options)
        out.append(torch.nn.functional.pad(answer, (0, 0, first, S_q - last)))
    return torch.cat(out)
