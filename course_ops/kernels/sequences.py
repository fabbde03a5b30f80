"""Sequences of different lengths, one after another in tensors [1, H, total, D]: which sequence a tile belongs to.

cu_seqlens [B + 1] int32: sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, so the first entry is 0 and the
last one is total. Kernels read lengths on the device, so that a launch does not wait for the GPU.

    numbered tiles    Tiles of sequence b have the numbers from cu_seqlens[b] // ROWS + b on. At most one number per
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

from course_ops.hopper import DTYPES, tensor_descriptor
from course_ops.kernels.attention_tiles import tile_of_program


class Sequences(NamedTuple):
    """Where sequences of queries and of keys begin, [B + 1] int32 each, and the longest lengths."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int

    @property
    def count(self) -> int:
        return self.q.shape[0] - 1

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
    """A numbered tile's sequence, that sequence's first row and length, and the tile's first row inside it. If that
    row is not in the sequence, the number has no tile."""
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
def find_tile(
    own_ptr, other_ptr, B, H, S, S_other, HEADS_AT_ONCE,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """A program's tile of ROWS queries, or OF_KEYS of ROWS keys: its batch, head and first row. Then the first row and
    the length of its sequence, and both of the other tensor's.

    own_ptr: the cu_seqlens of the tensor that tiles are of, which has S rows; other_ptr: those of the other one. None:
    rows are not packed, and each batch is a sequence from row 0 on. CAUSAL: the tiles with most work come first: the
    last queries, or the first keys. Of packed rows the batch is 0, and a row that is not below the length is no tile's.
    """
    if own_ptr is None:
        b, h, row = tile_of_program(B, H, S, HEADS_AT_ONCE, ROWS, CAUSAL)
        if CAUSAL and OF_KEYS:
            row = (tl.cdiv(S, ROWS) - 1) * ROWS - row
        return b, h, row, 0, S, 0, S_other
    else:
        tiles = S // ROWS + B
        h, number = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        if CAUSAL and not OF_KEYS:
            number = tiles - 1 - number
        b, begin, length, row = sequence_of_tile(own_ptr, B, number, ROWS)
        other = tl.load(other_ptr + b)
        return 0, h, row, begin, length, other, tl.load(other_ptr + b + 1) - other


@triton.jit
def skip_rows(ptr, strides, rows):
    """Where a row of [B, H, S, D] lies."""
    return ptr + rows.to(tl.int64) * strides[2]


# ---- Records: what a persistent kernel reads of a tile's sequence ---------------------------------------------------

WORDS = tl.constexpr(8)  # of a record


@triton.jit
def records_kernel(records_ptr, own_ptr, other_ptr, B, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """A program writes the records of a sequence's tiles. In front stands how many tiles there are. Behind the last one
    stands a sequence without rows, for programs of a grid that have no tile: at most B numbers have none."""
    CHUNK: tl.constexpr = 256
    b = tl.program_id(0)
    end, other_end = tl.load(own_ptr + b + 1), tl.load(other_ptr + b + 1)
    length, other = end - tl.load(own_ptr + b), other_end - tl.load(other_ptr + b)
    first, total = 0, 0
    for start in range(0, B, CHUNK):
        at = start + tl.arange(0, CHUNK)
        rows = tl.load(own_ptr + at + 1, mask=at < B, other=0) - tl.load(own_ptr + at, mask=at < B, other=0)
        others = tl.load(other_ptr + at + 1, mask=at < B, other=0) - tl.load(other_ptr + at, mask=at < B, other=0)
        tiles = (rows + ROWS - 1) // ROWS
        first += tl.sum(tl.where((others > other) | ((others == other) & (at < b)), tiles, 0))
        total += tl.sum(tiles)
    if b == 0:
        tl.store(records_ptr, total)
        word = tl.arange(0, WORDS)
        tl.store(records_ptr + (1 + total) * WORDS + word, tl.where(word == 4, total, tl.where(word == 5, B, 0)))
    tiles = (length + ROWS - 1) // ROWS
    for start in range(0, tiles, CHUNK):
        at = start + tl.arange(0, CHUNK)
        to, inside = records_ptr + (1 + first + at) * WORDS, at < tiles
        tl.store(to, end, mask=inside)
        tl.store(to + 1, length, mask=inside)
        tl.store(to + 2, other_end, mask=inside)
        tl.store(to + 3, other, mask=inside)
        tl.store(to + 4, first, mask=inside)
        tl.store(to + 5, tiles, mask=inside)
        tl.store(to + 6, b, mask=inside)


def records(own: Tensor, other: Tensor, total: int, rows: int) -> tuple[Tensor, int]:
    """The records of tiles of so many rows, and how many tiles there may be at most.

    own: the cu_seqlens of the rows that tiles are of; the longest sequence is the one with the largest length in other.
    """
    sequences = own.shape[0] - 1
    most = total // rows + sequences
    listed = empty((most + 2) * WORDS.value, dtype=int32, device=own.device)
    records_kernel[(sequences,)](listed, own, other, sequences, rows, WORDS.value)
    return listed, most


@gluon.jit
def unit_of_work(records_ptr, index, tiles, heads):
    """The index-th unit of work, a tile of a head: (index,) if records_ptr is None, since rows are not packed.

    Otherwise the index, and of the unit's sequence the end and length of own rows, both of the other rows, the first
    unit, the tiles, the number."""
    if records_ptr is None:
        return (index,)
    else:
        # An index that is no unit has the record behind the last one.
        at = records_ptr + (1 + min(index // heads, tiles)) * 8
        first = gl.load(at + 4) * heads
        return (
            index,
            gl.load(at),
            gl.load(at + 1),
            gl.load(at + 2),
            gl.load(at + 3),
            first,
            gl.load(at + 5),
            gl.load(at + 6),
        )


# ---- Ragged tensors: TMA that ends where a sequence ends -----------------------------------------------------------
#
# A descriptor of a fixed number of rows, LIMIT, and two dimensions more. Row r of a sequence with n rows that ends at
# `end` is row LIMIT - n + r of the descriptor, so that the sequence's last row is the descriptor's last. The other two
# coordinates are LIMIT and `end`. They move the address back to where row r lies, as addresses have 64 bits and wrap
# around. For rows s elements apart: LIMIT * (2^34 - s) + end * s + (LIMIT - n + r) * s = 2^64 + (end - n + r) * s.
# The descriptor's base stays the tensor's own, and the other dimensions end where their largest coordinate is: TMA
# reads near the base for elements that it replaces by zeros. After triton.tools.ragged_tma.

LIMIT = gl.constexpr(2**30)


def ragged_descriptor(t: Tensor, rows: int, columns: int, heads: int = 1) -> TensorDescriptor:
    """For blocks of so many rows of sequences of t [1, H, total, D], of so many heads, see coordinates."""
    (_, H, total, D), (_, head, row, column) = t.shape, t.stride()
    block, limit = [1, 1, heads, rows, columns], LIMIT.value
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[t.dtype])
    strides = [2**64 // limit - row, row, head, row, column]
    return TensorDescriptor(t, [limit + 1, total + 1, H, limit, D], strides, block, layout)


def whole_descriptor(t: Tensor, rows: int, columns: int, heads: int = 1) -> TensorDescriptor:
    """For blocks of so many rows of t [B, H, S, D], of so many heads, see coordinates."""
    return tensor_descriptor(t, [1, heads, rows, columns])


@gluon.jit
def place_of(batch, end, length):
    """Where a tensor's rows lie: (batch,) in [B, H, S, D], where end is None, or (end, length) in a ragged tensor."""
    return (batch,) if end is None else (end, length)


@gluon.jit
def coordinates(where, head, row, column):
    """Of a block for TMA. where: as place_of gives it."""
    if len(where) == 1:
        return (where[0], head, row, column)
    else:
        return (LIMIT, where[0], head, LIMIT - where[1] + row, column)
