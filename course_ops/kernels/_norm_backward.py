"""The gradients of a norm of long rows, for layer_norm, rms_norm and add_norm.

With x_hat = (x - mean) rstd, g = dy w, and c1, c2 the means over the row of g x_hat and of g:
    dx = rstd (g - x_hat c1 - c2)      dw = sum over rows of dy x_hat      db = sum over rows of dy
RMSNorm has no mean, so no c2 and no db. If x was the sum of a residual and a branch, both get dx + dtotal.

Two kernels compute this:
    walk     a program owns whole rows
    group    several programs share a row, each with its own columns; they exchange their shares of c1 and c2 through L2

Both launch as many programs as the GPU runs at once. Each program works on one row after another, and keeps dw and db
in fp32 registers until its last row. Meanwhile cp.async copies its next rows to shared memory.

A program's columns are a list of chunks. In a full chunk each thread has what one cp.async copies: 16 bytes, or 8 or 4
where rows start at such multiples only. The last chunk may be a half or a quarter of a full one, so that few lanes idle
whatever N is. If one call mixes 16 and 32 bits, a full chunk has at most four columns per thread. Then both lie in the
same threads.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from course_ops._common import num_sms, shared_memory, starts_early, triton_interprets
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
def columns(chunk: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr):
    """Of a chunk, counted from the program's first one."""
    SIZE: tl.constexpr = BLOCK if chunk < CHUNKS - 1 else LAST
    return chunk * BLOCK + tl.arange(0, SIZE)


