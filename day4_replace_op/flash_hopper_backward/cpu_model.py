"""The last rung's partitions and barriers on a CPU, step by step in PyTorch, in any order that the barriers allow.

Two CTAs, tiles of 2 x 8 keys, blocks of 8 queries, a ring of 2 stages. A partition yields (barrier, parity) where the
kernel waits, and FREE where another partition or a copy may come between (lessonkit.judge.simulate).
"""

import math
from dataclasses import dataclass
from itertools import count as numbers_from

from lessonkit import Unsupported
from lessonkit.judge.simulate import FREE, Barrier, ask_for, in_any_order

import torch

from course_ops.hopper import ring_slot
from problems.attention import expect_gradient

KEYS = ROWS = 8


@dataclass
class Operands:
    """In fp32: q [B H, S, D], already scaled, do, k, v; lse and delta [B H, S, 1]; the gradients."""

    q: torch.Tensor
    do: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    causal: bool

    def num_tiles(self):
        return len(self.k) * self.k.shape[1] // (2 * KEYS)

    def tile(self, index):
        """The head, the first key, the first block of queries that sees it, and the end of the blocks."""
        heads, (tiles, blocks) = len(self.k), (self.k.shape[1] // n for n in (2 * KEYS, ROWS))
        head, key = (index % heads, index // heads) if self.causal else (index // tiles, index % tiles)
        return head, key * 2 * KEYS, key * 2 * KEYS // ROWS if self.causal else 0, blocks


def causal_skip_on_cpu(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    """As causal_skip, slow, in any dtype and D; S a multiple of 16, no window, a K and V for each head."""
    scale = expect_gradient(grad_out, q, k, v, out, lse, causal, window, scale)
    if q.shape != k.shape or q.shape[2] % 16 or window is not None:
        raise Unsupported("for k as long as q, S a multiple of 16, a K and V for each head, no window")
    grad, q, k, v, out, lse = (t.float().cpu().flatten(0, 1) for t in (grad_out, q, k, v, out, lse))
    o = Operands(
        q * scale, grad, k, v, lse[..., None], (grad * out).sum(-1, keepdim=True),
        torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan), causal,
    )  # fmt: skip
    counter, copies, partitions = numbers_from(2), [], []  # copies on their way
    for program in range(2):
        partitions += _cta(program, counter, copies, o)
    in_any_order(partitions, copies)
    return tuple(t.view(grad_out.shape).to(grad_out) for t in (o.dq * scale, o.dk, o.dv))


def _cta(program, counter, copies, o):
    D, buffers = o.q.shape[-1], 3  # of dS
    k_smem, v_smem = (torch.full((2, KEYS, D), math.nan) for _ in range(2))
    q_smem, do_smem = (torch.full((2, ROWS, D + 1), math.nan) for _ in range(2))  # with their rows' values
    ds_smem, mailbox = torch.full((buffers, 2, KEYS, ROWS), math.nan), [None] * 2
    published, q_full, do_full, (k_full, v_full), turn = ([Barrier(1), Barrier(1)] for _ in range(5))
    empty, ds_full, (k_read, stored) = ([Barrier(2), Barrier(2)] for _ in range(3))
    turn[0].arrive()

    def publish(count, index):
        mailbox[count % 2] = index
        published[count % 2].arrive()

    def store_gradients(count, head, key):
        yield stored, count & 1
        o.dk[head, key : key + 16], o.dv[head, key : key + 16] = k_smem.view(16, D), v_smem.view(16, D)

    def producer():
        step, count, index, before = 0, 0, program, None
        while index < o.num_tiles():
            publish(count, index)
            first, (head, key, begin, blocks) = step, o.tile(index)
            for block in range(begin, blocks):
                (stage, parity), rows = ring_slot.fn(step, 2), slice(ROWS * block, ROWS * block + ROWS)
                yield empty[stage], parity ^ 1
                ask_for(copies, q_full[stage], (q_smem[stage], torch.cat([o.q[head, rows], o.lse[head, rows]], 1)))
                ask_for(copies, do_full[stage], (do_smem[stage], torch.cat([o.do[head, rows], o.delta[head, rows]], 1)))
                if step == first:
                    if count > 0:
                        yield from store_gradients(count - 1, *before)
                    ask_for(copies, k_full, (k_smem.view(16, D), o.k[head, key : key + 16]))
                    ask_for(copies, v_full, (v_smem.view(16, D), o.v[head, key : key + 16]))
                step += 1
            before, index, count = (head, key), next(counter), count + 1
        publish(count, index)
        if before:
            yield from store_gradients(count - 1, *before)

    def consumer(which):
        first = 0
        for count in numbers_from():
            yield published[count % 2], count // 2 & 1
            if mailbox[count % 2] >= o.num_tiles():
                return
            first = yield from consumer_tile(which, first, count, *o.tile(mailbox[count % 2]))

    def consumer_tile(which, first, count, head, key, begin, blocks):
        mine, end = key + KEYS * which + torch.arange(KEYS)[:, None], first + blocks - begin
        half, (dk, dv) = slice(which * D // 2, D if which else D // 2), torch.zeros(2, KEYS, D)
        yield k_full, count & 1
        yield q_full[first % 2], first // 2 & 1
        yield FREE
        s = k_smem[which] @ q_smem[first % 2, :, :D].T
        yield v_full, count & 1
        for step in range(first, end + 1):  # the last one only adds the last dQ
            (stage, parity), (after, parity_after) = ring_slot.fn(step, 2), ring_slot.fn(step + 1, 2)
            block, late = begin + step - first, step - 1  # late: the step whose dQ this is
            unseen = o.causal and block == begin and which == 1
            if step < end:
                yield (q_full if unseen else do_full)[stage], parity
                yield turn[which], step & 1
                ds = torch.zeros(KEYS, ROWS)
                if not unseen:
                    p = torch.exp(s - q_smem[stage, :, D])
                    if o.causal:
                        p = p.masked_fill(mine > ROWS * block + torch.arange(ROWS), 0)
                    yield FREE
                    ds = p * (v_smem[which] @ do_smem[stage, :, :D].T - do_smem[stage, :, D])
                ds_smem[step % buffers, which] = ds
                ds_full[step % 2].arrive()
                turn[1 - which].arrive()
                if not unseen:
                    yield FREE
                    dv += p @ do_smem[stage, :, :D]
            if late >= first:
                yield ds_full[late % 2], late // 2 & 1
            if step + 1 < end:
                yield q_full[after], parity_after
            yield FREE
            if late >= first:
                row = ROWS * (block - 1)
                of_both = ds_smem[late % buffers].view(16, ROWS).T @ k_smem.view(16, D)[:, half]
                o.dq[head, row : row + ROWS, half] += of_both
            if step < end:
                dk += ds @ q_smem[stage, :, :D]
                empty[stage].arrive()
                yield FREE
                s = k_smem[which] @ q_smem[after, :, :D].T
        k_read.arrive()
        v_smem[which] = dv
        yield k_read, count & 1
        k_smem[which] = dk
        stored.arrive()
        return end

    return [consumer(0), consumer(1), producer()]
