"""Flash attention, forward, in CUDA C++: naive, online softmax, register tiles, tensor cores
==========================================================================================
The kernels and what they predict are in 11_flash_attention_v1.cu and its headers; here they are functions of tensors,
checked against PyTorch: on a GPU as nvcc built them, without one as g++ did, with every address, every barrier and
every race watched (mma and ldmatrix are spelled out in shuffles there).

Run it:    python cuda_src/11_flash_attention_v1.py
Check it:  python -m lessonkit check 11_flash_attention_v1
Time it:   python -m lessonkit bench 11_flash_attention_v1
"""

import importlib
import math

from lessonkit import DEVICE, Grad, Lesson, Mutant, Refusal, Unsupported, Work, case, cuda, expect

import torch
import torch.nn.functional as F

kernels = cuda.extension(__file__)  # 11_flash_attention_v1.cu, built at the first call


def reference(q, k, v, causal=False, lse=False):
    """Writes S x S scores a head, reads and writes them for the softmax, reads them again; a head at a time here."""
    S, D = q.shape[-2:]
    hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1) & causal
    outputs, sums = [], []
    for q1, k1, v1 in zip(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), strict=True):
        s = ((q1 @ k1.T) / math.sqrt(D)).masked_fill(hidden, -math.inf)
        outputs.append(s.softmax(-1) @ v1)
        sums.append(torch.logsumexp(s if s.dtype == torch.float64 else s.float(), -1))
    o = torch.stack(outputs).view_as(q)
    return (o, torch.stack(sums).view(q.shape[:-1])) if lse else o


def attention_naive(q, k, v, causal=False, lse=False):
    """q, k, v [B, H, S, D] -> o, or o and lse [B, H, S] fp32 if asked for; S x S fp32 of scratch a head."""
    B, H, S, _ = _expect_qkv(q, k, v)
    if B * H * S * S > 2**32:
        raise Unsupported(f"the scores alone would take {B * H * S * S * 4 / 2**30:.0f} GiB")
    return _run("attention_naive", q, k, v, causal, lse, torch.empty(B * H, S, S, device=q.device))


def attention_online(q, k, v, causal=False, lse=False):
    """As attention_naive, with no scratch: tiles of 32 keys, online softmax. D up to 128."""
    _expect_qkv(q, k, v)
    return _run("attention_online", q, k, v, causal, lse)


def attention_register(q, k, v, causal=False, lse=False):
    """As attention_online; a thread owns 8 queries x 4 keys and 8 queries x D/16 columns."""
    _expect_qkv(q, k, v)
    return _run("attention_register", q, k, v, causal, lse)


def attention_mma(q, k, v, causal=False, lse=False):
    """As attention_register on tensor cores, fp16 and bf16; D other than 64 and 128 is padded with zeros in a copy."""
    _expect_qkv(q, k, v)
    if q.dtype == torch.float32:
        raise Unsupported("tensor cores take 16-bit inputs")
    return _run_padded("attention_mma", q, k, v, causal, lse)


def attention_pipelined(q, k, v, causal=False, lse=False):
    """As attention_mma, K and V double-buffered; fp32 falls back to attention_register."""
    _expect_qkv(q, k, v)
    if q.dtype == torch.float32:
        return _run("attention_register", q, k, v, causal, lse)
    return _run_padded("attention_pipelined", q, k, v, causal, lse)


def _expect_qkv(q, k, v, differentiable=False):
    """The checks of every rung; returns B, H, S, D."""
    expect(q=q, k=k, v=v, ndim=4, same_shape=True, same_dtype=True, contiguous=True, differentiable=differentiable)
    if q.shape[-1] > 128:
        raise ValueError(f"q has D = {q.shape[-1]}, expected at most 128: registers hold no longer row of the output")
    return q.shape


def _run(name, q, k, v, causal, lse, *scratch, scale=None):
    B, H, S, D = q.shape
    o, sums = torch.empty_like(q), torch.empty(B, H, S, device=q.device)
    if q.numel():
        launch = getattr(kernels, f"{name}_{str(q.dtype).removeprefix('torch.')}")
        launch(q, k, v, o, sums, *scratch, B * H, S, D, causal, scale or 1 / math.sqrt(D))
    return (o, sums) if lse else o


def _pad_width(D, *tensors):
    """The tensors with zeros appended to their last dimension up to 64 or 128: zeros add nothing to a product."""
    return [F.pad(t, (0, (64 if D <= 64 else 128) - D)) if D not in (64, 128) else t for t in tensors]


def _run_padded(name, q, k, v, causal, lse):
    D = q.shape[-1]
    padded = _pad_width(D, q, k, v)
    o, sums = _run(name, *padded, causal, True, scale=1 / math.sqrt(max(D, 1)))
    o = o[..., :D].contiguous()
    return (o, sums) if lse else o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        o, sums = attention_pipelined(q, k, v, causal, lse=True)
        ctx.save_for_backward(q, k, v, o, sums)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, dout):
        backward = importlib.import_module("cuda_src.11b_flash_attention_backward")  # digits cannot begin a name
        q, k, v, o, sums = ctx.saved_tensors
        return *backward.attention_backward_mma(q, k, v, o, sums, dout.contiguous(), ctx.causal), None


