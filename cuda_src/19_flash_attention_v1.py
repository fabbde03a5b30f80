"""Flash attention, forward, in CUDA C++: naive, online softmax, register tiles, tensor cores
==========================================================================================
The kernels and their predictions are in 19_flash_attention_v1.cu and its headers. This file wraps them as functions of
tensors and checks them against PyTorch. On a GPU nvcc builds the kernels. Elsewhere g++ builds them, and the emulator
watches every address, barrier and race. There mma and ldmatrix are written out in shuffles.

Run it:    python3 course.py run 19_flash_attention_v1
Check it:  python3 course.py check 19_flash_attention_v1
Time it:   python3 course.py bench 19_flash_attention_v1
"""

import math

from lessonkit import DEVICE, About, Lesson, Mutant, Prediction, Refusal, Unsupported, case, cuda, expect

import torch
import torch.nn.functional as F

from problems import attention_plain
from problems.attention_plain import PROBLEM_LSE

kernels = cuda.extension(__file__)  # 19_flash_attention_v1.cu, built at the first call


def attention_naive(q, k, v, causal=False):
    """q, k, v [B, H, S, D] -> o as q, lse [B, H, S] fp32; S x S fp32 of scratch a head."""
    B, H, S, _ = _expect_qkv(q, k, v)
    if B * H * S * S > 2**32:
        raise Unsupported(f"the scores alone would take {B * H * S * S * 4 / 2**30:.0f} GiB")
    return _run("attention_naive", q, k, v, causal, torch.empty(B * H, S, S, device=q.device))


def attention_online(q, k, v, causal=False):
    """As attention_naive, with no scratch: tiles of 32 keys, online softmax. D up to 128."""
    _expect_qkv(q, k, v)
    return _run("attention_online", q, k, v, causal)


def attention_register(q, k, v, causal=False):
    """As attention_online; a thread owns 8 queries x 4 keys and 8 queries x D/16 columns."""
    _expect_qkv(q, k, v)
    return _run("attention_register", q, k, v, causal)


def attention_mma(q, k, v, causal=False):
    """As attention_register on tensor cores, fp16 and bf16; D other than 64 and 128 is padded with zeros in a copy."""
    _expect_qkv(q, k, v)
    if q.dtype == torch.float32:
        raise Unsupported("tensor cores take 16-bit inputs")
    return _run_padded("attention_mma", q, k, v, causal)


def attention_pipelined(q, k, v, causal=False):
    """As attention_mma, K and V double-buffered; fp32 falls back to attention_register."""
    _expect_qkv(q, k, v)
    if q.dtype == torch.float32:
        return _run("attention_register", q, k, v, causal)
    return _run_padded("attention_pipelined", q, k, v, causal)


def _expect_qkv(q, k, v):
    """The checks of every rung; returns B, H, S, D."""
    expect(q=q, k=k, v=v, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    if q.shape[-1] > 128:
        raise ValueError(f"q has D = {q.shape[-1]}, expected at most 128: registers hold no longer row of the output")
    return q.shape


def _run(name, q, k, v, causal, *scratch, scale=None):
    B, H, S, D = q.shape
    o, sums = torch.empty_like(q), torch.empty(B, H, S, device=q.device)
    if q.numel():
        launch = getattr(kernels, f"{name}_{str(q.dtype).removeprefix('torch.')}")
        launch(q, k, v, o, sums, *scratch, B * H, S, D, causal, scale or 1 / math.sqrt(D))
    return o, sums


def _pad_width(D, *tensors):
    """The tensors with zeros appended to their last dimension up to 64 or 128: zeros add nothing to a product."""
    return [F.pad(t, (0, (64 if D <= 64 else 128) - D)) if D not in (64, 128) else t for t in tensors]


def _run_padded(name, q, k, v, causal):
    D = q.shape[-1]
    padded = _pad_width(D, q, k, v)
    o, sums = _run(name, *padded, causal, scale=1 / math.sqrt(max(D, 1)))
    return o[..., :D].contiguous(), sums


def attention_twin(q, k, v, causal=False):
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
    return o, sums


def inputs(B, H, S, D, causal=False, sharp=1.0, dtype=torch.float32):
    q, k, v, causal = attention_plain.inputs(B, H, S, D, causal, dtype)
    if dtype == torch.float32:  # in 16 bits PyTorch's own scores would be off by 0.5, and no error could be told
        q *= sharp
    return q, k, v, causal


def memory_grows_with_s(rung):
    """Every rung but the naive one allocates its outputs and nothing else: 4 S bytes of lse a head beside o."""
    if DEVICE.type != "cuda":
        raise Unsupported("allocated bytes are counted on a GPU")
    if rung is attention_naive:
        raise Unsupported("this one keeps the scores")
    q, k, v, _ = inputs(1, 4, 4096, 64, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rung(q, k, v)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= q.nbytes + 4 * 4 * 4096 + 2048, f"{extra} bytes for an output of {q.nbytes}"


def _torch_naive(q, k, v, causal=False):
    """o alone: these scores have 16 bits, and an lse from them is off by 1e-3 and more. None is not compared."""
    s = (q / math.sqrt(q.shape[-1])) @ k.mT
    if causal:
        s.masked_fill_(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return s.softmax(-1) @ v, None


FULL = {"B": 4, "H": 16, "S": 2048, "D": 128, "causal": False}

LESSON = Lesson(
    about=About(
        teaches="naive attention, online softmax in tiles, tensor cores; where the scalar version loses, and "
        "what it saves",
        hours=1.75,
        operator="attention",
        language="CUDA C++",
        pictures=("fragment",),
    ),
    problem=PROBLEM_LSE,
    inputs=inputs,
    work=lambda sharp=1.0, **shape: attention_plain.work(**shape),
    extension=kernels,
    rungs=(attention_naive, attention_online, attention_register, attention_mma, attention_pipelined),
    predicted=(
        Prediction(
            rung=attention_online,
            at=FULL,
            tflop_per_s=6.4,
            why="The count takes a wavefront for each word; neighbouring words probably come in one wide load.",
        ),
        Prediction(
            rung=attention_register,
            at=FULL,
            times=(4, 5),
            over=attention_online,
            why="The count has the two matmuls alone; the softmax, P's way through shared memory and the barriers "
            "come on top.",
        ),
        Prediction(rung=attention_mma, at=FULL, tflop_per_s=(310, 540)),
        Prediction(rung=attention_pipelined, at=FULL, times=1.2, over=attention_mma, why="The cause is not known."),
    ),
    checks=(
        *PROBLEM_LSE.checks[:-1],
        case("scores past 88, where exp overflows", B=1, H=1, S=35, D=64, sharp=-20.0),
        PROBLEM_LSE.checks[-1],  # the last one: on it accesses are counted
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
    properties=(*PROBLEM_LSE.properties, memory_grows_with_s),
    peers=PROBLEM_LSE.peers | {"torch naive": _torch_naive},
    claims={
        "attention_online_kernel": ("no spills",),
        "attention_register_kernel": ("no spills",),
        "attention_mma_kernel": ("mma", "cp.async", "16-byte stores", "no spills"),
    },
    counts={attention_online: {"wavefronts a shared access": 1.0}},
    refuses=(
        *PROBLEM_LSE.refuses,
        Refusal("D past 128", lambda f: f(*inputs(1, 1, 4, 130)[:3]), ValueError, "at most 128"),
    ),
    cpu_model=attention_twin,
)


if __name__ == "__main__":
    LESSON.main()
