"""Pictures of day 2: grids and masks, sectors, traffic, sums, softmax, argmax, norms, scan."""

import re
import struct

from lessonkit.base.words import later
from lessonkit.lesson import Lesson, discover
from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, say
from lessonkit.pictures.numbers import number, stated, text
from lessonkit.pictures.registry import caption, picture

INSIDE = WIDTH - 2 * MARGIN
DAY2 = "day2_triton_basics"
BY_TICKET = later("Tiles take their number from the order in which they start, so the ones before have started, too.")
BY_ID = later("A tile's number is its program's id. GPUs start programs in order of ids: those before have started.")


@picture(
    "A grid of programs, a block each, and the mask of the last one",
    "The elements of x in a row, cut into blocks. Each program owns one block; in the last one the mask is 0 where the "
    "offset is past the end.",
    figures.BLOCK_MASK,
)
def grid_and_mask(c: Canvas, lesson: str) -> None:
    n, block = figures.ten_elements()
    found = models.block_mask(n, block)
    lanes = found["programs"] * block
    left, top = 64, c.y + 16
    cell = (WIDTH - MARGIN - left) / lanes
    for p in range(found["programs"]):
        c.text(left + (p + 0.5) * block * cell, c.y + 7, say("program {p}", p=p), 10, "middle")
    c.text(MARGIN, top + 11, "x")
    c.text(MARGIN, top + 39, say("offsets"))
    c.text(MARGIN, top + 67, say("mask"))
    for i in range(lanes):
        x, kept = left + i * cell, i < n
        c.box(x, top, cell - 1, 22, "a" if kept else "none", f"x{i}" if kept else "", 10)
        c.box(x, top + 28, cell - 1, 22, "off", str(i), 10)
        c.box(x, top + 56, cell - 1, 22, "c" if kept else "e", str(int(kept)), 10)
    for p in range(1, found["programs"]):
        x = left + p * block * cell - 0.5
        c.line(x, top - 14, x, top + 80, dashed=True)
    c.y = top + 88
    caption(
        c,
        "n = {n}, BLOCK = {block}: the grid has {programs} programs; {masked} lanes of the last one have "
        "no element.",
        n=n, block=block, programs=found['programs'], masked=found['masked'],
    )  # fmt: skip


