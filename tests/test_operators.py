"""course_ops' own rows: the zoo of shapes, how operators answer problems, runs that resume, figures that fit."""

import contextlib
import dataclasses
import inspect
import re
from types import SimpleNamespace

from lessonkit.__main__ import app
from lessonkit.base import device, words
from lessonkit.base.files import write_atomically
from lessonkit.commands import show
from lessonkit.lesson import kernels
from lessonkit.measure import launches, operator_bench, operator_rows, rows, stale, timing
from lessonkit.measure.answers import fill_with_nan
from lessonkit.pages import first_calls, guides, operator_pages, shipped

import pytest
import torch
from typer.testing import CliRunner

import course_ops
from problems import operators as answers
from problems import zoo

OPERATORS = operator_rows.operators()
ALL = operator_rows.cases()
# What course_ops exports and is no operator of its own; attention's parts are timed as attention.
OTHERS = {"Unsupported", "patch", "attention_forward", "attention_backward"}
# What each of the course's words for an operator is called here.
ASKED = {word: name for name, words in shipped.SHIPPED.items() for word in words} | {"fp32 matmul": "matmul"}
SMALL = {
    "softmax": {"M": 3, "N": 40},
    "layer_norm": {"M": 3, "N": 40},
    "rms_norm": {"M": 3, "N": 40},
    "add_norm": {"M": 3, "N": 40},
    "cross_entropy": {"M": 3, "V": 40},
    "linear_cross_entropy": {"M": 8, "K": 16, "V": 40},
    "attention": {"B": 1, "H": 4, "S": 9, "D": 16, "H_kv": 2, "causal": True},
    "attention_varlen": {"lengths": "9+0+5", "H": 4, "D": 16, "H_kv": 2, "causal": True},
    "decoding": {"B": 1, "H": 4, "S_k": 70, "D": 16, "H_kv": 2},
    "attention_paged": {"B": 2, "H": 4, "S_k": 70, "D": 16, "H_kv": 2},
    "matmul": {"M": 8, "N": 16, "K": 24},
    "linear": {"M": 8, "N": 16, "K": 24},
    "matmul_fp8": {"M": 16, "N": 32, "K": 256, "scheme": "rows"},
    "quantize": {"M": 4, "K": 256, "scheme": "blocks"},
    "grouped_matmul": {"T": 12, "E": 3, "K": 8, "N": 16},
    "gelu": {"n": 40},
    "dropout": {"n": 40},
    "scan": {"n": 40},
}


def small(operator):
    shape = SMALL[operator.direction if operator.direction == "decoding" else operator.name]
    return operator_rows.Case(operator, shape)


# ---- The zoo ------------------------------------------------------------------------------------------------------


def test_every_operator_is_timed_in_both_directions():
    timed = {(op.name, op.direction) for op in OPERATORS}
    assert {name for name, _ in timed} == set(course_ops.__all__) - OTHERS
    forward_alone = {"attention_paged", "matmul_fp8", "quantize"}  # not differentiable
    for name in {name for name, _ in timed} - forward_alone:
        assert {(name, "forward"), (name, "backward")} <= timed
    assert all(op.direction in ("forward", "backward", "decoding") for op in OPERATORS)


def test_sizes_of_models_are_there():
    values = {key: {case.shape.get(key) for case in ALL} for key in ("D", "N", "V", "K", "M", "S")}
    assert {64, 80, 96, 112, 128, 192, 256} <= values["D"]
    assert {768, 4096, 8192, 28672} <= values["N"]
    assert {32000, 50257, 128256, 151936, 256000} <= values["V"]
    assert {1, 17, 127, 4097, 16384} <= values["M"]
    assert any(case.shape.get("D") == 192 and case.shape.get("D_v") == 128 for case in ALL)
    assert {case.operator.data for case in ALL if case.operator.name == "attention"} == {"random", "falling"}


def named(operator, text):
    """A shape of a row's text, without what is the inputs' default."""
    words = dict(word.split("=") for word in text.split())
    takes = inspect.signature(operator.inputs or operator.problem.inputs).parameters
    defaults = {name: str(p.default) for name, p in takes.items()}
    return {name: value for name, value in words.items() if value != defaults.get(name)}


def test_every_shape_of_the_lessons_rows_is_in_the_zoo():
    """Of lessons whose operator course_ops ships."""
    lacking, asked = [], 0
    for name, _ in kernels():
        word = guides.about(name).operator
        if word not in ASKED:
            continue
        direction = "decoding" if word == "decoding" else "backward" if word.endswith("backward") else "forward"
        ours = [op for op in OPERATORS if (op.name, op.direction) == (ASKED[word], direction)]
        known = [named(case.operator, case.key[2]) for case in ALL if case.operator in ours]
        for folder in stale.device_folders():
            shapes = {row.shape for row in rows.read(folder / f"{name}.csv")}
            lacking += [f"{name}: {shape}" for shape in shapes if named(ours[0], shape) not in known]
            asked += len(shapes)
    assert asked > 100
    assert not lacking, lacking


