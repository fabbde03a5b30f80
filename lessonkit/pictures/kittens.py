"""Pictures of ThunderKittens: a step's tiles, ends of tiles, the order of attention, a head's last rows."""

from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, Span, Words, say
from lessonkit.pictures.numbers import number, stated
from lessonkit.pictures.registry import caption, picture

INSIDE = WIDTH - 2 * MARGIN
MATMUL = "day3_matmul_tk/lesson14_thunderkittens_matmul.cu"
ATTENTION = "day3_matmul_tk/lesson15_thunderkittens_attention"


@picture(
    "One block and one step: whose tiles they are, and where they lie",
    "Above, the block's tile of C with the tiles of A and B of a step: each consumer multiplies its own tile of A with "
    "the whole of B. Below, shared memory: a row for each stage of the ring, and the buffers that C leaves through.",
)
def kittens_tiles(c: Canvas, lesson: str) -> None:
    wide, stages, consumers, k = (number(MATMUL, name) for name in ("WIDE", "STAGES", "CONSUMERS", "BK"))
    rows, panel = (int(stated(MATMUL, rf"using {name}_tile = st_bf<(\d+), ")) for name in "ac")
    unit, left = 224 / wide, float(MARGIN) + 66
    top, low = c.y + 18, c.y + 18 + 64 * 0.8 + 20
    tall = 40.0
    c.text(left + wide * unit / 2, c.y + 8, say("B, {k} x {n}", k=k, n=wide), 11, "middle")
    c.box(left, top, wide * unit, 46, "c")
    for i in range(consumers):
        y = low + i * (tall + 2)
        c.box(MARGIN, y, 50, tall, "ab"[i % 2], f"A{i}", 11)
        c.box(left, y, wide * unit, tall, "ab"[i % 2], "")
        c.text(left + wide * unit / 2, y + tall / 2, say("C of consumer {i}, {m} x {n}", i=i, m=rows, n=wide), 11,
               "middle")  # fmt: skip
    for p in range(1, wide // panel):
        c.line(left + p * panel * unit, low - 4, left + p * panel * unit, low + 5)
        c.line(left + p * panel * unit, low + consumers * (tall + 2) - 7, left + p * panel * unit,
               low + consumers * (tall + 2) + 2)  # fmt: skip
    c.y = low + consumers * (tall + 2) + 14
    c.text(MARGIN, c.y + 6, say("shared memory"), 11, kind="bold")
    c.y += 18
    kilobytes = 2 * rows * k / 1024, 2 * k * wide / 1024
    name = 66
    scale = (INSIDE - name) / (consumers * kilobytes[0] + kilobytes[1])
    for stage in range(stages):
        c.text(MARGIN, c.y + 11, say("stage {stage}", stage=stage), 11)
        for i in range(consumers):
            c.box(MARGIN + name + i * kilobytes[0] * scale, c.y, kilobytes[0] * scale - 1, 22, "ab"[i % 2], f"A{i}", 11)
        c.box(MARGIN + name + consumers * kilobytes[0] * scale, c.y, kilobytes[1] * scale - 1, 22, "c", "B", 11)
        c.y += 24
    c.text(MARGIN, c.y + 11, say("buffers"), 11)
    buffer = 2 * rows * panel / 1024
    for i in range(2 * consumers):
        c.box(MARGIN + name + i * buffer * scale, c.y, buffer * scale - 1, 22, "ab"[i // 2 % 2], f"C{i // 2}", 11)
    c.y += 30
    ring = stages * (consumers * kilobytes[0] + kilobytes[1])
    caption(
        c,
        "A step is {k} of K. A stage takes {stage:.0f} KB, the ring {ring:.0f} KB, and C leaves in panels of {panel} "
        "columns through {buffers:.0f} KB. A stage is free again after {consumers} arrivals, one of each consumer.",
        k=k, stage=ring / stages, ring=ring, panel=panel, buffers=2 * consumers * buffer, consumers=consumers,
    )  # fmt: skip


@picture(
    "The ends of tiles over time: when do the tensor cores wait?",
    "Three timelines of two tiles with a line each for the loads, both consumers and the tensor cores. With a block "
    "for each tile the tensor cores wait for store, start and first loads. The template's wait for the store. With the "
    "loops written out one consumer stores while the other multiplies.",
)
def kittens_ends(c: Canvas, lesson: str) -> None:
    tile = stated(MATMUL, r"of a tile's\s+// ([\d,]+) cycles at K = 4096")
    saved = stated(MATMUL, r"Predicted: (\d+) fewer of a tile's")
    f, m, s, start, wait = 16, 84, 20, 10, 6  # first loads, matmuls, store, start of a block, wait for each other
    one = f + m + s + start
    two = f + m + 2 * wait + s
    mma, store = "c", "b"
    both: list[Span] = [(f, m, mma, "0"), (f + m, s, store, ""), (one + f, m, mma, "1"), (one + f + m, s, store, "")]
    meet: list[Span] = [
        (f, m, mma, "0"), (f + m, wait, "e", ""), (f + m + wait, s, store, ""), (f + m + wait + s, wait, "e", ""),
        (two, m, mma, "1"), (two + m, wait, "e", ""), (two + m + wait, s, store, ""),
    ]  # fmt: skip
    first: list[Span] = [(f, m - s, mma, "0"), (f + m - s, s, store, ""), (f + m, m - s, mma, "1"),
                         (f + 2 * m - s, s, store, "")]  # fmt: skip
    second: list[Span] = [(f, m, mma, "0"), (f + m, s, store, ""), (f + m + s, m - s, mma, "1"),
                          (f + 2 * m, s, store, "")]  # fmt: skip
    ladder: list[tuple[Words, list[list[Span]]]] = [
        (say("v4: a block for each tile"), [[(0, m, "off", "0"), (one, m, "off", "1")], both, both,
                                            [(f, m, "a", ""), (one + f, m, "a", "")]]),
        (say("v5: the template, persistent"), [[(0, m, "off", "0"), (m, f, "off", ""), (two, m - f, "off", "1")],
                                               meet, meet, [(f, m, "a", ""), (two, m, "a", "")]]),
        (say("v6: its loops written out"), [[(0, m, "off", "0"), (m, m, "off", "1")], first, second,
                                            [(f, 2 * m, "a", "")]]),
    ]  # fmt: skip
    names = (say("loads"), say("consumer 0"), say("consumer 1"), say("tensor cores"))
    scale = (WIDTH - MARGIN - 92) / (one + f + m + s)
    for heading, lanes in ladder:
        c.text(MARGIN, c.y + 8, heading, 11, kind="bold")
        c.y += 17
        for name, spans in zip(names, lanes, strict=True):
            c.lane(name, spans, scale, left=92, height=16)
        c.gap(5)
    c.legend([("off", say("TMA loads of tile i")), ("c", say("matmuls of tile i")), ("b", say("store C")),
              ("e", say("the consumers wait for each other"))])  # fmt: skip
    caption(
        c,
        "Not to scale: at K = 4096 the matmuls of a tile take {tile:,.0f} cycles, and v6 is predicted to save "
        "{saved:.0f} of them. Its consumers leave the tensor cores to each other while they store.",
        tile=tile, saved=saved,
    )  # fmt: skip


@picture(
    "QK one step ahead: one consumer's tensor cores, softmax and registers over time",
    "Two timelines of one consumer. In v2 QK, softmax and PV of a tile follow each other. In v3 QK of the next tile "
    "is issued before PV of this one, and the softmax runs during PV. Lines below show how long the tiles scores and p "
    "in registers are in use.",
)
def kittens_ahead(c: Canvas, lesson: str) -> None:
    path = f"{ATTENTION}.cu"
    matmul = int(stated(path, r"MFLOP, (\d+) cycles of")) // 2
    exps = int(stated(path, r"exponentials take (\d+) cycles"))
    tiles = 4
    step = 2 * matmul + exps
    v2: dict[str, list[Span]] = {"tensor": [], "softmax": [], "scores": [], "p": []}
    for j in range(tiles):
        at, kind = j * step, "ab"[j % 2]
        v2["tensor"] += [(at, matmul, kind, f"Q{j}"), (at + matmul + exps, matmul, kind, f"P{j}")]
        v2["softmax"].append((at + matmul, exps, kind, str(j)))
        v2["scores"].append((at, matmul + exps, kind, str(j)))
        v2["p"].append((at + matmul + exps, matmul, kind, str(j)))
    v3: dict[str, list[Span]] = {"tensor": [(0, matmul, "a", "Q0")], "softmax": [(matmul, exps, "a", "0")],
                                 "scores": [(0, matmul + exps, "a", "0")], "p": []}  # fmt: skip
    at = matmul + exps  # p of the first tile is there
    for j in range(1, tiles + 1):
        kind, last = "ab"[j % 2], "ab"[(j - 1) % 2]
        if j == tiles:
            v3["tensor"].append((at, matmul, last, f"P{j - 1}"))
            v3["p"].append((at, matmul, last, str(j - 1)))
            break
        v3["tensor"] += [(at, matmul, kind, f"Q{j}"), (at + matmul, matmul, last, f"P{j - 1}")]
        v3["softmax"].append((at + matmul, exps, kind, str(j)))
        done = at + matmul + max(matmul, exps)
        v3["scores"].append((at, done - at, kind, str(j)))
        v3["p"].append((at, 2 * matmul, last, str(j - 1)))
        at = done
    names: dict[str, Words] = {"tensor": say("tensor cores"), "softmax": say("softmax"), "scores": "scores", "p": "p"}
    scale = (WIDTH - MARGIN - 92) / (tiles * step)
    rungs: list[tuple[Words, dict[str, list[Span]]]] = [
        (say("v2: one after the other"), v2), (say("v3: QK one step ahead"), v3)
    ]  # fmt: skip
    for heading, lanes in rungs:
        c.text(MARGIN, c.y + 8, heading, 11, kind="bold")
        c.y += 17
        for key, name in names.items():
            c.lane(name, lanes[key], scale, left=92, height=16)
        c.gap(5)
    c.legend([("a", say("even tiles of keys")), ("b", say("odd tiles"))])
    caption(
        c,
        "Q: QK, P: PV, {matmul} cycles each at D = 128; a tile's exponentials take {exps}. One consumer alone, without "
        "the softmax's other instructions: a tile takes {before} cycles in v2 and {after} in v3. v3 needs no second "
        "tile: PV reads p while the softmax works on scores.",
        matmul=matmul, exps=exps, before=step, after=matmul + max(matmul, exps),
    )  # fmt: skip


@picture(
    "The last rows of a head: rounded down, and rounded up",
    "Two bars of a head's rows. Tiles rounded down leave the last rows unwritten; rounded up, all rows have a tile. "
    "Below, a head whose length no tile divides: queries past the end are not stored, keys past the end get -inf.",
)
def kittens_tail(c: Canvas, lesson: str) -> None:
    path = f"{ATTENTION}.cu"
    theirs = int(stated(f"{ATTENTION}.py", r"last multiple of (\d+), at S"))
    length = int(stated(f"{ATTENTION}.py", r"last multiple of \d+, at S = (\d+)"))
    rows = number(path, "ROWS") * int(stated(path, r"constexpr int KEYS = \d+, CONSUMERS = (\d+)"))
    keys = int(stated(path, r"constexpr int KEYS = (\d+), CONSUMERS"))
    short = int(stated(path, r"for \(const int64_t s : \{(\d+), "))
    scale = INSIDE / length
    whole, rest = length // theirs, length % theirs
    bars: list[tuple[Words, list[tuple[int, str]]]] = [
        (say("mha_h100: blocks of {n} rows, rounded down", n=theirs), [(theirs, "c")] * whole + [(rest, "e")]),
        (say("here: blocks of {n} rows, rounded up", n=rows), [(rows, "c")] * -(-length // rows)),
    ]
    for name, parts in bars:
        c.text(MARGIN, c.y + 8, name, 11)
        x = float(MARGIN)
        for size, kind in parts:
            if size:
                c.box(x, c.y + 17, size * scale - 1, 20, kind)
                x += size * scale
        c.y += 44
    c.legend([("c", say("written")), ("e", say("the last {n} rows of S = {length}: never written", n=rest,
                                              length=length))])  # fmt: skip
    c.gap(8)
    c.text(MARGIN, c.y + 7, say("a head of S = {short}: its scores in tiles of {rows} x {keys}", short=short, rows=rows,
                                keys=keys), 11)  # fmt: skip
    down, across = -(-short // rows) * rows, -(-short // keys) * keys
    unit, left, top = 150 / max(down, across), float(MARGIN) + 96, c.y + 34
    c.text(left, top - 9, say("keys across"), 11, kind="faint")
    c.text(left - 6, top + 9, say("queries down"), 11, "end", "faint")
    c.box(left, top, short * unit, short * unit, "c")
    c.box(left + short * unit, top, (across - short) * unit, short * unit, "b")
    c.box(left, top + short * unit, across * unit, (down - short) * unit, "off")
    for r in range(1, down // rows):
        c.line(left - 4, top + r * rows * unit, left + across * unit, top + r * rows * unit, dashed=True)
    for q in range(1, across // keys):
        c.line(left + q * keys * unit, top - 4, left + q * keys * unit, top + down * unit, dashed=True)
    c.y = top + down * unit + 8
    c.legend(
        [("c", say("scores")), ("b", say("zeros as keys: score -inf")), ("off", say("zeros as queries: not stored"))]
    )
    caption(
        c,
        "TMA fills rows past S with zeros, and does not store them: a head's rows are a dimension of the tensor map, "
        "so its last tile does not touch the next head. A zero is a score like any other, so keys past S need -inf.",
    )  # fmt: skip
