"""Trace, flame graph, memory timeline: where in the model, and when
===============================================================
Lesson 24's tables say which kernels take the time. This lesson's three views say which module called them, and when:

    trace             a start and a length for every call, on the host's line and on the GPU's; see ui.perfetto.dev
    flame graph       from the trace's nesting: a box for each module, operator or step of autograd. It is as wide as
                      the time of all that it contains. Callers are above callees. The twelve blocks are one box.
    memory timeline   from the trace's allocations

Predicted for GPT-2 small:

    GB |           |
       |           |             PyTorch: 12 layers save their activations on the way up; the spike is three [M, V] in
       |        ___|___          fp32, the log-softmax and two gradients, 20 GB for a few ms
       |    ___/       \\___
       |___/               \\___  fused: the same ramp, and a spike of 1.3 GB: a part's logits and dW
       +------------------------ t
           forward | backward

The fused ramp is as high, since a norm, a GELU or a matmul needs the same inputs for its backward. A layer of 32,768
tokens saves, in units of 50 MB (768 elements per token in bf16):

    two sums of the stream in fp32          4
    norms                                   2
    q, k and v                              3
    attention's output                      1
    the MLP before and after its GELU       8      18 units, 11 GB in 12 layers

PyTorch does not keep a norm's fp32 output, since a cast saves nothing for its backward. In the flame graph the readout
is nearly half of PyTorch's forward: a third of its FLOPs and all of the loss's bytes. It is half of ours too, whose
forward includes the loss's backward.

You will learn: to label modules without editing them (hooks), to build a flame graph from a trace, to read a ramp.
Run it:    python3 course.py run lesson25_trace
Written:   reports/traces/<device>.<operators>.json; reports/<device>/day4_replace_op.lesson25_trace.<operators>.svg
"""

import html
import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field

from lessonkit import About, Steps, Table, device, rows
from lessonkit.measure.profiled_operators import ACTIVITIES, host_events

import torch
from torch.profiler import profile, record_function

from course_ops.testing import kernels
from workloads.gpt import CONFIG, GPU, batches, make, stepper, variant

COMPARED = ("PyTorch", "fused")
PARTS = ("Attention", "MLP", "LayerNorm", "Readout")