@pytest.mark.parametrize(
    ("name", "direction", "shape"),
    [
        ("layer_norm", "forward", {"M": 4000, "N": 3000}),
        ("rms_norm", "forward", {"M": 4096, "N": 50257}),
        ("rms_norm", "backward", {"M": 4000, "N": 3000}),
        ("layer_norm", "backward", {"M": 8192, "N": 14336}),
        ("rms_norm", "forward", {"M": 8192, "N": 5120}),
        ("cross_entropy", "forward", {"M": 16384, "V": 2048}),
        ("matmul", "forward", {"M": 5000, "N": 5000, "K": 5000}),
        ("matmul", "forward", {"M": 3000, "N": 7000, "K": 2048}),
        ("matmul", "forward", {"M": 48, "N": 5120, "K": 27648, "transposed": "b"}),
        ("matmul_fp8", "forward", {"M": 4096, "N": 7168, "K": 16384, "scheme": "blocks"}),
        ("attention", "forward", {"B": 1, "H": 16, "S": 16384, "D": 128}),
        ("attention", "forward", {"B": 32, "H": 16, "S": 512, "D": 128}),
        ("attention", "backward", {"B": 1, "H": 32, "S": 16384, "D": 64, "causal": True}),
        ("attention", "backward", {"B": 1, "H": 16, "S": 32768, "D": 128, "causal": True}),
        ("attention", "forward", {"B": 4, "H": 32, "S": 4096, "D": 128, "H_kv": 8, "causal": True}),
        ("softmax", "backward", {"M": 8192, "N": 8192}),
        ("gelu", "forward", {"n": 2**26}),
        ("scan", "forward", {"n": 2**28}),
    ],
)
def test_shapes_that_were_found_wanting_or_measured_before_are_there(name, direction, shape):
    assert any((c.operator.name, c.operator.direction, c.shape) == (name, direction, shape) for c in ALL)


def test_a_release_draws_a_hundred_shapes_of_its_own():
    drawn = zoo.random_shapes("0.1.0")
    assert sum(map(len, drawn.values())) == 100
    assert drawn == zoo.random_shapes("0.1.0")
    assert drawn != zoo.random_shapes("0.2.0")
    for (name, direction), shapes in drawn.items():
        (op, *_) = (op for op in OPERATORS if (op.name, op.direction) == (name, direction))
        takes = inspect.signature(op.inputs or op.problem.inputs).parameters
        assert all(set(shape) <= set(takes) for shape in shapes), name
    version = re.search(r'^version = "(.*)"', (rows.ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert zoo.version() == version


@pytest.mark.parametrize("seed", ["0.1.0", "0.2.0", "1.0.0"])
def test_a_drawn_shape_fits_a_gpu(seed):
    ours = {(op.name, op.direction): op for op in OPERATORS if op.data == "random"}
    for key, shapes in zoo.random_shapes(seed).items():
        for shape in shapes:
            assert operator_rows.Case(ours[key], shape).work().bytes < 2**34, (key, shape)


def test_a_short_run_covers_every_operator():
    first = ALL[: len(OPERATORS)]
    assert {case.operator.name for case in first} == {op.name for op in OPERATORS}
    assert first[0].operator.name == "attention"
    assert len({case.key for case in ALL}) == len(ALL)


# ---- How problems are answered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda op: f"{op.name}-{op.direction}-{op.data}-{op.dtype or ''}")
def test_an_operator_answers_its_problem(operator):
    """On a CPU with course_ops' PyTorch, on a GPU with its kernels; its own peers are asked in the same words."""
    case = small(operator)
    args = operator_bench._inputs(case)
    found = operator_bench.asked(case, args, {"ours": lambda: case.operator.call(*args)})
    assert found.wrong == {}
    for peer in case.peers.values():
        with contextlib.suppress(ValueError):  # PyTorch's built-in functions have no signature
            inspect.signature(peer).bind(*args)
    assert case.work().bytes > 0
    assert len(operator_rows.today(case).split(".")) == 4


def test_a_result_that_is_not_written_shows():
    held = torch.zeros(4, 8)
    fill_with_nan(held)
    assert held.isnan().all()
    scalar, gaps = torch.zeros(()), torch.zeros(4, 9)[:, :8]
    fill_with_nan(scalar), fill_with_nan(gaps)
    assert scalar.isnan()
    assert gaps.isnan().all()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(lambda y: y + 1, "wrong"), (lambda y: y.float(), "torch.float32"), (lambda y: y[:2], "expected")],
)
def test_a_wrong_answer_is_found(spoil, says):
    case = small(OPERATORS[5])
    assert case.operator.name == "softmax"
    args = operator_bench._inputs(case)

    def peer():
        return spoil(torch.softmax(args[0], -1))

    found = operator_bench.asked(
        case, args, {"ours": lambda: spoil(case.operator.call(*args)), "same": lambda: torch.softmax(args[0], -1)}
    ).wrong
    assert says in found.pop("ours")
    assert not found
    if says != "torch.float32":  # a peer may answer in another dtype
        found = operator_bench.asked(case, args, {"ours": lambda: case.operator.call(*args), "peer": peer}).wrong
        assert "gives another answer" in found["peer"]


