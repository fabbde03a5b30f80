"""Day 5's exercises against what they stand for: the compiler that is installed, and the lessons' own model."""

from lessonkit.exercise import source
from lessonkit.measure import sweeps

import pytest

from day5_tuning import lesson06_tuning
from day5_tuning.exercises import listings

pytestmark = pytest.mark.kept("day5_tuning/exercises/**/*")


def solved(short):
    (exercise,) = source.find(short)
    return source.build(exercise, exercise.solution)


@pytest.mark.night
def test_the_listings_are_what_triton_compiles():
    """Compiled anew, each kernel still shows what exercise03_read_sass asks of its committed listing."""
    reader = solved("read_sass")

    def shown(listing):
        pipeline, _ = reader.pipeline(listing)
        return reader.load_bytes(listing), reader.spills(listing) > 0, reader.products(listing), pipeline

    committed = {path.stem: path.read_text() for path in listings.FOLDER.glob("*.sass")}
    fresh = listings.fresh()
    assert committed.keys() == fresh.keys()
    assert len({shown(text) for text in committed.values()}) == len(committed)  # no two have the same answers
    for name, (listing, row) in fresh.items():
        assert shown(committed[name]) == shown(listing), name
        assert (reader.load_bytes(listing), reader.spills(listing)) == (row["load_bytes"], row["spills"]), name
        assert (row["wgmma"] > 0) == (reader.products(listing) == "wgmma"), name
        assert (row["mma"] > 0) == (reader.products(listing) == "mma"), name


@pytest.mark.parametrize("machine", sweeps.FAMILY, ids=lambda m: m.name)
def test_the_exercise_has_the_lessons_model(machine):
    """exercise01_choose_configuration predicts what lesson06_tuning does, wherever nothing is spilled."""
    ours = solved("choose_configuration")
    gpu = ours.FAMILY[sweeps.FAMILY.index(machine)]
    for rows in (1, 4):
        for warps, registers, shared in ((1, 255, 0), (4, 72, 128), (8, 64, 49152), (32, 40, 4096)):
            config = ours.Config(rows, warps, registers, shared)
            figures = sweeps.Figures(warps, registers, shared, 0, 0)
            for size in lesson06_tuning.SWEEP.sizes:
                us, _ = lesson06_tuning.predict(size, {"ROWS": rows}, figures, machine)
                assert ours.seconds(size["M"], size["N"], config, gpu) * 1e6 == pytest.approx(us)
