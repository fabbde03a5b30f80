"""ThunderKittens: attention forward, right for every sequence length
==================================================================
softmax(Q K^T / sqrt(D)) V for D = 64 and 128, causal or not, as kernels on ThunderKittens' headers. The kernels and
their predictions are in lesson15_thunderkittens_attention.cu. They are warps with mma.sync, warpgroups with wgmma and a
producer, and a rung that issues QK one step ahead, so that the exponentials overlap with MMAs.

Day 4 is about attention itself. This lesson shows a use of a tile library beside matmul, and what to check before you
trust a library's own kernel. ThunderKittens' (kernels/attention/mha_h100, April 2026) does not write the rows past the
last multiple of 192, at S = 2048 the last 128. Neither the kernel nor its test says so. Every check here fills the
output with NaN first.

Where to get ThunderKittens: lesson 14. Peers: PyTorch's scaled_dot_product_attention by FlashAttention-2, which does
not use wgmma, and by cuDNN, which does.

New words (GLOSSARY.md): causal, peer.
You will learn: tails and masks with tiles, online softmax with column vectors, how to make a compiler keep an order.
Run it:    python3 course.py run lesson15_thunderkittens_attention
Check it:  python3 course.py check lesson15_thunderkittens_attention       a Hopper GPU; without one, the next line
Read it:   python3 course.py compile lesson15_thunderkittens_attention     registers and instructions, no GPU needed
"""

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, case, cuda, expect, needs

import torch

from problems.attention_plain import PROBLEM

kernels = cuda.extension(__file__)  # lesson15_thunderkittens_attention.cu, built at the first call


@needs(90, "ThunderKittens as built for Hopper", only=True)
def attention_warps(q, k, v, causal=False):
    """q, k, v [B, H, S, D] bfloat16, contiguous, D 64 or 128 -> o: 16 queries per warp, mma.sync."""
    return _run("attention_warps", q, k, v, causal)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def attention_warpgroups(q, k, v, causal=False):
    """As attention_warps: 64 queries per warpgroup, wgmma, a producer warp."""
    return _run("attention_warpgroups", q, k, v, causal)


@needs(90, "ThunderKittens, TMA and wgmma", only=True)
def attention_ahead(q, k, v, causal=False):
    """As attention_warpgroups: QK of a step is issued before PV of the last, and the exponentials overlap with PV."""
    return _run("attention_ahead", q, k, v, causal)


def _run(name, q, k, v, causal):
    expect(q=q, k=k, v=v, ndim=4, dtypes=[torch.bfloat16], same_shape=True, contiguous=True)
    if q.shape[-1] not in (64, 128):
        raise ValueError(f"q has D = {q.shape[-1]}, expected 64 or 128: these are the tiles that were compiled")
    q, k, v = (t.clone() if t.data_ptr() % 16 else t for t in (q, k, v))  # TMA wants multiples of 16 bytes
    o = torch.empty_like(q)
    if q.numel():
        getattr(kernels, name)(q, k, v, o, *q.shape, causal)
    return o


def _inputs(B, H, S, D):
    return PROBLEM.inputs(B, H, S, D, dtype=torch.bfloat16)


def a_head_is_alone(rung):
    """NaN in one head's keys spoils that head and no other, although its last tile reaches past its end."""
    q, k, v, _ = _inputs(2, 3, 200, 64)
    k[1, 0] = float("nan")
    bad = rung(q, k, v).isnan()
    assert bad[1, 0].all()
    bad[1, 0] = False
    assert not bad.any(), "NaN came over from the next head"


def the_future_does_not_matter(rung):
    """Causal: other keys and values from row 131 on leave all rows before it as they are, to the bit."""
    q, k, v, _ = _inputs(1, 2, 300, 128)
    before = rung(q, k, v, True)
    k[:, :, 131:] += 3
    v[:, :, 131:] = 5
    assert torch.equal(rung(q, k, v, True)[:, :, :131], before[:, :, :131])


