"""The shapes that `course_ops` is timed at: sizes of real models, sizes that hurt, and random ones. Plain data.

`SHAPES[operator, direction]` holds shapes in the words of that problem's `inputs`, the most important first. Nothing
is tuned to this list: `random_shapes` draws others for each release.
"""

import math
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shape = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """Sizes of one published model, from its config.json. D_v: where values are shorter than queries and keys."""

    hidden: int
    heads: int
    kv_heads: int
    D: int
    ffn: int
    vocab: int
    D_v: int | None = None
    window: int | None = None


MODELS = {
    "Llama 3 8B": Model(4096, 32, 8, 128, 14336, 128256),
    "Qwen 2.5 32B": Model(5120, 40, 8, 128, 27648, 152064),
    "GPT-2": Model(768, 12, 12, 64, 3072, 50257),
    "Llama 3 70B": Model(8192, 64, 8, 128, 28672, 128256),
    "Gemma 2 9B": Model(3584, 16, 8, 256, 14336, 256000),
    "Mistral 7B": Model(4096, 32, 8, 128, 14336, 32000, window=4096),
    "DeepSeek-V3": Model(7168, 128, 128, 192, 18432, 129280, D_v=128),
    "Qwen 2.5 0.5B": Model(896, 14, 2, 64, 4864, 151936),
    "Phi-3 mini": Model(3072, 32, 32, 96, 8192, 32064),
    "Pythia 2.8B": Model(2560, 32, 32, 80, 10240, 50304),
    "MPT 30B": Model(7168, 64, 64, 112, 28672, 50432),
    "GPT-2 XL": Model(1600, 25, 25, 64, 6400, 50257),
    "Qwen 2.5 7B": Model(3584, 28, 4, 128, 18944, 152064),
    "Gemma 7B": Model(3072, 16, 16, 256, 24576, 256000),
    "Qwen 2.5 1.5B": Model(1536, 12, 2, 128, 8960, 151936),
    "GPT-NeoX 20B": Model(6144, 64, 64, 96, 24576, 50432),
}
TOKENS = (1, 17, 127, 333, 1000, 2048, 4097, 12345)  # of a step, beside 8192 and 16384; few in decoding


def _each_once(shapes: list[Shape]) -> tuple[Shape, ...]:
    return tuple({tuple(shape.items()): shape for shape in shapes}.values())


def _rows() -> tuple[Shape, ...]:
    """[tokens, hidden] of each model, in a large step and in one of TOKENS; a few with the feed-forward's width."""
    hidden = list(dict.fromkeys(model.hidden for model in MODELS.values()))
    wide = sorted({model.ffn for model in MODELS.values() if model.ffn > 8192})[::2]
    shapes = [{"M": 16384 if n <= 4096 else 8192, "N": n} for n in hidden]
    shapes += [{"M": TOKENS[i % len(TOKENS)], "N": n} for i, n in enumerate(hidden)]
    shapes += [{"M": 4096, "N": n} for n in wide]
    # Rows that are no multiple of 16 elements, of 8, of 2: where 16-byte accesses are lost if a kernel is careless.
    shapes += [{"M": 4000, "N": n} for n in (3000, 3008, 4100, 2730)] + [{"M": 4096, "N": n} for n in (4095, 50257)]
    return _each_once([*shapes, {"M": 8192, "N": 14336}, {"M": 65536, "N": 128}, {"M": 511, "N": 100_003}])


def _logits() -> tuple[Shape, ...]:
    vocabularies = list(dict.fromkeys(model.vocab for model in MODELS.values()))
    shapes = [{"M": 8192 if v < 200_000 else 4096, "V": v} for v in vocabularies]
    shapes += [{"M": TOKENS[i % len(TOKENS)], "V": v} for i, v in enumerate(vocabularies)]
    return _each_once([*shapes, {"M": 16384, "V": 2048}, {"M": 32768, "V": 4096}, {"M": 32, "V": 131072}])


