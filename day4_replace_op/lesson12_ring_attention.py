"""Ring attention: a sequence longer than one GPU's memory
=======================================================
Each of p processes holds a slice of the sequence, S / p of its queries, keys and values. A query needs all keys, so
keys and values travel around the ring. In step t a process attends to the slice of rank r - t and sends it on to rank
r + 1 at the same time. After p steps each process has attended to every slice (here p = 4):

              rank 0          rank 1          rank 2          rank 3
    step 0    Q0 x KV0 ---->  Q1 x KV1 ---->  Q2 x KV2 ---->  Q3 x KV3 ----> rank 0
    step 1    Q0 x KV3 ---->  Q1 x KV0 ---->  Q2 x KV1 ---->  Q3 x KV2 ----> rank 0
    step 2    Q0 x KV2 ---->  Q1 x KV3 ---->  Q2 x KV0 ---->  Q3 x KV1 ----> rank 0
    step 3    Q0 x KV1        Q1 x KV2        Q2 x KV3        Q3 x KV0       no message

Each step returns lesson 5's (o, lse), and such partial results merge exactly (lesson 10). A process needs O(S / p)
memory. Forward, it sends p - 1 slices of K and V:

    4 (p - 1) (S / p) H_kv D bytes in bf16, against 4 (S / p)^2 H D FLOPs in each of p steps

A step's matmuls hide its message if they take at least as long: S / p > 4 / 4 * 500e12 / 450e9 = 1100 tokens per GPU,
at 500 TFLOP/s and NVLink's 450 GB/s, for as many heads of K as of Q. Grouped heads need fewer tokens. (Liu, Zaharia and
Abbeel, "Ring attention with blockwise transformers", 2023.)

A causal mask makes the work uneven. With contiguous slices the last process has work in every step, and the first one
only in step 0. All wait for the slowest, so a pass takes as long as p - 1/2 slices of work. Striped attention (Brandon
et al. 2023) deals out single tokens instead. Zigzag order, as in Zhu's ring-flash-attention (2024), cuts the sequence
into 2 p chunks, and process r holds chunks r and 2 p - 1 - r:

    contiguous, p = 2    | 0  0 | 1  1 |     step 1: rank 0 sees nothing of KV1; rank 1 sees all of KV0
    zigzag, p = 2        | 0 | 1  1 | 0 |    step 1: each rank sees half of the other's slice

Then each process sees half of every other slice, in each step, so a pass takes as long as p / 2 slices. Predicted:
(2 p - 1) / p times as fast, 1.5 with two processes.

You will learn: to merge partial results, to overlap a message with work, to balance a causal mask, and how gradients
travel around the ring.
Run it:    python3 course.py run lesson12_ring_attention
"""

import functools
import math
from unittest import mock

from lessonkit import DEVICE, About, Steps
from lessonkit.modes.ranks import on_ranks

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from course_ops import attention_backward, attention_forward
from problems.attention import expect_heads, inputs, reference

# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

# ---- Merging ------------------------------------------------------------------------------------------------------


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to ROWS rows of a head of a [B, H, S, D] tensor, and which of them are inside."""
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


@triton.jit
def merge_kernel(
    out_ptr, lse_ptr, o_ptr, part_ptr,  # [B, H, S, D] and [B, H, S] in fp32, in place; [B, H, S, D], [B, H, S]
    out_strides, lse_strides, o_strides, part_strides, H, S, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(S, BLOCK)
    head, row = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BLOCK
    b, h, rows = head // H, head % H, row + tl.arange(0, BLOCK)
    lse_ptrs = lse_ptr + b * lse_strides[0] + h * lse_strides[1] + rows.to(tl.int64) * lse_strides[2]
    part_ptrs = part_ptr + b * part_strides[0] + h * part_strides[1] + rows.to(tl.int64) * part_strides[2]
    lse = tl.load(lse_ptrs, mask=rows < S, other=0.0)
    part = tl.load(part_ptrs, mask=rows < S, other=0.0)
    m = tl.maximum(tl.maximum(lse, part), LOWEST)  # finite: -inf - -inf would be NaN where neither has seen a key
    old, new = tl.exp(lse - m), tl.exp(part - m)
    total = old + new
    old, new = old / tl.where(total == 0, 1.0, total), new / tl.where(total == 0, 1.0, total)
    out_ptrs, inside = tile_ptrs(out_ptr, out_strides, b, h, row, S, D, BLOCK, BLOCK_D)
    o_ptrs, _ = tile_ptrs(o_ptr, o_strides, b, h, row, S, D, BLOCK, BLOCK_D)
    out, o = tl.load(out_ptrs, mask=inside, other=0.0), tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptrs, out * old[:, None] + o * new[:, None], mask=inside)
    tl.store(lse_ptrs, m + tl.log(total), mask=rows < S)


def merge(out, lse, o, part):
    """Merge (o [B, H, S, D], part [B, H, S]) into (out, lse) of the same shapes, in fp32 and in place."""
    B, H, S, D = o.shape
    if o.numel():
        merge_kernel[(B * H * triton.cdiv(S, 64),)](
            out, lse, o, part, out.stride(), lse.stride(), o.stride(), part.stride(), H, S, D, 64,
            max(16, triton.next_power_of_2(D)),
        )  # fmt: skip


# ---- Which rank holds which tokens, and which keys they see -------------------------------------------------------


def shard(t, rank, world, zigzag=False):
    """This rank's slice of the whole sequence, along dimension 2: a contiguous p-th, or chunks r and 2 p - 1 - r."""
    chunks = t.chunk(2 * world if zigzag else world, dim=2)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], 2) if zigzag else chunks[rank].contiguous()


