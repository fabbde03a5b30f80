"""Custom operators: a kernel that autograd and torch.compile can see
==================================================================
z = x + alpha * y reads 2n elements and writes n: as two operators it is five passes, as one kernel three. (torch.add
has an alpha and needs three as well: it is the oracle here.) The subject is everything around the kernel. A launch from
Python is invisible to autograd, and opaque Python to most compilers. An operator is a kernel with three declarations: a
schema (types, and which inputs change), a fake (shapes without data), a backward. That is 15 lines, and
torch.library.opcheck reports a declaration that is wrong.

You will learn: torch.library.custom_op, register_fake, register_autograd, opcheck, mutates_args, triton_op.
Run it:    python3 course.py run lesson08_custom_op
"""

from contextlib import contextmanager

from lessonkit import DEVICE, FLOATS, About, Steps, Table, device, expect
from lessonkit.modes.interpreter import watched

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op, opcheck, triton_op, wrap_triton
from torch.utils.benchmark import Timer

GPU = DEVICE.type == "cuda"
# aot_eager traces forward and backward as inductor does but generates no code, so it needs no C++ compiler.
BACKENDS = ("eager", "aot_eager", "inductor") if GPU else ("eager", "aot_eager")


@contextmanager
def _raises(says, error=Exception):
    """Asserts that the block fails with these words."""
    try:
        yield
    except error as raised:
        if says not in str(raised):
            raise AssertionError(f"expected a reason with {says!r}") from raised
    else:
        raise AssertionError(f"expected a failure: {says}")


def _inputs(n, dtype=torch.float32):
    # Two different distributions, so that a test notices if x and y are exchanged.
    return torch.randn(n, device=DEVICE).to(dtype), (torch.randn(n, device=DEVICE) + 3).to(dtype)


# One program owns BLOCK elements of x, y and z.
@triton.jit
def scaled_residual_kernel(x_ptr, y_ptr, z_ptr, alpha, n, BLOCK: tl.constexpr):  # [n] each
    # int64 before the multiplication: past 2^31 elements a 32-bit offset turns negative.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(z_ptr + offsets, x + alpha * y, mask=mask)  # rounded to z's dtype once, here


def _launch(x, y, alpha, z):
    n = x.numel()
    if n:  # an empty grid is an error in CUDA
        scaled_residual_kernel[(triton.cdiv(n, 1024),)](x, y, z, alpha, n, BLOCK=1024)


def _direct(x, y, alpha):
    z = torch.empty_like(x)
    _launch(x, y, alpha, z)
    return z


def kernel():
    """The kernel rounds once, in every dtype, and moves 3n elements, the least possible; but it loses the gradient."""
    for n in (0, 1, 1021, 1024, 1025):
        for dtype in FLOATS:
            x, y = _inputs(n, dtype)
            with watched() as traffic:
                z = _direct(x, y, 0.3)
            torch.testing.assert_close(z, (x.double() + 0.3 * y.double()).to(dtype))
            assert traffic.read + traffic.written == (0 if GPU else 3 * n * dtype.itemsize)  # counted if interpreted
    assert torch.add(x.requires_grad_(), y, alpha=0.3).requires_grad
    assert not _direct(x, y, 0.3).requires_grad  # no error: x would silently get no gradient


# ---- The operator: schema, fake, backward -------------------------------------------------------------------------


# The schema is read from the type hints: (Tensor x, Tensor y, float alpha) -> Tensor. mutates_args=() promises that
# no input is changed; the result must be fresh memory, no view of an input.
@custom_op("course::scaled_residual", mutates_args=())
def scaled_residual(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """x, y [...] contiguous float -> x + alpha * y [...]. Raises ValueError or TypeError for unlike inputs."""
    expect(x=x, y=y, same_shape=True, same_dtype=True, contiguous=True, differentiable=True)
    return _direct(x, y, alpha)


# The result's shape, dtype and device from those of the inputs. Compilers run this instead of the kernel: no data.
@scaled_residual.register_fake
def _(x, y, alpha):
    torch._check(x.shape == y.shape, lambda: f"x {tuple(x.shape)} and y {tuple(y.shape)} differ")
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):
    _, _, ctx.alpha = inputs  # linear in x and y, so nothing has to be saved: no memory kept for backward


