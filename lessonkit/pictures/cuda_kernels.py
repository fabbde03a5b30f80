"""Pictures of CUDA C++: coordinates, shared tiles, shuffles, streams, banks, networks, clusters, several GPUs."""

from lessonkit.pictures import figures, models
from lessonkit.pictures.draw import MARGIN, WIDTH, Canvas, Span, say
from lessonkit.pictures.numbers import number, stated
from lessonkit.pictures.registry import caption, picture

INSIDE = WIDTH - 2 * MARGIN


@picture(
    "Coordinates: grid, block, warp, thread",
    "A grid of blocks. One block is shown as warps, one warp as 32 threads. The index of a thread's element is "
    "blockIdx.x * blockDim.x + threadIdx.x.",
)
def coordinates(c: Canvas, lesson: str) -> None:
    if "hello" in lesson:
        path = "cuda_src/01_hello_cuda.cu"
        blocks, threads = (int(stated(path, p)) for p in (r"hello_kernel<<<(\d+)", r"hello_kernel<<<\d+, (\d+)"))
    else:
        blocks, threads = 4, number("cuda_src/02_vector_add.cu", "THREADS")
    warps, top = threads // models.LANES, c.y
    shown = warps // 3  # of the warps this one is opened
    wide = INSIDE / blocks
    for b in range(blocks):
        c.box(MARGIN + b * wide, top, wide - 4, 24, "a" if b == 1 else "off", say("block {i}", i=b), 10)
    c.line(MARGIN + wide, top + 24, MARGIN, top + 44, dashed=True)
    c.line(MARGIN + 2 * wide - 4, top + 24, MARGIN + INSIDE, top + 44, dashed=True)
    small = INSIDE / warps
    for w in range(warps):
        c.box(MARGIN + w * small, top + 44, small - 2, 24, "b" if w == shown else "off", say("warp {i}", i=w), 9)
    c.line(MARGIN + shown * small, top + 68, MARGIN, top + 88, dashed=True)
    c.line(MARGIN + (shown + 1) * small - 2, top + 68, MARGIN + INSIDE, top + 88, dashed=True)
    cell = INSIDE / models.LANES
    for t in range(models.LANES):
        c.box(MARGIN + t * cell, top + 88, cell - 1, 20, "c" if t == 5 else "off")
    c.y = top + 114
    thread = shown * models.LANES + 5
    caption(
        c,
        "Blocks of {threads} threads are {warps} warps. The green one is thread {thread} of block 1: "
        "element 1 * {threads} + {thread} = {element}.",
        threads=threads, warps=warps, thread=thread, element=threads + thread,
    )  # fmt: skip


@picture(
    "A warp's sum by shuffles: five steps, no shared memory",
    "A tree over the lanes of a warp. In each step a lane adds the value of the lane 16, 8, 4, 2, then 1 further on. "
    "After five steps lane 0 has the sum.",
)
def shuffle_tree(c: Canvas, lesson: str) -> None:
    lanes = models.LANES
    cell, top, left = (WIDTH - MARGIN - 40) / lanes, c.y, 40
    step, live = 0, lanes
    while live:
        y = top + step * 30
        for lane in range(lanes):
            c.box(left + lane * cell, y, cell - 1, 13, "c" if lane < live else "off")
        half = live // 2
        if half:
            c.text(MARGIN, y + 21, f"+{half}", 10)
            for lane in range(half) if half <= 8 else range(0, half, 4):
                c.arrow(left + (lane + half + 0.5) * cell, y + 14, left + (lane + 0.5) * cell + 1, y + 29)
        step, live = step + 1, half
    c.y = top + step * 30 - 8
    warps = number(f"{lesson.replace('.', '/')}.cu", "THREADS") // lanes
    caption(
        c,
        "Green lanes still count; of the first step every fourth arrow is drawn. A block has {warps} "
        "warps: their sums go through shared memory once, and one warp adds them in the same way.",
        warps=warps,
    )  # fmt: skip


