"""Out and back: a vector of the host is copied to the device, goes through a recurrence there, and is copied back.

x [n] in fp32 and y [n] lie in the host's memory, pinned where there is a GPU. An element of y begins as the sign of x.
Then `turns` times it becomes 0.999 y + 0.001 x. An element's arithmetic grows with `turns`, its bytes do not.
"""

from lessonkit import Problem, Refusal, Work, case, device

import torch


def reference(x, turns):
    target, value = 0.001 * x, torch.where(x > 0, 1.0, -1.0).to(x.dtype)
    for _ in range(turns):
        value = 0.999 * value + target
    return value


def inputs(n, turns, dtype=torch.float32):
    x = torch.randn(n)  # every element another result, so that a chunk in the wrong place shows
    return (x.pin_memory() if device.HAS_GPU else x), turns


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda n, turns, dtype: Work(bytes=8 * n, flops=2 * n * turns),
    checks=(
        case("nothing to do: no copy, no launch", n=0, turns=3),
        case("one element: four of five chunks are empty", n=1, turns=3),
        case("a prime: chunks of different lengths", n=1021, turns=4),
        case("no turns: y shows what came in", n=300, turns=0),
        case("more than the grid: the loop turns twice", n=9001, turns=2),
    ),
    benches=(),
    refuses=(
        Refusal("not float32", lambda f: f(torch.zeros(3).half(), 1), TypeError, "float32"),
        Refusal("every second element", lambda f: f(torch.zeros(8)[::2], 1), ValueError, "contiguous"),
        Refusal("turns backwards", lambda f: f(torch.zeros(3), -1), ValueError, "turns is -1"),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)
