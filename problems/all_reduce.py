"""All-reduce: every rank gets the sum of all ranks' vectors, the same bits on each.

x [ranks, n] in fp32, row r the data of rank r, 2 to 8 ranks -> [ranks, n], every row the sum of the rows of x.
"""

from lessonkit import DEVICE, Problem, Refusal, Work, case

import torch


def reference(x):
    return x.sum(0, keepdim=True).repeat(len(x), 1)


def inputs(ranks, n, dtype=torch.float32):
    # Each rank has a mean of its own: a rank left out, or added twice, shows everywhere.
    return (torch.randn(ranks, n, device=DEVICE) + torch.arange(ranks, device=DEVICE)[:, None],)


def every_rank_has_the_same_bits(rung):
    """A chunk is summed once, in one order: data-parallel replicas that differ in a bit drift apart."""
    for ranks in (2, 3, 5):
        y = rung(*inputs(ranks, 1001))
        assert torch.equal(y, y[:1].expand_as(y)), f"{ranks} ranks"


PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    work=lambda ranks, n, dtype: Work(bytes=2 * ranks * n * dtype.itemsize, flops=(ranks - 1) * n),
    checks=(
        case("nothing to do", ranks=2, n=0),
        case("one element: all chunks but the first are empty", ranks=4, n=1),
        case("two ranks: no step in the middle", ranks=2, n=4096),
        case("rows that begin at no multiple of 16 bytes: single floats", ranks=3, n=1021),
        case("the last chunk is shorter", ranks=3, n=1000),
        case("as many ranks as there may be, fewer elements than they would take", ranks=8, n=20),
        case("five ranks: steps of every kind", ranks=5, n=512),
        case("several blocks a rank, and the loop turns once more for some", ranks=2, n=2 * 4 * 512 * 3 + 8),
        case("whole chunks, on which bytes are counted", ranks=4, n=4 * 2048),
    ),
    benches=({"ranks": 4, "n": 2**24},),
    peers={"torch": reference},
    properties=(every_rank_has_the_same_bits,),
    refuses=(
        Refusal("alone", lambda f: f(*inputs(1, 8)), ValueError, "2 to 8 ranks"),
        Refusal("nine", lambda f: f(*inputs(9, 8)), ValueError, "2 to 8 ranks"),
        Refusal("not float32", lambda f: f(inputs(2, 8)[0].half()), TypeError, "x is torch.float16"),
        Refusal("every second element", lambda f: f(inputs(2, 8)[0][:, ::2]), ValueError, "contiguous"),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)
