"""Pictures of day 3: tiles and their order, pipelines, rings of stages, split-K, scales, grouped tiles, swizzles."""

import itertools
import re

from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, Span, Words, say
from lessonkit.pictures.numbers import number, stated, text
from lessonkit.pictures.registry import caption, picture

INSIDE = WIDTH - 2 * MARGIN
DAY3 = "day3_matmul_tk"
SMS = 132  # of an H200, as the lessons count


@picture(
    "One tile of C: the rows of A and the columns of B that it needs",
    "Three matrices. A program owns one tile of C. It walks along K and loads in each step one block of A from the "
    "tile's rows and one block of B from the tile's columns.",
)
def tile_of_c(c: Canvas, lesson: str) -> None:
    if lesson.startswith("cuda_src"):
        path = "cuda_src/03_matrix_multiply.cu"
        m = n = k = number(path, "TILE")
    else:
        m, n, k = number(f"{DAY3}/lesson01_matmul.py", "block", inside="_prepare", a=_SixteenBits())
    top, left, size, unit = c.y + 16, MARGIN + 150, 150, 30
    c.box(left, top, size, 100, "off")
    c.box(left + 2 * unit, top, unit, 100, "b")
    c.box(left + 2 * unit, top + 36, unit, 22, "d", "b", 10)
    c.text(left + size + 8, top + 8, "B [K, N]", 10)
    low = top + 116
    c.box(MARGIN + 20, low, 110, 120, "off")
    c.box(MARGIN + 20, low + 48, 110, 24, "a")
    c.box(MARGIN + 20 + 39, low + 48, 24, 24, "d", "a", 10)
    c.text(MARGIN + 20, low - 8, "A [M, K]", 10)
    c.box(left, low, size, 120, "off")
    c.box(left + 2 * unit, low + 48, unit, 24, "c")
    c.text(left + size + 8, low + 8, "C [M, N]", 10)
    c.arrow(MARGIN + 132, low + 60, left + 2 * unit - 2, low + 60, dashed=True)
    c.arrow(left + 2.5 * unit, top + 102, left + 2.5 * unit, low + 46, dashed=True)
    c.y = low + 128
    c.legend([("c", say("tile of C, {m} x {n}", m=m, n=n)), ("d", say("blocks of a step of {k} along K", k=k))])
    caption(
        c,
        "A step loads {loaded} elements for {products} multiply-adds: {ratio:.0f} for each element.",
        loaded=(m + n) * k, products=m * n * k, ratio=m * n / (m + n),
    )  # fmt: skip


class _SixteenBits:
    """Stands for a tensor of bf16 where a launcher asks for its element's size."""

    @staticmethod
    def element_size() -> int:
        return 2


@picture(
    "The order of tiles: what the tiles that run together share in L2",
    "Two grids of tiles of C. The tiles that run at the same time are coloured: on the left row by row, on the right "
    "in the grouped order. Beside each stands how many rows of A and columns of B they read.",
    figures.TILE_ORDER,
)
def grouped_order(c: Canvas, lesson: str) -> None:
    path = f"{DAY3}/{lesson.partition('.')[2]}.py"
    group = number(path, "GROUP")
    m, n = (128, 128) if "lesson01" in lesson else number(path, "TILES")[0][:2]
    sms = 2 * SMS if "lesson01" in lesson else SMS  # programs at a time: two of lesson 1's `grouped` fit on an SM
    size = 8192
    tiles_m, tiles_n = size // m, size // n
    shown = min(tiles_m, 20)
    cell, tall = min(5.0, 160 / tiles_n), 5.0
    top = c.y + 18
    for i, (name, of_group) in enumerate([(say("row by row"), 1), (say("groups of {n} rows", n=group), group)]):
        wave = [models.tile_at(t, tiles_m, tiles_n, of_group) for t in range(sms)]
        x = MARGIN + i * 176
        c.text(x, c.y + 8, name, 10)
        c.box(x, top, tiles_n * cell, shown * tall, "off")
        for row, column in wave:
            c.box(x + column * cell, top + row * tall, cell, tall, "c")
        rows, columns = len({r for r, _ in wave}), len({q for _, q in wave})
        c.text(x, top + shown * tall + 10, say("A: {rows} strips, B: {columns} strips", rows=rows, columns=columns), 9)
        c.text(x, top + shown * tall + 23, say("in all: {strips}", strips=rows + columns), 9, kind="bold")
    c.y = top + shown * tall + 36
    caption(
        c,
        "C of {size} x {size} in tiles of {m} x {n}, {sms} programs at a time; the first {shown} of "
        "{all} rows of tiles. A strip is all of K.",
        size=size, m=m, n=n, sms=sms, shown=shown, all=tiles_m,
    )  # fmt: skip