def unshard(parts, zigzag=False):
    """The whole sequence from the ranks' slices."""
    if not zigzag:
        return torch.cat(parts, 2)
    halves = [part.chunk(2, dim=2) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], 2)


def _seen(rank, source, S, causal, zigzag):
    """(rows of this rank, keys of the source, causal): the visible part of the two slices, or None."""
    whole = slice(0, S)
    if not causal or rank == source:
        return whole, whole, causal  # a rank's tokens are in order, though other ranks hold those between them
    if not zigzag:
        return (whole, whole, False) if source < rank else None
    # Chunks r < 2 p - 1 - r. A source of lower rank: its chunk one is before both of these, its chunk two after.
    return (whole, slice(0, S // 2), False) if source < rank else (slice(S // 2, S), whole, False)


# ---- The ring -----------------------------------------------------------------------------------------------------


class Message:
    """Sends a tensor to the next rank and receives the previous rank's, which wait() returns."""

    def __init__(self, t, group):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        following, before = ((rank + way) % world for way in (1, -1))
        if group is not None:
            following, before = dist.get_global_rank(group, following), dist.get_global_rank(group, before)
        self.where = t.device
        self.sent = t if dist.get_backend(group) == "nccl" else t.cpu()  # gloo's messages begin and end in host memory
        self.arriving = torch.empty_like(self.sent)
        ops = [
            dist.P2POp(dist.isend, self.sent, following, group),
            dist.P2POp(dist.irecv, self.arriving, before, group),
        ]
        self.requests = dist.batch_isend_irecv(ops)

    def wait(self):
        for request in self.requests:
            request.wait()  # with NCCL the stream waits, and the host goes on
        return self.arriving.to(self.where)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, zigzag, group):
        rank, world, S = dist.get_rank(group), dist.get_world_size(group), q.shape[2]
        out = torch.zeros(q.shape, device=q.device)
        lse = torch.full(q.shape[:-1], -math.inf, device=q.device)
        kv = torch.stack([k, v])  # one message for both
        for step in range(world):
            message = Message(kv, group) if step + 1 < world else None
            if found := _seen(rank, (rank - step) % world, S, causal, zigzag):
                rows, keys, diagonal = found
                o, part = attention_forward(q[:, :, rows], *kv[:, :, :, keys], causal=diagonal, scale=scale)
                merge(out[:, :, rows], lse[:, :, rows], o, part)
            kv = message.wait() if message else kv
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, scale, zigzag, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        """The same ring. dK and dV of a slice, in fp32, travel one step behind it, and each rank adds its part. P is
        exp(s - lse) with the lse of all keys, so each step's part of dQ, dK and dV only has to be added."""
        q, k, v, out, lse = ctx.saved_tensors
        causal, scale, zigzag, group = ctx.options
        rank, world, S = dist.get_rank(group), dist.get_world_size(group), q.shape[2]
        dq, kv, gradients = torch.zeros(q.shape, device=q.device), torch.stack([k, v]), None
        for step in range(world):
            message = Message(kv, group) if step + 1 < world else None
            mine = torch.zeros(kv.shape, device=q.device)
            if found := _seen(rank, (rank - step) % world, S, causal, zigzag):
                rows, keys, diagonal = found
                parts = (t[:, :, rows] for t in (grad_out, q)), kv[:, :, :, keys], (out[:, :, rows],)
                d = attention_backward(*(t for part in parts for t in part), lse[:, :, rows].contiguous(),
                                       causal=diagonal, scale=scale)  # fmt: skip
                dq[:, :, rows] += d[0]
                mine[0, :, :, keys] += d[1]
                mine[1, :, :, keys] += d[2]
            gradients = Message(gradients.wait().add_(mine) if gradients else mine, group)
            kv = message.wait() if message else kv
        dk, dv = gradients.wait().to(k.dtype)  # the last step's message brings them home
        return dq.to(q.dtype), dk, dv, None, None, None, None


def ring_attention(q, k, v, causal=False, scale=None, zigzag=False, group=None):
    """Attention over a sequence of which each process of the group holds a slice; differentiable once.

    q [B, H, S / p, D], k and v [B, H_kv, S / p, D]: this process's slice, as shard() cuts it, the same size in all.
    With zigzag=True the slices are in zigzag order, for causal attention. Returns out [B, H, S / p, D]. Raises as
    lesson 5 does, and for slices of different lengths or, in zigzag order, of odd ones.
    """
    expect_heads(q.detach(), k.detach(), v.detach(), causal, None, scale)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} tokens and k {k.shape[2]}: a process holds the same slice of all three")
    if zigzag and q.shape[2] % 2:
        raise ValueError(f"a slice of {q.shape[2]} tokens: in zigzag order it is two chunks, so make it even")
    return _Ring.apply(q, k, v, causal, scale, zigzag, group)


