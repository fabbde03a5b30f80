"""Pictures of day 4: score blocks, Hopper's roles and timelines, backward, decoding, rings."""

import re

from lessonkit.base.chips import CHIPS
from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, Span, Words, say
from lessonkit.pictures.numbers import number, stated, text
from lessonkit.pictures.registry import caption, picture

INSIDE = WIDTH - 2 * MARGIN
DAY4 = "day4_replace_op"
HOPPER = f"{DAY4}/flash_hopper"
BACKWARD = f"{DAY4}/flash_hopper_backward"


@picture(
    "Who visits which block of scores, and what stays on the chip",
    "Two grids of blocks of scores, queries downwards and keys across. Version 1 goes down a column of blocks, keys "
    "outside; version 2 goes along a row, queries outside, and one program owns the row.",
)
def score_sweeps(c: Canvas, lesson: str) -> None:
    side, cell, top = 4, 28.0, c.y + 34
    along = [[r * side + q for q in range(side)] for r in range(side)]
    down = [list(column) for column in zip(*along, strict=True)]
    for i, (name, order) in enumerate(
        [(say("version 1: keys outside"), down), (say("version 2: queries outside"), along)]
    ):
        x = MARGIN + 16 + i * 178
        c.text(x - 16, c.y + 8, name, 10)
        c.text(x, top - 8, say("keys across"), 9, kind="faint")
        kinds = [["abcd"[at // side] for at in line] for line in order]
        c.grid(x, top, (cell, cell), kinds, [[str(at) for at in line] for line in order], 10)
        if i == 0:
            c.arrow(x - 7, top + 4, x - 7, top + side * cell - 4)
        else:
            c.arrow(x + 4, top + side * cell + 7, x + side * cell - 4, top + side * cell + 7)
    c.y = top + side * cell + 18
    caption(
        c,
        "Numbers give the order. Version 1 reads and writes O, m and l for each block, because a row's "
        "blocks come apart. Version 2 keeps them in registers until the row is done; its rows are "
        "programs of their own.",
    )  # fmt: skip


@picture(
    "Causal attention: blocks that are whole, masked, or skipped",
    "The score matrix in blocks, queries downwards, keys across. Blocks below the diagonal are computed whole, those "
    "on it are masked, those above it are skipped.",
    figures.CAUSAL,
)
def causal_blocks(c: Canvas, lesson: str) -> None:
    if "options" in lesson:
        of_large = r"return \({}, 8, 3\) if device.roomy"
        path = f"{DAY4}/flash_options/attention.py"
        tile, keys = (int(stated(path, of_large.format(part))) for part in (r"(\d+), \d+", r"\d+, (\d+)"))
    else:
        path = f"{HOPPER}/warp_specialized.py"
        tile, keys = number(path, "ROWS") * number(path, "CONSUMERS"), number(path, "KEYS")
    size = 8 * tile
    found = models.causal(size, size, tile, keys)
    kinds, cell, top, left = {"whole": "c", "masked": "b", "skipped": "none"}, 24.0, c.y + 16, MARGIN + 74
    c.text(left, c.y + 7, say("keys across, blocks of {n}", n=keys), 10)
    c.grid(left, top, (cell, cell), [[kinds[each] for each in line] for line in found])
    for r in range(len(found)):
        c.text(left - 6, top + (r + 0.5) * cell, say("tile {i}", i=r), 9, "end", "faint")
        c.text(left + 8 * cell + 8, top + (r + 0.5) * cell, str(r + 1), 9)
    c.y = top + len(found) * cell + 6
    c.legend([("c", say("whole: no mask")), ("b", say("masked")), ("none", say("skipped"))])
    count = [each for line in found for each in line].count
    caption(
        c,
        "S = {size}, tiles of {tile} queries. Of {all} blocks {whole} are whole and {masked} masked. On "
        "the right the blocks of each tile: the last tile has {times} times the work of the first.",
        size=size, tile=tile, times=len(found), all=len(found) * len(found[0]), whole=count('whole'),
        masked=count('masked'),
    )  # fmt: skip


@picture(
    "A CTA of Hopper attention: roles, and the map of shared memory",
    "One producer warp and two consumer warpgroups with their registers. Below, a bar of shared memory: Q of each "
    "consumer, the ring of K, the ring of V, and the buffers of O.",
)
def hopper_roles(c: Canvas, lesson: str) -> None:
    path, D = f"{HOPPER}/warp_specialized.py", 128
    rows, keys, consumers = (number(path, name) for name in ("ROWS", "KEYS", "CONSUMERS"))
    stages = figures.attention_stages(D)
    registers = re.search(r"\], \[4, 1\], \[(\d+), (\d+)\]\)", text(path))
    of_consumer, of_producer = (registers[1], registers[2]) if registers else ("?", "?")
    wide = (INSIDE - 8 * consumers) / (consumers + 1)
    top = c.y
    for i in range(consumers + 1):
        x = MARGIN + i * (wide + 8)
        c.box(x, top, wide, 62, "d" if i == 0 else "ab"[(i - 1) % 2])
        name = say("producer warp") if i == 0 else say("consumer {i}", i=i - 1)
        c.text(x + wide / 2, top + 12, name, 10, "middle")
        c.text(x + wide / 2, top + 28, say("TMA loads") if i == 0 else say("{n} queries", n=rows), 10, "middle")
        c.text(x + wide / 2, top + 46, say("{n} registers", n=of_producer if i == 0 else of_consumer), 10, "middle")
    c.y = top + 78
    q, k = consumers * rows * D * 2, stages * keys * D * 2
    parts = [("Q", q, "off"), ("K", k, "c"), ("V", k, "e"), ("O", q, "off")]
    limit = 227 * 1024
    x, bar = float(MARGIN), c.y
    for part, size, kind in parts:
        pieces = stages if part in "KV" else consumers
        for piece in range(pieces):
            w = size / pieces / limit * INSIDE
            c.box(x, bar, w, 30, kind, f"{part}{piece}", 10)
            x += w
    c.box(x, bar, MARGIN + INSIDE - x, 30, "none", "")
    c.y = bar + 36
    sizes = ", ".join(f"{part} {size // 1024}" for part, size, _ in parts)
    caption(
        c,
        "D = {D}, {stages} stages. Shared memory in KB: {sizes}, of {limit} that a CTA may have. Each "
        "stage has an mbarrier full, for its bytes, and one empty, for {consumers} arrivals.",
        D=D, stages=stages, sizes=sizes, limit=limit // 1024, consumers=consumers,
    )  # fmt: skip


def _timeline(c: Canvas, order: str, cycles: dict[str, int], stages: int) -> float:
    """Draw four blocks of keys; the share of the time in percent for which the tensor cores are busy."""
    blocks = 4
    found = models.attention(order, **cycles, stages=stages, blocks=blocks + 4)
    spans = found["spans"]
    end = max(s["start"] + s["length"] for s in spans["tensor"] if s["block"] < blocks)
    scale = (WIDTH - MARGIN - 86) / end
    names = {
        "loads": say("producer"), "tensor": say("tensor cores"), "softmax0": say("softmax 0"),
        "softmax1": say("softmax 1"),
    }  # fmt: skip
    for lane, name in names.items():
        placed: list[Span] = []
        for s in spans[lane]:
            if s["start"] + s["length"] > end + 1:
                continue
            kind = {"loads": "off", "softmax0": "a", "softmax1": "b"}.get(lane) or "ab"[s["consumer"]]
            label = ("QP"[s["what"]] if lane == "tensor" else "KV"[s["what"]]) if lane in ("tensor", "loads") else ""
            placed.append((s["start"], s["length"], kind, label))
        c.lane(name, placed, scale, left=86, height=18)
    return float(found["percent"])


@picture(
    "Hopper attention over time: one after the other, and overlapped",
    "Two timelines with a line each for the producer's loads, the tensor cores, and the softmax of both consumers. "
    "Above, a consumer does QK, softmax and PV in turn. Below, QK of the next block is issued before PV of this one.",
    figures.ATTENTION,
)
def hopper_timeline(c: Canvas, lesson: str) -> None:
    shares = []
    D = 64
    cycles, stages = figures.attention_cycles(D), figures.attention_stages(D)
    for order, name in [("serial", "warp_specialized"), ("overlap", "overlap_softmax")]:
        c.text(MARGIN, c.y + 8, f"{name}, D = {D}", 11, kind="bold")
        c.y += 18
        shares.append(_timeline(c, order, cycles, stages))
        c.gap(6)
    c.legend([("a", say("consumer 0")), ("b", say("consumer 1")), ("off", say("TMA loads of K and V"))])
    caption(
        c,
        "Q: QK of a block, P: PV, {matmul} cycles each for one consumer, a softmax {softmax}, {stages} "
        "stages. Computed from the lesson's budget, without any wait for barriers: the tensor cores are "
        "busy for {serial:.0f}% and {overlap:.0f}% of the time. A kernel reaches less.",
        matmul=cycles['matmul'], softmax=cycles['exps'] + cycles['others'], stages=stages, serial=shares[0],
        overlap=shares[1],
    )  # fmt: skip


@picture(
    "Ping-pong: two barriers make the consumers issue in turns",
    "A timeline with both consumers. While one consumer's matmuls run, the other computes its softmax. Barriers pass "
    "the turn from one to the other.",
)
def ping_pong(c: Canvas, lesson: str) -> None:
    D = 128
    cycles, stages = figures.attention_cycles(D), figures.attention_stages(D)
    share = _timeline(c, "ping-pong", cycles, stages)
    free = models.attention("overlap", **cycles, stages=stages, blocks=8)
    c.gap(4)
    c.legend([("a", say("consumer 0")), ("b", say("consumer 1"))])
    caption(
        c,
        "D = {D}, {stages} stages; QK or PV of one consumer takes {matmul} cycles, its softmax "
        "{softmax}. Without any wait for barriers the tensor cores are busy for {share:.0f}% of the "
        "time. The overlap inside each consumer alone gives {free:.0f}%.",
        D=D, stages=stages, matmul=cycles['matmul'], softmax=cycles['exps'] + cycles['others'], share=share,
        free=free['percent'],
    )  # fmt: skip


@picture(
    "Persistent CTAs: loads and the store of a tile run under its neighbours",
    "Timelines of one SM. With a CTA for each tile, loads, main loop and store follow each other. In a persistent CTA "
    "the producer loads the next tile during the main loop, and TMA stores O during the next tile.",
)
def persistent_scheduler(c: Canvas, lesson: str) -> None:
    slots = int(stated(f"{HOPPER}/persistent_scheduler.py", r"mailbox: gl.shared_memory_descriptor  # \[(\d+), 1\]"))
    load, main, store, start = 24, 74, 24, 10
    c.text(MARGIN, c.y + 7, say("one CTA a tile"), 10, kind="bold")
    c.y += 15
    one = load + main + store
    c.lane("", [(t * (one + start) + at, n, kind, label) for t in range(2) for at, n, kind, label in (
        (0, load, "off", ""), (load, main, "c", say("tile {i}", i=t)), (load + main, store, "b", ""))], 1)  # fmt: skip
    c.text(MARGIN, c.y + 9, say("persistent"), 10, kind="bold")
    c.y += 18
    c.lane(say("producer"), [(0, load, "off", ""), (load + 8, load, "off", ""), (load + main + 8, load, "off", "")], 1)
    c.lane(say("consumers"), [(load + t * main, main, "c", say("tile {i}", i=t)) for t in range(3)], 1)
    c.lane(say("TMA store"), [(load + (t + 1) * main, store, "b", "") for t in range(2)], 1)
    c.gap(4)
    c.legend([("off", say("load Q, K, V")), ("c", say("main loop")), ("b", say("store O"))])
    top = c.y + 6
    c.box(MARGIN, top, 88, 34, "off", say("global counter"), 10)
    c.arrow(MARGIN + 88, top + 17, MARGIN + 112, top + 17)
    c.box(MARGIN + 112, top, 76, 34, "d", say("producer"), 10)
    c.arrow(MARGIN + 188, top + 17, MARGIN + 212, top + 17)
    for s in range(slots):
        c.box(MARGIN + 212, top + s * 34 / slots, 52, 34 / slots, "e", say("slot {i}", i=s), 9)
    c.arrow(MARGIN + 264, top + 17, MARGIN + 282, top + 17)
    c.box(MARGIN + 282, top, 62, 34, "a", say("consumers"), 10)
    c.y = top + 42
    caption(
        c,
        "The producer fetches a tile index from the counter and publishes it in a mailbox of {slots} "
        "slots. A slot needs no empty barrier: it is written again only after the consumers have "
        "returned the Q of the tile that it named. Times are not to scale.",
        slots=slots,
    )  # fmt: skip


@picture(
    "Causal tiles on the SMs: dealt in advance, longest first, dynamic",
    "Three plots with a bar for each SM, its work in blocks of keys. Dealt out in advance, in order, some SMs "
    "get more. Longest tiles first and dealt on demand, all end at about the same time.",
)
def causal_schedule(c: Canvas, lesson: str) -> None:
    at, sms = number(f"{DAY4}/lesson08_flash_hopper.py", "AT_128"), CHIPS["h200"].sms
    path = f"{HOPPER}/warp_specialized.py"
    tiles = at["S"] // (number(path, "ROWS") * number(path, "CONSUMERS"))
    heads = at["B"] * at["H"]
    plans = models.schedules(tiles, heads, sms)
    mean = sum(plans["dynamic"]) / sms
    names = {
        "in order": say("in order"),
        "longest first": say("longest first"),
        "dynamic": say("longest first, dynamic"),
    }
    tall, scale = 54.0, 54.0 / max(max(plan) for plan in plans.values())
    cell = INSIDE / sms
    for name, plan in plans.items():
        c.text(MARGIN, c.y + 7, names[name], 10)
        most = say("busiest SM: {over:.1f}% above the mean", over=100 * (max(plan) / mean - 1))
        c.text(WIDTH - MARGIN, c.y + 7, most, 10, "end", "faint")
        c.y += 15
        for sm, work in enumerate(plan):
            c.box(MARGIN + sm * cell, c.y + tall - work * scale, cell - 0.4, work * scale, "c")
        c.line(MARGIN, c.y + tall - mean * scale, MARGIN + INSIDE, c.y + tall - mean * scale, dashed=True)
        c.y += tall + 8
    caption(
        c,
        "{heads} heads of S = {S}: tiles of 1 to {tiles} blocks on {sms} SMs; the line is the mean. "
        "Dynamic: a CTA that is done fetches the next tile. Counted in blocks, without the ends of "
        "tiles.",
        heads=heads, S=at['S'], tiles=tiles, sms=sms,
    )  # fmt: skip


@picture(
    "Lazy rescaling: the row maximum leaves the critical path",
    "Two timelines of one block of scores. Taking each block's maximum, the exponentials wait for the row maximum, and "
    "PV waits for O to be rescaled. Lazily, the old maximum is used, and one comparison checks the sums.",
)
def lazy_rescaling(c: Canvas, lesson: str) -> None:
    bits = number(f"{HOPPER}/lazy_rescaling.py", "LARGE_SUM")
    power = (bits >> 23) - 127
    head = number(f"{HOPPER}/lazy_rescaling.py", "HEADROOM", dtype="bf16", bfloat16="bf16")
    each: list[Span] = [(0, 52, "e", say("row max")), (52, 96, "a", say("exp2, sum, pack"))]
    each += [(148, 66, "b", say("rescale O")), (214, 40, "c", "PV")]
    lazy: list[Span] = [(0, 96, "a", say("exp2, sum, pack")), (96, 66, "off", say("large sum?")), (162, 40, "c", "PV")]
    c.lane(say("each block"), each, 1, left=86, height=24)
    c.lane(say("lazy"), lazy, 1, left=86, height=24)
    x = 86 + 96 + 33
    c.arrow(x, c.y - 4, x, c.y + 18)
    c.text(x + 6, c.y + 8, say("yes, rare"), 9)
    c.box(86, c.y + 18, 258, 24, "e", say("raise m, rescale P, O and l, pack P again"), 10)
    c.y += 48
    caption(
        c,
        "m stays the maximum of a tile's first block until a partial sum of a block passes 2^{power}. In "
        "bf16 m is then raised by {head} more than needed, so that the next time is far away.",
        power=power, head=head,
    )  # fmt: skip


@picture(
    "The diagonal block in four quarters",
    "A block of keys and a tile of as many queries, crossed by the diagonal from corner to corner. Consumer 0 has the "
    "upper half: its right quarter is masked completely and is not computed.",
)
def diagonal_quarters(c: Canvas, lesson: str) -> None:
    path = f"{HOPPER}/causal_diagonal.py"
    rows, keys = number(path, "ROWS"), number(path, "KEYS")
    cell, top, left = 84.0, c.y + 18, MARGIN + 110
    for q in range(2):
        c.text(left + (q + 0.5) * cell, c.y + 8, say("keys {a} to {b}", a=q * keys // 2, b=(q + 1) * keys // 2 - 1), 10,
               "middle")  # fmt: skip
        c.text(left - 8, top + (q + 0.5) * cell, say("consumer {i}", i=q), 10, "end")
    kinds = [["b", "none"], ["c", "b"]]
    labels: list[list[Words]] = [["", say("not computed")], [say("all"), ""]]
    c.grid(left, top, (cell, cell), kinds, labels, 10)
    c.line(left, top, left + 2 * cell, top + 2 * cell)
    c.y = top + 2 * cell + 10
    caption(
        c,
        "{rows} queries each. Consumer 0 issues QK with N = {half} and PV with K = {half}. A head with n "
        "tiles has n (n + 1) / 2 blocks and n such quarters.",
        rows=rows, half=keys // 2,
    )  # fmt: skip


@picture(
    "The accumulator of QK: which thread holds which elements",
    "A part of the score matrix of one warp: 16 rows, columns in groups of eight. Each thread of a quad holds two "
    "neighbouring elements in row r and two in row r + 8.",
)
def fragment(c: Canvas, lesson: str) -> None:
    cell, top, left = (36.0, 15.0), c.y + 18, MARGIN + 44
    columns = 8
    for q in range(columns):
        c.text(left + (q + 0.5) * cell[0], c.y + 8, str(q), 9, "middle", "faint")
    threads = [[f"T{r % 8 * 4 + q // 2}" for q in range(columns)] for r in range(16)]
    c.grid(left, top, cell, [["abcd"[q // 2] for q in range(columns)]] * 16, threads, 9)
    for r in (0, 8, 15):
        c.text(left - 6, top + (r + 0.5) * cell[1], say("row {i}", i=r), 9, "end", "faint")
    c.y = top + 16 * cell[1] + 6
    caption(
        c,
        "16 rows of a warp and 8 columns; the pattern repeats every 8 columns. A row lies in the four "
        "threads of a quad, so its maximum takes two shuffles. As left operand of PV, P has the same "
        "layout: nothing moves.",
    )  # fmt: skip


@picture(
    "Two kernels of the backward: owners of queries, owners of keys",
    "Two grids of causal blocks. dq_kernel owns a row of blocks and sweeps keys; dkdv_kernel owns a column and sweeps "
    "queries downwards from the diagonal. Each block is computed twice.",
)
def backward_sweeps(c: Canvas, lesson: str) -> None:
    side, cell, top = 5, 25.0, c.y + 20
    own = 3
    found = models.causal(2 * side, 2 * side, 2, 2)
    for i, name in enumerate(("dq_kernel", "dkdv_kernel")):
        x = MARGIN + 18 + i * 178
        c.text(x, c.y + 9, name, 10)

        visited = {"whole": "a", "masked": "b", "skipped": "none"}
        kinds = [
            [visited[what] if (r, q)[i] == (own, 1)[i] or what == "skipped" else "off" for q, what in enumerate(line)]
            for r, line in enumerate(found)
        ]
        c.grid(x, top, (cell, cell), kinds, [["m" * (what == "masked") for what in line] for line in found], 10)
        if i == 0:
            c.arrow(x, top + (own + 1) * cell + 5, x + (own + 1) * cell, top + (own + 1) * cell + 5)
        else:
            c.arrow(x + 2 * cell + 5, top + cell, x + 2 * cell + 5, top + side * cell)
    c.y = top + side * cell + 12
    caption(
        c,
        "m: masked. The row's owner adds to dQ in registers, the column's owner to dK and dV. Each sum "
        "has one owner, so two runs agree to the bit. P and dS are computed twice: seven matmuls instead "
        "of five.",
    )  # fmt: skip


@picture(
    "Five matmuls of the backward: who holds what",
    "A table of the five matmuls. For each the left operand, the right operand and the result, coloured by where they "
    "lie: shared memory, registers, or memory.",
)
def five_matmuls(c: Canvas, lesson: str) -> None:
    keys, stages = number(f"{BACKWARD}/five_matmuls.py", "KEYS"), number(f"{BACKWARD}/five_matmuls.py", "STAGES")
    table = [("K", "a", "Q", "a", "S^T", "b"), ("V", "a", "dO", "a", "dP^T", "b"), ("P^T", "b", "dO", "a", "dV", "b"),
             ("dS^T", "b", "Q", "a", "dK", "b"), ("dS", "a", "K", "a", "dQ", "c")]  # fmt: skip
    wide = 76
    for i, heading in enumerate((say("left"), say("right"), say("result"))):
        c.text(MARGIN + (i * 1.5 + 0.5) * wide, c.y + 7, heading, 10, "middle", "faint")
    c.y += 16
    for left, left_kind, right, right_kind, out, out_kind in table:
        y = c.y
        for i, (name, kind) in enumerate(((left, left_kind), (right, right_kind), (out, out_kind))):
            c.box(MARGIN + i * 1.5 * wide, y, wide, 24, kind, name)
        c.text(MARGIN + 1.25 * wide, y + 12, "x", 11, "middle")
        c.text(MARGIN + 2.75 * wide, y + 12, "=", 11, "middle")
        c.y = y + 30
    c.legend([("a", say("shared memory")), ("b", say("registers")), ("c", say("fp32 sum in L2"))])
    caption(
        c,
        "Each of two consumers owns {keys} keys and keeps dK and dV in registers for the whole tile; Q "
        "and dO come in {stages} stages. dQ sums over keys of all CTAs, which add to it in memory.",
        keys=keys, stages=stages,
    )  # fmt: skip


@picture(
    "A step of the backward over time, as planned",
    "For three rungs a line of the tensor cores and a line of the consumers. One after the other the tensor cores wait "
    "for exponentials and atomics; overlapped, another matmul runs under them.",
)
def backward_timeline(c: Canvas, lesson: str) -> None:
    path = f"{DAY4}/lesson09_flash_hopper_backward.py"
    drawn = re.findall(r"(\w+) +tensor cores +([A-Za-z.]+).*\n +consumers +([a-z.]+)", text(path))
    cycles = int(stated(path, r"A character is (\d+) cycles"))
    scale = (WIDTH - MARGIN - 92) / max(len(line) for _, *lines in drawn for line in lines)
    kinds = {"s": "a", "d": "a", "v": "b", "k": "b", "q": "d", "x": "c", "g": "c", "a": "e", "r": "e"}
    labels = {"s": "S", "d": "dP", "v": "dV", "k": "dK", "q": "dQ"}
    for rung, tensor, consumers in drawn:
        c.text(MARGIN, c.y + 7, rung, 10, kind="bold")
        c.y += 14
        spans = [(at, n, kinds[letter], labels[letter]) for at, n, letter in runs(tensor.lower())]
        c.lane(say("tensor cores"), spans, scale, left=92, height=17)
        c.lane(say("consumers"), [(at, n, kinds[x], "") for at, n, x in runs(consumers)], scale, left=92, height=17)
        c.gap(2)
    c.legend([("c", say("exp2 and dS")), ("e", say("add dQ: atomics, or one TMA reduce"))])
    caption(
        c,
        "The lesson's own plan at D = 128; a character of it is {cycles} cycles, each matmul is of both "
        "consumers.",
        cycles=cycles,
    )  # fmt: skip


def runs(line: str) -> list[tuple[int, int, str]]:
    """(start, length, letter) of each run of one letter: "SS.D" has two."""
    return [(m.start(), len(m[0]), m[1]) for m in re.finditer(r"([a-z])\1*", line)]


@picture(
    "Split-KV decoding: parts of the keys, then a merge",
    "The keys of one K head, cut into parts. A program for each part computes a partial output and its log-sum-exp. A "
    "merge weighs them into one output.",
)
def split_kv(c: Canvas, lesson: str) -> None:
    if "shares" in lesson:  # so many bytes of K, with D = 128 in 16 bits
        step = number(f"{DAY4}/flash_decoding_shares/shares.py", "TILE_BYTES") // (128 * 2)
    else:
        step = number(f"{DAY4}/lesson10_flash_decoding.py", "KEYS")
    parts, top = 4, c.y + 26
    cell = INSIDE / parts
    c.box(MARGIN, c.y, INSIDE - 4, 18, "off", say("one query of each head that shares this K head"), 10)
    for p in range(parts):
        x = MARGIN + p * cell
        c.arrow(x + cell / 2, top - 8, x + cell / 2, top + 6)
        c.box(x, top + 6, cell - 4, 22, "a", say("keys, part {p}", p=p), 10)
        c.arrow(x + cell / 2, top + 28, x + cell / 2, top + 44)
        c.box(x, top + 44, cell - 4, 22, "b", f"o{p}, lse{p}", 10)
        c.arrow(x + cell / 2, top + 66, MARGIN + INSIDE / 2 + (p - 1.5) * 30, top + 92)
    c.box(MARGIN + cell / 2, top + 92, INSIDE - cell, 24, "c", "o = sum exp(lse_p - lse) o_p", 10)
    c.y = top + 124
    caption(
        c,
        "lse is the log of the sum of exp(lse_p), so the merge is exact. A program steps through its "
        "part in blocks of {step} keys. All SMs read K and V at the same time, also for one sequence.",
        step=step,
    )  # fmt: skip


@picture(
    "Ring attention: keys and values travel, queries stay",
    "A table: a row for each step, a column for each rank. In each step every rank attends to one slice of keys and "
    "values, and sends it to the next rank.",
)
def ring_attention(c: Canvas, lesson: str) -> None:
    ranks = int(stated(f"{DAY4}/lesson12_ring_attention.py", r"every slice \(here p = (\d+)\)"))
    left, wide, top = 62, 60, c.y + 16
    for r in range(ranks):
        c.text(left + (r + 0.5) * (wide + 14) - 7, c.y + 7, say("rank {i}", i=r), 10, "middle")
    for step in range(ranks):
        y = top + step * 30
        c.text(MARGIN, y + 11, say("step {i}", i=step), 10)
        for r in range(ranks):
            x = left + r * (wide + 14)
            c.box(x, y, wide, 22, "abcd"[(r - step) % ranks % 4], f"Q{r} KV{(r - step) % ranks}", 10)
            if step < ranks - 1 and r < ranks - 1:
                c.arrow(x + wide + 1, y + 20, x + wide + 13, y + 31)
    c.y = top + ranks * 30 + 4
    caption(
        c,
        "A colour is a slice of K and V. In step t rank r has the slice of rank r - t, and sends it on "
        "while it computes; the last rank sends to rank 0. Partial results (o, lse) merge exactly.",
    )  # fmt: skip


@picture(
    "A causal mask in the ring: contiguous and zigzag slices",
    "Two tables of work: for each rank and each slice of keys, how much of it the rank's queries see. Contiguous "
    "slices leave the first rank idle; zigzag slices give all ranks the same.",
)
def zigzag(c: Canvas, lesson: str) -> None:
    ranks, cell, top = 4, 30.0, c.y + 20
    chunks = 2 * ranks
    plans = {
        "contiguous": [[2 * r, 2 * r + 1] for r in range(ranks)],
        "zigzag": [[r, chunks - 1 - r] for r in range(ranks)],
    }
    for i, (name, slices) in enumerate(plans.items()):
        x = MARGIN + 30 + i * 176
        c.text(x, c.y + 9, say("contiguous") if name == "contiguous" else say("zigzag"), 10)
        seen = [
            [sum(1.0 if k < q else 0.5 if k == q else 0.0 for q in mine for k in theirs) for theirs in slices]
            for mine in slices
        ]

        kinds = [["none" if work == 0 else "c" if work == 4 else "b" for work in line] for line in seen]
        c.grid(x, top, (cell, cell), kinds, [[f"{work / 4:g}" for work in line] for line in seen], 10)
        for r in range(ranks):
            c.text(x - 5, top + (r + 0.5) * cell, str(r), 9, "end", "faint")
        slowest = sum(max(seen[r][(r - t) % ranks] for r in range(ranks)) for t in range(ranks)) / 4
        c.text(x, top + ranks * cell + 11, say("a pass takes {n:g} slices", n=slowest), 9)
    c.y = top + ranks * cell + 24
    caption(
        c,
        "Row: rank of the queries; column: rank of the keys; 1 is a whole slice of work. In each step "
        "all ranks wait for the slowest.",
    )  # fmt: skip
