"""Predict: what attention costs
=============================
Count first, run later. One layer has S = 16,384 tokens and H = 32 heads of D = 128, in bf16. It computes attention in
tiles of 128 x 128, on an H200 that multiplies at 989 TFLOP/s and reads 4.2 TB/s. Each answer is checked against a count
made by the grader, within 1%.
"""

# TODO(1): GB (1e9 bytes) of the scores of all heads, and of Q, K, V and O together.
# stub: SCORES_GB, QKVO_GB = None, None
SCORES_GB, QKVO_GB = 32 * 16384**2 * 2 / 1e9, 4 * 32 * 16384 * 128 * 2 / 1e9
# END(1)

# TODO(2): TFLOP (1e12) of the two products of all heads, without a mask.
# stub: FORWARD_TFLOP = None
FORWARD_TFLOP = 4 * 32 * 16384**2 * 128 / 1e12
# END(2)

# TODO(3): FLOPs for each byte, if Q, K and V are read once and O is written once.
# stub: INTENSITY = None
INTENSITY = 16384 / 2
# END(3)

# TODO(4): of a head's 128 x 128 tiles, those that a causal kernel visits, and those of them that need a mask.
# stub: VISITED, MASKED = None, None
VISITED, MASKED = 128 * 129 // 2, 128
# END(4)

# TODO(5): causal with a window of 1024 keys: pairs of query and key that are seen, over those of causal alone.
# stub: WINDOW_SHARE = None
WINDOW_SHARE = (1024 * 16384 - 1024 * 1023 / 2) / (16384 * 16385 / 2)
# END(5)

# TODO(6): GiB (2^30 bytes) of the KV cache of 32 such layers for one sequence, with 32 heads of K and V, and with 8.
# stub: CACHE_GIB, GROUPED_GIB = None, None
CACHE_GIB, GROUPED_GIB = 2 * 32 * 32 * 16384 * 128 * 2 / 2**30, 2 * 32 * 8 * 16384 * 128 * 2 / 2**30
# END(6)

# TODO(7): milliseconds in which one new token can attend to that grouped cache, at least.
# stub: DECODE_MS = None
DECODE_MS = 2 * 32 * 8 * 16384 * 128 * 2 / 4.2e12 * 1e3
# END(7)

# TODO(8): MB (1e6 bytes) of lse and delta, in fp32, of all heads: what the backward has in place of the scores.
# stub: ROWS_MB = None
ROWS_MB = 2 * 4 * 32 * 16384 / 1e6
# END(8)


# The learner's file ends here.
from lessonkit.exercise import Exercise, Wrong, number

import torch
from torch.utils.flop_counter import FlopCounterMode

