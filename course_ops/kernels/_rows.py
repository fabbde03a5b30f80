"""How rows are spread over programs: what softmax, the norms and cross-entropy share.

A kernel has one of these shapes, and each operator lists which of them it takes for which rows:

    packed      a program owns one row, or several short ones, and holds them in registers: read once
    chunks      a row of one program as a list of tensors, where a single one, a power of two, would have idle lanes
    split       a row is split by columns over PARTS programs, which exchange partial statistics: read once
    walk        a program walks over many rows and keeps sums over rows (dw, db) in registers
    group       both: PARTS programs walk together, each over its own columns of every row
    two-pass    a program walks along a row of any length, twice
    shifted     packed, split, walk or group, for rows that start at any address: see `whole_chunks`

Split rows. Each part publishes its partial statistics, one word for each row, and loads those of the other parts until
none is empty. A word is written and read whole, so no fence is needed. No wait is for ever, for two reasons:
- GPUs start programs in the order of their ids. So of the oldest unfinished row, every part has started or starts next,
  and waits for that row alone. CUDA does not promise this order. CUB's single-pass scan relies on it too.
- All parts of a row fit on the GPU at once: the operator's list sees to that. It assumes that no other such kernel runs
  on the GPU. Two on streams of different priority could each hold the room that the other needs.

The interpreter runs programs one after another, where a wait would not end: see `waits`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from course_ops._common import Unsupported, num_sms, triton_interprets

_INTERPRETED = tl.constexpr(triton_interprets())


@dataclass(frozen=True)
class Rows:
    """What decides how rows are spread: M rows of N elements of `itemsize` bytes, on a device of `sms` SMs."""

    M: int
    N: int
    itemsize: int
    sms: int
    shifted: bool = False  # 16-bit elements, and most rows start where no load of 4 bytes can
    period: int = 1  # rows so far apart start at the same place between two multiples of 16 bytes, in each tensor

    @classmethod
    def of(cls, x: torch.Tensor, *more: torch.Tensor) -> "Rows":
        """Of x, whose result has rows of N elements; `more` is read beside it."""
        N, tensors = x.shape[1], (x, *more)
        if 2**31 - 2**15 < N < 2**31:  # an int32 holds N, but not where the last block of columns ends
            raise Unsupported(f"x has rows of {N} elements: from 2^31 - 2^15 to 2^31 no kernel takes them, so pad them")
        odd = x.element_size() == 2 and N % 2 == 1
        # A row starts at the same place between two multiples of 16 bytes in each tensor.
        shifted = odd and all((t.stride(0) - N) % 8 == 0 and t.data_ptr() % 16 == 0 for t in tensors)
        width = 16 // max(t.element_size() for t in tensors)
        alike = all((t.stride(0) - N) % width == 0 and t.data_ptr() % 16 == 0 for t in tensors)
        period = width // math.gcd(width, N) if alike else 1
        return cls(*x.shape, x.element_size(), num_sms(x.device), shifted, period)

    @property
    def bytes(self) -> int:
        """Of one row."""
        return self.N * self.itemsize

    @cached_property
    def block(self) -> int:
        """Columns of a program that holds a whole row."""
        return triton.next_power_of_2(max(self.N, 1))

    @property
    def ragged(self) -> bool:
        """Whether more than an eighth of that program's lanes would idle."""
        return 7 * self.block > 8 * self.N


@dataclass(frozen=True)
class Choice:
    """A kernel, and the rows that it is right for."""

    launch: Callable[..., Any]
    takes: Callable[[Rows], bool]
    why: str


def choose(choices: Sequence[Choice], rows: Rows) -> Callable[..., Any]:
    """The launcher of the first choice that takes these rows; the last choice of a list takes all."""
    return next(choice.launch for choice in choices if choice.takes(rows))


@dataclass(frozen=True)
class Split:
    """A row over `parts` programs of `block` columns and `warps` warps each."""

    parts: int
    block: int
    warps: int

    def fits(self, rows: Rows, warps_per_sm: int) -> bool:
        """Whether all parts of a row run at once, on SMs that have room for so many warps of this kernel."""
        return self.parts <= warps_per_sm // self.warps * rows.sms

    @property
    def slots(self) -> int:
        """Lanes to look at the partial statistics with: a power of two within one warp, or one that fills all warps.

        In between, several warps would hold the same word and load it at different moments, and a reduction could take
        the one that was loaded too early.
        """
        slots = triton.next_power_of_2(self.parts)
        return slots if slots <= 32 else max(slots, 32 * self.warps)


