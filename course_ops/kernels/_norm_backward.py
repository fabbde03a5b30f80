"""The gradients of a norm of long rows, for layer_norm, rms_norm and add_norm.

With x_hat = (x - mean) rstd, g = dy w, and c1, c2 the means over the row of g x_hat and of g:
    dx = rstd (g - x_hat c1 - c2)      dw = sum over rows of dy x_hat      db = sum over rows of dy
RMSNorm has no mean, so no c2 and no db. If x was the sum of a residual and a branch, both get dx + dtotal.

The idea: dw and db are sums over rows, so a program takes many rows, one after the other, and keeps its sums in fp32
registers. There are as many programs as the GPU runs at once. Each stores its sums once, at the end:

    program 0   row 0, row P, row 2P, ...     -> partial dw, db     P programs
    program 1   row 1, row P + 1, ...         -> partial dw, db     the next rows are copied to shared memory meanwhile

A program owns CHUNKS times BLOCK columns. In each chunk a thread has four neighbouring columns. So few lanes idle
whatever N is, and a thread has the same columns of 16-bit and of 32-bit tensors.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from course_ops._common import shared_memory, triton_interprets
from course_ops.kernels._rows import (
    Rows,
    common_multiple_of,
    look,
    multiple,
    opaque,
    pack_columns,
    pack_pair,
    publish,
    settled,
    unpack_columns,
    unpack_pair,
)


@triton.jit
def centred_sums(dy, x, w, mean, rstd, CHUNKS: tl.constexpr, CENTRED: tl.constexpr):
    """Sums over the columns in fp32: of g x_hat, and of g if CENTRED, otherwise 0."""
    g = dy[0] * w[0]
    lanes_g = g
    lanes_gx = g * (x[0] - mean)
    for chunk in tl.static_range(1, CHUNKS):
        g = dy[chunk] * w[chunk]
        lanes_g += g
        lanes_gx += g * (x[chunk] - mean)
    if CENTRED:  # both in one reduction, so that the warps meet once
        c1, c2 = tl.split(tl.sum(tl.join(lanes_gx, lanes_g), axis=0))
    else:
        c1, c2 = tl.sum(lanes_gx, axis=0), 0.0
    return c1 * rstd, c2 + tl.zeros_like(rstd)


@triton.jit
def norm_backward_walk_kernel(
    dtotal_ptr,  # [M, N], or None where x is not a sum
    dy_ptr, x_ptr, w_ptr,  # [M, N] twice, [N]
    mean_ptr, rstd_ptr,  # [M] each, fp32; mean_ptr is None for RMSNorm
    dx_ptr, dresidual_ptr,  # [M, N] each; dresidual_ptr is None where dtotal_ptr is
    partial_dw_ptr, partial_db_ptr,  # [programs, N] each, fp32; partial_db_ptr is None without a bias
    M, N, stride_dtotal, stride_dy, stride_x,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_dtotal = multiple(N, MULTIPLE), multiple(stride_dtotal, MULTIPLE)
    stride_dy, stride_x = multiple(stride_dy, MULTIPLE), multiple(stride_x, MULTIPLE)
    CENTRED: tl.constexpr = mean_ptr is not None
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    w = ()
    dw = ()
    db = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        w = w + (tl.load(w_ptr + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
        dw = dw + (tl.zeros((BLOCK,), tl.float32),)  # noqa: RUF005
        db = db + (tl.zeros((BLOCK,), tl.float32),)  # noqa: RUF005
    for row in tl.range(program, M, programs, num_stages=STAGES):
        at = row + tl.arange(0, 1)  # a tensor, which is loaded ahead as the rows are
        rstd = tl.load(rstd_ptr + at)
        mean = tl.load(mean_ptr + at) if CENTRED else 0.0
        dy = ()
        x = ()
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            dy = dy + (tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
            x = x + (tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
        c1, c2 = centred_sums(widened(dy, CHUNKS), widened(x, CHUNKS), widened(w, CHUNKS), mean, rstd, CHUNKS, CENTRED)
        c1, c2 = c1 / N, c2 / N  # [1] each
        before_dw = dw
        before_db = db
        dw = ()
        db = ()
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            wide = opaque(dy[chunk]).to(tl.float32)
            x_hat = (opaque(x[chunk]).to(tl.float32) - mean) * rstd  # in the padding dy is 0, and so is dw
            dx = rstd * (wide * opaque(w[chunk]).to(tl.float32) - x_hat * c1 - c2)
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + row * stride_dtotal + cols, mask=cols < N, other=0.0).to(tl.float32)
                tl.store(dresidual_ptr + row * N + cols, dx, mask=cols < N)
            tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)
            dw = dw + (before_dw[chunk] + wide * x_hat,)  # noqa: RUF005
            db = db + (before_db[chunk] + wide,)  # noqa: RUF005
    store_partials(partial_dw_ptr, partial_db_ptr, dw, db, program * N, lanes, N, CHUNKS, BLOCK)


@triton.jit
def widened(chunks, CHUNKS: tl.constexpr):
    wide = ()
    for chunk in tl.static_range(CHUNKS):
        wide = wide + (chunks[chunk].to(tl.float32),)  # noqa: RUF005
    return wide


@triton.jit
def unpacked(chunks, ptr, CHUNKS: tl.constexpr):
    """As widened, of chunks packed by pack_columns from what ptr points to."""
    wide = ()
    for chunk in tl.static_range(CHUNKS):
        wide = wide + (unpack_columns(chunks[chunk], ptr.dtype.element_ty),)  # noqa: RUF005
    return wide


@triton.jit
def store_partials(partial_dw_ptr, partial_db_ptr, dw, db, start, lanes, N, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        tl.store(partial_dw_ptr + start + cols, dw[chunk], mask=cols < N)
        if partial_db_ptr is not None:
            tl.store(partial_db_ptr + start + cols, db[chunk], mask=cols < N)


# PARTS programs share a row, and each needs the others' sums. So that no part waits, each works one row ahead: it
# publishes its sums of the next row before it reads the others' sums of this row. They published those a step ago.
@triton.jit
def norm_backward_group_kernel(
    dtotal_ptr, dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr,  # as above
    partial_dw_ptr, partial_db_ptr,  # [groups, N] each
    sums_ptr,  # [M, WORDS], -1 at first; then a part's share of c1 in the high half and of c2 in the low
    M, N, stride_dtotal, stride_dy, stride_x, groups,
    PARTS: tl.constexpr, WORDS: tl.constexpr,  # PARTS words of a row; or 1, where they have been added up
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PUBLISH: tl.constexpr, FINISH: tl.constexpr, MULTIPLE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    N, stride_dtotal = multiple(N, MULTIPLE), multiple(stride_dtotal, MULTIPLE)
    stride_dy, stride_x = multiple(stride_dy, MULTIPLE), multiple(stride_x, MULTIPLE)
    CENTRED: tl.constexpr = mean_ptr is not None
    part = tl.program_id(0) % PARTS
    group = (tl.program_id(0) // PARTS).to(tl.int64)  # int64, and so are the rows: row * stride passes 2^31
    lanes = part * (CHUNKS * BLOCK) + tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    w = ()
    dw = ()
    db = ()
    dy = ()
    x = ()
    for chunk in tl.static_range(CHUNKS):
        cols = chunk * BLOCK + lanes
        w = w + (pack_columns(tl.load(w_ptr + cols, mask=cols < N, other=0.0), PACK),)  # noqa: RUF005
        dw = dw + (tl.zeros((BLOCK,), tl.float32),)  # noqa: RUF005
        db = db + (tl.zeros((BLOCK,), tl.float32),)  # noqa: RUF005
        first_dy = tl.load(dy_ptr + group * stride_dy + cols, mask=cols < N, other=0.0)
        first_x = tl.load(x_ptr + group * stride_x + cols, mask=cols < N, other=0.0)
        dy = dy + (pack_columns(first_dy, PACK),)  # noqa: RUF005
        x = x + (pack_columns(first_x, PACK),)  # noqa: RUF005
    rstd = tl.load(rstd_ptr + group + one)
    mean = tl.load(mean_ptr + group + one) if CENTRED else tl.zeros((1,), tl.float32)
    if PUBLISH:
        first = centred_sums(
            unpacked(dy, dy_ptr, CHUNKS), unpacked(x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS), mean, rstd,
            CHUNKS, CENTRED,
        )  # fmt: skip
        publish(sums_ptr + group * PARTS + part + one, pack_pair(*first))
    slots = tl.arange(0, SLOTS)
    for row in tl.range(group, M, groups, num_stages=STAGES):
        at = sums_ptr + row * WORDS + slots
        if FINISH:
            sums = look(at, slots < WORDS, 0)
        after = row + groups
        there = (after + one) < M
        next_rstd = tl.load(rstd_ptr + after + one, mask=there, other=0.0)
        next_mean = tl.load(mean_ptr + after + one, mask=there, other=0.0) if CENTRED else mean
        next_dy = ()
        next_x = ()
        for chunk in tl.static_range(CHUNKS):
            cols = chunk * BLOCK + lanes
            own = (cols < N) & (after < M)
            loaded_dy = tl.load(dy_ptr + after * stride_dy + cols, mask=own, other=0.0)
            loaded_x = tl.load(x_ptr + after * stride_x + cols, mask=own, other=0.0)
            next_dy = next_dy + (pack_columns(loaded_dy, PACK),)  # noqa: RUF005
            next_x = next_x + (pack_columns(loaded_x, PACK),)  # noqa: RUF005
        if PUBLISH:
            ahead = centred_sums(
                unpacked(next_dy, dy_ptr, CHUNKS), unpacked(next_x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS),
                next_mean, next_rstd, CHUNKS, CENTRED,
            )  # fmt: skip
            publish(sums_ptr + after * PARTS + part + one, pack_pair(*ahead), mask=there)
        if FINISH:
            if PUBLISH:
                sums = settled(sums, tl.where(slots < WORDS, at, sums_ptr))
            c1, c2 = unpack_pair(sums)
            c1 = tl.sum(c1, axis=0) / N
            c2 = tl.sum(c2, axis=0) / N if CENTRED else 0.0
            before_dw = dw
            before_db = db
            dw = ()
            db = ()
            for chunk in tl.static_range(CHUNKS):
                cols = chunk * BLOCK + lanes
                wide = unpack_columns(dy[chunk], dy_ptr.dtype.element_ty)
                x_hat = (unpack_columns(x[chunk], x_ptr.dtype.element_ty) - mean) * rstd
                dx = rstd * (wide * unpack_columns(w[chunk], w_ptr.dtype.element_ty) - x_hat * c1 - c2)
                if dtotal_ptr is not None:
                    dx += tl.load(dtotal_ptr + row * stride_dtotal + cols, mask=cols < N, other=0.0).to(tl.float32)
                    tl.store(dresidual_ptr + row * N + cols, dx, mask=cols < N)
                tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)
                dw = dw + (before_dw[chunk] + wide * x_hat,)  # noqa: RUF005
                db = db + (before_db[chunk] + wide,)  # noqa: RUF005
        dy = next_dy
        x = next_x
        mean = next_mean
        rstd = next_rstd
    if FINISH:
        store_partials(partial_dw_ptr, partial_db_ptr, dw, db, group * N, lanes, N, CHUNKS, BLOCK)


REGISTERS = 65536  # of an SM
COLUMNS = 4  # neighbours of a thread in a chunk: 16 bytes in fp32, 8 in 16 bits


@dataclass(frozen=True)
class Walk:
    """Programs of `warps` warps that own `chunks` chunks of a row, `per_sm` of them on an SM at a time."""

    warps: int
    chunks: int
    per_sm: int

    @property
    def block(self) -> int:
        return COLUMNS * 32 * self.warps

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, REGISTERS // (32 * self.warps * self.per_sm) // 8 * 8)

    def stages(self, bytes_a_column: int, shared: int) -> int:
        """Of the pipeline of rows: two are under way beside the one in use where `shared`, of an SM, holds them."""
        room = shared // self.per_sm - 3072  # what the reductions take
        return max(1, min(3, 1 + room // (self.chunks * self.block * bytes_a_column)))


def walk(N: int, held: float) -> Walk:
    """The programs for rows of N columns. A thread holds `held` registers of each of its columns.

    The first aim is 16 warps on an SM, as far as its registers suffice; the second is few idle lanes.
    """
    found = []
    for warps in (4, 8, 16):
        chunks = triton.cdiv(N, COLUMNS * 32 * warps)
        thread = 48 + COLUMNS * chunks * held  # 48: addresses, masks, what one chunk is computed with
        per_sm = REGISTERS // (32 * warps * 8 * math.ceil(thread / 8))
        if per_sm and thread <= 168:
            found.append(Walk(warps, chunks, per_sm))
    return max(found, key=lambda w: (min(16, w.warps * w.per_sm), -w.chunks * w.block), default=Walk(16, chunks, 1))


def norm_backward_walk(dy, x, w, mean, rstd, bias=False, dtotal=None):
    """dy, x [M, N], w [N], mean (None: RMSNorm) and rstd [M] -> dx, dresidual, dw, db; N <= 8192.

    With dtotal [M, N], of x's dtype: dresidual as x, dx as dy. Otherwise dresidual is None, and dx as x.
    """
    rows = Rows.of(x)
    dx, dresidual, dw, db = _gradients(dy, x, w, bias, dtotal)
    if dx.numel():
        tensors = [t for t in (dtotal, dy, x) if t is not None]
        strides = [t.stride(0) for t in tensors]
        # dw, perhaps db, and w; dy and x, which wait for the row's sums.
        plan = walk(rows.N, (3 if bias else 2) + (dy.element_size() + x.element_size()) / 4)
        programs = min(rows.M, plan.per_sm * rows.sms)
        partial_dw, partial_db = partial_sums(programs, x, bias)
        norm_backward_walk_kernel[(programs,)](
            dtotal, dy, x, w, mean, rstd, dx, dresidual, partial_dw, partial_db, rows.M, rows.N,
            *_strides(dtotal, dy, x), plan.chunks, plan.block,
            plan.stages(sum(t.element_size() for t in tensors), shared_memory(x.device)),
            common_multiple_of(rows.N, *strides), num_warps=plan.warps, maxnreg=plan.registers,
        )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dresidual, dw, db


def group(N: int) -> tuple[int, Walk]:
    """Parts of a row, and the programs that have one each: of at most 2048 columns, since those work on two rows."""
    parts = max(1, triton.cdiv(N, 2048))
    return parts, Walk(4, triton.cdiv(triton.cdiv(N, parts), 512), 3)


def norm_backward_group(dy, x, w, mean, rstd, bias=False, dtotal=None):
    """As norm_backward_walk for rows of any length, in one launch where all parts of a row run at once."""
    rows = Rows.of(x)
    dx, dresidual, dw, db = _gradients(dy, x, w, bias, dtotal)
    if dx.numel():
        parts, plan = group(rows.N)
        groups = max(1, min(rows.M, plan.per_sm * rows.sms // parts))
        tensors = [t for t in (dtotal, dy, x) if t is not None]
        sums = torch.full((rows.M, parts), -1, dtype=torch.int64, device=x.device)
        partial_dw, partial_db = partial_sums(groups, x, bias)
        strides = [t.stride(0) for t in tensors]
        # One launch needs all programs at once: a cooperative launch is refused where they do not fit. Otherwise, and
        # in the interpreter, the first launch publishes all sums, and the second one uses them. Where a row has more
        # parts than run at once, their words may be more than a program can hold, so they are added up in between.
        fits = parts <= plan.per_sm * rows.sms
        at_once = fits and not triton_interprets()
        words = parts
        for publish_, finish in ((True, True),) if at_once else ((True, False), (False, True)):
            if finish and not fits:
                sums, words = sums.view(torch.float32).view(rows.M, parts, 2).sum(1).view(torch.int64), 1
            norm_backward_group_kernel[(groups * parts,)](
                dtotal, dy, x, w, mean, rstd, dx, dresidual, partial_dw, partial_db, sums, rows.M, rows.N,
                *_strides(dtotal, dy, x), groups, parts, words, _slots(words, plan.warps) if finish else 1,
                plan.chunks, plan.block,
                plan.stages(sum(t.element_size() for t in tensors), shared_memory(x.device)), publish_, finish,
                common_multiple_of(rows.N, *strides), all(length % COLUMNS == 0 for length in (rows.N, *strides)),
                num_warps=plan.warps, maxnreg=plan.registers, launch_cooperative_grid=at_once,
            )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dresidual, dw, db


def _slots(words: int, warps: int) -> int:
    """Lanes to look at the parts' sums with: within one warp, or one for each thread."""
    slots = triton.next_power_of_2(words)
    return slots if slots <= 32 else max(slots, 32 * warps)