def test_a_large_result_is_compared_by_rows(monkeypatch):
    monkeypatch.setattr(operator_bench, "SAMPLE", 64)
    t = torch.arange(4000.0).view(20, 10, 20)
    (rows_, again) = (operator_bench._sampled(t) for _ in range(2))
    assert rows_[0].shape == (3, 20)
    assert torch.equal(rows_[0], again[0])
    assert torch.equal(operator_bench._sampled(t + 1)[0], rows_[0] + 1)


# ---- Runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def timings(monkeypatch):
    """A GPU whose figures are made up: ours 0.5 ms, the copy 0.25 ms, peers 1 ms each."""
    monkeypatch.setattr(
        timing, "limits", lambda: timing.Limits(1e15, dict.fromkeys(("bf16", "fp16", "fp8", "fp32"), 1e18))
    )
    monkeypatch.setattr(timing, "copy_of", lambda moved: lambda: None)
    ms = {"ours": 0.5, "copy": 0.25}
    monkeypatch.setattr(
        timing, "measure",
        lambda found, answers, needed: {
            n: timing.Timing(0.9 * ms.get(n, 1.0), ms.get(n, 1.0), 1.1 * ms.get(n, 1.0)) for n in found
        },
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def fake(case, **changes):
    """A row as `time_case` would make it."""
    times = {name: timing.Timing(0.9, 1.0, 1.1) for name in case.peers} | {
        "ours": timing.Timing(0.4, 0.5, 0.6), "copy": timing.Timing(0.2, 0.25, 0.3)
    }  # fmt: skip
    row = operator_bench.row_of(case, times, {}, first_call_s=1.5, peak_memory=100)
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize("who", ["ours", "copy", "quack"])
def test_an_impossible_time_refuses_its_row(timings, who):
    """Also a peer's, which would be the best, or the copy's, of which the limit is made. Others keep their rows."""
    case = next(case for case in ALL if case.key[:2] == ("softmax", "forward") and "quack" in case.peers)
    ms = {"ours": 0.5, "copy": 0.25} | dict.fromkeys(case.peers, 1.0)
    rows_ = [
        operator_bench.row_of(case, {name: timing.Timing(t, t, t) for name, t in times.items()}, {},
                              first_call_s=1, peak_memory=1)
        for times in (ms, ms | {who: 1e-9})
    ]  # fmt: skip
    assert [bool(row.error) for row in rows_] == [False, True]
    assert rows_[0].ratio == 2.0
    assert rows_[1].ratio == 0
    assert rows_[1].error.startswith("a measuring error" + f" of {who}" * (who != "ours"))
    assert not operator_rows.faults([row.sealed() for row in rows_[1:]])


def test_a_run_stops_and_goes_on(tmp_path, timings):
    path, now, asked = tmp_path / "gpu" / "operators.csv", SimpleNamespace(s=0.0), ALL[:7]

    def timed(case):
        now.s += 60
        return fake(case)

    def run(minutes, pending):
        return operator_bench.run(pending, timed, path, minutes, clock=lambda: now.s, say=lambda line: None)

    assert run(3, asked) == 3
    assert [row.key for row in operator_rows.read(path)] == [case.key for case in asked[:3]]
    rest = operator_rows.missing(operator_rows.read(path), asked)
    assert rest == asked[3:]
    assert run(60, rest) == 4
    assert not operator_rows.missing(operator_rows.read(path), asked)
    # A row of other code is timed again and replaced; nothing else is.
    found = operator_rows.read(path)
    path.write_text(operator_rows.as_csv([dataclasses.replace(found[0], fingerprint="0.0.0.0"), *found[1:]]))
    rest = operator_rows.missing(operator_rows.read(path), asked)
    assert rest == asked[:1]
    assert run(60, rest) == 1
    assert [row.key for row in operator_rows.read(path)] == [case.key for case in asked]


def test_a_shape_that_is_behind_is_timed_three_times(tmp_path, timings):
    """The row in the middle counts. One that is ahead, or too short to be judged, is timed once."""
    path, case = tmp_path / "operators.csv", ALL[0]

    def row(ms, **changes):
        ratio = round(1 / ms, 3)
        return fake(case, ms=ms, p20=ms, p80=ms, ratio=ratio, percent_of_limit=round(25 / ms, 1), **changes)

    def run(*rows):
        left = [*rows, None]
        operator_bench.run([case], lambda case: left.pop(0), path, 60, say=lambda line: None)
        (kept,) = operator_rows.read(path)
        return kept, len(rows) + 1 - len(left)

    kept, times = run(row(1.10, first_call_s=7.0), row(1.05), row(1.20))
    assert (kept.ms, kept.ratios, kept.first_call_s, times) == (1.10, "0.909 | 0.952 | 0.833", 7.0, 3)
    kept, _ = run(row(1.20), row(1.10), row(1.0))  # that it was ahead once does not end it
    assert (kept.ratio, kept.ratios) == (0.909, "0.833 | 0.909 | 1.0")
    assert not operator_rows.faults([kept])
    assert operator_rows.faults([dataclasses.replace(kept, ratio=0.833, ms=1.2, p80=1.2).sealed()])
    assert not operator_rows.pending([kept], [case])
    for first in (row(1.0), dataclasses.replace(row(1.10), ratio=0.0), row(1.10, error="wrong")):
        assert run(first) == (first.sealed(), 1)
    # The time runs out over the third: a later run times it anew.
    kept, _ = run(row(1.10), row(1.05))
    assert kept == row(1.10).sealed()
    assert operator_rows.pending([kept], [case]) == [case]
    assert operator_rows.pending([], ALL[:2]) == ALL[:2]


def test_a_stopped_shape_leaves_no_row_and_a_failed_one_does(tmp_path, timings):
    path = tmp_path / "operators.csv"
    failed = fake(ALL[0], ms=0.0, p20=0.0, p80=0.0, ratio=0.0, peers="", best_peer="", best_peer_ms=0.0,
                  percent_of_limit=0.0, error="this GPU has too little free memory")  # fmt: skip
    made = iter([failed, fake(ALL[1]), None])
    said = []
    assert operator_bench.run(ALL[:5], lambda case: next(made), path, 60, say=said.append) == 2
    assert [bool(row.error) for row in operator_rows.read(path)] == [True, False]
    assert "too little free memory" in said[0]
    assert not operator_rows.faults(operator_rows.read(path))


def test_what_is_compiled_ahead_is_timed_next(tmp_path, timings):
    events = []

    def timed(case):
        events.append(case.key)
        return fake(case)

    operator_bench.run(
        ALL[:5],
        timed,
        tmp_path / "o.csv",
        60,
        turn=2,
        ahead=lambda cases: events.append(len(cases)),
        say=lambda line: None,
    )
    assert events == [2, ALL[0].key, ALL[1].key, 2, ALL[2].key, ALL[3].key, 1, ALL[4].key]


@pytest.mark.kept("lessonkit/**/*.py", "problems/*.py", "course_ops/**/*.py")
def test_one_shape_from_call_to_row(tmp_path, timings):
    """All of it but the GPU: peers that are not here are named, and leave the ratio empty."""
    case = small(OPERATORS[5])
    row = operator_bench.time_case(case)
    assert (row.ms, row.error) == (0.5, "")
    absent = operator_rows.absences(row)
    assert set(absent) | set(operator_rows.peer_times(row)) == set(case.peers)
    assert operator_rows.peer_times(row)["torch"] == 1.0
    if any(why.startswith(rows.NOT_INSTALLED) for why in absent.values()):
        assert row.ratio == 0
    operator_rows.keep(tmp_path / "operators.csv", row)
    (kept,) = operator_rows.read(tmp_path / "operators.csv")
    assert kept == row.sealed()
    assert "between" not in operator_bench.said(row)
    assert "; between 0.1 and 0.9 ms" in operator_bench.said(dataclasses.replace(row, p20=0.1, p80=0.9))


def in_rounds(rounds, wrong, bad=2):
    """timing.measure without a clock: one contender's answer is wrong in one round, and right before and after it."""

    def measure(contenders, answers, needed):
        for i in range(rounds):
            for name, call in contenders.items():
                y = call()
                answers.called(name, y + 1 if name == wrong and i == bad else y)
            answers.round_over()
        return {name: timing.Timing(1, 1, 1) for name in contenders}

    return measure


def test_an_answer_that_is_wrong_in_a_timed_call_is_an_error(timings, monkeypatch):
    """It is right before the rounds and in all of them but one."""
    case = small(OPERATORS[5])
    monkeypatch.setattr(timing, "measure", in_rounds(5, "ours"))
    assert operator_bench.time_case(case).error.startswith("wrong in a round: value")
    monkeypatch.setattr(timing, "measure", in_rounds(2, "ours"))
    assert operator_bench.time_case(case).error == ""


def test_a_peer_that_is_wrong_in_a_round_leaves_the_ratio_empty(timings, monkeypatch):
    """It may be the best one. A lesson's rows say the same of it: test_lessonkit.py."""
    peers = {name: lambda x: torch.softmax(x, -1) for name in ("once wrong", "right")}
    problem = dataclasses.replace(OPERATORS[5].problem, peers={})
    operator = dataclasses.replace(OPERATORS[5], peers=peers, problem=problem)
    case = operator_rows.Case(operator, small(operator).shape)
    monkeypatch.setattr(operator_rows, "today", lambda case: "0.0.0.0")
    for rounds, ratio, absent in ((5, 0, {"once wrong"}), (2, 1, set())):
        monkeypatch.setattr(timing, "measure", in_rounds(rounds, "once wrong"))
        row = operator_bench.time_case(case)
        assert (row.error, row.ratio, operator_rows.absences(row).keys()) == ("", ratio, absent)
        assert all(why.startswith("wrong in a round: ") for why in operator_rows.absences(row).values())


def test_a_peer_that_is_wrong_takes_no_rounds(timings):
    operator = dataclasses.replace(OPERATORS[5], peers={"doubled": lambda x: 2 * torch.softmax(x, -1)})
    timed, measure = [], timing.measure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_rows, "today", lambda case: "0.0.0.0")
        patch.setattr(timing, "measure", lambda found, **more: timed.extend(found) or measure(found, **more))
        row = operator_bench.time_case(operator_rows.Case(operator, small(operator).shape))
    assert "another answer" in operator_rows.absences(row)["doubled"]
    assert {"ours", "copy", "torch"} <= {*timed}
    assert "doubled" not in timed


