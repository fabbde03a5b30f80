"""Sequences of different lengths, packed one behind the other into tensors [1, H, total, D]: whose rows a tile has.

cu_seqlens [B + 1] int32: sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, so the first entry is 0 and the
last one is total. Kernels read lengths on the device, so that a launch does not wait for the GPU.

    numbered tiles    Tiles of sequence b have the numbers from cu_seqlens[b] // ROWS + b on. At most one number of each
                      sequence has no tile. A program finds its sequence by counting those that begin before it.
    records           A list of tiles, the longest sequence first, that a small kernel writes: for persistent kernels.
    ragged tensors    A TMA descriptor that ends where the sequence at hand ends: rows behind it are read as zeros and
                      are not written, so that no mask is needed, and no NaN of a neighbour is read.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, empty, int32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from course_ops.hopper import DTYPES


class Sequences(NamedTuple):
    """Where sequences of queries and of keys begin, [B + 1] int32 each, and the longest lengths."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int

    @property
    def count(self) -> int:
        return len(self.q) - 1

    def contiguous(self) -> "Sequences":
        return self._replace(q=self.q.contiguous(), k=self.k.contiguous())


# ---- Numbered tiles ------------------------------------------------------------------------------------------------


def grid_tiles(
    B: int, total: int, rows: int, sequences: Sequences | None
) -> tuple[int, int, Tensor | None, Tensor | None]:
    """What a grid has for each head: sequences, (numbered) tiles, and the cu_seqlens of queries and keys or None."""
    if sequences is None:
        return B, B * triton.cdiv(total, rows), None, None
    return sequences.count, total // rows + sequences.count, sequences.q, sequences.k


@triton.jit
def sequence_of_tile(cu_ptr, B, number, ROWS: tl.constexpr):
    """Of a numbered tile: its sequence, that one's first row, its length, and the tile's first row within it. The
    number is of no tile if that row is not in the sequence."""
    CHUNK: tl.constexpr = 256
    begun = 0
    for start in range(0, B, CHUNK):
        at = start + tl.arange(0, CHUNK)
        first = tl.load(cu_ptr + at, mask=at < B, other=0) // ROWS + at
        begun += tl.sum(((at < B) & (first <= number)).to(tl.int32))
    b = tl.maximum(begun - 1, 0)
    begin = tl.load(cu_ptr + b)
    return b, begin, tl.load(cu_ptr + b + 1) - begin, (number - begin // ROWS - b) * ROWS


@triton.jit
def packed_tile(own_ptr, other_ptr, B, total, ROWS: tl.constexpr, REVERSED: tl.constexpr):
    """A program's head and first row, the first row and the length of its sequence, and both of the other tensor's.

    own_ptr: the cu_seqlens of the rows that tiles are of. REVERSED: a sequence's last tile comes first."""
    tiles = total // ROWS + B
    h, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if REVERSED:
        number = tiles - 1 - number
    b, begin, length, row = sequence_of_tile(own_ptr, B, number, ROWS)
    other = tl.load(other_ptr + b)
    return h, row, begin, length, other, tl.load(other_ptr + b + 1) - other


@triton.jit
def skip_rows(ptr, strides, rows):
    """Where a row of [B, H, S, D] lies."""
    return ptr + rows.to(tl.int64) * strides[2]
