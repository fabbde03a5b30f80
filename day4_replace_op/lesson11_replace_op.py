"""Replacing operators in a model that does not know of it
=======================================================
Four operators of lesson 10's GPT, one for one: attention (this day's kernels), LayerNorm, GELU and cross-entropy (day
2's), which lesson 10c made operators of PyTorch. The model's file is not edited and its code does not branch.

Into the model they come by a change of class: a subclass of MLP whose forward calls ours has the same parameters under
the same names, so `module.__class__ = TritonMLP` replaces it where it stands, the optimizer keeps its state, a
checkpoint fits, and going back is as short. What a kernel cannot take stays with PyTorch, and the list says why.

Predict before you run lesson 11d: which of the four pays by itself? A kernel at copy speed in place of another at copy
speed gains nothing. PyTorch's GELU reaches 87% of a copy and its LayerNorm 50% (day 2's reports); attention goes from
what SDPA picks (cuDNN's, with wgmma, on an H200: lesson 10b's rows) to this day's kernels; cross-entropy no longer
writes the log-softmax nor a float copy of the logits: 3 crossings in bf16 and not the 18 (of bf16 size) that lesson 10b
counted.

You will learn: swapping classes, fallbacks that are seen, one graph in torch.compile, the same loss curve as the proof.
Run it:    python day4_replace_op/lesson11_replace_op.py
"""

from contextlib import contextmanager

from lessonkit import DEVICE, FLOATS, Steps, Table

import torch
import torch.nn.functional as F
from torch import nn

from day4_replace_op.lesson10_gpt import GPU, MLP, TINY, Attention, Config, Readout, batches, make, train
from day4_replace_op.lesson10c_operators import attention, gelu, layernorm, mean_loss

# ---- Into the model: another class for the same parameters --------------------------------------------------------


class TritonAttention(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(attention(q, k, v, True)[0].transpose(1, 2).flatten(2))

    def refuses(self):
        size = self.qkv.in_features // self.heads
        return f"heads of {size}: the kernel takes up to 256" if size > 256 else ""


class TritonLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return layernorm(x, self.weight, self.bias, self.eps)[0]

    def refuses(self):
        return "" if self.bias is not None and len(self.normalized_shape) == 1 else "no bias, or several dimensions"


class TritonMLP(MLP):
    def forward(self, x):
        return self.narrow(gelu(self.widen(x)))


class TritonReadout(Readout):
    def forward(self, x, targets=None):
        logits = F.linear(x, self.weight)
        return logits if targets is None else mean_loss(logits.flatten(0, 1), targets.flatten())


ONE_FOR_ONE = {Attention: TritonAttention, nn.LayerNorm: TritonLayerNorm, MLP: TritonMLP, Readout: TritonReadout}


def _refusal(new, module):
    return new.refuses(module) if hasattr(new, "refuses") else ""


@contextmanager
def replaced(model, table=None):
    """Inside, the model's modules whose class is in the table (ONE_FOR_ONE) are of the class that stands there.

    Yields a row for each: module, was, now, and where it stays with PyTorch, why. Parameters, their names, hooks and
    the optimizer's state are untouched; compile inside, for a compiled model remembers its classes.
    """
    rows, before = [], []
    for name, module in model.named_modules():
        if new := (ONE_FOR_ONE if table is None else table).get(type(module)):
            odd = [p for p in module.parameters() if p.dtype not in FLOATS or p.device.type != DEVICE.type]
            why = f"{odd[0].dtype} on {odd[0].device}: no kernel" if odd else _refusal(new, module)
            rows.append({"module": name, "was": type(module).__name__, "now": "" if why else new.__name__, "why": why})
            if not why:
                before.append((module, type(module)))
                module.__class__ = new
    try:
        yield rows
    finally:
        for module, old in before:
            module.__class__ = old


# ---- Claims -------------------------------------------------------------------------------------------------------


def swapped():
    """Inside, four classes are others; parameters and names stay, loss and gradients agree; outside, all is back."""
    model, batch = make(TINY), next(batches(TINY, 1))
    names, loss = list(model.state_dict()), model(*batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with replaced(model) as rows:
        assert {row["now"] for row in rows} == {new.__name__ for new in ONE_FOR_ONE.values()}
        assert list(model.state_dict()) == names
        ours = model(*batch)
        for a, b in zip(torch.autograd.grad(ours, list(model.parameters())), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    assert not {type(m) for m in model.modules()} & set(ONE_FOR_ONE.values())
    return Table("replaced", [{"what": "one for one", **row} for row in rows if "blocks.1" not in row["module"]])


def refused():
    """A head of 512 and a model in float64 stay with PyTorch, and the list says so."""
    wide = make(Config(vocabulary=300, context=8, layers=1, heads=1, width=512, batch=1, learning_rate=1e-3))
    with replaced(wide) as rows:
        assert [row["why"] for row in rows if row["was"] == "Attention"] == ["heads of 512: the kernel takes up to 256"]
        assert type(wide.trunk.blocks[0].attention) is Attention
        assert type(wide.trunk.blocks[0].mlp) is TritonMLP
    with replaced(make(TINY).double()) as rows:
        assert all("float64" in row["why"] and not row["now"] for row in rows)


def compiles():
    """One graph without a break holds each operator as one node, and compiled loss and gradients are eager's."""
    graphs = []
    model, batch = make(TINY), next(batches(TINY, 1))
    with replaced(model):
        loss = model(*batch)
        torch._dynamo.reset()
        torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*batch)
        ours = [str(node.target) for graph in graphs for node in graph.graph.nodes if "course" in str(node.target)]
        assert len(graphs) == 1
        assert {name.split(".")[1]: ours.count(name) for name in ours} == {
            "layernorm": 2 * TINY.layers + 1, "attention": TINY.layers, "gelu": TINY.layers, "cross_entropy": 1
        }  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor" if GPU else "aot_eager", fullgraph=True)(*batch)
        torch.testing.assert_close(compiled, loss, rtol=1e-5, atol=0)
        gradients = (torch.autograd.grad(out, list(model.parameters())) for out in (compiled, loss))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def same_curve():
    """Trained with ours from the same seed on the same batches, the tiny GPT has the same loss, step by step."""
    model = make(TINY)
    with replaced(model):
        ours = train(model, TINY, steps=5)
    torch.testing.assert_close(ours, train(make(TINY), TINY, steps=5), rtol=2e-2 if GPU else 1e-4, atol=0)


LESSON = Steps((swapped, refused, compiles, same_curve), alone=GPU)

if __name__ == "__main__":
    LESSON.main()
