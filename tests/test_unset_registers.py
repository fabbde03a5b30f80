"""Uniform registers that machine code reads where nothing has set them: an error of ptxas on Hopper."""

from types import SimpleNamespace

from lessonkit.cuda import sass
from lessonkit.modes import compiled
from lessonkit.modes.compile_server import call_in_compiler

import pytest
import torch

from course_ops.kernels import attention_decode, attention_forward, attention_paged


def listing(*lines):
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("lines", "unset"),
    [
        # As ptxas leaves it: the copy of a descriptor to UR34 is lost.
        (("UMOV UR4, 0x400", "UIADD3 UR34, UP0, UR34, 0x20, URZ"), ["UR34"]),
        (("UMOV UR34, UR4", "UIADD3 UR34, UP0, UR34, 0x20, URZ"), ["UR4"]),
        (("UMOV UR34, 0x400", "UIADD3 UR34, UP0, UR34, 0x20, URZ"), []),
        (("@P0 R2UR UR5, R0", "MOV R1, UR5"), []),
        (("ELECT P0, UR4, PT", "MOV R1, UR4"), []),
        (("UISETP.NE.AND UP0, UPT, UR4, URZ, UPT",), ["UR4"]),
        (("UR2UP UPR, UR4, 0x7f",), ["UR4"]),
        # In pairs: 64 bits, and the descriptor of an access to global memory.
        (("ULDC.64 UR4, c[0x0][0x208]", "LDG.E R0, desc[UR4][R2.64]"), []),
        (("ULDC UR4, c[0x0][0x208]", "LDG.E R0, desc[UR4][R2.64]"), ["UR5"]),
        (("UIMAD.WIDE.U32 UR4, UR6, 0x3, URZ", "MOV R0, UR5"), ["UR6"]),
        (("UMOV UR8, URZ", "UIADD3.64 UR4, UR8, 0x2, URZ"), ["UR9"]),
        # The descriptors of A and B, or of B alone.
        (("ULDC.64 UR4, c[0x0][0x208]", "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0"), ["UR6", "UR7"]),
        (("ULDC.64 UR6, c[0x0][0x208]", "HGMMA.64x64x16.F32 R24, R4, gdesc[UR4].tnspB, R24"), []),
    ],
)
def test_of_instructions_in_a_row(lines, unset):
    assert sass.unset_registers(listing(*lines)) == unset


@pytest.mark.parametrize(
    ("lines", "unset"),
    [
        (("BRA 0x20", "MOV R0, UR4", "EXIT"), []),  # no way leads there
        (("BRA 0x30", "MOV R0, UR4", "EXIT", "UMOV UR4, URZ", "BRA 0x10"), []),
        (("@P0 BRA 0x20", "UMOV UR4, URZ", "MOV R0, UR4", "EXIT"), ["UR4"]),
        (("BRA P1, 0x20", "UMOV UR4, URZ", "MOV R0, UR4", "EXIT"), ["UR4"]),
        (("@P0 EXIT", "UMOV UR4, URZ", "MOV R0, UR4"), []),
        (("MOV R0, UR4", "UMOV UR4, URZ", "@P0 BRA 0x0", "EXIT"), ["UR4"]),  # in the first turn of a loop
        (("UMOV UR4, URZ", "MOV R0, UR4", "UIADD3 UR4, UR4, 0x1, URZ", "@P0 BRA 0x10", "EXIT"), []),
        (("CALL.REL.NOINC 0x30", "MOV R0, UR4", "EXIT", "UMOV UR4, URZ", "RET.REL.NODEC R2 0x0"), []),  # its result
        (("MOV R0, UR4", "CALL.REL.NOINC 0x30", "EXIT", "UMOV UR4, URZ", "RET.REL.NODEC R2 0x0"), ["UR4"]),
        (("BRX R2 -0x10", "UMOV UR4, URZ", "EXIT", "MOV R0, UR4", "EXIT"), ["UR4"]),
        (("BSSY B0, 0x40", "UMOV UR4, URZ", "BSYNC B0", "EXIT", "MOV R0, UR4", "EXIT"), []),
        (("BRA.DIV UR4, 0x0", "EXIT"), ["UR4"]),
    ],
)
def test_of_ways_through_a_function(lines, unset):
    assert sass.unset_registers(listing(*lines)) == unset


ADDS = "UIADD3.X UR5, UR5, -0x3ffffff0, URZ, UP0, !UPT"
MULTIPLIES = "HGMMA.64x16x16.F32 R24, R4, gdesc[UR8], R24, gsb0"


