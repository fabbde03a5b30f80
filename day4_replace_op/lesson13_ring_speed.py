"""Ring attention, timed: are messages hidden, and what does zigzag order gain?
============================================================================
Lesson 12 predicts two things for p GPUs.

1. A step's message, 2 H_kv D S / p elements, takes less time than the step's matmuls from about 1100 tokens per GPU on.
   When four query heads share a head of K, 280 tokens are enough. So at 16384 tokens per GPU the ring should take as
   long as the same work without messages.
2. Causal attention in zigzag order should be (2 p - 1) / p times as fast as with contiguous slices ("in a row"). That
   is 1.5 times on two GPUs, 1.75 on four, 1.875 on eight.

To measure a message's cost, a second ring sends none: each rank attends p times to its own slice. Its result is wrong,
its time that of the matmuls. On two H200 messages cost less than 3%, and zigzag gains 1.39 times, not 1.5.

You will learn: to measure overlap by leaving out one of the two things that overlap.
Run it:    python3 course.py run lesson13_ring_speed          two GPUs or more
"""

import functools
from unittest import mock

from lessonkit import About, Steps, Table, device, specimen
from lessonkit.modes.ranks import on_ranks

import torch
import torch.distributed as dist

RING = "day4_replace_op.lesson12_ring_attention"
ring_attention = specimen("day4_replace_op.lesson12_ring_attention", "ring_attention")
Message = specimen("day4_replace_op.lesson12_ring_attention", "Message")
ORDERS = specimen("day4_replace_op.lesson12_ring_attention", "ORDERS")
S, H, H_KV, D = 16384, 32, 8, 128  # tokens per GPU


class _NoMessage:
    """Replaces Message in a ring that computes and sends nothing."""

    def __init__(self, t, group):
        self.t = t

    def wait(self):
        return self.t


def _ms(call):
    """Median milliseconds of ten calls that all ranks begin together."""
    times = []
    for _ in range(13):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[5]


def _timed(rank, world, where):
    found = {}
    for name, (causal, zigzag) in ORDERS.items():
        torch.manual_seed(rank)
        make = functools.partial(torch.randn, device=where, dtype=torch.bfloat16)
        q, k, v = (make(1, n, S, D, requires_grad=True) for n in (H, H_KV, H_KV))
        grad = torch.randn_like(q)

        def forward(q=q, k=k, v=v, causal=causal, zigzag=zigzag):
            return ring_attention(q, k, v, causal, None, zigzag)

        def both(q=q, k=k, v=v, grad=grad, forward=forward):
            return torch.autograd.grad(forward(), (q, k, v), grad)

        found[name] = {"forward": _ms(forward), "forward and backward": _ms(both)}
        with mock.patch(f"{RING}.Message", _NoMessage):
            found[name] |= {"forward, no messages": _ms(forward), "both, no messages": _ms(both)}
    kv = torch.empty(2, 1, H_KV, S, D, dtype=torch.bfloat16, device=where)
    return {"orders": found, "one message": _ms(lambda: Message(kv, None).wait())}


def speed():
    """On GPUs that NCCL connects: matmuls hide the messages, and zigzag order is near (2 p - 1) / p times as fast."""
    world = torch.cuda.device_count() if device.HAS_GPU else 0
    if world < 2:
        print(f"  needs two GPUs or more: {world} found")
        return None
    ranks, rows = on_ranks(_timed, world), []
    for name in ORDERS:
        times = {what: max(rank["orders"][name][what] for rank in ranks) for what in ranks[0]["orders"][name]}
        rows.append({"order": name, "GPUs": world, "S": S * world} | {what: f"{ms:.3f}" for what, ms in times.items()})
        rows[-1]["one message"] = f"{max(rank['one message'] for rank in ranks):.3f}"
    gain, predicted = float(rows[1]["forward"]) / float(rows[2]["forward"]), (2 * world - 1) / world
    print(f"  zigzag is {gain:.2f} times as fast as in a row, predicted {predicted:.2f}")
    assert gain > 0.8 * predicted
    assert all(float(row["forward"]) < 1.25 * float(row["forward, no messages"]) for row in rows)
    note = f"Milliseconds, the slowest rank's; {H} heads on {H_KV}, D = {D}, bf16, {S} tokens per GPU. "
    note += "Messages are hidden as far as a time equals the one without them."
    return Table("ring", rows, note)


LESSON = Steps(
    (speed,),
    about=About(teaches="two GPUs or more: what messages cost, what an order gains", hours=0.25, pictures=("zigzag",)),
    alone=device.HAS_GPU,
)

if __name__ == "__main__":
    LESSON.main()
