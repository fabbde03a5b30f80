"""Distributed: many processes, one gradient
=========================================
A rank is one process with one device. Data parallelism gives each rank a part of the batch and averages the gradients.
That is an all-reduce: every rank receives the sum over all. In a ring of p ranks each rank sends 2(p-1)/p times the
gradient, so never more than twice. For p = 4 the gradient is cut into 4 parts:

    rounds 1 to 3    a part travels round the ring, and each rank adds its own: then each rank has the sum of one part
    rounds 4 to 6    the sums travel round the ring: then each rank has all of them

Then every rank takes the same step, so equal parameters stay equal and are never sent.

You will learn: ranks and process groups, the ring, DistributedDataParallel (what it sends and when), no_sync, uneven
batches, DistributedSampler, what FSDP (fully sharded data parallel) saves and what it costs.
Run it:    python3 course.py run lesson07_distributed
As ranks:  .venv/bin/torchrun --standalone --nproc-per-node 2 day1_pytorch/lesson07_distributed.py
"""

import contextlib
import itertools
import os
import sys
import time
import warnings

from lessonkit import About, Steps
from lessonkit.modes.ranks import LAUNCHED, TIMEOUT, device_of, join, on_ranks

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

N = 16  # examples in the whole batch


def _model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def _batch():
    chance = torch.Generator().manual_seed(1)
    return torch.randn(N, 8, generator=chance).double(), torch.randint(4, (N,), generator=chance)


def _flat(tensors):
    """All in one vector, on the CPU."""
    return torch.cat([t.detach().flatten() for t in tensors]).cpu()


def _whole():
    """The gradient of one process on the whole batch, which p ranks must reproduce."""
    model, (x, y) = _model(), _batch()
    F.cross_entropy(model(x), y).backward()
    return _flat(p.grad for p in model.parameters())


def _same(found, expected):
    """Equal but for the order of additions. Sums of 50 float64 terms through three layers lose about 100 eps = 2e-14 of
    the largest. A wrong weight, or a part left out or counted twice, changes a gradient by percents."""
    return bool((found - expected).abs().max() < 1e-13 * expected.abs().max())


def _ring_work(rank, world, where):
    x = torch.randn(world * 1000, generator=torch.Generator().manual_seed(rank)).double().to(where)
    expected = x.clone()
    dist.all_reduce(expected)
    parts, arriving, sent = list(x.chunk(world)), torch.empty(1000, dtype=x.dtype, device=where), 0
    # World - 1 rounds in which each rank adds its own to a part that travels on, then as many for the sums. In round s
    # rank r sends part r - s to rank r + 1, and receives part r - s - 1 from rank r - 1.
    for step in range(2 * (world - 1)):
        gives, takes = (rank - step) % world, (rank - step - 1) % world
        swap = [dist.P2POp(dist.isend, parts[gives].contiguous(), (rank + 1) % world)]
        swap += [dist.P2POp(dist.irecv, arriving, (rank - 1) % world)]
        for request in dist.batch_isend_irecv(swap):
            request.wait()
        sent += arriving.nbytes
        parts[takes] = parts[takes] + arriving if step < world - 1 else arriving.clone()
    return {"right": _same(torch.cat(parts), expected), "sent": sent, "bytes": x.nbytes}


def ring():
    """A ring all-reduce, written out, sends 2(p-1)/p bytes per rank for each byte reduced: 1.5 for 4 ranks, never 2."""
    for found in (ranks := on_ranks(_ring_work, 4)):
        assert found["right"]
        assert found["sent"] * len(ranks) == 2 * (len(ranks) - 1) * found["bytes"]


def _count(model):
    """The bytes that DDP reduces, one entry for each all-reduce."""
    reduced = []

    def hook(_, bucket):  # called when a bucket's gradients are complete; the rest of the backward overlaps with it
        reduced.append(bucket.buffer().nbytes)
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    return reduced


