"""What the Hopper attention files of this folder share beside hopper.py: constants, heads that fit into L2, a tile."""

import math

from lessonkit import device

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def at_once(bytes_a_head):
    """How many heads to work on at a time, so that what their programs share, bytes_a_head each, fills half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a product."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)
