"""Gluon kernels on a CPU: TMA, mbarriers, wgmma, tensor memory and warp specialization, in any order of the hardware.

Without a GPU a launch of a Gluon kernel comes here. The kernel's own Python runs, with PyTorch tensors for blocks, one
CTA (or pair of CTAs) after the other. Each partition is a thread, and one of them runs at a time: at a wait another may
go on. Copies by TMA and MMAs complete at any time after they were issued; the MMAs of one warp complete in order. The
order is random and the same each time.

Two mistakes are found in whatever order. Accesses to shared and tensor memory have vector clocks, which an mbarrier
hands from the side that arrives to the side that waits. Two accesses to one place, of which one writes, and which no
barrier orders, are Fault("race"). So is a write by threads that TMA or an MMA reads without a fence between. When all
partitions wait for each other, that is Fault("barrier").

What it does not see: registers that an asynchronous wgmma has not written yet, and races in global memory.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import product
from math import prod
from random import Random
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from lessonkit.base.device import INTERPRETED
from lessonkit.base.errors import Fault
from lessonkit.base.traffic import watching

import torch
from triton import language as tl
from triton.runtime.jit import JITFunction

Clock = dict[Hashable, int]  # who -> how much of what they did is known to be over
Box = tuple[tuple[int, int], ...]  # from and to, in each dimension of an allocation
_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.float8e4nv: torch.float8_e4m3fn,
}
SEED = 0  # of the order in which partitions, copies and MMAs go on; a test takes others
PAIR = 2  # CTAs of a cluster, where there is one


class _Stopped(BaseException):
    """Ends the thread of a partition when another one has failed."""


def _join(clock: Clock, other: Clock) -> None:
    for who, tick in other.items():
        if clock.get(who, 0) < tick:
            clock[who] = tick


# ---- Memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Access:
    """One that a later one may race with. It is over for a clock that has `who` at `tick` or later.

    by_threads: TMA and MMAs see such a write after a fence of the partition `who` alone.
    """

    box: Box
    write: bool
    who: Any
    tick: int
    by_threads: bool
    what: str

    def meets(self, box: Box) -> bool:
        return all(a < d and c < b for (a, b), (c, d) in zip(self.box, box, strict=True))

    def within(self, box: Box) -> bool:
        return all(c <= a and b <= d for (a, b), (c, d) in zip(self.box, box, strict=True))


class _Barrier:
    """An mbarrier: a phase completes after `count` arrivals and all bytes that were announced to it."""

    def __init__(self, count: int, made: _Access) -> None:
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0
        self.made = made
        self.arrived: Clock = {}  # what those who arrived in this phase knew
        self.released: Clock = {}

    def arrive(self, clock: Clock, *, arrivals: int = 0, announced: int = 0) -> None:
        _join(self.arrived, clock)
        self.missing -= arrivals
        self.bytes += announced
        if self.missing < 0:
            raise Fault("barrier", f"a phase of an mbarrier has more than its {self.count} arrivals")
        if self.missing == 0 and self.bytes == 0:
            _join(self.released, self.arrived)
            self.missing, self.phase = self.count, self.phase ^ 1

    def over(self, parity: int) -> bool:
        """Whether the phase of this parity is complete."""
        return self.phase != parity


@dataclass
class _Space:
    """An allocation; of a pair of CTAs the memory of both. split: the dimension of which each CTA has a half.

    in_first: of mbarriers, that a pair has one of each, in its first CTA.
    """

    name: str
    split: int | None
    in_first: bool
    accesses: list[_Access] = field(default_factory=list)
    barriers: dict[tuple[Box, int], _Barrier] = field(default_factory=dict)


class _Memory:
    """A view of an allocation, as a kernel holds it. dims: for each of its dimensions that of the allocation.

    Of a view that was reshaped they are not known; then all of it counts as accessed where a part is.
    """

    def __init__(self, space: _Space, data: torch.Tensor, box: Box, dims: Sequence[int | None], layout: Any) -> None:
        self.space, self.data, self.box, self.dims, self.layout = space, data, box, tuple(dims), layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def _of(self, data: torch.Tensor, box: Box, dims: Sequence[int | None]) -> Any:
        return type(self)(self.space, data, box, dims, self.layout)

    def narrowed(self, dim: int, start: int, length: int) -> Any:
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise Fault("out of bounds", f"{start}:{start + length} in a dimension of {self.shape[dim]}")
        box = list(self.box)
        if (base := self.dims[dim]) is not None:
            box[base] = (box[base][0] + start, box[base][0] + start + length)
        return self._of(self.data.narrow(dim, start, length), tuple(box), self.dims)

    def index(self, i: int) -> Any:
        part = self.narrowed(0, i, 1)
        return self._of(part.data.squeeze(0), part.box, part.dims[1:])

    def reshape(self, shape: Sequence[int]) -> Any:
        return self._of(self.data.view(*shape), self.box, [None] * len(shape))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        """The same bytes in another shape, row by row. Where the first dimension stays, its parts stay apart."""
        kept = self.dims[:1] if shape[0] == self.shape[0] and dtype == self.dtype else (None,)
        data = self.data.view(dtype).view(*shape)
        return type(self)(self.space, data, self.box, (*kept, *(None for _ in shape[1:])), layout)

    def permute(self, order: Sequence[int]) -> Any:
        return self._of(self.data.permute(*order), self.box, [self.dims[i] for i in order])

    def mine(self) -> Any:
        """The part that the running partition's CTA has of it."""
        if self.space.split is None:
            return self
        if self.space.split not in self.dims:
            raise NotImplementedError("memory of two CTAs that was reshaped")
        dim = self.dims.index(self.space.split)
        half = self.shape[dim] // PAIR
        return self.narrowed(dim, _now().rank * half, half)

    def load(self, layout: Any = None) -> torch.Tensor:
        """Into registers; which thread holds what is not modelled."""
        view = self.mine()
        _now().access(view, write=False)
        return view.data.clone().as_subclass(_Block)  # type: ignore[no-any-return]

    def store(self, value: torch.Tensor) -> None:
        view = self.mine()
        if value.shape != view.data.shape or value.dtype != view.dtype:
            raise TypeError(f"{list(value.shape)} of {value.dtype} stored to {view.shape} of {view.dtype}")
        _now().access(view, write=True)
        view.data.copy_(value)


