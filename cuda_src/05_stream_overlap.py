"""Streams: copy in, compute and copy out at the same time
=======================================================
The versions and what they predict are in 05_stream_overlap.cu. Here x and y are tensors of the host, as the subject is
the way between host and device; they are pinned where there is a GPU. The results are checked everywhere, and where
there is a GPU also that overlap pays. The program itself prints the table of times.

Run it:    python3 course.py run 05_stream_overlap
Check it:  python3 course.py check 05_stream_overlap
Time it:   nvcc -std=c++20 -O3 -arch=native -Icuda_src/include -o overlap cuda_src/05_stream_overlap.cu && ./overlap
"""

from time import perf_counter

from lessonkit import About, Lesson, Mutant, cuda, device

import torch

from problems.out_and_back import PROBLEM, inputs, reference

kernels = cuda.extension(__file__)  # 05_stream_overlap.cu, built at the first call
CHUNKS = 5  # odd, so that no check has chunks of one length


def overlap_serial(x, turns):
    """[n] -> [n] float32, both in the host's memory: all in, all turns, all out."""
    y = _prepare(x, turns)
    kernels.overlap_serial(x, y, x.numel(), turns)
    return y


def overlap_streams(x, turns, chunks=CHUNKS, streams=3):
    """As overlap_serial, in chunks that take turns on 1 to 8 streams."""
    y = _prepare(x, turns)
    kernels.overlap_streams(x, y, x.numel(), turns, chunks, streams)
    return y


def overlap_engines(x, turns, chunks=CHUNKS):
    """As overlap_serial, in chunks: a stream for each direction and one for the turns, ordered by events."""
    y = _prepare(x, turns)
    kernels.overlap_engines(x, y, x.numel(), turns, chunks)
    return y


def overlap_graph(x, turns, chunks=CHUNKS):
    """As overlap_engines, recorded as a CUDA graph and launched twice."""
    y = _prepare(x, turns)
    kernels.overlap_graph(x, y, x.numel(), turns, chunks)
    return y


def _prepare(x, turns):
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise TypeError("x must be a torch.float32 tensor: convert it with x.float()")
    if x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"x is on {x.device}, strides {x.stride()}: it must be contiguous in the host's memory")
    if turns < 0:
        raise ValueError(f"turns is {turns}, expected at least 0")
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=device.HAS_GPU)


def any_chunks_on_any_streams(overlap):
    """More chunks than elements, one chunk, one stream and eight: always the same answer."""
    x, turns = inputs(103, 2)
    if overlap is overlap_streams:
        for chunks, streams in ((1, 1), (1, 8), (7, 2), (8, 8), (200, 4)):
            torch.testing.assert_close(overlap(x, turns, chunks, streams), reference(x, turns))
    elif overlap is not overlap_serial:
        for chunks in (1, 2, 200):
            torch.testing.assert_close(overlap(x, turns, chunks), reference(x, turns))


def overlap_pays(overlap):
    """On a GPU: 64 MB each way with as much to compute, in chunks, take less time than one after the other."""
    if not device.HAS_GPU or overlap is overlap_serial:
        return

    def best(f, *args):
        times = []
        for _ in range(7):
            start = perf_counter()
            f(*args)
            times.append(perf_counter() - start)
        return min(times)

    # Both make their device memory, and overlap also streams and events: the gain has to be larger than that.
    x, turns = inputs(2**26, 1500)
    times = 2 if overlap is overlap_graph else 1  # that one launches its graph twice, and so does everything twice
    assert best(overlap, x, turns, 16) < 0.8 * times * best(overlap_serial, x, turns)


# fmt: off
LESSON = Lesson(
    about=About(
        teaches="streams, events, copies behind computation, CUDA graphs; the gain against the limit that "
        "transfers set",
        hours=1.5,
        star=True,
        language="CUDA C++",
        pictures=("streams",),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(overlap_serial, overlap_streams, overlap_engines, overlap_graph),
    prints="2^26 + 3 floats in, 1500 turns an element, and out again. The limit is the longest of the three parts.",
    wrong=(
        Mutant("an element too many", "turn_kernel", "i < n", "i <= n", "overlap_serial", "out of bounds"),
        Mutant("a turn too few", "turn_kernel", "turn < turns", "turn < turns - 1", "overlap_serial"),
        Mutant("chunks to the beginning", "Pipeline", "y_ + from, dy_", "y_, dy_", "overlap_streams", "nan"),
        Mutant("the last chunk forgotten", "Pipeline", "copy_out(begin(c), begin(c + 1), s);",
               "if (c + 1 < chunks_) copy_out(begin(c), begin(c + 1), s);", "overlap_streams", "nan"),
        Mutant("every element begins at 1", "turn_kernel", ": -1.0f", ": 1.0f", "overlap_streams"),
        Mutant("what never came in", "Pipeline", "copy_in(begin(c), begin(c + 1), streams_[0]);", "",
               "overlap_engines", "uninitialised"),
        Mutant("all lean towards a chunk's first element", "turn_kernel", "0.001f * x[i]", "0.001f * x[0]",
               "overlap_engines"),
        Mutant("a graph of nothing", "overlap_graph", "again < 2", "again < 0", "overlap_graph", "nan"),
        Mutant("a launch adds to the one before", "turn_kernel", "y[i] = value", "y[i] += value", "overlap_graph",
               "uninitialised"),
    ),
    claims={"turn_kernel": ("no spills", "no shared memory")},
    properties=(any_chunks_on_any_streams, overlap_pays),
)
# fmt: on

if __name__ == "__main__":
    LESSON.main()
