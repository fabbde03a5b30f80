"""Flash attention, backward on Hopper, second half: TMA adds
============================================================
Lesson 6d's threads add dQ themselves: 32 instructions of 512 bytes a step and warpgroup, which leave an SM at 32 to 64
bytes a cycle, and a warp that has asked for as many as a queue holds stands still. FlashAttention-3 lets TMA add
(cp.reduce.async.bulk): a warpgroup writes its part to shared memory, one thread asks, and all go on. That is paid with
shared memory's time, 32 KB written and 32 KB read a step, 500 cycles beside 2432; but nobody waits for a queue.

Whoever adds, S / 128 owners add 4 S D bytes each: S^2 D / 32 a head, 17 GB for 16 heads at S = 16384 and D = 128, all
of it in L2's own adders. At 8 ms for the products that is 2.1 TB/s; if the adders do less, they are the limit.

The barriers are those of lesson 6d, and they are what its twin runs here on a CPU: two rings (Q with the start of its
scores, dO with its delta), a meeting of the warpgroups at each step, the end, where dK takes K's place.

You will learn: a sum in memory that nobody waits for, what a reduction costs that leaves a warp, when two buffers do.
Needs a Hopper GPU to run; without one the rungs are compiled, and a slow twin of all barriers runs, whose partitions
take turns in any order: its mutants are the mistakes that on a GPU hang, or are wrong once a week.
Run it:    python day4_replace_op/lesson06e_flash_backward_sum.py
Check it:  python -m lessonkit check lesson06e_flash_backward_sum
Time it:   python -m lessonkit bench lesson06e_flash_backward_sum
"""

import math

from lessonkit import Lesson, Mutant, Unsupported, needs

import torch
import torch.nn.functional as F

from day3_matmul_tk.lesson07b_gluon_persistent import FREE, Barrier, ask_for, in_any_order, slot
from day4_replace_op import lesson05_flash_backward as lesson05
from day4_replace_op.hopper import BENCHES
from day4_replace_op.hopper_backward import CHECKS, PEERS, launch, place
from day4_replace_op.lesson04b_flash_backward_queries import expect_gradient
from day4_replace_op.lesson06d_flash_backward_hopper import LESSON as FIRST
from day4_replace_op.lesson06d_flash_backward_hopper import backward_kernel


# Rung 3. New: TMA adds, from 32 KB more of shared memory. Predicted: 2950 cycles a step if shared memory is what limits
# it, 2800 and no change if the tensor cores are, fewer if the threads' own additions stood in their way.
@needs(90, "TMA and wgmma", only=True)
def tma_adds(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As lesson 6d's five_products."""
    return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, AHEAD=True, TMA_ADDS=True)


# Rung 4. New, where D is at most 64: dQ a step late. Its product waits for a meeting that was a step ago, so that the
# warpgroups need not keep step, and one can exponentiate under the other's products: at D = 64 the exponentials of both
# take 1024 cycles, dP under them 512. That takes a third buffer of dS, 32 KB, and the last that shared memory has.
# Predicted: the other 512 of 3300 cycles, a sixth.
@needs(90, "TMA and wgmma", only=True)
def attention_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None, deterministic=False):
    """dq, dk, dv of lesson 4's attention.

    grad_out, q, out [B, H, S_q, D], k, v [B, H_kv, S_k, D] in one dtype, any strides; lse [B, H, S_q] in fp32,
    contiguous; out and lse as attention() returned them, causal, window and scale as it got them. dk and dv are the
    same to the bit each time, dq only if deterministic. That, and what this is not for (fp32, windows, D past 128,
    strides that TMA refuses), takes lesson 5's. TypeError, ValueError for what is not so.
    """
    late = {"AHEAD": True, "TMA_ADDS": True, "LATE": q.shape[-1] <= 64}
    try:
        if not deterministic:
            return launch(backward_kernel, grad_out, q, k, v, out, lse, causal, window, scale, **late)
    except Unsupported:
        pass
    return lesson05.attention_backward(grad_out, q, k, v, out, lse, causal, window, scale)


