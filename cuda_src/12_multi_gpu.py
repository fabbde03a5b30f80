"""Several GPUs: an all-reduce by hand, everyone reading everybody's data, then the ring
====================================================================================
The kernels are in 12_multi_gpu.cu. Here 2 to 8 ranks share one memory, so that the algorithms are checked against
PyTorch on any machine: the same kernels, steps and flags, only the links are missing. The program itself, on a machine
with 2 GPUs, runs them across NVLink, beside copies between the GPUs and NCCL's all-reduce.

What two H200 had to say (reports/): a copy gets six sevenths of the link, the rest is packets' headers; loads are no
slower than stores, so enough of them are under way. Of 4 MB and more the ring with flags is ahead of NCCL; of 64 KB the
time is launches and one microsecond a message, and whoever has fewest messages is first.

Run it:    python cuda_src/12_multi_gpu.py
Check it:  python -m lessonkit check 12_multi_gpu
Time it:   the compile and run lines at the top of 12_multi_gpu.cu, with 2 GPUs
"""

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, case, cuda, expect

import torch

kernels = cuda.extension(__file__)  # 12_multi_gpu.cu, built at the first call
BLOCKS = 128  # flags a rank, as in 12_ring.cuh


def reference(x):
    return x.sum(0, keepdim=True).repeat(len(x), 1)


def read_all(x):
    """[ranks, n] -> [ranks, n] float32: every rank reads the data of all and sums them."""
    return _all_reduce(kernels.read_all, x)


def ring_steps(x):
    """[ranks, n] -> [ranks, n] float32: reduce-scatter and all-gather along the ring, a launch for each step."""
    return _all_reduce(kernels.ring_steps, x)


def ring_flags(x):
    """[ranks, n] -> [ranks, n] float32: the ring in one launch, neighbours agree by flags."""
    return _all_reduce(kernels.ring_flags, x)


def _all_reduce(launch, x):
    expect(x=x, dtypes=[torch.float32], ndim=2, contiguous=True)
    ranks, n = x.shape
    y, inbox = torch.empty_like(x), torch.empty_like(x)
    flags = torch.zeros(ranks, BLOCKS, dtype=torch.int32, device=x.device)
    launch(x, y, inbox, flags, ranks, n)
    return y


def inputs(ranks, n, dtype=torch.float32):
    # Each rank has a mean of its own: a rank left out, or added twice, shows everywhere.
    return (torch.randn(ranks, n, device=DEVICE) + torch.arange(ranks, device=DEVICE)[:, None],)


def every_rank_has_the_same_bits(rung):
    """A chunk is summed once, in one order: data-parallel replicas that differ in a bit drift apart."""
    for ranks in (2, 3, 5):
        y = rung(*inputs(ranks, 1001))
        assert torch.equal(y, y[:1].expand_as(y)), f"{ranks} ranks"


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(read_all, ring_steps, ring_flags),
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
    prints="Between GPUs, which the rows above are not: there all ranks share one memory.",
    work=lambda ranks, n, dtype: Work(bytes=2 * ranks * n * dtype.itemsize, flops=(ranks - 1) * n),
    wrong=(
        Mutant("the first rank stands for all", "read_all_kernel", "(p.x[r]) + q", "(p.x[0]) + q", "read_all"),
        Mutant(
            "what has come is not added", "send_chunk", "0 < step && step < k", "1 < step && step < k", "ring_steps"
        ),
        Mutant(
            "the sum travels one step less",
            "send_chunk",
            "whole = step == k - 1",
            "whole = step == k - 2",
            "ring_steps",
            "nan",
        ),
        Mutant(
            "chunks go round the other way",
            "send_chunk",
            "(rank - step + 2 * k) % k",
            "(rank + step) % k",
            "ring_steps",
            "nan",
        ),
        Mutant("the last step is missing", "ring_steps", "step < steps", "step < steps - 1", "ring_steps", "nan"),
        Mutant(
            "nobody waits for the left neighbour",
            "ring_flags_kernel",
            "if (step > 0) wait(p.flags[rank] + block, base + step);",
            "",
            "ring_flags",
            "race",
        ),
        Mutant(
            "waits for one step less",
            "ring_flags_kernel",
            "block, base + step)",
            "block, base + step - 1)",
            "ring_flags",
            "race",
        ),
        Mutant("the flag before the data", "signal", "__syncthreads();", "", "ring_flags", "race"),
        Mutant(
            "one's own flag", "ring_flags_kernel", "signal(p.flags[right]", "signal(p.flags[rank]", "ring_flags", "race"
        ),
    ),
    properties=(every_rank_has_the_same_bits,),
    peers={"torch": reference},
    claims={
        "read_all_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "ring_step_kernel": ("16-byte loads", "16-byte stores", "no spills"),
        "ring_flags_kernel": ("16-byte loads", "16-byte stores", "no spills"),
    },
    # Of 4 ranks: everyone reads 4n and writes n. In the ring 6 + 5 (k - 2) = 16 quarters of n are read or written.
    passes={read_all: 2.5, ring_steps: 2.0, ring_flags: 2.0},
    refuses=(
        Refusal("alone", lambda f: f(*inputs(1, 8)), ValueError, "2 to 8 ranks"),
        Refusal("nine", lambda f: f(*inputs(9, 8)), ValueError, "2 to 8 ranks"),
        Refusal("not float32", lambda f: f(inputs(2, 8)[0].half()), TypeError, "x is torch.float16"),
        Refusal("every second element", lambda f: f(inputs(2, 8)[0][:, ::2]), ValueError, "contiguous"),
    ),
    dtypes=(torch.float32,),
    bench_dtype=torch.float32,
)

if __name__ == "__main__":
    LESSON.main()
