"""Hot operators: found by a profiler, explained by counting
========================================================
Where does a training step of lesson 15's GPT spend its time? Count before you measure. At M = 32 * 1024 tokens and
D = 768, to read or write [M, D] once moves 50 MB in bf16 and 101 MB in fp32. For the logits [M, V] that is 3.3 and
6.6 GB. Autocast runs matmuls in bf16, norms and the loss in fp32, and casts in between; each cast reads and writes.

    what                               a step, as eager PyTorch runs it                               at 4.2 TB/s
    matmuls                            24.3 TFLOP at 700 TFLOP/s                                      35 ms
    attention, if FlashAttention-2     2.2 TFLOP (half of 4.3: causal) at 200 to 250                  9 to 11 ms
    loss: float, log_softmax, nll      logits: 10 and 13 GB forward, 36 GB backward                   14 ms
    25 norms, their residuals, casts   0.6 GB forward and 1.1 GB backward each                        10 ms
    12 GELUs                           0.4 and 0.6 GB each                                            3 ms
    48 bias gradients                  a sum over rows reads all of dy                                1.3 ms
    AdamW, casts of weights            40 bytes a parameter                                           1.2 ms

So the matmuls should take about half of the time. Of the other half 24 ms go to norms and a loss, which hardly compute.
Fused, without fp32 tensors that are written and read back at once, they would take a third of that. Write down your own
guess of the first five lines of the profile before you run this.

lessonkit.measure.profiled_operators counts, as in day 1's lesson 6, and knows the course's operators too. FLOPs are
those of matmuls and attention. PyTorch's formula for attention counts all pairs, masked or not; the course's counts the
visible ones.

You will learn: to explain each row of a profile, to count outermost operators only, to use a roof as a prediction.
Run it:    python3 course.py run lesson16_hot_operators
Without a GPU the times are a CPU's, and a small operator takes as long as its call; the counts hold anywhere.
"""

from lessonkit import DEVICE, About, Steps, Table
from lessonkit.measure.profiled_operators import Work, operators

import torch

from workloads.gpt import CONFIG, GPU, batches, make, stepper


def hot_operators():
    """Matmuls have nearly all FLOPs of a step, and a smaller share of its time; the profile shows the other rows."""
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
    """The loss alone moves fp32 logits five times: log_softmax reads and writes, its backward reads two, writes one."""
    with Work(1.0, 1.0) as counted, torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
        make()(*next(batches(CONFIG, 1))).backward()
    logits = CONFIG.batch * CONFIG.context * CONFIG.vocabulary * 4
    assert counted.work["aten::_log_softmax"]["bytes"] == 2 * logits
    assert counted.work["aten::_log_softmax_backward_data"]["bytes"] == 3 * logits


# The answers, from the rows of an H200: a step takes 89 ms, not 75. Matmuls take 32 ms and attention 8, fewer than
# counted. These run below copy speed: the two kernels of log_softmax (12.7 ms instead of 7.7), the casts (11.4 instead
# of 7.6) and the norms' backward (5.5 instead of 1.8). And 6 ms were not counted: the backward stacks dq, dk and dv,
# and copies them into the order of the matmul's output (stack, clone).
LESSON = Steps(
    (hot_operators, loss_counted),
    about=About(
        teaches="a prediction of a step's time from bytes and FLOPs, and a profile that is held against it",
        hours=0.5,
        star=True,
    ),
)

if __name__ == "__main__":
    LESSON.main()
