"""A small GPT: the model in which operators are replaced
=======================================================
GPT-2's smallest size has 12 layers of width D = 768 and a vocabulary V = 50,304: 12 D^2 weights a layer and V D for the
tokens, 124 million parameters. A training step on M tokens multiplies each weight of a matmul three times (forward, its
own gradient, its input's), 2 FLOPs each:

    M (6 (12 L D^2 + V D) + 14 L T D)     FLOPs: attention's QK^T and PV are 4 T D a layer and token forward, 10 T D
                                          backward (QK^T is computed again); half of that if the future is skipped

At M = 32 * 1024 that is 24.3 + 4.3 TFLOP, 41 ms at 700 TFLOP/s, and 800,000 tokens a second if there were nothing else.
Lesson 10b finds what else there is, lesson 11 replaces it.

The text is Python's own library, which every Python brings along: nothing is downloaded. Weights are fp32, matmuls bf16
under autocast (on a CPU all is fp32), AdamW is the fused one, attention PyTorch's scaled_dot_product_attention.

You will learn: a GPT in 100 lines, what a step costs before it runs, training on text that is at hand.
Run it:    python day4_replace_op/lesson10_gpt.py
Without a GPU it is a tiny GPT, of 0.1 million parameters, which learns 20 steps in a second.
"""

import math
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lessonkit import DEVICE, Steps, Table, device

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

GPU = DEVICE.type == "cuda"


@dataclass(frozen=True)
class Config:
    """Sizes of a model and of a batch of [batch, context] tokens. Heads divide width."""

    vocabulary: int
    context: int
    layers: int
    heads: int
    width: int
    batch: int
    learning_rate: float


# Lessons 11 and 11d compare trainings of TINY, whose text is another one for each Python. At a rate of 1e-2 the text
# decides what becomes of rounding: in exact arithmetic 20 steps make 20 of an error of 1 (pyenv's 3.11), or 6,000
# (Debian's). At 2e-3 it is 3; of 1,700 seeds weights moved by 6e-8 moved a loss by 1e-7, in the worst case by 3e-5.
TINY = Config(vocabulary=256, context=16, layers=2, heads=2, width=64, batch=2, learning_rate=2e-3)
# GPT-2's own vocabulary is 50,257: rounded up to a multiple of 128, rows of logits begin where wide loads and TMA can.
SMALL = Config(vocabulary=50304, context=1024, layers=12, heads=12, width=768, batch=32, learning_rate=3e-4)
CONFIG = SMALL if GPU else TINY


# ---- The model: nothing in it knows that something will be replaced -----------------------------------------------


class Attention(nn.Module):
    """x [B, T, D] -> [B, T, D]: each token looks back at all tokens up to itself, with `heads` pairs of eyes."""

    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.qkv, self.project = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D / H] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.widen, self.narrow = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)

    def forward(self, x):
        return self.narrow(F.gelu(self.widen(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each of the normalised stream and added to it (pre-norm, as GPT-2 has it)."""

    def __init__(self, c):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width), Attention(c)
        self.norm2, self.mlp = nn.LayerNorm(c.width), MLP(c)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Trunk(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Readout(nn.Module):
    """x [B, T, D] -> logits [B, T, V], or with targets [B, T] their mean loss, in fp32."""

    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocabulary, c.width))

    def forward(self, x, targets=None):
        logits = F.linear(x, self.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V], or with targets [B, T] the loss."""

    def __init__(self, c):
        super().__init__()
        self.token, self.place = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.trunk, self.readout = Trunk(c), Readout(c)
        for name, p in self.named_parameters():  # GPT-2's: a first loss of ln V
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.readout.weight = self.token.weight  # what says a token also recognises it

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.readout(self.trunk(x), targets)


def make(config=CONFIG, seed=0):
    """The same model every time."""
    torch.manual_seed(seed)
    with DEVICE:
        return GPT(config)


# ---- The text -----------------------------------------------------------------------------------------------------
PIECE = re.compile(rb" ?\w+|\s+|[^\w\s]")


@cache
def text(limit):
    """The first `limit` bytes of the standard library's sources, its tests left out (not every Python has them)."""
    root, found, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.rglob("*.py")):
        if size < limit and not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts):
            found.append(path.read_bytes())
            size += len(found[-1])
    return b"".join(found)[:limit]


@cache
def corpus(vocabulary, limit=2**25 if GPU else 2**18):
    """(tokens [N] on DEVICE, what each id stands for). Ids to 255 are bytes, those above the most common words."""
    pieces = PIECE.findall(text(limit))
    common = Counter(p for p in pieces if len(p) > 1).most_common(vocabulary - 256)
    words = [bytes([i]) for i in range(256)] + [word for word, _ in common]
    ids = {word: i for i, word in enumerate(words)}
    stream = [i for p in pieces for i in ((ids[p],) if p in ids else p)]  # an unknown word is spelled, byte by byte
    return torch.tensor(stream, device=DEVICE), words


def batches(config, steps, seed=0):
    """`steps` pairs of tokens and targets (the tokens after them), [batch, context] each; the same every time."""
    stream, _ = corpus(config.vocabulary)
    pick = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(stream) - config.context, (config.batch, 1), generator=pick)
        window = stream[(starts + torch.arange(config.context + 1)).to(DEVICE)]
        yield window[:, :-1], window[:, 1:]