Q, K, V = (torch.empty(32, 16384, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
WITHIN = 0.01


def _attention():
    """Eager attention on tensors without data."""
    scores = Q @ K.transpose(1, 2)
    return scores, scores.softmax(-1) @ V


def sizes():
    """The scores grow with S^2, the rest with S."""
    scores, o = _attention()
    number("GB of the scores", SCORES_GB, scores.nbytes / 1e9, WITHIN)
    number("GB of Q, K, V and O", QKVO_GB, sum(t.nbytes for t in (Q, K, V, o)) / 1e9, WITHIN)


def flops():
    """Counted by PyTorch, on tensors without data."""
    with FlopCounterMode(display=False) as counter:
        _attention()
    number("TFLOP", FORWARD_TFLOP, counter.get_total_flops() / 1e12, WITHIN)


def intensity():
    """The longer the sequence, the more a byte is used for: only S counts."""
    with FlopCounterMode(display=False) as counter:
        _, o = _attention()
    number("FLOPs a byte", INTENSITY, counter.get_total_flops() / sum(t.nbytes for t in (Q, K, V, o)), WITHIN)


def blocks():
    """Tiles in which some query sees some key; of these, those in which not every query sees every key."""
    tiles = [(m, n) for m in range(0, 16384, 128) for n in range(0, 16384, 128)]
    number("tiles visited", VISITED, sum(n <= m + 127 for m, n in tiles), 0)
    number("tiles with a mask", MASKED, sum(n <= m + 127 and n + 127 > m for m, n in tiles), 0)


def window():
    """The first queries see fewer keys than the window has."""
    seen = sum(min(i + 1, 1024) for i in range(16384))
    number("the share", WINDOW_SHARE, seen / sum(range(1, 16385)), WITHIN)


def cache():
    """K and V, of each layer; heads of queries do not count."""
    for what, predicted, heads in (("32 heads", CACHE_GIB, 32), ("8 heads", GROUPED_GIB, 8)):
        cached = torch.empty(32, 2, heads, 16384, 128, dtype=torch.bfloat16, device="meta")
        number(f"GiB of {what}", predicted, cached.nbytes / 2**30, WITHIN)


def decode():
    """The cache is read once for each token; its products are nothing beside that."""
    cached = torch.empty(32, 2, 8, 16384, 128, dtype=torch.bfloat16, device="meta")
    number("milliseconds", DECODE_MS, cached.nbytes / 4.2e12 * 1e3, WITHIN)


def rows():
    """Two numbers per query and head."""
    number("MB", ROWS_MB, 2 * torch.empty(32, 16384, device="meta").nbytes / 1e6, WITHIN)


EXERCISE = Exercise(
    claims=(sizes, flops, intensity, blocks, window, cache, decode, rows),
    by_task=True,
    hints=(
        "The scores are H S^2 numbers, everything else H S D. Two products of S x D x S multiply-adds each.",
        "Intensity: 4 S^2 D FLOPs over 4 S D numbers. Causal: row m of tiles visits m + 1, the last one masked. A "
        "cache has K and V, of each layer, with H_kv heads; a token reads all of it.",
        "32 * 16384^2 * 2 bytes; 4 * 32 * 16384^2 * 128; 4 S^2 D / 8 S D; 128 rows: 128 * 129 / 2; (1024 S - 1024 * "
        "1023 / 2) / (S (S + 1) / 2); 2 * 32 * H_kv * 16384 * 128 * 2 bytes, over 4.2e12; 8 bytes per query.",
    ),
    wrong=(
        Wrong("one head's scores", "= 32 * 16384**2 * 2 / 1e9", "= 16384**2 * 2 / 1e9", "sizes"),
        Wrong("O forgotten", "4 * 32 * 16384 * 128 * 2 / 1e9", "3 * 32 * 16384 * 128 * 2 / 1e9", "sizes"),
        Wrong("a multiply-add is one FLOP", "FORWARD_TFLOP = 4 * 32", "FORWARD_TFLOP = 2 * 32", "flops"),
        Wrong("bytes are taken for numbers", "INTENSITY = 16384 / 2", "INTENSITY = 16384", "intensity"),
        Wrong(
            "half of the tiles: the diagonal is only half seen, and yet visited",
            "128 * 129 // 2, 128",
            "128 * 128 // 2, 128",
            "blocks",
        ),
        Wrong("every visited tile has a mask", "128 * 129 // 2, 128", "128 * 129 // 2, 128 * 129 // 2", "blocks"),
        Wrong(
            "the window over all keys, not over those that causal sees", "/ (16384 * 16385 / 2)", "/ 16384**2", "window"
        ),
        Wrong("the first 1023 queries see a whole window", "1024 * 16384 - 1024 * 1023 / 2", "1024 * 16384", "window"),
        Wrong("V forgotten", "= 2 * 32 * 32 * 16384", "= 32 * 32 * 16384", "cache"),
        Wrong(
            "a group's heads of queries counted",
            "2 * 32 * 8 * 16384 * 128 * 2 / 2**30",
            "2 * 32 * 32 * 16384 * 128 * 2 / 2**30",
            "cache",
        ),
        Wrong("one layer's cache", "DECODE_MS = 2 * 32 * 8", "DECODE_MS = 2 * 8", "decode"),
        Wrong("lse alone", "ROWS_MB = 2 * 4", "ROWS_MB = 4", "rows"),
    ),
)
