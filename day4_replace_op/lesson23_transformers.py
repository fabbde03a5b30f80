"""Hugging Face models with our attention: registered, not patched
================================================================
Models of transformers look attention up in a table, by the name in config._attn_implementation. Two lines register an
entry: a function that computes attention, and one that makes its mask. course_ops.transformers has both, 160 lines:
read them first. GPT-2 and Llama (grouped keys and values, rotary positions) run here with random weights, so nothing is
downloaded, and answer as they do with "sdpa".

Training and generating differ in their shapes. With a cache of keys a step has one query and S_k keys. A prompt that
continues a cache has 1 < S_q < S_k. Query i stands at position i + S_k - S_q, so a causal mask is aligned at the lower
right. (torch's is_causal=True aligns at the upper left, where one query would see one key.)

    S_q = 3, S_k = 6:    lower right    1 1 1 1 . .        upper left    1 . . . . .
                                        1 1 1 1 1 .                      1 1 . . . .
                                        1 1 1 1 1 1                      1 1 1 . . .

GQA needs no repeated keys. With Llama 3's 32 heads on 8 the attention of a decoding step reads a quarter of the bytes,
since it reads hardly anything but the cache.

A batch of prompts of unequal lengths comes with a padding mask [B, S_k] of 0 and 1. Our kernel takes no mask. If a
sequence's ones are contiguous, it is a shorter sequence, and runs by itself. That costs a launch a sequence, and in
each layer a wait for the mask's values. Any other mask (with a hole, or of scores) is refused.

You will learn: transformers' attention and mask interfaces, causal alignment with a cache, what padding costs.
Run it:    python3 course.py run lesson23_transformers            (wants: pip install transformers)
"""

from contextlib import contextmanager

from lessonkit import DEVICE, About, Steps, Table, Unsupported, device, timing
from lessonkit.commands.show import from_a_gpu

import torch

import course_ops.transformers
from course_ops.testing import kernels
from course_ops.transformers import model_attention
from workloads.transformers_models import causal_models

GPU = DEVICE.type == "cuda"
OURS = course_ops.transformers.NAME


def models(**options):
    """Name -> GPT-2 and Llama with random weights; our attention is in transformers' tables."""
    try:
        course_ops.transformers.register()
    except ImportError as missing:
        raise Unsupported(str(missing)) from missing
    return causal_models(**options, device=DEVICE)


def _tokens(*shape):
    return torch.randint(1, 211, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@contextmanager
def _raises(says, error):
    """Asserts that the block raises this error with these words."""
    try:
        yield
    except error as raised:
        if says not in str(raised):
            raise AssertionError(f"expected a reason with {says!r}") from raised
    else:
        raise AssertionError(f"expected a failure: {says}")


@kernels()
def same_logits():
    """One word changes the attention of an existing model; logits and gradients stay the same."""
    tokens = _tokens(2, 21)
    for model in models().values():
        found = []
        for implementation in ("sdpa", OURS):
            model.set_attn_implementation(implementation)
            out = model(tokens, labels=tokens)
            found.append((out.logits, *torch.autograd.grad(out.loss, list(model.parameters()))))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@kernels()
def same_tokens():
    """Greedy generation gives sdpa's tokens, with a cache (one query, S_k keys) or without it."""
    prompt = _tokens(1, 5)
    for name, model in models().items():
        found = []
        for implementation, cached in (("sdpa", True), (OURS, True), (OURS, False)):
            model.set_attn_implementation(implementation)
            found.append(model.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=cached).tolist())
        assert found[0] == found[1] == found[2], name
        print(f"  {name}: {found[1][0][:5]} -> {found[1][0][5:]}")


@kernels()
def continued_prompt():
    """Three more tokens after a cache of seven (S_q = 3, S_k = 10) have the logits of all ten at once."""
    tokens = _tokens(1, 10)
    for model in models(implementation=OURS).values():
        with torch.no_grad():
            whole = model(tokens).logits
            begun = model(tokens[:, :7])
            rest = model(tokens[:, 7:], past_key_values=begun.past_key_values).logits
        torch.testing.assert_close(torch.cat((begun.logits, rest), 1), whole, rtol=1e-4, atol=1e-5)