FULL = {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": False}

LESSON = Lesson(
    about=About(
        teaches="attention in the same words ([.cu](lesson15_thunderkittens_attention.cu)): tails, masks, column "
        "vectors, order",
        hours=1.25,
        operator="attention",
        language="ThunderKittens",
        pictures=("kittens_ahead", "kittens_tail"),
    ),
    problem=PROBLEM,
    extension=kernels,
    rungs=(attention_warps, attention_warpgroups, attention_ahead),
    predicted=(
        Prediction(rung=attention_warps, at=FULL, tflop_per_s=(100, 200)),
        Prediction(rung=attention_warpgroups, at=FULL, tflop_per_s=(400, 550)),
        Prediction(rung=attention_ahead, at=FULL, times=(1.1, 1.2), over=attention_warpgroups),
    ),
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=64),
        case("one token: the softmax is 1, all other keys of the tile must not count", B=1, H=1, S=1, D=64),
        case("one token, causal", B=2, H=1, S=1, D=128, causal=True),
        case("one key past a tile of 64", B=1, H=2, S=65, D=128),
        case("one query and one key past tiles of 128", B=1, H=2, S=129, D=64),
        case("causal, one past 128: the last block has one row", B=1, H=2, S=129, D=128, causal=True),
        case("where a library that rounds 192 down writes nothing", B=1, H=1, S=191, D=64),
        case("and where it stops early", B=1, H=2, S=2048, D=128),
        case("causal, prime, more tiles than stages", B=2, H=3, S=1021, D=64, causal=True),
        case("prime, more tiles than stages", B=1, H=3, S=1021, D=128),
        case("whole tiles, causal", B=1, H=2, S=512, D=64, causal=True),
        case("offsets past 2^31", gib=110, B=8, H=256, S=8200, D=128),
    ),
    benches=(
        {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": False},
        {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": True},
        {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
        {"B": 4, "H": 16, "S": 4000, "D": 128, "causal": True},  # no tile divides it
        {"B": 8, "H": 32, "S": 2048, "D": 64, "causal": False},
        {"B": 4, "H": 32, "S": 4096, "D": 64, "causal": True},
    ),
    wrong=(
        Mutant("keys past the end have a score of zero", "mask", "key + k < keys && ", "", "attention_ahead"),
        Mutant(
            "a query does not see its own key",
            "mask",
            "key + k <= row + r",
            "key + k < row + r",
            "attention_warpgroups",
            "nan",
        ),
        Mutant(
            "blocks of queries rounded down, as in mha_h100",
            "launch",
            "course::ceil_div(s, rows)",
            "(s / rows)",
            "attention_ahead",
            "nan",
        ),
        Mutant(
            "tiles of keys rounded down",
            "warpgroups_kernel",
            "(end + KEYS - 1) / KEYS",
            "max(1, end / KEYS)",
            "attention_ahead",
        ),
        Mutant("the sum is not scaled down", "Softmax", "warp::mul(sum, sum, rescale);", "", "attention_warps"),
        Mutant("the output is not scaled down", "warps_kernel", "warp::mul_row(o, o, rescale);", "", "attention_warps"),
        Mutant(
            "both consumers have the first's queries",
            "produce",
            "CONSUMERS * at.tile + i",
            "CONSUMERS * at.tile",
            "attention_warpgroups",
        ),
    ),
    properties=(a_head_is_alone, the_future_does_not_matter),
    claims={
        "warps_kernel": ("mma", "16-byte loads", "no spills"),
        "warpgroups_kernel": ("wgmma", "tma", "no spills"),
    },
    refuses=(
        Refusal("D of 96", lambda f: f(*_inputs(1, 1, 4, 96)), ValueError, "64 or 128"),
        Refusal("S of k differs", lambda f: f(*_bad(lambda q, k, v: (q, k[:, :, :3], v))), ValueError, "k has shape"),
        Refusal("not bfloat16", lambda f: f(*_bad(lambda q, k, v: (q.half(), k, v))), TypeError, "q is torch.float16"),
        Refusal("no heads", lambda f: f(*_bad(lambda q, k, v: (q[0], k[0], v[0]))), ValueError, "3 dimension"),
        Refusal("transposed", lambda f: f(*_bad(lambda q, k, v: (q.mT, k.mT, v.mT))), ValueError, "contiguous"),
    ),
    dtypes=(torch.bfloat16,),
    factor=1,
)


def _bad(change):
    return change(*_inputs(1, 2, 5, 64)[:3])


if __name__ == "__main__":
    LESSON.main()
