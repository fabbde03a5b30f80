"""Grouped order: the same tiles, in an order that reuses L2
========================================================
132 programs run at once. Row by row in a grid of 64 x 64 tiles they own two rows of tiles and a bit. So they load 3
block rows of A and all 64 block columns of B. The grouped order takes `group` rows of tiles together, down first and
then along. Then the 132 tiles are nearly square, and the programs load far fewer blocks. The order is integer
arithmetic on the program id:

    row by row     group = 2
    0  1  2        0  2  4
    3  4  5        1  3  5
    6  7  8        6  7  8        a last group of one row

Predict: block rows of A plus block columns of B that the first 132 programs load, for group = 8.
"""


def tile_of(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """Program -> (row, column) of its tile. Groups of `group` rows of tiles, the last may have fewer; inside a group
    down the rows first, then the next column."""
    # TODO(1): which group, how many rows has it, where in it?
    # stub: return pid // tiles_n, pid % tiles_n
    first = pid // (group * tiles_n) * group
    rows = min(group, tiles_m - first)
    inside = pid % (group * tiles_n)
    return first + inside % rows, inside // rows
    # END(1)


# TODO(2): what the first 132 programs load of 64 x 64 tiles: distinct block rows of A plus block columns of B.
# stub: ROW_BY_ROW, GROUPED_BY_8 = None, None
ROW_BY_ROW, GROUPED_BY_8 = 3 + 64, 8 + 17
# END(2)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number, same


def _order(tiles_m, tiles_n, group):
    """The definition, as loops."""
    for first in range(0, tiles_m, group):
        for n in range(tiles_n):
            for m in range(first, min(first + group, tiles_m)):
                yield m, n


SIZES = ((1, 1, 1), (4, 6, 2), (8, 8, 8), (2, 5, 8), (7, 3, 4), (64, 64, 8))


def whole_groups():
    """Where the groups divide the rows, tile by tile in the right order."""
    for size in ((4, 6, 2), (8, 8, 8), (64, 64, 8)):
        same(
            f"tiles_m, tiles_n, group = {size}", [tile_of(i, *size) for i in range(size[0] * size[1])], [*_order(*size)]
        )


def every_tile_once():
    """No tile is left out and none is computed twice, also where the last group is short."""
    for m, n, group in SIZES:
        done = [tile_of(i, m, n, group) for i in range(m * n)]
        twice = next((t for i, t in enumerate(done) if t in done[:i]), None)
        assert twice is None, f"tiles_m, tiles_n, group = {m, n, group}: tile {twice} is done twice"
        outside = next((t for t in done if not (0 <= t[0] < m and 0 <= t[1] < n)), None)
        assert outside is None, f"tiles_m, tiles_n, group = {m, n, group}: {outside} is no tile"


def short_groups():
    """The order is right in a last group that has fewer rows."""
    for size in SIZES:
        same(
            f"tiles_m, tiles_n, group = {size}", [tile_of(i, *size) for i in range(size[0] * size[1])], [*_order(*size)]
        )


def loads():
    """Counted from the order."""
    for what, predicted, group in (("row by row", ROW_BY_ROW, 1), ("in groups of 8", GROUPED_BY_8, 8)):
        first = [*_order(64, 64, group)][:132]
        number(f"blocks {what}", predicted, len({m for m, _ in first}) + len({n for _, n in first}), 0)


EXERCISE = Exercise(
    claims=(whole_groups, every_tile_once, short_groups, loads),
    hints=(
        "A group of whole height has group * tiles_n tiles: division says which group, the remainder where in it.",
        "Inside a group the row runs fastest: remainder % rows and remainder // rows, where rows is the height of "
        "this group.",
        "first = pid // (group * tiles_n) * group; rows = min(group, tiles_m - first); inside = pid % (group * "
        "tiles_n). "
        "132 programs in groups of 8 make 16.5 columns.",
    ),
    predicted="25: 8 block rows of A, and 132 / 8 = 16.5, so 17 block columns of B.",
    wrong=(
        Wrong(
            "row and column inside the group are exchanged",
            "first + inside % rows, inside // rows",
            "first + inside // tiles_n, inside % tiles_n",
            "whole_groups",
        ),
        Wrong("the group's first row is forgotten", "first + inside % rows", "inside % rows", "whole_groups"),
        Wrong("a short last group is taken for a whole one", "min(group, tiles_m - first)", "group", "every_tile_once"),
        Wrong("132 / 8 rounded down: half a column is loaded too", "8 + 17", "8 + 16", "loads"),
        Wrong("two whole rows, and the third forgotten", "3 + 64, 8", "2 + 64, 8", "loads"),
    ),
)