def _backward(ctx, dz):
    return dz, ctx.alpha * dz, None  # one per input; alpha is a number and gets none


scaled_residual.register_autograd(_backward, setup_context=_setup_context)


def registered():
    """The kernel is an operator now: torch.ops knows its schema, and its answer is still torch.add's."""
    found = torch.ops.course.scaled_residual.default
    assert str(found._schema) == "course::scaled_residual(Tensor x, Tensor y, float alpha) -> Tensor"
    x, y = _inputs(1021)
    torch.testing.assert_close(scaled_residual(x, y, 0.3), torch.add(x, y, alpha=0.3))
    with _raises("y has shape", ValueError):
        scaled_residual(x, y[:-1], 0.3)


def fake():
    """A fake computes shapes without data: it adds a terabyte, allocates no byte and launches no kernel."""
    with FakeTensorMode(), watched() as traffic:
        x = torch.empty(2**38, device=DEVICE)
        z = scaled_residual(x, x, 0.3)
        assert (z.shape, z.dtype, z.device.type) == (x.shape, x.dtype, DEVICE.type)
        assert z.nbytes == 2**40
    assert traffic.launches == []


def gradients():
    """The registered backward gives torch.add's gradients, exactly: dx = dz, dy = alpha dz, alpha gets none."""
    for dtype in FLOATS:
        x, y = _inputs(1021, dtype)
        dz = torch.randn_like(x)  # random: with ones a backward that ignores dz would pass
        results = []
        for op in (lambda x, y: scaled_residual(x, y, 0.3), lambda x, y: torch.add(x, y, alpha=0.3)):
            leaves = [t.clone().requires_grad_() for t in (x, y)]
            results.append(torch.autograd.grad(op(*leaves), leaves, dz))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def compiles():
    """torch.compile sees one node in one graph, forward and backward, and one compilation serves every size."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def block(x, y):
        return scaled_residual(x.relu(), y, 0.3).tanh()

    torch._dynamo.reset()  # dynamo caches what it compiled for this code, across backends too
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=True)
    for n in (37, 64, 1021):
        x, y = _inputs(n)
        torch.testing.assert_close(compiled(x, y), block(x, y))
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes].count(torch.ops.course.scaled_residual.default) == 1
    for name in BACKENDS:
        torch._dynamo.reset()
        x, y = (t.requires_grad_() for t in _inputs(1021))
        expected = torch.add(x.relu(), y, alpha=0.3).tanh()
        answer = torch.compile(block, backend=name, fullgraph=True)(x, y)
        torch.testing.assert_close(answer, expected)
        dz = torch.randn_like(x)
        torch.testing.assert_close(*(torch.autograd.grad(z, (x, y), dz) for z in (answer, expected)))


def opchecks():
    """opcheck tries schema, autograd, fake and both under the compiler's tracer: all agree, on awkward sizes too."""
    for n in (0, 1, 1025):
        for dtype in FLOATS:
            x, y = _inputs(n, dtype)
            assert set(opcheck(scaled_residual, (x, y, 0.3)).values()) == {"SUCCESS"}
            opcheck(scaled_residual, (x.requires_grad_(), y.requires_grad_(), 0.3))


# ---- What breaks when a declaration is missing, or wrong ----------------------------------------------------------


