"""Replacing operators in a model without editing it
=================================================
Four operators of the GPT (lesson 15, workloads/gpt.py) are replaced one for one by course_ops: attention, LayerNorm,
GELU and cross-entropy. The model's file is not edited and its code does not branch.

A change of class puts them into the model. A subclass of nn.LayerNorm whose forward calls ours has the same parameters
under the same names:

    module.__class__ = CourseLayerNorm       # the optimizer keeps its state, a checkpoint fits
    module.__class__ = nn.LayerNorm          # and back

course_ops.patch does this for PyTorch's own classes in all modules of a model, and undoes it: read the 200 lines of
course_ops/patch.py. For the model's own classes you pass a subclass, such as CourseAttention below. PyTorch keeps the
modules that a kernel cannot handle, and the list that patch returns gives each reason.

Predict before you run lesson 22: which of the four pays by itself? A kernel at copy speed that replaces another at copy
speed gains nothing. Day 2's reports say how far PyTorch's GELU and LayerNorm are from copy speed. For attention SDPA
picks cuDNN's kernel on an H200 (lesson 16's rows), and this day's kernels replace it. Cross-entropy no longer writes
the log-softmax or a float copy of the logits. It moves 3 times the bf16 logits, where lesson 16 counts 18 times.

You will learn: swapping classes, fallbacks that are listed, one graph in torch.compile, equal loss curves as the proof.
Run it:    python3 course.py run lesson18_replace_op
"""

from lessonkit import About, Steps, Table

import torch

import course_ops
from course_ops.testing import kernels
from workloads.gpt import GPU, ONE_FOR_ONE, TINY, Attention, Config, batches, make, train, variant

CLASSES, OTHERS = ONE_FOR_ONE  # PyTorch's classes that patch replaces, and the model's own


class CourseAttention(Attention):
    """As the variant in workloads.gpt: the forward of Attention with one call replaced."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(course_ops.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))

    def refuses(self):
        size = self.qkv.in_features // self.heads
        return f"heads of {size}: the kernel takes up to 256" if size > 256 else ""


def own_classes():
    """Attention alone is replaced, by a subclass given to patch: the loss stays the same."""
    model, batch = make(TINY), next(batches(TINY, 1))
    losses = []
    for others in ({}, {Attention: CourseAttention}, {Attention: OTHERS[Attention]}):
        with kernels(), course_ops.patch(model, (), others) as patched:
            assert [row.now for row in patched.rows] == TINY.layers * ["CourseAttention"] * bool(others)
            losses.append(model(*batch))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert torch.equal(losses[1], losses[2])


@kernels()
def swapped():
    """Inside `with` four classes are replaced, after it none; parameters keep their names, loss and gradients agree."""
    model, batch = make(TINY), next(batches(TINY, 1))
    names, loss = list(model.state_dict()), model(*batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    before = [type(m) for m in model.modules()]
    with variant(model, "one for one") as patched:
        assert {row.now.removeprefix("course_ops.") for row in patched.rows} == {
            "CourseAttention", "layer_norm", "gelu", "CourseReadout"
        }  # fmt: skip
        assert not {type(m) for m in model.modules()} & {*CLASSES, *OTHERS}
        assert list(model.state_dict()) == names
        ours = model(*batch)
        for a, b in zip(torch.autograd.grad(ours, list(model.parameters())), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    assert [type(m) for m in model.modules()] == before
    rows = [{"what": "one for one", **row._asdict()} for row in patched.rows if "blocks.1" not in row.module]
    return Table("replaced", rows)


def refused():
    """PyTorch keeps a head of 512 and a model in float64, and the list gives the reasons."""
    wide = make(Config(vocabulary=300, context=8, layers=1, heads=1, width=512, batch=1, learning_rate=1e-3))
    with variant(wide, "one for one") as patched:
        why = [row.why for row in patched.rows if row.was == "Attention"]
        assert why == ["heads of 512: the kernel takes up to 256"]
        assert type(wide.trunk.blocks[0].attention) is Attention
        assert type(wide.trunk.blocks[0].mlp.gelu) is not torch.nn.GELU
    with variant(make(TINY).double(), "one for one") as patched:
        assert {row.was for row in patched.rows} == {"Attention", "LayerNorm", "GELU", "Readout"}
        assert all("float64" in row.why and not row.now for row in patched.rows)


@kernels()
def compiles():
    """Each operator is one node of one graph without a break; compiled loss and gradients equal eager's."""
    graphs = []
    model, batch = make(TINY), next(batches(TINY, 1))
    with variant(model, "one for one"):
        loss = model(*batch)
        torch._dynamo.reset()
        torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(*batch)
        ours = [str(node.target) for graph in graphs for node in graph.graph.nodes if "course_ops" in str(node.target)]
        assert len(graphs) == 1
        assert {name.split(".")[1]: ours.count(name) for name in ours} == {
            "layer_norm": 2 * TINY.layers + 1, "attention": TINY.layers, "gelu": TINY.layers, "cross_entropy": 1
        }  # fmt: skip
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor" if GPU else "aot_eager", fullgraph=True)(*batch)
        torch.testing.assert_close(compiled, loss, rtol=1e-5, atol=0)
        gradients = (torch.autograd.grad(out, list(model.parameters())) for out in (compiled, loss))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@kernels()
def same_curve():
    """The tiny GPT, trained with ours from the same seed on the same batches, has the same loss at each step."""
    model = make(TINY)
    with variant(model, "one for one"):
        ours = train(model, TINY, steps=5)
    torch.testing.assert_close(ours, train(make(TINY), TINY, steps=5), rtol=2e-2 if GPU else 1e-4, atol=0)


LESSON = Steps(
    (own_classes, swapped, refused, compiles, same_curve),
    about=About(
        teaches="another class for the same parameters: swapped in place, listed, refused where a kernel does "
        "not fit, undone",
        hours=0.75,
        star=True,
    ),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
