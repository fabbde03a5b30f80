"""Read SASS: a kernel's loads, spills and matmuls from its machine code
=====================================================================
day5_tuning/exercises/sass has the machine code of eight small Triton kernels for an A100 or an H100. Before you begin,
look at product_hopper.sass and product_waiting.sass side by side. A listing has labels and instructions:

    .L_x_1:
        /*0640*/ DEPBAR.LE SB0, 0x4;                                          address, opcode, operands
        /*0870*/ HGMMA.64x16x16.F32 R24, gdesc[UR4].tnspB, R24, gsb0;
        /*0910*/ @!P0 BRA `(.L_x_1);                                          @!P0: only where P0 is false

Write a reader that answers four questions for each of them. How wide are the loads? Does it spill? Which instruction
multiplies? Are the copies of the next steps in flight meanwhile? It is graded on the eight, and on changed copies that
you do not see.

    LDG, STG          global load and store; .64 and .128 are bits of a lane, .U8, .S8, .U16, .S16 too, none is 32
    LDL, STL          local memory: values that did not fit into registers
    FFMA, HMMA, HGMMA multiply-add of a lane; mma.sync of a warp; wgmma of four warps
    LDGSTS            cp.async: from global to shared memory, past the registers; UTMALDG: TMA
    DEPBAR.LE SB0, n  wait until at most n groups of cp.async are in flight (n in hexadecimal)
"""

import re


def opcodes(listing: str) -> list[str]:
    """Of each instruction in order, with its dots, without predicate and operands: ["DEPBAR.LE", ..., "BRA"]."""
    # TODO(1): the word behind the address, or behind the predicate (@P0, @!P1, @UP2, @!UPT ...).
    # stub: return []
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE)
    # END(1)


