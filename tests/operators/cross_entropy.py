"""What is asked of course_ops' cross_entropy, and mutants of its kernels."""

from lessonkit import DEVICE, Lesson, Mutant, case, num_sms

import torch

from course_ops.cross_entropy import FORWARD as FORWARDS
from course_ops.kernels import cross_entropy as kernels
from course_ops.kernels._rows import Rows, choose
from problems.cross_entropy import PROBLEM, PROBLEM_BACKWARD, inputs_backward

IGNORE = -100


def cross_entropy(logits, targets):
    """The kernel that course_ops chooses; the operator itself would compute CPU tensors with PyTorch."""
    loss, lse = choose(FORWARDS, Rows.of(logits))(logits, targets, IGNORE)
    return loss, lse[:, 0]


def cross_entropy_backward(dloss, logits, targets, lse):
    # Rows as far apart as the logits', so that both start at the same place within a chunk of 16 bytes.
    dlogits = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
    return kernels.cross_entropy_backward(dloss, logits, targets, pair(lse), IGNORE, dlogits)


def pair(lse):
    """lse [M, 2]: it rounded, to 8 bits so that the rest is not 0, and the rest."""
    rounded = lse.bfloat16().float()
    return torch.stack((rounded, lse - rounded), 1)


def equal_logits_are_equally_likely(rung):
    """Of V equal logits each has the probability 1 / V, however large they are: what the forward keeps is enough."""
    for logit in (0.0, 1e3, 1e8, 3e15, -1e30):
        for M, V in ((3, 5), (2, 1153), (1, 16411)):
            x, targets = torch.full((M, V), logit, device=DEVICE), torch.zeros(M, dtype=torch.int64, device=DEVICE)
            _, lse = choose(FORWARDS, Rows.of(x))(x, targets, IGNORE)
            dx = kernels.cross_entropy_backward(torch.ones(M, device=DEVICE), x, targets, lse, IGNORE, x.clone())
            expected = torch.full_like(x, 1 / V)
            expected[:, 0] -= 1
            torch.testing.assert_close(dx, expected, rtol=2e-6, atol=0)


def it_may_overwrite_the_logits(rung):
    """The answer is the same where the logits were."""
    dloss, x, targets, lse = inputs_backward(5, 1153)
    expected = rung(dloss, x, targets, lse)
    assert torch.equal(kernels.cross_entropy_backward(dloss, x, targets, pair(lse), IGNORE, x), expected)


# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    rungs=(cross_entropy,),
    checks=(
        *PROBLEM.checks,
        case("many rows: a warp each", M=16 * num_sms() + 1, V=1153, strange=True),
        case("many short rows: a warp loads each at once", M=16 * num_sms() + 1, V=1032, strange=True),
        case("few long rows: several programs each", M=2, V=16411, strange=True),
        case("a stride that is not V; the last program of a row is not full", M=3, V=20480, pad=3, strange=True),
    ),
    benches=(
        {"M": 4096, "V": 50257},  # the odd width first: that is where the claim of 16-byte loads is examined
        *(b for b in PROBLEM.benches if b["V"] != 50257),
        *({"M": M, "V": V} for M, V in ((32768, 4096), (32, 131072))),
    ),
    wrong=(
        Mutant("rows past the last", "cross_entropy_packed_kernel", "(rows < M)[:, None] & (cols < V)",
               "(cols < V)", "cross_entropy", "out of bounds"),
        Mutant("classes that are not there count as zeros", "cross_entropy_packed_kernel", 'other=-float("inf")',
               "other=0.0", "cross_entropy"),
        Mutant("only the last chunk's sum", "cross_entropy_registers_kernel", "lane_l += ", "lane_l = ",
               "cross_entropy"),
        Mutant("columns past the last", "cross_entropy_registers_kernel", "mask=cols < V", "mask=cols < V + 1",
               "cross_entropy", "out of bounds"),
        Mutant("neighbours not rescaled", "cross_entropy_chunks_kernel", "l * tl.exp2((m - m_new) * LOG2E)", "l",
               "cross_entropy"),
        Mutant("head of the row dropped", "cross_entropy_chunks_kernel", "== 0, begin", "== 0, first * W",
               "cross_entropy"),
        Mutant("a chunk too many", "cross_entropy_chunks_kernel", "end // W", "end // W + 1", "cross_entropy",
               "out of bounds"),
        Mutant("last step of a row lost", "cross_entropy_chunks_kernel", "(0, n, ", "(0, n - LANES + 1, ",
               "cross_entropy", "nan"),
        Mutant("edges added by every part", "cross_entropy_chunks_kernel", "part == 0, begin", "True, begin",
               "cross_entropy"),
        Mutant("parts rounded down", "cross_entropy_chunks_kernel", "- first, 0), P", "- first - PARTS + 1, 0), P",
               "cross_entropy"),
        Mutant("last part lost", "merge_kernel", "< PARTS, other=0", "< PARTS - 1, other=0", "cross_entropy"),
    ),
    claims={cross_entropy: ("cross_entropy_chunks_kernel: 16-byte loads", "no spills")},
    passes={cross_entropy: 1.0},
)

BACKWARD = Lesson(
    problem=PROBLEM_BACKWARD,
    rungs=(cross_entropy_backward,),
    checks=(
        *PROBLEM_BACKWARD.checks,
        case("several blocks, and a stride that is not V", M=3, V=9001, pad=3),
    ),
    wrong=(
        Mutant("edges unwritten", "cross_entropy_backward_kernel", "block == 0", "block == 1",
               "cross_entropy_backward", "nan"),
        Mutant("head counted from the chunk", "cross_entropy_backward_kernel", "target - (first * W - begin)",
               "target", "cross_entropy_backward"),
        Mutant("a chunk too many", "cross_entropy_backward_kernel", "chunks < after", "chunks <= after",
               "cross_entropy_backward", "out of bounds"),
        Mutant("what the rounding of lse lost is left out", "cross_entropy_backward_kernel", "(x - lse - rest)",
               "(x - lse)", "cross_entropy_backward"),
        Mutant("ignored rows have a gradient", "target_and_scale", "IGNORE, 0.0", "IGNORE, 1.0",
               "cross_entropy_backward"),
    ),
    claims={cross_entropy_backward: ("16-byte loads", "16-byte stores", "no spills", "no shared memory")},
    passes={cross_entropy_backward: 1.0},
    properties=(*PROBLEM_BACKWARD.properties, equal_logits_are_equally_likely, it_may_overwrite_the_logits),
)
# fmt: on
