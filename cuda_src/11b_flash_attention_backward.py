"""Flash attention, backward, in CUDA C++: two deterministic passes, scalar and on tensor cores
============================================================================================
The kernels and what they predict are in 11b_flash_attention_backward.cu and 11b_attention_mma.cuh; here they
are functions of tensors, checked against PyTorch. Gradients of the op as a whole, forward and backward, are checked in
11_flash_attention_v1.py against float64 autograd.

Run it:    python cuda_src/11b_flash_attention_backward.py
Check it:  python -m lessonkit check 11b_flash_attention_backward
Time it:   python -m lessonkit bench 11b_flash_attention_backward
"""

import importlib
import math

from lessonkit import DEVICE, Lesson, Mutant, Refusal, Work, case, cuda, expect

import torch
import torch.nn.functional as F

forward = importlib.import_module("cuda_src.11_flash_attention_v1")  # digits cannot begin a name
kernels = cuda.extension(__file__)  # 11b_flash_attention_backward.cu, built at the first call


def reference(q, k, v, o, lse, dout, causal=False):
    """dq, dk, dv from what the forward pass kept, with everything S x S written down, a head at a time."""
    S, D = q.shape[-2:]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1) & causal
    grads = []
    for q1, k1, v1, o1, lse1, dout1 in zip(*(t.flatten(0, 1) for t in (q, k, v, o, lse, dout)), strict=True):
        s = (q1 @ k1.T) / math.sqrt(D)
        p = torch.exp(s - lse1[:, None]).masked_fill(hidden, 0).to(q.dtype)
        delta = (dout1 * o1).sum(-1, keepdim=True)
        ds = p * (dout1 @ v1.T - delta) / math.sqrt(D)
        grads.append((ds @ k1, ds.T @ q1, p.T @ dout1))
    return tuple(torch.stack(parts).view_as(q) for parts in zip(*grads, strict=True))


def attention_backward_scalar(q, k, v, o, lse, dout, causal=False):
    """q, k, v, o, dout [B, H, S, D], lse [B, H, S] fp32 -> dq, dk, dv; two passes on CUDA cores. D up to 128."""
    _expect(q, k, v, o, lse, dout)
    return _run("attention_backward_scalar", q, k, v, o, lse, dout, causal)


def attention_backward_mma(q, k, v, o, lse, dout, causal=False):
    """As attention_backward_scalar on tensor cores, which fp32 falls back to; D is padded to 64 or 128 in copies."""
    _expect(q, k, v, o, lse, dout)
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return _run("attention_backward_scalar", q, k, v, o, lse, dout, causal)
    if D not in (64, 128):  # zeros add nothing to a product
        q, k, v, o, dout = (F.pad(t, (0, (64 if D <= 64 else 128) - D)) for t in (q, k, v, o, dout))
    grads = _run("attention_backward_mma", q, k, v, o, lse, dout, causal, 1 / math.sqrt(max(D, 1)))
    return tuple(g[..., :D].contiguous() for g in grads)


