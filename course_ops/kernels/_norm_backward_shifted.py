"""The gradients of a norm of rows that start at any address: walk and group of _norm_backward, with 16-byte loads.

A word is 16 bytes of the widest tensor: WIDTH elements. Rows that are WIDTH rows apart start at the same place within
a word. Here the rows of one program are that far apart, or a multiple of it. So all its rows have one shift. Each
thread has the same columns of every row. It loads their w once, and their dw and db stay in its registers.

Words are counted from the start of the tensor and not of the row. A row has N // WIDTH - 1 whole words, wherever it
starts. The WIDTH + N % WIDTH elements on either side of them are the row's sides. The row's part 0 has them, one in
each of its first threads. cp.async cannot copy two bytes, so the sides of rows ahead wait in registers.

A program stores its sums of dw and db as its rows lie: column 0 is `before` elements before a multiple of WIDTH. So
these stores take 16 bytes, too.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops._common import shared_memory, starts_early, triton_interprets
from course_ops.kernels._norm_backward import (
    Load,
    columns,
    group,
    held,
    in_threads,
    unpacked,
    walk,
    widened,
)
from course_ops.kernels._rows import (
    Rows,
    before_chunks,
    look,
    opaque,
    pack_columns,
    pack_pair,
    publish,
    settled,
    unpack_columns,
    unpack_pair,
)


@triton.jit
def first_word(begin, WIDTH: tl.constexpr):
    """Where the whole words of the row that starts at `begin` start. The compiler sees a multiple of WIDTH."""
    return (begin + WIDTH - 1) // WIDTH * WIDTH


@triton.jit
def side_columns(before, whole, THREADS: tl.constexpr):
    """[THREADS]: the columns of a row before its whole words and after them, then columns past the last one."""
    threads = tl.arange(0, THREADS)
    return tl.where(threads < before, threads, whole + threads)


@triton.jit
def sums_with_sides(
    dy, x, w, g_side, gx_side, mean, rstd,
    CHUNKS: tl.constexpr, CENTRED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """As centred_sums; each thread starts with its element of the sides."""
    lanes_g = g_side
    lanes_gx = gx_side
    for chunk in tl.static_range(CHUNKS):
        g = dy[chunk] * w[chunk]
        lanes_g += in_threads(g, THREADS, WIDTH)
        lanes_gx += in_threads(g * (x[chunk] - mean), THREADS, WIDTH)
    if CENTRED:  # both in one reduction, so that the warps meet once
        c1, c2 = tl.split(tl.sum(tl.join(lanes_gx, lanes_g), axis=0))
    else:
        c1, c2 = tl.sum(lanes_gx, axis=0), 0.0
    return c1 * rstd, c2 + tl.zeros_like(rstd)


@triton.jit
def norm_backward_shifted_walk_kernel(
    dtotal_ptr,  # [M, N], or None where x is not a sum
    dy_ptr, x_ptr, w_ptr,  # [M, N] twice, [N]
    mean_ptr, rstd_ptr,  # [M] each, fp32; mean_ptr is None for RMSNorm
    dx_ptr, dresidual_ptr,  # [M, N] each; dresidual_ptr is None where dtotal_ptr is
    partial_dw_ptr, partial_db_ptr,  # [programs, stride_partial] each, fp32; partial_db_ptr is None without a bias
    M, N, stride_dtotal, stride_dy, stride_x, stride_partial,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,  # columns of a chunk, and of the last one
    THREADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, EARLY_SUM: tl.constexpr,
):  # fmt: skip
    CENTRED: tl.constexpr = mean_ptr is not None
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    before = before_chunks(program * N, WIDTH)  # of each row of this program
    whole = (N // WIDTH - 1) * WIDTH
    side = side_columns(before, whole, THREADS)
    mine = side < N
    w_side = tl.load(w_ptr + side, mask=mine, other=0.0).to(tl.float32)
    dw_side = tl.zeros((THREADS,), tl.float32)
    db_side = tl.zeros((THREADS,), tl.float32)
    next_dy_side = tl.load(dy_ptr + program * stride_dy + side, mask=mine, other=0.0)
    next_x_side = tl.load(x_ptr + program * stride_x + side, mask=mine, other=0.0)
    w = ()
    dw = ()
    db = ()
    for chunk in tl.static_range(CHUNKS):
        cols = columns(chunk, CHUNKS, BLOCK, LAST)
        w = w + (tl.load(w_ptr + before + cols, mask=cols < whole, other=0.0),)  # noqa: RUF005
        dw = dw + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
        db = db + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
    for row in tl.range(program, M, programs, num_stages=STAGES):
        at = row + tl.arange(0, 1)  # a tensor, which is loaded ahead as the rows are
        rstd = tl.load(rstd_ptr + at)
        mean = tl.load(mean_ptr + at) if CENTRED else 0.0
        dy = ()
        x = ()
        for chunk in tl.static_range(CHUNKS):
            cols = columns(chunk, CHUNKS, BLOCK, LAST)
            dy_at = dy_ptr + first_word(row * stride_dy, WIDTH) + cols
            x_at = x_ptr + first_word(row * stride_x, WIDTH) + cols
            dy = dy + (tl.load(dy_at, mask=cols < whole, other=0.0),)  # noqa: RUF005
            x = x + (tl.load(x_at, mask=cols < whole, other=0.0),)  # noqa: RUF005
        dy_side = next_dy_side.to(tl.float32)
        x_side = next_x_side.to(tl.float32)
        after = row + programs
        own = mine & (after < M)
        next_dy_side = tl.load(dy_ptr + after * stride_dy + side, mask=own, other=0.0)
        next_x_side = tl.load(x_ptr + after * stride_x + side, mask=own, other=0.0)
        g_side = dy_side * w_side
        c1, c2 = sums_with_sides(
            widened(dy, CHUNKS), widened(x, CHUNKS), widened(w, CHUNKS), g_side, g_side * (x_side - mean), mean, rstd,
            CHUNKS, CENTRED, THREADS, WIDTH,
        )  # fmt: skip
        c1, c2 = c1 / N, c2 / N  # [1] each
        before_dw = dw
        before_db = db
        dw = ()
        db = ()
        for chunk in tl.static_range(CHUNKS):
            cols = columns(chunk, CHUNKS, BLOCK, LAST)
            wide = opaque(dy[chunk]).to(tl.float32)
            x_hat = (opaque(x[chunk]).to(tl.float32) - mean) * rstd  # in the padding dy is 0, and so is dw
            dx = rstd * (wide * opaque(w[chunk]).to(tl.float32) - x_hat * c1 - c2)
            to = first_word(row * N, WIDTH) + cols
            if dtotal_ptr is not None:
                dtotal_at = dtotal_ptr + first_word(row * stride_dtotal, WIDTH) + cols
                dx += tl.load(dtotal_at, mask=cols < whole, other=0.0).to(tl.float32)
                tl.store(dresidual_ptr + to, dx, mask=cols < whole)
            tl.store(dx_ptr + to, dx, mask=cols < whole)
            dw = dw + (before_dw[chunk] + wide * x_hat,)  # noqa: RUF005
            db = db + (before_db[chunk] + wide,)  # noqa: RUF005
        x_hat_side = (x_side - mean) * rstd
        dx_side = rstd * (g_side - x_hat_side * c1 - c2)
        if dtotal_ptr is not None:
            dx_side += tl.load(dtotal_ptr + row * stride_dtotal + side, mask=mine, other=0.0).to(tl.float32)
            tl.store(dresidual_ptr + row * N + side, dx_side, mask=mine)
        tl.store(dx_ptr + row * N + side, dx_side, mask=mine)
        dw_side += dy_side * x_hat_side
        db_side += dy_side
    if EARLY_SUM:
        gdc_launch_dependents()
    start = program * stride_partial + WIDTH
    store_shifted(partial_dw_ptr + start, dw, dw_side, 0, before, side, mine, whole, CHUNKS, BLOCK, LAST)
    if partial_db_ptr is not None:
        store_shifted(partial_db_ptr + start, db, db_side, 0, before, side, mine, whole, CHUNKS, BLOCK, LAST)


@triton.jit
def store_shifted(
    ptr, sums, sums_side, first, before, side, mine, whole, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """A program's sums of its columns: those of the row's first whole word at ptr, the sides around the words."""
    for chunk in tl.static_range(CHUNKS):
        cols = first + columns(chunk, CHUNKS, BLOCK, LAST)
        tl.store(ptr + cols, sums[chunk], mask=cols < whole)
    tl.store(ptr + (side - before), sums_side, mask=mine)


# PARTS programs share a row. Each part works one row ahead, as in norm_backward_group_kernel. Part 0 loads the sides
# two rows ahead. What it keeps of them is computed: Triton pipelines no loop that passes a loaded value on twice.
@triton.jit
def norm_backward_shifted_group_kernel(
    dtotal_ptr, dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr,  # as above
    partial_dw_ptr, partial_db_ptr,  # [groups, stride_partial] each
    sums_ptr,  # [M, PARTS], -1 at first; then a part's share of c1 in the high half and of c2 in the low
    M, N, stride_dtotal, stride_dy, stride_x, stride_partial, groups,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
    THREADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    PUBLISH: tl.constexpr, FINISH: tl.constexpr, EARLY_SUM: tl.constexpr,
):  # fmt: skip
    CENTRED: tl.constexpr = mean_ptr is not None
    part = tl.program_id(0) % PARTS
    group = (tl.program_id(0) // PARTS).to(tl.int64)  # int64, and so are the rows: row * stride passes 2^31
    begin = part * ((CHUNKS - 1) * BLOCK + LAST)
    before = before_chunks(group * N, WIDTH)  # of each row of this group
    whole = (N // WIDTH - 1) * WIDTH
    side = side_columns(before, whole, THREADS)
    mine = (side < N) & (part == 0)
    one = tl.arange(0, 1)
    w_side = tl.load(w_ptr + side, mask=mine, other=0.0).to(tl.float32)
    dy_side = tl.load(dy_ptr + group * stride_dy + side, mask=mine, other=0.0).to(tl.float32)
    x_side = tl.load(x_ptr + group * stride_x + side, mask=mine, other=0.0).to(tl.float32)
    own_side = mine & (group + groups < M)
    next_dy_side = tl.load(dy_ptr + (group + groups) * stride_dy + side, mask=own_side, other=0.0)
    next_x_side = tl.load(x_ptr + (group + groups) * stride_x + side, mask=own_side, other=0.0)
    w = ()
    dw = ()
    db = ()
    dy = ()
    x = ()
    for chunk in tl.static_range(CHUNKS):
        cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
        w = w + (pack_columns(tl.load(w_ptr + before + cols, mask=cols < whole, other=0.0), True),)  # noqa: RUF005
        dw = dw + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
        db = db + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
        first_dy = tl.load(dy_ptr + first_word(group * stride_dy, WIDTH) + cols, mask=cols < whole, other=0.0)
        first_x = tl.load(x_ptr + first_word(group * stride_x, WIDTH) + cols, mask=cols < whole, other=0.0)
        dy = dy + (pack_columns(first_dy, True),)  # noqa: RUF005
        x = x + (pack_columns(first_x, True),)  # noqa: RUF005
    rstd = tl.load(rstd_ptr + group + one)
    mean = tl.load(mean_ptr + group + one) if CENTRED else tl.zeros((1,), tl.float32)
    g_side = dy_side * w_side
    x_hat_side = (x_side - mean) * rstd
    dw_side = dy_side * x_hat_side  # of a row and of those before, when its sums are published
    db_side = dy_side
    if PUBLISH:
        first = sums_with_sides(
            unpacked(dy, dy_ptr, CHUNKS), unpacked(x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS),
            g_side, g_side * (x_side - mean), mean, rstd, CHUNKS, CENTRED, THREADS, WIDTH,
        )  # fmt: skip
        publish(sums_ptr + group * PARTS + part + one, pack_pair(*first))
    slots = tl.arange(0, SLOTS)
    for row in tl.range(group, M, groups, num_stages=STAGES):
        at = sums_ptr + row * PARTS + slots
        if FINISH:
            sums = look(at, slots < PARTS, 0)
        after = row + groups
        there = (after + one) < M
        next_rstd = tl.load(rstd_ptr + after + one, mask=there, other=0.0)
        next_mean = tl.load(mean_ptr + after + one, mask=there, other=0.0) if CENTRED else mean
        next_dy = ()
        next_x = ()
        for chunk in tl.static_range(CHUNKS):
            cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
            own = (cols < whole) & (after < M)
            loaded_dy = tl.load(dy_ptr + first_word(after * stride_dy, WIDTH) + cols, mask=own, other=0.0)
            loaded_x = tl.load(x_ptr + first_word(after * stride_x, WIDTH) + cols, mask=own, other=0.0)
            next_dy = next_dy + (pack_columns(loaded_dy, True),)  # noqa: RUF005
            next_x = next_x + (pack_columns(loaded_x, True),)  # noqa: RUF005
        later = after + groups
        own_side = mine & (later < M)
        later_dy_side = tl.load(dy_ptr + later * stride_dy + side, mask=own_side, other=0.0)
        later_x_side = tl.load(x_ptr + later * stride_x + side, mask=own_side, other=0.0)
        dy_side = next_dy_side.to(tl.float32)
        next_g_side = dy_side * w_side
        centred_side = next_x_side.to(tl.float32) - next_mean
        next_x_hat_side = centred_side * next_rstd
        dw_side += dy_side * next_x_hat_side
        db_side += dy_side
        if PUBLISH:
            ahead = sums_with_sides(
                unpacked(next_dy, dy_ptr, CHUNKS), unpacked(next_x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS),
                next_g_side, next_g_side * centred_side, next_mean, next_rstd, CHUNKS, CENTRED, THREADS, WIDTH,
            )  # fmt: skip
            publish(sums_ptr + after * PARTS + part + one, pack_pair(*ahead), mask=there)
        if FINISH:
            if PUBLISH:
                sums = settled(sums, tl.where(slots < PARTS, at, sums_ptr))
            c1, c2 = unpack_pair(sums)
            c1 = tl.sum(c1, axis=0) / N
            c2 = tl.sum(c2, axis=0) / N if CENTRED else 0.0
            before_dw = dw
            before_db = db
            dw = ()
            db = ()
            for chunk in tl.static_range(CHUNKS):
                cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
                wide = unpack_columns(dy[chunk], dy_ptr.dtype.element_ty)
                x_hat = (unpack_columns(x[chunk], x_ptr.dtype.element_ty) - mean) * rstd
                dx = rstd * (wide * unpack_columns(w[chunk], w_ptr.dtype.element_ty) - x_hat * c1 - c2)
                to = first_word(row * N, WIDTH) + cols
                if dtotal_ptr is not None:
                    dtotal_at = dtotal_ptr + first_word(row * stride_dtotal, WIDTH) + cols
                    dx += tl.load(dtotal_at, mask=cols < whole, other=0.0).to(tl.float32)
                    tl.store(dresidual_ptr + to, dx, mask=cols < whole)
                tl.store(dx_ptr + to, dx, mask=cols < whole)
                dw = dw + (before_dw[chunk] + wide * x_hat,)  # noqa: RUF005
                db = db + (before_db[chunk] + wide,)  # noqa: RUF005
            dx_side = rstd * (g_side - x_hat_side * c1 - c2)
            if dtotal_ptr is not None:
                dx_side += tl.load(dtotal_ptr + row * stride_dtotal + side, mask=mine, other=0.0).to(tl.float32)
                tl.store(dresidual_ptr + row * N + side, dx_side, mask=mine)
            tl.store(dx_ptr + row * N + side, dx_side, mask=mine)
        dy = next_dy
        x = next_x
        g_side = next_g_side
        x_hat_side = next_x_hat_side
        next_dy_side = later_dy_side
        next_x_side = later_x_side
        mean = next_mean
        rstd = next_rstd
    if FINISH:
        if EARLY_SUM:
            gdc_launch_dependents()
        start = group * stride_partial + WIDTH
        store_shifted(partial_dw_ptr + start, dw, dw_side, begin, before, side, mine, whole, CHUNKS, BLOCK, LAST)
        if partial_db_ptr is not None:
            store_shifted(partial_db_ptr + start, db, db_side, begin, before, side, mine, whole, CHUNKS, BLOCK, LAST)


@triton.jit
def sum_shifted_kernel(
    partial_dw_ptr, partial_db_ptr, dw_ptr, db_ptr,  # [P, stride_partial] in fp32 twice, as stored above -> [N] twice
    P, N, stride_partial, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
        at = p * stride_partial + WIDTH - before_chunks(p * N, WIDTH) + cols
        mask = (p < P) & (cols < N)
        dw += tl.load(partial_dw_ptr + at, mask=mask, other=0.0)
        if partial_db_ptr is not None:
            db += tl.load(partial_db_ptr + at, mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0, keep_dims=True), mask=cols < N)
    if partial_db_ptr is not None:
        tl.store(db_ptr + cols, tl.sum(db, axis=0, keep_dims=True), mask=cols < N)


def spread(parts: int, period: int, resident: int) -> tuple[int, int]:
    """Groups, of `parts` programs or more, where `resident` programs run at once -> groups, parts.

    A multiple of the period, so that all rows of a group have one shift; then as many parts as run at once.
    """
    groups = max(resident // parts // period, 1) * period
    return groups, max(parts, resident // groups) if parts > 1 else 1


def norm_backward_shifted(dy, x, w, mean, rstd, bias=False, dtotal=None):
    """As norm_backward_walk and norm_backward_group, of rows that norm_backward_shifted_takes, with N > 2048.

    In one launch where all parts of as many rows as the period run at once, otherwise in two.
    """
    dx = torch.empty(x.shape, dtype=x.dtype if dtotal is None else dy.dtype, device=x.device)
    dresidual = None if dtotal is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw, db = (torch.zeros_like(w) if len(x) == 0 else torch.empty_like(w) for _ in range(2))  # a sum of no rows is 0
    if dx.numel():
        read = [t for t in (x, dy, dtotal) if t is not None]
        rows = Rows.of(*read)
        width = 16 // max(t.element_size() for t in read)
        load, whole = Load(width, width), rows.N // width * width - width
        one_row, ahead = (held(dy.element_size(), x.element_size(), bias, n, width) for n in (1, 2))
        plan = walk(whole, one_row + 0.5, load)  # the sides take registers, too
        parts, plan = (1, plan) if plan else group(whole, ahead, load)
        resident = plan.per_sm * rows.sms
        groups, parts = spread(parts, rows.period, resident)
        plan = load.plan(triton.cdiv(whole, parts), plan.warps, plan.per_sm)
        groups = min(groups, rows.M)
        stride = triton.cdiv(rows.N + width, 16) * 16
        partial_dw, partial_db = torch.empty((2, groups, stride), dtype=torch.float32, device=x.device)
        partial_db, db = (partial_db, db) if bias else (None, None)
        tensors = dtotal, dy, x, w, mean, rstd, dx, dresidual, partial_dw, partial_db
        strides = 0 if dtotal is None else dtotal.stride(0), dy.stride(0), x.stride(0), stride
        stages = plan.stages(sum(t.element_size() for t in read), shared_memory(x.device))
        options = {"num_warps": plan.warps, "maxnreg": plan.registers}
        early = starts_early(x.device)
        if parts == 1:
            norm_backward_shifted_walk_kernel[(groups,)](
                *tensors, rows.M, rows.N, *strides, plan.chunks, plan.block, plan.last, 32 * plan.warps, width,
                stages, early, **options,
            )  # fmt: skip
        else:
            # As norm_backward_group: one cooperative launch, or one that publishes all sums and one that uses them.
            sums = torch.full((rows.M, parts), -1, dtype=torch.int64, device=x.device)
            at_once = groups * parts <= resident and not triton_interprets()
            slots = triton.next_power_of_2(parts)
            for publish_, finish in ((True, True),) if at_once else ((True, False), (False, True)):
                norm_backward_shifted_group_kernel[(groups * parts,)](
                    *tensors, sums, rows.M, rows.N, *strides, groups, parts,
                    slots if slots <= 32 else max(slots, 32 * plan.warps), plan.chunks, plan.block, plan.last,
                    32 * plan.warps, width, stages, publish_, finish, early,
                    launch_cooperative_grid=at_once, **options,
                )  # fmt: skip
        block_n = max(8, min(32, triton.next_power_of_2(rows.N // rows.sms + 1) // 2))
        sum_shifted_kernel[(triton.cdiv(rows.N, block_n),)](
            partial_dw, partial_db, dw, db, groups, rows.N, stride, width,
            BLOCK_P=min(256, triton.next_power_of_2(groups)), BLOCK_N=block_n, EARLY=early, num_warps=8,
            launch_pdl=early,
        )  # fmt: skip
    return dx, dresidual, dw, db if bias else None


def norm_backward_shifted_takes(rows: Rows) -> bool:
    """Whether rows of an odd length start alike some rows apart in all tensors.

    cp.async copies 4 bytes of rows of an even length, and that is as fast. On an H200 RMSNorm's gradient of
    3061 x 65380 took 0.56 ms so, and 0.64 ms here. The longest rows: 33 parts of 4096 columns are as many as an H200
    runs at once for 8 rows.
    """
    return rows.N % 2 == 1 and rows.period > 1 and rows.N <= 131072
