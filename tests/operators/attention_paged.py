"""What is asked of course_ops' attention_paged, and mutants of its kernels."""

import math

from lessonkit import Lesson, Mutant

from course_ops.kernels import attention_paged as kernels
from problems.attention_paged import PROBLEM


def attention_paged(q, k_cache, v_cache, lengths, table=None, causal=True, window=None, scale=None):
    """The kernel; the operator itself would compute CPU tensors with PyTorch."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads_first = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    out, lse = kernels.attention_paged(*heads_first, lengths, table, causal, window, scale, None)
    return out.transpose(1, 2), lse


def _bench(**more):
    return {"B": 64, "H": 32, "S_k": 4096, "D": 128, "H_kv": 8, "poison": False} | more


# fmt: off
FORWARD = Lesson(
    problem=PROBLEM,
    benches=(_bench(), _bench(block_size=64), _bench(block_size=256, B=1), _bench(window=1024),
             _bench(D=256, H=16), _bench(paged=False)),
    rungs=(attention_paged,),
    wrong=(
        Mutant("the block before", "pages_of", "table_ptr + firsts // PAGE",
               "table_ptr + tl.maximum(firsts // PAGE - 1, 0)", "attention_paged"),
        Mutant("the block after", "pages_of", "table_ptr + firsts // PAGE",
               "table_ptr + (firsts + BLOCK_N // PAGES) // PAGE", "attention_paged", "value or nan or out of bounds"),
        Mutant("a step's block, where it lies within one", "pages_of", "table_ptr + start // PAGE",
               "table_ptr + start // PAGE * 0", "attention_paged"),
        Mutant("the table of the first sequence", "paged_kernel", "table_ptr + b.to(tl.int64) * table_stride",
               "table_ptr", "attention_paged", "value or nan"),
        Mutant("a slot too far", "load_keys", "slots = place % PAGE", "slots = (place + 1) % PAGE", "attention_paged",
               "value or nan"),
        Mutant("the first slots of each block", "load_keys", "first = start % PAGE", "first = 0 * start",
               "attention_paged"),
        Mutant("a key past the length", "load_keys", "cols < D, length - start", "cols < D, length - start + 1",
               "attention_paged", "nan"),
        Mutant("a score past the length", "paged_kernel", "last = length + (row", "last = length + 1 + (row",
               "attention_paged"),
        Mutant("the last keys are forgotten", "paged_kernel", "range(start, finish,",
               "range(start, finish // BLOCK_N * BLOCK_N,", "attention_paged", "value or nan"),
        Mutant("a window one key longer", "paged_step", "last[:, None] - window", "last[:, None] - window - 1",
               "attention_paged"),
        Mutant("work before the window", "work_of", "S_q + 1 - window", "S_q - window", "attention_paged",
               "value or nan or out of bounds"),
        Mutant("rows of the first tile", "paged_kernel", "unit // tiles, unit % tiles * USED",
               "unit // tiles, 0 * USED", "attention_paged", "value or nan"),
        Mutant("the step that two shares meet in is forgotten", "paged_kernel", "next_step, steps)",
               "next_step - 1, steps)", "attention_paged", "value or nan"),
        Mutant("a share that begins within an owner begins a step late", "paged_kernel", "place == owner, step, 0)",
               "place == owner, step + (step > 0), 0)", "attention_paged", "value or nan"),
        Mutant("a start counts as a step", "place_of", "- START, 0)", ", 0)", "attention_paged",
               "value or nan or out of bounds"),
        Mutant("the last part is forgotten", "paged_merge_kernel", "- first + 1", "- first", "attention_paged",
               "value or nan"),
        Mutant("parts from the first program on", "paged_merge_kernel", "first + place, parts", "place, parts",
               "attention_paged", "value or nan or out of bounds"),
        Mutant("parts weigh alike", "merge_parts", "tl.exp2(lse - m_new)", "tl.exp2(0 * (lse - m_new))",
               "attention_paged", "value or nan"),
    ),
    claims={attention_paged: ("paged_kernel: no spills", "paged_kernel: 16-byte loads")},
    passes={attention_paged: 1},
)
# fmt: on