def attention(q, k, v, causal=False, lse=False):
    """q, k, v [B, H, S, D] -> o, differentiable: saves o and lse, and recomputes the rest (11b)."""
    _expect_qkv(q, k, v, differentiable=True)
    return _Attention.apply(q, k, v, causal)


def attention_twin(q, k, v, causal=False, lse=False):
    """attention_online_kernel, loop by loop, with its names (l is total): a query, a tile of 32 keys at a time."""
    B, H, S, D = q.shape
    o, sums = torch.empty_like(q), torch.empty(B, H, S, device=q.device)
    for b, h, row in ((b, h, row) for b in range(B) for h in range(H) for row in range(S)):
        m, total, acc = -math.inf, 0.0, torch.zeros(D, device=q.device)
        seen = row + 1 if causal else S
        for start in range(0, seen, 32):
            keys = slice(start, min(start + 32, seen))
            s = k[b, h, keys].float() @ q[b, h, row].float() / math.sqrt(D)
            m_new = max(m, s.max().item())
            correction, p = math.exp(m - m_new), torch.exp(s - m_new)
            total = total * correction + p.sum().item()
            acc = acc * correction + p @ v[b, h, keys].float()
            m = m_new
        o[b, h, row] = acc / total
        sums[b, h, row] = m + math.log(total)
    return (o, sums) if lse else o


def inputs(B, H, S, D, causal=False, lse=False, sharp=1.0, dtype=torch.float32):
    # Scores are around -sqrt(D) and grow along the keys: a key that is not there (zeros, so a score of 0) would drown
    # all others, and every tile brings a new maximum, without which the rescaling could be left out unseen.
    q, k, v = (torch.randn(B, H, S, D, device=DEVICE) + mean for mean in (1.0, -1.0, 0.5))
    k += torch.linspace(-0.5, 0.5, S, device=DEVICE)[:, None]
    if dtype == torch.float32:  # in 16 bits PyTorch's own scores would be off by 0.5, and no error could be told
        q *= sharp
    return q.to(dtype), k.to(dtype), v.to(dtype), causal, lse


def memory_grows_with_s(rung):
    """Every rung but the naive one allocates its outputs and nothing else: 4 S bytes of lse a head beside o."""
    if DEVICE.type != "cuda":
        raise Unsupported("allocated bytes are counted on a GPU")
    if rung is attention_naive:
        raise Unsupported("this one keeps the scores")
    q, k, v, *_ = inputs(1, 4, 4096, 64, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rung(q, k, v)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= q.nbytes + 4 * 4 * 4096 + 2048, f"{extra} bytes for an output of {q.nbytes}"


def mean_of_values(rung):
    """A softmax sums to one: if every value is the same row, so is every output; and adding to it adds to them."""
    q, k, v, *_ = inputs(1, 2, 37, 32, sharp=-20.0)
    v[:] = torch.randn(32, device=DEVICE)
    for causal in (False, True):
        try:
            torch.testing.assert_close(rung(q, k, v, causal), v, atol=1e-5, rtol=1e-5)
        except Unsupported:
            half = v.bfloat16()
            torch.testing.assert_close(rung(q.bfloat16(), k.bfloat16(), half, causal), half, atol=1e-2, rtol=1e-2)


def _torch_naive(q, k, v, causal=False, lse=False):
    s = (q / math.sqrt(q.shape[-1])) @ k.mT
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return s.softmax(-1) @ v


def _torch_flash(q, k, v, causal=False, lse=False):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]


