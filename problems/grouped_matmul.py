"""Grouped matmul: y[rows of e] = x[rows of e] @ w[e], x [T, K], w [E, K, N], offsets [E + 1] int32 -> y [T, N].

Rows offsets[e] to offsets[e + 1] are e's. Rows of no group, before the first offset and from the last on, are zeros.
"""

import functools
import math

from lessonkit import DEVICE, Problem, Refusal, Unsupported, Work, case

import torch


def reference(x, w, offsets):
    y, ends = x.new_empty(x.shape[0], w.shape[2]), offsets.tolist()
    y[: ends[0]], y[ends[-1] :] = 0, 0  # rows of no group
    for e in range(w.shape[0]):
        y[ends[e] : ends[e + 1]] = x[ends[e] : ends[e + 1]] @ w[e]
    return y


def inputs(T, E, K, N, dtype=torch.float32, even=False, transposed=False, before=0, after=0):
    # Experts are not chosen equally often, and one is never chosen: the next begins where it ends. With even=True all
    # have as many rows, as in a batched matmul. With transposed=True w[e] is the .t() of a contiguous [N, K], as in
    # nn.Linear. There are `before` and `after` rows of no group.
    chance = torch.randn(E).mul(0.5).exp()
    chance[E // 2 : E // 2 + (E > 2)] = 0
    grouped = T - before - after
    sizes = torch.full((E,), grouped // E)
    if grouped and not even:
        sizes = torch.multinomial(chance, grouped, replacement=True).bincount(minlength=E)
    offsets = torch.cat([sizes[:1] * 0, sizes.cumsum(0)]).add(before).to(torch.int32).to(DEVICE)
    w = torch.randn(E, N, K, device=DEVICE).transpose(1, 2) if transposed else torch.randn(E, K, N, device=DEVICE)
    return torch.randn(T, K, device=DEVICE).to(dtype), w.mul_(1 / math.sqrt(max(K, 1))).to(dtype), offsets


def a_group_is_a_matmul(rung):
    """A group is x @ w[0]; NaN and inf of other groups stay there, also where a tile runs into the next."""
    x, w, _ = inputs(40, 3, 24, 16)
    x[13:], w[1] = torch.nan, torch.inf
    ends = torch.tensor([0, 13, 13, 40], dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(rung(x, w, ends)[:13], x[:13] @ w[0])


def _bmm(x, w, offsets):
    if not _even(offsets):
        raise Unsupported("groups differ in size")
    return torch.bmm(x.view(w.shape[0], -1, w.shape[1]), w).view(-1, w.shape[2])


@functools.lru_cache(maxsize=1)
def _even(offsets):  # remembered for the tensor at hand: the timed calls of bmm need not look
    return len(set(offsets.diff().tolist())) == 1


_four = functools.partial(inputs, 4, 2, 4, 4)

CHECKS = (
    case("no tokens", T=0, E=3, K=4, N=5),
    case("nothing to add up: zeros", T=5, E=2, K=0, N=8),
    case("one of each", T=1, E=1, K=1, N=1),
    case("more experts than tokens, odd sizes", T=5, E=7, K=19, N=37),
    case("all masks live, groups above and below a tile", T=151, E=3, K=70, N=33),
    case("w transposed, whole 16 bytes", T=90, E=5, K=72, N=40, transposed=True),
    case("a batched matmul", T=48, E=3, K=32, N=72, even=True),
    case("rows of no group at both ends, whole tiles and parts", T=230, E=3, K=24, N=72, before=140, after=17),
    case("no row of any group", T=7, E=2, K=8, N=8, before=3, after=4),
    case("offsets past 2^31 in w", gib=60, T=70, E=9, K=2**14, N=2**14 + 8),
    case("more tiles than programs, as long as 16 bytes demand", T=160, E=6, K=40, N=136),
)
PEERS = {
    "torch.mm, a loop": reference,
    "torch.bmm": _bmm,
    "torch._grouped_mm": lambda x, w, offsets: torch._grouped_mm(x, w, offs=offsets[1:]),
}
REFUSES = (
    Refusal("K differs", lambda f: f(_four()[0], *inputs(4, 2, 5, 4)[1:]), ValueError, "x has 4 columns"),
    Refusal("an offset short", lambda f: f(*_four()[:2], inputs(4, 1, 4, 4)[2]), ValueError, "2 offsets"),
    Refusal("long offsets", lambda f: f(*_four()[:2], _four()[2].long()), TypeError, "int64"),
    Refusal("one weight", lambda f: f(_four()[0], _four()[0], _four()[2]), ValueError, "expected 3"),
    Refusal("gradient lost", lambda f: f(_four()[0].requires_grad_(), *_four()[1:]), ValueError, "requires grad"),
)
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    checks=CHECKS,
    benches=(
        {"T": 8192, "E": 8, "K": 4096, "N": 14336},  # Mixtral 8x7B, 4096 tokens, two experts each
        {"T": 8192, "E": 8, "K": 4096, "N": 14336, "transposed": True},
        {"T": 32768, "E": 128, "K": 2048, "N": 768},  # Qwen3 30B-A3B, 4096 tokens, eight experts each
        {"T": 49152, "E": 64, "K": 2048, "N": 1408},  # DeepSeek-V2-Lite, 8192 tokens, six experts each
        {"T": 64, "E": 8, "K": 4096, "N": 14336, "even": True},  # 32 tokens to be decoded; no expert without one
        {"T": 16384, "E": 16, "K": 4096, "N": 4096, "even": True},
        {"T": 16384, "E": 64, "K": 1024, "N": 1024, "even": True},
    ),
    work=lambda T, E, K, N, dtype, **_: Work((T * K + E * K * N + T * N) * dtype.itemsize, 2 * T * K * N),
    peers=PEERS,
    properties=(a_group_is_a_matmul,),
    refuses=REFUSES,
)


def reference_backward(dy, w, offsets):
    return reference(dy, w.transpose(1, 2), offsets)


def inputs_backward(T, E, K, N, dtype=torch.float32, **options):
    _, w, offsets = inputs(T, E, K, N, dtype, **options)
    return torch.randn(T, N, device=DEVICE).to(dtype), w, offsets


# dx alone: course_ops has no gradient of w. Asked of course_ops alone; its tests hold the small cases.
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    work=lambda T, E, K, N, dtype, **_: Work((T * K + E * K * N + T * N) * dtype.itemsize, 2 * T * K * N),
    peers={
        "torch.mm, a loop": reference_backward,
        "torch.bmm": lambda dy, w, offsets: _bmm(dy, w.transpose(1, 2), offsets),
        "torch._grouped_mm": lambda dy, w, offsets: torch._grouped_mm(dy, w.transpose(1, 2), offs=offsets[1:]),
    },
)