def _layers() -> list[tuple[int, int]]:
    """(N, K) of the linear layers of models: q, k and v in one; the feed-forward's two; the output."""
    found = []
    for m in MODELS.values():
        found += [(m.ffn, m.hidden), (m.hidden, m.ffn), ((m.heads + 2 * m.kv_heads) * m.D, m.hidden)]
    return list(dict.fromkeys(found))


def _matmuls() -> tuple[Shape, ...]:
    shapes: list[Shape] = [{"M": n, "N": n, "K": n} for n in (8192, 4096, 5000, 4992, 5120, 2048, 3000, 6144)]
    odd = ((3000, 7000, 2048), (3072, 7168, 2048), (5000, 5000, 5056), (4096, 4095, 4097), (127, 4096, 4096))
    shapes += [{"M": m, "N": n, "K": k} for m, n, k in odd]
    tokens = (8192, 1, 48, 4096, 16, 1000, 128, 4097, 333, 64)
    for i, (n, k) in enumerate(_layers()):
        shapes.append({"M": tokens[i % len(tokens)], "N": n, "K": k, "transposed": "b"})  # w.t(), as nn.Linear's
    shapes.append({"M": 48, "N": 5120, "K": 27648, "transposed": "b"})  # 48 sequences that decode, a 32B model
    logits = [{"M": 4096, "N": 128256, "K": 4096, "transposed": "b"}, {"M": 2048, "N": 50257, "K": 768}]
    # Gradients: a by columns.
    logits += [{"M": 4096, "N": 14336, "K": 8192, "transposed": "a"}, {"M": 768, "N": 3072, "K": 32768}]
    small: list[Shape] = []
    for m in (128, 16, 1):  # the lesson of few rows
        for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)):
            small += [{"M": m, "N": n, "K": k, "transposed": way} for way in ("b", "")]
    large: list[Shape] = [{"M": 16384, "N": 16384, "K": 16384}, {"M": 1024, "N": 1024, "K": 1024}]
    large += [{"M": 4096, "N": n, "K": k} for n, k in ((14336, 4096), (4096, 14336), (28672, 8192))]
    return _each_once([*shapes, *logits, *large, *small])