@triton.jit
def in_threads(x, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    """[columns] -> [THREADS]: the sum of what each thread has, if it loads WIDTH columns at once."""
    EACH: tl.constexpr = x.shape[0] // THREADS
    NEXT: tl.constexpr = min(EACH, WIDTH)
    return tl.sum(tl.sum(tl.reshape(x, [EACH // NEXT, THREADS, NEXT]), axis=2), axis=0)


@triton.jit
def centred_sums(
    dy, x, w, mean, rstd, CHUNKS: tl.constexpr, CENTRED: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Sums over the columns in fp32: of g x_hat, and of g if CENTRED, otherwise 0."""
    # Where single elements are loaded, neighbours lie in different threads, and all chunks are of one length.
    LANES: tl.constexpr = THREADS if WIDTH > 1 else dy[0].shape[0]
    lanes_g = tl.zeros((LANES,), tl.float32)
    lanes_gx = tl.zeros((LANES,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        g = dy[chunk] * w[chunk]
        gx = g * (x[chunk] - mean)
        lanes_g += in_threads(g, THREADS, WIDTH) if WIDTH > 1 else g
        lanes_gx += in_threads(gx, THREADS, WIDTH) if WIDTH > 1 else gx
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
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,  # columns of a chunk, and of the last one
    THREADS: tl.constexpr, WIDTH: tl.constexpr,  # of the program; columns that a thread loads at once, at most
    STAGES: tl.constexpr, EARLY_SUM: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_dtotal = multiple(N, MULTIPLE), multiple(stride_dtotal, MULTIPLE)
    stride_dy, stride_x = multiple(stride_dy, MULTIPLE), multiple(stride_x, MULTIPLE)
    CENTRED: tl.constexpr = mean_ptr is not None
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    w = ()
    dw = ()
    db = ()
    for chunk in tl.static_range(CHUNKS):
        cols = columns(chunk, CHUNKS, BLOCK, LAST)
        w = w + (tl.load(w_ptr + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
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
            dy = dy + (tl.load(dy_ptr + row * stride_dy + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
            x = x + (tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0),)  # noqa: RUF005
        c1, c2 = centred_sums(
            widened(dy, CHUNKS), widened(x, CHUNKS), widened(w, CHUNKS), mean, rstd, CHUNKS, CENTRED, THREADS, WIDTH
        )
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
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + row * stride_dtotal + cols, mask=cols < N, other=0.0).to(tl.float32)
                tl.store(dresidual_ptr + row * N + cols, dx, mask=cols < N)
            tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)
            dw = dw + (before_dw[chunk] + wide * x_hat,)  # noqa: RUF005
            db = db + (before_db[chunk] + wide,)  # noqa: RUF005
    if EARLY_SUM:
        gdc_launch_dependents()
    store_partials(partial_dw_ptr, partial_db_ptr, dw, db, program * N, 0, N, CHUNKS, BLOCK, LAST)


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
def store_partials(
    partial_dw_ptr, partial_db_ptr, dw, db, start, first, N,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    for chunk in tl.static_range(CHUNKS):
        cols = first + columns(chunk, CHUNKS, BLOCK, LAST)
        tl.store(partial_dw_ptr + start + cols, dw[chunk], mask=cols < N)
        if partial_db_ptr is not None:
            tl.store(partial_db_ptr + start + cols, db[chunk], mask=cols < N)


# PARTS programs share a row. Each part works one row ahead: it publishes its sums of the next row, and only then needs
# the other parts' sums of this row. They published those a whole step ago.
@triton.jit
def norm_backward_group_kernel(
    dtotal_ptr, dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dresidual_ptr,  # as above
    partial_dw_ptr, partial_db_ptr,  # [groups, N] each
    sums_ptr,  # [M, WORDS], -1 at first; then a part's share of c1 in the high half and of c2 in the low
    M, N, stride_dtotal, stride_dy, stride_x, groups,
    PARTS: tl.constexpr, WORDS: tl.constexpr,  # PARTS words of a row; or 1, where they have been added up
    SLOTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
    THREADS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    PUBLISH: tl.constexpr, FINISH: tl.constexpr, EARLY_SUM: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    N, stride_dtotal = multiple(N, MULTIPLE), multiple(stride_dtotal, MULTIPLE)
    stride_dy, stride_x = multiple(stride_dy, MULTIPLE), multiple(stride_x, MULTIPLE)
    CENTRED: tl.constexpr = mean_ptr is not None
    part = tl.program_id(0) % PARTS
    group = (tl.program_id(0) // PARTS).to(tl.int64)  # int64, and so are the rows: row * stride passes 2^31
    PACK: tl.constexpr = WIDTH > 1
    begin = part * ((CHUNKS - 1) * BLOCK + LAST)
    one = tl.arange(0, 1)
    w = ()
    dw = ()
    db = ()
    dy = ()
    x = ()
    for chunk in tl.static_range(CHUNKS):
        cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
        w = w + (pack_columns(tl.load(w_ptr + cols, mask=cols < N, other=0.0), PACK),)  # noqa: RUF005
        dw = dw + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
        db = db + (tl.zeros(cols.shape, tl.float32),)  # noqa: RUF005
        first_dy = tl.load(dy_ptr + group * stride_dy + cols, mask=cols < N, other=0.0)
        first_x = tl.load(x_ptr + group * stride_x + cols, mask=cols < N, other=0.0)
        dy = dy + (pack_columns(first_dy, PACK),)  # noqa: RUF005
        x = x + (pack_columns(first_x, PACK),)  # noqa: RUF005
    rstd = tl.load(rstd_ptr + group + one)
    mean = tl.load(mean_ptr + group + one) if CENTRED else tl.zeros((1,), tl.float32)
    if PUBLISH:
        first = centred_sums(
            unpacked(dy, dy_ptr, CHUNKS), unpacked(x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS), mean, rstd,
            CHUNKS, CENTRED, THREADS, WIDTH,
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
            cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
            own = (cols < N) & (after < M)
            loaded_dy = tl.load(dy_ptr + after * stride_dy + cols, mask=own, other=0.0)
            loaded_x = tl.load(x_ptr + after * stride_x + cols, mask=own, other=0.0)
            next_dy = next_dy + (pack_columns(loaded_dy, PACK),)  # noqa: RUF005
            next_x = next_x + (pack_columns(loaded_x, PACK),)  # noqa: RUF005
        if PUBLISH:
            ahead = centred_sums(
                unpacked(next_dy, dy_ptr, CHUNKS), unpacked(next_x, x_ptr, CHUNKS), unpacked(w, w_ptr, CHUNKS),
                next_mean, next_rstd, CHUNKS, CENTRED, THREADS, WIDTH,
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
                cols = begin + columns(chunk, CHUNKS, BLOCK, LAST)
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
        if EARLY_SUM:
            gdc_launch_dependents()
        store_partials(partial_dw_ptr, partial_db_ptr, dw, db, group * N, begin, N, CHUNKS, BLOCK, LAST)


REGISTERS = 65536  # of an SM


@dataclass(frozen=True)
class Plan:
    """Programs of `warps` warps, `per_sm` of them on an SM at a time; their columns as `chunks` of `block`.

    The last chunk has `last` columns.
    """

    warps: int
    per_sm: int
    chunks: int
    block: int
    last: int

    @property
    def columns(self) -> int:
        return (self.chunks - 1) * self.block + self.last

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, REGISTERS // (32 * self.warps * self.per_sm) // 8 * 8)

    def stages(self, bytes_a_column: int, shared: int) -> int:
        """Of the pipeline of rows: one is in use, and the others are at least 72 KB on an SM, which has `shared`."""
        row = self.columns * bytes_a_column
        room = shared // self.per_sm - 3072  # what the reductions take
        return max(1, min(1 + math.ceil(72 * 1024 / (self.per_sm * row)), 1 + room // row, 6))


@dataclass(frozen=True)
class Load:
    """How a thread loads: `width` columns in a full chunk, `at_once` of them by one load."""

    width: int
    at_once: int

    def plan(self, N: int, warps: int, per_sm: int) -> Plan:
        """The fewest columns that are at least N: full chunks, and a last one of two columns per thread or more."""
        threads = 32 * warps
        full, rest = divmod(N, self.width * threads)
        last = next(each for each in (2, 4, 8) if rest <= each * threads) if rest and self.at_once > 1 else self.width
        return Plan(warps, per_sm, full + (rest > 0), self.width * threads, last * threads)

    def most_columns(self, warps: int, held: float) -> int:
        """Of a thread, if so many warps share an SM. Addresses, masks and terms take three eighths of its registers."""
        return max(4, int(REGISTERS / (32 * warps) * 5 / 8 / held) // 4 * 4)


def load_of(at_once: int) -> Load:
    """A chunk has as many columns per thread as one load takes, or four where single elements are loaded.

    With several loads in a chunk the compiler would keep neighbours in one thread. The words that a warp loads at once
    would lie apart, sums would cross warps, and dx would pass through shared memory to be stored.
    """
    return Load(4 if at_once == 1 else at_once, at_once)


def held(dy_bytes: int, x_bytes: int, bias: bool, rows: int, at_once: int) -> float:
    """Registers for a column: w and the sums in fp32, and `rows` rows of dy and x.

    Pairs of 16 bits share a register, but not where they are loaded one by one.
    """
    return 2 + bias + rows * (3 if at_once == 1 else (dy_bytes + x_bytes) / 4)


def walk(N: int, held: float, load: Load) -> Plan | None:
    """The programs for whole rows; None where an SM's registers do not suffice.

    The smallest programs that do: a thread with many columns spends less on reductions, and programs do not wait for
    each other.
    """
    for warps, per_sm in ((4, 4), (4, 3), (4, 2), (8, 1)):
        plan = load.plan(N, warps, per_sm)
        if plan.columns <= 32 * warps * load.most_columns(warps * per_sm, held):
            return plan
    return None


def walks(N: int, itemsize: int, bias: bool) -> bool:
    """Whether norm_backward_walk takes rows of N columns, where dy and x have `itemsize` bytes per element."""
    load = load_of(math.gcd(16 // itemsize, N))
    return walk(N, held(itemsize, itemsize, bias, 1, load.at_once), load) is not None


def group(N: int, held: float, load: Load) -> tuple[int, Plan]:
    """The fewest parts of a row for two programs of 4 warps on an SM, and these programs."""
    most = 128 * load.most_columns(8, held)
    parts = triton.cdiv(N, most)
    return parts, load.plan(triton.cdiv(N, parts), 4, 2)


def norm_backward_walk(dy, x, w, mean, rstd, bias=False, dtotal=None):
    """dy, x [M, N], w [N], mean (None: RMSNorm) and rstd [M] -> dx, dresidual, dw, db; N as `walks` says.

    With dtotal [M, N], of x's dtype: dresidual as x, dx as dy. Otherwise dresidual is None, and dx as x.
    """
    rows = Rows.of(x)
    dx, dresidual, dw, db = _gradients(dy, x, w, bias, dtotal)
    if dx.numel():
        tensors, load, known = _layout(dtotal, dy, x, w)
        # `walks` does not see how far rows are apart. Where that makes a row too long, the largest program spills.
        needs = held(dy.element_size(), x.element_size(), bias, 1, load.at_once)
        plan = walk(rows.N, needs, load) or load.plan(rows.N, 8, 1)
        programs = min(rows.M, plan.per_sm * rows.sms)
        partial_dw, partial_db = partial_sums(programs, x, bias)
        norm_backward_walk_kernel[(programs,)](
            dtotal, dy, x, w, mean, rstd, dx, dresidual, partial_dw, partial_db, rows.M, rows.N,
            *_strides(dtotal, dy, x), plan.chunks, plan.block, plan.last, 32 * plan.warps,
            load.at_once, plan.stages(sum(t.element_size() for t in tensors), shared_memory(x.device)),
            starts_early(x.device), known,
            num_warps=plan.warps, maxnreg=plan.registers,
        )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dresidual, dw, db


def norm_backward_group(dy, x, w, mean, rstd, bias=False, dtotal=None):
    """As norm_backward_walk for rows of any length, in one launch where all parts of a row run at once."""
    rows = Rows.of(x)
    dx, dresidual, dw, db = _gradients(dy, x, w, bias, dtotal)
    if dx.numel():
        tensors, load, known = _layout(dtotal, dy, x, w)
        parts, plan = group(rows.N, held(dy.element_size(), x.element_size(), bias, 2, load.at_once), load)
        groups = max(1, min(rows.M, plan.per_sm * rows.sms // parts))
        sums = torch.full((rows.M, parts), -1, dtype=torch.int64, device=x.device)
        partial_dw, partial_db = partial_sums(groups, x, bias)
        # One launch needs all programs at once: a cooperative launch is refused where they do not fit. Otherwise, and
        # in the interpreter, there are two launches. The first publishes all sums, and the second uses them. Sums of
        # more parts than run at once may be too many for a program: they are added up in between.
        fits = parts <= plan.per_sm * rows.sms
        at_once = fits and not triton_interprets()
        words = parts
        for publish_, finish in ((True, True),) if at_once else ((True, False), (False, True)):
            if finish and not fits:
                sums, words = sums.view(torch.float32).view(rows.M, parts, 2).sum(1).view(torch.int64), 1
            norm_backward_group_kernel[(groups * parts,)](
                dtotal, dy, x, w, mean, rstd, dx, dresidual, partial_dw, partial_db, sums, rows.M, rows.N,
                *_strides(dtotal, dy, x), groups, parts, words, _slots(words, plan.warps) if finish else 1,
                plan.chunks, plan.block, plan.last, 32 * plan.warps, load.at_once,
                plan.stages(sum(t.element_size() for t in tensors), shared_memory(x.device)), publish_, finish,
                starts_early(x.device), known,
                num_warps=plan.warps, maxnreg=plan.registers, launch_cooperative_grid=at_once,
            )  # fmt: skip
        sum_partials(partial_dw, partial_db, dw, db)
    return dx, dresidual, dw, db


def _slots(words: int, warps: int) -> int:
    """Lanes to look at the parts' sums with: within one warp, or one for each thread."""
    slots = triton.next_power_of_2(words)
    return slots if slots <= 32 else max(slots, 32 * warps)


def _layout(dtotal, dy, x, w):
    """What is read row by row; how a thread loads it; what divides the lengths, as common_multiple_of says it."""
    tensors = [t for t in (dtotal, dy, x) if t is not None]
    lengths = [x.shape[1], *(t.stride(0) for t in tensors)]
    at_once = math.gcd(16 // max(t.element_size() for t in (*tensors, w)), *lengths)
    return tensors, load_of(at_once), common_multiple_of(*lengths)


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
    P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
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
    """Add up [P, N] partial sums into dw and db [N], always in the same order: the same bits in every run.

    All P rows are under way at once, up to 256, and a program for each SM has 8 columns or more.
    """
    P, N = partial_dw.shape
    block_n = max(8, min(32, triton.next_power_of_2(N // num_sms(dw.device) + 1) // 2))
    sum_partials_kernel[(triton.cdiv(N, block_n),)](
        partial_dw, partial_db, dw, db, P, N, BLOCK_P=min(256, triton.next_power_of_2(P)), BLOCK_N=block_n,
        EARLY=starts_early(dw.device), MULTIPLE=common_multiple_of(N), num_warps=8, launch_pdl=starts_early(dw.device),
    )  # fmt: skip


def partial_sums(programs, x, bias):
    """Of dw and, with a bias, of db: [programs, N] in fp32."""
    partial_dw, partial_db = torch.empty((2, programs, x.shape[1]), dtype=torch.float32, device=x.device)
    return partial_dw, partial_db if bias else None