def _expect(q, k, v, o, lse, dout):
    expect(q=q, k=k, v=v, o=o, dout=dout, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    expect(lse=lse, dtypes=(torch.float32,), contiguous=True)
    if lse.shape != q.shape[:-1]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected {tuple(q.shape[:-1])}, one number a query")
    if q.shape[-1] > 128:
        raise ValueError(f"q has D = {q.shape[-1]}, expected at most 128: registers hold no longer row of a gradient")


def _run(name, q, k, v, o, lse, dout, causal, scale=None):
    B, H, S, D = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
    stats = torch.empty(2, B * H, -(-S // 128) * 128, device=q.device)  # lse and rowsum(dO * O), with room for a tile
    if q.numel():
        launch = getattr(kernels, f"{name}_{str(q.dtype).removeprefix('torch.')}")
        launch(q, k, v, o, lse, dout, dq, dk, dv, stats, B * H, S, D, causal, scale or 1 / math.sqrt(D))
    return dq, dk, dv


def inputs(B, H, S, D, causal=False, dtype=torch.float32):
    # As in the forward pass; v and dout have means, so that dP and delta are large and leaving delta out shows.
    q, k, v, *_ = forward.inputs(B, H, S, D, causal, dtype=dtype)
    dout = (torch.randn(B, H, S, D, device=DEVICE) + 0.5).to(dtype)
    # On a GPU what the forward rung answers: the reference would need S x S in float64 for every bench.
    if DEVICE.type == "cuda":
        o, lse = forward.attention_pipelined(q, k, v, causal, lse=True)
    else:
        o, lse = forward.reference(q.double(), k.double(), v.double(), causal, lse=True)
    return q, k, v, o.to(dtype), lse.float(), dout, causal


def same_each_time(rung):
    """Two runs agree to the bit: every sum has one owner, who adds in one order. (Atomics on dq would not.)"""
    args = inputs(1, 2, 45, 32, True, dtype=torch.bfloat16)
    for first, second in zip(rung(*args), rung(*args), strict=True):
        assert torch.equal(first, second)


def zero_where_nothing_can_change(rung):
    """One token, or equal keys: P does not depend on q, so dq is 0 up to the rounding of dP - delta; dv is dout."""
    q, k, v, o, lse, dout, _ = inputs(1, 2, 1, 16)
    dq, dk, dv = rung(q, k, v, o, lse, dout)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4
    assert (dv - dout).abs().max() < 1e-4
    q, k, v, _, _, dout, _ = inputs(1, 1, 40, 16)
    k[:] = k[:, :, :1]
    o, lse = forward.reference(q, k, v, lse=True)
    assert rung(q, k, v, o, lse, dout)[0].abs().max() < 1e-4


def _torch_naive(q, k, v, o, lse, dout, causal=False):
    """The S x S matrices in memory, P among them as the forward pass of naive attention would have kept it."""
    s = (q / math.sqrt(q.shape[-1])) @ k.mT
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = s.softmax(-1)
    ds = torch.ops.aten._softmax_backward_data(dout @ v.mT, p, -1, p.dtype) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ dout


def _torch_flash(q, k, v, o, lse, dout, causal=False):
    S, zero = q.shape[-2], torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout, so no random state
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, o, lse, None, None, S, S, 0.0, causal, zero, zero
    )


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(attention_backward_scalar, attention_backward_mma),
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("seven tokens, nearly everything masked; with one, dq is 0: a property", B=1, H=1, S=7, D=16),
        case("one past a tile of 32, and past a tile of 8", B=1, H=1, S=33, D=20),
        case("causal, and D that needs no padding", B=1, H=1, S=47, D=64, causal=True),
        case("a tile of 64 and a tail; two heads", B=1, H=2, S=70, D=32),
        case("causal past a tile: some warps skip tiles", B=1, H=1, S=70, D=16, causal=True),
        case("several tiles of everything", gib=0.5, B=2, H=3, S=517, D=128),
        case("several tiles of everything, causal", gib=0.5, B=2, H=3, S=517, D=64, causal=True),
        case("several tiles of everything, causal, wide", gib=0.5, B=1, H=3, S=389, D=128, causal=True),
        case("a whole tile of everything, on which accesses are counted", B=1, H=1, S=64, D=64),
    ),
    benches=(
        {"B": 16, "H": 16, "S": 1024, "D": 128, "causal": False},
        {"B": 8, "H": 16, "S": 2048, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 4096, "D": 128, "causal": True},
        {"B": 8, "H": 32, "S": 2048, "D": 64, "causal": False},
        {"B": 4, "H": 32, "S": 4096, "D": 64, "causal": True},
    ),
    work=lambda B, H, S, D, dtype, causal=False: Work(
        bytes=8 * B * H * S * D * dtype.itemsize + 4 * B * H * S,
        flops=10 * B * H * S * S * D // (2 if causal else 1),
    ),
    wrong=(
        Mutant(
            "delta left out", "attention_backward_kernel", "p * (dp - ", "p * (dp - 0 * ", "attention_backward_scalar"
        ),
        Mutant(
            "no scale", "attention_backward_kernel", "T(acc1[c] * scale)", "T(acc1[c])", "attention_backward_scalar"
        ),
        Mutant(
            "causal mask off by one",
            "attention_backward_kernel",
            "key <= query",
            "key < query",
            "attention_backward_scalar",
        ),
        Mutant(
            "delta of the key's row",
            "attention_backward_kernel",
            "delta[head * PS + query]",
            "delta[head * PS + row]",
            "attention_backward_scalar",
        ),
        Mutant(
            "a tile is overwritten while it is read",
            "attention_backward_kernel",
            "__syncthreads();  // all have read the tile before this one",
            "",
            "attention_backward_scalar",
            "race",
        ),
        Mutant("rows past the end", "copy_rows", "row < live", "true", "attention_backward_mma", "out of bounds"),
        Mutant(
            "P where dS belongs",
            "attention_backward_mma_kernel",
            "as_left<T, M, COLS>(left, ds)",
            "as_left<T, M, COLS>(left, p)",
            "attention_backward_mma",
        ),
        Mutant(
            "a wait for all but the last copy",
            "attention_backward_mma_kernel",
            "__pipeline_wait_prior(0)",
            "__pipeline_wait_prior(1)",
            "attention_backward_mma",
            "uninitialised",
        ),
        Mutant(
            "causal: the diagonal's tile begins too late",
            "attention_backward_mma_kernel",
            "first / COLS : 0",
            "first / COLS + 1 : 0",
            "attention_backward_mma",
            "race",
        ),
    ),
    properties=(same_each_time, zero_where_nothing_can_change),
    peers={"torch naive": _torch_naive, "SDPA flash": _torch_flash},
    claims={
        "attention_backward_kernel": ("no spills",),
        "attention_backward_mma_kernel": ("mma", "cp.async", "16-byte stores", "no spills"),
    },
    counts={attention_backward_scalar: {"wavefronts a shared access": 1.0}},
    refuses=(
        Refusal("lse of another shape", lambda f: f(*_bad(4, lambda t: t[..., 1:])), ValueError, "lse"),
        Refusal("lse in 16 bits", lambda f: f(*_bad(4, lambda t: t.half())), TypeError, "lse is torch.float16"),
        Refusal("dout transposed", lambda f: f(*_bad(5, lambda t: t.mT)), ValueError, "dout"),
        Refusal("o of another dtype", lambda f: f(*_bad(3, lambda t: t.half())), TypeError, "o is"),
        Refusal("D past 128", lambda f: f(*_wide()), ValueError, "at most 128"),
    ),
)


def _bad(which, change):
    args = list(inputs(1, 2, 5, 5))
    args[which] = change(args[which])
    return args


def _wide():
    t = torch.zeros(1, 1, 4, 130, device=DEVICE)
    return t, t, t, t, t[..., 0].contiguous(), t


if __name__ == "__main__":
    LESSON.main()
