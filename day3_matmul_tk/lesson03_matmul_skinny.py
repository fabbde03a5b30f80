"""Skinny matmul: few rows, many weights
======================================
c = a @ b with M = 1, 16 or 128 rows: the matmul of a language model that writes token by token. Each element of b, 2
bytes, takes part in M multiply-adds, M FLOPs per byte. An H200 needs about 190 (800 TFLOP/s over 4.2 TB/s) before
tensor cores are the limit. So b's bytes set the least time, the same for 1 row and for 128. That is 8 us for K = N =
4096 (33.5 MB in bf16), and 112 us for 28672 x 8192 (470 MB).

One program for each output tile cannot reach that: 4096 columns in tiles of 128 are 32 programs for 132 SMs. By
Little's law 4.2 TB/s at a latency of about 800 ns needs 3.4 MB in flight at any moment, 25 KB for each SM. So K is
split as well. Three tiles of 8 steps of K each on 4 SMs, a letter for each SM:

               tile 0        tile 1        tile 2
    tiles      aaaaaaaa      bbbbbbbb      cccccccc      8 steps long, SM d is idle
    split_k    aaaabbbb      ccccdddd      aaaabbbb      8 steps: 2 programs per tile, 6 for 4 SMs, then a kernel
                                                         that adds the parts
    stream_k   aaaaaabb      bbbbcccc      ccdddddd      6 steps: equal shares, wherever tiles begin and end

In stream_k the program with a tile's first step owns the tile. Here b begins in tile 0 and writes that part to the
workspace; a waits for b's flag, adds the part and stores tile 0.

New words (GLOSSARY.md): split-K.
You will learn: matrix times vector without tensor cores, split-K, Stream-K, waiting for other programs and why it ends.
Run it:    python3 course.py run lesson03_matmul_skinny
Check it:  python3 course.py check lesson03_matmul_skinny
Time it:   python3 course.py bench lesson03_matmul_skinny
"""

import functools

from lessonkit import About, Lesson, Mutant, Prediction, Unsupported, case, device, num_sms, tma_takes

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from problems.matmul import LLM, PROBLEM, empty_product, inputs