def split(rows: Rows, *, part_bytes: int, most_parts: int, warp_bytes: int) -> Split:
    """Parts of `part_bytes`, or larger ones where there would be more than `most_parts`; a warp for each `warp_bytes`.

    More parts take longer to look at than a larger part takes to load.
    """
    block = max(part_bytes // rows.itemsize, triton.next_power_of_2(triton.cdiv(rows.N, most_parts)))
    return Split(triton.cdiv(rows.N, block), block, block * rows.itemsize // warp_bytes)


@dataclass(frozen=True)
class Chunks:
    """A row as `count` tensors of `block` columns, one load per thread each: 2560 columns are five of 512, not 4096."""

    warps: int
    count: int
    block: int


def in_chunks(N: int, itemsize: int, load_bytes: int = 16) -> Chunks:
    """The fewest idle lanes, to a sixteenth of the row; then about 64 bytes per thread, which are under way at once."""
    found = []
    for warps in (1, 2, 4, 8, 16):
        block = 32 * warps * load_bytes // itemsize
        count = max(1, triton.cdiv(N, block))
        if (count * load_bytes <= 144 and count <= 16) or warps == 16:
            found.append(Chunks(warps, count, block))
    return min(found, key=lambda c: (round(16 * c.count * c.block / max(N, 1)), abs(c.count * load_bytes - 64)))


def load_bytes(itemsize: int, N: int, *strides: int) -> int:
    """What one load of a thread takes: 16, 8 or 4 bytes, at whose multiples all rows start.

    A kernel that reads w beside the rows says this to in_chunks. Triton lays out both alike, by w, which starts at a
    multiple of 16 bytes. With 16 bytes a thread the narrower loads of a warp would lie apart, and y would pass through
    shared memory to be stored.
    """
    return max(4, itemsize * math.gcd(16 // itemsize, N, *strides))


def common_multiple_of(N: int, *strides: int) -> int:
    """MULTIPLE of a kernel, for `multiple`: 8, 4 or 2 if that divides N and the strides, otherwise 1.

    1 also if 16 divides them: Triton sees that by itself and tells the compiler.
    """
    return 1 if all(length % 16 == 0 for length in (N, *strides)) else math.gcd(8, N, *strides)


def shifted(rows: Rows, *, thread_bytes: int, most_warps: int) -> Split:
    """A row of an odd length, `thread_bytes` of it a thread: one program of 4 warps, or parts of up to `most_warps`.

    The fewest idle lanes, to an eighth of the row; then the fewest parts.
    """
    found = []
    for warps in (4, 2, 1):
        block = 32 * warps * thread_bytes // rows.itemsize
        parts = triton.cdiv(rows.N, block)
        if parts == 1 or warps <= most_warps:
            found.append(Split(parts, block, warps))
    return min(found, key=lambda s: round(8 * s.parts * s.block / rows.N))


def waits() -> tuple[bool, ...]:
    """The WAIT of each launch of a split kernel. Interpreted, a first launch publishes everything without waiting.

    That launch computes from statistics that are not there yet; the second overwrites what it stored.
    """
    return (False, True) if triton_interprets() else (True,)


def launch_shifted(kernel, rows: Rows, parts: Split, empty: int, word: torch.dtype, tensors, numbers) -> None:
    """kernel on tensors, their partial statistics, N, numbers and how a row is spread; one part needs no partials.

    partials: [M, PARTS] words, which are `empty` until a part publishes its own.
    """
    alone = parts.parts == 1
    partials = torch.full((0,) if alone else (rows.M, parts.parts), empty, dtype=word, device=tensors[0].device)
    for blocking in (False,) if alone else waits():
        kernel[(rows.M * parts.parts,)](
            *tensors, partials, rows.N, *numbers, parts.parts, max(32 * parts.warps, parts.slots), parts.block // 8, 8,
            blocking, num_warps=parts.warps,
        )  # fmt: skip


@triton.jit
def opaque(x):
    """x, in a way that makes the compiler keep its 16 bits in registers and not the fp32 values computed from it.

    A row that is used twice waits in registers in between. To the compiler this empty instruction makes a new x, so it
    keeps what was loaded. Widening that again costs one instruction. In exchange the row needs half the registers, and
    an SM holds twice the rows. For an even number of 16-bit elements per thread; others are returned as they are.
    """
    if _INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def widen(x, sixteen):
    # opaque in arithmetic: the compiler cannot see that a shift by an argument is .to(tl.float32). It may not move
    # opaque's instruction, so with many chunks it would keep the w and b of all of them as well.
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << sixteen).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def mean_of(total, count):
    """total / count, rounded once: the mean of equal values is that value, if their sum is exact.

    `/` divides by an approximation, whose last step the compiler fuses with the x - mean that follows. A row of nothing
    but 100.0 would then have a variance of 5e-13, which counts beside an eps of 1e-12.
    """
    if _INTERPRETED:  # its fma rounds twice
        return mean_by_division(total, count)
    else:
        # div_rn takes a branch for each total. This code has none, and all totals share one reciprocal. Two steps of
        # Newton round the reciprocal correctly for each count below 2^24 - 1, if `/` is off by 16 units in the last
        # place or less. Then the quotient is corrected by its remainder: Markstein, "Computation of elementary
        # functions on the IBM RISC System/6000 processor", 1990. A mean below 2^-126 may be off by 2^-149, and the
        # mean of an infinite total is NaN.
        inverse = 1.0 / count
        inverse = tl.fma(tl.fma(inverse, -count, 1.0), inverse, inverse)
        inverse = tl.fma(tl.fma(inverse, -count, 1.0), inverse, inverse)
        mean = total * inverse
        return tl.fma(tl.fma(mean, -count, total), inverse, mean)


@triton.jit
def mean_by_division(total, count):
    """As mean_of, of a program's one total: its branch keeps the loads that follow behind it.

    Without it LayerNorm in chunks takes 0.0484 ms for 4096 x 8960 on an H200 instead of 0.0444, and add_norm 0.0568 ms
    for 4000 x 4100 instead of 0.0498.
    """
    return tl.div_rn(total, count + tl.zeros_like(total))


@triton.jit
def multiple(length, MULTIPLE: tl.constexpr):
    """`length`, which is a multiple of MULTIPLE, written so that the compiler knows it.

    A load may take 16 bytes if its mask is the same for all of them and its address is a multiple of 16 bytes. Of 3000
    columns the compiler could not know that: to it they might be 3001, and it would load single elements.
    """
    return length // MULTIPLE * MULTIPLE


# Rows of an odd length: most start where the hardware has no wide load. So chunks of WIDTH elements, 16 bytes, are
# counted from the start of the tensor and not of the row. A row has N // WIDTH - 1 whole chunks, wherever it starts.
# Those are loaded and stored whole. The N % WIDTH + WIDTH elements on either side of them belong to the row's part 0,
# which takes them one by one.
@triton.jit
def whole_chunks(begin, N, part, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Of one part of the row begin .. begin + N: places [LANES, WIDTH] in the tensor, and which are inside [LANES, 1].

    begin: int64.
    """
    first = (begin + WIDTH - 1) // WIDTH
    chunks = part * LANES + tl.arange(0, LANES)[:, None]
    return (first + chunks) * WIDTH + tl.arange(0, WIDTH)[None, :], chunks < N // WIDTH - 1


@triton.jit
def sides(begin, N, part, WIDTH: tl.constexpr):
    """Places [2 WIDTH] of the elements before the whole chunks and of those after, and which are the row's.

    A row without a whole chunk has all its elements there. No part but 0 has any.
    """
    side = tl.arange(0, 2 * WIDTH)
    column = tl.where(side < before_chunks(begin, WIDTH), side, tl.maximum(N // WIDTH - 1, 0) * WIDTH + side)
    return begin + column, (part == 0) & (column < N)


@triton.jit
def before_chunks(begin, WIDTH: tl.constexpr):
    """How many elements a row that starts at `begin` has before its first whole chunk."""
    return ((begin + WIDTH - 1) // WIDTH * WIDTH - begin).to(tl.int32)


@triton.jit
def beside_chunks(ptr, begin, part, inside, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """w or b, [N], of the columns of a part's whole chunks: [LANES, WIDTH] in fp32.

    In most rows these columns start at no multiple of WIDTH. Loading them one by one takes eight times as many
    instructions as x does. So each thread loads two chunks that start at multiples of WIDTH columns and hold the eight
    columns that it needs. It moves these into place in registers: by four columns or not, by two, and by one.
    The second chunk ends within N, because a row has one whole chunk less than w.
    """
    before = before_chunks(begin, WIDTH)
    first = (part * LANES + tl.arange(0, LANES)[:, None]) * WIDTH
    words = ()  # of 32 bits, [LANES] each
    # Every row asks for w and b, so they should outlive the streams of x and y in the caches.
    if ptr.dtype.element_ty.primitive_bitwidth == 16:
        for i in tl.static_range(2):
            at = ptr + first + (WIDTH * i + tl.arange(0, WIDTH)[None, :])
            chunk = tl.load(at, mask=inside, eviction_policy="evict_last")
            words = words + quarters(pack_columns(tl.reshape(chunk, [WIDTH * LANES]), True), LANES)
        words = later(words, before & 4, 2, 6)
        words = later(words, before & 2, 1, 5)
        moved = ()
        for i in tl.static_range(4):
            halves = words[i] >> 16 | words[i + 1] << 16
            moved = moved + (tl.where(before & 1 == 0, words[i], halves),)  # noqa: RUF005
        w = unpack_columns(whole_of(moved[0], moved[1], moved[2], moved[3]), ptr.dtype.element_ty)
    else:
        for i in tl.static_range(4):
            at = ptr + first + (4 * i + tl.arange(0, 4)[None, :])
            words = words + quarters(tl.load(at, mask=inside, eviction_policy="evict_last"), LANES)
        words = later(words, before & 4, 4, 11)
        words = later(words, before & 2, 2, 9)
        words = later(words, before & 1, 1, 8)
        even = whole_of(words[0], words[2], words[4], words[6])
        w = tl.join(even, whole_of(words[1], words[3], words[5], words[7]))
    return tl.reshape(w, [LANES, WIDTH])


@triton.jit
def quarters(x, LANES: tl.constexpr):
    """Of [LANES, 4], in any shape: the four columns, [LANES] each."""
    even, odd = tl.split(tl.reshape(x, [LANES, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def whole_of(a, b, c, d):
    """[4 LANES]: the tensor whose quarters these are."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.shape[0]])


@triton.jit
def later(words, move, BY: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of the words: from the first one on, or from number BY on if `move` is not 0."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.where(move == 0, words[i], words[i + BY]),)  # noqa: RUF005
    return found


@triton.jit
def pack_pair(high, low):
    """Two fp32 values in one 64-bit word, which is written and read whole."""
    return (high.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def unpack_pair(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def publish(ptr, word, mask=None):
    tl.atomic_xchg(ptr, word, mask=mask, sem="relaxed")


@triton.jit
def look(ptrs, mask, other):
    """Words of the other parts, as they are now. volatile: from L2, where other SMs' words arrive, not from L1."""
    return tl.load(ptrs, mask=mask, other=other, volatile=True)


@triton.jit
def wait(words, ptrs, mask, other):
    """`words`, loaded again until none of them is 0."""
    while any_empty(words):
        words = look(ptrs, mask, other)
    return words


# PTX: a word of 64 bits, loaded again from its address until it is not -1.
POLL = tl.constexpr("""
    {
        .reg .pred there;
        mov.b64 $0, $1;
    AGAIN:
        setp.ne.s64 there, $0, -1;
        @there bra THERE;
        ld.relaxed.gpu.global.b64 $0, [$2];
        bra AGAIN;
    THERE:
    }
""")


@triton.jit
def settled(words, ptrs):
    """`words`, 64 bits each, loaded again from their ptrs until none of them is -1.

    A loop in PTX and not in Triton, whose compiler loads nothing ahead in a loop that holds another one. Each thread
    waits for its own words; words that several warps hold are equal then, as each is written once. Interpreted,
    nothing waits.
    """
    if _INTERPRETED:
        return words
    else:
        return tl.inline_asm_elementwise(
            POLL,
            "=l,l,l",
            [words, ptrs],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit
def pack_columns(x, PACK: tl.constexpr):
    """16-bit x as half as many 32-bit words, in which a row waits from one iteration of a loop to the next.

    Between iterations the compiler would give each element a register of its own. Without PACK, and for 32-bit x, this
    returns x itself: packing neighbours that lie in different threads costs too much.
    """
    if PACK and x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        low, high = tl.split(tl.reshape(bits, [x.shape[0] // 2, 2]))
        return low | (high << 16)
    else:
        return x


@triton.jit
def unpack_columns(x, dtype: tl.constexpr):
    """What pack_columns was given, in fp32."""
    if x.dtype != tl.uint32:
        return x.to(tl.float32)
    else:
        if dtype == tl.bfloat16:
            low = (x << 16).to(tl.float32, bitcast=True)
            high = (x & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            low = x.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), [2 * x.shape[0]])


@triton.jit
def add_step(outer, inner, step, x):
    """x into a sum of two levels, outer + inner: after each 64 steps the inner one moves to the outer one.

    Thousands of equal values, one after the other, would each be rounded the same way.
    """
    inner += x
    full = step % 64 == 63
    return outer + tl.where(full, inner, 0.0), tl.where(full, 0.0, inner)


@triton.jit
def any_empty(words):
    there = tl.min((words != 0).to(tl.int32), axis=len(words.shape) - 1)
    return (tl.min(there, axis=0) if len(words.shape) == 2 else there) == 0
