"""Attention implementations compared: time and peak memory in one table
=====================================================================
The lesson times every implementation of this course and those that people use instead. It times forward and backward in
the same rounds, in bf16, causal or not. S goes from 512 to 16384 with 16384 tokens in all. D is 64 or 128, with 2048
features in all. FLOPs are those of the op, whatever an implementation skips: 4 B H S^2 D forward, 2.5 times that
backward, half of it if causal. So within a table work grows only with S, and TFLOP/s should rise to a plateau. Short
sequences measure launches, tails and half-filled GPUs. Long ones measure the inner loop. A table has no figure where an
implementation cannot run, for example because its scores do not fit into memory. The run prints each reason.

Predict before you run, for D = 128 at S = 512 and 16384. Which lines cross? Naive attention moves S^2 elements for
S^2 D FLOPs (lesson 1). How do its TFLOP/s change with S where bytes decide? Which implementations lose most with a
causal mask? At D = 64 a FLOP of a matmul has twice as many exponentials beside it (lesson 4). Which implementations
lose least by that? Whose peak memory grows with S?

The numbers before the names of ours are older than the order of the lessons. `1` is lesson 1, `2 v1` is lesson 3, and
`3` is lesson 4. `4 all options` is lesson 5, and `5 flash attention` is lesson 7. `every rung` has the lessons' own
numbers.

New words (GLOSSARY.md): error budget.
You will learn: to compare fairly: answers checked first, interleaved timing, the same work, absent peers named.
Run it:    python3 course.py run lesson14_compare_attention          minutes on a GPU; without one, the claims alone
"""

import math
from functools import cache
from importlib import import_module

from lessonkit import DEVICE, About, Steps, Table, Unsupported, check, memory, rows, specimen, timing
from lessonkit.pages import lengths

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import course_ops
from problems.attention import inputs, reference

attention_steps = specimen("day4_replace_op.lesson01_attention", "attention_steps")
attention_fused_softmax = specimen("day4_replace_op.lesson01_attention", "attention_fused_softmax")
attention_recomputed = specimen("day4_replace_op.lesson01_attention", "attention_recomputed")
flash_v1 = specimen("day4_replace_op.lesson03_flash_v1", "flash_v1")
swapped = specimen("day4_replace_op.lesson04_flash_v2", "swapped")
flash_v2 = specimen("day4_replace_op.lesson04_flash_v2", "flash_v2")
attention = specimen("day4_replace_op.lesson05_flash_options", "attention")
flash_attention = specimen("day4_replace_op.lesson07_flash_backward", "flash_attention")
GPU = DEVICE.type == "cuda"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SLACK = 8  # a peer may round more often than PyTorch does (as in `bench`), but must compute the same thing
CUDA, KITTENS = "cuda_src.19_flash_attention_v1", "day3_matmul_tk.lesson15_thunderkittens_attention"
CUDA_BACKWARD = "cuda_src.20_flash_attention_backward"


def _by_hand(q, k, v, causal):
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return s.softmax(-1) @ v


def _sdpa(backend):
    def call(q, k, v, causal):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


@cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    # Never undone: the backward is timed many times, and may be compiled as late as its first run.
    import_module("torch._functorch.config").donated_buffer = False
    return torch.compile(flex_attention)


@cache
def _causal_blocks(S):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=DEVICE)


def _flex_attention(q, k, v, causal):
    if not GPU:
        raise Unsupported("without a compiler for the GPU it writes the scores out")
    blocks = _causal_blocks(q.shape[2]) if causal else None
    with import_module("torch._dynamo.config").patch(recompile_limit=64):  # 8 are the default; there are 12 and more
        return _flex()(q, k, v, block_mask=blocks)


def _xformers(q, k, v, causal):
    ops = import_module("xformers.ops")
    mask = ops.LowerTriangularMask() if causal else None
    return ops.memory_efficient_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_bias=mask).transpose(1, 2)


def _flash_attn(module):
    def call(q, k, v, causal):
        found = import_module(module).flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # some return (out, lse)

    return call


def _only_full(fn):
    """A rung of lessons 1 to 4, which have no causal mask that skips."""

    def call(q, k, v, causal):
        if causal:
            raise Unsupported("not causal before lesson 5")
        return fn(q, k, v)[0]

    return call


def _of_lesson(name, rung):
    """A rung of a lesson; Unsupported with the reason where this machine cannot run it."""

    def call(q, k, v, causal):
        lesson = import_module(name).LESSON
        fn = next(r for r in lesson.rungs if r.__name__ == rung)
        if not GPU or (why := check.cannot_run(lesson, fn, lesson.checks[0], lesson.bench_dtype)):
            raise Unsupported(why if GPU else "its own lesson checks it without a GPU")
        found = fn(q, k, v, causal)
        return found[0] if isinstance(found, tuple) else found

    return call


