"""A CPU model of persistent.py: its loops and mbarriers run without a GPU, in any order of its warps.

Between the mbarriers the arithmetic is PyTorch. The model is small (32 x 48 x 16, 3 stages, 4 CTAs), so the ring wraps
often. Partitions are generators that yield (barrier, parity) where the kernel waits. Any of them that need not wait may
run next, and a copy may arrive at any time; until then its stage holds NaN. The order is random, and the same each
time.
"""

import math

from lessonkit.judge.simulate import Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F

from day3_matmul_tk.matmul_hopper.persistent import tile_at
from problems.matmul import empty_product


def cpu_model(a, b):
    """As persistent, for any shape and dtype: its loops and barriers, one wait at a time."""
    c = empty_product(a, b)
    (M, N), K = c.shape, a.shape[1]
    if not c.numel() or not K:
        return c.zero_()
    x = F.pad(a.cpu().float(), (0, -K % 16, 0, -M % 32))  # with zeros, as TMA does
    w = F.pad(b.cpu().float(), (0, -N % 48, 0, -K % 16))
    out = torch.empty(x.shape[0], w.shape[1])
    for program in range(4):
        _cta(program, x, w, out)
    return c.copy_(out[:M, :N])


def _cta(program, x, w, out):
    tiles_m, tiles_n, steps = x.shape[0] // 32, w.shape[1] // 48, w.shape[0] // 16
    tiles = [tile_at.fn(tile, tiles_m, tiles_n, 2) for tile in range(program, tiles_m * tiles_n, 4)]
    a_smem, b_smem = torch.full((3, 32, 16), math.nan), torch.full((3, 16, 48), math.nan)
    full, empty = [Barrier(1) for _ in range(3)], [Barrier(2) for _ in range(3)]
    copies = []  # that have not arrived

    def producer():
        count = 0
        for tile_m, tile_n in tiles:
            for step in range(steps):
                stage, parity = _ring_slot(count)
                yield empty[stage], parity ^ 1
                a, b = x[32 * tile_m :, 16 * step :][:32, :16], w[16 * step :, 48 * tile_n :][:16, :48]
                ask_for(copies, full[stage], (a_smem[stage], a), (b_smem[stage], b))
                count += 1

    def consumer(which):
        half, count = slice(16 * which, 16 * which + 16), 0
        for tile_m, tile_n in tiles:
            acc, previous = torch.zeros(16, 48), 0
            for step in range(steps):
                stage, parity = _ring_slot(count)
                yield full[stage], parity
                if step > 0:  # only now is the MMA of the step before complete
                    acc += a_smem[previous, half] @ b_smem[previous]
                    empty[previous].arrive()
                previous, count = stage, count + 1
            acc += a_smem[previous, half] @ b_smem[previous]
            empty[previous].arrive()
            out[32 * tile_m :, 48 * tile_n :][half, :48] = acc

    in_any_order([consumer(0), consumer(1), producer()], copies)


def _ring_slot(step):
    return step % 3, step // 3 & 1
