"""Tensors: a few numbers over a storage
======================================
A tensor is a dtype, an offset, a shape and strides over a flat storage:

    x [3, 4], strides (4, 1)      storage  0 1 2 3 | 4 5 6 7 | 8 9 10 11
    x.T [4, 3], strides (1, 4)    the same storage: row 1 of x.T is 1 5 9, each 4 elements apart

A stride says how many elements apart two neighbours of a dimension lie: in x the next row is 4 further on, the next
column 1.

Transpose, slice and expand look like work, but rewrite those few numbers and move 0 bytes. A kernel receives exactly
this, a pointer and strides, so a kernel's author has to know them.

You will learn: views and copies, what a layout costs, broadcasting, dtypes, seeds and the order of a sum, and what
"asynchronous" means on a GPU. Each step states a fact and asserts it.
Run it:    python3 course.py run lesson02_tensors
"""

import math
from contextlib import contextmanager

from lessonkit import DEVICE, About, Steps, Table

import torch
from torch.utils.benchmark import Timer


@contextmanager
def _raises(error, says):
    """Asserts that the block raises this error with these words."""
    try:
        yield
    except error as raised:
        if says not in str(raised):
            raise AssertionError(f"expected a reason with {says!r}") from raised
    else:
        raise AssertionError(f"expected {error.__name__}: {says}")