@kernels()
def padding():
    """Prompts of 7 and 4 tokens in one batch, padded left or right, have the logits that each has alone; a query past
    its sequence's end gets zeros."""
    q, k = (torch.randn(2, 2, n, 64, device=DEVICE) for n in (1, 10))
    ended = (torch.arange(10) < torch.tensor([[10], [4]])).to(DEVICE)
    assert model_attention(torch.nn.Module(), q, k, k, ended)[0].ne(0).any(dim=(1, 2, 3)).tolist() == [True, False]
    long, short = _tokens(2, 7)
    for model in models(implementation=OURS).values():
        with torch.no_grad():
            alone = model(short[None, :4]).logits[0]
            for left in (True, False):
                tokens, mask = (
                    torch.stack((long, torch.zeros_like(long))),
                    torch.ones(2, 7, dtype=torch.int64).to(DEVICE),
                )
                place = slice(3, None) if left else slice(None, 4)
                mask[1] = 0
                tokens[1, place], mask[1, place] = short[:4], 1
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                logits = model(tokens, attention_mask=mask, position_ids=positions).logits
                torch.testing.assert_close(logits[1, place], alone, rtol=1e-4, atol=1e-5)
            tokens[1], mask[1] = torch.cat((torch.zeros_like(short[:3]), short[:4])), mask[1].flip(0)
            batch = model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
            lone = model.generate(short[None, :4], max_new_tokens=3, do_sample=False)
        assert batch[1, 7:].tolist() == lone[0, 4:].tolist()


@kernels()
def refused():
    """Options that the kernel does not support raise an error that names them."""
    model, tokens = models(implementation=OURS)["Llama"], _tokens(1, 6)
    hole, scores = torch.tensor([[1, 1, 0, 1, 1, 1]], device=DEVICE), torch.zeros(1, 1, 6, 6, device=DEVICE)
    for mask, says in ((hole, "sequence 0 has a hole"), (scores, "expected (1, 6)")):
        with _raises(says, ValueError):
            model(tokens, attention_mask=mask)
    q = torch.randn(1, 2, 3, 64, device=DEVICE)
    for option, says in (({"dropout": 0.1}, "set it to 0"), ({"s_aux": q}, "s_aux")):
        with _raises(says, ValueError):
            model_attention(torch.nn.Identity(), q, q, q, None, **option)


def speed():
    """Time and memory, forward and backward, of four layers as wide as Llama 3.2 1B, 2 x 4096 tokens in bf16."""
    if not GPU:
        return from_a_gpu(__name__, "speed")
    tokens, runs, peaks = _tokens(2, 4096), {}, {}
    for implementation in ("eager", "sdpa", OURS):
        sizes = {"layers": 4, "width": 2048, "heads": 32, "kv_heads": 8, "length": 4096, "vocabulary": 4096}
        for name, model in models(**sizes, implementation=implementation).items():
            model.bfloat16()

            def run(model=model):
                model(tokens, labels=tokens).loss.backward()
                model.zero_grad()

            run()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            peaks[name, implementation] = (torch.cuda.max_memory_allocated() - before) / 1e9
            runs[name, implementation] = run
    rows = []
    for (name, implementation), t in timing.measure(runs, flush=False, rounds=20).items():
        row = {"where": device.name(), "model": name, "attention": implementation, "ms": round(t.p50, 2)}
        rows.append(row | {"peak GB": round(peaks[name, implementation], 2)})
    note = "eager writes the S x S scores. All else in these models is transformers' own, unfused."
    return Table("speed", rows, note)


# From the rows of an H200, 2 x 4096 tokens: against sdpa GPT-2 gains nothing, 30.6 ms with either, and Llama 5%, 33.5
# instead of 35.1 ms. The S x S scores of eager cost 58 and 106 ms more than sdpa, and 14 and 36 GB.
LESSON = Steps(
    (same_logits, same_tokens, continued_prompt, padding, refused, speed),
    about=About(
        teaches="GPT-2 and Llama of transformers with our attention: caches, grouped keys, padding",
        hours=0.75,
    ),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
