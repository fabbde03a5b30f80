"""Linear layer with GELU: y = gelu(x W^T + bias) + residual, x [M, K], W [N, K], bias [N], residual [M, N] or None.

The tanh form of GELU. PROBLEM_BACKWARD: from dy, x, w and z = x W^T + bias to dx, dw and dbias.
"""

import math

from lessonkit import DEVICE, Problem, Refusal, Work, by_inductor, by_search, case

import torch
import torch.nn.functional as F


def reference(x, w, bias, residual=None):
    y = F.gelu(F.linear(x, w, bias), approximate="tanh")  # cuBLASLt with the bias: writes MN; gelu: reads MN, writes MN
    return y if residual is None else y + residual  # reads 2MN, writes MN


def inputs(M, N, K, residual=False, dtype=torch.float32, pad=0):
    # x W^T spreads by about 1.5 around a bias of -3 to 3: GELU's bend, where its two sides differ most. A bias twice as
    # wide shows a column taken for its neighbour, a residual of mean 2 one that is added before the GELU. pad: of rows.
    def matrix(rows, cols, scale, mean=0.0):
        return (torch.randn(rows, cols + pad, device=DEVICE) * scale + mean).to(dtype)[:, :cols]

    bias = (torch.rand(N, device=DEVICE) * 6 - 3).to(dtype)
    x, w = matrix(M, K, 1.0), matrix(N, K, 1.5 / math.sqrt(max(1, K)))
    return x, w, bias, matrix(M, N, 1.0, 2.0) if residual else None


def rows_do_not_mix(rung):
    """A NaN in x makes its own row NaN and no other; one in the residual its own number and no other."""
    args = x, _, _, residual = inputs(5, 40, 24, residual=True, dtype=torch.float16)
    x[1, 3], residual[2, 7] = math.nan, math.nan
    assert torch.equal(rung(*args).isnan(), reference(*args).isnan())


def _cublaslt(x, w, bias, residual):
    y = torch._addmm_activation(bias, x, w.t(), use_gelu=True)
    return y if residual is None else y + residual


PEERS = {
    "torch": reference,  # a product, and one kernel more; so is torch.compile
    "cuBLASLt": _cublaslt,  # the library's own epilogue
}
# A search compiles and times dozens of kernels for each shape: too long for all shapes of the zoo. So day 3's lesson 4
# has this peer, at the shapes that it times, and `course_ops.linear` has not.
SEARCHED = {"torch.compile max-autotune": by_search(reference)}
# fmt: off
REFUSES = (
    Refusal("W as [K, N]", lambda f: f(inputs(2, 8, 3)[0], *inputs(2, 3, 8)[1:]), ValueError, "w \\[N, K\\]"),
    Refusal("bias too short", lambda f: f(*inputs(2, 8, 3)[:2], *inputs(2, 7, 3)[2:]), ValueError, "'bias': \\(7,"),
    Refusal("another shape", lambda f: f(*inputs(2, 8, 3)[:3], inputs(3, 8, 3, True)[3]), ValueError, "residual"),
    Refusal("dtypes", lambda f: f(inputs(2, 8, 3)[0].half(), *inputs(2, 8, 3)[1:]), TypeError, "w is torch.float32"),
    Refusal("no gradient", lambda f: f(inputs(2, 8, 3)[0].requires_grad_(), *inputs(2, 8, 3)[1:]), ValueError, "grad"),
)
# fmt: on
PROBLEM = Problem(
    reference=reference,
    inputs=inputs,
    checks=(
        case("no rows", M=0, N=5, K=8),
        case("nothing to add: gelu(bias), and the residual", M=3, N=5, K=0, residual=True),
        case("primes: every mask is live, and no row begins at 16 bytes", M=37, N=131, K=71, residual=True),
        case("rows longer than used; TMA in 16 bits, cut in M, N and K", M=131, N=136, K=72, pad=8),
        case("wide tiles, more of them than programs", M=136, N=520, K=16, residual=True),
        case("more of them than a GPU has SMs", gib=0.1, M=2060, N=4104, K=16),
        case("a row of y past element 2^31", gib=80, M=2**19 + 3, N=4104, K=8),
        case("the bytes are counted here", M=128, N=128, K=16, residual=True),
    ),
    benches=tuple(
        {"M": 8192, "N": n, "K": k, "residual": r}
        for n, k, r in ((4096, 1024, False), (8192, 2048, False), (14336, 4096, False), (4096, 4096, True))
    ),
    work=lambda M, N, K, dtype, residual=False, pad=0: Work(
        bytes=(M * K + N * K + N + M * N * (1 + residual)) * dtype.itemsize, flops=2 * M * N * K
    ),
    peers=PEERS,
    properties=(rows_do_not_mix,),
    refuses=REFUSES,
)


def reference_backward(dy, x, w, z):
    dz = torch.ops.aten.gelu_backward(dy, z, approximate="tanh")  # reads 2MN, writes MN
    return dz @ w, dz.t() @ x, dz.sum(0)  # the products; the sum reads MN


def inputs_backward(M, N, K, dtype=torch.float32, pad=0):
    # The forward's z, in GELU's bend, where the slope goes from -0.13 to 1.13. The mean of dy is not 0. So sums over
    # rows are no noise, and a row left out or counted twice moves dbias.
    x, w, bias, _ = inputs(M, N, K, dtype=dtype, pad=pad)
    dy = torch.randn(M, N + pad, device=DEVICE).add(0.5).bfloat16().to(dtype)[:, :N]
    return dy, x, w, F.linear(x, w, bias)


# fmt: off
_asked = inputs_backward
REFUSES_BACKWARD = (
    Refusal("z of another shape", lambda f: f(*_asked(2, 8, 3)[:3], _asked(3, 8, 3)[3]), ValueError, "z has shape"),
    Refusal("w of another K", lambda f: f(*_asked(2, 8, 3)[:2], *_asked(2, 8, 4)[2:]), ValueError, "w \\(8, 4"),
    Refusal("z transposed", lambda f: f(*_asked(8, 8, 3)[:3], _asked(8, 8, 3)[3].t()), ValueError, "z has stride"),
    Refusal("dtypes differ", lambda f: f(_asked(2, 8, 3)[0].half(), *_asked(2, 8, 3)[1:]), TypeError, "z is"),
)
# fmt: on
PROBLEM_BACKWARD = Problem(
    reference=reference_backward,
    inputs=inputs_backward,
    checks=(
        case("no rows: dw and dbias are 0", M=0, N=5, K=8),
        case("no inputs", M=3, N=5, K=0),
        case("one of each", M=1, N=1, K=1),
        case("primes; a second tile of rows and of columns", M=37, N=131, K=23),
        case("dy's rows longer than used; TMA in 16 bits", M=40, N=136, K=72, pad=8),
        case("more tiles of rows than programs where it is interpreted", M=1100, N=8, K=8),
        case("more tiles of rows than a GPU has programs", gib=0.1, M=4000, N=2056, K=8),
        case("the bytes are counted here", M=128, N=128, K=8),
    ),
    benches=tuple({"M": 8192, "N": n, "K": k} for n, k in ((4096, 1024), (8192, 2048), (14336, 4096))),
    work=lambda M, N, K, dtype, pad=0: Work(
        bytes=(2 * M * N + 2 * M * K + 2 * N * K + N) * dtype.itemsize, flops=4 * M * N * K
    ),
    peers={"torch": reference_backward, "torch.compile": by_inductor(reference_backward)},
    refuses=REFUSES_BACKWARD,
)