def _operator(q, k, v, causal):
    return course_ops.attention(q, k, v, causal=causal)


OURS = {
    "1 steps": attention_steps,
    "1 fused softmax": attention_fused_softmax,
    "1 recomputed": attention_recomputed,
    "2 v1": _only_full(flash_v1),
    "3 swapped": _only_full(swapped),
    "3 v2": _only_full(flash_v2),
    "4 all options": lambda q, k, v, causal: attention(q, k, v, causal)[0],
    "course_ops": _operator,
    "CUDA v1, scalar": _of_lesson(CUDA, "attention_register"),
    "CUDA v1, tensor cores": _of_lesson(CUDA, "attention_pipelined"),
    "ThunderKittens": _of_lesson(KITTENS, "attention_ahead"),
}
PEERS = {
    "PyTorch by hand": _by_hand,
    "SDPA math": _sdpa(SDPBackend.MATH),
    "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": _flex_attention,
    "xFormers": _xformers,
    "flash-attn 2": _flash_attn("flash_attn"),
    "flash-attn 3": _flash_attn("flash_attn_interface"),
    "flash-attn 4": _flash_attn("flash_attn.cute"),
}


class _CudaAttention(torch.autograd.Function):
    """The last rungs of the two programs, forward and backward, as one differentiable op."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        o, lse = import_module(CUDA).attention_pipelined(q.detach(), k.detach(), v.detach(), causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse = (t.detach() for t in ctx.saved_tensors)
        backward = import_module(CUDA_BACKWARD).attention_backward_mma
        return *backward(q, k, v, o, lse, dout.contiguous(), ctx.causal), None


def _cuda_trained(q, k, v, causal):
    if not GPU:
        raise Unsupported("its own lesson checks it without a GPU")
    return _CudaAttention.apply(q, k, v, causal)


TRAINED = {  # with a gradient; on a Hopper GPU course_ops has kernels of its own
    "5 flash attention": flash_attention,
    "course_ops": _operator,
    "CUDA v1, tensor cores": _cuda_trained,
} | PEERS


def _inputs(S, D):
    torch.manual_seed(0)
    B, H, dtype = (16384 // S, 2048 // D, torch.bfloat16) if GPU else (1, 2, torch.float32)
    q, k, v, *_ = inputs(B, H, S, D, dtype=dtype)
    return [*(t.requires_grad_() for t in (q, k, v)), torch.randn_like(q) + 0.5]


def _truth(q, k, v, grad, causal, backward):
    """The first head's answer in float64, and PyTorch's: their difference is the error budget of all."""

    def answer(widen):
        parts = [t[:1, :1].detach() for t in (q, k, v, grad)]
        *leaves, g = (t.double() if widen else t for t in parts)
        leaves = [t.requires_grad_(backward) for t in leaves]
        out = reference(*leaves, causal)[0]
        return torch.autograd.grad(out, leaves, g) if backward else (out,)

    return check.Truth((), answer(True), answer(False), SLACK)


def _contender(fn, q, k, v, grad, causal, backward):
    """(what is timed, what is checked, what is measured for memory)."""
    if not backward:
        args = [t.detach() for t in (q, k, v)]
        return (lambda: fn(*args, causal),) * 3
    out = fn(q, k, v, causal)

    def gradients(out=out):
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return gradients, gradients, lambda: torch.autograd.grad(fn(q, k, v, causal), (q, k, v), grad)


def _one_length(S, D, causal, backward, absent):
    """{name: (call, peak bytes)} of the implementations that run here and answer correctly."""
    q, k, v, grad = _inputs(S, D)
    truth, entered = _truth(q, k, v, grad, causal, backward), {}
    for name, fn in (TRAINED if backward else OURS | PEERS).items():
        try:
            timed, answer, whole = _contender(fn, q, k, v, grad, causal, backward)
            check.compare(truth, tuple(t[:1, :1] for t in check.tensors(answer())))
            whole()
            entered[name] = timed, memory.peak_bytes(whole)
        except Exception as why:  # absent, too large, or a wrong peer: it is named, and the others are timed
            if isinstance(why, check.Rejected) and name not in PEERS:
                raise
            said = f"{type(why).__name__}: {str(why).splitlines()[0][:100]}"
            absent.setdefault(f"  {name} left out: {said}", []).append(S)
    return entered


def _comparison(D, causal, backward):
    table, absent = [], {}
    flops = (10 if backward else 4) * 16384 * 2048 // (2 if causal else 1)  # times S
    for S in LENGTHS:
        entered = _one_length(S, D, causal, backward, absent)
        times = timing.measure({name: call for name, (call, _) in entered.items()}, budget_s=0.5)
        for name, (_, peak) in entered.items():
            ms = times[name].p50
            row = {"attention": name, "S": S, "ms": f"{ms:.4g}", "TFLOP/s": f"{flops * S / ms * 1e-9:.1f}"}
            table.append(row | {"peak MB": f"{peak / 1e6:.1f}"})
        del entered
        torch.cuda.empty_cache()
    for line, where in absent.items():
        print(f"{line} (S = {', '.join(map(str, where))})")
    return table


def _step(D, causal, backward):
    def step():
        if not GPU:
            print("  needs a GPU")
            return None
        table = _comparison(D, causal, backward)
        note = f"bf16, 16384 tokens, {2048 // D} heads of {D}. Peak: beyond the inputs, forward"
        note += " and backward." if backward else "."
        return Table(step.__name__.replace("_", " "), table, note, x="S", y="TFLOP/s", by="attention")

    step.__name__ = f"{'backward' if backward else 'forward'}_{D}{'_causal' if causal else ''}"
    kind = "gradients" if backward else "outputs"
    step.__doc__ = f"D = {D}, {'causal' if causal else 'all keys'}: {kind} within the budget, then timed in turns."
    return step


def agree():
    """All answers agree within 8 times PyTorch's error; flash attention keeps O and lse, naive attention S x S."""
    table, absent = [], {}
    for backward in (False, True):
        for causal in (False, True):
            entered = _one_length(128, 32, causal, backward, absent)
            for name, (_, peak) in entered.items():
                table.append({"pass": "backward" if backward else "forward", "causal": causal, "attention": name})
                table[-1]["peak KB"] = f"{peak / 1e3:.0f}"
            assert set(entered) >= ({"5 flash attention"} if backward else {"1 steps", "4 all options"})
    print("\n".join(absent))
    keep = {row["attention"]: float(row["peak KB"]) for row in table if row["pass"] == "forward"}
    assert keep["4 all options"] < keep["1 steps"]
    return None if GPU else Table("agreement", table, "S = 128, D = 32: checked against float64.")


