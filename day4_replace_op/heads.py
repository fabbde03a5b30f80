"""What lessons 4 to 8 share: what attention is, with all its options, and tiles of [B, H, S, D] tensors.

q [B, H, S_q, D]; k, v [B, H_kv, S_k, D], H a multiple of H_kv; causal: query i of S_q sees keys j <= i + S_k - S_q;
window: of these the last `window`; scale: positive, None for 1 / sqrt(D); a query that sees nothing gets zeros.
"""

import math
from unittest import mock

from lessonkit import DEVICE, Refusal, Unsupported, Work, device, expect
from lessonkit.modes.interpreter import watched

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
# Where a maximum starts. Not -inf: as long as a row has seen no key, -inf - -inf would make it NaN for good.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def reference(q, k, v, causal=False, window=None, scale=None):
    """A head at a time; q [B, H, S_q, D], k and v [B, H_kv, S_k, D] -> o as q, lse [B, H, S_q]."""
    (B, H, S_q, D), (_, H_kv, S_k, _) = q.shape, k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    o, lse = torch.zeros_like(q), torch.empty(B, H, S_q, dtype=wide, device=q.device)
    hidden = ~visible(S_q, S_k, causal, window, q.device)
    for b, h in ((b, h) for b in range(B) for h in range(H)):
        s = (q[b, h] @ k[b, h * H_kv // H].T) * (1 / math.sqrt(D) if scale is None else scale)
        s = s.masked_fill(hidden, -math.inf)
        lse[b, h] = torch.logsumexp(s.to(wide), -1)
        p = s.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)  # of a row that sees nothing it is 0 / 0
        o[b, h] = p @ v[b, h * H_kv // H]
    return o, lse


def visible(S_q, S_k, causal, window, device):
    """Which key each query sees, [S_q, S_k]; the last query stands at the last key."""
    ahead = torch.arange(S_k, device=device) - (torch.arange(S_q, device=device)[:, None] + S_k - S_q)
    return (ahead <= (0 if causal else S_k + S_q)) & (ahead > -(window or S_k + S_q))


def tiled(tensors, rows, tma):
    """Descriptors of [B, H, S, D] tensors for tiles of so many rows each, or the tensors."""
    if not tma:
        return tensors
    block_d = max(16, triton.next_power_of_2(tensors[0].shape[-1]))
    return [TensorDescriptor.from_tensor(t, [1, 1, n, block_d]) for t, n in zip(tensors, rows, strict=True)]


def at_once(bytes_a_head):
    """How many heads to work on at a time, so that what their programs share, bytes_a_head each, fills half of L2."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device.HAS_GPU else 2**16 if device.INTERPRETED else 2**26
    return max(1, l2 // 2 // max(1, bytes_a_head))


@triton.jit
def load_tile(source, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows from `row` on of a head of a [B, H, S, D] tensor; zeros past S and D, which add nothing to a product."""
    if TMA:
        return source.load([b, h, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptrs, inside = tile_ptrs(source, strides, b, h, row, S, D, ROWS, BLOCK_D)
        return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def store_tile(target, x, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        target.store([b, h, row, 0], x.to(target.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptrs, inside = tile_ptrs(target, strides, b, h, row, S, D, ROWS, BLOCK_D)
        tl.store(ptrs, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def tile_ptrs(base, strides, b, h, row, S, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    rows, cols = row + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    # int64 before each stride: any of these may pass 2^31
    head = base + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    ptrs = head + rows.to(tl.int64) * strides[2] + cols.to(tl.int64) * strides[3]
    return ptrs, (rows < S) & (cols < D)


def expect_heads(q, k, v, causal, window, scale, **more):
    """The scale, or the error that a bad argument deserves. more: what else has q's dimensions and dtype."""
    expect(q=q, k=k, v=v, **more, ndim=4, same_dtype=True)
    if k.shape != v.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: a value belongs to each key")
    (B, H, _, D), (B_kv, H_kv, _, D_kv) = q.shape, k.shape
    if (B_kv, D_kv) != (B, D):
        raise ValueError(f"k is {tuple(k.shape)}, q {tuple(q.shape)}: batch (first) and head_dim (last) must agree")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q has {H} heads, k {H_kv}: expected a multiple, so that each serves as many")
    if not 0 < D <= 256:
        raise ValueError(f"q has head_dim {D}, expected 1 to 256: registers hold no longer row of the output")
    if window is not None and not (causal and window > 0):
        raise ValueError(f"window = {window}, causal = {causal}: a window is 1 or more keys, and needs causal=True")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale = {scale}, expected a positive number: to negate the scores, pass -q")
    return 1 / math.sqrt(D) if scale is None else scale


def expect_cache(q, k, v, lengths, causal, scale):
    """As expect_heads, where of k and v each sequence has lengths [B] int32 keys in use, or None for all."""
    scale = expect_heads(q, k, v, causal, None, scale)
    if lengths is not None:
        expect(lengths=lengths, ndim=1, dtypes=(torch.int32,), contiguous=True)
        if len(lengths) != len(q):
            raise ValueError(f"lengths has {len(lengths)} entries for {len(q)} sequences: pass one each")
    return scale


@triton.jit
def seen(rows, keys, S_k, offset, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether this key is one of this query's, of rows [:, None] and keys [None, :] or the other way round."""
    ahead = keys - (rows + offset)
    mask = keys < S_k
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
    return mask


def counted(call):
    """(FLOPs of the products, bytes read) of a call, in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    native, flops = InterpreterBuilder.create_dot, 0

    def create_dot(self, a, b, *rest):
        nonlocal flops
        flops += 2 * math.prod(a.data.shape) * b.data.shape[1]
        return native(self, a, b, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot), watched() as traffic:
        call()
    return flops, traffic.read


def inputs(B, H, S, D, S_k=None, H_kv=None, causal=False, window=None, scale=None, layout="bhsd", dtype=torch.float32):
    # As in lesson 1: scores far from 0, growing along the keys. layout: of memory; "wide" has every second number.
    def make(H, S, mean):
        t = torch.randn(B, H, S, D, device=DEVICE) + mean
        t = t.to(dtype)
        if layout == "bshd":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.stack([t, t + 1], -1)[..., 0] if layout == "wide" else t

    S_k = S if S_k is None else S_k
    q, k, v = make(H, S, 1.0), make(H_kv or H, S_k, -1.0), make(H_kv or H, S_k, 0.5)
    k += torch.linspace(-0.5, 0.5, S_k, device=DEVICE)[:, None].to(dtype)
    return q, k, v, causal, window, scale


def work(B, H, S, D, dtype, S_k=None, H_kv=None, causal=False, window=None, **_):
    S_k = S if S_k is None else S_k
    bytes = (2 * B * H * S * D + 2 * B * (H_kv or H) * S_k * D) * dtype.itemsize + 4 * B * H * S
    return Work(bytes=bytes, flops=4 * B * H * D * pairs(S, S_k, causal, window))


def pairs(S, S_k, causal, window):
    """How many (query, key) are seen: what FLOPs are counted by."""
    last = [min(S_k, max(0, i + 1 + S_k - S)) if causal else S_k for i in range(S)]
    return sum(min(n, window or n) for n in last)


# PyTorch's two fast backends by their own names, since F.scaled_dot_product_attention keeps the lse to itself.
def _sdpa_flash(q, k, v, causal=False, window=None, scale=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False,
        scale=scale, window_size_left=window and window - 1, window_size_right=None,
    )  # fmt: skip
    return o.transpose(1, 2), lse


def _sdpa_cudnn(q, k, v, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("cuDNN's backend in PyTorch has no window")
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o, lse.view(q.shape[:-1])


PEERS = {"SDPA flash": _sdpa_flash, "SDPA cuDNN": _sdpa_cudnn}


def _sdpa_flash_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("this entry into FlashAttention-2 has no window")
    S_q, S_k, zero = q.shape[2], k.shape[2], torch.zeros((), dtype=torch.uint64, device=q.device)  # no dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, S_q, S_k, 0.0, causal, zero, zero, scale=scale
    )


def _sdpa_cudnn_backward(grad_out, q, k, v, out, lse, causal=False, window=None, scale=None):
    if window:
        raise Unsupported("cuDNN's backend in PyTorch has no window")
    S_q, S_k, zero = q.shape[2], k.shape[2], torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse[..., None], zero, zero, None, None, None, S_q, S_k, 0.0, causal, scale=scale
    )


BACKWARD_PEERS = {"SDPA flash": _sdpa_flash_backward, "SDPA cuDNN": _sdpa_cudnn_backward}


def bad(change):
    return change(*inputs(1, 4, 8, 16)[:3])


# fmt: off
REFUSES = (
    Refusal("three heads for two", lambda f: f(*bad(lambda q, k, v: (q[:, :3], k[:, :2], v[:, :2]))),
            ValueError, "q has 3 heads, k 2"),
    Refusal("head_dim of 257", lambda f: f(*inputs(1, 1, 2, 257)), ValueError, "head_dim 257, expected 1 to 256"),
    Refusal("head_dim of k", lambda f: f(*bad(lambda q, k, v: (q, k[..., :8], v[..., :8]))), ValueError, "head_dim"),
    Refusal("a value too few", lambda f: f(*bad(lambda q, k, v: (q, k, v[:, :, 1:]))), ValueError, "v has shape"),
    Refusal("two dtypes", lambda f: f(*bad(lambda q, k, v: (q, k.half(), v))), TypeError, "k is torch.float16"),
    Refusal("another device", lambda f: f(*bad(lambda q, k, v: (q, k.to("meta"), v))), ValueError, "k is on meta"),
    Refusal("a window without causal", lambda f: f(*bad(lambda *t: t), window=4), ValueError, "needs causal=True"),
    Refusal("a negative scale", lambda f: f(*bad(lambda *t: t), scale=-1.0), ValueError, "pass -q"),
    Refusal("gradient lost", lambda f: f(*bad(lambda q, k, v: (q.requires_grad_(), k, v))), ValueError, "requires"),
)
# fmt: on