def _shares(a, b):
    """True if both tensors are views of one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def views():
    """A transpose moves 0 bytes: element [i, j] lives at offset + i * stride(0) + j * stride(1)."""
    x = torch.arange(12.0).reshape(3, 4)
    storage = x.view(-1)  # the 12 elements in memory order
    for name, view in {"x": x, "x.T": x.T, "x[1:, 2:]": x[1:, 2:], "x[:, ::2]": x[:, ::2]}.items():
        assert _shares(view, x), name
        offset, (s0, s1) = view.storage_offset(), view.stride()
        for i in range(view.shape[0]):
            for j in range(view.shape[1]):
                assert view[i, j] == storage[offset + i * s0 + j * s1]
        print(f"  {name:10} shape {tuple(view.shape)}  strides ({s0}, {s1})  offset {offset}")
    x.T[0, 1] = 99
    assert x[1, 0] == 99, "a write through a view is a write to the tensor"


def contiguous():
    """`.contiguous()` copies only what is not row-major already; `.view()` never copies, `.reshape()` may."""
    x = torch.arange(12.0).reshape(3, 4)
    assert x.contiguous() is x, "nothing to do: the same tensor comes back"
    assert x[1:].is_contiguous(), "whole rows lie together, at an offset"
    assert not x.T.is_contiguous()
    assert not _shares(x.T.contiguous(), x)
    assert x.T.contiguous().stride() == (3, 1)
    with _raises(RuntimeError, "view size is not compatible"):
        x.T.view(12)  # no single stride walks the columns one after another
    assert _shares(x.reshape(12), x)
    assert not _shares(x.T.reshape(12), x)
    # Channels last is the same tensor to Python and another order in memory: tensor-core convolutions prefer it.
    image = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert image.shape == (2, 3, 8, 8)
    assert image.stride() == (192, 1, 24, 3)
    assert not image.is_contiguous()


def layouts():
    """The same copy through other strides takes longer: its elements are spread over more cache lines."""
    # Memory arrives in whole cache lines, 64 bytes on a CPU, even if one float of a line is needed.
    n = 4096 if DEVICE.type == "cuda" else 2048
    wide = torch.rand(n, 2 * n, device=DEVICE)
    x, out = wide[:, :n].contiguous(), torch.empty(n, n, device=DEVICE)
    sources = {
        "row-major": x,  # reads n * n elements, each line used whole
        "transposed": x.T,  # neighbours in the output are n elements apart in the input
        "every second column": wide[:, ::2],  # half of each line is fetched and thrown away
        "one row expanded": x[0].expand(n, n),  # stride 0: n elements are read from a cache, n * n are written
    }
    rows = []
    for name, source in sources.items():
        out.fill_(math.nan)
        out.copy_(source)
        assert torch.equal(out, source)
        # Timer waits for the GPU where there is one; on a CPU it takes one thread unless told otherwise.
        seconds = Timer("out.copy_(x)", globals={"out": out, "x": source}).blocked_autorange(min_run_time=0.15).median
        moved = 4 * (out.numel() + (source.numel() if 0 not in source.stride() else n))
        rows.append({"layout": name, "strides": str(source.stride()), "MB": round(moved / 1e6, 1)})
        rows[-1] |= {"ms": round(seconds * 1e3, 4), "GB/s": round(moved / seconds / 1e9, 1)}
    note = (
        "MB counts the bytes that the copy needs, read and written. Row-major sets the pace. The two strided sources "
        "hold as many elements spread over more cache lines (64 bytes on a CPU, 32-byte sectors on a GPU), so they "
        "need longer for the same MB. The expanded row writes as much and reads next to nothing."
    )
    return Table("layouts", rows, note)


def broadcasting():
    """A [n] bias added to [m, n] is read through stride 0: it has the shape [m, n] and stores n elements."""
    bias = torch.arange(4.0)
    wide = bias.expand(1_000_000, 4)
    assert wide.stride() == (0, 1)
    assert _shares(wide, bias)
    assert wide.numel() * 4 == 16_000_000
    assert wide.untyped_storage().nbytes() == 16
    with _raises(RuntimeError, "single memory location"):
        wide.add_(1)  # a million rows share each cell: which write would win?
    # Shapes are aligned from the right; a dimension of 1, or a missing one, stretches.
    assert torch.broadcast_shapes((8, 1, 4), (3, 1)) == (8, 3, 4)
    with _raises(RuntimeError, "must match"):
        torch.ones(3, 4) + torch.ones(3)
    # A bug without an error: [n, 1] minus [n] is [n, n], and its mean is a plausible loss.
    prediction, target = torch.rand(5, 1), torch.rand(5)
    assert (prediction - target).shape == (5, 5)
    # A dimension that is stretched forward is summed backward: hence the reduction in a bias's gradient.
    bias.requires_grad_()
    x = torch.rand(3, 4)
    (x * bias).sum().backward()
    torch.testing.assert_close(bias.grad, x.sum(0))


def dtypes():
    """bfloat16 keeps 8 significant bits: 256 + 1 is 256, so a sum needs a float32 accumulator."""
    assert (torch.bfloat16.itemsize, torch.float16.itemsize, torch.float32.itemsize) == (2, 2, 4)
    # The result of two tensors has the smallest dtype that holds both kinds; a Python number only raises the kind.
    half, brain, single, whole = (torch.ones(1, dtype=d) for d in (torch.half, torch.bfloat16, torch.float, torch.long))
    assert (half + single).dtype == (half + brain).dtype == torch.float32
    assert (half + whole).dtype == (half + 3.0).dtype == torch.float16
    assert (whole + 1).dtype == torch.int64
    assert (whole + 1.0).dtype == (whole / 2).dtype == torch.float32
    # float16 spends its bits on precision and overflows early; bfloat16 has float32's range and little precision.
    assert torch.tensor(70_000.0).half().isinf()
    assert torch.tensor(1e38).bfloat16().isfinite()
    assert torch.tensor(1 + 2**-9).half() > 1
    assert torch.tensor(1 + 2**-9).bfloat16() == 1
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        total += 1  # from 256 on, the next bfloat16 is 2 away, so the sum no longer changes
    assert total == 256
    assert torch.ones(1000, dtype=torch.bfloat16).sum() == 1000, "torch accumulates in float32 and rounds once"
    print(f"  1000 ones: {total.item():.0f} with a bfloat16 accumulator, 1000 with a float32 one")


def seeds():
    """The same seed gives the same numbers; the same sum in another order does not."""
    torch.manual_seed(7)
    first = torch.rand(4, device=DEVICE)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(4, device=DEVICE))
    # A separate generator: the order of the data does not depend on the random numbers that the model uses.
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    torch.rand(5)
    assert torch.equal(order, torch.randperm(100, generator=torch.Generator().manual_seed(1)))
    if DEVICE.type == "cuda":
        torch.manual_seed(7)
        assert not torch.equal(first.cpu(), torch.rand(4)), "each device has its own generator: make weights on the CPU"
    # Addition is not associative in floating point: two right kernels may differ in the last bits.
    a, b = torch.tensor(1e8), torch.tensor(1.0)
    assert (a + b) - a == 0
    assert (a - a) + b == 1
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    exact = values.double().sum()
    error = max(abs(values.sum() - exact).item(), abs(values.view(1000, 100).sum(0).sum() - exact).item())
    assert error < 0.01, "both orders are right to float32's precision, so tests need a tolerance from an error budget"


def asynchronous():
    """A GPU operator returns before its kernel ends: the host only queues work, and waits where it reads a value."""
    if DEVICE.type != "cuda":
        print("  no GPU here: on a CPU an operator returns with its result, and there is nothing to wait for")
        return
    a = torch.randn(4096, 4096, device=DEVICE)
    torch.mm(a, a)  # the first call loads the library; only later ones are typical
    torch.cuda.synchronize()
    done = [torch.cuda.Event() for _ in range(100)]
    for event in done:
        torch.mm(a, a)  # 137 GFLOP each: hundreds of microseconds at least, and a few to queue
        event.record()
    finished = sum(event.query() for event in done)
    assert finished < len(done), "the host has queued 100 matmuls and the GPU is still at work"
    print(f"  when the host had queued {len(done)} matmuls, the GPU had finished {finished}")
    # .item(), .cpu(), print() and bool() all wait. A timer must wait too, or it times the queue and not the kernel.
    a.sum().item()
    assert all(event.query() for event in done)


LESSON = Steps(
    (views, contiguous, layouts, broadcasting, dtypes, seeds, asynchronous),
    about=About(
        teaches="a tensor is a few numbers over a storage: views, layouts, broadcasting, dtypes, seeds, "
        "asynchronous calls",
        hours=0.75,
        pictures=("views",),
    ),
)

if __name__ == "__main__":
    LESSON.main()