@picture(
    "One SM over time: a program for each tile, a persistent program, flattened loops",
    "Three timelines of one SM. A program for each tile fills its pipeline, multiplies and stores, then the next one "
    "starts. A persistent program saves the start. With flattened loops the next tile's loads run during the store.",
)
def persistent_program(c: Canvas, lesson: str) -> None:
    path = f"{DAY3}/lesson02_matmul_persistent.py"
    fill = stated(path, r"about ([\d,]+) cycles\s+until its first operands")
    store = stated(path, r"128 x 256,\s+([\d,]+) cycles")
    multiply = stated(path, r"takes ([\d,]+) cycles on the tensor cores")
    # Drawn shorter than it is: else the ends could not be seen.
    f, s, m, start = 22, 26, 62, 12
    for name, spans in [
        (say("one tile each"), [(0, "off", f), (0, "c", m), (0, "b", s), (start, "off", f), (0, "c", m), (0, "b", s)]),
        (say("persistent"), [(0, "off", f), (0, "c", m), (0, "b", s), (0, "off", f), (0, "c", m), (0, "b", s)]),
        (say("flattened"), [(0, "off", f), (0, "c", m), (0, "b", s), (0, "c", m), (0, "b", s)]),
    ]:  # fmt: skip
        at, placed = 0, []
        for before, kind, length in spans:
            at += before
            placed.append((at, length, kind, ""))
            at += length
        c.lane(name, placed, 1, left=92)
    c.gap(4)
    c.legend([("off", say("pipeline fills")), ("c", say("matmuls")), ("b", say("store C"))])
    caption(
        c,
        "Not to scale: to fill takes about {fill:,.0f} cycles, the matmuls of a tile at K = 4096 take "
        "{multiply:,.0f}, the store {store:,.0f}.",
        fill=fill, multiply=multiply, store=store,
    )  # fmt: skip