# The slow twin: what lies between the barriers is PyTorch, small (2 x 8 keys, 8 queries, 2 stages) so that rings turn
# often. As lesson 6b's: partitions yield (barrier, parity) where the kernel waits for a barrier, FREE where it waits
# for a product, which until then reads its tiles; any that need not wait may run next.


def twin(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As attention_backward, without windows, in any dtype: all loops and barriers, one wait at a time."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    (B, _, S_q, _), (_, H_kv, S_k, _) = q.shape, k.shape
    grad, q, k, v, out, lse = (t.float().cpu() for t in (grad_out, q, k, v, out, lse))  # step by step
    delta = F.pad((grad * out).sum(-1), (0, -S_q % 8))[..., None]
    start = F.pad(lse.masked_fill(lse == -math.inf, 1e30), (0, -S_q % 8), value=1e30)[..., None]
    q, do, k, v = (F.pad(t, (0, 0, 0, -t.shape[2] % 16)) for t in (q, grad, k, v))  # with zeros, as TMA does
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    tiles = -(-S_k // 16)
    for program in range(tiles * B * H_kv):
        sizes = tiles, H_kv, B * H_kv, 2, S_q, S_k
        _program(place.fn(program, sizes, causal, 8, 8), sizes, q * scale, do, start, delta, k, v, dq, dk, dv, causal)
    return (dq[:, :, :S_q] * scale).to(grad_out), dk[:, :, :S_k].to(grad_out), dv[:, :, :S_k].to(grad_out)


def _program(where, sizes, q, do, start, delta, k, v, dq, dk, dv, causal):
    batch, head_kv, key, begin, whole, blocks = where
    S_q, S_k, D, group = sizes[4], sizes[5], q.shape[3], q.shape[1] // k.shape[1]
    k_smem, v_smem = (torch.full((2, 8, D), math.nan) for _ in range(2))
    q_smem, do_smem = (torch.full((2, 8, D + 1), math.nan) for _ in range(2))  # with their rows' numbers
    late = D <= 64
    buffers = 3 if late else 2
    ds_smem = torch.full((buffers, 2, 8, 8), math.nan)
    q_full, do_full, (k_full, v_full) = ([Barrier(1), Barrier(1)] for _ in range(3))
    q_empty, do_empty, meet, (read, stored) = ([Barrier(2), Barrier(2)] for _ in range(4))
    copies = []  # on their way

    def load_partition():
        ask_for(copies, k_full, (k_smem.view(16, D), k[batch, head_kv, key:][:16]))
        turn = 0
        for head in range(head_kv * group, head_kv * group + group):
            for block in range(begin, blocks):
                stage, parity = slot.fn(turn, 2)
                rows = slice(8 * block, 8 * block + 8)
                yield q_empty[stage], parity ^ 1
                of_q = torch.cat([q[batch, head, rows], start[batch, head, rows]], 1)
                ask_for(copies, q_full[stage], (q_smem[stage], of_q))
                if turn == 0:
                    ask_for(copies, v_full, (v_smem.view(16, D), v[batch, head_kv, key:][:16]))
                yield do_empty[stage], parity ^ 1
                of_do = torch.cat([do[batch, head, rows], delta[batch, head, rows]], 1)
                ask_for(copies, do_full[stage], (do_smem[stage], of_do))
                turn += 1
        yield stored, 0
        dk[batch, head_kv, key : key + 16], dv[batch, head_kv, key : key + 16] = k_smem.view(16, D), v_smem.view(16, D)

    def multiply_partition(which):
        mine, turns = key + 8 * which + torch.arange(8)[:, None], (blocks - begin) * group
        dk, dv = torch.zeros(2, 8, D)
        yield k_full, 0
        yield q_full[0], 0
        yield FREE
        s = k_smem[which] @ q_smem[0, :, :D].T - q_smem[0, :, D]
        yield v_full, 0
        half = slice(which * D // 2, D if which else D // 2)
        for turn in range(turns + late):  # the last one, if late, only adds the last dQ
            now = turn - late  # the step whose dQ this is
            (stage, parity), (after, parity_after) = slot.fn(turn, 2), slot.fn(turn + 1, 2)
            if turn < turns:
                block = begin + turn % (blocks - begin)
                p = torch.exp(s)
                if block < whole:
                    rows = 8 * block + torch.arange(8)
                    p = p.masked_fill(mine > rows + S_k - S_q if causal else mine >= S_k, 0)
                yield do_full[stage], parity
                numbers = do_smem[stage, :, D].clone()
                yield FREE
                ds = p * (v_smem[which] @ do_smem[stage, :, :D].T - numbers)
                ds_smem[turn % buffers, which] = ds
                meet[turn % 2].arrive()
                yield FREE
                dv += p @ do_smem[stage, :, :D]
                do_empty[stage].arrive()
            if late and now >= 0:
                yield meet[now % 2], now // 2 & 1
            if turn + 1 < turns:
                yield q_full[after], parity_after
            if not late:
                yield meet[now % 2], now // 2 & 1
            numbers = q_smem[after, :, D].clone()
            yield FREE
            if now >= 0:
                to = head_kv * group + now // (blocks - begin), slice(8 * (begin + now % (blocks - begin)), None)
                dq[batch, to[0], to[1]][:8, half] += ds_smem[now % buffers].view(16, 8).T @ k_smem.view(16, D)[:, half]
            if turn < turns:
                dk += ds @ q_smem[stage, :, :D]
                q_empty[stage].arrive()
                yield FREE
                s = k_smem[which] @ q_smem[after, :, :D].T - numbers
        read.arrive()
        v_smem[which] = dv
        yield read, 0
        k_smem[which] = dk
        stored.arrive()

    in_any_order([multiply_partition(0), multiply_partition(1), load_partition()], copies)


def deterministic_is_deterministic(rung):
    """Asked for that, dQ agrees to the bit with lesson 5's; of tma_adds nobody can ask it."""
    if rung.__name__ == "tma_adds":
        return
    args = lesson05.inputs(1, 4, 300, 64, H_kv=1, causal=True, dtype=torch.float16)
    first, second = rung(*args, deterministic=True), lesson05.attention_backward(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


LESSON = Lesson(
    reference=lesson05.reference,
    inputs=lesson05.inputs,
    rungs=(tma_adds, attention_backward),
    checks=CHECKS,
    benches=BENCHES,
    work=lesson05.LESSON.work,
    twin=twin,
    wrong=(
        Mutant("the meeting is not waited for", "_program", "late:\n                yield meet[now % 2], now // 2 & 1",
               "late:\n                yield FREE", "twin"),
        Mutant("dS in a buffer less", "_program", "3 if late else 2", "2 if late else 1", "twin"),
        Mutant("Q given back before dK", "_program", "do_empty[stage].arrive()",
               "do_empty[stage].arrive(); q_empty[stage].arrive(); q_empty[stage].missing += 1", "twin"),
        Mutant("dK over K that the other still reads", "_program", "yield read, 0", "yield FREE", "twin"),
        Mutant("empty when one of two has read", "_program", "(read, stored) = ([Barrier(2)",
               "(read, stored) = ([Barrier(1)", "twin", "barrier"),
        Mutant("another head begins a ring of its own", "_program", "slot.fn(turn, 2), slot",
               "slot.fn(turn % (blocks - begin), 2), slot", "twin"),
        Mutant("stored when one of two is done", "_program", "yield stored, 0", "yield read, 0", "twin"),
    ),
    peers=PEERS,
    claims=dict.fromkeys(  # of the first shape that is timed, D = 128; the late step has a few registers too many
        (tma_adds, attention_backward), tuple(f"backward_kernel: {claim}" for claim in ("wgmma", "tma", "no spills"))
    ),
    factor=2,  # as lesson 5's
    properties=(*FIRST.properties, deterministic_is_deterministic),
    refuses=FIRST.refuses,
    dtypes=(torch.float16, torch.bfloat16),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