@contextmanager
def labelled(model):
    """Inside `with`, each forward of a module is a span named after its class; the model is not edited."""
    open_spans, hooks = [], []

    def enter(name):
        open_spans.append(record_function(name))
        open_spans[-1].__enter__()

    def leave(module, args, output):
        open_spans.pop().__exit__(None, None, None)

    for module in model.modules():
        name = type(module).__name__  # the class before a later replacement
        hooks.append(module.register_forward_pre_hook(lambda module, args, name=name: enter(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def traced():
    """(name, the profile of one warm step, the trace as a list of events) for each variant."""
    batch = next(batches(CONFIG, 1))
    for name in COMPARED:
        model = make()
        with kernels(), labelled(model), variant(model, name):
            step = stepper(model)
            step(*batch)
            with profile(activities=ACTIVITIES, profile_memory=True) as seen:
                step(*batch)
                if GPU:
                    torch.cuda.synchronize()
        path = rows.REPORTS / "traces" / f"{device.name()}.{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path))
        yield name, seen, json.loads(path.read_text())["traceEvents"]
        del model, step


# ---- Flame graph --------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    """A box: ms of all calls of this name under the same callers, and the boxes of what they call."""

    ms: float = 0.0
    below: dict[str, "Frame"] = field(default_factory=dict)


def frames(seen):
    """The calls of a step as nested frames below forward, backward and optimizer; on a GPU with the kernels' time."""
    root = Frame()

    def add(event, above):
        ms = (event.device_time_total if GPU else event.cpu_time_total) * 1e-3
        if ms > 0:
            frame = above.below.setdefault(event.name.split(": ")[-1], Frame())  # evaluate_function: MmBackward0
            frame.ms += ms
            for child in event.cpu_children:
                add(child, frame)

    for event in host_events(seen):
        if event.cpu_parent is None:
            part = next((p for p in ("autograd", "Optimizer") if event.name.startswith(p)), "")
            phase = root.below.setdefault(
                {"autograd": "backward", "Optimizer": "optimizer"}.get(part, "forward"), Frame()
            )
            add(event, phase)
    for phase in root.below.values():
        phase.ms = sum(frame.ms for frame in phase.below.values())
    root.ms = sum(phase.ms for phase in root.below.values())
    return root


def svg(title, root, width=1200, line=18):
    """A flame graph: callers above callees, as wide as their time; boxes narrower than a pixel are left out."""
    boxes, depth = [], 0

    def draw(name, frame, x, level):
        nonlocal depth
        depth, w = max(depth, level), frame.ms / root.ms * width
        label = html.escape(f"{name}: {frame.ms:.3g} ms, {frame.ms / root.ms:.1%}")
        hue = zlib.crc32(name.encode()) % 360
        boxes.append(
            f'<g><title>{label}</title><rect x="{x:.1f}" y="{level * line + 24}" width="{w:.1f}" height="{line - 1}" '
            f'fill="hsl({hue} 60% 75%)"/><text x="{x + 3:.1f}" y="{level * line + 37}">'
            f"{html.escape(name[: max(0, int(w / 6.5) - 1)])}</text></g>"
        )
        for child, below in sorted(frame.below.items(), key=lambda item: -item[1].ms):
            if below.ms / root.ms * width >= 1:
                draw(child, below, x, level + 1)
            x += below.ms / root.ms * width

    draw("step", root, 0, 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{(depth + 1) * line + 30}" '
        f'font-family="monospace" font-size="11"><text x="3" y="15">{html.escape(title)}</text>{"".join(boxes)}</svg>\n'
    )


def flame_graphs():
    """A frame contains what it calls, so no level is wider than the one above; the table has each share."""
    table = []
    for name, seen, spans in traced():
        root = frames(seen)

        def fits(frame):
            assert sum(f.ms for f in frame.below.values()) < 1.001 * frame.ms or not frame.below
            return all(fits(f) for f in frame.below.values())

        assert fits(root)
        assert {"forward", "backward", "optimizer"} == set(root.below)
        assert any(e.get("cat") == "kernel" for e in spans) == GPU
        path = rows.REPORTS / device.name() / f"{__name__}.{name}.svg"
        what = "kernels on the GPU" if GPU else "a CPU's time; no GPU here"
        rows.write_atomically(path, svg(f"{name}, one training step, {device.name()}: {what}", root))
        whole = _parts(root)
        row = {"where": device.name(), "operators": name, "ms": round(root.ms, 2)}
        row |= {phase: f"{root.below[phase].ms / root.ms:.1%}" for phase in ("forward", "backward", "optimizer")}
        table.append(row | {part: f"{whole.get(part, 0) / root.ms:.1%}" for part in PARTS})
    files = " ".join(f"![{name}]({__name__}.{name}.svg)" for name in COMPARED)
    return Table("flame", table, f"Shares of a step; of the parts of the model, their forward alone.\n\n{files}")


def _parts(root):
    """ms of each part of the model in the forward."""
    found = {}

    def walk(frame):
        for name, below in frame.below.items():
            found[name] = found.get(name, 0) + below.ms
            walk(below)

    walk(root.below["forward"])
    return found


def memory():
    """A step frees all that it allocates; in between memory climbs with the layers and peaks at the logits."""
    table, peaks = [], {}
    for name, _, spans in traced():
        mine = [e for e in spans if e["name"] == "[memory]" and (e["args"]["Device Type"] == 1) == GPU]
        points = sorted((e["ts"], e["args"]["Total Allocated"]) for e in mine)
        start, end = points[0][0], points[-1][0]
        peaks[name] = max(allocated for _, allocated in points)
        for percent in range(0, 101, 4):
            until = start + (end - start) * percent / 100
            now = [allocated for ts, allocated in points if ts <= until][-1]
            table.append({"step": f"{percent}%", "MB": round(now / 1e6, 3), "operators": name})
        assert points[-1][1] - points[0][1] < 0.1 * peaks[name], "what a step took it has given back"
    assert not GPU or peaks["fused"] < peaks["PyTorch"]
    at_most = ", ".join(f"{name} {peak / 1e6:,.1f} MB" for name, peak in peaks.items())
    note = f"Allocated, over the host's time of a step (a GPU comes later). At the peak: {at_most}."
    return Table("memory", table, note, x="step", y="MB", by="operators")


LESSON = Steps(
    (flame_graphs, memory),
    about=About(teaches="traces, flame graphs made from them, the memory of a step over time", hours=0.5),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