@pytest.mark.parametrize(
    ("ms", "needed"),
    [
        ({"fast": 1.0, "slow": 3.0}, {"fast", "slow"}),
        ({"fast": 0.86, "slow": 3.0}, {"fast", "slow"}),
        ({"fast": 1.09, "slow": 3.0}, {"fast", "slow"}),
        ({"fast": 1.2, "close": 1.3, "slow": 3.0}, {"fast", "close"}),
        ({"fast": 0.8, "slow": 1.0}, {"fast"}),
        ({}, set()),
    ],
)
def test_near_a_bar_every_median_must_be_known(ms, needed):
    assert {*operator_bench._needed({"ours": 1.0, "copy": 0.5} | ms)} == {"ours", "copy"} | needed


def test_why_a_peer_is_absent_is_said_without_colours_and_addresses():
    said = operator_bench._words(TypeError("\x1b[91m\x1b[1merror[INTERNAL]:\x1b[0m <Var at 0x7f76a91a> |\n failed"))
    assert said == "TypeError: error[INTERNAL]: <Var> / failed"


def test_a_shape_that_is_refused_has_a_row(timings):
    case = next(case for case in ALL if case.operator.name == "attention" and case.shape.get("D_v"))
    refused = operator_rows.Case(case.operator, {"B": 1, "H": 1, "S": 8, "D": 24, "D_v": 272, "causal": True})
    with pytest.raises(ValueError, match="v has head_dim 272"):
        operator_bench.time_case(refused)
    row = dataclasses.replace(operator_bench._empty(case), error="ValueError: v has head_dim 272")
    assert not row.sealed().judged
    assert not operator_rows.faults([row.sealed()])


