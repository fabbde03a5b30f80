"""Attention for models of Hugging Face transformers, by name: attn_implementation="course_ops".

    import course_ops.transformers
    course_ops.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="course_ops")

or model.set_attn_implementation("course_ops") for a model that stands. Nothing is patched.

Three things are not seen, and the result is then wrong without an error: a static cache, sequences that are packed by
their position_ids, and a mask that is neither causal, nor a window, nor full.
"""

from typing import Any

import torch
from torch import Tensor

from course_ops.attention import attention

NAME = "course_ops"


def register() -> None:
    """Put our attention into transformers' tables, under NAME. Once or more often.

    Raises ImportError if transformers is missing or older than 5.
    """
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as missing:
        raise ImportError(
            f"course_ops.transformers needs transformers 5 or newer ({missing}): pip install 'transformers>=5'"
        ) from missing
    ALL_ATTENTION_FUNCTIONS.register(NAME, model_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(
        NAME, flash_attention_mask
    )  # padding [B, S_k] as it is; None if there is none


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
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S_q, D], key and value [B, H_kv, S_k, D] -> out [B, S_q, H, D] and no weights.

    attention_mask [B, S_k]: 1 for tokens, 0 for padding at the ends, or None. A padded sequence is computed by itself
    without its padding, which costs a launch a sequence and a wait for the mask's values; queries that are padding get
    zeros. Raises ValueError for what the operator does not do: dropout, scores added or capped, a mask with holes.
    """
    if dropout:
        raise ValueError(f"dropout = {dropout} in attention is not there: set it to 0 in the config, or call eval()")
    if odd := [name for name in ("softcap", "position_bias", "s_aux", "head_mask") if others.get(name) is not None]:
        raise ValueError(f"{odd[0]} is not there: use attn_implementation='eager' for this model")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = {"causal": causal, "window": sliding_window, "scale": scaling}
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
