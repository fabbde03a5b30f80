"""The compile pipeline: one kernel from Python to machine code
============================================================
A Triton kernel passes through six stages, and each decides one thing that the stage before left open:

    stage     what it is                             what is decided here
    AST       your function, parsed, never run       nothing yet: both branches of every `if`
    TTIR      operations on whole tiles              constexprs are literals, shapes are known; no thread exists
    TTGIR     the same tiles, each with a layout     which thread holds which element; copies, stages, tensor cores
    LLVM IR   one thread of the program              addresses, how many values it holds
    PTX       NVIDIA's virtual machine               unlimited registers, exact instructions of an architecture
    SASS      what the SM executes                   255 registers at most, the order of instructions, spills

Nothing here needs a GPU. Predict before you run, for a tile of 64 x 64, steps of 64, 128 threads and 3 stages in fp16:

    bytes of shared memory            3 stages of two tiles of 8 KB                              49,152
    cp.async instructions per thread  a stage is 8 copies of 16 bytes; one in the loop, two      24
                                      before it
    fp32 sums a thread holds          64 * 64 / 128                                              32
    wgmma instructions per step       64 deep in steps of 16                                     4

And which of these changes if a row is 4097 elements long, not 4096?

You will learn: to read each stage, which choice changes which stage, and why a stride can switch off the pipeline.
Run it:    python3 course.py run lesson01_compile_pipeline
Then open the page that it names: a click on a line of one stage marks its counterparts in all the others.
Source: the passes are in Triton's third_party/nvidia/backend/compiler.py, from make_ttir to make_cubin.
"""

import re
from functools import cache

from lessonkit import DEVICE, About, Steps, Table, compiled, device, rows
from lessonkit.modes.compile_server import call_in_compiler
from lessonkit.pages import listing

import torch
import triton
import triton.language as tl


# The example kernel. Its offsets are 32 bits wide, so that the listing is short: matrices to 2^31 elements.
@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr,  # [M, K], [K, N], [M, N] in fp16; N a multiple of BLOCK_N, K of BLOCK_K
    M, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if MASKED:
            a = tl.load(a_ptr + rows[:, None] * stride_a + (k + ks)[None, :], mask=rows[:, None] < M, other=0.0)
        else:
            a = tl.load(a_ptr + rows[:, None] * stride_a + (k + ks)[None, :])
        b = tl.load(b_ptr + (k + ks)[:, None] * stride_b + cols[None, :])
        acc = tl.dot(a, b, acc)
    c = acc.to(tl.float16)
    if MASKED:
        tl.store(c_ptr + rows[:, None] * stride_c + cols[None, :], c, mask=rows[:, None] < M)
    else:
        tl.store(c_ptr + rows[:, None] * stride_c + cols[None, :], c)


BASE = {"target": 90, "num_warps": 4, "num_stages": 3, "masked": False, "stride": 4096}
CHOICES = {
    "the base: sm_90, 4 warps, 3 stages": {},
    "num_stages=1": {"num_stages": 1},
    "num_stages=4": {"num_stages": 4},
    "num_warps=8": {"num_warps": 8},
    "a mask on the rows": {"masked": True},
    "rows 4097 elements apart": {"stride": 4097},
    "sm_80": {"target": 80},
    "sm_100": {"target": 100},
}


def _compile_here(target, num_warps, num_stages, masked, stride):
    """Stages and figures of one choice; called in the compile process."""
    with compiled.compiling(target) as made:
        a = torch.empty(4096, 4096, dtype=torch.float16, device=DEVICE)
        product_kernel[(64, 64)](
            a, a, a, 4096, 4096, stride, stride, 4096, 64, 64, 64, masked, num_warps=num_warps, num_stages=num_stages
        )
        found = made["product_kernel"]
    return listing.stages(product_kernel, found), vars(compiled.inspect("product", found, target))


@cache
def _stages(choice):
    """{stage: lines} and the kernel's figures."""
    said, figures = call_in_compiler(__name__, "_compile_here", *(BASE | CHOICES[choice]).values())
    return said, compiled.Kernel(**figures)


FIRST = next(iter(CHOICES))


def _text(stage, choice=FIRST):
    return "\n".join(text for text, _ in _stages(choice)[0][stage])


def the_answer_is_the_same():
    """A choice of warps, stages or masks changes the code and never the result."""
    a, b = (torch.randn(64, 128, device=DEVICE).half(), torch.randn(128, 64, device=DEVICE).half())
    for warps, stages, masked, M in ((4, 3, False, 64), (8, 1, False, 64), (4, 4, True, 40)):
        c = torch.full((64, 64), float("nan"), dtype=torch.float16, device=DEVICE)
        product_kernel[(1, 1)](
            a, b, c, M, 128, 128, 64, 64, 64, 64, 64, masked, num_warps=warps, num_stages=stages
        )  # fmt: skip
        torch.testing.assert_close(c[:M].double(), a[:M].double() @ b.double(), rtol=2**-10, atol=1e-3)
        assert c[M:].isnan().all()  # masked rows are never written