# ---- Figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ms": 0.4}, "ratio is"),
        ({"ms": 0.41}, "seal does not fit"),
        ({"ratio": 9.9}, "ratio is 9.9"),
        ({"best_peer": "nobody"}, "the best peer is"),
        ({"best_peer_ms": 0.1}, "the best peer is"),
        ({"percent_of_limit": 99.0}, "percent_of_limit"),
        ({"limit_ms": 0.4}, "percent_of_limit"),
        ({"bytes": 1}, "bytes and flops"),
        ({"flops": 1}, "bytes and flops"),
        ({"p20": 0.7}, "out of order"),
        ({"peers": "torch 1.0"}, "each is timed or absent"),
        ({"absent": "quack: not installed"}, "ratio is"),
        ({"absent": "quack: wrong in a round: result 0"}, "ratio is"),
        ({"first_call_s": 0.1}, "seal does not fit"),
        ({"peak_memory": 1}, "seal does not fit"),
        ({"device": "another"}, "seal does not fit"),
    ],
)
def test_a_changed_figure_is_found(timings, change, says):
    row = fake(ALL[0]).sealed()
    assert not operator_rows.faults([row])
    found = operator_rows.faults([dataclasses.replace(row, **change)])
    assert any(says in fault for fault in found), found
    assert any("seal" in fault for fault in found)


def test_two_rows_of_one_shape_are_found(timings):
    row = fake(ALL[0]).sealed()
    assert any("2 rows" in fault for fault in operator_rows.faults([row, row]))


@pytest.fixture
def kept(tmp_path, timings, monkeypatch):
    """put(**changes) -> the file with one operator's row, which was measured with the versions that are here."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    monkeypatch.setattr(stale, "kernels", lambda: [])
    monkeypatch.setattr(launches, "compilers", lambda: ["triton-1", "torch-2", "nvcc-3"])

    def put(**changes):
        row = fake(ALL[0], versions="torch 2+cu130, triton 1, driver 5", machine="triton-1=aa")
        operator_rows.keep(path := tmp_path / "gpu" / "operators.csv", dataclasses.replace(row, **changes))
        return path

    return put


def parts(**changes):
    """Today's fingerprint of the first case, with some parts changed."""
    now = zip(operator_rows.PARTS, operator_rows.today(ALL[0]).split("."), strict=True)
    return ".".join(changes.get(part, value) for part, value in now)


