"""Find the bank conflict: from addresses to wavefronts, and a layout that has none
================================================================================
Shared memory has 32 banks of 4-byte words: word w is in bank w % 32. An access of a warp takes one or more wavefronts.
In a wavefront each bank delivers one word, to every lane that needs it, and at most 128 bytes are delivered. So lanes
of 4 bytes or less are served together, of 8 bytes half a warp at a time, of 16 bytes a quarter.

Then mend three tiles. Pad the rows of one. Swizzle the other two, one of words and one of 16-byte pieces: a swizzle is
a permutation inside each row, and needs no memory. Predict: wavefronts of a column of a [32, 36] tile of words.
"""


def wavefronts(addresses, size):
    """addresses: of lanes 0 to 31 in bytes, None for a lane that is off; size: bytes per lane, 1, 2, 4, 8 or 16."""
    # TODO(1): group by group of lanes, the words that each bank is asked for.
    # stub: return 1
    lanes = 32 if size <= 4 else 128 // size
    passes = 0
    for first in range(0, 32, lanes):
        words = {
            word
            for address in addresses[first : first + lanes]
            if address is not None
            for word in range(address // 4, (address + size - 1) // 4 + 1)
        }
        banks = [word % 32 for word in words]
        passes += max((banks.count(bank) for bank in set(banks)), default=0)
    return passes
    # END(1)


def padding(columns):
    """The fewest words to add to each row of a [32, columns] tile of words, so that a warp reads a column at once."""
    # TODO(2): which distances between rows meet each bank once?
    # stub: return 0
    return 1 - columns % 2
    # END(2)


def swizzle(row, column):
    """[32, 32] words, no padding: the place of (row, column) inside its row, 0 to 31. Rows and columns: 1 wavefront."""
    # TODO(3): a permutation of each row, another one for each row.
    # stub: return column
    return column ^ row
    # END(3)


def swizzle_pieces(row, piece):
    """[64, 64] of bf16, as wgmma and ldmatrix want it: a row is 8 pieces of 16 bytes. The place of a piece, 0 to 7.

    Any 8 rows that follow each other, from a multiple of 8 on, have the same piece in 8 different groups of 4 banks.
    """
    # TODO(4): as before, in units of pieces.
    # stub: return piece
    return piece ^ row % 8
    # END(4)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, same
from lessonkit.lesson import discover

import torch

WORDS = {
    "a row": [4 * lane for lane in range(32)],
    "every second word": [8 * lane for lane in range(32)],
    "one word for all lanes: no conflict": [64] * 32,
    "a column of a [32, 32] tile": [128 * lane for lane in range(32)],
    "a column of a [32, 33] tile": [132 * lane for lane in range(32)],
    "a column of a [32, 36] tile": [144 * lane for lane in range(32)],
    "two words of one bank, 16 lanes each": [128 * (lane % 2) for lane in range(32)],
    "lane 5 alone": [None] * 5 + [20] + [None] * 26,
    "nobody": [None] * 32,
}


def _counted(addresses, size):
    """The emulator's rule (cuda_src/emulator/runtime/count.cpp), with a table of lanes and words."""
    lanes = min(32, 128 // size)
    total = 0
    for first in range(0, 32, lanes):
        wanted = {}
        for address in addresses[first : first + lanes]:
            if address is not None:
                for word in {(address + byte) // 4 for byte in range(size)}:
                    wanted.setdefault(word % 32, set()).add(word)
        total += max(map(len, wanted.values()), default=0)
    return total


def of_words():
    """4 bytes per lane: distinct words in one bank count, not lanes."""
    for what, addresses in WORDS.items():
        same(f"wavefronts of {what}", wavefronts(list(addresses), 4), _counted(addresses, 4))
    for _ in range(20):
        addresses = [4 * int(word) for word in torch.randint(0, 256, (32,))]
        same(f"wavefronts at {addresses}", wavefronts(list(addresses), 4), _counted(addresses, 4))
    for size in (1, 2):
        addresses = [size * lane for lane in range(32)]
        same(f"wavefronts of 32 neighbours of {size} bytes", wavefronts(list(addresses), size), 1)


def of_wide_accesses():
    """8 bytes per lane take at least 2 wavefronts, a half warp each; 16 bytes at least 4."""
    for size in (8, 16):
        for what, step in (("neighbours", size), ("rows of 128 bytes", 128), ("rows of 144 bytes", 144)):
            addresses = [step * lane for lane in range(32)]
            same(f"{size} bytes per lane, {what}", wavefronts(list(addresses), size), _counted(addresses, size))
        for _ in range(10):
            addresses = [size * int(at) for at in torch.randint(0, 128, (32,))]
            same(f"{size} bytes per lane at {addresses}", wavefronts(list(addresses), size), _counted(addresses, size))


def as_the_emulator_counted():
    """cuda_src/13_transpose's tiles, whose wavefronts its tests count: plain, padded, swizzled, and in float4."""
    lesson = dict(discover("cuda_src.13_transpose"))["cuda_src.13_transpose"]
    counts = {rung.__name__: metrics for rung, metrics in lesson.counts.items()}
    tiles = {
        "transpose_tile": ("wavefronts a shared load", lambda r, c: 32 * r + c, 4),
        "transpose_padded": ("wavefronts a shared access", lambda r, c: 33 * r + c, 4),
        "transpose_swizzled": ("wavefronts a shared access", lambda r, c: 32 * r + (c ^ r), 4),
    }
    for rung, (metric, at, size) in tiles.items():
        same(f"a column of {rung}", wavefronts([4 * at(r, 5) for r in range(32)], size), int(counts[rung][metric]))
    # A warp stores the same column's pieces of two squares' 16 rows: 16 bytes each, rows of 16 pieces.
    addresses = [16 * (16 * (4 * (lane % 16)) + ((lane // 16) ^ (lane % 16))) for lane in range(32)]
    wide = int(counts["transpose_vectorized"]["wavefronts a shared access"])
    same("a store of transpose_vectorized", wavefronts(addresses, 16), wide)


def padded():
    """A column is one wavefront, and no word more than needed is added."""
    for columns in (*range(1, 70), 128, 129):
        fine = [p for p in range(3) if _counted([4 * r * (columns + p) for r in range(32)], 4) == 1]
        same(f"padding of rows of {columns} words", padding(columns), fine[0])


def _permutes(place, rows, row_length):
    for r in range(rows):
        got = [place(r, c) for c in range(row_length)]
        assert sorted(got) == list(range(row_length)), f"row {r}: {got} is no order of 0 to {row_length - 1}"


def swizzled():
    """Each row keeps its words; every row and every column of the tile is one wavefront."""
    _permutes(swizzle, 32, 32)
    for i in range(32):
        for what, at in (("row", lambda j, i=i: (i, j)), ("column", lambda j, i=i: (j, i))):
            places = [at(j) for j in range(32)]
            addresses = [4 * (32 * r + swizzle(r, c)) for r, c in places]
            same(f"wavefronts of {what} {i}", _counted(addresses, 4), 1)


def swizzled_pieces():
    """8 rows of one piece are one wavefront of 128 bytes, in all 64 rows, and so is each row."""
    _permutes(swizzle_pieces, 64, 8)
    for first in range(0, 64, 8):
        for piece in range(8):
            addresses = [128 * r + 16 * swizzle_pieces(r, piece) for r in range(first, first + 8)]
            what = f"wavefronts of piece {piece} of rows {first} to {first + 7}"
            same(what, _counted(addresses + [None] * 24, 16), 1)


EXERCISE = Exercise(
    claims=(of_words, of_wide_accesses, as_the_emulator_counted, padded, swizzled, swizzled_pieces),
    hints=(
        "Lanes that want the same word share it: count distinct words, bank by bank, and take the fullest bank. For a "
        "layout ask which bank element (row, column) is in, and what 32 rows make of it.",
        "Groups of 32 lanes up to 4 bytes, of 128 // size above; add their wavefronts. Rows n words apart meet n * row "
        "mod 32: 32 different banks if n and 32 have no common divisor. XOR with the row is a permutation of a row.",
        "words = {address // 4, ... of the group}; max over banks of how many words have w % 32 == bank. padding: 0 "
        "for odd, 1 for even rows. column ^ row; piece ^ (row % 8).",
    ),
    predicted="4: rows are 36 words apart, so a column meets only 8 of the 32 banks, each of them 4 times.",
    wrong=(
        Wrong("addresses are taken for words: banks of one byte", "range(address // 4, (address + size - 1) // 4 + 1)",
              "range(address, address + 1)", "of_words"),
        Wrong("64 banks", "word % 32 for", "word % 64 for", "of_words"),
        Wrong("lanes that share a word wait for each other",
              "banks = [word % 32 for word in words]",
              "banks = [address // 4 % 32 for address in addresses[first : first + lanes] if address is not None]",
              "of_words"),
        Wrong("a wide access is served as one", "lanes = 32 if size <= 4 else 128 // size", "lanes = 32",
              "of_wide_accesses"),
        Wrong("always one word, also where rows are odd already", "return 1 - columns % 2", "return 1", "padded"),
        Wrong("rows that 32 divides are padded, other even ones are not", "return 1 - columns % 2",
              "return int(columns % 32 == 0)", "padded"),
        Wrong("a word is moved out of its row", "return column ^ row\n", "return column + row\n", "swizzled"),
        Wrong("two rows have one permutation", "return column ^ row\n", "return column ^ row // 2\n", "swizzled"),
        Wrong("rows past the eighth leave the row", "return piece ^ row % 8", "return piece ^ row", "swizzled_pieces"),
        Wrong("pieces are permuted every eight rows, so that eight rows agree", "return piece ^ row % 8",
              "return piece ^ row // 8", "swizzled_pieces"),
    ),
)  # fmt: skip
