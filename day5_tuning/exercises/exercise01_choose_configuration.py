"""Choose a configuration: from registers and shared memory to a ranking
=====================================================================
Softmax is compiled in eleven configurations. For each the compiler reports warps, registers per thread, and bytes of
shared memory. Which is the fastest on which GPU? Count the programs that an SM holds, then the waves. Then use this
model:

    memory     bytes in and out (bf16) / bandwidth
    issue      all programs' instructions, shared by the SMs
    latency    waves of programs, each as long as one program's chain
    time       the fourth root of the sum of fourth powers of the three, and the launch

A warp gets registers in units of 256, a program gets 1 KB of shared memory more than it asks for, and an SM holds whole
programs. A program may have less shared memory than an SM has. If it asks for more, it compiles, but does not start.
"""

import math
from dataclasses import dataclass

CLOCK, LATENCY, LAUNCH = 1.9e9, 1.2e-6, 2.0e-6  # Hz; seconds from a first load to a last store; seconds
INSTRUCTIONS, REDUCTION = 16, 150  # an element; cycles of a maximum or a sum among lanes


@dataclass(frozen=True)
class GPU:
    sms: int
    registers: int  # of an SM, 32 bits each
    shared: int  # bytes of an SM
    most_shared: int  # bytes that one program may have
    warps: int  # that an SM holds
    programs: int  # that an SM holds
    memory: float  # bytes per second


@dataclass(frozen=True)
class Config:
    rows: int  # of a program
    warps: int
    registers: int  # of a thread
    shared: int  # bytes of a program


def issue(config: Config, N: int) -> float:
    """Seconds of an SM that a program's instructions take."""
    return config.rows * N * INSTRUCTIONS / 128 / CLOCK


def chain(config: Config, N: int) -> float:
    """Seconds of a program that is alone, from its first load to its last store. Rows have N elements."""
    transfer = 4 * config.rows * N / 64 / CLOCK
    return LATENCY + 2 * REDUCTION * (1 + (config.warps > config.rows)) / CLOCK + issue(config, N) + transfer