class _Shared(_Memory):
    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        return self.narrowed(dim, start, length)


class _TensorMemory(_Memory):
    def slice(self, start: int, length: int) -> Any:
        return self.narrowed(len(self.shape) - 1, start, length)


class _Block(torch.Tensor):
    """A block in registers. Gluon's `split` takes the last dimension, which is 2, apart."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]  # layouts are not modelled

    def split(self) -> Any:  # type: ignore[override]
        return self.unbind(-1)

    def to(self, dtype: Any, *given: Any, bitcast: bool = False, **more: Any) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype, *given, **more)

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]  # a block is a value: `b = a` is no second name of it
        return self + other


@dataclass(frozen=True)
class _Pointer:
    """To elements of a tensor in global memory: one, or a block of them."""

    data: torch.Tensor  # all elements as they lie in memory
    at: Any

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, n: Any) -> "_Pointer":
        return _Pointer(self.data, self.at + n)


class _Descriptor:
    """A TMA descriptor: a matrix, and the shape and layout of its blocks."""

    def __init__(self, host: Any) -> None:
        self.base, self.layout, self.dtype = host.base, host.layout, host.base.dtype
        self.shape, self.strides = list(host.shape), list(host.strides)
        self.block_shape = list(host.block_shape)
        nbytes = prod(self.block_shape) * self.base.element_size()
        self.block_type = SimpleNamespace(shape=self.block_shape, nbytes=nbytes)
        self.split = _split(self.layout, 0)
        self.nbytes_per_cta = nbytes if self.split is None else nbytes // PAIR

    def box(self, coord: Sequence[int], block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the running CTA has of the matrix at these coordinates, and the part of the block that holds it."""
        part, offset = block, 0
        for dim, start in enumerate(coord):
            start = int(start) + (_now().rank * block.shape[dim] if dim == self.split else 0)
            part = part.narrow(dim, 0, max(0, min(block.shape[dim], self.shape[dim] - start)))
            offset += start * self.strides[dim]
        if not part.numel():
            return part, part
        # Addresses have 64 bits, and a descriptor may count on that they go round.
        nbytes = self.base.element_size()
        offset = ((offset * nbytes + 2**63) % 2**64 - 2**63) // nbytes
        strides = [stride if n > 1 else 1 for stride, n in zip(self.strides, part.shape, strict=True)]
        try:
            return self.base.as_strided(part.shape, strides, self.base.storage_offset() + offset), part
        except RuntimeError as error:
            raise Fault("out of bounds", f"TMA leaves its tensor: {error}") from error


def _bases(layout: Any) -> list[Any]:
    return list(getattr(layout, "cga_layout", None) or [])


