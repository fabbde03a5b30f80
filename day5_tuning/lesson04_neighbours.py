"""An unused mbarrier corrupts shared memory when two processes share the GPU
==========================================================================
A kernel can pass every test and every benchmark while its process is alone on the GPU. Beside another process it can
return a NaN. The cause shown here is an mbarrier that is initialised and never used.

An mbarrier is a counter of 8 bytes in shared memory that threads wait for (day 3, lesson 9). Gluon's compiler frees its
bytes after its last use. An unused barrier's last use is its own mbarrier.init, so the compiler gives the same bytes to
the next allocation:

    byte            0          8          16                                          4096
    mbarrier.init   [  bar 0  ][  bar 1  ]
    data            [ x0 | x1 ][ x2 | x3 ][ x4 | x5 | ...                      | x1023 ]

There is no error message. But by the PTX ISA these bytes are no ordinary memory until mbarrier.inval, and any other
operation on them is undefined. While the process is alone, data written there reads back unchanged. If another process
uses the same GPU (a neighbour, below), the GPU switches between the two every few milliseconds. It saves an SM's state,
barriers included, and restores it later. The third step counts what happens to data where the hardware expects a
barrier, in three forms:

    made, idle      mbarrier.init, and nothing more         the fault
    invalidated     mbarrier.init, and then .inval          what the PTX ISA requires
    not made        no barrier                              the cure, where its author can leave it out

Triton's warp specialization for Hopper, as of 3.7, makes such barriers too. Triton invalidates a barrier after its last
use, against "sporadic memory corruptions" (#3858). But an unused barrier has no last use. The course's
`compile` refuses unused barriers in Gluon's kernels, whose author can leave them out (lessonkit/modes/compiled.py).

The fault is rare, and short calls hide it. The last step multiplies matrices of 4096 beside a neighbour, and one answer
in twenty is wrong. A product of 1040 x 72 x 32, the size of a test, needs a 28,000th of the FLOPs. So a switch between
processes hardly ever falls into such a call. `lessonkit beside` therefore repeats the shapes that are timed, and finds
the fault: 151 of 1920 answers are wrong. A table without a wrong answer does not show that a kernel is right.

Predict before you run: of 1024 fp32 values, how many can two barriers corrupt, which, and in which of the three forms?
And if Triton's barriers take 24 bytes under B's first block, in bf16, how many columns of a tile of C can be wrong?
You will learn: to ask what shares an address, and that a test covers only the conditions under which it ran.
Source: PTX ISA, mbarrier.init and mbarrier.inval; Triton's pull request 3858.
Run it:    python3 course.py run lesson04_neighbours
"""

import subprocess
import sys
import time
from contextlib import contextmanager

from lessonkit import DEVICE, About, Steps, Table, compiled, specimen
from lessonkit.base.device import HAS_GPU
from lessonkit.base.files import environment
from lessonkit.commands.show import from_a_gpu
from lessonkit.modes.compile_server import call_in_compiler

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

tma_device = specimen("day3_matmul_tk.lesson02_matmul_persistent", "tma_device")
warp_specialized = specimen("day3_matmul_tk.lesson02_matmul_persistent", "warp_specialized")

FORMS = {"made, idle": (True, False), "invalidated": (True, True), "not made": (False, False)}
NUMBERS, ROUNDS, SECONDS = 1024, 100_000, 2


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers whose phase ends after ARRIVALS arrivals and all the bytes that these announced."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    fence_async_shared()  # so that TMA, which counts bytes there, sees the initialised barriers
    return bars


