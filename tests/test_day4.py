"""Day 4, beside its lessons: the notebook is its script and runs, ncu's list is read right, a flame graph adds up."""

import os
from xml.etree import ElementTree

from lessonkit.base.files import ROOT
from lessonkit.measure.profiled_operators import host_events

import pytest
import torch

from day4_replace_op.lesson24_profile import METRICS, read_ncu, verdict
from day4_replace_op.lesson25_trace import Frame, labelled, svg
from workloads.gpt import FUSED, ONE_FOR_ONE, TINY, VARIANTS, Attention, batches, make, variant

FOLDER = ROOT / "day4_replace_op"


def notebook():
    return pytest.importorskip("nbformat").read(FOLDER / "replace_op.ipynb", as_version=4)


def test_notebook_is_generated_from_its_script():
    jupytext = pytest.importorskip("jupytext")
    script = jupytext.read(FOLDER / "replace_op.py")
    assert [(c.cell_type, c.source) for c in notebook().cells] == [(c.cell_type, c.source) for c in script.cells], (
        "run `jupytext --to ipynb day4_replace_op/replace_op.py`"
    )
    assert not any(cell.get("outputs") for cell in notebook().cells), "outputs are for whoever runs it"


@pytest.mark.night
def test_notebook_runs(monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as for whoever opens it
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    book = notebook()
    nbclient.NotebookClient(book, timeout=1800, kernel_name="python3").execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))
    assert "All versions agree" in printed
    assert "trunk.blocks.0.attention: Attention -> CourseAttention" in printed


def ncu_line(launch, kernel, metric, value):
    return f'"{launch}","1","python","{kernel}","{metric}","unit","{value}"'


def test_counters_are_read():
    """Two launches of one kernel are added up, their shares weighed by time; what was not counted is left out."""
    values = {  # of metrics in their order: ns, bytes read and written, % of memory, of the SMs, of warps
        (0, "void add_norm_kernel(float*, int)"): ("1,000", "2,000,000", "1000000", "90", "20", "50"),
        (1, "void add_norm_kernel(float*, int)"): ("3000", "2000000", "1000000", "70", "40", "30"),
        (2, "void at::native::(anonymous namespace)::gemm<float, 4>(int)"): ("2000", "5", "5", "30", "95", "12"),
        (3, "void late_kernel()"): ("n/a", "5", "5", "30", "95", "12"),
    }
    head = '"ID","Process ID","Process Name","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [ncu_line(*launch, m, v) for launch, vs in values.items() for m, v in zip(METRICS, vs, strict=True)]
    first, second = read_ncu("\n".join(["==PROF== Connected", head, *lines]))
    assert first == {
        "kernel": "add_norm_kernel", "launches": 2, "us": 4.0, "MB read": 4.0, "MB written": 2.0,
        "memory %": 75.0, "SM %": 35.0, "warps %": 35.0, "waits for": "memory",
    }  # fmt: skip
    assert (second["kernel"], second["waits for"]) == ("gemm[float, 4]", "compute")


def test_verdict_names_the_busier_unit_if_it_is_busy():
    assert verdict(80, 60) == "memory"
    assert verdict(60, 80) == "compute"
    assert verdict(59, 20).startswith("latency")


def test_flame_graph_is_as_wide_as_its_time():
    root = Frame(
        10.0, {"forward": Frame(6.0, {"<lambda> & co": Frame(5.0)}), "backward": Frame(4.0), "none": Frame(0.0)}
    )
    drawn = ElementTree.fromstring(svg("a step", root, width=100))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {g.find(f"{space}title").text: g.find(f"{space}rect") for g in drawn.iter(f"{space}g")}
    widths = {title.split(":")[0]: float(box.get("width")) for title, box in boxes.items()}
    assert widths == {"step": 100, "forward": 60, "<lambda> & co": 50, "backward": 40}, "a box of no width is left out"
    starts = {title.split(":")[0]: float(box.get("x")) for title, box in boxes.items()}
    assert starts == {"step": 0, "forward": 0, "<lambda> & co": 0, "backward": 60}


def test_an_error_inside_puts_the_modules_back():
    model = make(TINY)

    def fails():
        with variant(model, "one for one"):
            assert not any(type(m) is Attention for m in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert sum(type(m) is Attention for m in model.modules()) == TINY.layers


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_loss_of_pytorchs(name):
    """On a CPU by PyTorch, without the interpreter: the variants' own wiring."""
    model, batch = make(TINY), next(batches(TINY, 1))
    expected = model(*batch)
    with variant(model, name) as patched:
        torch.testing.assert_close(model(*batch), expected)
        replaced = {row.was for row in patched.rows if row.now}
    table = {"one for one": ONE_FOR_ONE, "fused": FUSED}.get(name, ((), {}))
    assert replaced == {old.__name__ for old in (*table[0], *table[1])}


def test_a_variant_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="'faster', expected one of PyTorch, one for one, fused"):
        variant(make(TINY), "faster")


def test_labels_are_the_classes_that_a_model_had():
    model, batch = make(TINY), next(batches(TINY, 1))
    with labelled(model), variant(model, "fused"), torch.profiler.profile() as seen:
        model(*batch)
    names = [event.name for event in host_events(seen)]  # a GPU's spans have the same names
    assert {name: names.count(name) for name in ("Trunk", "Attention", "MLP", "FusedMLP")} == {
        "Trunk": 1, "Attention": TINY.layers, "MLP": TINY.layers, "FusedMLP": 0
    }  # fmt: skip