def _ddp_work(rank, world, where):
    model = DDP(_model(seed=rank).to(where))  # a seed of its own: every rank starts from other parameters
    start = _flat(model.parameters())
    reduced = _count(model)
    x, y = (t.chunk(world)[rank].to(where) for t in _batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step == 0:
            gradient = _flat(p.grad for p in model.parameters())
        optimizer.step()
    return {"start": start, "gradient": gradient, "end": _flat(model.parameters()), "reduced": sum(reduced)}


def ddp():
    """p ranks with a part of the batch each compute the whole batch's gradient, and their parameters stay equal."""
    print(f"  ranks on {device_of(0, 2).type}; NCCL wants a GPU for each rank: {torch.cuda.device_count()} found")
    ranks = on_ranks(_ddp_work)
    for found in ranks:
        assert torch.equal(found["start"], _flat(_model(seed=0).parameters()))  # rank 0's, sent when DDP was made
        assert _same(found["gradient"], _whole())  # DDP means over ranks, cross_entropy over rows: equal parts only
        # Three steps, each gradient byte once: every rank receives the same bits, so it takes the same step.
        assert found["reduced"] == 3 * sum(p.nbytes for p in _model().parameters())
        assert torch.equal(found["end"], ranks[0]["end"])


def _no_sync_work(rank, world, where):
    model = DDP(_model().to(where))
    reduced = _count(model)
    x, y = (t.chunk(world)[rank].to(where) for t in _batch())
    micro = list(zip(x.chunk(4), y.chunk(4), strict=True))
    for i, (xs, ys) in enumerate(micro):
        with contextlib.nullcontext() if i == len(micro) - 1 else model.no_sync():
            (F.cross_entropy(model(xs), ys) / len(micro)).backward()  # forward, too, belongs inside no_sync
    return {"gradient": _flat(p.grad for p in model.parameters()), "calls": len(reduced)}


def no_sync():
    """Four micro-batches under no_sync add up locally and are reduced once: a quarter of the traffic, the same sum."""
    for found in on_ranks(_no_sync_work):
        assert found["calls"] == 1
        assert _same(found["gradient"], _whole())


def _uneven_work(rank, world, where):
    x, y = _batch()
    sizes = [N - (world - 1)] + [1] * (world - 1)  # rank 0 has most of the rows, the others one each
    x, y = (t.split(sizes)[rank].to(where) for t in (x, y))
    rows = torch.tensor(float(len(y)), device=where)
    dist.all_reduce(rows)
    found = {}
    # DDP divides by world, so the remaining weight is this rank's rows over all rows.
    for name, weight in (("mean of means", 1), ("weighted", len(y) * world / rows)):
        model = DDP(_model().to(where))
        (weight * F.cross_entropy(model(x), y)).backward()
        found[name] = _flat(p.grad for p in model.parameters())
    with Join([model]):  # unequal numbers of batches: without it a rank with more waits for the others for ever
        for _ in range(1 + rank):
            model(x).sum().backward()
    return found


def uneven():
    """A mean of the ranks' means gives rows of small batches more weight; weighting each loss by its rows mends it."""
    for found in on_ranks(_uneven_work):
        assert _same(found["weighted"], _whole())
        off = (found["mean of means"] - _whole()).norm() / _whole().norm()
        assert off > 0.1, "a row alone on its rank counts as much as all the other rank's rows together"


def sampler():
    """DistributedSampler deals out every example, repeats some to make parts equal, and reshuffles only if told."""

    def parts(epoch=0, **options):
        made = [DistributedSampler(range(10), num_replicas=4, rank=rank, **options) for rank in range(4)]
        for one in made:
            one.set_epoch(epoch)
        return [list(one) for one in made]

    dealt = parts()
    assert [len(part) for part in dealt] == [3, 3, 3, 3]  # 12 for 10: two count twice, which a test score must undo
    assert set(itertools.chain(*dealt)) == set(range(10))
    dropped = list(itertools.chain(*parts(drop_last=True)))
    assert len(dropped) == len(set(dropped)) == 8
    assert parts() == dealt, "without set_epoch every epoch has the order of the first"
    assert parts(epoch=1) != dealt


def _fsdp_work(rank, world, where):
    warnings.simplefilter("ignore")  # about hooks that this lesson does not use
    model = _model().to(where)
    mesh = dist.init_device_mesh(where.type, (world,))
    for layer in (model[0], model[2], model):  # a layer is gathered just before it is used and freed after
        fully_shard(layer, mesh=mesh)
    x, y = (t.chunk(world)[rank].to(where) for t in _batch())
    with CommDebugMode() as comm:
        F.cross_entropy(model(x), y).backward()
    calls = [sum(n for op, n in comm.get_comm_counts().items() if kind in str(op)) for kind in ("gather", "scatter")]
    held = sum(p.to_local().numel() for p in model.parameters())
    return {"held": held, "gradient": _flat(p.grad.full_tensor() for p in model.parameters()), "calls": calls}


def fsdp():
    """FSDP keeps 1/p of parameters, gradients and optimizer state a rank, for 1.5 times DDP's traffic: 3(p-1)/p."""
    ranks = on_ranks(_fsdp_work)
    for found in ranks:
        assert found["held"] * len(ranks) == sum(p.numel() for p in _model().parameters())
        assert _same(found["gradient"], _whole())
        # Each of two layers is gathered for the forward, gathered for the backward, and its gradient scattered. An
        # all-reduce is a scatter and a gather, each (p-1)/p, so FSDP has three of these where DDP has two.
        assert found["calls"] == [4, 2]
    # 7e9 parameters under Adam in mixed precision, 16 bytes each: 112 GB per rank with DDP, 14 GB with FSDP over 8.


def _failing_work(rank, world, where):
    if rank == 1:
        raise ValueError("rank 1 has no data")
    dist.all_reduce(torch.ones(1, device=where))  # waits for the rank that has failed


def failure():
    """A rank that fails ends the run at once, with a traceback; the others would wait for it until the timeout."""
    if LAUNCHED:
        return  # under the launcher a failed rank ends the whole run, these steps too
    began = time.monotonic()
    try:
        on_ranks(_failing_work)
    except mp.ProcessRaisedException:  # rank 1's own, or rank 0's when gloo reports the lost connection
        assert time.monotonic() - began < TIMEOUT.total_seconds() / 2
    else:
        raise AssertionError("the failure was lost")


LESSON = Steps(
    (ring, ddp, no_sync, uneven, sampler, fsdp, failure),
    about=About(
        teaches="processes and collectives: the ring, DDP, FSDP; on one machine, without a GPU if need be",
        hours=1,
        pictures=("ring_all_reduce",),
    ),
)


def _launched():
    """Each rank runs the steps with the others; rank 0 shows them."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world not in (2, 4):
        raise SystemExit(f"{world} ranks do not divide this lesson's layers: start 2 or 4 with --nproc-per-node")
    join(rank, world, "env://")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if rank else sys.stdout):
        LESSON.main()
    dist.destroy_process_group()


if __name__ == "__main__":
    _launched() if LAUNCHED else LESSON.main()
