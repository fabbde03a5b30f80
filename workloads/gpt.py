"""The GPT under study: model, configurations, text, training loop, and its variants with the course's operators.

    model = gpt.make(gpt.TINY)                        # PyTorch's operators
    with gpt.variant(model, "fused") as patched:      # the same parameters, other operators
        losses = gpt.train(model, gpt.TINY, steps=20)

Shapes: B sequences of T tokens, width D, vocabulary V. Weights are fp32; on a GPU matmuls run in bf16 under autocast,
on a CPU all is fp32. The model's code does not branch: a variant changes classes of modules, see course_ops.patch.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import course_ops
from course_ops.patch import Patched

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


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


# Lessons compare trainings of TINY, whose text is another one for each Python. At a rate of 1e-2 the text decides what
# becomes of rounding: in exact arithmetic 20 steps make 20 of an error of 1 (pyenv's 3.11), or 6,000 (Debian's). At
# 2e-3 it is 3; of 1,700 seeds weights moved by 6e-8 moved a loss by 1e-7, in the worst case by 3e-5.
TINY = Config(vocabulary=256, context=16, layers=2, heads=2, width=64, batch=2, learning_rate=2e-3)
# GPT-2's own vocabulary is 50,257: rounded up to a multiple of 128, rows of logits begin where wide loads and TMA can.
SMALL = Config(vocabulary=50304, context=1024, layers=12, heads=12, width=768, batch=32, learning_rate=3e-4)
CONFIG = SMALL if GPU else TINY  # what this machine trains


# ---- The model: nothing in it knows that something will be replaced -----------------------------------------------


class Attention(nn.Module):
    """x [B, T, D] -> [B, T, D]: causal attention with `heads` heads of D / heads."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv, self.project = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D / H] each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """x [B, T, D] -> [B, T, D], through 4 D features."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(c.width, 4 * c.width), nn.Linear(4 * c.width, c.width)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.gelu(self.widen(x)))


class Block(nn.Module):
    """x [B, T, D] -> [B, T, D]: attention and MLP, each of the normalised stream and added to it (pre-norm)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width), Attention(c)
        self.norm2, self.mlp = nn.LayerNorm(c.width), MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Trunk(nn.Module):
    """x [B, T, D] -> [B, T, D]: all layers, and a last norm."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Readout(nn.Module):
    """x [B, T, D] -> logits [B, T, V], or with targets [B, T] their mean loss, in fp32."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocabulary, c.width))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = F.linear(x, self.weight)
        # In fp32, as most models have it: an fp32 copy of the logits is written and read.
        return logits if targets is None else self.loss(logits.flatten(0, 1).float(), targets.flatten())


class GPT(nn.Module):
    """tokens [B, T] -> logits [B, T, V], or with targets [B, T] the mean loss. Initialised as GPT-2."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.trunk, self.readout = Trunk(c), Readout(c)
        for name, p in self.named_parameters():  # GPT-2's: a first loss of ln V
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.readout.weight = self.token.weight  # one matrix reads tokens and predicts them

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.readout(self.trunk(x), targets)


def make(config: Config = CONFIG, seed: int = 0) -> GPT:
    """A GPT on DEVICE, in fp32; the same one every time."""
    torch.manual_seed(seed)
    with DEVICE:
        return GPT(config)


# ---- Variants: subclasses with the same parameters and another forward --------------------------------------------


class CourseAttention(Attention):
    """Attention by course_ops.attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(course_ops.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))

    def refuses(self) -> str:
        size = self.qkv.in_features // self.heads
        return f"heads of {size}: the kernel takes up to 256" if size > 256 else ""


class FusedTrunk(Trunk):
    """Each residual addition and the norm after it are one operator, over the edge of a block too."""

    def forward(self, x: Tensor) -> Tensor:
        norms = [n for block in self.blocks for n in (block.norm1, block.norm2)] + [self.norm]
        branches = [f for block in self.blocks for f in (block.attention, block.mlp)]
        y = norms[0](x)
        for branch, norm in zip(branches, norms[1:], strict=True):
            y, x = course_ops.add_norm(branch(y), x, norm.weight, norm.bias, norm.eps)
        return y


class FusedMLP(MLP):
    """Bias and GELU in the epilogue of the first matmul."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.widen.weight.to(x.dtype), self.widen.bias.to(x.dtype)
        return self.narrow(course_ops.linear(x, weight, bias, activation="gelu_tanh"))