# ---- The claims ---------------------------------------------------------------------------------------------------

ORDERS = {"whole": (False, False), "in a row": (True, False), "zigzag": (True, True)}  # (causal, zigzag)


def merging():
    """Partial results merge exactly to the whole, in any sizes and order, one of them empty."""
    q, k, v, *_ = inputs(1, 2, 9, 16, S_k=70)
    whole = attention_forward(q, k, v)
    for cuts in ((slice(0, 1), slice(1, 50), slice(50, 70)), (slice(50, 70), slice(0, 0), slice(0, 50))):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, device=DEVICE)
        for keys in cuts:
            merge(out, lse, *attention_forward(q, k[:, :, keys], v[:, :, keys]))
        torch.testing.assert_close((out, lse), whole, rtol=1e-5, atol=1e-6)


def _inputs(world):
    """The same on every rank: q, k, v of the whole sequence and the gradient of its output; chunks of 10 tokens."""
    torch.manual_seed(0)
    q, k, v, *_ = inputs(1, 4, 20 * world, 16, H_kv=2)
    return q, k, v, torch.randn_like(q) + 0.5


def _work(rank, world, where):
    where = DEVICE if where.type == "cpu" else where  # fewer GPUs than ranks: they share one, and gloo carries
    native, found, group = dist.batch_isend_irecv, {}, dist.new_group(list(range(world)))
    for name, (causal, zigzag) in ORDERS.items():
        sent = []

        def counted(ops, sent=sent):
            sent += [op.tensor.nbytes for op in ops if op.op is dist.isend]
            return native(ops)

        *qkv, grad = (shard(t.to(where), rank, world, zigzag) for t in _inputs(world))
        with mock.patch.object(dist, "batch_isend_irecv", counted):
            out = ring_attention(*(t.requires_grad_() for t in qkv), causal, None, zigzag, group)
            forward = sum(sent)
            grads = torch.autograd.grad(out, qkv, grad)
        found[name] = {"results": [t.detach().cpu() for t in (out, *grads)], "sent": [forward, sum(sent) - forward]}
    return found


@functools.cache
def _ran(world):
    """The results of every rank; the processes are started once for all steps."""
    return on_ranks(_work, world)


def exact():
    """2 and 3 processes compute what one computes on the whole sequence: outputs and gradients, to fp32's digits."""
    for world in (2, 3):
        q, k, v, grad = (t.double().cpu() for t in _inputs(world))
        for name, (causal, zigzag) in ORDERS.items():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            expected = reference(*leaves, causal)[0]
            expected = [expected, *torch.autograd.grad(expected, leaves, grad)]
            found = zip(*(rank[name]["results"] for rank in _ran(world)), strict=True)
            for ours, right in zip(found, expected, strict=True):
                error = (unshard(ours, zigzag) - right).abs().max() / right.abs().max()
                assert error < 1e-5, (world, name, error)


def messages():
    """A process sends (p - 1) slices of K and V forward; backward these again, and p slices of dK and dV in fp32."""
    for world in (2, 3):
        slice_of_kv = 2 * 2 * 20 * 16 * 4  # K and V, 2 heads, 20 tokens, D = 16, fp32
        for rank in _ran(world):
            for name in ORDERS:
                assert rank[name]["sent"] == [(world - 1) * slice_of_kv, (world - 1 + world) * slice_of_kv]


def balance():
    """Causal, p processes: contiguous slices take p - 1/2 slices of work at the slowest rank, zigzag order p / 2."""

    def slowest(world, zigzag, S=64):
        total = 0
        for step in range(world):
            work = [0.0]
            for rank in range(world):
                if found := _seen(rank, (rank - step) % world, S, True, zigzag):
                    rows, keys, diagonal = found
                    work.append((rows.stop - rows.start) * (keys.stop - keys.start) / (2 if diagonal else 1))
            total += max(work)
        return total / S**2

    for world in (2, 3, 8):
        assert slowest(world, False) == world - 0.5
        assert slowest(world, True) == world / 2


def refused():
    """Slices of different lengths, an odd one in zigzag order, bad heads: refused before anything is sent."""
    q, k, v, *_ = inputs(1, 2, 9, 16)
    cases = {"9 tokens and k 8": (q, k[:, :, :8], v[:, :, :8]), "make it even": (q, k, v, True, None, True)}
    cases["head_dim"] = q, k[..., :8], v[..., :8]
    for says, args in cases.items():
        said = ""
        try:
            ring_attention(*args)
        except ValueError as error:
            said = str(error)
        assert says in said, (says, said)


LESSON = Steps(
    (merging, exact, messages, balance, refused),
    about=About(
        teaches="a sequence over processes: messages hidden by matmuls, causal in zigzag order, gradients that travel",
        hours=1,
        pictures=("ring_attention", "zigzag"),
    ),
)

if __name__ == "__main__":
    LESSON.main()