def stepper(model, forward=None, learning_rate=CONFIG.learning_rate):
    """step(tokens, targets) -> loss, still on the device: asking for its value would make the host wait every time.

    forward: what to call instead of the model, its compiled self.
    """
    forward = model if forward is None else forward  # a compiled model has no truth value
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=True)

    def step(tokens, targets):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # to None: the next backward writes gradients where it would add to them
        return loss.detach()

    return step


def train(model, config=CONFIG, steps=20, forward=None):
    """The loss of every step."""
    step = stepper(model, forward, config.learning_rate)
    return torch.stack([step(*batch) for batch in batches(config, steps)]).tolist()


# ---- Claims -------------------------------------------------------------------------------------------------------


def text_to_tokens():
    """Nothing is downloaded, nothing lost: the text of Python's library, in bytes or in words, reads as before."""
    for vocabulary in (256, 1000):
        stream, words = corpus(vocabulary, 2**18)
        assert b"".join(words[i] for i in stream.tolist()) == text(2**18)
        print(f"  vocabulary {vocabulary}: {len(text(2**18))} bytes are {len(stream)} tokens")


def size_counted():
    """12 D^2 weights a layer, V D for tokens, T D for places; biases and norms are a thousandth: 124 million."""
    for c in (TINY, SMALL):
        with torch.device("meta"):  # shapes without data
            counted = sum(p.numel() for p in GPT(c).parameters())
        vectors = c.layers * (3 + 1 + 4 + 1 + 4) * c.width + 2 * c.width  # biases of four linears, two norms
        assert counted == (12 * c.layers * c.width + c.vocabulary + c.context) * c.width + vectors
    assert round(counted / 1e6) == 124


def work_counted():
    """A step's FLOPs are as the formula says, on any machine: counted on tensors that have shapes and no data."""
    for c in (TINY, SMALL):
        with torch.device("meta"):
            model, tokens = GPT(c), torch.zeros(c.batch, c.context, dtype=torch.int64)
        with FlopCounterMode(display=False) as flops:
            model(tokens, tokens).backward()
        weights, scores = 12 * c.layers * c.width**2 + c.vocabulary * c.width, c.layers * c.context * c.width
        # 12: on meta tensors attention is written out, and its backward need not multiply QK^T again.
        assert flops.get_total_flops() in (c.batch * c.context * (6 * weights + n * scores) for n in (12, 14))


def learns():
    """The first loss is that of a guess among V, ln V; then it falls: common tokens first."""
    steps = 100 if GPU else 20
    losses = train(make(), steps=steps)
    assert abs(losses[0] - math.log(CONFIG.vocabulary)) < 0.3
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    if not GPU:  # where gradients of an embedding are added up in any order
        assert train(make(), steps=3) == losses[:3], "seeds are fixed"
    rows = [{"where": device.name(), "step": i + 1, "loss": round(losses[i], 3)} for i in range(0, steps, steps // 10)]
    note = f"ln {CONFIG.vocabulary} = {math.log(CONFIG.vocabulary):.2f} is the loss of a guess."
    return Table("loss", rows, note, x="step", y="loss")


LESSON = Steps((text_to_tokens, size_counted, work_counted, learns))

if __name__ == "__main__":
    LESSON.main()
