"""What pictures and moving figures show, computed: sectors, banks, tile order, occupancy, rings, timelines.

Each function here has a twin in moving/*.js, which computes the same figures in the page; a test compares them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lessonkit.base.chips import Chip

SECTOR, LANES, BANKS, WORD = 32, 32, 32, 4  # bytes, threads of a warp, banks of shared memory, bytes of a bank's word


def block_mask(n: int, block: int) -> dict[str, Any]:
    """Programs for n elements, and the elements of each block that the mask lets through."""
    programs = -(-n // block)
    return {
        "programs": programs,
        "kept": [min(block, n - p * block) for p in range(programs)],
        "masked": programs * block - n,
    }


def sectors(stride: int, offset: int, size: int) -> dict[str, Any]:
    """The sectors that a warp's load touches: lane i reads `size` bytes at element offset + i * stride."""
    touched = set[int]()
    for lane in range(LANES):
        first = (offset + lane * stride) * size
        touched |= set(range(first // SECTOR, (first + size - 1) // SECTOR + 1))
    used = LANES * size if stride else size
    return {"sectors": sorted(touched), "count": len(touched), "percent": 100 * used / (len(touched) * SECTOR)}


def banks(tile: int, pad: int, swizzle: bool, column: int) -> dict[str, Any]:
    """A warp reads one column of a tile of words in shared memory, a row a lane: its banks, and the wavefronts."""
    words = [lane * (tile + pad) + (column ^ lane if swizzle else column) for lane in range(LANES)]
    hit = [word % BANKS for word in words]
    return {"banks": hit, "wavefronts": max(Counter(hit).values())}


def online_softmax(values: Sequence[float], block: int) -> list[dict[str, float]]:
    """The running maximum m and sum s after each block, and alpha, by which the block rescales the sum before it."""
    m, s, steps = -math.inf, 0.0, []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        larger = max(m, *part)
        alpha = 0.0 if m == -math.inf else math.exp(m - larger)
        s = s * alpha + sum(math.exp(x - larger) for x in part)
        m = larger
        steps.append({"m": m, "alpha": alpha, "s": s})
    return steps


def tile_at(index: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """The tile (row, column) that comes index-th in the grouped order; group = 1 is row by row."""
    first = index // (group * tiles_n) * group
    height = min(tiles_m - first, group)
    within = index % (group * tiles_n)
    return first + within % height, within // height


def tile_order(tiles_m: int, tiles_n: int, group: int, sms: int) -> dict[str, Any]:
    """Waves of one tile an SM: the strips of A and of B that the first wave reads, and that all waves read.

    A strip is a row of tiles of A or a column of tiles of B, along all of K. Within a wave L2 has it after the first
    read, so the other reads are hits; the next wave reads it from HBM again.
    """
    tiles = [tile_at(i, tiles_m, tiles_n, group) for i in range(tiles_m * tiles_n)]
    waves = [tiles[i : i + sms] for i in range(0, len(tiles), sms)]
    strips = [len({row for row, _ in wave}) + len({column for _, column in wave}) for wave in waves]
    return {
        "order": [list(tile) for tile in tiles],
        "first": strips[0],
        "strips": sum(strips),
        "hits": 100 * (1 - sum(strips) / (2 * len(tiles))),
    }


def occupancy(chip: Chip, warps: int, registers: int, shared: int) -> dict[str, Any]:
    """Programs on an SM, the share of its warps, and what each limit allows; 0 if one asks too much memory.

    registers: of a thread; shared: bytes of a program.
    """
    of_a_warp = -(-registers // 8) * 8 * chip.warp_size
    limits = {
        "registers": chip.registers // of_a_warp // warps,
        "shared": chip.shared // (shared + chip.reserved) if shared + chip.reserved else chip.blocks,
        "warps": chip.warps // warps,
        "programs": chip.blocks,
    }
    resident = chip.resident(warps, registers, shared) if shared <= chip.shared_block else 0
    return {"resident": resident, "percent": 100 * resident * warps / chip.warps, "limits": limits}


def ring(stages: int, load: int, multiply: int, steps: int) -> list[dict[str, int]]:
    """A producer and a consumer over a ring of stages: each step's stage, parity, and the times of load and use.

    The producer starts one load after the other, `load` apart; a load waits until its stage is empty. Copies share the
    way to memory, so one takes `load`. The consumer waits for `full`, multiplies, and releases the stage.
    """
    done = list[dict[str, int]]()
    for step in range(steps):
        ready = done[-1]["full"] if done else 0
        empty = done[step - stages]["released"] if step >= stages else 0
        begin = max(ready, empty)
        full = begin + load
        start = max(full, done[-1]["released"] if done else 0)
        done.append({
            "stage": step % stages, "parity": step // stages & 1, "load": begin, "full": full, "use": start,
            "released": start + multiply,
        })  # fmt: skip
    return done


ORDERS = ("serial", "overlap", "ping-pong")


def attention(order: str, matmul: int, exps: int, others: int, load: int, stages: int, blocks: int) -> dict[str, Any]:
    """Two consumers on one SM: spans of the tensor cores, of each softmax and of the loads, in cycles.

    matmul: of QK or PV of one consumer; exps: its exponentials; others: its softmax's other instructions;
    load: of K or V of a block. Loads share the way to L2, matmuls the tensor cores, exponentials the MUFU; each serves
    requests in the order in which they come. What `order` may be: QK, softmax and PV of a block one after the other
    ("serial"), QK of the next block before PV of this one ("overlap"), or the latter with a barrier that lets one
    consumer issue at a time.
    """
    spans: dict[str, list[dict[str, int]]] = {"loads": [], "tensor": [], "softmax0": [], "softmax1": []}
    l2 = tensor = mufu = turn = 0
    plan, place = _plan(order, blocks), [0, 0]
    ready = [0, 0]  # when a consumer's warps may issue again
    scores, weights = [[0] * blocks, [0] * blocks], [[0] * blocks, [0] * blocks]  # when S and P of a block are there
    arrived: dict[str, list[int]] = {"Q": [], "P": []}  # K, which QK reads, and V, which PV reads
    released: dict[str, list[list[int]]] = {"Q": [[], []], "P": [[], []]}
    while min(place) < len(plan):
        while len(arrived["P"]) < blocks:  # each load whose stage is known to be empty: K and V of a block in turn
            what = "Q" if len(arrived["Q"]) == len(arrived["P"]) else "P"
            block = len(arrived[what])
            if block >= stages and min(map(len, released[what])) <= block - stages:
                break
            begin = max(l2, *(each[block - stages] for each in released[what])) if block >= stages else l2
            l2 = begin + load
            arrived[what].append(l2)
            spans["loads"].append({"start": begin, "length": load, "what": "QP".index(what), "block": block})
        candidates = []
        for c in (0, 1):
            what, block = plan[place[c]] if place[c] < len(plan) else ("", 0)
            if what == "S":
                candidates.append((max(scores[c][block], ready[c]), c))
            elif what and block < len(arrived[what]) and (order != "ping-pong" or turn == c):
                data = weights[c][block] if what == "P" else 0
                candidates.append((max(ready[c], arrived[what][block], data, tensor), c))
        start, c = min(candidates)
        what, block = plan[place[c]]
        place[c] += 1
        if what == "S":
            mufu = max(start, mufu) + exps
            weights[c][block] = ready[c] = mufu + others
            spans[f"softmax{c}"].append({"start": start, "length": ready[c] - start, "what": 0, "block": block})
            continue
        tensor = start + matmul
        released[what][c].append(tensor)
        if what == "Q":
            scores[c][block] = tensor
        if order == "serial":
            ready[c] = tensor
        if what == "P" or block == 0:
            turn = 1 - c
        span = {"start": start, "length": matmul, "what": "QP".index(what), "consumer": c, "block": block}
        spans["tensor"].append(span)
    mine = [s["start"] for s in spans["tensor"] if s["consumer"] == 0 and s["what"] == 1]
    cycles = (mine[-2] - mine[blocks // 2]) / (blocks - 2 - blocks // 2)
    total = max(s["start"] + s["length"] for s in spans["tensor"])
    return {"spans": spans, "total": total, "cycles": cycles, "percent": 100 * 4 * matmul / cycles}


def _plan(order: str, blocks: int) -> list[tuple[str, int]]:
    """What a consumer does: Q = QK of a block, S = its softmax, P = its PV."""
    if order == "serial":
        return [(what, block) for block in range(blocks) for what in "QSP"]
    plan = [("Q", 0), ("S", 0)]
    for block in range(1, blocks):
        plan += [("Q", block), ("P", block - 1), ("S", block)]
    return [*plan, ("P", blocks - 1)]


def schedules(tiles: int, heads: int, sms: int) -> dict[str, list[int]]:
    """The work of each SM, in blocks of keys, for causal tiles of 1 to `tiles` blocks in three ways of dealing them."""
    in_order = [tile + 1 for _ in range(heads) for tile in range(tiles)]
    longest = sorted(in_order, reverse=True)
    dynamic = [0] * sms
    for work in longest:
        dynamic[dynamic.index(min(dynamic))] += work
    return {
        "in order": [sum(in_order[sm::sms]) for sm in range(sms)],
        "longest first": [sum(longest[sm::sms]) for sm in range(sms)],
        "dynamic": dynamic,
    }


def causal(queries: int, keys: int, rows: int, columns: int) -> list[list[str]]:
    """Each block of a causal score matrix: whole, masked (the diagonal crosses it), or skipped."""
    found = []
    for top in range(0, queries, rows):
        line = []
        for left in range(0, keys, columns):
            first = min(top, queries - 1) + keys - queries  # the last key that the block's first query sees
            last = min(top + rows, queries) - 1 + keys - queries
            right = min(left + columns, keys) - 1
            line.append("skipped" if left > last else "whole" if right <= first else "masked")
        found.append(line)
    return found


def roofline(chip: Chip, rate: str, intensity: float) -> dict[str, Any]:
    """The most FLOP/s at so many FLOPs per byte, and which roof it is."""
    seconds, bound = chip.seconds(1.0, intensity, rate)
    return {"flops": intensity / seconds, "bound": bound, "ridge": chip.flops.get(rate, chip.flops["fp32"])
            / chip.bandwidth}  # fmt: skip
