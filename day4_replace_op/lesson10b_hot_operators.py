"""Hot operators: found by a profiler, explained by counting
========================================================
Before anything is replaced: where does a training step of lesson 10's GPT spend its time? Count first. At M = 32 * 1024
tokens, D = 768, a crossing of [M, D] is 50 MB in bf16 and 101 MB in fp32, one of the logits [M, V] 3.3 and 6.6 GB.
Autocast runs matmuls in bf16, norms and the loss in fp32 and casts between them; each cast is a read and a write.

    what                               a step, as eager PyTorch runs it                               at 4.2 TB/s
    matmuls                            24.3 TFLOP at 700 TFLOP/s                                      35 ms
    attention, if FlashAttention-2     2.2 TFLOP (half of 4.3: causal) at 200 to 250                  9 to 11 ms
    loss: float, log_softmax, nll      logits: 10 and 13 GB forward, 36 GB backward                   14 ms
    25 norms, their residuals, casts   0.6 GB forward and 1.1 GB backward each                        10 ms
    12 GELUs                           0.4 and 0.6 GB each                                            3 ms
    48 bias gradients                  a sum over rows reads all of dy                                1.3 ms
    AdamW, casts of weights            40 bytes a parameter                                           1.2 ms

So the matmuls should take about half of the time, and of the other half 24 ms are norms and a loss that compute next to
nothing: fused, and with nothing written in fp32 that is read back at once, they would be a third of that. Write down
your own guess of the first five lines of the profile before you run this.

You will learn: a profile whose rows are explained, not only sorted; outermost operators, roofs as predictions.
Run it:    python day4_replace_op/lesson10b_hot_operators.py
Without a GPU the times are a CPU's, where a small operator costs what calling it costs; the counts hold anywhere.
"""

from collections import Counter

from lessonkit import DEVICE, Steps, Table, device
from lessonkit.base.tables import digits

import torch
from torch.profiler import profile

from day1_pytorch.lesson06_profiler import ACTIVITIES, _Counter, _host_events, _limits
from day4_replace_op.lesson10_gpt import CONFIG, batches, make, stepper

GPU = DEVICE.type == "cuda"


class Work(_Counter):
    """FLOPs and bytes by operator (day 1, lesson 6), of the course's own operators too."""

    namespaces = ("aten", "course")


def operators(run, steps=3):
    """A row for each operator of run(), the slowest first: calls, time, FLOPs, bytes, and the roof that they make.

    ms: of its kernels on a GPU, else of the CPU; each at its best of `steps` runs. roof ms: a prediction, the larger of
    FLOPs / FLOP rate and bytes / bandwidth of this machine. FLOPs: of matmuls and attention, not halved for causal.
    """
    limits = _limits()
    run()
    with Work(*limits) as counted:
        run()
    best = {}
    for _ in range(steps):
        with profile(activities=ACTIVITIES) as seen:
            run()
            if GPU:
                torch.cuda.synchronize()
        spent = Counter()
        for event in _host_events(seen):
            if event.name in counted.work and not _within(event, counted.work):  # to_copy's copy_ is to_copy's time
                spent[event.name] += (event.device_time_total if GPU else event.cpu_time_total) * 1e-3
        best = {name: min(ms, best.get(name, ms)) for name, ms in spent.items()}
    rows, total = [], sum(best.values())
    for name, ms in sorted(best.items(), key=lambda item: -item[1]):
        work = counted.work[name]
        row = {"where": device.name(), "operator": name, "calls": work["calls"], "ms": digits(ms)}
        row |= {"time": f"{ms / total:.1%}", "GFLOP": digits(work["flops"] / 1e9), "MB": digits(work["bytes"] / 1e6)}
        rows.append(row | {"roof ms": digits(work["roof"] * 1e3)})
    return rows


def _within(event, names):
    """Does it run inside an operator of one of these names?"""
    while event := event.cpu_parent:
        if event.name in names:
            return True
    return False


def hot_operators():
    """Matmuls have nearly all FLOPs of a step and not nearly all of its time: the rest is found here, not assumed."""
    step, batch = stepper(make()), next(batches(CONFIG, 1))
    rows = operators(lambda: step(*batch))
    flops, ms = (sum(row[key] for row in rows) for key in ("GFLOP", "ms"))
    matmuls = [row for row in rows if row["operator"] in ("aten::mm", "aten::addmm")]
    of_flops, of_time = sum(row["GFLOP"] for row in matmuls) / flops, sum(row["ms"] for row in matmuls) / ms
    assert of_flops > 0.75
    assert of_time < 0.85
    note = (
        f"Times of a {'GPU' if GPU else 'CPU, where a small operator costs what calling it costs'}. Matmuls have "
        f"{of_flops:.0%} of the FLOPs and {of_time:.0%} of the time. MB: each tensor once. What waits for memory, "
        "whose roof comes from MB, gains from fusion and from smaller dtypes: lesson 11."
    )
    return Table("operators", rows[:20], note)


def loss_counted():
    """The loss alone crosses the bus five times with logits in fp32: the softmax in and out, its gradient from both."""
    with Work(1.0, 1.0) as counted, torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
        make()(*next(batches(CONFIG, 1))).backward()
    logits = CONFIG.batch * CONFIG.context * CONFIG.vocabulary * 4
    assert counted.work["aten::_log_softmax"]["bytes"] == 2 * logits
    assert counted.work["aten::_log_softmax_backward_data"]["bytes"] == 3 * logits


LESSON = Steps((hot_operators, loss_counted))

if __name__ == "__main__":
    LESSON.main()