LESSON = Lesson(
    reference=reference,
    inputs=inputs,
    extension=kernels,
    rungs=(attention_naive, attention_online, attention_register, attention_mma, attention_pipelined),
    checks=(
        case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
        case("one token: the softmax is 1, everything else is masked", B=1, H=1, S=1, D=16),
        case("one key past a tile of 32, a query past a tile of 8", B=1, H=1, S=33, D=20, lse=True),
        case("causal, and D that needs no padding", B=1, H=1, S=47, D=64, causal=True, lse=True),
        case("a tile of 64 and a tail; two heads, so that one head's keys are not the other's", B=1, H=2, S=70, D=32),
        case("causal past a tile: the second tile is masked for some warps", B=1, H=1, S=70, D=16, causal=True),
        case("scores past 88, where exp overflows", B=1, H=1, S=35, D=64, sharp=-20.0, lse=True),
        case("several tiles of everything", gib=0.5, B=2, H=3, S=517, D=128, lse=True),
        case("several tiles of everything, causal", gib=0.5, B=2, H=3, S=517, D=64, causal=True, lse=True),
        case("S = 2048, causal, D padded", gib=0.9, B=1, H=2, S=2048, D=80, causal=True),
        case("a whole tile of everything, on which accesses are counted", B=1, H=1, S=64, D=64),
    ),
    benches=(  # small: at 1 TFLOP/s the naive rung takes half a second
        {"B": 8, "H": 16, "S": 1024, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 2048, "D": 128, "causal": False},
        {"B": 4, "H": 16, "S": 2048, "D": 128, "causal": True},
        {"B": 2, "H": 16, "S": 4096, "D": 128, "causal": False},
        {"B": 1, "H": 4, "S": 16384, "D": 128, "causal": True},
        {"B": 4, "H": 32, "S": 2048, "D": 64, "causal": False},
    ),
    work=lambda B, H, S, D, dtype, causal=False, lse=False, sharp=1.0: Work(
        bytes=4 * B * H * S * D * dtype.itemsize, flops=4 * B * H * S * S * D // (2 if causal else 1)
    ),
    wrong=(
        Mutant("causal mask one key short", "scores_kernel", "j > i", "j >= i", "attention_naive", "nan"),
        Mutant(
            "exp of what may be 200", "softmax_rows_kernel", "m = row_max(m, 32)", "m = 0", "attention_naive", "nan"
        ),
        Mutant("lse without its log", "attention_online_kernel", "m + logf(l)", "m + l", "attention_online"),
        Mutant("o not rescaled", "attention_online_kernel", "a *= correction", "a *= 1.0f", "attention_online"),
        Mutant("l is not rescaled", "attention_online_kernel", "l * correction", "l", "attention_online"),
        Mutant("the tail's keys count", "attention_online_kernel", "start + lane < seen", "true", "attention_online"),
        Mutant(
            "a tile is overwritten while it is read",
            "attention_online_kernel",
            "__syncthreads();  // all have read the tile before this one",
            "",
            "attention_online",
            "race",
        ),
        Mutant("rows past the end are read", "fill", "row < live &&", "true &&", "attention_register", "out of bounds"),
        Mutant(
            "V takes K's place too early",
            "attention_register_kernel",
            "__syncthreads();  // K is done with",
            "",
            "attention_register",
            "race",
        ),
        Mutant("causal mask off by one", "attention_mma_kernel", "col > row", "col > row + 1", "attention_pipelined"),
        Mutant(
            "a wait for all but the last copy",
            "attention_mma_kernel",
            "__pipeline_wait_prior(0)",
            "__pipeline_wait_prior(1)",
            "attention_pipelined",
            "uninitialised",
        ),
        Mutant(
            "a copy arrives for the thread that made it",
            "attention_mma_kernel",
            "__syncthreads();  // what every thread copied is there for all",
            "",
            "attention_pipelined",
            "race",
        ),
        Mutant("halves of P swapped", "as_left", "pack<T>(c[m][2 * k +", "pack<T>(c[m][2 * k + 1 -", "attention_mma"),
        Mutant("l of one lane in four", "attention_mma_kernel", "__shfl_xor_sync(~0u, sum, 1)", "0", "attention_mma"),
    ),
    properties=(memory_grows_with_s, mean_of_values),
    peers={"torch naive": _torch_naive, "SDPA flash": _torch_flash},
    claims={
        "attention_online_kernel": ("no spills",),
        "attention_register_kernel": ("no spills",),
        "attention_mma_kernel": ("mma", "cp.async", "16-byte stores", "no spills"),
    },
    counts={attention_online: {"wavefronts a shared access": 1.0}},
    refuses=(
        Refusal("S of k differs", lambda f: f(*_bad(lambda q, k, v: (q, k[:, :, :3], v))), ValueError, "k has shape"),
        Refusal("v of another dtype", lambda f: f(*_bad(lambda q, k, v: (q, k, v.half()))), TypeError, "v is"),
        Refusal("no heads", lambda f: f(*_bad(lambda q, k, v: (q[0], k[0], v[0]))), ValueError, "3 dimension"),
        Refusal("D past 128", lambda f: f(*inputs(1, 1, 4, 130)[:3]), ValueError, "at most 128"),
        Refusal("transposed", lambda f: f(*_bad(lambda q, k, v: (q.mT, k.mT, v.mT))), ValueError, "contiguous"),
        Refusal("gradient lost", lambda f: f(*_bad(lambda q, k, v: (q.requires_grad_(), k, v))), ValueError, "grad"),
    ),
    # Not the sharp case: where P is one-hot, dS = P (dP - delta) is 0, and autograd's delta, a sum of P dP, cancels to
    # the bit; delta from dO and O is the same number rounded elsewhere, and leaves an error of eps |dP|.
    # Nor fewer than seven tokens: with one, dP - delta is 0, with two it nearly cancels, and delta has O's rounding.
    grad=Grad(attention, inputs=lambda S, lse=False, sharp=1.0, **shape: inputs(S=S and max(S, 7), **shape)),
    cpu_model=attention_twin,
    factor=2,  # for the same reason: delta inherits O's rounding to 16 bits, and dQ shows it
)


def _bad(change):
    return change(*inputs(1, 2, 5, 16)[:3])


if __name__ == "__main__":
    LESSON.main()