def _strides(dtotal, dy, x):
    return 0 if dtotal is None else dtotal.stride(0), dy.stride(0), x.stride(0)


def _gradients(dy, x, w, bias, dtotal):
    dx = torch.empty(x.shape, dtype=x.dtype if dtotal is None else dy.dtype, device=x.device)
    dresidual = None if dtotal is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw, db = (torch.zeros_like(w) if len(x) == 0 else torch.empty_like(w) for _ in range(2))  # a sum of no rows is 0
    return dx, dresidual, dw, db if bias else None


@triton.jit
def sum_partials_kernel(
    partial_dw_ptr, partial_db_ptr, dw_ptr, db_ptr,  # [P, N] in fp32 twice -> [N] twice
    P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N = multiple(N, MULTIPLE)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
        mask = (p < P) & (cols < N)
        dw += tl.load(partial_dw_ptr + p * N + cols, mask=mask, other=0.0)
        if partial_db_ptr is not None:
            db += tl.load(partial_db_ptr + p * N + cols, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    if partial_db_ptr is not None:
        tl.store(db_ptr + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


def sum_partials(partial_dw, partial_db, dw, db):
    """Add up [P, N] partial sums into dw and db [N], always in the same order: the same bits in every run."""
    P, N = partial_dw.shape
    sum_partials_kernel[(triton.cdiv(N, 32),)](
        partial_dw, partial_db, dw, db, P, N, BLOCK_P=64, BLOCK_N=32, MULTIPLE=common_multiple_of(N)
    )


def partial_sums(programs, x, bias):
    """Of dw and, with a bias, of db: [programs, N] in fp32."""
    partial_dw, partial_db = torch.empty((2, programs, x.shape[1]), dtype=torch.float32, device=x.device)
    return partial_dw, partial_db if bias else None