def _split(layout: Any, outer: int) -> int | None:
    """The dimension of which each CTA of a pair has a half. outer: dimensions before those that the layout knows."""
    if getattr(layout, "two_ctas", False):
        return outer
    if any(any(basis) for basis in _bases(layout)):
        return outer + next(i for i, step in enumerate(_bases(layout)[0]) if step)
    return None


# ---- Who runs -------------------------------------------------------------------------------------------------------


class _Partition:
    """The warps that run one function of a kernel: a thread, which goes on when it is told to."""

    def __init__(self, cluster: "_Cluster", rank: int, name: str, body: Callable[[], object], clock: Clock) -> None:
        self.cluster, self.rank, self.name, self.body = cluster, rank, name, body
        self.clock, self.fenced, self.issued = {**clock, self: 1}, 0, dict[Hashable, int]()
        self.may_go: Callable[[], bool] = lambda: True
        self.waits_for, self.done, self.stopped = "", False, False
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self.go.acquire()
        try:
            if not self.stopped:
                self.body()
        except _Stopped:
            pass
        except BaseException as error:
            self.cluster.error = error
        self.done = True
        self.cluster.back.release()

    def wait(self, may_go: Callable[[], bool], waits_for: str) -> None:
        """Let others run, and go on when it may."""
        self.may_go, self.waits_for = may_go, waits_for
        self.cluster.back.release()
        self.go.acquire()
        if self.stopped:
            raise _Stopped

    def access(self, view: _Memory, *, write: bool) -> None:
        """The threads of the partition read or write."""
        self.clock[self] += 1
        what = f"{self.name} {'writes' if write else 'reads'} {view.space.name}"
        access = _Access(view.box, write, self, self.clock[self], isinstance(view, _Shared), what)
        self.cluster.record(view.space, access, self.clock)

    def barrier(self, view: _Memory, rank: int, *, by_threads: bool = True) -> _Barrier:
        """The mbarrier of a CTA that the partition, or TMA or an MMA on its behalf, uses."""
        found = view.space.barriers.get((view.box, 0 if view.space.in_first else rank))
        if found is None:
            raise Fault("barrier", f"{self.name} uses an mbarrier of {view.space.name} that has no count yet")
        self.cluster.need_order(found.made, self.clock, f"{self.name} uses it", by_threads=by_threads)
        return found

    def start(self, kind: str, lane: Hashable) -> tuple[Hashable, int]:
        """Who does the next operation that this partition issues, and its number, from 1 on."""
        who = (self, kind, lane)
        self.issued[who] = self.issued.get(who, 0) + 1
        return who, self.issued[who]


