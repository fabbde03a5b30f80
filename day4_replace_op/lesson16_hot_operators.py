"""Hot operators: found by a profiler, explained by counting
========================================================
Before anything is replaced: where does a training step of lesson 15's GPT spend its time? Count first. At M = 32 * 1024
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

The count is day 1's (lesson 6), of the course's operators too: lessonkit.measure.operators. FLOPs are those of matmuls
and attention. PyTorch's formula for attention counts all pairs, masked or not; the course's counts the visible ones.

You will learn: a profile whose rows are explained, not only sorted; outermost operators, roofs as predictions.
Run it:    python day4_replace_op/lesson16_hot_operators.py
Without a GPU the times are a CPU's, where a small operator costs what calling it costs; the counts hold anywhere.
"""

from lessonkit import DEVICE, About, Steps, Table
from lessonkit.measure.operators import Work, operators

import torch

from workloads.gpt import CONFIG, GPU, batches, make, stepper


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
        "whose roof comes from MB, gains from fusion and from smaller dtypes: lesson 18."
    )
    return Table("operators", rows[:20], note)


def loss_counted():
    """The loss alone crosses the bus five times with logits in fp32: the softmax in and out, its gradient from both."""
    with Work(1.0, 1.0) as counted, torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
        make()(*next(batches(CONFIG, 1))).backward()
    logits = CONFIG.batch * CONFIG.context * CONFIG.vocabulary * 4
    assert counted.work["aten::_log_softmax"]["bytes"] == 2 * logits
    assert counted.work["aten::_log_softmax_backward_data"]["bytes"] == 3 * logits


LESSON = Steps(
    (hot_operators, loss_counted),
    about=About(
        teaches="a prediction of a step's time from bytes and FLOPs, and a profile that is held against it",
        hours=0.75,
        star=True,
    ),
)

if __name__ == "__main__":
    LESSON.main()