def resident(config: Config, gpu: GPU) -> int:
    """Programs that an SM holds at a time; 0: it does not start."""
    # TODO(1): the least of four limits (registers, shared memory, warps, programs); 0 if it asks for too much.
    # stub: return 1
    if config.shared > gpu.most_shared:
        return 0
    of_a_warp = math.ceil(config.registers * 32 / 256) * 256
    by_registers = gpu.registers // of_a_warp // config.warps
    by_shared = gpu.shared // (config.shared + 1024)
    return min(by_registers, by_shared, gpu.warps // config.warps, gpu.programs)
    # END(1)


def occupancy(config: Config, gpu: GPU) -> float:
    """Warps that an SM holds, as a share of the most that it can hold."""
    # TODO(2): the warps of the resident programs over the warps that an SM can hold.
    # stub: return None
    return resident(config, gpu) * config.warps / gpu.warps
    # END(2)


def seconds(M: int, N: int, config: Config, gpu: GPU) -> float:
    """Predicted time of softmax over [M, N] in bf16; infinite where it does not start."""
    # TODO(3): programs, waves, the three terms, what they make together.
    # stub: return 0.0
    if not resident(config, gpu):
        return math.inf
    programs = math.ceil(M / config.rows)
    waves = math.ceil(programs / (resident(config, gpu) * gpu.sms))
    memory = 2 * M * N * 2 / gpu.memory
    issued = programs * issue(config, N) / gpu.sms
    latency = waves * chain(config, N)
    return (memory**4 + issued**4 + latency**4) ** 0.25 + LAUNCH
    # END(3)


def ranked(M: int, N: int, configs: list[Config], gpu: GPU) -> list[Config]:
    """Those that start, the fastest first."""
    # TODO(4): leave out what does not start, and sort by the predicted time.
    # stub: return configs
    return sorted((c for c in configs if resident(c, gpu)), key=lambda c: seconds(M, N, c, gpu))
    # END(4)


# The learner's file ends here.
from dataclasses import replace

from lessonkit.base import chips
from lessonkit.exercise import Exercise, Wrong, number, same
from lessonkit.measure import sweeps

import torch

# Hopper's SM in the GPUs of the lessons; and SMs that do not exist.
SM = chips.of(90)
FAMILY = [GPU(m.sms, SM.registers, SM.shared, sweeps.SHARED, SM.warps, SM.blocks, m.memory) for m in sweeps.FAMILY]
OTHERS = [GPU(46, 65536, 102400, 101376, 48, 24, 6.4e11), GPU(84, 32768, 65536, 49152, 32, 16, 1.2e12)]


def _any(*choices):
    return choices[int(torch.randint(len(choices), ()))]


def _configs(count=40):
    """Hidden from the learner: random figures of a compiler."""
    return [
        Config(_any(1, 2, 4), _any(1, 2, 4, 8, 16, 32), int(torch.randint(16, 256, ())),
               _any(0, 128, 16384, 49152, 101376, 114688, 200000, 232448, 240000))
        for _ in range(count)
    ]  # fmt: skip


def _resident(c, gpu):
    """By the lessons' own count."""
    if c.shared > gpu.most_shared:
        return 0
    sm = replace(SM, registers=gpu.registers, shared=gpu.shared, warps=gpu.warps, blocks=gpu.programs)
    return sm.resident(c.warps, c.registers, c.shared)


def _seconds(M, N, c, gpu):
    if not (held := _resident(c, gpu)):
        return math.inf
    programs = -(-M // c.rows)
    terms = {
        "memory": 4 * M * N / gpu.memory,
        "issue": programs * issue(c, N) / gpu.sms,
        "latency": sweeps.waves(programs, held, gpu.sms) * chain(c, N),
    }
    return sweeps.together(terms)[0] + LAUNCH


def what_an_sm_holds():
    """Registers, shared memory, warps and programs each limit some configuration."""
    hopper, small = FAMILY[0], OTHERS[1]
    for what, c, gpu in (
        ("64 registers, 8 warps: registers", Config(1, 8, 64, 0), hopper),
        ("83 registers come as 88", Config(1, 4, 83, 0), hopper),
        ("45 KB: shared memory, and 1 KB each on top", Config(1, 4, 16, 46080), hopper),
        ("32 warps of 16 registers: warps", Config(1, 32, 16, 0), hopper),
        ("one warp of 16 registers: programs", Config(1, 1, 16, 0), hopper),
        ("all the shared memory that a program may have", Config(1, 4, 32, 232448), hopper),
        ("56 KB where the SM has 64 and a program may have 48", Config(1, 4, 32, 57344), small),
        ("1024 threads of 255 registers", Config(1, 32, 255, 0), hopper),
    ):
        same(f"programs an SM, {what}", resident(c, gpu), _resident(c, gpu))
    for gpu in (*FAMILY[1:2], *OTHERS):
        for c in _configs():
            same(f"programs an SM, {c} on {gpu}", resident(c, gpu), _resident(c, gpu))


def share_of_the_warps():
    """Occupancy is warps over warps: two programs may be more of an SM than seven."""
    for gpu in (FAMILY[0], *OTHERS):
        for c in _configs(20):
            exact = _resident(c, gpu) * c.warps / gpu.warps
            number(f"occupancy of {c} on {gpu}", occupancy(c, gpu), exact, 1e-6)


def time_by_the_model():
    """Waves are whole, and close terms cost more than the larger."""
    for M, N in ((32768, 1024), (8192, 8192), (4096, 32768), (133, 4096)):
        for gpu in (*FAMILY, *OTHERS):
            for c in _configs(10):
                exact, got = _seconds(M, N, c, gpu), seconds(M, N, c, gpu)
                what = f"seconds of [{M}, {N}], {c} on {gpu}"
                if math.isinf(exact):
                    assert got == exact, f"{what}: it does not start, expected math.inf, got {got}"
                else:
                    number(what, got, exact, 1e-6)


def ranking():
    """In the order of the model, without those that never start, and another order on another GPU."""
    firsts = set()
    for M, N in ((32768, 1024), (4096, 32768)):
        configs = _configs(30)
        for gpu in (*FAMILY, *OTHERS):
            got = ranked(M, N, list(configs), gpu)
            times = [_seconds(M, N, c, gpu) for c in got]
            assert math.inf not in times, f"{got[times.index(math.inf)]} is ranked, and does not start on {gpu}"
            same("the predicted times in your order", times, sorted(times))
            same("how many are ranked", len(got), sum(_resident(c, gpu) > 0 for c in configs))
            firsts.add(got[0])
    assert len(firsts) > 1


EXERCISE = Exercise(
    claims=(what_an_sm_holds, share_of_the_warps, time_by_the_model, ranking),
    hints=(
        "An SM holds whole programs. Each of four resources says how many; the scarcest decides. A last wave that is "
        "not full takes as long as a full one.",
        "A warp takes ceil(registers * 32 / 256) * 256 registers, a program warps of those, and shared + 1024 bytes. "
        "waves = ceil(programs / (resident * sms)); programs = ceil(M / rows); 2 bytes per element, in and out.",
        "min(gpu.registers // a_warp // warps, gpu.shared // (shared + 1024), gpu.warps // warps, gpu.programs), and 0 "
        "if shared > gpu.most_shared. (memory**4 + issued**4 + latency**4) ** 0.25 + LAUNCH, with latency = waves * "
        "chain(config, N). sorted(those with resident > 0, key=seconds).",
    ),
    wrong=(
        Wrong("registers are taken one by one, not in units of 256 a warp",
              "math.ceil(config.registers * 32 / 256) * 256", "config.registers * 32", "what_an_sm_holds"),
        Wrong("the 1 KB that comes with each program is forgotten", "(config.shared + 1024)", "max(1, config.shared)",
              "what_an_sm_holds"),
        Wrong("warps that an SM holds are no limit", "by_shared, gpu.warps // config.warps, ", "by_shared, ",
              "what_an_sm_holds"),
        Wrong("programs that an SM holds are no limit", "config.warps, gpu.programs)", "config.warps)",
              "what_an_sm_holds"),
        Wrong("what a program may not have is given to it",
              "    if config.shared > gpu.most_shared:\n        return 0\n", "", "what_an_sm_holds"),
        Wrong("programs over programs instead of warps over warps", "resident(config, gpu) * config.warps / gpu.warps",
              "resident(config, gpu) / gpu.programs", "share_of_the_warps"),
        Wrong("a part of a wave is taken for a part of its time",
              "math.ceil(programs / (resident(config, gpu) * gpu.sms))", "programs / (resident(config, gpu) * gpu.sms)",
              "time_by_the_model"),
        Wrong("the last rows that do not fill a program are left out", "math.ceil(M / config.rows)",
              "M // config.rows", "time_by_the_model"),
        Wrong("the terms are added, as if nothing overlapped",
              "(memory**4 + issued**4 + latency**4) ** 0.25", "memory + issued + latency", "time_by_the_model"),
        Wrong("only the largest term is taken, as if the two others were hidden entirely",
              "(memory**4 + issued**4 + latency**4) ** 0.25", "max(memory, issued, latency)", "time_by_the_model"),
        Wrong("the launch is forgotten", "** 0.25 + LAUNCH", "** 0.25", "time_by_the_model"),
        Wrong("what does not start is ranked too", "(c for c in configs if resident(c, gpu))", "configs", "ranking"),
        Wrong("the highest occupancy is taken for the fastest", "key=lambda c: seconds(M, N, c, gpu)",
              "key=lambda c: -occupancy(c, gpu)", "ranking"),
    ),
)  # fmt: skip