@picture(
    "A scan inside a block: Hillis and Steele's steps",
    "Eight elements in rows, a row for each step. In step s each element adds the one 2^(s - 1) to its left. After "
    "three steps each holds the sum of all elements up to itself.",
)
def block_scan(c: Canvas, lesson: str) -> None:
    block, n, left = number("cuda_src/08_scan.cu", "BLOCK"), 8, 52
    cell, values, distance = (WIDTH - MARGIN - left) / n, [3, 1, 4, 1, 5, 9, 2, 6], 1
    steps, row = block.bit_length() - 1, 0
    while True:
        y = c.y + row * 46
        c.text(MARGIN, y + 11, say("step {i}", i=row) if row else "x", 10)
        for i, value in enumerate(values):
            c.box(left + i * cell, y, cell - 4, 22, "c" if i < distance else "a", str(value))
        if distance >= n:
            break
        for i in range(distance, n):
            c.arrow(left + (i - distance + 0.5) * cell, y + 23, left + (i + 0.5) * cell - 4, y + 45)
        values = [v + (values[i - distance] if i >= distance else 0) for i, v in enumerate(values)]
        distance, row = 2 * distance, row + 1
    c.y += row * 46 + 26
    caption(
        c,
        "Green elements are done. A block of {block} elements takes {steps} steps with a barrier after "
        "each.",
        block=block, steps=steps,
    )  # fmt: skip


@picture(
    "Streams: copy in, compute and copy out at the same time",
    "Two timelines. On one stream the copy in, the kernel and the copy out follow each other. In chunks on several "
    "streams the three engines work at the same time.",
)
def streams(c: Canvas, lesson: str) -> None:
    shown = 6
    names = (say("copy in"), say("compute"), say("copy out"))
    whole = 90.0
    c.text(MARGIN, c.y + 7, say("one stream"), 10, kind="bold")
    c.y += 14
    for i, name in enumerate(names):
        c.lane(name, [(i * whole, whole, "abc"[i], "")], 0.95, left=86, height=16)
    c.text(MARGIN, c.y + 9, say("{n} chunks", n=shown), 10, kind="bold")
    c.y += 17
    each = whole / shown
    for i, name in enumerate(names):
        spans: list[Span] = [((i + k) * each, each, "abc"[i], str(k)) for k in range(shown)]
        c.lane(name, spans, 0.95, left=86, height=16)
    usual = int(stated("cuda_src/05_stream_overlap.cu", r"at (\d+) chunks"))
    caption(
        c,
        "All three take equally long here. In c chunks the whole takes (c + 2) / c of the time of one: {shown:.4g} for "
        "{n} chunks, {usual:.4g} for the lesson's {c}. One after the other they take 3.",
        shown=(shown + 2) / shown, n=shown, usual=(usual + 2) / usual, c=usual,
    )  # fmt: skip


@picture(
    "Banks of shared memory: a column of a tile, plain, padded, swizzled",
    "Three tiles of words in shared memory, 32 banks across. The words of one column are coloured. Plain, they all lie "
    "in one bank; with one word of padding, or a swizzle, each lies in a bank of its own.",
    figures.BANKS,
)
def banks(c: Canvas, lesson: str) -> None:
    tile = number("cuda_src/13_transpose.cu", "TILE")
    gap, top, column = 10, c.y + 18, 5
    wide = (INSIDE - 2 * gap) / 3
    cell = wide / models.BANKS
    for i, (name, pad, swizzle) in enumerate([
        (say("plain"), 0, False), (say("one word of padding"), 1, False), (say("swizzle"), 0, True),
    ]):  # fmt: skip
        x = MARGIN + i * (wide + gap)
        found = models.banks(tile, pad, swizzle, column)
        c.text(x, c.y + 8, name, 9)
        c.box(x, top, wide, tile * 4, "none")
        for lane, bank in enumerate(found["banks"]):
            c.box(x + bank * cell, top + lane * 4, cell, 4, "e")
        c.text(x, top + tile * 4 + 10, say("wavefronts: {n}", n=found["wavefronts"]), 10)
    c.y = top + tile * 4 + 22
    caption(
        c,
        "A warp reads column {column} of a tile of {tile} x {tile} words, a row a lane. Banks 0 to "
        "{last} across, lanes downwards.",
        column=column, tile=tile, last=models.BANKS - 1,
    )  # fmt: skip