@pytest.mark.parametrize(
    ("lines", "unset"),
    [
        (("UMOV UR5, URZ", ADDS), []),
        (("UMOV UR4, URZ", "UMOV UR5, UR4", ADDS), []),
        (("ULDC.64 UR4, c[0x0][0x218]", ADDS), ["UR5"]),  # half of a pointer
        (("UMOV UR5, URZ", "@P0 BRA 0x50", "UIADD3.64 UR4, UR8, 0x2, URZ", ADDS), ["UR5"]),
        (("UMOV UR5, URZ", "@UP0 UMOV UR5, URZ", ADDS), []),
        (("UMOV UR5, 0x1", "@UP0 UMOV UR5, URZ", ADDS), ["UR5"]),
        (("UMOV UR5, URZ", "@UP0 UMOV UR5, 0x1", ADDS), ["UR5"]),
        (("UMOV UR5, 0x1", ADDS.replace("-0x3ffffff0", "0x40000040")), ["UR5"]),
        (("UMOV UR5, 0x1", ADDS.replace("-0x3ffffff0", "-0x1")), []),  # no upper half of a descriptor
    ],
)
def test_of_upper_halves_of_descriptors(lines, unset):
    before = "ULDC.64 UR8, c[0x0][0x210]", "ULDC.64 UR10, c[0x0][0x218]"
    assert sass.unset_registers(listing(*before, *lines, MULTIPLIES)) == unset


def test_only_wgmma_has_descriptors():
    assert sass.unset_registers(listing("ULDC.64 UR4, c[0x0][0x218]", ADDS)) == []


def test_no_instruction_reads_nothing():
    assert sass.unset_registers("\t.headerflags\t@EF_CUDA_SM90\n") == []


def test_a_kernel_that_reads_one_is_a_failure(monkeypatch):
    made = SimpleNamespace(
        metadata=SimpleNamespace(name="k"),
        src=SimpleNamespace(fn=SimpleNamespace(is_gluon=lambda: False)),
        asm={"ttgir": "", "cubin": b""},
    )
    found = [sass.Code({}, ()), sass.Code({}, ("UR34", "UR35"))]
    monkeypatch.setattr(compiled, "functions", lambda cubin: {"k": cubin})
    monkeypatch.setattr(sass, "read", lambda codes, target: found * len(codes))
    assert compiled._wrong("rung", 90, made, 0) == [
        "rung for sm_90: k reads UR34, UR35, which nothing has set: ptxas has lost a copy, and wgmma gets a garbage "
        "address"
    ]
    assert not compiled._wrong("rung", 100, made, 0), "which has no wgmma"


# ---- The error itself ----------------------------------------------------------------------------------------------


@pytest.mark.kept("day5_tuning/lesson03_traps.py")
@pytest.mark.parametrize(("columns", "wrong"), [(64, False), (16, True)])
def test_ptxas_loses_a_copy(columns, wrong):
    """Where the second operand has other rows than the first: so its descriptor differs in more than its address."""
    version, unset = call_in_compiler("day5_tuning.lesson03_traps", "registers_never_set", columns)
    if version != "12.8.93":
        pytest.skip("what another ptxas makes of it is not known")
    assert bool(unset) == wrong, unset


# ---- In course_ops -------------------------------------------------------------------------------------------------


def compile_attention(D: int, D_v: int) -> list[str]:
    """What is wrong with the forward kernels on rows that begin anywhere. In the process that compiles."""

    def rows(*shape, width):
        return torch.empty(*shape, width + 1, dtype=torch.float16, device="meta")[..., :width]

    q, k, v = (rows(2, 2, 200, width=width) for width in (D, D, D_v))
    lengths, table = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2,), (2, 8)))
    found = list[str]()
    with compiled.compiling(90) as made:
        attention_forward.attention_forward(q, k, v, True, None, 0.1)
        attention_decode.attention_decode(q[:, :, :50], k, v, True, 0.1)
        attention_paged.attention_paged(q[:, :, :50], k, v, lengths, table, True, None, 0.1, None)
    for name in ("attention_kernel", "decode_kernel", "paged_kernel"):
        found += compiled._wrong(f"{D}, {D_v}", 90, made[name], 0)
    return found


@pytest.mark.kept
@pytest.mark.parametrize(("D", "D_v"), [(64, 16), (128, 32), (40, 17), (32, 1)])
def test_values_narrower_than_keys_are_in_no_kernel_that_ptxas_breaks(D, D_v):
    assert call_in_compiler("tests.test_unset_registers", "compile_attention", D, D_v) == []