# Threads write values to shared memory, and other threads read them back.
@gluon.jit
def there_and_back_kernel(
    wrong_ptr, rounds, COUNT: gl.constexpr, MADE: gl.constexpr, INVALIDATED: gl.constexpr
):  # wrong: COUNT of int32, how often each value differed
    WRITTEN: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    READ: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if MADE:
        bars = barriers(2, 1)
        if INVALIDATED:
            for i in gl.static_range(2):
                mbarrier.invalidate(bars.index(i))
    smem = gl.allocate_shared_memory(gl.float32, [COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x = gl.arange(0, COUNT, layout=WRITTEN).to(gl.float32)
    want = gl.arange(0, COUNT, layout=READ).to(gl.float32)
    wrong = gl.zeros([COUNT], gl.int32, READ)
    for i in range(rounds):
        smem.store(x + i)
        wrong += (smem.load(READ) != want + i).to(gl.int32)
    gl.atomic_add(wrong_ptr + gl.arange(0, COUNT, layout=READ), wrong)


def _compiled(form):
    """A compiled form's bytes of shared memory and number of unused barriers; called in the compile process."""
    with compiled.compiling(90) as made:
        wrong = torch.empty(NUMBERS, dtype=torch.int32, device=DEVICE)
        there_and_back_kernel[(1,)](wrong, ROUNDS, NUMBERS, *FORMS[form])
        kernel = made["there_and_back_kernel"]
        return kernel.metadata.shared, len(compiled.idle_barriers(kernel.asm["ttgir"]))


def two_things_in_one_place():
    """1024 values take 4096 bytes, two barriers 16, and all three forms take 4096; the compiler lists idle barriers."""
    found = {form: call_in_compiler(__name__, "_compiled", form) for form in FORMS}
    for form, (shared, idle) in found.items():
        print(f"  {form:12} {shared} bytes of shared memory, {idle} idle")
    assert {shared for shared, _ in found.values()} == {4 * NUMBERS}
    assert [idle for _, idle in found.values()] == [1, 0, 0]


def _warp_specialized():
    """The unused barriers in day 3's lesson 2, `for ... in tl.range(..., warp_specialize=True)`."""
    with compiled.compiling(90) as made:
        a, b = (torch.empty(1024, 1024, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        warp_specialized(a, b)
        return len(compiled.idle_barriers(made["tma_device_kernel"].asm["ttgir"]))


def triton_makes_them_too():
    """Four arrays of unused barriers in a kernel with Triton's warp specialization; none if your version is mended."""
    idle = call_in_compiler(__name__, "_warp_specialized")
    print(f"  day3_matmul_tk.lesson02_matmul_persistent, warp_specialized: {idle} arrays of barriers are idle")
    assert idle in (0, 4)


NEIGHBOUR = "from day5_tuning import lesson04_neighbours; lesson04_neighbours._neighbour()"


def _neighbour():
    """Multiplies matrices until the process is killed."""
    a = torch.randn(4096, 4096, device=DEVICE).bfloat16()
    a @ a
    torch.cuda.synchronize()
    print("here", flush=True)
    while True:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


@contextmanager
def _beside(neighbour):
    if not neighbour:
        yield
        return
    command = [sys.executable, "-c", NEIGHBOUR]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            yield
        finally:
            process.kill()


def right_alone():
    """Only the unused barrier corrupts values, and only beside another process: two seconds of each form."""
    if not HAS_GPU or torch.cuda.get_device_capability() < (9, 0):
        return from_a_gpu(__name__, "right alone")
    table, wrong = [], torch.zeros(NUMBERS, dtype=torch.int32, device=DEVICE)
    for neighbour in (False, True):
        with _beside(neighbour):
            for form, (made, invalidated) in FORMS.items():
                there_and_back_kernel[(132,)](wrong, 1, NUMBERS, made, invalidated)  # compiled
                torch.cuda.synchronize()
                wrong.zero_()
                launches, end = 0, time.monotonic() + SECONDS
                while time.monotonic() < end:
                    there_and_back_kernel[(132,)](wrong, ROUNDS, NUMBERS, made, invalidated)
                    torch.cuda.synchronize()
                    launches += 1
                where = wrong.nonzero().flatten().tolist()
                table.append({"the barrier is": form, "beside a neighbour": neighbour, "launches": launches,
                              "wrong": int(wrong.sum()), "only numbers": ", ".join(map(str, where))})  # fmt: skip
                assert set(where) <= {0, 1, 2, 3}, "two barriers are 16 bytes"
                assert not where or (neighbour and form == "made, idle")
    return Table("right alone", table, "Whether the first form fails beside a neighbour is chance; the others may not.")


def tritons_too():
    """Beside another process only day 3's matmul with Triton's warp specialization differs from its first answer.

    4096 cubed, with warp specialization and without; in at most 12 columns of its tiles of 128 x 256.
    """
    if not HAS_GPU or torch.cuda.get_device_capability()[0] != 9:  # its barriers are at these bytes on Hopper alone
        return from_a_gpu(__name__, "tritons too")
    a, b = (torch.randn(4096, 4096, device=DEVICE).bfloat16() for _ in range(2))
    first, table = tma_device(a, b).clone(), []
    for neighbour in (False, True):
        with _beside(neighbour):
            for rung in (tma_device, warp_specialized):
                wrong, calls, end = torch.zeros_like(first, dtype=torch.int32), 0, time.monotonic() + SECONDS
                bad = torch.zeros((), dtype=torch.int32, device=DEVICE)
                while time.monotonic() < end:
                    for _ in range(10):
                        differ = rung(a, b) != first
                        wrong += differ
                        bad += differ.any()
                    torch.cuda.synchronize()
                    calls += 10
                columns = {column % 256 for column in wrong.sum(0).nonzero().flatten().tolist()}
                table.append({"rung": rung.__name__, "beside a neighbour": neighbour, "calls": calls,
                              "wrong calls": int(bad), "wrong numbers": int(wrong.sum()),
                              "in columns": len(columns)})  # fmt: skip
                assert len(columns) <= 12, "barriers at 24 bytes: 12 numbers of 16 bits, each in a column of its own"
                assert not bad or (neighbour and rung is warp_specialized)
    return Table(
        "tritons too",
        table,
        "Triton's barriers are at bytes 0 to 23 of shared memory; so are 12 numbers of B's first block.",
    )


# The answers: 4 values, 0 to 3, in `made, idle` alone; 12 columns.
LESSON = Steps(
    about=About(
        teaches="an mbarrier that is initialised but never used, at the address of data: right alone, wrong when "
        "another process shares the GPU; Triton makes some too",
        hours=0.75,
        pictures=("unused_barrier",),
    ),
    steps=(two_things_in_one_place, triton_makes_them_too, right_alone, tritons_too),
    alone=HAS_GPU,
)

if __name__ == "__main__":
    LESSON.main()