@picture(
    "A bitonic network: which keys a step compares",
    "Eight keys as lines from left to right. Each vertical bar compares two keys and leaves the smaller one above. "
    "Merging runs of one, two and four keys takes six steps.",
)
def bitonic(c: Canvas, lesson: str) -> None:
    n, gap, left, top = 8, 18, 40, c.y + 18
    steps: list[tuple[int, bool]] = []
    half = 1
    while half < n:
        steps.append((half, True))
        distance = half // 2
        while distance:
            steps.append((distance, False))
            distance //= 2
        half *= 2
    pairs = [[(a, a ^ (2 * d - 1 if mirror else d)) for a in range(n) if a < (a ^ (2 * d - 1 if mirror else d))]
             for d, mirror in steps]  # fmt: skip
    wide = (WIDTH - MARGIN - left) / sum(len(p) + 1 for p in pairs)
    for key in range(n):
        c.text(MARGIN, top + key * gap, say("key {i}", i=key), 9)
        c.line(left, top + key * gap, WIDTH - MARGIN, top + key * gap)
    x = left + wide
    for (distance, mirror), compared in zip(steps, pairs, strict=True):
        kind = "b" if mirror else "a"
        c.text(x + (len(compared) - 1) * wide / 2, top - 13, str(distance), 9, "middle", "faint")
        for a, b in compared:
            c.box(x - 2, top + a * gap, 4, (b - a) * gap, kind)
            x += wide
        x += wide
    c.y = top + n * gap
    c.legend([("b", say("with the mirror image")), ("a", say("at a fixed distance"))])
    tile = number("cuda_src/11_sort.cu", "TILE")
    caption(
        c,
        "log2(n) (log2(n) + 1) / 2 steps: {steps} for {n} keys. Steps within {tile} keys take place in "
        "shared memory.",
        steps=len(steps), n=n, tile=tile,
    )  # fmt: skip


@picture(
    "A thread's tile of C in registers",
    "A block's tile of C. One thread owns a square of elements. For each step along K it reads a column of A and "
    "a row of B from shared memory, and multiplies each with each.",
)
def register_tile(c: Canvas, lesson: str) -> None:
    path = "cuda_src/06_matrix_multiply_registers.cu"
    bm, bn, bk, tm, tn = (number(path, name) for name in ("BM", "BN", "BK", "TM", "TN"))
    cell, top, left = 15.0, c.y + 20, MARGIN + 120
    for q in range(tn):
        c.box(left + q * cell, top - 16, cell - 1, cell - 1, "b")
    for r in range(tm):
        c.box(left - 18, top + r * cell, cell - 1, cell - 1, "a")
    c.grid(left, top, (cell, cell), [["c"] * tn] * tm)
    c.y = top + tm * cell + 6
    c.legend([
        ("a", say("{n} elements of A", n=tm)), ("b", say("{n} elements of B", n=tn)),
        ("c", say("{n} sums in registers", n=tm * tn)),
    ])  # fmt: skip
    caption(
        c,
        "A block owns {bm} x {bn} of C and steps {bk} along K. A thread reads {loads} values for {fma} "
        "multiply-adds; with one element of C it would read 2 for 1.",
        bm=bm, bn=bn, bk=bk, loads=tm + tn, fma=tm * tn,
    )  # fmt: skip