@picture(
    "Few tiles, many SMs: K is split as well",
    "Three schedules of three tiles on four SMs. A program a tile leaves one SM idle. With K split in two halves there "
    "are six programs. Stream-K gives each SM the same number of steps, wherever tiles begin and end.",
)
def split_k(c: Canvas, lesson: str) -> None:
    drawing = re.search(r"stream_k +([a-d]+) +([a-d]+) +([a-d]+) ", text(f"{DAY3}/lesson03_matmul_skinny.py"))
    steps = len(drawing[1]) if drawing else 8
    sms, tiles = 4, 3
    share = steps * tiles // sms
    plans = {
        "tiles": ["".join("abc"[t] * steps) for t in range(tiles)],
        "split_k": ["a" * (steps // 2) + "b" * (steps // 2), "c" * (steps // 2) + "d" * (steps // 2),
                    "a" * (steps // 2) + "b" * (steps // 2)],
        "stream_k": ["".join("abcd"[(t * steps + s) // share] for s in range(steps)) for t in range(tiles)],
    }  # fmt: skip
    kinds = {"a": "a", "b": "b", "c": "c", "d": "d"}
    cell = (WIDTH - 80 - MARGIN - 16) / (tiles * steps)
    for t in range(tiles):
        c.text(80 + t * (steps * cell + 8) + steps * cell / 2, c.y + 7, say("tile {i}", i=t), 10, "middle")
    c.y += 18
    for name, plan in plans.items():
        c.text(MARGIN, c.y + 10, name, 10)
        for t, line in enumerate(plan):
            for s, sm in enumerate(line):
                c.box(80 + t * (steps * cell + 8) + s * cell, c.y, cell - 0.5, 20, kinds[sm], sm, 8)
        c.y += 28
    c.legend([(kinds[sm], f"SM {sm}") for sm in "abcd"])
    caption(
        c,
        "A cell is a step along K, a letter the SM that computes it. tiles takes {steps} steps, stream_k "
        "{share}.",
        steps=steps, share=share,
    )  # fmt: skip


@picture(
    "A ring of stages: TMA writes ahead, the tensor cores read behind",
    "A line for each stage of shared memory, time to the right. TMA writes the blocks of a step into a stage. The "
    "stage is full until the tensor cores read it. Then it takes the blocks of a later step. The parity of "
    "the round tells which phase of the barrier a step waits for.",
    figures.RING,
)
def ring(c: Canvas, lesson: str) -> None:
    if "lesson09" in lesson:
        path = figures.RING_OF_STAGES
    else:
        path = lesson.replace(".", "/") + (".cu" if lesson.startswith("cuda_src") else ".py")
    stages, multiply = figures.ring_stages(path)
    load, steps = 900, 2 * stages + 1
    done = models.ring(stages, load, multiply, steps)
    end = done[-1]["released"]
    scale = (WIDTH - MARGIN - 60) / end
    for stage in range(stages):
        spans: list[Span] = []
        for i, d in enumerate(done):
            if d["stage"] == stage:
                spans += [(d["load"], d["full"] - d["load"], "a", str(i)), (d["use"], multiply, "c", str(i))]
                if d["use"] > d["full"]:
                    spans.append((d["full"], d["use"] - d["full"], "off", ""))
        c.lane(say("stage {stage}", stage=stage), spans, scale, left=60)
        parities = [str(d["parity"]) for d in done if d["stage"] == stage]
        c.text(60, c.y + 4, say("parity that the steps wait for: {parities}", parities=", ".join(parities)), 9,
               kind="faint")  # fmt: skip
        c.y += 13
    c.legend([("a", say("TMA writes the blocks of step i")), ("off", say("full")), ("c", say("wgmma reads them"))])
    caption(
        c,
        "{stages} stages; a step's matmul takes {multiply} cycles of an SM. Drawn for loads of {load} "
        "cycles: a step uses stage i mod {stages}, and waits for parity i / {stages} mod 2.",
        stages=stages, multiply=multiply, load=load,
    )  # fmt: skip


@picture(
    "Reduce-scatter: each program ends with one share of the tile",
    "A grid: a row for each program that has a partial sum of the tile, a column for each share of the tile's columns. "
    "A program keeps its own share and sends the others to the programs that own them.",
)
def reduce_scatter(c: Canvas, lesson: str) -> None:
    splits = int(stated(f"{DAY3}/lesson10_matmul_small_outputs.py", r"Reduce-scatter, SPLITS = (\d+)"))
    cell = (INSIDE - 76) / splits
    for s in range(splits):
        c.text(84 + (s + 0.5) * cell, c.y + 7, say("share {i}", i=s), 10, "middle")
    top = c.y + 16
    for p in range(splits):
        c.text(MARGIN, top + p * 26 + 11, say("program {p}", p=p), 10)
        for s in range(splits):
            label = say("keeps") if s == p else say("to {p}", p=s)
            c.box(84 + s * cell, top + p * 26, cell - 3, 22, "c" if s == p else "off", label, 10)
    c.y = top + splits * 26
    for s in range(splits):
        c.arrow(84 + (s + 0.5) * cell, c.y, 84 + (s + 0.5) * cell, c.y + 14)
        c.box(84 + s * cell, c.y + 14, cell - 3, 20, "b", say("sum {i}", i=s), 10)
    c.y += 42
    caption(
        c,
        "SPLITS = {splits}: each program computes a part of K for the whole tile. Then program p adds up "
        "share p, always in the order of K.",
        splits=splits,
    )  # fmt: skip


@picture(
    "Two consumers: one promotes while the other multiplies",
    "A timeline of two consumer warpgroups. The matmul of one runs on the tensor cores while the other one adds its "
    "sum, times the scales, to its accumulator.",
)
def promotion(c: Canvas, lesson: str) -> None:
    path = f"{DAY3}/lesson12_matmul_fp8_blocks.py"
    mma = stated(path, r"4096 a cycle +(\d+)") / 2
    promote = stated(path, r"128 a cycle +(\d+)")
    scale = 260 / (6 * mma)
    rows: list[list[Span]] = [[], []]
    for i in range(6):
        start = i * mma
        rows[i % 2].append((start, mma, "ab"[i % 2], "MMA"))
        if i < 5:
            rows[i % 2].append((start + mma, promote / 2, "d", ""))
    for i, spans in enumerate(rows):
        c.lane(say("consumer {i}", i=i), spans, scale, left=88)
    c.lane(say("tensor cores"), [(i * mma, mma, "ab"[i % 2], "") for i in range(6)], scale, left=88)
    c.gap(4)
    c.legend([("a", say("matmul of consumer 0")), ("b", say("of consumer 1")), ("d", say("promotes"))])
    caption(
        c,
        "{k} of K for a tile of {tile} x {tile}: {mma:.0f} cycles of matmuls and {promote:.0f} of promotions. The "
        "tensor cores do not wait.",
        k=number(path, "BLOCK_K"), tile=int(stated(path, r"for a tile of (\d+) x")), mma=2 * mma, promote=promote,
    )  # fmt: skip


@picture(
    "Scales of fp8: what shares one",
    "A matrix in four schemes. One scale for the whole tensor, one for each row, one for each block of a row, one for "
    "each square. Elements with the same colour share a scale.",
)
def quantisation_blocks(c: Canvas, lesson: str) -> None:
    block = int(stated(f"{DAY3}/lesson07_quantize_fp8.py", r"blocks +1 x (\d+)"))
    square = int(stated(f"{DAY3}/lesson07_quantize_fp8.py", r"squares +(\d+) x "))
    side, cells = 72, 8
    cell, top, kinds = side / cells, c.y + 16, "abcde"
    schemes: list[tuple[str, Words, list[list[str]]]] = [
        ("tensor", say("all of x"), [["a"] * cells] * cells),
        ("rows", say("a row"), [[kinds[r % 4]] * cells for r in range(cells)]),
        ("blocks", f"1 x {block}", [[kinds[(r + q // 4 * 2) % 4] for q in range(cells)] for r in range(cells)]),
        ("squares", f"{square} x {square}", [[kinds[r // 4 * 2 + q // 4] for q in range(cells)] for r in range(cells)]),
    ]
    for i, (name, shape, table) in enumerate(schemes):
        x = MARGIN + i * (side + 18)
        c.text(x, c.y + 7, name, 10)
        c.grid(x, top, (cell, cell), table)
        c.text(x, top + side + 10, shape, 9, kind="faint")
    c.y = top + side + 22
    most = stated(f"{DAY3}/lesson07_quantize_fp8.py", r"max \|x\| /\s+(\d+)")
    caption(
        c,
        "Cells of one colour side by side share a scale: their largest value over {most:.0f}. Each "
        "drawing shows 8 x 8 cells; in blocks and squares 4 cells stand for {block} elements.",
        most=most, block=block,
    )  # fmt: skip


@picture(
    "Grouped matmul: the rows of each expert in tiles",
    "The rows of x, sorted by expert, cut into tiles. Each expert's last tile may be partly empty. The list tile_ends "
    "says at which row of tiles each expert ends.",
)
def grouped_tiles(c: Canvas, lesson: str) -> None:
    path = f"{DAY3}/lesson08_grouped_matmul.py"
    found = re.search(r"offsets \[([\d, ]+)\]", text(path))
    offsets = [int(each) for each in found[1].split(",")] if found else []
    rows = int(stated(path, r"rows of a tile +\| (\d+)"))
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    tiles = [-(-count // rows) for count in counts]
    scale, x, index = (INSIDE - 6 * len(counts)) / (sum(tiles) * rows), float(MARGIN), 0
    top = c.y + 30
    for expert, (count, own) in enumerate(zip(counts, tiles, strict=True)):
        if own:
            c.text(x, c.y + 8, say("expert {e}", e=expert), 10)
            c.text(x, c.y + 22, str(count), 9, kind="faint")
        for t in range(own):
            used = min(rows, count - t * rows)
            c.box(x, top, rows * scale - 1, 26, "none")
            c.box(x, top, max(used * scale - 1, 1), 26, "abcd"[expert % 4])
            c.text(x + rows * scale / 2, top + 36, str(index), 9, "middle")
            index += 1
            x += rows * scale
        x += 6 if own else 0
    c.y = top + 46
    ends = [sum(tiles[: e + 1]) for e in range(len(tiles))]
    empty = ", ".join(str(e) for e, own in enumerate(tiles) if not own)
    caption(
        c,
        "Tiles of {rows} rows, offsets {offsets}, tile_ends {ends}. Expert {empty} has no rows. A "
        "program counts the ends that are not above its row of tiles: that is its expert.",
        rows=rows, offsets=offsets, ends=ends, empty=empty,
    )  # fmt: skip


@picture(
    "A swizzle: pieces of 16 bytes, and where each row keeps them",
    "A tile of 8 rows in shared memory. Row r keeps piece p at place p xor r. One piece is coloured: it stands at "
    "another place in each row, so eight rows are read from eight different groups of banks.",
)
def swizzle(c: Canvas, lesson: str) -> None:
    piece = number(f"{DAY3}/lesson13_tiles.py", "PIECE")
    rows = pieces = 8
    cell, top = 19.0, c.y + 18
    for i, (name, at) in enumerate([(say("in order"), lambda r, p: p), (say("p xor r"), lambda r, p: p ^ r)]):
        x = MARGIN + 12 + i * 178
        c.text(x, c.y + 8, name, 10)
        for r in range(rows):
            c.text(x - 4, top + r * cell + cell / 2, str(r), 9, "end", "faint")
            for p in range(pieces):
                c.box(x + at(r, p) * cell, top + r * cell, cell - 1, cell - 1, "e" if p == 2 else "off", str(p), 9)
    c.y = top + rows * cell + 4
    caption(
        c,
        "A piece is {piece} elements of 16 bits, 16 bytes: 4 banks. ldmatrix reads one piece of 8 rows "
        "at once. In order they are in the same 4 banks; with the swizzle they are in all 32.",
        piece=piece,
    )  # fmt: skip


@picture(
    "Tensor memory with two accumulators: the epilogue under the next tile's MMAs",
    "Above, tensor memory: two accumulators side by side, four warps of the epilogue with a quarter of the rows each. "
    "Below, a timeline: the MMAs of one tile run while the epilogue stores the tile before.",
)
def two_accumulators(c: Canvas, lesson: str) -> None:
    path = "day3_matmul_tk/lesson17_matmul_blackwell.py"
    rows, columns = int(stated(path, r'(\d+) rows \("lanes"\) x')), int(stated(path, r"lanes\"\) x (\d+) columns"))
    left, half, warps = 84.0, 104.0, 4
    c.text(left + half / 2, c.y + 6, say("columns 0 to {last}", last=columns // 2 - 1), 9, "middle")
    c.text(left + half * 1.5 + 4, c.y + 6, say("{first} to {last}", first=columns // 2, last=columns - 1), 9, "middle")
    c.y += 14
    for w in range(warps):
        first = w * rows // warps
        c.text(MARGIN, c.y + 9, say("rows {first} to {last}", first=first, last=first + rows // warps - 1), 9)
        c.box(left, c.y, half, 18, "c", "0, 2, 4, ..." if not w else "")
        c.box(left + half + 4, c.y, half, 18, "a", "1, 3, 5, ..." if not w else "")
        c.text(left + 2 * half + 10, c.y + 9, say("warp {w}", w=w), 9)
        c.y += 20
    c.gap(8)
    tile, store = 72, 40
    c.lane("TMA", [(t * tile, tile - 4, "off", "") for t in range(3)], 1)
    c.lane("MMA", [(16 + t * tile, tile, "ca"[t % 2], say("tile {i}", i=t)) for t in range(3)], 1)
    c.lane(say("epilogue"), [(16 + (t + 1) * tile, store, "ca"[t % 2], say("tile {i}", i=t)) for t in range(2)], 1)
    c.gap(2)
    caption(
        c,
        "Each accumulator takes {half} of {columns} columns. `ready` says that a tile's MMAs are complete, `drained` "
        "that its accumulator is free again.",
        half=columns // 2, columns=columns,
    )  # fmt: skip
