"""The vocabulary of Hopper kernels in Gluon: what they share around their main loops, which they do not share.

A ring is a circle of shared-memory stages. Each stage has two mbarriers. The producer waits for `empty` and starts a
copy, whose bytes complete `full`. A consumer waits for `full`, and arrives on `empty` when it has read the stage.
Steps are numbered from 0 over all of a CTA's tiles, so stage and parity follow from the step alone.

Names that differ between versions of Triton come from course_ops.versions.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import constexpr_function

from course_ops import versions

async_load, async_store, reinterpret = versions.async_load, versions.async_store, versions.reinterpret
tma_reduce_add = versions.async_atomic_add
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def aggregate(cls):
    """A class of named values for device code: annotated fields, given by name, and methods with @gluon.jit.

    By name alone, because the compiler's cache does not know in which order the fields are declared. A field that may
    be None has the type `... | gl.constexpr`.
    """

    def init(self, **fields):
        for name, value in fields.items():
            setattr(self, name, gl.constexpr(None) if value is None else value)

    init.__triton_builtin__ = True  # nothing in it decides what is compiled
    cls.__init__ = init
    return versions.aggregate(cls)


def tensor_descriptor(t: torch.Tensor, block_shape: list[int], *, swizzled: bool = True) -> TensorDescriptor:
    """What TMA needs to copy blocks of this shape from or to t. Elements past t's ends are read as 0, not written.

    swizzled: blocks lie in shared memory as wgmma reads them; otherwise row by row.
    """
    dtype = DTYPES[t.dtype]
    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(block_shape, dtype)
    else:
        bits = 8 * t.element_size()
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=len(block_shape))
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block_shape, layout)


@gluon.jit
def allocate_stages(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of a descriptor, in the layout in which TMA writes them."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers. A phase of one completes after ARRIVALS arrivals and all bytes that were announced to it."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    fence_async_shared()  # the initial value must be visible to TMA, which completes transactions there
    return bars


@gluon.jit
def ring_slot(step, STAGES: gl.constexpr):
    """The stage that a step uses, and the parity of `full` that its consumer waits for; `empty` is parity ^ 1."""
    return step % STAGES, step // STAGES & 1


@gluon.jit
def as_matrix(tile):
    """A shared tile [1, .., rows, columns], as a descriptor of more dimensions copies it, as [rows, columns]."""
    return tile.reshape((tile.shape[-2], tile.shape[-1]))


@constexpr_function
def accumulator(columns):
    """The layout of a warpgroup's accumulator of wgmma, [64, columns] in fp32, of operands in 16 bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def operand_a(x, acc, dtype: gl.constexpr):
    """x in 16 bits as the left operand of wgmma in registers. An accumulator has that layout: no element moves."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(x.to(dtype), LAYOUT)


@gluon.jit
def exp2(x):
    """2^x in one instruction. Results below 2^-126 become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def tanh(x):
    """tanh(x) in one instruction, with a relative error up to 2^-11: less than a score's rounding to 16 bits."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def tile_order(index, tiles, heads, heads_at_once):
    """The (head, rank) of the index-th unit of work: rank 0 of some heads, rank 1 of these, ..., then the next heads.

    Each head has `tiles` ranks, the longest tile first. With a few heads at a time long and short tiles run side by
    side, and what the tiles of a head share stays in L2.
    """
    first = index // (heads_at_once * tiles) * heads_at_once
    width, within = min(heads_at_once, heads - first), index % (heads_at_once * tiles)
    return first + within % width, within // width


# The mailbox needs no `empty` barrier. A CTA has B buffers of one input, and the mailbox has B + 1 slots. A consumer
# reads the index of work n before it returns that input of work n. The producer writes the slot again for work
# n + B + 1. It has then loaded the input of work n + B, for which it waited for that return.
@aggregate
class TileScheduler:
    """Deals tiles out to persistent CTAs as they become free. The producer warp fetches an index from a counter in
    global memory, and publishes it to the CTA's consumers through a mailbox in shared memory. A CTA's first index is
    its program id; an index that is no tile ends the work."""

    mailbox: gl.shared_memory_descriptor  # [slots, 1] int32
    published: gl.shared_memory_descriptor  # an mbarrier a slot, one arrival
    counter_ptr: gl.tensor  # one int32, 0 before and after the kernel

    @gluon.jit
    def publish(self, index, count):
        """The producer warp tells the consumers the index of the CTA's tile number `count`."""
        slot = count % self.mailbox.shape[0]
        self.mailbox.index(slot).store(gl.full((1,), index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(self.published.index(slot))

    @gluon.jit
    def fetch(self, num_tiles):
        """The producer warp's next index. The last of the num_tiles fetches resets the counter for the next launch."""
        fetched = gl.atomic_add(self.counter_ptr, 1)
        gl.store(self.counter_ptr, 0, mask=fetched == num_tiles - 1)
        return fetched + gl.num_programs(0)

    @gluon.jit
    def receive(self, count):
        """A consumer warpgroup waits for the index of the CTA's tile number `count`."""
        slot, parity = ring_slot(count, self.mailbox.shape[0])
        mbarrier.wait(self.published.index(slot), parity)
        return gl.max(self.mailbox.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def allocate_scheduler(counter_ptr, BUFFERS: gl.constexpr = 1):
    """A TileScheduler with its mailbox. BUFFERS: how many a CTA has of the input that it loads once a tile."""
    SLOTS: gl.constexpr = BUFFERS + 1
    mailbox = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return TileScheduler(mailbox=mailbox, published=allocate_barriers(SLOTS, 1), counter_ptr=counter_ptr)


def tile_counter(device: torch.device) -> torch.Tensor:
    """The counter of a TileScheduler, int32 [1], which every launch finds and leaves at 0.

    One a stream, as launches on one stream follow each other. A CUDA graph, which may be replayed on any stream, has
    a counter of its own, set to 0 in the graph.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return _counter_of(torch.cuda.current_stream(device))
    return torch.zeros(1, dtype=torch.int32, device=device)


@cache
def _counter_of(stream):
    return torch.zeros(1, dtype=torch.int32, device=stream.device)