def _attention() -> tuple[Shape, ...]:
    def of(B: int, S: int, m: Model, causal: bool = True, **more: Any) -> Shape:
        grouped = {"H_kv": m.kv_heads} if m.kv_heads != m.heads else {}
        values = {"D_v": m.D_v} if m.D_v else {}
        return {"B": B, "H": m.heads, "S": S, "D": m.D, **grouped, **values, "causal": causal, **more}

    shapes: list[Shape] = []
    # The table of peers: 16384 tokens, 2048 features.
    for D, S, causal in (
        (128, 4096, True), (128, 4096, False), (64, 4096, False), (128, 16384, True), (128, 16384, False),
        (64, 16384, True), (64, 16384, False), (128, 2048, True), (128, 2048, False), (64, 2048, False),
        (128, 512, False), (192, 4096, True), (256, 4096, True), (96, 4096, True), (80, 4096, True), (112, 4096, True),
        (128, 32768, True), (64, 2048, True), (64, 4096, True), (128, 512, True),
    ):  # fmt: skip
        shapes.append({"B": max(1, 16384 // S), "H": 2048 // D, "S": S, "D": D, "causal": causal})
    shapes.insert(4, {"B": 4, "H": 32, "S": 4096, "D": 128, "H_kv": 8, "causal": True})
    lengths = (8192, 4097, 2048, 1000, 4096, 333, 16384, 127, 2049, 3000)
    for i, m in enumerate(MODELS.values()):
        S = lengths[i % len(lengths)]
        shapes.append(of(max(1, 16384 * 2048 // (S * m.heads * m.D)), S, m))
    mistral = MODELS["Mistral 7B"]
    shapes += [of(1, 16384, mistral, window=mistral.window), of(2, 8191, mistral, window=1024)]
    shapes += [{"B": 1, "H": 16, "S": 16384, "D": 128, "causal": True, "window": 1024}]
    shapes += [of(2, 1024, MODELS["Llama 3 8B"], S_k=8192), of(2, 4096, MODELS["GPT-2"], causal=False, S_k=1111)]
    # Shapes of lessons.
    shapes += [{"B": b, "H": h, "S": s, "D": d, "causal": causal} for b, h, s, d, causal in (
        (32, 32, 512, 64, False), (32, 32, 512, 64, True), (32, 12, 1024, 64, True), (4, 16, 4096, 96, True),
        (4, 16, 4000, 128, True),
        (8, 16, 1024, 128, False), (4, 16, 2048, 128, False), (4, 16, 2048, 128, True), (2, 16, 4096, 128, False),
        (1, 4, 16384, 128, True), (4, 32, 2048, 64, False), (16, 16, 1024, 128, False),
    )]  # fmt: skip
    return _each_once(shapes)


def _packed() -> tuple[Shape, ...]:
    """Sequences of a training step with packing, of a batch of prompts; lengths as problems/attention_varlen.py reads
    them: equal ones, one long and many short, one alone."""
    mixed = "6000+3x2048+1500+1000+700+5x300+16x33"
    llama: Shape = {"H": 32, "D": 128, "H_kv": 8, "causal": True}
    plain: Shape = {"H": 16, "D": 128}
    shapes: list[Shape] = [
        {"lengths": "4x4096", **plain, "causal": True}, {"lengths": "4x4096", **plain},
        {"lengths": "8192+128x64", **plain, "causal": True}, {"lengths": mixed, **llama},
        {"lengths": "32x512", **plain, "causal": True}, {"lengths": "1x16384", **plain, "causal": True},
        {"lengths": "4x4096", "H": 32, "D": 64}, {"lengths": "256x64", **plain, "causal": True},
        {"lengths": "8192+128x64", **plain}, {"lengths": mixed, **llama, "window": 1024},
        {"lengths": "4x4096", "H": 8, "D": 256, "causal": True}, {"lengths": "2x333+17x127+4097", **llama},
        {"lengths": "64x1+8x100", "keys": "64x1000+8x3000", **llama},
    ]  # fmt: skip
    return _each_once(shapes)


def _decoding() -> tuple[Shape, ...]:
    """One or a few new queries per sequence on a cache."""
    shapes: list[Shape] = [{"B": b, "H": 32, "S_k": s_k, "D": d, "H_kv": h_kv, "S": s} for b, s_k, h_kv, d, s in (
        (16, 8192, 8, 128, 1), (1, 8192, 8, 128, 1), (64, 2048, 8, 128, 1), (1, 131072, 8, 128, 1),
        (16, 8192, 32, 128, 1), (16, 8192, 1, 128, 1), (16, 8192, 8, 64, 1), (16, 8192, 8, 128, 4),
    )]  # fmt: skip
    lengths = (8191, 1000, 4096, 16384)
    for i, m in enumerate(MODELS.values()):
        if m.D_v is None:
            shapes.append({"B": (8, 64, 1)[i % 3], "H": m.heads, "S_k": lengths[i % 4], "D": m.D, "H_kv": m.kv_heads})
    return _each_once(shapes)


def _paged() -> tuple[Shape, ...]:
    """Decoding from pages: batches and lengths of serving, blocks of 16 to 256 tokens, sequences of unequal length."""
    shapes: list[Shape] = [{"B": b, "H": 32, "S_k": s_k, "D": 128, "H_kv": 8, "block_size": size} for b, s_k, size in (
        (64, 4096, 16), (8, 8192, 16), (1, 32768, 16), (64, 4096, 64), (64, 32768, 64), (8, 8192, 256), (64, 1024, 256),
    )]  # fmt: skip
    shapes += [{**shapes[0], "spread": "even"}, {**shapes[3], "spread": "one long"}, {**shapes[3], "S": 4}]
    lengths = (8191, 1000, 4096, 16384)
    for i, m in enumerate(MODELS.values()):
        window = {"window": m.window} if m.window else {}
        values = {"D_v": m.D_v} if m.D_v else {}
        sizes = {"B": (8, 64, 1)[i % 3], "H": m.heads, "S_k": lengths[i % 4], "D": m.D, "H_kv": m.kv_heads}
        shapes.append({**sizes, "block_size": (16, 64, 256)[i % 3], **values, **window})
    return _each_once(shapes)


_ROWS = _rows()
_MATMULS = _matmuls()
MATMULS_FP32: tuple[Shape, ...] = (
    *({"M": n, "N": n, "K": n} for n in (4096, 2048, 1024, 512, 8192)),
    *({"M": m, "N": n, "K": k} for m, n, k in ((4096, 4095, 4097), (1000, 3072, 768))),
)
_VECTORS = tuple({"n": n} for n in (2**26, 2**28, 2**24, 98432, 2**20, 2**22, 16384 * 3584, 1_000_003, 4097 * 768 + 1))
_LINEAR = (
    *({"M": 8192, "N": n, "K": k} for n, k in ((14336, 4096), (4096, 1024), (8192, 2048), (3072, 768), (18944, 3584))),
    *({"M": m, "N": n, "K": k} for m, n, k in ((1000, 10240, 2560), (4097, 6400, 1600), (17, 14336, 4096))),
)
_FP8 = (
    *({"M": n, "N": n, "K": n, "scheme": s} for n in (8192, 4096) for s in ("tensor", "rows", "blocks")),
    {"M": 4096, "N": 7168, "K": 16384, "scheme": "blocks"},  # DeepGEMM's
    *({"M": m, "N": n, "K": k, "scheme": "blocks"} for m, n, k in ((64, 4096, 7168), (128, 7168, 2048))),
    *({"M": m, "N": n, "K": k, "scheme": "blocks"} for m, n, k in ((4096, 24576, 1536), (333, 18432, 7168))),
    *({"M": m, "N": 14336, "K": 4096, "scheme": "rows"} for m in (8192, 1000, 16)),
)
_GROUPED = (
    {"T": 8192, "E": 8, "K": 4096, "N": 14336},  # Mixtral 8x7B, 4096 tokens, two experts each
    {"T": 8192, "E": 8, "K": 4096, "N": 14336, "transposed": True},
    {"T": 32768, "E": 128, "K": 2048, "N": 768},  # Qwen3 30B-A3B
    {"T": 49152, "E": 64, "K": 2048, "N": 1408},  # DeepSeek-V2-Lite
    {"T": 64, "E": 8, "K": 4096, "N": 14336, "even": True},
    {"T": 32768, "E": 64, "K": 7168, "N": 2048},  # DeepSeek-V3, a quarter of its experts
    {"T": 16384, "E": 16, "K": 4096, "N": 4096, "even": True},
    {"T": 16384, "E": 64, "K": 1024, "N": 1024, "even": True},
    {"T": 1001, "E": 8, "K": 4096, "N": 14336},
)
_LAST_LAYER = (
    *({"M": m, "K": k, "V": v} for m, k, v in ((8192, 4096, 128256), (8192, 768, 50257), (4096, 3584, 256000))),
    *({"M": m, "K": k, "V": v} for m, k, v in ((4096, 4096, 32000), (1000, 896, 151936))),
)
SHAPES: dict[tuple[str, str], tuple[Shape, ...]] = {
    ("attention", "forward"): _attention(),
    ("matmul", "forward"): _MATMULS,
    ("attention", "backward"): _attention(),
    ("attention_varlen", "forward"): _packed(),
    ("attention_varlen", "backward"): _packed(),
    ("rms_norm", "forward"): _ROWS,
    ("layer_norm", "forward"): _ROWS,
    ("softmax", "forward"): _ROWS,
    ("cross_entropy", "forward"): _logits(),
    ("rms_norm", "backward"): _ROWS,
    ("layer_norm", "backward"): _ROWS,
    ("cross_entropy", "backward"): _logits(),
    ("linear", "forward"): (*_LINEAR, {"M": 8192, "N": 4096, "K": 4096, "residual": True}),
    ("attention", "decoding"): _decoding(),
    ("attention_paged", "forward"): _paged(),
    ("matmul_fp8", "forward"): _FP8,
    ("linear", "backward"): _LINEAR,
    ("softmax", "backward"): _ROWS,
    ("add_norm", "forward"): tuple({**shape, "stream": i % 2 == 0} for i, shape in enumerate(_ROWS[::2])),
    ("add_norm", "backward"): tuple({**shape, "stream": i % 2 == 0} for i, shape in enumerate(_ROWS[::2])),
    ("grouped_matmul", "forward"): _GROUPED,
    ("linear_cross_entropy", "forward"): _LAST_LAYER,
    ("linear_cross_entropy", "backward"): _LAST_LAYER,
    ("gelu", "forward"): _VECTORS,
    ("gelu", "backward"): _VECTORS[:6],
    ("dropout", "forward"): _VECTORS[:7],
    ("dropout", "backward"): _VECTORS[:3],
    ("scan", "forward"): _VECTORS,
    ("scan", "backward"): _VECTORS[:3],
    ("quantize", "forward"): tuple(
        {"M": m, "K": k, "scheme": s}
        for m, k in ((8192, 8192), (4096, 7168), (1000, 14336), (4097, 3000))
        for s in ("tensor", "rows", "blocks", "squares")
    ),
    ("matmul", "backward"): tuple(shape for shape in _MATMULS if shape["M"] >= 1000)[::4],
    ("grouped_matmul", "backward"): _GROUPED[::2],
}

# ---- Random shapes: 100 in all, others in each release --------------------------------------------------------------

RANDOM = {
    ("attention", "forward"): 14, ("attention", "backward"): 10, ("attention", "decoding"): 3,
    ("attention_paged", "forward"): 2,
    ("matmul", "forward"): 16, ("rms_norm", "forward"): 5, ("rms_norm", "backward"): 4,
    ("layer_norm", "forward"): 5, ("layer_norm", "backward"): 4, ("softmax", "forward"): 5, ("softmax", "backward"): 4,
    ("cross_entropy", "forward"): 5, ("cross_entropy", "backward"): 4, ("add_norm", "forward"): 3,
    ("add_norm", "backward"): 3, ("linear", "forward"): 4, ("linear", "backward"): 3, ("matmul_fp8", "forward"): 3,
    ("grouped_matmul", "forward"): 3,
}  # fmt: skip


def version() -> str:
    """The release that the shapes are drawn for."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    return str(tomllib.loads(text)["project"]["version"])


def random_shapes(seed: str) -> dict[tuple[str, str], tuple[Shape, ...]]:
    """RANDOM[operator, direction] shapes of each, the same for the same seed."""
    made = {}
    for (operator, direction), count in RANDOM.items():
        draw = random.Random(f"{seed} {operator} {direction}")
        made[operator, direction] = tuple(_DRAWN[operator, direction](draw) for _ in range(count))
    return made


def _between(draw: random.Random, low: int, high: int, step: int = 1) -> int:
    """Uniform in the logarithm: as many small sizes as large ones."""
    return max(low, round(math.exp(draw.uniform(math.log(low), math.log(high))) / step) * step)


def _step(draw: random.Random) -> int:
    """Most sizes in models are multiples of 64 or 8; some are odd."""
    return draw.choice((64, 64, 8, 8, 2, 1))


def _draw_rows(draw: random.Random) -> Shape:
    n = _between(draw, 256, 65536, _step(draw))
    return {"M": min(_between(draw, 16, 32768), 2**29 // n), "N": n}


def _draw_stream(draw: random.Random) -> Shape:
    return {**_draw_rows(draw), "stream": draw.random() < 0.5}


def _draw_logits(draw: random.Random) -> Shape:
    v = _between(draw, 1000, 262144, _step(draw))
    return {"M": min(_between(draw, 16, 32768), 2**30 // v), "V": v}


def _draw_matmul(draw: random.Random) -> Shape:
    m, n, k = _between(draw, 1, 16384), *(_between(draw, 512, 16384, _step(draw)) for _ in range(2))
    return {"M": m, "N": n, "K": k, "transposed": draw.choice(("", "b", "b", "a"))}


def _draw_linear(draw: random.Random) -> Shape:
    return {"M": _between(draw, 16, 16384), "N": _between(draw, 512, 16384, 8), "K": _between(draw, 512, 8192, 8)}


def _draw_fp8(draw: random.Random) -> Shape:
    sizes = {"M": _between(draw, 16, 8192), "N": _between(draw, 512, 16384, 16), "K": _between(draw, 512, 16384, 128)}
    return {**sizes, "scheme": draw.choice(("tensor", "rows", "blocks"))}


def _draw_grouped(draw: random.Random) -> Shape:
    sizes = {"T": _between(draw, 256, 32768), "E": draw.choice((4, 8, 16, 64))}
    return {**sizes, "K": _between(draw, 512, 4096, 64), "N": _between(draw, 512, 8192, 64)}


def _heads(draw: random.Random) -> tuple[int, int, int]:
    """D, H and H_kv."""
    D, H_kv = draw.choice((64, 64, 80, 96, 112, 128, 128, 128, 192, 256)), draw.choice((1, 2, 4, 8, 16))
    return D, H_kv * draw.choice((1, 1, 2, 4, 8)), H_kv


def _draw_attention(draw: random.Random) -> Shape:
    (D, H, H_kv), S = _heads(draw), _between(draw, 64, 16384, draw.choice((128, 8, 1)))
    B = max(1, min(64, draw.randint(1, 2 * 16384 * 2048) // (S * H * D)))
    S_k = draw.choice(({}, {}, {}, {"S_k": _between(draw, S, 16384)}))
    return {"B": B, "H": H, "S": S, "D": D, **S_k, "H_kv": H_kv, "causal": draw.random() < 0.7}


def _draw_decoding(draw: random.Random) -> Shape:
    (D, H, H_kv), B = _heads(draw), draw.choice((1, 4, 16, 64))
    S_k = min(_between(draw, 256, 65536), 2**31 // (B * H_kv * D))  # 4 GiB of keys at most
    return {"B": B, "H": H, "S_k": S_k, "D": D, "H_kv": H_kv}


def _draw_paged(draw: random.Random) -> Shape:
    sizes = {**_draw_decoding(draw), "block_size": draw.choice((16, 32, 64, 128, 256))}
    return {**sizes, "spread": draw.choice(("", "even", "one long"))}


_DRAWN = {
    **{(op, way): _draw_rows for op in ("softmax", "layer_norm", "rms_norm") for way in ("forward", "backward")},
    **{("add_norm", way): _draw_stream for way in ("forward", "backward")},
    **{("cross_entropy", way): _draw_logits for way in ("forward", "backward")},
    **{("linear", way): _draw_linear for way in ("forward", "backward")},
    **{("attention", way): _draw_attention for way in ("forward", "backward")},
    ("attention", "decoding"): _draw_decoding,
    ("attention_paged", "forward"): _draw_paged,
    ("matmul", "forward"): _draw_matmul,
    ("matmul_fp8", "forward"): _draw_fp8,
    ("grouped_matmul", "forward"): _draw_grouped,
}
