"""Streams: what the emulator logs, what streams and events promise, and the time that follows from it."""

from dataclasses import replace

from lessonkit import device
from lessonkit.judge import streams
from lessonkit.judge.streams import Call, Machine
from lessonkit.lesson import discover

import pytest
import torch

pytestmark = pytest.mark.kept("cuda_src/05_stream_overlap.*", "cuda_src/emulator/**/*")
LESSON = dict(discover("cuda_src.05_stream_overlap"))["cuda_src.05_stream_overlap"]
RUNGS = {rung.__name__: rung for rung in LESSON.rungs}
HERE = LESSON.extension.lacks()
emulated = pytest.mark.skipif(device.HAS_GPU or bool(HERE), reason=HERE or "kernels run on the GPU here")
CHUNKS, SIZE = 16, 8
STEPS = Machine(link=4 * SIZE, kernels=4 * SIZE)  # an engine takes 1 for a chunk


@emulated
@pytest.mark.parametrize(
    ("rung", "steps", "args"),
    [
        ("overlap_serial", 3 * CHUNKS, ()),
        ("overlap_streams", 3 * CHUNKS, (CHUNKS, 1)),
        ("overlap_streams", CHUNKS + 2, (CHUNKS, 3)),
        ("overlap_engines", CHUNKS + 2, (CHUNKS,)),
        ("overlap_graph", 2 * (CHUNKS + 2), (CHUNKS,)),  # launched twice
    ],
)
def test_the_lessons_predictions(rung, steps, args):
    """(c + 2) / c of the limit in c chunks, and nothing runs unordered with what it needs."""
    RUNGS[rung](torch.randn(CHUNKS * SIZE), 2, *args)
    asked = streams.asked()
    assert any(call.pageable for call in asked)  # a tensor that nobody pinned
    asked = [replace(call, pageable=False) for call in asked]
    order = streams.order(asked)
    assert not order.hazards()
    assert not order.unfinished()
    assert streams.seconds(asked, STEPS) == pytest.approx(steps)


def call(what, stream, *, event=0, blocking=False, pageable=False, reads=(), writes=()):
    return Call(what, what, stream, blocking, event, 4 * SIZE, pageable, reads, writes)


IN = {"writes": ((0, 8),)}
USE = {"reads": ((4, 12),), "writes": ((20, 24),)}


@pytest.mark.parametrize(
    ("between", "right"),
    [
        ([], False),
        ([call("record", 1, event=1), call("wait", 2, event=1)], True),
        ([call("wait", 2, event=1), call("record", 1, event=1)], False),  # it waits for nothing
        ([call("record", 1, event=1), call("synchronise event", 0, event=1)], True),
        ([call("synchronise", 1)], True),
        ([call("synchronise", 2)], False),
        ([call("synchronise all", 0)], True),
        ([call("record", 1, event=1), call("wait", 3, event=1), call("record", 3, event=2),
          call("wait", 2, event=2)], True),  # through a third stream
    ],
)  # fmt: skip
def test_what_orders_two_streams(between, right):
    order = streams.order([call("copy in", 1, **IN), *between, call("kernel", 2, **USE)])
    assert (not order.hazards()) == right
    assert order.unfinished()


def test_the_default_stream_waits_for_blocking_streams():
    """And they for it; streams that were made non-blocking do not, and two blocking ones do not wait for each other."""
    for blocking in (True, False):
        both = [call("copy in", 1, blocking=blocking, **IN), call("kernel", 0, **USE)]
        assert bool(streams.order(both).hazards()) != blocking
        assert bool(streams.order(both[::-1]).hazards()) != blocking
        apart = [both[0], call("kernel", 2, blocking=blocking, **USE)]
        assert streams.order(apart).hazards()
        assert bool(streams.order([both[0], call("kernel", 0), apart[1]]).hazards()) != blocking


def test_reading_the_same_is_no_hazard():
    assert not streams.order([call("kernel", 1, reads=((0, 8),)), call("kernel", 2, reads=((0, 8),))]).hazards()


def test_time():
    """An engine does one thing at a time; the host waits for copies of pageable memory, at half the rate."""
    two = [call("copy in", 1), call("copy in", 2), call("copy out", 3)]
    assert streams.seconds(two, STEPS) == 2
    assert streams.schedule([two[0], two[2]], STEPS) == {"copy in": (0, 1), "copy out": (0, 1)}
    slow = [replace(c, pageable=True) for c in two]
    assert streams.seconds(slow, STEPS) == 6
    assert streams.seconds([call("kernel", 1)] * 3, Machine(1, 4 * SIZE, call=5)) == 16