@picture(
    "The addresses of one warp, and the 32-byte sectors that they touch",
    "For each rung the 32 lanes of a warp above, and below them the sectors of memory that one load touches. The share "
    "of their bytes that is used is written beside them.",
    figures.SECTORS,
)
def warp_sectors(c: Canvas, lesson: str) -> None:
    path, size, threads = f"{DAY2}/lesson01_vector_add.py", 2, 4 * models.LANES
    for rung, block in [
        ("add_element", 1), ("add_block", number(path, "BLOCK", inside="add_block")),
        ("add_wide", number(path, "BLOCK", inside="add_wide")),
    ]:  # fmt: skip
        wide = max(1, block // threads)
        lanes = models.LANES if block > 1 else 1
        bytes_ = lanes * wide * size
        sectors = -(-bytes_ // models.SECTOR)
        used = 100 * bytes_ / (sectors * models.SECTOR)
        c.text(MARGIN, c.y + 8, rung, 11, kind="bold")
        c.text(WIDTH - MARGIN, c.y + 8, say("{bytes} bytes per lane", bytes=wide * size), 10, "end", "faint")
        c.y += 17
        cell = INSIDE / models.LANES
        for lane in range(models.LANES):
            c.box(MARGIN + lane * cell, c.y, cell - 1, 14, "a" if lane < lanes else "none")
        c.text(MARGIN + INSIDE / 2, c.y + 23, say("lanes 0 to {last} of a warp", last=models.LANES - 1), 9, "middle",
               "faint")  # fmt: skip
        width = INSIDE / sectors if lanes > 1 else INSIDE * models.SECTOR / size / models.LANES / 8
        for s in range(sectors):
            x = MARGIN + s * width
            c.box(x, c.y + 32, width - 1, 18, "off")
            c.box(x, c.y + 32, (width - 1) * used / 100, 18, "c")
        c.y += 56
        c.paragraph(say("sectors: {sectors}; used of their bytes: {used:.0f}%", sectors=sectors, used=used), 10)
        c.gap(8)


@picture(
    "Bytes that each rung loads and stores, as a multiple of the least",
    "A bar for each rung: the bytes that its kernels load and store, over the bytes of reading each input once and "
    "writing each output once. A load that a cache serves counts too. The figures are declared in the lesson, and its "
    "checks count them.",
)
def traffic(c: Canvas, lesson: str) -> None:
    declared = dict(discover(lesson))[lesson]
    assert isinstance(declared, Lesson)
    scale = (INSIDE - 40) / max(declared.passes.values())
    for rung, times in declared.passes.items():
        c.text(MARGIN, c.y + 7, rung.__name__, 10)
        c.box(MARGIN, c.y + 14, times * scale, 13, "c" if times < 1.05 else "b")
        c.text(MARGIN + times * scale + 4, c.y + 20.5, f"{times:.3g}", 10)
        c.line(MARGIN + scale, c.y + 14, MARGIN + scale, c.y + 27, dashed=True)
        c.y += 33
    caption(
        c,
        "1 (dashed) is the least: each input is read once, each output is written once. Counted on the lesson's last "
        "check, where no cache serves a load.",
    )
    if declared.passes_why:
        caption(c, declared.passes_why)


@picture(
    "A sum in two steps: partial sums, then their sum",
    "Each program adds up one block of x and writes one partial sum. A second launch with one program adds the partial "
    "sums in a fixed order.",
)
def partial_sums(c: Canvas, lesson: str) -> None:
    block = number(f"{DAY2}/lesson04_sum.py", "BLOCK", inside="sum_tree")
    shown, cell = 4, INSIDE / 4.6
    top = c.y
    for p in range(shown):
        x = MARGIN + p * cell
        c.box(x, top, cell - 3, 22, "a", say("{block} of x", block=block), 10)
        c.arrow(x + cell / 2, top + 22, x + cell / 2, top + 42)
        c.box(x, top + 42, cell - 3, 22, "b", say("program {p}", p=p), 10)
        c.arrow(x + cell / 2, top + 64, x + cell / 2, top + 84)
        c.box(x + cell / 4, top + 84, cell / 2, 22, "c", f"s{p}", 10)
        c.arrow(x + cell / 2, top + 106, MARGIN + 2 * cell + (p - 1.5) * 16, top + 136)
    c.text(MARGIN + shown * cell + 8, top + 11, "...")
    c.text(MARGIN + shown * cell + 8, top + 95, "...")
    c.box(MARGIN + cell, top + 136, 2 * cell, 22, "b", say("one program adds s0, s1, ..."), 10)
    c.arrow(MARGIN + 2 * cell, top + 158, MARGIN + 2 * cell, top + 176)
    c.box(MARGIN + 1.5 * cell, top + 176, cell, 20, "c", say("sum"))
    c.y = top + 200
    caption(
        c,
        "Programs cannot wait for each other in one launch, but the second launch begins after the first "
        "has ended. The order is fixed, so two runs agree to the bit.",
    )  # fmt: skip


EXAMPLE = (1.0, 3.0, 2.0, 5.0, 4.0, 2.0)


@picture(
    "Online softmax: one pass keeps the maximum and the rescaled sum",
    "A row in blocks. After each block the running maximum m and the running sum s are shown. The factor alpha = exp(m "
    "- m_new) rescales the sum of the blocks before.",
    figures.ONLINE_SOFTMAX,
)
def online_softmax(c: Canvas, lesson: str) -> None:
    rung = "cross_entropy_online" if "cross_entropy" in lesson else "softmax_online"
    each = 2
    steps = models.online_softmax(EXAMPLE, each)
    left, cell = 70, (WIDTH - MARGIN - 70) / len(steps)
    top = c.y + 4
    for i, step in enumerate(steps):
        x = left + i * cell
        for j in range(each):
            c.box(x + j * (cell - 6) / each, top, (cell - 8) / each, 22, "a", f"{EXAMPLE[i * each + j]:g}")
        c.text(x + (cell - 6) / 2, top + 33, say("block {i}", i=i), 10, "middle", "faint")
        for line, (key, kind) in enumerate([("alpha", "d"), ("m", "b"), ("s", "c")]):
            shown = f"{step[key]:.3f}" if key != "m" else f"{step[key]:g}"
            c.box(x, top + 48 + line * 28, cell - 8, 22, kind, shown)
            if i and key != "alpha":
                c.arrow(x - 7, top + 59 + line * 28, x, top + 59 + line * 28)
    c.text(MARGIN, top + 11, say("row"))
    for line, name in enumerate(("alpha", "m", "s")):
        c.text(MARGIN, top + 59 + line * 28, name)
    c.y = top + 134
    if rung == "cross_entropy_online":
        return caption(c, "alpha = exp(m - m_new), s_new = alpha s + sum(exp(block - m_new)). In {rung} each lane "
                       "keeps an m and an s of its own, and its block is one element.", rung=rung)  # fmt: skip
    caption(
        c,
        "alpha = exp(m - m_new), s_new = alpha s + sum(exp(block - m_new)). Here a block has {each} "
        "elements, in {rung} up to {block}.",
        each=each, rung=rung, block=number(f"{lesson.replace('.', '/')}.py", "block", inside=rung, N=1 << 20),
    )  # fmt: skip


ARGMAX = f"{DAY2}/lesson07_argmax.py"


def _candidates() -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """The steps of the row that the lesson draws, and each lane's best value, its step and its index."""
    drawn = re.search(r"row = ([\d |]+)", text(ARGMAX))
    steps = [[int(each) for each in part.split()] for part in drawn[1].split("|")] if drawn else []
    found = []
    for lane, values in enumerate(zip(*steps, strict=True)):
        best = max(values)
        step = values.index(best)
        found.append((best, step, step * len(steps[0]) + lane))
    return steps, found


@picture(
    "Argmax over steps: a lane keeps its best value and the step it came from",
    "A row is read in steps, a column of lanes at a time. Below each lane stand its best value, the step of that value "
    "and its index. Two lanes have the maximum, and the left one has the larger index.",
)
def argmax_lanes(c: Canvas, lesson: str) -> None:
    block = number(ARGMAX, "BLOCK", inside="argmax_online")
    steps, found = _candidates()
    lanes, top = len(found), max(best for best, _, _ in found)
    winner = min(index for best, _, index in found if best == top)
    left = 96
    cell = (WIDTH - MARGIN - left) / lanes
    for lane in range(lanes):
        c.text(left + (lane + 0.5) * cell, c.y + 8, say("lane {i}", i=lane), 11, "middle")
    c.y += 18
    for t, values in enumerate(steps):
        c.text(MARGIN, c.y + 11, say("step {i}", i=t), 11)
        for lane, value in enumerate(values):
            kept = found[lane][1] == t
            c.box(left + lane * cell, c.y, cell - 3, 22, "a" if kept else "off", str(value))
        c.y += 25
    c.y += 5
    for lane in range(lanes):
        c.arrow(left + (lane + 0.5) * cell - 1, c.y - 6, left + (lane + 0.5) * cell - 1, c.y + 9)
    c.y += 12
    for i, name in enumerate((say("best value"), say("its step"), say("its index"))):
        c.text(MARGIN, c.y + 11, name, 11)
        for lane, each in enumerate(found):
            kind = "c" if i == 2 and each[2] == winner else "b" if each[0] == top else "off"
            c.box(left + lane * cell, c.y, cell - 3, 22, kind, str(each[i]))
        c.y += 25
    c.gap(3)
    c.legend([("a", say("kept")), ("b", say("lanes that have the maximum")), ("c", say("the answer"))])
    leftmost = next(index for best, _, index in found if best == top)
    caption(
        c,
        "index = step * {lanes} + lane. The leftmost lane with the maximum has index {leftmost}; the first maximum is "
        "at {winner}. So a second reduction takes the smallest index of these lanes. In argmax_online a step has "
        "{block} lanes.",
        lanes=lanes, leftmost=leftmost, winner=winner, block=block,
    )  # fmt: skip


@picture(
    "Value and index in one word, so that an atomic maximum compares both",
    "Words of 64 bits, one from each program of a row: the key of the value in the upper half, the inverted index in "
    "the lower half. The largest word has the largest value, and of equal values the smallest index.",
)
def argmax_word(c: Canvas, lesson: str) -> None:
    bits = int(stated(ARGMAX, r"N >= 2\*\*(\d+)"))
    most = (1 << bits) - 1
    _, found = _candidates()
    shown = found[:3]
    half, left = 122, 100
    c.text(left + half / 2, c.y + 8, say("upper 32 bits: key"), 11, "middle")
    c.text(left + half * 1.5, c.y + 8, say("lower: inverted index"), 11, "middle")
    c.y += 18
    words = []
    for best, _, index in shown:
        (key,) = struct.unpack("<i", struct.pack("<f", best))  # of a float >= 0 its bits
        words.append((key << 32) | (most - index))
    for (best, _, index), word in zip(shown, words, strict=True):
        first = word == max(words)
        c.text(
            MARGIN, c.y + 11, say("{value} at {index}", value=best, index=index), 11, kind="bold" if first else "ink"
        )
        c.box(left, c.y, half - 1, 22, "c" if first else "a", f"0x{word >> 32:08X}")
        c.box(left + half, c.y, half - 1, 22, "c" if first else "b", f"0x{word & most:08X}")
        c.y += 26
    c.legend([("c", say("the largest word: the answer of this row"))])
    caption(
        c,
        "Words compare by their upper halves first. Two keys are equal here, and the smaller index gives the larger "
        "lower half: it is 2^{bits} - 1 minus the index. A maximum does not depend on the order of the programs.",
        bits=bits,
    )  # fmt: skip


@picture(
    "Gradients of the weights: a partial sum per program, then a sum over programs",
    "x and dy are read row by row. Each program walks over rows and keeps the weights' sums in registers. It writes "
    "one row of partial sums. A second kernel adds the partial sums down each column in a fixed order.",
)
def partial_gradients(c: Canvas, lesson: str) -> None:
    layernorm = "layernorm" in lesson  # which has db as well
    programs, rows, top = 3, 6, c.y + 14
    wide = 118
    c.text(MARGIN + wide / 2, c.y + 6, "dy, x [M, N]", 10, "middle")
    kinds = "abd"
    for r in range(rows):
        c.box(MARGIN, top + r * 18, wide, 16, kinds[r % programs], say("program {p}", p=r % programs), 10)
    c.text(MARGIN + 240, c.y + 6, "partial_dw, partial_db [P, N]" if layernorm else "shares [P, N]", 10, "middle")
    for p in range(programs):
        y = top + 8 + p * 34
        c.box(MARGIN + 176, y, 140, 18, kinds[p], "")
        c.arrow(MARGIN + wide + 2, top + (p + programs) * 18 + 8, MARGIN + 174, y + 9)
        c.arrow(MARGIN + wide + 2, top + p * 18 + 8, MARGIN + 174, y + 9)
    column = MARGIN + 176 + 52
    c.box(column, top + 4, 30, 34 * programs - 6, "none")
    c.arrow(column + 15, top + 34 * programs + 2, column + 15, top + 34 * programs + 22)
    c.box(column - 18, top + 34 * programs + 22, 66, 20, "c", "dw, db [N]" if layernorm else "dw [N]", 10)
    c.y = top + 34 * programs + 50
    if not layernorm:
        return caption(c, "A program takes every P-th tile of rows and keeps its sums in registers. The second kernel "
                       "adds the programs' rows, always in the same order.")  # fmt: skip
    path = f"{DAY2}/lesson09_layernorm_backward.py"
    down = number(path, "BLOCK_P", inside="_add_partials")
    across = number(path, "BLOCK_N", inside="_add_partials")
    caption(
        c,
        "A program takes every P-th row and keeps its sums in registers. The second kernel adds blocks "
        "of {down} programs by {across} columns, always in the same order.",
        down=down, across=across,
    )  # fmt: skip


@picture(
    "Decoupled look-back: a tile adds up what its predecessors have published",
    "A row of tiles. Some have published the sum of their own elements, some the sum of everything up to their end, "
    "some nothing yet. A tile walks back, adds sums, and stops at the first prefix.",
)
def look_back(c: Canvas, lesson: str) -> None:
    states = ["P", "P", "S", "S", "S", "?"]
    kinds = {"P": "c", "S": "b", "?": "off"}
    labels = {"P": say("prefix"), "S": say("own sum"), "?": say("empty")}
    cell, top = INSIDE / len(states), c.y + 30
    for i, state in enumerate(states):
        x = MARGIN + i * cell
        c.text(x + cell / 2, c.y + 6, say("tile {i}", i=i), 10, "middle")
        c.box(x, c.y + 14, cell - 3, 20, "a")
        c.box(x, top + 12, cell - 3, 20, kinds[state], labels[state], 10)
    me = 4
    c.text(MARGIN, top + 44, say("published word"), 9, kind="faint")
    y = top + 60
    for hop, i in enumerate((3, 2, 1)):
        x = MARGIN + i * cell + cell / 2
        c.arrow(MARGIN + (i + 1) * cell + cell / 2 - 4, y, x + 4, y)
        c.text(x, y + 11, ("+ s3", "+ s2", say("+ prefix, stop"))[hop], 10, "middle")
    c.text(MARGIN + me * cell + cell / 2, y + 11, say("tile {i}", i=me), 10, "middle")
    c.y = y + 24
    c.legend([("c", say("sum of all elements up to here")), ("b", say("sum of this tile")), ("off", say("not yet"))])
    if "onesweep" in lesson:
        bins = 1 << number("cuda_src/include/radix_keys.cuh", "DIGIT_BITS")
        caption(c, "A tile looks back {bins} times side by side, once for each digit.", bins=bins)
        return caption(c, BY_TICKET)
    path = f"{DAY2}/lesson15_scan.py" if "lesson15" in lesson else "cuda_src/09_scan_one_pass.cu"
    tile = number(path, "TILE") if "lesson15" in lesson else 4 * number(path, "THREADS") * number(path, "VECTORS")
    caption(c, "A tile has {tile} elements.", tile=tile)
    caption(c, BY_ID)


@picture(
    "A long row, shared by several programs",
    "A row is cut into parts, one program each. Each program publishes the maximum and the sum of its part as one "
    "word, reads the words of the others, and then scales its part.",
)
def shared_row(c: Canvas, lesson: str) -> None:
    path = f"{DAY2}/lesson16_rows_of_any_length.py"
    most = int(stated(path, r"at most (\d+) words per row"))
    parts, top = 4, c.y
    cell = INSIDE / parts
    for p in range(parts):
        x = MARGIN + p * cell
        c.box(x, top, cell - 4, 20, "a", say("part {p}", p=p), 10)
        c.arrow(x + cell / 2, top + 20, x + cell / 2, top + 36)
        c.box(x, top + 36, cell - 4, 20, "b", say("program {p}", p=p), 10)
        c.arrow(x + cell / 2, top + 56, x + cell / 2, top + 72)
        c.box(x + 8, top + 72, cell - 20, 20, "d", f"(m{p}, s{p})", 10)
        c.arrow(x + cell / 2, top + 92, x + cell / 2, top + 110)
        c.arrow(x + cell / 2, top + 132, x + cell / 2, top + 148)
        c.box(x, top + 148, cell - 4, 20, "c", "y", 10)
    c.box(MARGIN, top + 110, INSIDE - 4, 22, "off", say("every program reads all words and merges them"), 10)
    c.y = top + 174
    caption(
        c,
        "The merge is online softmax's: m is the largest m, and each s is rescaled by exp(m_p - m). A "
        "row has at most {most} parts.",
        most=most,
    )  # fmt: skip