class CourseReadout(Readout):
    """The loss of the logits as they are: the operator widens them in registers."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = F.linear(x, self.weight)
        return logits if targets is None else course_ops.cross_entropy(logits.flatten(0, 1), targets.flatten())


class FusedReadout(Readout):
    """Logits and loss in one operator, a part of the rows at a time."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x)
        return course_ops.linear_cross_entropy(x, self.weight, targets)


# What course_ops.patch is given: PyTorch's classes to replace, and the model's own.
ONE_FOR_ONE = (nn.LayerNorm, nn.GELU), {Attention: CourseAttention, Readout: CourseReadout}
FUSED = (
    (nn.LayerNorm,),  # of the first block; the others are fused
    {Trunk: FusedTrunk, Attention: CourseAttention, MLP: FusedMLP, Readout: FusedReadout},
)
VARIANTS = {"PyTorch": ((), {}), "one for one": ONE_FOR_ONE, "fused": FUSED}


def variant(model: nn.Module, name: str) -> Patched:
    """Make a GPT, where it stands, the variant of this name in VARIANTS; undone at the end of a `with`, or by undo().

    Raises ValueError for another name.
    """
    if name not in VARIANTS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(VARIANTS)}")
    return course_ops.patch(model, *VARIANTS[name])


# ---- The text -----------------------------------------------------------------------------------------------------
PIECE = re.compile(rb" ?\w+|\s+|[^\w\s]")


@cache
def text(limit: int) -> bytes:
    """The first `limit` bytes of the standard library's sources, its tests left out (not every Python has them)."""
    root, found, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.rglob("*.py")):
        if size < limit and not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts):
            found.append(path.read_bytes())
            size += len(found[-1])
    return b"".join(found)[:limit]


@cache
def corpus(vocabulary: int, limit: int = 2**25 if GPU else 2**18) -> tuple[Tensor, list[bytes]]:
    """Tokens [N] int64 on DEVICE of `limit` bytes of text, and what each id stands for.

    Ids to 255 are bytes, those above the most common words.
    """
    pieces = PIECE.findall(text(limit))
    common = Counter(p for p in pieces if len(p) > 1).most_common(vocabulary - 256)
    words = [bytes([i]) for i in range(256)] + [word for word, _ in common]
    ids = {word: i for i, word in enumerate(words)}
    stream = [i for p in pieces for i in ((ids[p],) if p in ids else p)]  # an unknown word is spelled, byte by byte
    return torch.tensor(stream, device=DEVICE), words


def batches(config: Config, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs of tokens and targets (the tokens after them), [batch, context] each; the same every time."""
    stream, _ = corpus(config.vocabulary)
    pick = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(stream) - config.context, (config.batch, 1), generator=pick)
        window = stream[(starts + torch.arange(config.context + 1)).to(DEVICE)]
        yield window[:, :-1], window[:, 1:]


# ---- Training -----------------------------------------------------------------------------------------------------


def stepper(
    model: nn.Module,
    forward: Callable[[Tensor, Tensor], Tensor] | None = None,
    learning_rate: float = CONFIG.learning_rate,
) -> Callable[[Tensor, Tensor], Tensor]:
    """step(tokens, targets) -> loss, still on the device: asking for its value would make the host wait every time.

    A step is forward, backward and AdamW. forward: what to call instead of the model, its compiled self.
    """
    forward = model if forward is None else forward  # a compiled model has no truth value
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # to None: the next backward writes gradients where it would add to them
        return loss.detach()

    return step


def train(
    model: nn.Module,
    config: Config = CONFIG,
    steps: int = 20,
    forward: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[float]:
    """The loss of every step."""
    step = stepper(model, forward, config.learning_rate)
    return torch.stack([step(*batch) for batch in batches(config, steps)]).tolist()