class _Cluster:
    """A CTA, or a pair of them: its partitions, its memory, and the operations that have not completed."""

    def __init__(self, chance: Random, program: Sequence[int], grid: Sequence[int], ctas: int) -> None:
        self.chance, self.program, self.grid, self.ctas = chance, program, grid, ctas
        self.spaces: list[_Space] = []
        self.memory: list[_Memory] = []
        self.allocated = [0] * ctas  # by each CTA: both of a pair allocate the same, which they share here
        self.partitions: list[_Partition] = []
        self.copies: list[Callable[[], None]] = []  # not complete yet; in any order
        self.queues: dict[Hashable, deque[Callable[[], None]]] = {}  # likewise, each in its own order
        self.met = [0] * ctas
        self.knowledge: Clock = {}
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.running: _Partition | None = None

    def begin(self, rank: int, name: str, body: Callable[[], object], clock: Clock) -> _Partition:
        self.partitions.append(_Partition(self, rank, name, body, clock))
        return self.partitions[-1]

    def run(self) -> None:
        """One step of a partition or of the hardware after the other, until nothing is left to do."""
        try:
            while self._step():
                pass
        finally:
            for p in self.partitions:
                p.stopped = True
                p.go.release()
                p.thread.join()
        known: Clock = {}
        for p in self.partitions:
            _join(known, p.clock)
        for space in self.spaces:
            for access in space.accesses:
                if known.get(access.who, 0) < access.tick:
                    raise Fault("race", f"the kernel may end before this is over: {access.what}")

    def _step(self) -> bool:
        waiting = [p for p in self.partitions if not p.done]
        ready = [p for p in waiting if p.may_go()]
        queues = [queue for queue in self.queues.values() if queue]
        choices = len(ready) + len(self.copies) + len(queues)
        if not choices:
            if waiting:
                all_of_them = "; ".join(f"{p.name} waits for {p.waits_for}" for p in waiting)
                raise Fault("barrier", f"the partitions wait for each other, for ever: {all_of_them}")
            return False
        i = self.chance.randrange(choices)
        if i < len(ready):
            self.running = ready[i]
            ready[i].go.release()
            self.back.acquire()
            if self.error:
                raise self.error
        elif i < len(ready) + len(self.copies):
            self.copies.pop(i - len(ready))()
        else:
            queues[i - len(ready) - len(self.copies)].popleft()()
        return True

    def need_order(self, before: _Access, clock: Clock, then: str, *, by_threads: bool) -> None:
        if clock.get(before.who, 0) < before.tick:
            raise Fault("race", f"{then}, and nothing says that this is over: {before.what}")
        if before.write and before.by_threads and not by_threads and before.tick > before.who.fenced:
            raise Fault("race", f"{then}, and there is no fence_async_shared after this: {before.what}")

    def record(self, space: _Space, access: _Access, clock: Clock) -> None:
        """An access by someone with this clock. It stands in for those that it follows."""
        kept = []
        for before in space.accesses:
            if (access.write or before.write) and before.meets(access.box):
                self.need_order(before, clock, access.what, by_threads=access.by_threads)
            replaced = access.write or (not before.write and before.who == access.who)
            if not (replaced and before.within(access.box)):
                kept.append(before)
        space.accesses = [*kept, access]

    def allocate(self, kind: type[_Memory], name: str, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        rank = _now().rank
        nth = self.allocated[rank]
        self.allocated[rank] += 1
        if nth == len(self.memory):
            data = torch.full(list(shape), float("nan") if dtype.is_floating_point else 0, dtype=dtype)
            in_first = bool(_bases(layout)) and not any(any(basis) for basis in _bases(layout))
            outer = len(shape) - (2 if kind is _TensorMemory else len(_bases(layout)[0]) if _bases(layout) else 0)
            split = None if dtype == torch.int64 else _split(layout, outer)
            space = _Space(f"{name} {list(shape)} (allocation {nth})", split, in_first)
            self.spaces.append(space)
            box = tuple((0, n) for n in shape)
            self.memory.append(kind(space, data, box, range(len(shape)), layout))
        return self.memory[nth]

    def meet(self) -> None:
        """The running partitions of all CTAs wait for each other, and know then what each knew."""
        me = _now()
        self.met[me.rank] += 1
        times = self.met[me.rank]
        me.fenced = me.clock[me]
        _join(self.knowledge, me.clock)
        me.wait(lambda: min(self.met) >= times, "the other CTA of the cluster")
        _join(me.clock, self.knowledge)


_clusters: list[_Cluster] = []  # the one that runs


def _now() -> _Partition:
    running = _clusters[-1].running
    assert running
    return running


# ---- The vocabulary -------------------------------------------------------------------------------------------------


def _init(view: _Memory, count: int) -> None:
    me = _now()
    me.clock[me] += 1
    made = _Access(view.box, True, me, me.clock[me], True, f"{me.name} sets the count of {view.space.name}")
    if not view.space.in_first or me.rank == 0:
        shared = view.space.in_first and not _arrives_at_home()
        view.space.barriers[view.box, me.rank] = _Barrier(count * PAIR if shared else count, made)


def _wait(view: _Memory, phase: int, pred: bool = True, deps: Sequence[Any] = ()) -> None:
    me = _now()
    if not pred or (view.space.in_first and me.rank):
        return
    barrier = me.barrier(view, me.rank)
    me.wait(partial(barrier.over, int(phase)), f"parity {int(phase)} of number {view.box[0][0]} of {view.space.name}")
    _join(me.clock, barrier.released)


@cache
def _arrives_at_home() -> bool:
    """Whether an arrival stays in its CTA, so that the second one of a pair does not reach an mbarrier in the first."""
    return hasattr(_gluon().mbarrier, "sync_cluster_init")  # Triton 3.7


def _arrive(view: _Memory, *, count: int = 1, pred: bool = True) -> None:
    me = _now()
    if pred and not (view.space.in_first and me.rank and _arrives_at_home()):
        me.barrier(view, me.rank).arrive(me.clock, arrivals=count)


def _expect(view: _Memory, bytes_per_cta: int, pred: bool = True) -> None:
    """Of an mbarrier in the first CTA each CTA announces its bytes; in Triton 3.7 the first does so for both."""
    me = _now()
    alone = view.space.in_first and _arrives_at_home()
    if pred and not (alone and me.rank):
        announced = bytes_per_cta * (PAIR if alone else 1)
        me.barrier(view, me.rank).arrive(me.clock, arrivals=1, announced=announced)


def _allocate_mbarrier(batch: int | None = None, two_ctas: bool = False) -> Any:
    cluster = _clusters[-1]
    count = 1 if two_ctas else cluster.ctas
    bases = [[0]] if two_ctas else [[1]] if cluster.ctas > 1 else []
    shape = [count] if batch is None else [batch, count]
    return cluster.allocate(_Shared, "mbarriers", torch.int64, shape, SimpleNamespace(cga_layout=bases))


def _fence() -> None:
    me = _now()
    me.fenced = me.clock[me]


def _async_load(
    desc: _Descriptor, coord: Sequence[int], barrier: _Memory, result: _Memory, pred: bool = True,
    multicast: bool = False,
) -> None:  # fmt: skip
    me, view = _now(), result.mine()
    if not pred or (multicast and me.rank):  # the first CTA issues it, and it arrives in both
        return
    ranks = range(me.cluster.ctas) if multicast else (me.rank,)
    states = [me.barrier(barrier, rank, by_threads=False) for rank in ranks]
    who, tick = me.start("copy", (id(view.space), view.box))
    clock = {**me.clock, who: tick}
    what = f"TMA writes {view.space.name} for {me.name}"
    me.cluster.record(view.space, _Access(view.box, True, who, tick, False, what), clock)
    block = torch.zeros_like(view.data)
    inside, part = desc.box(coord, block)
    part.copy_(inside)
    view.data.fill_(torch.nan)
    nbytes = block.numel() * block.element_size()
    for traffic in watching[-1:]:
        traffic.read += part.numel() * part.element_size()

    def complete() -> None:
        view.data.copy_(block)
        for state in states:
            state.arrive(clock, announced=-nbytes)

    me.cluster.copies.append(complete)


def _async_store(desc: _Descriptor, coord: Sequence[int], src: _Memory) -> None:
    _async_write(desc, coord, src, torch.Tensor.copy_)


def _async_atomic_add(desc: _Descriptor, coord: Sequence[int], src: _Memory) -> None:
    """TMA adds to what lies in global memory."""
    _async_write(desc, coord, src, torch.Tensor.add_)


def _async_write(desc: _Descriptor, coord: Sequence[int], src: _Memory, write: Callable[..., Any]) -> None:
    """TMA reads shared memory and writes global memory: write(there, part) when the thread that asked waits for it."""
    me, view = _now(), src.mine()
    who, tick = me.start("store", "")
    what = f"TMA reads {view.space.name} for {me.name}"
    me.cluster.record(view.space, _Access(view.box, False, who, tick, False, what), {**me.clock, who: tick})
    inside, part = desc.box(coord, view.data)

    def complete() -> None:
        write(inside, part)
        for traffic in watching[-1:]:
            traffic.written += part.numel() * part.element_size()

    me.cluster.queues.setdefault(who, deque()).append(complete)


def _store_wait(pendings: int) -> None:
    me = _now()
    who = (me, "store", "")
    queue = me.cluster.queues.setdefault(who, deque())
    while len(queue) > pendings:
        queue.popleft()()
    me.clock[who] = max(me.clock.get(who, 0), me.issued.get(who, 0) - pendings)


def _tcgen05_mma(
    a: _Memory, b: _Memory, acc: _Memory, *, use_acc: bool = True, pred: bool = True, multicast: bool = False,
    mbarriers: Sequence[_Memory] | None = None, mbarrier_preds: Sequence[bool] | None = None,
) -> None:  # fmt: skip
    me = _now()
    if bool(acc.layout.two_ctas) != (me.cluster.ctas > 1):
        raise NotImplementedError("an MMA of one CTA in a cluster of two")
    if not pred or me.rank:  # the first CTA of a pair issues for both
        return
    if a.shape[1] != b.shape[0] or acc.shape != [a.shape[0], b.shape[1]]:
        raise TypeError(f"an MMA of {a.shape} and {b.shape} into {acc.shape}")
    who, tick = me.start("mma", "")
    clock = {**me.clock, who: tick}
    for view, write in ((a, False), (b, False), (acc, True)):
        what = f"an MMA of {me.name} {'writes' if write else 'reads'} {view.space.name}"
        me.cluster.record(view.space, _Access(view.box, write, who, tick, False, what), clock)

    def complete() -> None:
        result = a.data.float() @ b.data.float()
        acc.data.copy_(acc.data + result if use_acc else result)

    me.cluster.queues.setdefault(who, deque()).append(complete)
    for barrier, wanted in zip(mbarriers or (), mbarrier_preds or (True,) * len(mbarriers or ()), strict=True):
        _tcgen05_commit(barrier, wanted)


def _tcgen05_commit(barrier: _Memory, pred: bool = True, descs: Sequence[Any] = ()) -> None:
    me = _now()
    if not pred or me.rank:
        return
    who = (me, "mma", "")
    clock = {**me.clock, who: me.issued.get(who, 0)}
    states = [me.barrier(barrier, rank, by_threads=False) for rank in range(me.cluster.ctas)]

    def complete() -> None:
        for state in states:
            state.arrive(clock, arrivals=1)

    me.cluster.queues.setdefault(who, deque()).append(complete)


def _warpgroup_mma(
    a: Any, b: _Memory, acc: torch.Tensor, *, use_acc: bool = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> torch.Tensor:  # fmt: skip
    me, a, b = _now(), a.mine() if isinstance(a, _Memory) else a, b.mine()
    who, tick = me.start("wgmma", "")
    for view in (a, b):
        if isinstance(view, _Memory):
            what = f"a wgmma of {me.name} reads {view.space.name}"
            access = _Access(view.box, False, who, tick, False, what)
            me.cluster.record(view.space, access, {**me.clock, who: tick})
    left = a.data if isinstance(a, _Memory) else a
    result = (left.float() @ b.data.float()).as_subclass(_Block)
    if not is_async:
        me.clock[who] = tick
    return acc + result if use_acc else result


def _warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    me = _now()
    who = (me, "wgmma", "")
    me.clock[who] = max(me.clock.get(who, 0), me.issued.get(who, 0) - num_outstanding)
    return deps[0] if len(deps) == 1 else tuple(deps)


def _warp_specialize(
    functions_and_args: Sequence[tuple[Any, Sequence[Any]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> None:
    """The first function runs in the partition that calls; the others beside it. Goes on when all have ended."""
    me = _now()
    if me.cluster.ctas > 1 and not _arrives_at_home():
        me.cluster.meet()  # from Triton 3.8 on the compiler does it
    (first, args), *others = functions_and_args
    began = []
    for function, given in others:
        of = f" of CTA {me.rank}" * (me.cluster.ctas > 1)
        began.append(me.cluster.begin(me.rank, function.__name__ + of, partial(function, *given), me.clock))
    name, me.name = me.name, first.__name__ + f" of CTA {me.rank}" * (me.cluster.ctas > 1)
    first(*args)
    me.wait(lambda: all(p.done for p in began), "the other partitions")
    me.name = name
    for p in began:
        _join(me.clock, p.clock)


def _mine(block: torch.Tensor, layout: Any) -> torch.Tensor:
    """What the running CTA has of a block in registers: of a pair half, if the layout says so."""
    split = _split(layout, 0)
    if split is None:
        return block.as_subclass(_Block)
    return block.chunk(PAIR, split)[_now().rank].as_subclass(_Block)


def _zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
    return _mine(torch.zeros(list(shape), dtype=dtype), layout)


def _allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    name = "mbarriers" if dtype == torch.int64 else "shared memory"
    memory = _clusters[-1].allocate(_Shared, name, dtype, shape, layout)
    if value is not None:
        memory.store(value)
    return memory


def _allocate_tensor_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    memory = _clusters[-1].allocate(_TensorMemory, "tensor memory", dtype, shape, layout)
    if value is not None:
        memory.store(value)
    return memory


def _full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
    return _mine(torch.full(list(shape), value, dtype=dtype), layout)


def _static_assert(holds: bool, message: str = "") -> None:
    assert holds, message


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A reduction along an axis; a number if there is no other."""

    def reduce(x: torch.Tensor, axis: int) -> Any:
        found = function(x, dim=axis)
        return found if found.ndim else found.item()

    return reduce


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b)).as_subclass(_Block)


def _smaller(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b)).as_subclass(_Block)


def _load(pointer: _Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "", volatile: bool = False) -> Any:
    if mask is None:
        whole = pointer.data[pointer.at].as_subclass(_Block)
        return whole if whole.ndim or whole.is_floating_point() else whole.item()  # a scalar may be an index
    found = pointer.data[torch.where(mask, pointer.at, 0)]
    return torch.where(mask, found, torch.full_like(found, other)).as_subclass(_Block)


def _store(pointer: _Pointer, value: Any, mask: Any = True) -> None:
    if isinstance(pointer.at, torch.Tensor) and isinstance(mask, torch.Tensor):
        pointer.data[pointer.at[mask]] = value[mask]
    elif mask:
        pointer.data[pointer.at] = value


def _atomic_add(pointer: _Pointer, value: Any, sem: str = "", scope: str = "") -> Any:
    before = pointer.data[pointer.at].item()
    _store(pointer, before + value)
    return before


def _atomic_xchg(pointer: _Pointer, value: Any, mask: Any = True, sem: str = "", scope: str = "") -> torch.Tensor:
    before = pointer.data[pointer.at].clone()
    _store(pointer, value, mask)
    return before


def _inline_asm(asm: str, constraints: str, args: Sequence[Any], dtype: Any, *options: Any, **more: Any) -> Any:
    """2^x, tanh, a conversion to 16 bits, a zero, a copy, or a flag's load.

    A CTA that polls a flag that is not set would do so for ever: the CTAs before have ended, others wait.
    """
    if asm.startswith("ex2.approx.ftz"):
        found = torch.exp2(args[0])
        return found.where(found.abs() >= torch.finfo(torch.float32).tiny, 0)
    if asm.startswith("cvt.rn."):
        return args[0].to(dtype)
    if asm.startswith("tanh.approx"):
        return args[0].tanh()
    if asm == "mov.b32 $0, 0;":
        return 0
    if asm == "mov.b32 $0, $1;":
        return args[0]
    if "ld.relaxed.gpu.global.b64 $0" in asm:  # until it is not -1
        if (args[0] == -1).any():
            raise Fault("barrier", f"{_now().name} waits for a word in global memory that no CTA before this one wrote")
        return args[0]
    if "ld.acquire.gpu.global.b32 $0" not in asm:  # until it is not 0
        _not_here(f"inline_asm_elementwise of {asm!r}")
    flag = _load(args[0])
    if not torch.as_tensor(flag).all():
        raise Fault("barrier", f"{_now().name} waits for a flag in global memory that no CTA before this one has set")
    return flag


@cache
def _gluon() -> Any:
    """The modules of Gluon, which only a kernel in Gluon loads."""
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import blackwell, hopper
    from triton.language.extra import cuda

    shared = {"mbarrier": hopper.mbarrier, "tma": hopper.tma}
    return SimpleNamespace(gl=language, blackwell=blackwell, hopper=hopper, cuda=cuda, **shared)


@cache
def _vocabulary() -> dict[int, Any]:
    """What stands here for a function of Gluon, by that function's id: some cannot be hashed without a compiler."""
    here: dict[str, dict[str, Any]] = {
        "gl": {
            "program_id": lambda axis=0: _clusters[-1].program[axis],
            "num_programs": lambda axis=0: _clusters[-1].grid[axis],
            "num_ctas": lambda: _clusters[-1].ctas,
            "num_warps": lambda: 4,  # layouts, which are not modelled, are made of it
            "static_range": range,
            "static_assert": _static_assert,
            "allocate_shared_memory": _allocate_shared_memory,
            "zeros": _zeros,
            "zeros_like": torch.zeros_like,
            "full": _full,
            "max": _reduced(torch.amax),
            "sum": _reduced(torch.sum),
            "maximum": _larger,
            "minimum": _smaller,
            "where": lambda which, a, b: torch.where(which, a, b).as_subclass(_Block),
            "join": lambda a, b: torch.stack((a, b), dim=-1).as_subclass(_Block),
            "log2": torch.log2,
            "dot_fma": lambda a, b, acc: acc + a @ b,
            "cast": lambda value, dtype: value if isinstance(value, int) else value.to(dtype),
            "convert_layout": lambda value, layout, assert_trivial=False: value,
            "warp_specialize": _warp_specialize,
            "arange": lambda start, end, layout=None: _mine(torch.arange(start, end), layout),
            "to_tensor": lambda value: value,
            "barrier": lambda *asked, **more: None,  # a partition's threads are one
            "thread_barrier": lambda *asked, **more: None,
            "load": _load,
            "store": _store,
            "atomic_xchg": _atomic_xchg,
            "atomic_add": _atomic_add,
            "inline_asm_elementwise": _inline_asm,
        },
        "mbarrier": {
            "init": _init,
            "wait": _wait,
            "arrive": _arrive,
            "expect": _expect,
            "allocate_mbarrier": _allocate_mbarrier,
            "sync_cluster_init": lambda: _clusters[-1].meet(),
        },
        "tma": {
            "async_load": _async_load,
            "async_copy_global_to_shared": _async_load,
            "async_store": _async_store,
            "async_copy_shared_to_global": _async_store,
            "async_atomic_add": _async_atomic_add,
            "store_wait": _store_wait,
        },
        "hopper": {
            "fence_async_shared": _fence,
            "warpgroup_mma": _warpgroup_mma,
            "warpgroup_mma_wait": _warpgroup_mma_wait,
        },
        "cuda": {  # kernels run one after the other
            "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
        },
        "blackwell": {
            "allocate_tensor_memory": _allocate_tensor_memory,
            "get_tmem_reg_layout": lambda *asked, **more: None,
            "tcgen05_mma": _tcgen05_mma,
            "tcgen05_commit": _tcgen05_commit,
        },
    }
    found = {}
    for place, functions in here.items():
        module = getattr(_gluon(), place)
        found.update({id(getattr(module, name)): f for name, f in functions.items() if hasattr(module, name)})
    return found


# ---- A kernel's Python, with these words for Gluon's ----------------------------------------------------------------


class _Names:
    """A module of Gluon as the kernels see it here."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _translated(getattr(self._module, name))


def _translated(value: Any) -> Any:
    """What stands for a value that a kernel names."""
    if isinstance(value, ModuleType):
        return _Names(value) if value.__name__.startswith("triton.") else value
    if isinstance(value, tl.constexpr):
        return _translated(value.value)
    if isinstance(value, tl.dtype):
        return _DTYPES.get(value, partial(_not_here, str(value)))
    if id(value) in _vocabulary():
        return _vocabulary()[id(value)]
    if isinstance(value, JITFunction):
        return _plain(value)
    if getattr(value, "__triton_aggregate__", False):
        return _aggregate(value)
    if getattr(value, "__triton_builtin__", False) and not isinstance(value, type):
        if value.__name__ == "_atomic_add":  # of course_ops.versions, where tma has no async_atomic_add
            return _async_atomic_add
        if value.__name__ == "reinterpret":
            return _Memory.reinterpret
        return partial(_not_here, value.__name__)
    return value


def _aggregate(kind: Any) -> Any:
    """A class of named values with the methods of one that the kernels know."""
    methods = {name: _plain(member) for name, member in vars(kind).items() if isinstance(member, JITFunction)}
    return type(kind.__name__, (SimpleNamespace,), methods)


def _not_here(name: str, *args: Any, **more: Any) -> None:
    raise NotImplementedError(f"{name} is not among the words that lessonkit/modes/gluon.py knows: add it there")


@cache
def _plain(function: JITFunction[Any]) -> FunctionType:
    """The Python of a device function, which names what stands here for Gluon."""
    python = function.fn
    given = {name: _translated(python.__globals__[name]) for name in _names(python.__code__) & {*python.__globals__}}
    made = FunctionType(python.__code__, {"__builtins__": __builtins__, **given}, python.__name__, python.__defaults__)
    made.__kwdefaults__ = python.__kwdefaults__
    return made


def _names(code: CodeType) -> set[str]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inner)


def launch(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
    """Run a kernel of Gluon on the CPU, in place of JITFunction.run. Raises Fault for a race or a deadlock."""
    takes = signature(kernel.fn)
    bound = takes.bind(*args, **{name: value for name, value in more.items() if name in takes.parameters})
    bound.apply_defaults()
    given = [*map(_argument, bound.arguments.values())]
    sizes = [*(grid(bound.arguments) if callable(grid) else grid), 1, 1][:3]
    for traffic in watching[-1:]:
        traffic.launches.append(kernel.__name__)
    chance = Random(SEED)
    for z, y, x in product(*map(range, reversed(sizes))):
        cluster = _Cluster(chance, (x, y, z), sizes, more.get("num_ctas", 1))
        _clusters.append(cluster)
        try:
            for rank in range(cluster.ctas):
                cluster.begin(rank, kernel.__name__, partial(_plain(kernel), *given), {})
            cluster.run()
        finally:
            _clusters.pop()


def _argument(value: Any) -> Any:
    if hasattr(value, "block_shape"):
        return _Descriptor(value)
    if isinstance(value, torch.Tensor):
        return _Pointer(value.view(-1), 0)
    return value


if INTERPRETED:
    JITFunction.run = launch  # interpreted, Triton's own functions are none: all that come here are Gluon's