@pytest.mark.parametrize(
    ("fingerprint", "changes", "today", "equal"),
    [
        (parts(code="0"), {}, "triton-1=aa", True),
        (parts(code="0", work="0"), {}, "triton-1=aa", True),
        (parts(code="0"), {}, "triton-1=bb", False),
        (parts(code="0"), {}, "", False),
        (parts(code="0"), {"machine": ""}, "triton-1=aa", False),
        (parts(code="0", inputs="0"), {}, "triton-1=aa", False),
        (parts(code="0", peers="0"), {}, "triton-1=aa", False),
        (parts(code="0", work="0"), {"flops": 1}, "triton-1=aa", False),
        (parts(code="0"), {"versions": "torch 2, triton 0"}, "triton-1=aa", False),
    ],
)
def test_a_row_outlives_a_refactor_that_the_gpu_does_not_notice(kept, monkeypatch, fingerprint, changes, today, equal):
    monkeypatch.setattr(launches, "marks_of_operators", lambda keys: [today] * len(keys))
    path = kept(fingerprint=fingerprint, **changes)
    (before,) = operator_rows.read(path)
    assert [old.why.endswith("changed") for old in stale.old()] == [True]
    assert operator_rows.missing([before], ALL[:1])
    assert stale.show_equal() == equal
    assert bool(stale.old()) != equal
    (row,) = operator_rows.read(path)
    assert row == dataclasses.replace(before, fingerprint=parts() if equal else fingerprint)
    assert row.sealed() == row
    assert bool(operator_rows.missing([row], ALL[:1])) != equal


def test_an_edited_row_is_found_also_after_it_was_kept(kept, monkeypatch):
    monkeypatch.setattr(launches, "marks_of_operators", lambda keys: ["triton-1=aa"] * len(keys))
    path = kept(fingerprint=parts(code="0"))
    (row,) = operator_rows.read(path)
    path.write_text(operator_rows.as_csv([dataclasses.replace(row, ms=0.45)]))
    assert stale.show_equal() == 1
    assert any("the seal does not fit" in fault for fault in operator_rows.faults(operator_rows.read(path)))


def test_a_record_is_made_of_rows_of_today(kept, monkeypatch):
    """Of others it would not be what was measured; nor in other versions."""
    monkeypatch.setattr(launches, "marks_of_operators", lambda keys: ["triton-1=cc"] * len(keys))
    for changes in ({"fingerprint": parts(code="0")}, {"versions": "torch 2, triton 0"}):
        kept(machine="", **changes)
        assert stale.record() == 0
    path = kept(machine="")
    assert stale.record() == 1
    (row,) = operator_rows.read(path)
    assert row.machine == "triton-1=cc"
    assert row.sealed() == row
    assert stale.record() == 0


def test_old_rows_of_operators_are_listed(kept):
    kept(fingerprint=parts(code="0", peers="0"))
    (old,) = stale.old()
    assert old.named[:2] == (f"course_ops.{ALL[0].key[0]}", ALL[0].key[1])
    assert old.why == "code and peers changed"
    kept(fingerprint="0.0.0.0", shape="a shape of the last release")
    assert len(stale.old()) == 1, "shapes that are asked no longer do not count"


@pytest.mark.parametrize("folder", stale.device_folders(), ids=lambda p: p.name)
def test_every_figure_follows_from_the_others(folder):
    found = operator_rows.read(folder / operator_rows.FILE)
    assert not operator_rows.faults(found)
    assert {row.device for row in found} <= {folder.name}


def test_a_fingerprint_tells_code_inputs_work_and_peers_apart():
    marks = {operator_rows.today(case) for case in ALL}
    assert len(marks) >= len({(op.name, op.direction, op.data) for op in OPERATORS}) - 1
    softmax = next(case for case in ALL if case.key[:2] == ("softmax", "forward"))
    back = next(case for case in ALL if case.key[:2] == ("softmax", "backward"))
    parts = list(zip(operator_rows.today(softmax).split("."), operator_rows.today(back).split("."), strict=True))
    assert [a == b for a, b in parts] == [False, False, False, False]


def test_the_summary_counts_what_can_be_judged(timings):
    of_one = [case for case in ALL if case.key[:2] == ("softmax", "forward")][:6]
    ratios = (1.0, 4.0, 0.96, 0.5)
    found = [fake(case, ratio=ratio) for case, ratio in zip(of_one, ratios, strict=False)]
    found += [fake(of_one[4], ms=0.01, ratio=0.1), fake(of_one[5], error="wrong", ratio=0.0)]
    (s,) = operator_rows.summaries(found)
    assert (s.shapes, s.short, s.failed, s.behind) == (4, 1, 1, 2)
    assert s.mean == pytest.approx((1.0 * 4.0 * 0.96 * 0.5) ** 0.25)
    assert s.worst == found[3]


