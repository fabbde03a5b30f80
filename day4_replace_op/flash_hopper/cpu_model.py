"""A CPU model of causal_diagonal.py: its loops and mbarriers run without a GPU, in any order of its warps.

What lies between the mbarriers is PyTorch. It is small: 2 x 8 queries, 16 keys, 2 stages, 3 CTAs. Partitions are
generators that yield (barrier, parity) where the kernel waits for a barrier, and FREE where it waits for a matmul,
which until then reads its tiles. A row sum is large from 2^6 on, and huge from 2^20 on.
"""

import math
from itertools import count as numbers_from

from lessonkit.judge.simulate import FREE, Barrier, ask_for, in_any_order

import torch
import torch.nn.functional as F

from course_ops.hopper import ring_slot, tile_order
from problems.attention import expect_heads

ROWS, KEYS, STAGES, CTAS = 8, 16, 2, 3
LOWEST = torch.finfo(torch.float32).min


def cpu_model(q, k, v, causal=False, window=None, scale=None):
    """As causal_diagonal, in any dtype: the counter, the mailbox, the rings, lazy rescaling, the half block."""
    scale = expect_heads(q, k, v, causal, window, scale)
    B, H, S_q, _ = q.shape
    o, lse = torch.zeros(q.shape), torch.zeros(B, H, S_q)  # added to, so that a tile computed twice shows
    tensors = [F.pad(t.float().cpu(), (0, 0, 0, -t.shape[2] % KEYS)) for t in (q * scale, k, v)]  # zeros, as TMA gives
    counter, copies, partitions = numbers_from(CTAS), [], []
    for program in range(CTAS):
        partitions += _cta(program, counter, copies, (B * H, H, S_q, k.shape[2], causal), *tensors, o, lse)
    in_any_order(partitions, copies)
    return o.to(q), lse.to(q.device)


def _tile(index, sizes):
    """Of the index-th tile: batch, head, its first query, and how many blocks of keys its queries see."""
    all_heads, H, S_q, S_k, causal = sizes
    tiles = -(-S_q // KEYS)
    head, tile, end = index // tiles, index % tiles, S_k
    if causal:
        head, rank = tile_order.fn(index, tiles, all_heads, 2)
        tile = tiles - 1 - rank
        end = min(S_k, max(0, (tile + 1) * KEYS + S_k - S_q))
    return head // H, head % H, tile * KEYS, -(-end // KEYS)


def _softmax(s, m, l):
    m_new = torch.maximum(m, s.amax(1, keepdim=True))
    p, alpha = torch.exp(s - m_new), torch.exp(m - m_new)
    return p, m_new, l * alpha + p.sum(1, keepdim=True), alpha


def _raise_maximum(p, acc, m, l, sums):
    growth = sums.log().clamp(min=0)
    alpha = torch.exp(-growth)
    return p * alpha, acc * alpha, m + growth, l * alpha


def _cta(program, counter, copies, sizes, q, k, v, o, lse):
    all_heads, _, S_q, S_k, causal = sizes
    num_tiles, D, slots = -(-S_q // KEYS) * all_heads, q.shape[3], 2
    mailbox, published = [None] * slots, [Barrier(1) for _ in range(slots)]
    q_smem = [torch.full((ROWS, D), math.nan) for _ in range(2)]
    k_smem, v_smem = ([torch.full((KEYS, D), math.nan) for _ in range(STAGES)] for _ in range(2))
    q_full, q_empty = ([Barrier(1), Barrier(1)] for _ in range(2))
    k_full, v_full = ([Barrier(1) for _ in range(STAGES)] for _ in range(2))
    k_empty, v_empty = ([Barrier(2) for _ in range(STAGES)] for _ in range(2))

    def publish(index, count):
        mailbox[count % slots] = index
        published[count % slots].arrive()

    def producer():
        step, count, index = 0, 0, program
        while index < num_tiles:
            publish(index, count)
            b, h, row, blocks = _tile(index, sizes)
            for which in range(2):
                yield q_empty[which], count & 1 ^ 1
                ask_for(copies, q_full[which], (q_smem[which], q[b, h, row + ROWS * which :][:ROWS]))
            for block in range(blocks + 1):
                if block < blocks:
                    stage, parity = ring_slot.fn(step + block, STAGES)
                    yield k_empty[stage], parity ^ 1
                    ask_for(copies, k_full[stage], (k_smem[stage], k[b, h, (blocks - 1 - block) * KEYS :][:KEYS]))
                if block > 0:
                    stage, parity = ring_slot.fn(step + block - 1, STAGES)
                    yield v_empty[stage], parity ^ 1
                    ask_for(copies, v_full[stage], (v_smem[stage], v[b, h, (blocks - block) * KEYS :][:KEYS]))
            step, count, index = step + blocks, count + 1, next(counter)
        publish(index, count)

    def consumer(which):
        step = 0
        for count in numbers_from():
            slot, parity = ring_slot.fn(count, slots)
            yield published[slot], parity
            if (index := mailbox[slot]) >= num_tiles:
                return
            b, h, row, blocks = _tile(index, sizes)
            rows = torch.arange(row + ROWS * which, row + ROWS * which + ROWS)
            m, l, acc = torch.full((ROWS, 1), LOWEST), torch.zeros(ROWS, 1), torch.zeros(ROWS, D)
            yield q_full[which], count & 1
            for block in range(blocks + 1):  # the last one is the drain
                stage, parity = ring_slot.fn(step + block, STAGES)
                before, before_parity = ring_slot.fn(step + block - 1, STAGES)
                if block < blocks:
                    yield k_full[stage], parity
                else:
                    q_empty[which].arrive()
                if block > 0:
                    yield v_full[before], before_parity
                if block == 0 < blocks:  # the prologue
                    yield FREE
                    keys = KEYS // 2 if causal and which == 0 else KEYS
                    s = q_smem[which] @ k_smem[stage][:keys].T
                    key = (blocks - 1) * KEYS + torch.arange(keys)
                    s[(key >= S_k) | (causal & (key > rows[:, None] + S_k - S_q))] = -math.inf
                    k_empty[stage].arrive()
                    p, m, l, _ = _softmax(s, m, l)
                    continue
                if block < blocks:
                    yield FREE  # QK is over, PV may not be
                    p_new = torch.exp(q_smem[which] @ k_smem[stage].T - m)
                if block > 0:
                    yield FREE
                    acc += p @ v_smem[before][: p.shape[1]]
                if 0 < block < blocks:
                    sums = p_new.sum(1, keepdim=True)
                    if sums.max() < 2**6:
                        l = l + sums
                    elif sums.max() < 2**20:
                        p_new, acc, m, l = _raise_maximum(p_new, acc, m, l + sums, sums)
                    else:
                        yield FREE
                        p_new, m, l, alpha = _softmax(q_smem[which] @ k_smem[stage].T, m, l)
                        acc = acc * alpha
                    k_empty[stage].arrive()
                    p = p_new
                if block > 0:
                    v_empty[before].arrive()
            step += blocks
            inside = rows[rows < S_q]
            o[b, h, inside] += torch.where(l == 0, 0, acc / l)[: len(inside)]
            lse[b, h, inside] += (m + l.log())[: len(inside), 0]

    return [producer(), consumer(0), consumer(1)]