def ast_keeps_both_branches():
    """Python parses, Triton walks the tree: the AST has both branches of `if MASKED`, TTIR the one that is taken."""
    assert _text("ast").count("If(test=Name(id='MASKED'") == 2
    assert _text("ast").count("attr='load'") == 3
    assert _text("ttir").count("tt.load") == 2
    for choice, masked in ((FIRST, False), ("a mask on the rows", True)):
        first_load = next(line for line in _text("ttir", choice).splitlines() if "tt.load" in line)
        assert (first_load.count("%") == 4) == masked, first_load  # %a = tt.load %pointers, %mask, %other


def ttir_knows_tiles_and_no_threads():
    """In TTIR constexprs are literals in the types, 64x64, and no thread, layout, stage or shared memory exists."""
    text = _text("ttir")
    assert "BLOCK" not in text
    assert "tt.dot" in text and "tensor<64x64xf16> * tensor<64x64xf16> -> tensor<64x64xf32>" in text  # noqa: PT018
    assert not re.search(r"ttg\.|#blocked|#shared|num-warps", text)
    # The launcher's facts about the arguments are attributes here: pointers and strides that 16 divides.
    assert text.count("tt.divisibility = 16") == 8
    assert text == _text("ttir", "num_stages=4") == _text("ttir", "num_warps=8") == _text("ttir", "sm_100")


def ttgir_says_who_holds_what():
    """TTGIR gives each tile a layout: 8 fp16 a thread are 16 bytes, 8 threads per row are one line of 128 bytes."""
    text = _text("ttgir")
    assert "#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1]" in text
    # tl.dot became wgmma: version 3, a warpgroup of 4 warps, 16 rows each. It reads its operands from shared memory.
    assert "versionMajor = 3" in text and "warpsPerCTA = [4, 1], instrShape = [16, 64, 16]" in text  # noqa: PT018
    assert "swizzlingByteWidth = 128" in text
    # A layout says which thread holds which element, not how it is loaded. Where rows may begin at any element, a
    # thread still holds 8 neighbours, but takes 8 loads of 2 bytes for them.
    odd = "rows 4097 elements apart"
    assert "sizePerThread = [1, 8]" in _text("ttgir", odd)
    assert _text("ptx", odd).count("ld.global.b16") == 8 * _text("ptx", "num_stages=1").count("ld.global.v4.b32") > 0


def ttgir_is_where_loops_are_pipelined():
    """A load in a loop becomes an asynchronous copy: `stages` buffers a tile, stages - 1 copies before the loop."""
    for choice, stages in (("num_stages=1", 1), (FIRST, 3), ("num_stages=4", 4)):
        text = _text("ttgir", choice)
        piped = stages > 1
        assert text.count("ttg.async_copy_global_to_local") == (2 * stages if piped else 0)
        assert text.count(f"memdesc<{stages}x64x64xf16") > 0 or not piped
        assert text.count("tt.load") == (0 if piped else 2)
        assert _stages(choice)[1].shared == stages * 2 * 64 * 64 * 2
    # cp.async copies 4, 8 or 16 bytes. If only 2 are known to be aligned, the compiler drops the pipeline silently.
    unaligned = _stages("rows 4097 elements apart")[1]
    assert (unaligned.cp_async, unaligned.load_bytes, unaligned.shared) == (0, 2, 2 * 64 * 64 * 2)


def llvm_is_one_thread():
    """LLVM IR is the code of one thread: 32 sums are 32 floats, 24 copies are 24 lines, tiles are gone."""
    text = _text("llir")
    assert "tensor<" not in text
    assert text.count('"cp.async.cg.shared.global') == 3 * (2 * 64 * 64 * 2) // 16 // 128
    sums = max(len(found.split(",")) for found in re.findall(r"\{ (float(?:, float)*) \}", text))
    assert sums == 64 * 64 // 128
    assert "llvm.nvvm.read.ptx.sreg.tid.x" in text


def ptx_is_exact_but_for_registers():
    """PTX has the final instructions and unlimited registers; SASS has 255 at most, and says how many."""
    text, figures = _text("ptx"), _stages(FIRST)[1]
    assert text.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16") == figures.wgmma == 64 // 16
    assert "sm_90a" in text  # without the a there is no wgmma
    virtual = sum(int(n) - 1 for n in re.findall(r"\.reg \.[bf]\d+\s+%\w+<(\d+)>", text))
    assert virtual > 2 * figures.registers
    print(f"  {virtual} virtual registers in PTX, {figures.registers} in SASS")


def sass_is_what_runs():
    """A lesson's claims are read from SASS: LDGSTS is cp.async, HGMMA is wgmma, STG.E.128 stores 16 bytes."""
    text, figures = _text("sass"), _stages(FIRST)[1]
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128", text)) == figures.cp_async == 24
    assert len(re.findall(r"HGMMA\.64x64x16\.F32", text)) == 4
    assert "STG.E.128" in text and "STL" not in text  # noqa: PT018