@custom_op("course::no_fake", mutates_args=())
def _no_fake(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return _direct(x, y, alpha)


@custom_op("course::wrong_fake", mutates_args=())
def _wrong_fake(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return _direct(x, y, alpha)


# Right for every test in float32.
_wrong_fake.register_fake(lambda x, y, alpha: torch.empty_like(x, dtype=torch.float32))


def missing():
    """Without a fake eager works and compile fails; without a backward forward works and backward fails."""
    x, y = _inputs(37)
    torch.testing.assert_close(_no_fake(x, y, 0.3), torch.add(x, y, alpha=0.3))
    with _raises("no fake impl registered"):
        torch.compile(lambda x, y: _no_fake(x, y, 0.3), backend="eager", fullgraph=True)(x, y)
    with _raises("no fake impl registered"):
        opcheck(_no_fake, (x, y, 0.3))
    z = _no_fake(x.requires_grad_(), y, 0.3)  # unlike a bare launch it knows that its result needs a gradient
    with _raises("no autograd formula was registered"):
        z.sum().backward()


def wrong_fake():
    """A fake with the wrong dtype passes in float32 and misleads the compiler in bfloat16: opcheck there finds it."""
    opcheck(_wrong_fake, _inputs(37), {"alpha": 0.3})
    with _raises("test_faketensor failed"):
        opcheck(_wrong_fake, _inputs(37, torch.bfloat16), {"alpha": 0.3})


@custom_op("course::scaled_residual_", mutates_args=("x",))
def _in_place(x: Tensor, y: Tensor, alpha: float) -> None:
    _launch(x, y, alpha, x)  # each program reads its block before it writes it, and no other touches it


@custom_op("course::silent_", mutates_args=())  # wrong: x is changed
def _silent(x: Tensor, y: Tensor, alpha: float) -> None:
    _launch(x, y, alpha, x)


_silent.register_fake(lambda x, y, alpha: None)


def mutation():
    """A compiler deletes an undeclared change: an operator without result or change is dead code to it."""
    x, y = _inputs(37)

    def block(x, y, update):
        z = 2 * x
        update(z, y, 0.3)
        return z + 0

    expected = torch.add(2 * x, y, alpha=0.3)
    for update, compiled in ((_in_place, expected), (_silent, 2 * x)):
        torch.testing.assert_close(block(x, y, update), expected)  # eager runs every call, so the mistake has no effect
        answer = torch.compile(block, backend="aot_eager", fullgraph=True)(x, y, update)
        torch.testing.assert_close(answer, compiled)
    opcheck(_in_place, (x.clone(), y, 0.3))
    with _raises("not defined as mutable but was mutated"):
        opcheck(_silent, (x.clone(), y, 0.3))


@triton_op("course::transparent", mutates_args=())
def _transparent(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    z = torch.empty_like(x)
    n = x.numel()
    wrap_triton(scaled_residual_kernel)[(triton.cdiv(n, 1024),)](x, y, z, alpha, n, BLOCK=1024)
    return z


def transparent():
    """triton_op needs no fake: the compiler traces into it, finds the kernel itself and can plan around it."""
    x, y = _inputs(1021)
    torch.testing.assert_close(_transparent(x, y, 0.3), torch.add(x, y, alpha=0.3))
    if not GPU:
        print("  eager only: interpreted, the kernel is Python that needs data, and tracing has none")
        return
    opcheck(_transparent, (x, y, 0.3))
    for name in BACKENDS:
        torch._dynamo.reset()
        answer = torch.compile(lambda x, y: _transparent(x, y, 0.3).tanh(), backend=name, fullgraph=True)(x, y)
        torch.testing.assert_close(answer, torch.add(x, y, alpha=0.3).tanh())


def overhead():
    """An operator costs microseconds of the host a call, which matters only where kernels are short."""
    x, y = _inputs(0)  # no elements, so no launch: only the call's overhead remains
    leaf = x.clone().requires_grad_()
    rows = []
    for name, op, first in (
        ("torch.add", lambda x, y, alpha: torch.add(x, y, alpha=alpha), x),
        ("bare function", _direct, x),
        ("custom_op", scaled_residual, x),
        ("custom_op, recording a gradient", scaled_residual, leaf),
    ):
        timer = Timer("op(x, y, 0.3)", globals={"op": op, "x": first, "y": y})
        seconds = timer.blocked_autorange(min_run_time=0.1).median
        rows.append({"where": device.name(), "call": name, "us_per_call": round(seconds * 1e6, 1)})
    note = "Host time on empty tensors. On a GPU it hides behind kernels already queued, unless they are as short."
    return Table("overhead", rows, note)


LESSON = Steps(
    (kernel, registered, fake, gradients, compiles, opchecks, missing, wrong_fake, mutation, transparent, overhead),
    about=About(
        teaches="a kernel that autograd and `torch.compile` can see: schema, fake, backward, `opcheck`",
        hours=0.75,
    ),
)

if __name__ == "__main__":
    LESSON.main()
