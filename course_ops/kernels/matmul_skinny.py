"""C = A B for few rows of A, where reading B is all the time: matrix times vector, and Stream-K (Osama et al. 2023)."""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from course_ops._common import architecture, cdiv, fitting_stages, num_sms, shared_memory, tma_takes
from course_ops._launch import describing, launcher
from course_ops.kernels._tiles import stream_zeros

L2 = 3360  # bytes a cycle that all SMs together read from L2: measured on an H200, a copy whose arrays lie in L2
# The share of the narrow tile's estimate that 128 columns have to stay under. At three shapes on an H200 they took 1.2
# to 1.3 times as long beside 64 columns as estimated: half as many programs have half as many loads under way.
WIDE_LEAD = 0.8


# One row needs no tensor core. A program owns BLOCK_N columns; the sums stay in registers until the end.
@triton.jit
def matvec_kernel(
    a_ptr, b_ptr, c_ptr,  # [1, K], [K, N], [1, N]
    N, K, stride_ak, stride_bk, stride_bn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K).to(tl.int64)
        b_mask = (columns < N)[:, None] & (ks < K)[None, :]
        b_ptrs = b_ptr + columns[:, None] * stride_bn + ks[None, :] * stride_bk
        b = tl.load(b_ptrs, mask=b_mask, other=0.0, eviction_policy="evict_first")  # used once: A and C stay in L2
        a = tl.load(a_ptr + ks * stride_ak, mask=ks < K, other=0.0).to(tl.float32)  # second: b takes longer
        acc += a[None, :] * b.to(tl.float32)
    tl.store(c_ptr + columns, tl.sum(acc, axis=1).to(c_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def in_units(n, UNIT: tl.constexpr):
    """n, a multiple of UNIT. The compiler learns it from this; of an argument it learns only multiples of 16."""
    return n // UNIT * UNIT


# UNIT_AM: how many elements a thread can load at once along a's columns. UNIT_AK: along its rows. The others: of b.
@triton.jit
def dot_steps(
    a_ptr, b_ptr,  # [M, K], [K, N]; TMA descriptors of them if TMA names b's layout
    M, N, K, strides, row, column, from_step, to_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    UNIT_AM: tl.constexpr, UNIT_AK: tl.constexpr, UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr,
):  # fmt: skip
    """A tile's product over the steps from_step to to_step of K, a step being BLOCK_K."""
    stride_am, stride_ak, stride_bk, stride_bn = strides
    stride_am, stride_ak = in_units(stride_am, UNIT_AK), in_units(stride_ak, UNIT_AM)
    stride_bk, stride_bn = in_units(stride_bk, UNIT_BN), in_units(stride_bn, UNIT_BK)
    M, N, K = in_units(M, UNIT_AM), in_units(N, UNIT_BN), in_units(in_units(K, UNIT_AK), UNIT_BK)
    rows = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    columns = column + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(from_step, to_step):
        if TMA == "":
            ks = step * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
            # Both are masked in K: a 0 from one alone would meet what lies behind the other, and 0 * NaN is NaN.
            a_mask = (rows < M) & (ks < K)[None, :]
            b_mask = (ks < K)[:, None] & (columns < N)
            a = tl.load(a_ptr + rows * stride_am + ks[None, :] * stride_ak, mask=a_mask, other=0.0)
            b = tl.load(b_ptr + ks[:, None] * stride_bk + columns * stride_bn, mask=b_mask, other=0.0)
        else:
            a = a_ptr.load([row, step * BLOCK_K])
            b = b_ptr.load([column, step * BLOCK_K]).T if TMA == "[N, K]" else b_ptr.load([step * BLOCK_K, column])
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 stays fp32: Triton's default would be TF32
    return acc


@triton.jit
def store_tile(c_ptr, acc, M, N, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows, columns = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None], column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(c_ptr + rows * N + columns, acc.to(c_ptr.dtype.element_ty), mask=(rows < M) & (columns < N))


@triton.jit
def share(program, total, programs):
    """The first of `total` steps that a program owns, when they are dealt out evenly."""
    return (program.to(tl.int64) * total // programs).to(tl.int32)  # the product may pass 2^31


# Stream-K: all steps of all tiles lie in one row, and every program takes an equal share. A program whose share begins
# inside a tile leaves its partial sums in the workspace and sets a flag. The program with the tile's first step waits
# for the flags, adds the parts in order and stores C. Waiting ends, however many programs there are: a program waits
# for lower ids alone, and those start before it.
@triton.jit
def stream_k_kernel(
    a_ptr, b_ptr, c_ptr,
    parts_ptr, flags_ptr,  # [programs, BLOCK_M, BLOCK_N] fp32; [programs or more] int32, 0 before and after
    M, N, K, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    UNIT_AM: tl.constexpr, UNIT_AK: tl.constexpr, UNIT_BK: tl.constexpr, UNIT_BN: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    me = programs - 1 - tl.program_id(0)
    down, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    total = tl.cdiv(N, BLOCK_N) * down * steps
    begin, end = share(me, total, programs), share(me + 1, total, programs)
    elements = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for tile in range(begin // steps, tl.cdiv(end, steps)):
        row, column = tile % down * BLOCK_M, tile // down * BLOCK_N
        from_step, to_step = tl.maximum(begin - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        acc = dot_steps(
            a_ptr, b_ptr, M, N, K, strides, row, column, from_step, to_step, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            UNIT_AM, UNIT_AK, UNIT_BK, UNIT_BN,
        )  # fmt: skip
        if from_step > 0:
            tl.store(parts_ptr + me * BLOCK_M * BLOCK_N + elements, acc)
            tl.debug_barrier()  # one thread sets the flag: the others' stores must be done
            tl.atomic_xchg(flags_ptr + me, 1, sem="release", scope="gpu")
        else:
            helper = me + 1
            while to_step < steps:
                # Swapping 1 for 0 waits for the flag and clears it for the next call. .cg: read once, so not into L1.
                while tl.atomic_cas(flags_ptr + helper, 1, 0, sem="acquire", scope="gpu") == 0:
                    pass
                acc += tl.load(parts_ptr + helper * BLOCK_M * BLOCK_N + elements, cache_modifier=".cg")
                helper += 1
                to_step = tl.minimum(share(helper, total, programs) - tile * steps, steps)
            store_tile(c_ptr, acc, M, N, row, column, BLOCK_M, BLOCK_N)


def matmul_skinny(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """a [M, K], b [K, N], any strides -> [M, N] in out_dtype (a's). For M <= 128, right for any M; deterministic."""
    return prepare(a, b, out_dtype)(a, b)


def prepare(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """matmul_skinny for operands that lie as a and b do; of b the function reads the address alone."""
    shape, dtype = (a.shape[0], b.shape[1]), out_dtype or a.dtype
    if not all(shape) or not a.shape[1]:
        return lambda a, b: a.new_zeros(shape, dtype=dtype)
    n_major = b.stride(0) == 1  # [N, K] in memory, as nn.Linear keeps its weight
    if a.shape[0] == 1 and n_major:
        return _matvec(a, b, dtype)
    by_16_bytes = a.element_size() == 2 and tma_takes(b.t() if n_major else b)
    block_m, *block = _pointer_tile(a, by_16_bytes)
    tma, units = "", _units(a) + _units(b)
    # A load of 2 bytes cannot run ahead of the MMAs. If one operand needs such loads, both are loaded so: a stage of
    # the other would take shared memory, and fewer programs would fit on an SM.
    if not by_16_bytes and min(max(units[:2]), max(units[2:])) == 1:
        units = 1, 1, 1, 1
    if by_16_bytes and architecture(a.device) >= 90 and tma_takes(a):
        tma = "[N, K]" if n_major else "[K, N]"
        n, k, warps, stages = _tma_tile(a.shape[0], b.shape[1], a.shape[1], num_sms(b.device), n_major)
        block = [n, k, warps, fitting_stages(stages, 2 * (block_m + n) * k, b.device)]
        units = 1, 1, 1, 1
    return _stream_k(a, b, dtype, block_m, *block, tma, units)


def _units(t: Tensor) -> tuple[int, int]:
    """How many 16-bit elements a thread can load at once along t's columns, and along its rows: 8 at most, 16 bytes.

    One fp32 element is 4 bytes, enough for a load to run ahead of the FMAs, so it is left at that.
    """
    if t.element_size() != 2 or t.data_ptr() % 16:
        return 1, 1
    down, along = (math.gcd(8, t.shape[i], t.stride(1 - i)) if t.stride(i) == 1 else 1 for i in (0, 1))
    return down, along


def _matvec(a: Tensor, b: Tensor, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    K, N = b.shape
    sizes = N, K, a.stride(1), *b.stride(), 4, 1024
    go = launcher(matvec_kernel, (cdiv(N, 4),), num_stages=1)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(1, N, dtype=dtype)
        go(a, b, c, *sizes)
        return c

    return run


def _pointer_tile(a: Tensor, by_16_bytes: bool) -> tuple[int, int, int, int, int]:
    """block_m, block_n, block_k, warps, stages. by_16_bytes: whether B can be copied so.

    Then a tile has 128 columns and 128 bytes along K. Otherwise a thread loads 8 bytes at most. Loads of 2 bytes do not
    run ahead of the MMAs. So tiles are narrow, several programs share an SM, and a step is long.
    """
    block_m = _block_m(a.shape[0])
    if a.element_size() == 4:  # no tensor cores: sums and operands take more registers
        return min(64, block_m), 64, 32, 4, 4
    block_n, block_k = 128, 64
    if not by_16_bytes:
        block_n, block_k = (64, 64) if block_m == 128 else (32, 128) if block_m > 16 else (32, 256)
    stages = min(4, shared_memory(a.device) // (2 * (block_m + block_n) * block_k))
    return block_m, block_n, block_k, 8 if block_m == 128 else 4, stages


def pointer_programs(block_m: int, block_k: int, tiles: int, steps: int, sms: int, ahead: bool) -> int:
    """How many programs divide narrow tiles: each tile the same number if they suffice. ahead: loads run ahead.

    If not, a step takes 0.7 us and what its length adds, and an SM does one each 0.8 us. A part of a tile takes 0.4 us
    and what its rows add. All are fits on an H200. If loads run ahead, a step is assumed to take 0.6 us: memory gives
    an SM 30 KB in 1 us, and a step reads 16 KB of B.
    """

    def us(parts: int) -> float:
        step, an_sms = (0.6, 0.6) if ahead else (0.7 + block_k / 200, 0.8)
        loading = max(cdiv(steps, parts) * step, tiles * steps / sms * an_sms)
        return loading + (parts - 1) * (0.4 + block_m / 160)

    on_an_sm = {16: 2, 32: 2, 64: 2} if ahead else {16: 4, 32: 3, 64: 2}  # as registers and shared memory allow
    most = sms * on_an_sm.get(block_m, 1)
    return tiles * min(range(1, min(most // tiles, steps) + 1), key=us) if tiles <= most else most


def _tma_tile(M: int, N: int, K: int, sms: int, n_major: bool) -> tuple[int, int, int, int]:
    """block_n, block_k, warps, stages: the narrowest tile that makes no more tiles than SMs, else the widest.

    With 33 to 64 rows narrow tiles may read A from L2 too often: then 128 columns instead of 64, if that saves time.
    """
    block_m = _block_m(M)
    if block_m == 128:
        tiles = [(64, 128, 4, 4), (128, 128, 8, 3), (256, 64, 8, 4)]
    elif block_m == 64:
        tiles = [(64, 128, 4, 4), (128, 128, 4, 4), (256, 64, 8, 4)]
    else:
        tiles = [(64, 256, 4, 5), (128, 128, 4, 4), (64, 256, 4, 5) if n_major else (256, 64, 4, 5)]
    narrowest = next((t for t in tiles if cdiv(N, t[0]) <= sms), tiles[-1])
    if block_m == 64 and narrowest == tiles[0]:
        narrow, wide = (max(_programs(M, N, K, *t[:2], sms)[1], l2_cycles(N, K, t[0])) for t in tiles[:2])
        return tiles[1] if wide < WIDE_LEAD * narrow else narrowest
    return narrowest


def cycles_of(M: int, N: int, K: int, block_n: int, per_tile: int) -> float:
    """Estimated cycles where so many programs share a tile of all rows.

    An SM loads 57 bytes a cycle, memory gives 2300, and to add a program's part takes 3500 cycles: fits on an H200.
    """
    return max(2 * (M + block_n) * K / per_tile / 57, 2 * N * K / 2300) + 3500 * (per_tile - 1)


def l2_cycles(N: int, K: int, block_n: int) -> float:
    """Cycles in which L2 gives all SMs together their blocks of 64 rows of A, and of B.

    They compare tiles of 33 to 64 rows; with fewer rows memory is slower. They are the same for any number of programs
    that share a tile, so cycles_of leaves them out. With them it chose one program for each tile at N = 3072, K = 8192.
    That took 0.0345 ms on an H200; two programs take 0.0265.
    """
    return cdiv(N, block_n) * 2 * (64 + block_n) * K / L2


def plan(M: int, N: int, K: int, sms: int, n_major: bool) -> tuple[int, float]:
    """Programs of a tile and estimated cycles where TMA loads, for M <= 128; 0 programs: more tiles than SMs."""
    block_n, block_k, *_ = _tma_tile(M, N, K, sms, n_major)
    return _programs(M, N, K, block_n, block_k, sms)


def _programs(M: int, N: int, K: int, block_n: int, block_k: int, sms: int) -> tuple[int, float]:
    """As plan, for a tile's columns and the step along K."""
    most = min(sms // cdiv(N, block_n), cdiv(K, block_k))
    if not most:
        return 0, cycles_of(M, N, K, N, 1)
    per_tile = min(range(1, most + 1), key=lambda each: cycles_of(M, N, K, block_n, each))
    return per_tile, cycles_of(M, N, K, block_n, per_tile)


def _block_m(M: int) -> int:
    return min(128, max(16, 1 << (M - 1).bit_length()))  # triton.next_power_of_2 costs microseconds


def _stream_k(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    block_m: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    tma: str,
    units: tuple[int, int, int, int],
) -> Callable[[Tensor, Tensor], Tensor]:
    (M, K), N, sms = a.shape, b.shape[1], num_sms(a.device)
    tiles, steps = cdiv(M, block_m) * cdiv(N, block_n), cdiv(K, block_k)
    # Whole tiles or even parts of them where there are not too many; otherwise equal shares of all steps.
    programs = 0
    if tma and block_m >= M:
        programs = plan(M, N, K, sms, tma == "[N, K]")[0] * tiles
    elif a.element_size() == 2 and block_n < 128:
        programs = pointer_programs(block_m, block_k, tiles, steps, sms, ahead=max(units) > 1)
    programs = programs or min(sms, tiles * steps)
    sizes = M, N, K, a.stride() + b.stride(), block_m, block_n, block_k, tma, *units
    stored, block = (b.t(), [block_n, block_k]) if tma == "[N, K]" else (b, [block_k, block_n])
    of_a = describing(TensorDescriptor, a.shape, a.stride(), [block_m, block_k])
    of_b = describing(TensorDescriptor, stored.shape, stored.stride(), block)
    whole_tiles = programs == tiles  # then no program has a part to leave
    empty = a.new_empty(0, dtype=torch.float32), a.new_empty(0, dtype=torch.int32)
    go = launcher(stream_k_kernel, (programs,), num_warps=warps, num_stages=stages)

    def run(a: Tensor, b: Tensor) -> Tensor:
        c, (parts, flags) = a.new_empty(M, N, dtype=dtype), empty
        if not whole_tiles:
            parts = a.new_empty(programs, block_m, block_n, dtype=torch.float32)
            flags = stream_zeros(a, 4 * sms, "stream-k")
        if tma:
            go(of_a(a), of_b(b), c, parts, flags, *sizes)
        else:
            go(a, b, c, parts, flags, *sizes)
        return c

    return run
