"""Small models of Hugging Face transformers, randomly initialised: nothing is downloaded."""

from typing import Any

import torch


def causal_models(
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 64,
    vocabulary: int = 211,
    implementation: str = "sdpa",
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """GPT-2 and, with `kv_heads` grouped heads and rotary positions, Llama, by name; fp32, in evaluation mode.

    width is a multiple of heads, heads of kv_heads; length: positions, in tokens. implementation: what transformers
    calls attn_implementation. The same weights every time. Raises ImportError where transformers is missing.
    """
    import transformers as t

    t.logging.set_verbosity_error()
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocabulary}
    sizes |= {"initializer_range": width**-0.5}  # so that a signal keeps its size through the layers
    gpt2 = t.GPT2Config(**sizes, n_positions=length, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **ends)
    llama = t.LlamaConfig(
        **sizes, num_key_value_heads=kv_heads, intermediate_size=4 * width, max_position_embeddings=length, **ends
    )
    made = {}
    for name, config in (("GPT-2", gpt2), ("Llama", llama)):
        torch.manual_seed(0)
        with torch.device(device):
            made[name] = t.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    return made
