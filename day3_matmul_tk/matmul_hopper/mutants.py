"""Wrong versions of the rungs, each judged on a Hopper GPU in a process of its own, and of the CPU model.

A wait that returns too early reads shared memory that has not been written and may hold anything: "value or nan". Races
that most runs survive, such as a missing fence, are not here, since a verdict has to be the same each time.
"""

from lessonkit import Mutant

OF_THE_KERNELS = (
    Mutant(
        "tma: a phase wants two arrivals", "matmul_kernel", "full, count=1", "full, count=2", "tma_and_wgmma", "hang"
    ),
    Mutant(
        "tma: more bytes announced than come", "load", "+ self.b_desc", "+ 2 * self.b_desc", "tma_and_wgmma", "hang"
    ),
    Mutant(
        "tma: waits for the phase before", "matmul_kernel", "step & 1", "step & 1 ^ 1", "tma_and_wgmma", "value or nan"
    ),
    Mutant("the left half twice", "store_tile", "(panels[1])", "(panels[0])", "tma_and_wgmma"),
    Mutant("K's tail left out", "ring", "triton.cdiv(a.shape[1], BLOCK_K)", "a.shape[1] // BLOCK_K", "ring"),
    Mutant(
        "the accumulator begins anew each step", "matmul_kernel", "stage), acc)", "stage), acc, use_acc=False)", "ring"
    ),
    Mutant("the last group as high as the others", "tile_at", "within % height", "within % GROUP", "ring", "nan"),
    Mutant(
        "ring: a stage is never filled",
        "matmul_kernel",
        "static_range(STAGES)",
        "static_range(STAGES - 1)",
        "ring",
        "hang",
    ),
    Mutant(
        "ring: phases want two arrivals", "allocate_barriers", "count=ARRIVALS", "count=ARRIVALS + 1", "ring", "hang"
    ),
    Mutant(
        "ring: the parity of the round before",
        "ring_slot",
        "// STAGES & 1",
        "// STAGES & 1 ^ 1",
        "ring",
        "hang or value or nan",
    ),
    Mutant(
        "ring: no wait for a stage",
        "wait_full",
        "mbarrier.wait(self.full.index(stage), parity)",
        "pass",
        "ring",
        "value or nan",
    ),
    Mutant("all panels in one place", "store_tile", "col + 64 * p", "col", "async_wgmma", "value or nan"),
    Mutant(
        "every stage loads the same step",
        "matmul_kernel",
        "ring.load(step, row, col, step * K,",
        "ring.load(step, row, col, 0,",
        "async_wgmma",
    ),
    Mutant("async: B's columns are A's rows", "load", "[k, col]", "[k, row]", "async_wgmma"),
    Mutant("async: one step is never loaded", "matmul_kernel", "(step > 0)", "(step > 1)", "async_wgmma", "hang"),
    Mutant(
        "specialized: at first nothing is empty",
        "load",
        "stage), parity ^ 1",
        "stage), parity",
        "warp_specialized",
        "hang",
    ),
    Mutant(
        "specialized: empty wants three arrivals",
        "matmul_kernel",
        "allocate_barriers(STAGES, 2)",
        "allocate_barriers(STAGES, 3)",
        "warp_specialized",
        "hang",
    ),
    Mutant(
        "specialized: no stage is released", "consumer", "pred=step > 0", "pred=step < 0", "warp_specialized", "hang"
    ),
    Mutant(
        "specialized: consumers do not wait",
        "wait_full",
        "mbarrier.wait(self.full.index(stage), parity)",
        "pass",
        "warp_specialized",
        "value or nan",
    ),
    Mutant(
        "persistent: K's tail left out",
        "persistent",
        "triton.cdiv(a.shape[1], BLOCK_K)",
        "a.shape[1] // BLOCK_K",
        "persistent",
    ),
    Mutant("the tile before is added", "consumer", "use_acc=step > 0", "use_acc=True", "persistent"),
    Mutant(
        "persistent: steps of the tile, not of all tiles",
        "consumer",
        "ring.wait_full(count)",
        "ring.wait_full(step)",
        "persistent",
        "value",
    ),
    Mutant(
        "persistent: a tile's last stage is kept",
        "consumer",
        "mbarrier.arrive(ring.empty.index(previous))",
        "pass",
        "persistent",
        "hang",
    ),
    Mutant("both store the upper half", "consumer", "* 2 + WHICH", "* 2", "tile_choice", "value or nan"),
    Mutant(
        "the last column of tiles left out",
        "tile_choice",
        "triton.cdiv(N, block_n)",
        "max(1, N // block_n)",
        "tile_choice",
        "nan",
    ),
    Mutant(
        "columns of a tile of 256 for one of 128", "consumer", "tile_n * N, 2", "tile_n * 256, 2", "tile_choice", "nan"
    ),
)
OF_THE_CPU_MODEL = (
    Mutant("stages taken before they are empty", "_cta", "parity ^ 1", "2", "cpu_model", "nan"),
    Mutant("at first nothing is empty", "_cta", "parity ^ 1", "parity", "cpu_model", "barrier"),
    Mutant("read before the copies have come", "_cta", "full[stage], parity", "full[stage], 2", "cpu_model", "nan"),
    Mutant("empty when one of two has read", "_cta", "Barrier(2)", "Barrier(1)", "cpu_model", "barrier"),
    Mutant("always the same round", "_ring_slot", "step // 3 & 1", "0", "cpu_model", "barrier"),
)

WRONG = (*OF_THE_KERNELS, *OF_THE_CPU_MODEL)