@pytest.mark.parametrize("language", words.NAMES)
def test_the_readmes_table_is_made_from_the_rows(tmp_path, timings, monkeypatch, language):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    folder = tmp_path / "some-gpu"
    assert shipped.from_rows(folder, language) == ""
    of_one = [case for case in ALL if case.key[:2] == ("softmax", "forward")][:2]
    for case, ms in zip(of_one, (0.5, 2.0), strict=True):
        times = {"ours": timing.Timing(ms, ms, ms), "copy": timing.Timing(0.1, 0.1, 0.1)}
        times |= {peer: timing.Timing(1, 1, 1) for peer in case.peers}
        row = operator_bench.row_of(case, times, {}, first_call_s=1, peak_memory=1)
        operator_rows.keep(folder / "operators.csv", row)
    text = shipped.from_rows(folder, language)
    (line,) = (line for line in text.splitlines() if line.startswith("| `softmax`"))
    assert line.split(" | ")[1:5] == ["forward", "2", "1.00", "0.50"]
    assert of_one[1].key[2] in line
    marked = words.translated(shipped.MARKED, language).format(mark=operator_pages.MARK)
    assert marked not in text
    found = operator_rows.read(folder / "operators.csv")
    old = [dataclasses.replace(row, fingerprint="0.0.0.0").sealed() for row in found]
    (folder / "operators.csv").write_text(operator_rows.as_csv(old))
    assert marked in shipped.from_rows(folder, language)
    gone = [dataclasses.replace(row, shape="M=1 N=1").sealed() for row in found]
    (folder / "operators.csv").write_text(operator_rows.as_csv(gone))
    assert shipped.from_rows(folder, language) == "", "shapes that are asked no longer"


