"""Autotune: its key, its cost, and wrong results while it times
=============================================================
At the first call for each new key triton.autotune times each configuration and keeps the fastest. The key holds the
values of the arguments named in `key`, and all dtypes. The cache is in this process, or on disk with
cache_results=True. The cost:

    cost of a key    configurations * (compiling, about a second + timing, do_bench's 25 ms of warming and 100 ms)
    keys             one for each new shape: 18 configurations and 50 sequence lengths are 17 minutes

While it is timed a kernel runs for 125 ms on the caller's own tensors: more than a hundred times if a call takes 1 ms.
A kernel that adds to its output adds as often. For an argument that `key` does not name, the first call decides for all
later ones.

Everything here runs without a GPU, since the calls that autotune makes do not depend on how long they take.
You will learn: to write a key, to bound it, to prune, and to restore tensors that a kernel changes.
Run it:    python3 course.py run lesson09_autotune
"""

from lessonkit import DEVICE, About, Steps, Table

import torch
import triton
import triton.language as tl

BLOCKS = (32, 64, 128)


class _Timer:
    """Replaces do_bench: runs each configuration three times, not for 125 ms, and reports a given one as fastest."""

    def __init__(self, favourite=0):
        self.timed, self.favourite = 0, favourite

    def __call__(self, call, quantiles):
        for _ in range(3):
            call()
        self.timed += 1
        fastest = (self.timed - 1) % len(BLOCKS) == self.favourite
        return [0.5 if fastest else 1.0] * 3


def _tuned(kernel, timer, key, **more):
    configs = [triton.Config({"BLOCK": block}) for block in BLOCKS]
    return triton.autotune(configs, key=key, do_bench=timer, **more)(kernel)


@triton.jit
def add_into_kernel(x_ptr, z_ptr, n, BLOCK: tl.constexpr):  # z += x
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + at, mask=at < n) + tl.load(x_ptr + at, mask=at < n)
    tl.store(z_ptr + at, z, mask=at < n)


@triton.jit
def double_kernel(x_ptr, z_ptr, n, stride, BLOCK: tl.constexpr):  # z = 2 x, elements `stride` apart
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + at, 2 * tl.load(x_ptr + at * stride, mask=at < n), mask=at < n)


def _grid(n):
    return lambda c: (triton.cdiv(n, c["BLOCK"]),)


def every_new_key_is_tuned_anew():
    """20 lengths are 20 keys: 60 timings. Rounded up to a power of two they are 4 keys, and 12."""
    lengths = range(40, 440, 20)
    exact, rounded = _Timer(), _Timer()
    by_length = _tuned(double_kernel, exact, ["n"])
    bucket = _tuned(bucket_kernel, rounded, ["BUCKET"])
    for n in lengths:
        x, z = torch.randn(n, device=DEVICE), torch.empty(n, device=DEVICE)
        by_length[_grid(n)](x, z, n, 1)
        assert torch.equal(z, 2 * x)
        bucket[_grid(n)](x, z.zero_(), n, triton.next_power_of_2(n))
        assert torch.equal(z, 2 * x)
    assert (exact.timed, rounded.timed) == (3 * 20, 3 * 4)
    by_length[_grid(40)](x, z, 40, 1)  # a length that came before costs nothing
    assert exact.timed == 60
    rows = [
        {"key": key, "timings": timer.timed, "about s on a GPU": 1.125 * timer.timed}
        for key, timer in (("n", exact), ("n, rounded up", rounded))
    ]
    return Table("keys", rows, "A second to compile and 0.125 to time each.")


@triton.jit
def bucket_kernel(x_ptr, z_ptr, n, BUCKET, BLOCK: tl.constexpr):  # z = 2 x; BUCKET is there to be a key
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def what_the_key_leaves_out():
    """A key without the stride: the fastest for adjacent elements is used for elements 8 apart, without timing."""
    x, z = torch.randn(8 * 256, device=DEVICE), torch.empty(256, device=DEVICE)
    timer = _Timer(favourite=2)
    short = _tuned(double_kernel, timer, ["n"])
    short[_grid(256)](x, z, 256, 1)
    short[_grid(256)](x, z, 256, 8)
    assert timer.timed == 3
    assert short.best_config.kwargs["BLOCK"] == BLOCKS[2]
    whole = _tuned(double_kernel, timer, ["n", "stride"])
    whole[_grid(256)](x, z, 256, 1)
    whole[_grid(256)](x, z, 256, 8)
    assert timer.timed == 9
    half = x.half()
    whole[_grid(256)](half, z, 256, 8)  # dtypes are in every key, named or not
    assert timer.timed == 12


def tuning_runs_the_kernel_on_your_tensors():
    """z += x under autotune: 3 configurations, 3 runs each and the call are 10 additions. restore_value undoes nine."""
    x = torch.ones(100, device=DEVICE)
    careless = _tuned(add_into_kernel, _Timer(), ["n"])
    z = torch.zeros(100, device=DEVICE)
    careless[_grid(100)](x, z, 100)
    assert z.eq(10).all()
    careless[_grid(100)](x, z.zero_(), 100)
    assert z.eq(1).all()  # the second call is right, so a test that calls twice, or warms up, passes
    careful = _tuned(add_into_kernel, _Timer(), ["n"], restore_value=["z_ptr"])
    careful[_grid(100)](x, z.zero_(), 100)
    assert z.eq(1).all()
    start = torch.full((100,), 5.0, device=DEVICE)
    zeroed = _tuned(add_into_kernel, _Timer(), ["n"], reset_to_zero=["z_ptr"])
    zeroed[_grid(100)](x, start, 100)
    assert start.eq(1).all()  # for outputs that begin at 0 only: it zeroes before the real call too


def pruning_is_arithmetic():
    """early_config_prune sees the arguments; the configurations that it drops are neither compiled nor timed."""
    timer = _Timer()
    pruned = _tuned(double_kernel, timer, ["n"], prune_configs_by={
        "early_config_prune": lambda configs, named, **_: [c for c in configs if c.kwargs["BLOCK"] >= named["n"]][:1]
    })  # fmt: skip
    x, z = torch.randn(60, device=DEVICE), torch.empty(60, device=DEVICE)
    pruned[_grid(60)](x, z, 60, 1)
    assert torch.equal(z, 2 * x)
    print(f"  {timer.timed} timings; day 3's matmul keeps 5 of 54 by its model")
    assert timer.timed <= 1  # some versions of Triton time even a single configuration


LESSON = Steps(
    about=About(teaches="what autotune's cache is keyed by, what a key costs, what it does to your tensors", hours=0.5),
    steps=(
        every_new_key_is_tuned_anew,
        what_the_key_leaves_out,
        tuning_runs_the_kernel_on_your_tensors,
        pruning_is_arithmetic,
    ),
)

if __name__ == "__main__":
    LESSON.main()