def the_same_source_on_three_generations():
    """One TTIR, three machines: mma.sync reads registers, wgmma shared memory, tcgen05 accumulates in tensor memory."""
    old, hopper, new = (_stages(choice)[1] for choice in ("sm_80", FIRST, "sm_100"))
    assert (old.mma, old.wgmma, hopper.mma, hopper.wgmma) == (32, 0, 0, 4)
    assert "tcgen05.mma" in _text("ptx", "sm_100")
    # Ampere loads operands to registers before it multiplies, so a buffer is free a stage sooner.
    assert old.shared == 2 * hopper.shared // 3
    assert new.registers < hopper.registers < old.registers  # sums in tensor memory; operands in shared memory


def what_each_choice_changes():
    """Warps share the copies, stages take shared memory, a mask costs instructions only, a stride costs everything."""
    table = []
    for choice in CHOICES:
        k = _stages(choice)[1]
        differ = {s: sum(line[0] in "+-" for line in _diff(choice, s)) for s in ("ttir", "ttgir", "sass")}
        holds = compiled.resident(k.target, k.warps, k.registers, k.shared)
        table.append(
            {"choice": choice, "lines that differ: TTIR": differ["ttir"], "TTGIR": differ["ttgir"],
             "SASS": differ["sass"], "registers": k.registers, "shared bytes": k.shared, "cp.async": k.cp_async,
             "wgmma": k.wgmma, "load bytes": k.load_bytes, "instructions": k.instructions, "programs an SM": holds}
        )  # fmt: skip
    by = {row["choice"]: row for row in table}
    base, warps, mask = by[FIRST], by["num_warps=8"], by["a mask on the rows"]
    assert warps["cp.async"] == base["cp.async"] // 2  # twice the threads: half the copies each, and half the sums
    assert warps["registers"] < base["registers"]
    assert mask["cp.async"] == base["cp.async"]  # a masked-off lane copies 0 of its 16 bytes and fills in zeros
    assert base["instructions"] < mask["instructions"] < 1.3 * base["instructions"]
    return Table("choices", table, "Lines that differ are against the base: what a choice may touch, and what not.")


def _diff(choice, stage):
    return listing.changed(_stages(FIRST)[0][stage], _stages(choice)[0][stage])


def one_statement_in_every_stage():
    """`b = tl.load(...)`: one line of Python at every stage. Writes the page that shows all stages side by side."""
    said = _stages(FIRST)[0]
    line = next(n for text, n in said["python"] if text.strip().startswith("b = tl.load"))
    table = []
    for stage, lines in said.items():
        mine = [text.strip() for text, n in lines if n == line]
        assert mine, f"{stage} has nothing of line {line}"
        shown = next((t for t in mine if re.search(r"load|async_copy|cp\.async|LDGSTS", t)), mine[-1])
        table.append({"stage": listing.NAMES[stage], "lines in all": len(lines), "of this statement": len(mine),
                      "one of them": f"`{shown[:90].replace('|', '/')}`"})  # fmt: skip
    assert "LDGSTS" in table[-1]["one of them"]
    path = rows.REPORTS / device.name() / f"{__name__}.html"
    diffs = {f"{choice}: what differs in {listing.NAMES[stage]}": _diff(choice, stage)
             for choice in CHOICES for stage in ("ttgir", "sass") if choice != FIRST}  # fmt: skip
    about = f"{FIRST}; triton {triton.__version__}. Click a line: what it became, and what it came from, is marked."
    rows.write_atomically(path, listing.page("product_kernel, stage by stage", about, said, diffs))
    print(f"  the stages side by side, and {len(diffs)} diffs: {path}")
    return Table(
        "one statement",
        table,
        f"One statement from tile to machine code. All stages side by side: [{path.name}]({path.name}).",
    )


# The answers: rows 4097 elements apart do not start at multiples of 16 bytes, so a load is 2 bytes and no cp.async is
# left. Without copies there are no stages: shared memory falls to 16,384 bytes. The sums of a thread and the wgmma
# stay.
LESSON = Steps(
    about=About(
        teaches="Python, AST, TTIR, TTGIR, LLVM IR, PTX, SASS: what each stage decides; a page with all of them "
        "side by side ([listing.py](../lessonkit/pages/listing.py))",
        hours=1,
        star=True,
    ),
    steps=(
        the_answer_is_the_same,
        ast_keeps_both_branches,
        ttir_knows_tiles_and_no_threads,
        ttgir_says_who_holds_what,
        ttgir_is_where_loops_are_pipelined,
        llvm_is_one_thread,
        ptx_is_exact_but_for_registers,
        sass_is_what_runs,
        the_same_source_on_three_generations,
        what_each_choice_changes,
        one_statement_in_every_stage,
    ),
)

if __name__ == "__main__":
    LESSON.main()