@pytest.mark.parametrize(("language", "decoding"), [("en", "`attention` decoding"), ("zh", "`attention` 解码")])
def test_the_readme_has_one_line_an_operator(tmp_path, timings, monkeypatch, language, decoding):
    """Mean, and the worst in brackets; decoding has a line of its own."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    assert shipped.brief(language) == f"{words.translated(shipped.NOT_MEASURED, language)}\n"
    both = [*zip(of("softmax", "forward"), (1.0, 0.25), strict=False), (of("softmax", "backward")[0], 2.0)]
    found = [*both, (of("attention", "decoding")[0], 0.5)]
    folder = tmp_path / "some-gpu"
    write_atomically(folder / "operators.csv", operator_rows.as_csv(fake(case, ratio=r) for case, r in found))
    assert [line for line in shipped.brief(language).splitlines() if line.startswith("| `")] == [
        "| `softmax` | 0.50 (0.25) | 2.00 (2.00) |",
        f"| {decoding} | 0.50 (0.50) |  |",
    ]
    old = fake(both[0][0], fingerprint="0.0.0.0", ratio=0.9, p80=0.9)
    write_atomically(folder / "operators.csv", operator_rows.as_csv([old]))
    assert f"| 0.90 (0.90 {operator_pages.APART}) {operator_pages.MARK} |" in shipped.brief(language)
    assert shipped.brief(language).count(operator_pages.MARK) == 2, "in the table and at the note"


@pytest.fixture
def page(tmp_path, timings, monkeypatch):
    """page(row, ...) -> the page that is made of these rows, in English."""
    monkeypatch.setattr(rows, "REPORTS", tmp_path)

    def made(*found):
        write_atomically(tmp_path / "gpu" / "operators.csv", operator_rows.as_csv(found))
        return first_calls.page(tmp_path / "gpu")

    return made


def of(operator, direction):
    return [case for case in ALL if case.key[:2] == (operator, direction)]


def test_a_first_call_that_compiled_nothing_does_not_count(page):
    """It shows the order of the run, not what a user waits for. Nor does a call that failed."""
    seconds = (0.3, 0.002, 0.1, 9.0, 0.5)
    softmax = [fake(case, first_call_s=s) for case, s in zip(of("softmax", "forward"), seconds, strict=False)]
    failed = fake(of("softmax", "forward")[5], first_call_s=70.0, error="wrong", peak_memory=9 * 10**9)
    gelu = fake(of("gelu", "backward")[0], first_call_s=0.01)
    lines = [line.split(" | ") for line in page(*softmax, failed, gelu).splitlines() if line.startswith("| `")]
    assert [line[:5] for line in lines] == [
        ["| `softmax`", "forward", "3 of 5", "0.5", "9.0"],
        ["| `gelu`", "backward", "0 of 1", "", ""],
    ]


def test_the_largest_peak_stands_beside_its_shape(page):
    found = [
        fake(case, peak_memory=p) for case, p in zip(of("softmax", "forward"), (10**6, 2345 * 10**6), strict=False)
    ]
    (line,) = (line for line in page(*found).splitlines() if line.startswith("| `softmax`"))
    assert line.endswith(f"| 2345 | {found[1].shape} bfloat16 |")


def test_a_page_marks_an_operator_with_old_rows(page):
    old = fake(of("softmax", "forward")[0], fingerprint="0.0.0.0")
    new = fake(of("gelu", "forward")[0])
    found = {
        line.split("`")[1]: operator_pages.MARK in line for line in page(old, new).splitlines() if line[:3] == "| `"
    }
    assert found == {"softmax": True, "gelu": False}
    assert operator_pages.MARK not in page(new)
    assert page() == ""


def test_times_that_lie_far_apart_are_listed(page):
    calm, apart = (fake(case, p20=0.4, ms=0.5, p80=p80) for case, p80 in zip(of("softmax", "forward"), (0.6, 0.61),
                                                                            strict=False))  # fmt: skip
    assert first_calls.APART not in page(calm)
    (line,) = page(calm, apart).partition(f"## {first_calls.APART}")[2].splitlines()[-1:]
    assert line == f"| `softmax` | forward | {apart.shape} bfloat16 | 0.4 | 0.5 | 0.61 |"


@pytest.mark.parametrize("language", words.NAMES)
def test_a_worst_ratio_of_times_that_lie_far_apart_is_marked(page, tmp_path, language):
    first, second = of("softmax", "forward")[:2]
    page(fake(first, ratio=0.9, p80=0.9), fake(second, ratio=0.95))
    text = shipped.from_rows(tmp_path / "gpu", language)
    assert f"| 0.90 {operator_pages.APART} |" in text
    assert text.count(operator_pages.APART) == 2, "in the table and at the note"
    page(fake(first, ratio=0.9), fake(second, ratio=0.95, p80=0.9))
    assert operator_pages.APART not in shipped.from_rows(tmp_path / "gpu", language), "the worst is calm"


# ---- The command ----------------------------------------------------------------------------------------------------


def test_release_lists_what_is_missing(tmp_path, monkeypatch, timings):
    monkeypatch.setattr(rows, "REPORTS", tmp_path)
    (tmp_path / rows.MACHINE).mkdir()
    run, asked = CliRunner(), operator_rows.cases(["gelu"])
    done = run.invoke(app, ["bench", "ops", "gelu", "--release"])
    assert done.exit_code == 1
    assert done.output.count("no row of this code") == len(asked)
    for case in asked:
        operator_rows.keep(tmp_path / rows.MACHINE / "operators.csv", fake(case))
    assert run.invoke(app, ["bench", "ops", "gelu", "--release"]).exit_code == 0
    with show.console.capture() as said:
        show.operators(operator_rows.read(tmp_path / rows.MACHINE / "operators.csv"))
    assert "gelu forward" in said.get()
    assert "gelu backward" in said.get()


def test_an_unknown_operator_is_named():
    done = CliRunner().invoke(app, ["bench", "ops", "sofmax"])
    assert done.exit_code == 2
    assert "sofmax" in done.output
    assert CliRunner().invoke(app, ["bench", "day2", "softmax"]).exit_code == 2


@pytest.mark.skipif(device.HAS_GPU, reason="it would time everything")
def test_without_a_gpu_nothing_is_written():
    done = CliRunner().invoke(app, ["bench", "ops"])
    assert done.exit_code == 0
    assert "No GPU" in done.output


@pytest.mark.release
def test_every_shape_has_a_row_of_this_code():
    for folder in stale.released():
        missing = operator_rows.missing(operator_rows.read(folder / operator_rows.FILE), ALL)
        assert not missing, f"{len(missing)} of {len(ALL)} shapes: python -m lessonkit bench ops --release lists them"


def test_the_list_of_answers_is_the_kits():
    assert operator_rows.operators() is answers.OPERATORS


@pytest.mark.night
@pytest.mark.skipif(device.HAS_GPU, reason="without a GPU every shape fails, which is what is asked for here")
def test_a_shape_that_fails_or_hangs_costs_one_row(monkeypatch):
    case = next(case for case in ALL if case.key[:2] == ("gelu", "forward") and case.shape["n"] < 2**18)
    with operator_bench.Processes(workers=1, minutes=60) as processes:
        row = processes.timed(case)
        assert row.key == case.key
        assert row.error
        assert not row.ms
        processes.ahead([case])
        assert processes.first_calls == {case.key: 0.0}
        monkeypatch.setattr(operator_bench, "PATIENCE_S", 0.01)
        assert "it hangs" in processes.timed(case).error
        processes.end -= 3600 + operator_bench.ENDING_S
        monkeypatch.setattr(operator_bench, "PATIENCE_S", 150)
        assert processes.timed(case) is None, "the minutes are over: it is timed in the next run"
