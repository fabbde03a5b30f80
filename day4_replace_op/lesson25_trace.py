"""Trace, flame graph, memory timeline: where in the model, and when
===============================================================
The tables of lesson 24 say which kernels take the time; these three say for whom. A trace has a start and a length for
every call, on the host's line and on the GPU's (open it in ui.perfetto.dev). Its nesting makes a flame graph: a box for
each module, operator or step of autograd, as wide as the time of all that it contains, callers above callees; modules
of one class are added up, so that twelve blocks are one box. And each allocation in it makes the memory's timeline.

Predicted, GPT-2 small: PyTorch's memory is a ramp (12 layers save their activations), a spike at the turn (logits in
bf16 and fp32, their log-softmax and its gradient: 20 GB in a few ms) and a ramp down. Fused: the spike is a part's
logits and the weight's gradient, 1.3 GB. The ramp is as high: what a norm, a GELU or a product wants for its backward
they want from us as well. A layer of 32,768 tokens, in units of 50 MB (768 numbers a token in bf16): two sums of the
stream in fp32 4, norms 2, q k v 3, attention's output 1, the MLP before and after its GELU 8; 18 units, 11 GB in 12.
(One could think that PyTorch keeps a norm's output in fp32 too; but a cast saves nothing, and so nobody keeps it.)
In the flame graph the readout is nearly half of PyTorch's forward (a third of its FLOPs, all of the loss's bytes), and
half of ours, whose forward holds the loss's backward too.

You will learn: labels for modules that one must not edit (hooks), to build a flame graph from a trace, to read a ramp.
Run it:    python day4_replace_op/lesson25_trace.py
Written:   reports/traces/<device>.<operators>.json; reports/<device>/day4_replace_op.lesson25_trace.<operators>.svg
"""

import html
import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field

from lessonkit import About, Steps, Table, device, rows
from lessonkit.measure.operators import ACTIVITIES, host_events

import torch
from torch.profiler import profile, record_function

from course_ops.testing import kernels
from workloads.gpt import CONFIG, GPU, batches, make, stepper, variant

COMPARED = ("PyTorch", "fused")
PARTS = ("Attention", "MLP", "LayerNorm", "Readout")


@contextmanager
def labelled(model):
    """Inside, each forward of a module is a span with the name of the class that it has now; no edit of the model."""
    open_spans, hooks = [], []

    def enter(name):
        open_spans.append(record_function(name))
        open_spans[-1].__enter__()

    def leave(module, args, output):
        open_spans.pop().__exit__(None, None, None)

    for module in model.modules():
        name = type(module).__name__  # of an operator that is replaced later, the name before
        hooks.append(module.register_forward_pre_hook(lambda module, args, name=name: enter(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def traced():
    """(name, what the profiler saw of one warm step, the trace as a list of its events) for each variant."""
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
    """A box: ms of all calls of this name under the same callers, and what they call."""

    ms: float = 0.0
    below: dict[str, "Frame"] = field(default_factory=dict)


def frames(seen):
    """The calls of a step as nested frames, below forward, backward and optimizer; of a GPU the time of the kernels."""
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
    """A flame graph: callers above callees, as wide as their time; what is narrower than a pixel is left out."""
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
    """A frame holds what it calls, so no level is wider than the one above; the readout's share is seen at once."""
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
    """A step gives back what it takes; in between memory climbs with the layers and spikes where the logits are."""
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
