"""Wrong versions of the rungs, each judged on a Hopper GPU in a process of its own, and of the CPU model.

A wait that returns too early reads shared memory that may hold anything: "value or nan". Races that most runs survive,
such as a stage released a matmul early, are here for the CPU model only, since a verdict has to be the same each time.
"""

from lessonkit import Mutant


def _of(rung, *mutants):
    """Mutants of one rung: (why, where, old, new, caught_by)."""
    return tuple(Mutant(f"{rung}: {why}", *change, rung, caught) for why, *change, caught in mutants)


EMPTY = "k_empty=allocate_barriers(STAGES, CONSUMERS)"
WAIT = "mbarrier.wait(self.full.index(stage), parity)"

# fmt: off
OF_THE_KERNELS = (
    *_of("warp_specialized",
        ("K is empty after three arrivals", "flash_kernel", EMPTY, EMPTY.replace("MERS", "MERS + 1"), "hang"),
        ("the producer waits for the round that it begins", "wait_empty", "parity ^ 1", "parity", "hang"),
        ("no wait for K and V", "wait_full", WAIT, "pass", "value or nan"),
        ("the diagonal is masked", "apply_mask", "keys[None, :] <= rows", "keys[None, :] < rows", "value"),
        ("a key past the last one is seen", "apply_mask", "keys < problem.S_k", "keys <= problem.S_k", "value"),
        ("both consumers have the first one's Q", "attend_tile", "q_smem.index(WHICH)", "q_smem.index(0)", "value"),
        ("half of a row's sum is forgotten", "partial_sums", "gl.sum(gl.sum(p", "gl.sum(gl.max(p", "value"),
        ("O is not rescaled", "step", "scale_rows(o, alpha)", "o", "value"),
        ("a row without keys is divided by 0", "epilogue", "1 / gl.where(empty, 1.0, l)", "1 / l", "nan"),
    ),
    *_of("overlap_softmax",
        ("O is not rescaled", "step", "scale_rows(o, alpha)", "o", "value"),
        ("PV with V of the next block", "step", "issue_pv(c, p, o, block - 1)", "issue_pv(c, p, o, block)", "value"),
        ("PV with the new P", "step", "operand_a(p_new, o", "operand_a(p_new * 0, o", "value"),
    ),
    *_of("ping_pong",
        ("no consumer issues first", "flash_kernel", "mbarrier.arrive(args.may_issue.index(0))", "pass", "hang"),
        ("the prologue passes no turn", "prologue", "pass_turn(c)", "pass", "hang"),
        ("a consumer passes the turn to itself", "pass_turn", "1 - c.WHICH", "c.WHICH", "hang"),
    ),
    *_of("lazy_rescaling",
        ("no sum is too large", "step", "if largest > LARGE_SUM:", "if False:", "value or nan"),
        ("no block is done again", "step", "if largest > HUGE_SUM:", "if False:", "value or nan"),
        ("O keeps the old maximum", "raise_maximum", "scale_rows(o, alpha)", "o", "value"),
        ("P keeps the old maximum", "raise_maximum", "scale_rows(p, alpha)", "p", "value or nan"),
        ("l keeps the old maximum", "raise_maximum", "scale_rows(l, alpha)", "l", "value"),
        ("of a block done again O keeps the old maximum", "step", "scale_rows(o, alpha)", "o", "value"),
        ("of a block done again l keeps the old maximum", "online_softmax", "kept + partial_sums", "l + partial_sums",
         "value"),
    ),
    *_of("persistent_scheduler",
        ("the end is not published", "producer_partition", "num_tiles())\n    args.scheduler.publish(index, count)",
         "num_tiles())", "hang"),
        ("Q is not released", "drain", "mbarrier.arrive(c.args.q_empty.index(c.WHICH))", "pass", "hang"),
        ("the producer waits for a Q that nobody has read", "load_tile", "count & 1 ^ 1", "count & 1", "hang"),
        ("always the first tile's Q", "attend_tile", "count & 1", "0", "hang or value or nan"),
        ("the counter keeps its value", "fetch", "fetched == num_tiles - 1", "fetched == num_tiles", "nan"),
    ),
    *_of("three_consumers",
        ("the third consumer has the first one's Q", "attend_tile", "q_smem.index(WHICH)", "q_smem.index(WHICH % 2)",
         "value"),
        ("K is empty after four arrivals", "flash_kernel", EMPTY, EMPTY.replace("MERS", "MERS + 1"), "hang"),
        ("a key past the last one is seen", "apply_mask", "problem.S_k - 1 - key", "problem.S_k - key", "value"),
    ),
    *_of("causal_diagonal",
        ("the other consumer's half", "attend_tile", "WHICH == 0", "WHICH == 1", "value"),
        ("the half block is not in l", "half_block_first", "gl.convert_layout(l_half, l.type.layout)", "l", "value"),
        ("the masked half of the block", "first_rows", "slice(0, ROWS", "slice(64, ROWS", "value"),
        ("the diagonal is masked", "apply_mask", "problem.S_q - key)", "problem.S_q - key - 1)", "value"),
        ("a key past the last one is seen", "apply_mask", "problem.S_k - 1 - key", "problem.S_k - key", "value"),
    ),
)

OF_THE_MODEL = tuple(Mutant(*change, "cpu_model", caught) for *change, caught in (
    ("K is read before it has come", "_cta", "yield k_full[stage], parity", "yield FREE", "barrier or nan"),
    ("K and V are empty when one of two has read", "_cta", "[Barrier(2) for", "[Barrier(1) for", "barrier"),
    ("V is released before PV is over", "_cta", "acc += p @ v_smem[before]",
     "v_empty[before].arrive(); yield FREE; v_empty[before].missing += 1; acc += p @ v_smem[before]", "nan"),
    ("always the first Q", "_cta", "q_full[which], count & 1", "q_full[which], 0", "barrier"),
    ("the next tile's Q over this one's", "_cta", "yield q_empty[which], count & 1 ^ 1", "yield q_empty[which], 2",
     "value or nan"),
    ("a mailbox of one slot", "_cta", "q.shape[3], 2", "q.shape[3], 1", "barrier"),
    ("the end is not published", "_cta", "next(counter)\n        publish(index, count)", "next(counter)", "barrier"),
    ("a counter for each CTA", "cpu_model", "_cta(program, counter,", "_cta(program, numbers_from(CTAS),", "value"),
    ("the first tiles are fetched again", "cpu_model", "numbers_from(CTAS)", "numbers_from()", "value"),
    ("O keeps the old maximum", "_raise_maximum", "acc * alpha", "acc", "value"),
    ("P keeps the old maximum", "_raise_maximum", "p * alpha", "p", "value"),
    ("l keeps the old maximum", "_raise_maximum", "l * alpha", "l", "value"),
    ("of a block done again O keeps the old maximum", "_cta", "acc = acc * alpha", "pass", "value"),
    ("of a block done again l keeps the old maximum", "_softmax", "l * alpha + p", "l + p", "value"),
    ("no block is done again", "_cta", "sums.max() < 2**20", "True", "nan"),
    ("the other consumer's half", "_cta", "causal and which == 0", "causal and which == 1", "value"),
))
# fmt: on
