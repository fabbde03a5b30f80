"""Flash attention, version 1: the online softmax, and its HBM traffic
===================================================================
Lesson 1 computed the scores twice, since a softmax needs its row's maximum and sum before it can weigh anything. The
online softmax corrects both afterwards. Let O be the right answer for the keys visited so far, with their maximum m
and sum l. A further block of keys has its own maximum m', sum l' and weights P'. It is merged by

    m_new = max(m, m')     l_new = exp(m - m_new) l + exp(m' - m_new) l'
    O = (exp(m - m_new) l O + exp(m' - m_new) P' V') / l_new

Why: l O is the sum of weights times values before the division, with the maximum m. The block's own sum is P' V', with
m'. The two factors bring both sums to m_new. Then they are added, and divided by the new l. (Dao, Fu, Ermon, Rudra and
Re, "FlashAttention", 2022, algorithm 1, lines 10 to 13.) Version 1 loops over blocks of B_c keys, and inside over
blocks of queries:

    version 1: keys outside, queries inside         version 2, lesson 4: queries outside, keys inside

    for each K, V block:      loaded once           for each Q block:         a program of its own
        for each Q block:                               O, m, l = 0 in registers
            load Q, O, m, l   <=== HBM                  for each K, V block:
            S = Q K^T, merge                                load K, V         <=== mostly L2
            store O, m, l     ===> HBM                      S = Q K^T, merge
                                                        store O               ===> HBM, once

So O, m and l go to HBM and back for each block of keys. O is kept in fp32, so that it is not rounded to 16 bits N / B_c
times. The bytes of a head with N tokens and 16-bit Q, K and V:

    K and V, once                     4 N D
    for each of N / B_c blocks        Q read 2 N D, O read and written 8 N D, m and l 16 N

If the shared memory of an SM holds M elements, B_c may be M / 4D: room for a block of K, V, Q and O each. Then the
second line is 40 N^2 D^2 / M and a little for m and l. This is theorem 2's Theta(N^2 D^2 / M), which the lesson counts
to the byte. An SM of an H200 has room for M = 116,000 elements of 16 bits. B_c is rounded down to a power of two:

    D      B_c    bytes        lesson 1's fused softmax    predicted, if that traffic limits the time
    64     256    2.6 N^2      8 N^2                       a third of its time
    128    128    10 N^2       8 N^2                       no gain in time; 4 N D of scratch instead of N^2

On an H200 both rungs have about half of the predicted rate. Traffic does not limit them alone: each program loads,
waits, computes and stores one after the other. (The report's page has the cycles.)

With one program per head, 16 heads at N = 16384 keep 16 of 132 SMs busy, so the gain is less there. Lesson 4 improves
both the bytes and the number of programs.

You will be able to: derive the online softmax with an output, count an algorithm's traffic, and say when Triton needs a
barrier.
You need: lessons 1 and 2 (attention with a stored S x S matrix, and its bytes); day 2, lesson 5 (online softmax).
Before you read on: which of the bytes above disappear if queries are the outer loop, as in version 2?
Run it:    python3 course.py run lesson03_flash_v1
Check it:  python3 course.py check lesson03_flash_v1
Time it:   python3 course.py bench lesson03_flash_v1
"""

import math

from lessonkit import About, Lesson, Mutant, Prediction, Refusal, Unsupported, case, device, expect
from lessonkit.modes.interpreter import watched

import torch
import triton
import triton.language as tl

from problems import attention_plain as naive
from problems.attention_plain import PROBLEM_LSE, precision, work

WIDTHS = (16, 32, 64, 128)  # D: a power of two, so that a tile has no padding; lesson 5 takes any up to 256


