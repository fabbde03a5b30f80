"""The grader of exercise05_stream_overlap.cu."""

from lessonkit import case, cuda
from lessonkit.exercise import Exercise, Wrong
from lessonkit.judge import streams

import torch

kernels = cuda.extension(__file__)
CHUNKS, SIZE = 16, 64
# Steps: the time that each of the three engines takes for a chunk. A call of the host is nothing beside it.
STEPS = streams.Machine(link=4 * SIZE, kernels=4 * SIZE, call=1e-3)


def bend(x, size):
    y = torch.empty_like(x)
    kernels.bend(x, y, x.numel(), size)
    return y


def _asked(n=CHUNKS * SIZE):
    bend(torch.randn(n), SIZE)
    return streams.asked()


def pieces():
    """Every chunk is copied in, computed and copied out, each by a call of its own."""
    for n in (CHUNKS * SIZE, 5 * SIZE + 9):
        asked, chunks = _asked(n), -(-n // SIZE)
        for what in ("copy in", "kernel", "copy out"):
            mine = [call for call in asked if call.what == what]
            assert len(mine) == chunks, f"n = {n} in chunks of {SIZE}: {len(mine)} times {what}, expected {chunks}"
            moved = sum(call.bytes for call in mine)
            assert moved == 4 * n, f"n = {n}: {what} of {moved} bytes in all, expected {4 * n}"


def pinned():
    """No copy goes through memory that only the host reaches."""
    slow = [call.name for call in _asked() if call.pageable]
    assert not slow, f"{slow[0]} (and {len(slow) - 1} more) is of pageable memory: the host copies it first, and waits"


def ordered():
    """Two operations on the same bytes, one of them a write, have one order, whatever a GPU may choose."""
    for n in (CHUNKS * SIZE, 5 * SIZE + 9):
        found = streams.order(_asked(n)).hazards()
        if found:
            one, two = found[0]
            raise AssertionError(
                f"nothing orders {one.name} (stream {one.stream}) and {two.name} (stream {two.stream}), which touch "
                f"the same bytes, and one of them writes ({len(found)} such pairs; calls of a kind count from 0, "
                f"streams from 1, the caller's is 0)"
            )


def finished():
    """When `stream` has been waited for, everything is done."""
    late = [call.name for call in streams.order(_asked()).unfinished()]
    assert not late, f"{late[-1]} may still be under way ({len(late)} such calls): nothing makes `stream` wait for it"


def overlapped():
    """16 chunks take 18 steps: the first copy in and the last copy out are alone, in between all three engines work."""
    asked = _asked()
    took, waits = streams.seconds(asked, STEPS), [call for call in asked if call.what.startswith("synchronise")]
    host = f"; the host waits {len(waits)} times, and asks for nothing meanwhile" if len(waits) > 1 else ""
    used = len({call.stream for call in asked if call.what in ("copy in", "kernel", "copy out")})
    assert took < CHUNKS + 2 + 0.5, (
        f"{took:.1f} steps for {CHUNKS} chunks, {CHUNKS + 2} will do, one after the other is {3 * CHUNKS}; copies and "
        f"kernels are in {used} stream{'s' * (used > 1)}{host}"
    )


EXERCISE = Exercise(
    claims=(pieces, pinned, ordered, finished, overlapped),
    op=bend,
    reference=lambda x, size: x / (1 + x * x),
    inputs=lambda n, size, dtype: (torch.randn(n), size),
    extension=kernels,
    dtypes=(torch.float32,),
    cases=(
        case("one element in a chunk of its own", n=1, size=8),
        case("a chunk larger than x: one slot is never used", n=100, size=128),
        case("chunks of one element: each slot is used many times", n=9, size=1),
        case("a last chunk that is short, in slot 1", n=1000, size=300),
    ),
    hints=(
        "The three engines share the slots. Ask of each call: which call wrote its input, which reads its output? "
        "The second question is about chunk c - 2. Pageable memory makes the host wait; cudaMallocHost makes pinned.",
        "Copy in c waits for kernel c - 2 (computed), kernel c for copy in c (arrived) and copy out c - 2 (left), copy "
        "out c for kernel c. A wait for an event that is not recorded yet returns at once, so the first two "
        "chunks need no special case. Around the loop: record begin in `stream`, all three wait for it; at the end "
        "record end in `out`, `stream` waits for it.",
        "in: cudaStreamWaitEvent(in, lanes.computed[slot], 0); cudaMemcpyAsync(sx, x + from, count * sizeof(float), "
        "cudaMemcpyHostToDevice, in); cudaEventRecord(lanes.arrived[slot], in). work: wait for arrived[slot] and "
        "left[slot], launch <<<course::ceil_div(count, 128), 128, 0, work>>>, record computed[slot]. out: wait for "
        "computed[slot], copy, record left[slot].",
    ),
    predicted=(
        "48 steps in one stream: 3 for each chunk. 18 in three streams: 16, and 2 in which the pipeline fills and "
        "drains. 33 with a single slot: after the first copy in, each chunk takes 2 steps, its kernel, and then its "
        "copy out beside the next chunk's copy in."
    ),
    wrong=(
        Wrong(
            "all in one stream: three engines, and one at a time works",
            "in = lanes.in, work = lanes.work, out = lanes.out;",
            "in = lanes.in, work = lanes.in, out = lanes.in;",
            "overlapped",
        ),
        Wrong(
            "the kernel does not wait for what comes in",
            "CUDA_CHECK(cudaStreamWaitEvent(work, lanes.arrived[slot], 0));\n",
            "\n",
            "ordered",
        ),
        Wrong(
            "a slot is filled again before the kernel has read it",
            "CUDA_CHECK(cudaStreamWaitEvent(in, lanes.computed[slot], 0));",
            "",
            "ordered",
        ),
        Wrong(
            "a result is written over before it has been copied out",
            "CUDA_CHECK(cudaStreamWaitEvent(work, lanes.left[slot], 0));",
            "",
            "ordered",
        ),
        Wrong(
            "the copy out waits for the copy in, not for the kernel",
            "cudaStreamWaitEvent(out, lanes.computed[slot], 0)",
            "cudaStreamWaitEvent(out, lanes.arrived[slot], 0)",
            "ordered",
        ),
        Wrong(
            "the kernel goes to the caller's stream, which no event orders with the copies",
            "128, 0, work>>>",
            "128, 0, stream>>>",
            "ordered",
        ),
        Wrong(
            "the copies do not wait for what was asked of `stream` before",
            "    for (cudaStream_t s : {in, work, out}) CUDA_CHECK(cudaStreamWaitEvent(s, lanes.begin, 0));\n",
            "",
            "ordered",
        ),
        Wrong(
            "`stream` waits for the last copy in, not for the last copy out",
            "cudaEventRecord(lanes.end, out)",
            "cudaEventRecord(lanes.end, in)",
            "finished",
        ),
        Wrong(
            "pageable memory: the host waits for every copy",
            "CUDA_CHECK(cudaMallocHost(&data, n * sizeof(float)));",
            "data = static_cast<float*>(std::malloc(n * sizeof(float)));",
            "pinned",
        ),
        Wrong(
            "the host waits for the device in each turn, so that nothing is queued while something runs",
            "CUDA_CHECK(cudaEventRecord(lanes.left[slot], out));\n",
            "CUDA_CHECK(cudaEventRecord(lanes.left[slot], out));\n        CUDA_CHECK(cudaDeviceSynchronize());\n",
            "overlapped",
        ),
        Wrong(
            "one chunk of everything: a whole copy before the first sum",
            "    Host hx(n), hy(n);\n",
            "    size = n;\n    Host hx(n), hy(n);\n",
            "pieces",
        ),
        Wrong(
            "a single slot: a copy in waits for the kernel, a kernel for the copy out",
            "slot = c % SLOTS;",
            "slot = 0;",
            "overlapped",
        ),
    ),
)