LADDERS = (
    "lesson01_attention",
    "lesson03_flash_v1",
    "lesson04_flash_v2",
    "lesson05_flash_options",
    "lesson08_flash_hopper",
)


def every_rung(folder):
    """Every rung of the day's ladders at S = 4096, D = 128, from one GPU's rows."""
    from lessonkit.lesson import kernels
    from lessonkit.measure.stale import Today

    table, today = [], Today(kernels())
    for lesson in LADDERS:
        for row in rows.read(folder / f"day4_replace_op.{lesson}.csv"):
            words = row.shape.split()
            if row.kind == "rung" and {"S=4096", "D=128"} <= set(words) and "H_kv" not in row.shape:
                mask = "causal" if "causal=True" in words else "all keys"
                name = f"{lesson[6:].split('_')[0]} {row.rung}{' *' * bool(today.why_old(row))}"
                table.append({"rung": name, "keys": mask, "shape": row.shape})
                table[-1] |= {
                    "TFLOP/s": f"{row.tflop_per_s:.0f}",
                    "over the best peer": f"{row.ratio_to_best_peer:.2f}",
                }
    note = (
        "Each rung in the rounds of its own lesson, in bf16; lessons 1 to 4 know no causal mask that skips. A star: "
        "measured before the code of that rung changed; today's code waits for a GPU."
    )
    return Table("every rung", table, note, x="rung", y="TFLOP/s", by="keys") if table else None


FORWARD = tuple(_step(D, causal, False) for D in (64, 128) for causal in (False, True))
BACKWARD = tuple(_step(D, causal, True) for D in (64, 128) for causal in (False, True))
TABLES = [lengths.compared(__name__, step.__name__.replace("_", " "), PEERS) for step in (*FORWARD, *BACKWARD)]

# The answers, from the rows of an H200. At D = 128 flash-attn 4 overtakes cuDNN between S = 1024 and 2048.
# FlexAttention is level with `4 all options` at 512, and behind from 1024 on. Naive attention stays nearly level, since
# bytes and FLOPs both grow with S^2. A causal mask costs most where all scores are computed: PyTorch by hand keeps a
# quarter of its rate. At D = 64 and S = 16384 the scalar kernel and `2 v1` gain. Of the others CUDA v1 on tensor cores
# loses least, 4%, where flash-attn 4 loses a fifth. Peak memory grows with S for those that keep scores: `1 steps`, `1
# fused softmax`, PyTorch by hand, SDPA math.
LESSON = Steps(
    (agree, *FORWARD, *BACKWARD),
    about=About(
        teaches="all attention implementations in one table: forward, backward, time, peak memory",
        hours=0.75,
        star=True,
    ),
    compares=(every_rung, *TABLES, lengths.memory(__name__, ("forward 128", "backward 128"))),
    alone=GPU,
)

if __name__ == "__main__":
    LESSON.main()