# What all rungs but the second share: a tile's accumulator over some of its steps. A step is BLOCK_K of K.
@triton.jit
def dot_steps(
    a_ptr, b_ptr,  # [M, K], [K, N]; in the last rung TMA descriptors of them
    M, N, K, strides, row, column, from_step, to_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    stride_am, stride_ak, stride_bk, stride_bn = strides
    rows = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    columns = column + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(from_step, to_step):
        if TMA == "":
            ks = step * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
            # Both are masked in K: past K the other operand may hold NaN, and 0 * NaN is NaN.
            a_mask = (rows < M) & (ks < K)[None, :]
            b_mask = (ks < K)[:, None] & (columns < N)
            a = tl.load(a_ptr + rows * stride_am + ks[None, :] * stride_ak, mask=a_mask, other=0.0)
            b = tl.load(b_ptr + ks[:, None] * stride_bk + columns * stride_bn, mask=b_mask, other=0.0)
        else:  # rung 5
            a = a_ptr.load([row, step * BLOCK_K])
            b = b_ptr.load([column, step * BLOCK_K]).T if TMA == "[N, K]" else b_ptr.load([step * BLOCK_K, column])
        acc = tl.dot(a, b, acc, input_precision="ieee")  # of fp32, whose default on a GPU would be tf32
    return acc


@triton.jit
def store_tile(c_ptr, acc, M, N, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # c [M, N] in any dtype
    rows, columns = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None], column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(c_ptr + rows * N + columns, acc.to(c_ptr.dtype.element_ty), mask=(rows < M) & (columns < N))


# Rung 1. Lesson 1's tiles: a program owns BLOCK_M x 128 elements of c. At M = 1 tensor cores multiply 15 rows of
# padding, which costs no time, since they wait for b anyway. But N / 128 programs are few. Predicted: at N = 4096 32 of
# 132 SMs work, a quarter of copy speed; at 14336 112 of them.
@triton.jit
def tiles_kernel(
    a_ptr, b_ptr, c_ptr,  # c [programs along axis 1, M, N]: in this rung one program, with all of K
    M, N, K, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    down, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)  # a column's tiles run together: b is read once
    row, column = tile % down * BLOCK_M, tile // down * BLOCK_N
    begin, end = split * steps // splits, (split + 1) * steps // splits
    acc = dot_steps(a_ptr, b_ptr, M, N, K, strides, row, column, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, "")
    store_tile(c_ptr + split.to(tl.int64) * M * N, acc, M, N, row, column, BLOCK_M, BLOCK_N)


def tiles(a, b, splits=1):
    """a [M, K], b [K, N], any strides -> [M, N], a program for each 128 columns; in rung 3 [splits, M, N] in fp32."""
    M, N, K, c = _prepare(a, b)
    block_m, block_n, block_k, warps = _tile(M, a.dtype)
    c = c if splits == 1 else c.new_empty(splits, M, N, dtype=torch.float32)
    if c.numel():
        tiles_kernel[triton.cdiv(M, block_m) * triton.cdiv(N, block_n), splits](
            a, b, c, M, N, K, a.stride() + b.stride(), block_m, block_n, block_k, num_warps=warps, num_stages=3
        )
    return c


# Rung 2. New: one row needs no tensor core. A program owns a few columns and multiplies b's tile with a element by
# element. Its partial sums stay in registers and are reduced once at the end. A thread has four 16-byte loads in
# flight. Where K is contiguous (nn.Linear's weight, transposed) a program owns 4 columns: 1024 programs for 4096
# columns, predicted copy speed. Where N is contiguous, a program owns 64, since fewer columns are less than a line of
# 128 bytes: 64 programs, predicted no gain over `tiles`.
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
        b = tl.load(b_ptrs, mask=b_mask, other=0.0, eviction_policy="evict_first")  # used once: c and a may stay in L2
        a = tl.load(a_ptr + ks * stride_ak, mask=ks < K, other=0.0).to(tl.float32)  # second: b is in HBM, a in L2
        acc += a[None, :] * b.to(tl.float32)
    tl.store(c_ptr + columns, tl.sum(acc, axis=1).to(c_ptr.dtype.element_ty), mask=columns < N)


def matvec(a, b):
    """a [1, K], b [K, N], any strides -> [1, N]."""
    M, N, K, c = _prepare(a, b)
    if M > 1:
        raise Unsupported(f"{M} rows: without tensor cores each row costs as much arithmetic as the first")
    if c.numel():
        block_n, block_k = (4, 1024) if b.stride(0) == 1 else (64, 64)
        grid = (triton.cdiv(N, block_n),)
        matvec_kernel[grid](a, b, c, N, K, a.stride(1), *b.stride(), block_n, block_k, num_stages=1)
    return c


# Rung 3. New: split-K. Several programs work on one tile, each on its part of the steps of K, about two programs for
# each SM. Atomic additions of the parts would need c in fp32, cleared before and converted after, and would add in
# another order each time. Here each program writes its part into a workspace in fp32, and a second kernel adds the
# parts in a fixed order. That is 8 bytes * MN * splits, which stay in L2: 4 MB at M = 16, N = K = 4096 (8 splits). At
# M = 128 it is 34 MB, as much as b.
# Predicted: all SMs work at every N, minus a launch of 1 to 2 us, and less gain with more rows. At M = 16, N = 4096, K
# = 14336 that is 29 to 30 us where `tiles` takes 112: 3.7 to 3.9 times as fast.
@triton.jit
def add_splits_kernel(parts_ptr, c_ptr, size, splits, BLOCK: tl.constexpr):  # parts [splits, size] fp32, c [size]
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        acc += tl.load(parts_ptr + lanes, mask=lanes < size, other=0.0)
        parts_ptr += size
    tl.store(c_ptr + lanes, acc.to(c_ptr.dtype.element_ty), mask=lanes < size)


def split_k(a, b):
    """a [M, K], b [K, N], any strides -> [M, N]. About two programs per SM; deterministic."""
    M, N, K, c = _prepare(a, b)
    block_m, block_n, block_k, _ = _tile(M, a.dtype)
    programs = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    splits = min(triton.cdiv(K, block_k), 2 * num_sms() // max(programs, 1))
    if splits <= 1 or not programs:
        return tiles(a, b)
    parts = tiles(a, b, splits)
    add_splits_kernel[(triton.cdiv(M * N, 256),)](parts, c, M * N, splits, BLOCK=256, num_warps=2)
    return c


# Rung 4. New: Stream-K (Osama et al. 2023). The steps of all tiles form one sequence, and each of a fixed number of
# programs takes an equal share of it, wherever tiles begin and end. So no last wave leaves most SMs idle. If a share
# begins inside a tile, the program writes that part to the workspace and sets a flag. The program with a tile's first
# step owns the tile: it waits for the flags of the programs with the other steps, adds their parts in order, and writes
# c. This is one launch and deterministic. A program writes at most one part: 8 bytes * 132 tiles of workspace traffic,
# 17 MB at M = 128, whatever N and K are.
# Predicted at M = 128, N = 4096, K = 14336: 33 us for 139 MB. Rung 3 moves 34 MB for its parts and launches a second
# kernel, 38 us. So rung 4 is 1.15 times as fast.
# Why the waiting ends: a program writes its part first, before it waits for others. No more programs run than SMs hold
# at once. And shares go from the last program to the first, so a program waits only for lower ids. GPUs start these
# earlier, though CUDA does not promise it.
@triton.jit
def share(program, total, programs):
    return (program.to(tl.int64) * total // programs).to(tl.int32)  # the product may pass 2^31


@triton.jit
def stream_k_kernel(
    a_ptr, b_ptr, c_ptr,
    parts_ptr, flags_ptr,  # [programs, BLOCK_M, BLOCK_N] fp32; [programs or more] int32, 0 before and after
    M, N, K, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    me = programs - 1 - tl.program_id(0)
    down, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(K, BLOCK_K)
    total = tl.cdiv(N, BLOCK_N) * down * steps
    begin, end = share(me, total, programs), share(me + 1, total, programs)
    lanes = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for tile in range(begin // steps, tl.cdiv(end, steps)):
        row, column = tile % down * BLOCK_M, tile // down * BLOCK_N
        from_step, to_step = tl.maximum(begin - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        acc = dot_steps(a_ptr, b_ptr, M, N, K, strides, row, column, from_step, to_step, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
        if from_step > 0:
            tl.store(parts_ptr + me * BLOCK_M * BLOCK_N + lanes, acc)
            tl.debug_barrier()  # one thread sets the flag: every thread's stores must be done
            tl.atomic_xchg(flags_ptr + me, 1, sem="release", scope="gpu")
        else:
            helper = me + 1
            while to_step < steps:
                # Swapping 1 for 0 waits for the flag and clears it for the next call. .cg: read once, so not into L1.
                while tl.atomic_cas(flags_ptr + helper, 1, 0, sem="acquire", scope="gpu") == 0:
                    pass
                acc += tl.load(parts_ptr + helper * BLOCK_M * BLOCK_N + lanes, cache_modifier=".cg")
                helper += 1
                to_step = tl.minimum(share(helper, total, programs) - tile * steps, steps)
            store_tile(c_ptr, acc, M, N, row, column, BLOCK_M, BLOCK_N)


def stream_k(a, b):
    """a [M, K], b [K, N], any strides -> [M, N]. One program per SM; deterministic for a given number of SMs."""
    return _stream_k(a, b, *_stages_of(_tile(a.shape[0] if a.ndim else 0, a.dtype), a))


def _stages_of(tile, a):
    """The tile with its stages: 4, or as many as shared memory holds."""
    block_m, block_n, block_k, _ = tile
    return *tile, min(4, device.shared_memory() // ((block_m + block_n) * block_k * a.element_size()))


def _stream_k(a, b, block_m, block_n, block_k, warps, stages, tma=""):
    M, N, K, c = _prepare(a, b)
    count = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    steps = count * triton.cdiv(K, block_k)
    if steps == 0:
        return c.zero_()
    programs = min(num_sms(), steps)
    if tma and 5 * (programs // count * count) >= 4 * programs:  # rung 5
        programs = programs // count * count
    parts = torch.empty(programs, block_m, block_n, dtype=torch.float32, device=a.device)
    flags = _flags(a.device, torch.cuda.current_stream(a.device).cuda_stream if a.is_cuda else 0)
    strides = a.stride() + b.stride()
    if tma:
        stored, block = (b.t(), [block_n, block_k]) if tma == "[N, K]" else (b, [block_k, block_n])
        a, b = TensorDescriptor.from_tensor(a, [block_m, block_k]), TensorDescriptor.from_tensor(stored, block)
    stream_k_kernel[(programs,)](
        a, b, c, parts, flags, M, N, K, strides, block_m, block_n, block_k, tma, num_warps=warps, num_stages=stages
    )
    return c


@functools.cache
def _flags(device, stream):
    # One set for each stream: calls on one stream run one after another; on two streams they may overlap.
    return torch.zeros(4 * num_sms(), dtype=torch.int32, device=device)


# Rung 5. New, four things. TMA loads a tile by one instruction, and addresses take no registers. One row in nn.Linear's
# layout goes to matvec, which exchanges no parts. The tile follows M and N: for each byte of b a program loads
# BLOCK_M / BLOCK_N bytes of a, so wide tiles are better. But a tile that three programs share costs two parts. So the
# launcher takes the narrowest tile that makes no more tiles than SMs. If none does, it takes for few rows the one with
# the longest lines in memory. And shares are whole fractions of a tile where that leaves at most a fifth of the SMs
# idle. That is 2 programs for each of 64 tiles, or one for each of 112.
# Predicted: copy speed at M = 16 and 1, and close to it at 128.
def matmul_skinny(a, b):
    """a [M, K], b [K, N], any strides -> [M, N]. Fast for few rows, correct for any number."""
    M = empty_product(a, b).shape[0]
    if M == 1 and b.stride(0) == 1:
        return matvec(a, b)
    block_m, *others = _stages_of(_tile(M, a.dtype), a)
    turned, tma = b.stride(0) == 1, ""
    if a.element_size() == 2 and device.architecture() >= 90 and tma_takes(a, b.t() if turned else b):
        tma = "[N, K]" if turned else "[K, N]"  # b's layout in memory
        few = [(64, 256, 4, 5), (128, 128, 4, 4), (64, 256, 4, 5) if turned else (256, 64, 4, 5)]
        shapes = few if block_m <= 32 else [(64, 128, 4, 4), (128, 128, 8, 3), (256, 64, 8, 4)]
        n, k, warps, stages = next((s for s in shapes if triton.cdiv(b.shape[1], s[0]) <= num_sms()), shapes[-1])
        others = n, k, warps, device.fitting_stages(stages, 2 * (block_m + n) * k)
    return _stream_k(a, b, block_m, *others, tma=tma)


def _prepare(a, b):
    c = empty_product(a, b)
    return *c.shape, a.shape[1], c


def _tile(M, dtype):
    """block_m, block_n, block_k, warps: all rows of a up to 128, 128 columns, one line of 128 bytes along K."""
    block_m = min(128, max(16, triton.next_power_of_2(M)))
    if dtype.itemsize == 4:  # no tensor cores: accumulator and operands take more registers
        return min(64, block_m), 64, 32, 4
    return block_m, 128, 64, 8 if block_m == 128 else 4


def same_bits_every_time(rung):
    """Splitting K changes the order of the additions, but it is the same in every run."""
    question = inputs(1, 200, 900)
    assert len({rung(*question).double().sum().item() for _ in range(5)}) == 1


LESSON = Lesson(
    about=About(
        teaches="1 to 128 rows: bytes decide; matrix times vector, split-K, Stream-K, waiting for other programs",
        hours=1,
        operator="skinny matmul",
        pictures=("split_k",),
    ),
    problem=PROBLEM,
    rungs=(tiles, matvec, split_k, stream_k, matmul_skinny),
    predicted=(
        Prediction(rung=tiles, at={"M": 16, "N": 4096, "K": 14336, "transposed": "b"}, percent_of_limit=25),
        Prediction(rung=matvec, at={"M": 1, "N": 28672, "K": 8192, "transposed": "b"}, percent_of_limit=100),
        Prediction(
            rung=matvec,
            at={"M": 1, "N": 4096, "K": 4096, "transposed": ""},
            times=1,
            over=tiles,
            why="A program of matvec keeps fewer bytes in flight than a pipelined tile, and twice as many programs do "
            "not make up for it.",
        ),
        Prediction(
            rung=split_k,
            at={"M": 16, "N": 4096, "K": 14336, "transposed": "b"},
            times=(3.7, 3.9),
            over=tiles,
            why="Cause not found: it is not the second launch, since stream_k with one launch takes as long, and it is "
            "not the SMs without work, since 256 programs run.",
        ),
        Prediction(
            rung=stream_k,
            at={"M": 128, "N": 4096, "K": 14336, "transposed": "b"},
            times=1.15,
            over=split_k,
            why="An owner adds its four parts of 64 KB one after the other, with 1640 cycles and a trip to L2 for "
            "each. That is about 5 us in which 100 SMs are idle. The prediction counted bytes only.",
        ),
        Prediction(rung=matmul_skinny, at={"M": 16, "N": 28672, "K": 8192, "transposed": "b"}, percent_of_limit=100),
        Prediction(rung=matmul_skinny, at={"M": 128, "N": 28672, "K": 8192, "transposed": "b"}, percent_of_limit=90),
    ),
    checks=(
        case("no rows", M=0, N=5, K=5),
        case("nothing to add up: zeros", M=1, N=5, K=0),
        case("one product", M=1, N=1, K=1),
        case("one row, the weight of nn.Linear: [N, K] in memory", M=1, N=67, K=1031, transposed="b"),
        case("one row, b as it is", M=1, N=67, K=131),
        case("17 rows are not 16", M=17, N=129, K=65, transposed="b"),
        case("a is transposed too, more than 64 rows", M=70, N=140, K=130, transposed="ab"),
        case("whole 16 bytes, [N, K]: a tile that three programs share", M=5, N=264, K=640, transposed="b"),
        case("offsets past 2^31", gib=60, M=1, N=2**18 + 3, K=2**13 + 1),
        case("more tiles than programs, whole 16 bytes, [K, N]", M=16, N=1200, K=128),
    ),
    benches=tuple(
        {"M": M, "N": N, "K": K, "transposed": t} for t in ("b", "") for M, N, K in reversed(LLM) if M <= 128
    ),
    passes={tiles: 1.1, split_k: 1.1, stream_k: 1.2},  # a once for each 128 columns; parts
    wrong=(
        Mutant("no mask along K", "dot_steps", "(rows < M) & (ks < K)[None, :]", "rows < M", "tiles", "out of bounds"),
        Mutant("parts in 16 bits", "tiles", "torch.float32", "torch.bfloat16", "split_k"),
        Mutant("the last part alone", "add_splits_kernel", "acc += tl.load", "acc = tl.load", "split_k"),
        Mutant("a row past K", "matvec_kernel", "(ks < K)[None, :]", "(ks <= K)[None, :]", "matvec", "out of bounds"),
        Mutant("only one program helps", "stream_k_kernel", "while to_step <", "if to_step <", "stream_k"),
        Mutant("the owner adds its own", "stream_k_kernel", "parts_ptr + helper", "parts_ptr + me", "stream_k", "nan"),
        Mutant("b a step ahead of a", "dot_steps", "[column, step *", "[column, (step + 1) *", "matmul_skinny"),
    ),
    claims={tiles: ("wgmma", "cp.async"), matvec: ("16-byte loads",), stream_k: ("wgmma",),
            matmul_skinny: ("stream_k_kernel: tma", "stream_k_kernel: wgmma")},
    properties=(*PROBLEM.properties, same_bits_every_time),
)  # fmt: skip

if __name__ == "__main__":
    LESSON.main()
