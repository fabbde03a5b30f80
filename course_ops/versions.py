"""Names of Gluon that differ between the versions of Triton that the course runs on, 3.6 to 3.9, under the newest name.

    here              Triton 3.9              before
    aggregate         gluon.aggregate         triton.language.core._aggregate
    async_load        tma.async_load          tma.async_copy_global_to_shared
    async_store       tma.async_store         tma.async_copy_shared_to_global
    async_atomic_add  tma.async_atomic_add    none: the compiler's operation without a name
    reinterpret       shared.reinterpret      shared._reinterpret

A kernel imports these instead of writing the old names: `from course_ops.versions import async_load`.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

__all__ = ["aggregate", "async_atomic_add", "async_load", "async_store", "reinterpret"]


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