@picture(
    "All-reduce on a ring: reduce-scatter, then all-gather",
    "A table: a row for each rank, a column for each chunk. In each step a rank sends one chunk to the next rank, "
    "which adds its own. The cells say in which step.",
)
def ring_all_reduce(c: Canvas, lesson: str) -> None:
    ranks, cell, top = 4, 34.0, c.y + 34
    for half, name in enumerate((say("reduce-scatter: adds"), say("all-gather: copies"))):
        x = MARGIN + 26 + half * 174
        c.text(x - 20, c.y + 8, name, 10)
        for k in range(ranks):
            c.text(x + (k + 0.5) * cell, top - 8, say("chunk {i}", i=k), 8, "middle", "faint")

        # In step t rank r sends chunk r - t (reduce-scatter), then chunk r + 1 - t (all-gather), to rank r + 1.
        steps = [[(r + half - k) % ranks for k in range(ranks)] for r in range(ranks)]
        kinds = [["a" if t < ranks - 1 else "c" for t in line] for line in steps]
        c.grid(x, top, (cell, 22), kinds, [[str(t) if t < ranks - 1 else "" for t in line] for line in steps], 10)
        for r in range(ranks):
            c.text(x - 5, top + r * 22 + 11, str(r), 9, "end", "faint")
    c.y = top + ranks * 22 + 8
    caption(
        c,
        "Rows: ranks. A number t: in step t the rank sends this chunk to the next rank. Green: the "
        "rank's own result, then what it received last. 2 (k - 1) / k of the data leave each of k GPUs; "
        "here {share:g}.",
        share=2 * (ranks - 1) / ranks,
    )  # fmt: skip


@picture(
    "A cluster shares loads: TMA multicast",
    "Two blocks of a cluster with tiles of C one below the other. They need the same columns of B. Each loads half of "
    "them and TMA writes that half into the shared memory of both.",
)
def multicast(c: Canvas, lesson: str) -> None:
    top = c.y
    c.box(MARGIN, top + 20, 90, 30, "a", say("half 0 of B"), 10)
    c.box(MARGIN, top + 80, 90, 30, "b", say("half 1 of B"), 10)
    for b in range(2):
        y = top + b * 70
        c.box(MARGIN + 176, y, 168, 60, "off")
        c.text(MARGIN + 184, y + 10, say("shared memory of block {i}", i=b), 9)
        c.box(MARGIN + 184, y + 22, 72, 26, "a", say("half 0 of B"), 9)
        c.box(MARGIN + 262, y + 22, 72, 26, "b", say("half 1 of B"), 9)
        c.arrow(MARGIN + 92, top + 32, MARGIN + 174, y + 22)
        c.arrow(MARGIN + 92, top + 98, MARGIN + 174, y + 42)
    c.y = top + 142
    caption(
        c,
        "Block 0 loads half 0, block 1 half 1, and each copy arrives at both. L2 is read once for two "
        "blocks. A stage is empty only when the consumers of both blocks have released it.",
    )  # fmt: skip


@picture(
    "Where a row stays between two passes: lanes, a block, a cluster",
    "Three rows of different lengths. A short row lies in the registers of a few lanes, a longer one in those of a "
    "block, a very long one in those of several blocks of a cluster, which exchange their sums.",
)
def row_on_chip(c: Canvas, lesson: str) -> None:
    parts = number(f"{lesson.replace('.', '/')}.cu", "MAX_PARTS")
    left, wide = 92.0, WIDTH - MARGIN - 92.0
    c.text(MARGIN, c.y + 11, say("a few lanes"), 10)
    for i in range(4):
        c.box(left + i * 22, c.y, 20, 22, "c", say("lane"), 8)
    c.text(left + 96, c.y + 11, say("shuffles; no barrier"), 10)
    c.y += 32
    c.text(MARGIN, c.y + 11, say("a block"), 10)
    for i in range(4):
        c.box(left + i * 44, c.y, 42, 22, "a", say("warp {i}", i=i), 10)
    c.text(left + 180, c.y + 11, say("shared memory"), 9)
    c.y += 32
    c.text(MARGIN, c.y + 11, say("a cluster"), 10)
    each = wide / parts
    for i in range(parts):
        c.box(left + i * each, c.y, each - 2, 22, "bd"[i % 2], str(i), 10)
    c.line(left + each / 2, c.y + 34, left + wide - each / 2, c.y + 34)
    for i in range(parts):
        c.arrow(left + (i + 0.5) * each, c.y + 34, left + (i + 0.5) * each, c.y + 24)
    c.y += 42
    caption(
        c,
        "A row is read once if its owner's registers hold it. Up to {parts} blocks of a cluster share a long row: each "
        "writes the statistics of its part into the shared memory of all others.",
        parts=parts,
    )  # fmt: skip