def load_bytes(listing: str) -> int:
    """Bytes that a lane moves by the widest of its loads from global memory, 0 if there is none."""
    # TODO(2): into registers (LDG) or past them (LDGSTS).
    # stub: return 0
    widths = [0]
    for op in opcodes(listing):
        if op.split(".")[0] in ("LDG", "LDGSTS"):
            bits = [int(width) for width in re.findall(r"\.[US]?(8|16|64|128)\b", op)]
            widths.append(max(bits, default=32) // 8)
    return max(widths)
    # END(2)


def spills(listing: str) -> int:
    """How many instructions move values that did not fit into registers."""
    # TODO(3): loads and stores of local memory.
    # stub: return 0
    return sum(op.split(".")[0] in ("LDL", "STL") for op in opcodes(listing))
    # END(3)


def loop(listing: str) -> str:
    """The lines of the longest loop, from its label to its branch; empty if there is none.

    A loop ends with a BRA that has a predicate (it is taken, or not) and goes back to a label further up. A kernel ends
    with a branch to itself without a predicate, which is no loop. A jump back without a predicate is none either.
    """
    # TODO(4): where each label is, and which branches go back to one.
    # stub: return listing
    lines = listing.splitlines()
    at = {line.strip(": "): i for i, line in enumerate(lines) if line.startswith(".L")}
    found: list[str] = []
    for i, line in enumerate(lines):
        branch = re.search(r"@!?U?P\w+ BRA `\((\.L\w+)\)", line)
        if branch and at[branch[1]] < i and i - at[branch[1]] >= len(found):
            found = lines[at[branch[1]] : i + 1]
    return "\n".join(found)
    # END(4)


def products(listing: str) -> str:
    """Which instruction multiplies in the loop: "wgmma", "mma", "fma" or "none"."""
    # TODO(5): outside of it an FFMA may be part of a division.
    # stub: return None
    names = {op.split(".")[0] for op in opcodes(loop(listing))}
    units = {"HGMMA": "wgmma", "HMMA": "mma", "FFMA": "fma"}
    return next((units[name] for name in units if name in names), "none")
    # END(5)


def pipeline(listing: str) -> tuple[str, int | None]:
    """How the loop gets its next tiles: "tma", "cp.async", "loads" or "none". For cp.async also the number of groups
    that the loop's wait leaves in flight; for the others None."""
    # TODO(6): in the loop. Behind it the last wait leaves nothing.
    # stub: return None
    inside = loop(listing)
    names = {op.split(".")[0] for op in opcodes(inside)}
    if "LDGSTS" in names:
        return "cp.async", int(re.findall(r"\*/ DEPBAR\.LE SB0, 0x([0-9a-f]+)", inside)[0], 16)
    return ("tma" if "UTMALDG" in names else "loads" if "LDG" in names else "none"), None
    # END(6)


# The learner's file ends here.
from lessonkit import compiled
from lessonkit.base.files import ROOT
from lessonkit.exercise import Exercise, Wrong, same

import torch

LISTINGS = {path.stem: path.read_text() for path in sorted((ROOT / "day5_tuning/exercises/sass").glob("*.sass"))}


def _hidden():
    """{what: listing}: the eight, and copies with other registers, labels, widths, spills and depths."""
    changed = dict(LISTINGS)
    shift, label, extra, depth = (int(torch.randint(*span, ())) for span in ((1, 40), (10, 90), (1, 9), (16, 25)))
    for name, text in LISTINGS.items():
        text = re.sub(r"\bR(\d+)\b", lambda m: f"R{int(m[1]) + shift}", text)
        text = re.sub(r"\.L_x_(\d+)", lambda m: f".L_x_{int(m[1]) + label}", text)
        text = re.sub(r"DEPBAR\.LE SB0, 0x[1-9]", f"DEPBAR.LE SB0, {depth:#x}", text)
        head, tail = text.split("\n", 1)
        spilled = "".join(f"\n    /*{i:04x}*/ @!UP{i % 4} STL.128 [R1+{16 * i:#x}], R8;" for i in range(extra))
        changed[f"{name}, with {extra} more spills"] = f"{head}{spilled}\n{tail}"
        changed[f"{name}, other widths"] = text.replace("LDG.E.128", "LDG.E.LTC128B.64").replace("LDG.E.64", "LDG.E.S8")
        changed[f"{name}, no widths"] = text.replace("LDG.E.128", "LDG.E.LTC128B").replace("LDG.E.U16", "LDG.E.U8")
        changed[f"{name}, with a division"] = f"    /*0000*/ @P1 FFMA R1, R2, R3, R4;\n{text}"
        wait = ".L_x_0:\n    /*0000*/ LDG.E R0, [R2];\n    /*0010*/ @!P0 BRA `(.L_x_0);\n"
        changed[f"{name}, behind a loop that waits"] = wait + text
    return changed


def _opcodes(listing):
    lines = [line.split("*/", 1)[1].rstrip(";").split() for line in listing.splitlines() if "*/" in line]
    return [words[1] if words[0].startswith("@") else words[0] for words in lines]


def _row(listing):
    """The listing's figures, as the lessons' claims read them."""
    return compiled.row("", "", 90, _opcodes(listing), warps=4, registers=32, shared=0)


def _loop(listing):
    lines = listing.splitlines()
    spans = [(0, 0)]
    for end, line in enumerate(lines):
        words = line.replace("`(", "").replace(");", "").split()
        if "BRA" in words[2:3]:
            begin = lines.index(f"{words[3]}:")
            spans += [(begin, end + 1)] * (begin < end)
    begin, end = max(spans, key=lambda span: span[1] - span[0])
    return "\n".join(lines[begin:end])


def opcodes_in_order():
    """Every instruction once, without predicate and operands."""
    for what, listing in _hidden().items():
        same(f"opcodes of {what}", opcodes(listing), _opcodes(listing))


def widths():
    """16 bytes per lane where the compiler knew the alignment, 2 where it did not."""
    for what, listing in _hidden().items():
        same(f"the widest load of {what}", load_bytes(listing), _row(listing).load_bytes)


def spilled():
    """`crowded` has 24 registers and needs 32 values per thread."""
    for what, listing in _hidden().items():
        same(f"spills of {what}", spills(listing), _row(listing).spills)


def the_loop():
    """From its label to its branch, and empty if the kernel has no loop."""
    for what, listing in _hidden().items():
        got = [line.strip() for line in loop(listing).splitlines() if line.strip()]
        same(f"lines of the loop of {what}", got, [line.strip() for line in _loop(listing).splitlines()])


def what_multiplies():
    """Three generations of instructions; scale and softmax multiply in no loop."""
    for what, listing in _hidden().items():
        row = _row(_loop(listing))
        exact = "wgmma" if row.wgmma else "mma" if row.mma else "fma" if "FFMA" in _opcodes(_loop(listing)) else "none"
        same(f"products of {what}", products(listing), exact)


def what_is_under_way():
    """product_waiting has wgmma and no pipeline: each step waits for its loads."""
    for what, listing in _hidden().items():
        inside = _loop(listing)
        row = _row(inside)
        how = "tma" if row.tma else "cp.async" if row.cp_async else "loads" if row.load_bytes else "none"
        waits = [line.split("0x")[1].rstrip(";") for line in inside.splitlines() if "*/ DEPBAR.LE SB0" in line]
        same(f"pipeline of {what}", pipeline(listing), (how, int(waits[0], 16) if how == "cp.async" else None))


EXERCISE = Exercise(
    claims=(opcodes_in_order, widths, spilled, the_loop, what_multiplies, what_is_under_way),
    hints=(
        "One regular expression finds opcodes; everything else looks at opcodes, or at the lines of the loop. A width "
        "is a whole part between dots: LTC128B is a hint to the cache.",
        "`/*address*/`, then perhaps `@!UP3 `, then letters, digits and dots. A branch goes back if its label stands "
        "further up; it closes a loop if it has a predicate. Take the longest of these.",
        r"re.findall(r'^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)', listing, re.MULTILINE); op.split('.'): "
        "the first part is the name; loop: lines[label's index : branch's index + 1]; int(text, 16) for the depth.",
    ),
    wrong=(
        Wrong("instructions with a predicate are left out", r"(?:@!?U?P\w+\s+)?", "", "opcodes_in_order"),
        Wrong("uniform predicates (@UP0) are not known", r"(?:@!?U?P\w+\s+)?([A-Z]", r"(?:@!?P\w+\s+)?([A-Z]",
              "opcodes_in_order"),
        Wrong("what cp.async loads past the registers is not counted", '("LDG", "LDGSTS")', '("LDG",)', "widths"),
        Wrong("a hint to the cache, LTC128B, is taken for a width", r"\.[US]?(8|16|64|128)\b", "(8|16|64|128)",
              "widths"),
        Wrong("without a width is taken for none, not for 32 bits", "max(bits, default=32)", "max(bits, default=0)",
              "widths"),
        Wrong("only stores of what was spilled are counted", '("LDL", "STL")', '("STL",)', "spilled"),
        Wrong("shared memory is taken for local", '("LDL", "STL")', '("LDL", "STL", "LDS", "STS")', "spilled"),
        Wrong("the first loop is taken, not the longest", ">= len(found)", ">= 0 and not found", "the_loop"),
        Wrong("a branch without predicate is taken for a loop's end", r"@!?U?P\w+ BRA", "BRA", "the_loop"),
        Wrong("FFMA anywhere: one is part of a division", "for op in opcodes(loop(listing))",
              "for op in opcodes(listing)", "what_multiplies"),
        Wrong("the wait for wgmma is taken for the copies'", r'\*/ DEPBAR\.LE SB0, 0x([0-9a-f]+)", inside)[0]',
              r'DEPBAR\.LE \w+, 0x([0-9a-f]+)", inside)[-1]', "what_is_under_way"),
        Wrong("the number is read as decimal", "inside)[0], 16)", "inside)[0])", "what_is_under_way"),
        Wrong("the last wait of the kernel, which leaves nothing",
              "inside)[0], 16)", "listing)[-1], 16)", "what_is_under_way"),
    ),
)  # fmt: skip
