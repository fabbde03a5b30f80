"""A small GPT: the model in which operators are replaced
=======================================================
GPT-2's smallest size has L = 12 layers of width D = 768 and a vocabulary of V = 50,304. With 12 D^2 weights a layer and
V D for the tokens it has 124 million parameters. A training step on M tokens, in sequences of T, multiplies each weight
of a matmul three times: in the forward, for its own gradient, and for its input's. Each time is 2 FLOPs per token:

    M (6 (12 L D^2 + V D) + 14 L T D)     FLOPs

Attention's QK^T and PV are 4 T D of these per layer and token forward, and 10 T D backward, where QK^T is computed
again. If masked pairs are skipped, attention's share is half.

At M = 32 * 1024 that is 24.3 + 4.3 TFLOP. At 700 TFLOP/s that takes 41 ms, or 800,000 tokens per second if nothing else
took time. Lesson 16 measures what else does, and lesson 18 replaces it.

The model, its text and its training loop are in workloads/gpt.py, 300 lines that the next lessons use too. Read that
file now. Predict from it the first loss of an untrained model, and which line of it needs the most memory.

The text is the source of Python's standard library, so nothing is downloaded. Weights are fp32. Matmuls run in bf16
under autocast; on a CPU all is fp32. The optimizer is fused AdamW, and attention is PyTorch's
scaled_dot_product_attention.

You will learn: to read a GPT of 100 lines, to compute what a step costs before it runs, to train on local text.
Run it:    python3 course.py run lesson15_gpt
Without a GPU the lesson trains a tiny GPT of 0.1 million parameters, which does 20 steps in a second.
"""

import math

from lessonkit import About, Steps, Table, device

import torch
from torch.utils.flop_counter import FlopCounterMode

from workloads.gpt import CONFIG, GPT, GPU, SMALL, TINY, corpus, make, text, train


def text_to_tokens():
    """The text of Python's library becomes bytes or words, and these become the same text again."""
    for vocabulary in (256, 1000):
        stream, words = corpus(vocabulary, 2**18)
        assert b"".join(words[i] for i in stream.tolist()) == text(2**18)
        print(f"  vocabulary {vocabulary}: {len(text(2**18))} bytes are {len(stream)} tokens")


def size_counted():
    """12 D^2 weights a layer, V D for tokens, T D for positions; biases and norms are a thousandth: 124 million."""
    for c in (TINY, SMALL):
        with torch.device("meta"):  # shapes without data
            counted = sum(p.numel() for p in GPT(c).parameters())
        vectors = c.layers * (3 + 1 + 4 + 1 + 4) * c.width + 2 * c.width  # biases of four linears, two norms
        assert counted == (12 * c.layers * c.width + c.vocabulary + c.context) * c.width + vectors
    assert round(counted / 1e6) == 124


def work_counted():
    """A step's FLOPs agree with the formula: counted on meta tensors, which have shapes and no data."""
    for c in (TINY, SMALL):
        with torch.device("meta"):
            model, tokens = GPT(c), torch.zeros(c.batch, c.context, dtype=torch.int64)
        with FlopCounterMode(display=False) as flops:
            model(tokens, tokens).backward()
        weights, scores = 12 * c.layers * c.width**2 + c.vocabulary * c.width, c.layers * c.context * c.width
        # 12, not 14: on meta tensors attention is decomposed, and its backward does not compute QK^T again.
        assert flops.get_total_flops() in (c.batch * c.context * (6 * weights + n * scores) for n in (12, 14))


def learns():
    """The first loss is that of a uniform guess, ln V; then it falls as the model learns the common tokens."""
    steps = 100 if GPU else 20
    losses = train(make(), steps=steps)
    assert abs(losses[0] - math.log(CONFIG.vocabulary)) < 0.3
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    if not GPU:  # where gradients of an embedding are added up in any order
        assert train(make(), steps=3) == losses[:3], "seeds are fixed"
    rows = [{"where": device.name(), "step": i + 1, "loss": round(losses[i], 3)} for i in range(0, steps, steps // 10)]
    note = f"ln {CONFIG.vocabulary} = {math.log(CONFIG.vocabulary):.2f} is the loss of a guess."
    return Table("loss", rows, note, x="step", y="loss")


LESSON = Steps(
    (text_to_tokens, size_counted, work_counted, learns),
    about=About(
        teaches="a GPT in 100 lines ([workloads/gpt.py](../workloads/gpt.py)) on text that Python brings along; "
        "a step's FLOPs by formula, counted on tensors without data",
        hours=0.75,
        star=True,
    ),
)

if __name__ == "__main__":
    LESSON.main()
