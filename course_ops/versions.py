"""Names of Gluon that differ between the versions of Triton that the course runs on, 3.6 to 3.9, under the newest name.

    here              Triton 3.9              before
    aggregate         gluon.aggregate         triton.language.core._aggregate
    async_load        tma.async_load          tma.async_copy_global_to_shared
    async_store       tma.async_store         tma.async_copy_shared_to_global
    async_atomic_add  tma.async_atomic_add    none: the compiler's operation without a name
    reinterpret       shared.reinterpret      shared._reinterpret

    here                  Triton 3.8 and 3.9              before
    load_tensor_memory    tmem.load()                     tmem.load(get_tmem_reg_layout(...))
    tensor_memory_layout  TensorMemoryLayout(cga_layout)  TensorMemoryLayout(cta_split_num)
    cluster_init          the compiler's work             mbarrier.sync_cluster_init; 3.6 has no pairs of CTAs

A kernel imports these instead of writing the old names: `from course_ops.versions import async_load`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language import core
from triton.runtime.jit import constexpr_function

__all__ = [
    "HAS_PAIRS",
    "HAS_REMOTE_ARRIVE",
    "aggregate",
    "allocate_mbarrier",
    "async_atomic_add",
    "async_load",
    "async_store",
    "cluster_init",
    "load_tensor_memory",
    "reinterpret",
    "tensor_memory_layout",
]


@builtin
def reinterpret(shared, dtype, shape, layout, _semantic=None):
    """Shared memory seen as another dtype, shape and layout. Triton 3.8 refuses a slice: index the result instead."""
    return _reinterpret(shared, dtype, shape, layout, _semantic=_semantic)


@builtin
def _atomic_add(desc, coord, smem, _semantic=None):
    """Add a block of shared memory to global memory; asynchronous, as async_store. TMA waits by tma.store_wait."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, smem.handle)


def _first(*places):
    """The first of (module, name) that this Triton has."""
    return next(getattr(module, name) for module, name in places if hasattr(module, name))


# A removed name may still be bound, to what only says so; so the new name is asked for first.
aggregate = _first((gluon, "aggregate"), (core, "_aggregate"))
async_load = _first((tma, "async_load"), (tma, "async_copy_global_to_shared"))
async_store = _first((tma, "async_store"), (tma, "async_copy_shared_to_global"))
_reinterpret = _first((shared_memory_descriptor, "reinterpret"), (shared_memory_descriptor, "_reinterpret"))
async_atomic_add = getattr(tma, "async_atomic_add", _atomic_add)


if hasattr(blackwell, "get_tmem_reg_layout"):

    @gluon.jit
    def load_tensor_memory(tmem):
        """A block of tensor memory in registers; each warp of a warpgroup has 32 rows, each thread one of them."""
        SPLIT: gl.constexpr = ((1, 0),) if tmem.layout.two_ctas else ()
        LAYOUT: gl.constexpr = blackwell.get_tmem_reg_layout(
            tmem.dtype, tmem.shape, tmem.layout, gl.num_warps(), cga_layout=SPLIT
        )
        return tmem.load(LAYOUT)

else:

    @gluon.jit
    def load_tensor_memory(tmem):
        """A block of tensor memory in registers; each warp of a warpgroup has 32 rows, each thread one of them."""
        return tmem.load()


@constexpr_function
def tensor_memory_layout(rows, columns, two_ctas=False):
    """fp32 accumulators of rows x columns in each CTA; of a pair, CTA 0 has the upper and CTA 1 the lower rows."""
    if not two_ctas:
        return blackwell.TensorMemoryLayout((rows, columns), col_stride=1)
    split = {"cta_split_num": (2, 1)} if hasattr(blackwell, "get_tmem_reg_layout") else {"cga_layout": ((1, 0),)}
    return blackwell.TensorMemoryLayout((rows, columns), col_stride=1, two_ctas=True, **split)


allocate_mbarrier = getattr(mbarrier, "allocate_mbarrier", None)  # Triton 3.6 has none
HAS_PAIRS = allocate_mbarrier is not None  # of CTAs, which share an MMA
# From Triton 3.8 on an arrival reaches an mbarrier of the other CTA. So a pair can work on one tile after another.
HAS_REMOTE_ARRIVE = HAS_PAIRS and not hasattr(mbarrier, "sync_cluster_init")

if hasattr(mbarrier, "sync_cluster_init"):
    cluster_init = mbarrier.sync_cluster_init

else:

    @gluon.jit
    def cluster_init():
        """Both CTAs of a pair see each other's mbarriers initialised. From Triton 3.8 on the compiler sees to it."""