# Algorithm 1 of the paper: `line 9` is its line 9. One program per head runs both loops.
@triton.jit
def flash_v1_kernel(
    q_ptr, k_ptr, v_ptr,  # [BH, S, D]
    acc_ptr, m_ptr, l_ptr,  # [BH, S, D], [BH, S], [BH, S] in fp32: zeros, -inf and zeros (line 2)
    o_ptr, lse_ptr,  # [BH, S, D], [BH, S] in fp32
    scale, S, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # int64 before the stride
    cols = tl.arange(0, D)[None, :]
    for j in range(0, S, BLOCK_C):  # line 5
        keys = j + tl.arange(0, BLOCK_C)
        k = tl.load(k_ptr + head * S * D + keys[:, None] * D + cols, mask=keys[:, None] < S, other=0.0)
        v = tl.load(v_ptr + head * S * D + keys[:, None] * D + cols, mask=keys[:, None] < S, other=0.0)
        for i in range(0, S, BLOCK_R):  # line 7
            rows = i + tl.arange(0, BLOCK_R)
            tile = head * S * D + rows[:, None] * D + cols
            inside = rows < S
            q = tl.load(q_ptr + tile, mask=inside[:, None], other=0.0)
            acc = tl.load(acc_ptr + tile, mask=inside[:, None], other=0.0)
            m = tl.load(m_ptr + head * S + rows, mask=inside, other=0.0)
            total = tl.load(l_ptr + head * S + rows, mask=inside, other=1.0)
            s = tl.dot(q, k.T, input_precision=PRECISION) * scale  # line 9
            s = tl.where(keys[None, :] < S, s, -float("inf"))
            m_block = tl.max(s, axis=1)  # line 10
            p = tl.exp(s - m_block[:, None])
            total_block = tl.sum(p, axis=1)
            m_new = tl.maximum(m, m_block)  # line 11
            old, new = tl.exp(m - m_new), tl.exp(m_block - m_new)
            total_new = old * total + new * total_block
            pv = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            acc = ((total * old)[:, None] * acc + new[:, None] * pv) / total_new[:, None]  # line 12
            if j + BLOCK_C < S:
                tl.store(acc_ptr + tile, acc, mask=inside[:, None])
                tl.store(m_ptr + head * S + rows, m_new, mask=inside)  # line 13
                tl.store(l_ptr + head * S + rows, total_new, mask=inside)
            else:
                tl.store(o_ptr + tile, acc, mask=inside[:, None])
                tl.store(lse_ptr + head * S + rows, m_new + tl.log(total_new), mask=inside)
        # In the next round a thread may read an element that another thread of the program wrote. Wait for all threads.
        tl.debug_barrier()


# Rung 1. Blocks of 32 keys, as if the chip had 16 KB. Predicted: at D = 64 20 N^2 bytes of Q, O, m and l a head,
# more than lesson 1's S x S matrix costs. The formula alone saves no traffic; it needs a large B_c.
def flash_v1_small(q, k, v):
    """q, k, v [B, H, S, D] contiguous, D 16, 32, 64 or 128 -> o [B, H, S, D], lse [B, H, S] in fp32."""
    return _run(q, k, v, 32, 32)


# Rung 2. New: B_c = M / 4D and B_r = min(B_c, D) (line 1), rounded down to powers of two. Predicted: 2.6 N^2 bytes at
# D = 64, an eighth of rung 1's. 256 keys x 64 queries of scores are 64 registers in each of 256 threads.
def flash_v1(q, k, v):
    """As flash_v1_small, with the paper's blocks."""
    return _run(q, k, v, *_blocks(q.shape[-1]))


def _blocks(D):
    """B_r, B_c: line 1, for the 227 KB that a program may have on Hopper, in 16-bit elements. At most 256 keys."""
    keys = min(256, 2 ** int(math.log2(227 * 1024 // 2 / (4 * D))))
    return max(16, min(keys, D)), keys


def _run(q, k, v, block_r, block_c):
    expect(q=q, k=k, v=v, ndim=4, same_shape=True, same_dtype=True, contiguous=True)
    B, H, S, D = q.shape
    if D not in WIDTHS:
        raise ValueError(f"q has D = {D}, expected one of {WIDTHS}: lesson05_flash_options takes any up to 256")
    o, lse = torch.empty_like(q), torch.empty(B, H, S, device=q.device)
    if q.element_size() == 4:
        block_c = min(block_c, 64)  # elements twice as long, and an fp32 dot keeps its operands in registers
    if o.numel():
        acc = torch.zeros(q.shape, device=q.device)
        m, total = torch.full_like(lse, -math.inf), torch.zeros_like(lse)
        flash_v1_kernel[(B * H,)](
            q, k, v, acc, m, total, o, lse, 1 / math.sqrt(D), S, D, block_r, block_c, precision(),
            num_warps=8 if block_c > 64 else 4, num_stages=1,
        )  # fmt: skip
    return o, lse


def inputs(B, H, S, D, dtype=torch.float32):
    return naive.inputs(B, H, S, D, dtype=dtype)[:3]


def _io_bytes(B, H, S, D, dtype, block_c):
    """Algorithm 1's traffic. The last round writes O and lse where the others write O, m and l."""
    rounds, size = -(-S // block_c), dtype.itemsize
    each = S * D * (size + 4) + 8 * S  # Q and O read, m and l read
    write = (rounds - 1) * (S * D * 4 + 8 * S) + S * D * size + 4 * S
    return B * H * (2 * S * D * size + rounds * each + write)


def io_is_the_papers(rung):
    """Counted to the byte; twice the tokens take nearly four times the bytes: Theta(N^2 D^2 / M)."""
    if not device.INTERPRETED:
        raise Unsupported("bytes are counted in the interpreter")
    counted, block_c = [], 32 if rung is flash_v1_small else 256
    for S in (4 * block_c, 8 * block_c):
        with watched() as traffic:
            rung(*inputs(1, 1, S, 64, dtype=torch.float16))
        counted.append(traffic.read + traffic.written)
        assert counted[-1] == _io_bytes(1, 1, S, 64, torch.float16, block_c)
    assert 3.6 < counted[1] / counted[0] < 4


def blocks_change_nothing(rung):
    """The answer does not depend on the block's size: 16 to 256 keys agree up to the order of additions."""
    q, k, v = inputs(1, 1, 130, 16)
    for block_c in (16, 64, 128):
        torch.testing.assert_close(_run(q, k, v, 32, block_c), rung(q, k, v), rtol=1e-5, atol=1e-5)


CHECKS = (
    case("no tokens: an empty grid is an error in CUDA", B=1, H=2, S=0, D=16),
    case("one token: the softmax is 1, all other keys of the block must not count", B=2, H=1, S=1, D=16),
    case("one past a block of 32 and of 64", B=1, H=1, S=65, D=32),
    case("two heads, a prime, three blocks of the small rung", B=1, H=2, S=67, D=16),
    case("many blocks, a tail", gib=0.3, B=1, H=3, S=1021, D=128),
    case("many blocks", gib=0.3, B=2, H=3, S=1024, D=64),
    case("offsets past 2^31", gib=110, B=1, H=8200, S=2100, D=128),
)
LAST = {"B": 1, "H": 1, "S": 288, "D": 64}
MIDDLE = {"B": 8, "H": 32, "S": 2048, "D": 64}


def _least(block_c):
    return _io_bytes(**LAST, dtype=torch.float16, block_c=block_c) / work(**LAST, dtype=torch.float16).bytes


# The answer: with queries outside, Q is read once, and O, m and l stay in registers, so O is written once and never
# read. K and V are read for each block of queries instead, mostly from L2.
LESSON = Lesson(
    about=About(
        teaches="algorithm 1 of the 2022 paper, line by line; its IO counted to the byte; a barrier that is needed",
        hours=1,
        star=True,
        operator="attention",
        pictures=("score_sweeps", "traffic"),
    ),
    problem=PROBLEM_LSE,
    inputs=inputs,  # no mask yet
    rungs=(flash_v1_small, flash_v1),
    predicted=(
        Prediction(
            rung=flash_v1_small, at=MIDDLE, ms=5.1,  # 20 N^2 bytes for each of 256 heads at 4.2 TB/s
            why="256 programs are two an SM. Each loads 12 KB, waits, computes and stores, with one stage, so little "
            "is in flight. With 1024 programs, at S = 512, the same traffic moves 1.4 times as fast.",
        ),
        Prediction(
            rung=flash_v1, at=MIDDLE, times=7.7, over=flash_v1_small,  # 20 N^2 over 2.6 N^2
            why="It counts bytes alone. A tile of 64 x 256 scores has the arithmetic of lesson 4's `swapped`, 3648 "
            "cycles, and its 42 KB take 2300 more. With 255 registers per thread an SM holds one program, so "
            "neither hides the other.",
        ),
    ),
    checks=(*CHECKS, case("the bytes are counted here: nine blocks of keys, or two", **LAST)),
    benches=tuple(
        {"B": 16384 // S, "H": 2048 // D, "S": S, "D": D} for S, D in ((512, 64), (2048, 64), (2048, 128), (16384, 64))
    ),
    wrong=(
        Mutant("O is not rescaled", "flash_v1_kernel", "(total * old)[:, None] * acc", "total[:, None] * acc",
               "flash_v1_small"),
        Mutant("l is not rescaled", "flash_v1_kernel", "old * total + new", "total + new", "flash_v1_small"),
        Mutant("the block's own maximum forgotten", "flash_v1_kernel", "new[:, None] * pv", "pv", "flash_v1_small"),
        Mutant("the tail's keys count", "flash_v1_kernel", 'tl.where(keys[None, :] < S, s, -float("inf"))', "s",
               "flash_v1"),
        Mutant("the last round is stored with the others", "flash_v1_kernel", "j + BLOCK_C < S", "j < S", "flash_v1",
               "nan"),
        Mutant("m and l of the first head", "flash_v1_kernel", "m_ptr + head * S + rows, mask=inside, other=0.0",
               "m_ptr + rows, mask=inside, other=0.0", "flash_v1_small"),
    ),
    claims={flash_v1: ("wgmma", "16-byte loads")},
    passes={flash_v1_small: _least(32), flash_v1: _least(256)},
    properties=(io_is_the_papers, blocks_change_nothing),
    refuses=(
        *PROBLEM_LSE.refuses,
        Refusal("D of 96", lambda f: f(*inputs(1, 1, 4, 96)), ValueError, "D = 96, expected one of"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
