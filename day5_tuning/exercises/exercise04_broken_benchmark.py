"""Debug: a benchmark with six mistakes
====================================
Two kernels are compared. The code runs, its figures repeat, its table looks right, and it is wrong in six places. Each
changes the ranking or the ratio. Find them; change as little as you can.

The contract: `compare` returns for each kernel the median GPU time of one call, in microseconds, under a user's
conditions. The kernel is compiled already. Its input is random, and none of it is in L2. Both kernels run at the same
clock, and a stray slow call does not change the result. `compare` uses these functions of the machine
(lessonkit/measure/timing.py does the same with CUDA's):

    gpu.zeros(), gpu.random()      an input of 8 MB
    kernel(x)                      launches the call and returns; the first call of a kernel compiles it
    gpu.event() -> e               e.record() lets the GPU record its time at this point of the queue
    start.us_until(end)            between two events, once both have happened; otherwise an error, as in CUDA
    gpu.synchronize()              the host waits until the GPU has done everything
    gpu.flush_l2()                 lets the GPU overwrite all of its L2
    gpu.host_us()                  the host's clock
"""

import statistics


def compare(gpu, kernels, rounds):
    """kernels: {name: kernel}. -> {name: microseconds}."""
    x = gpu.random()
    for kernel in kernels.values():
        kernel(x)  # compiles
    gpu.synchronize()
    times = {name: [] for name in kernels}
    for name in list(kernels) * rounds:
        gpu.flush_l2()
        start, end = gpu.event(), gpu.event()
        start.record()
        kernels[name](x)
        end.record()
        gpu.synchronize()
        times[name].append(start.us_until(end))
    return {name: statistics.median(each) for name, each in times.items()}


# The learner's file ends here.
import random

from lessonkit.exercise import Exercise, Wrong

import torch

US = {"ours": 400.0, "theirs": 420.0}  # of a cold call, at full clock, alone


class GPU:
    """A clock for the host, one for the GPU's queue, and the effects that a claim asks for.

    warm        share of a call's time that L2 saves
    noise       share of stray calls, 0.7 or 10 times as long
    drift       how much longer calls have become after 200
    constant    share of a call's time that zeros save

    A launch takes 3 us of the host's time, compiling 200 ms.
    """

    def __init__(self, warm=0.0, noise=0.0, drift=0.0, constant=0.0):
        self.warm, self.noise, self.drift, self.constant = warm, noise, drift, constant
        self.host = self.free = 0.0  # free: when the GPU has done all it was asked for
        self.calls, self.in_l2 = 0, False
        self.random_calls = random.Random(int(torch.randint(1 << 30, ())))

    def zeros(self):
        return "zeros"

    def random(self):
        return "random"

    def host_us(self):
        self.host += 0.1
        return self.host

    def ask(self, us):
        self.host += 3.0
        self.free = max(self.free, self.host) + us
        return self.free

    def synchronize(self):
        self.host = max(self.host, self.free)

    def flush_l2(self):
        self.in_l2 = False
        self.ask(70.0)

    def event(self):
        return Event(self)

    def kernel(self, us):
        compiled = False

        def call(x):
            nonlocal compiled
            if not compiled:
                self.host += 200_000.0
                compiled = True
            self.calls += 1
            took = us * (1 - self.warm * self.in_l2) * (1 - self.constant * (x == "zeros"))
            took *= 1 + self.drift * min(1, self.calls / 200)
            stray = self.random_calls.random() < self.noise
            self.ask(took * (self.random_calls.choice((0.7, 10)) if stray else 1))
            self.in_l2 = True

        return call


class Event:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, None

    def record(self):
        self.at = self.gpu.ask(0.0)

    def us_until(self, end):
        for event, which in ((self, "first"), (end, "second")):
            assert event.at is not None, f"the {which} event was never recorded"
            assert event.at <= self.gpu.host, f"the {which} event has not happened yet: nobody waited for the GPU"
        return end.at - self.at


def _compare(rounds=20, us=US, **effects):
    gpu = GPU(**effects)
    got = compare(gpu, {name: gpu.kernel(t) for name, t in us.items()}, rounds)
    assert isinstance(got, dict), f"expected {{name: microseconds}}, got {got!r}"
    assert set(got) == set(us), f"expected a time for each of {sorted(us)}, got {sorted(got)}"
    return got


def _within(got, what, us=US, tolerance=0.02):
    for name, exact in us.items():
        said = f"{what}: {name} takes {exact:g} us, you measure {got[name]:.1f}"
        assert abs(got[name] / exact - 1) < tolerance, said


def waits_for_the_gpu():
    """A call returns after its launch, so the host's clock sees 3 us of any kernel."""
    _within(_compare(), "a machine without any surprises")
    _within(_compare(us={"long": 9000.0}), "a long kernel", {"long": 9000.0})


def compiles_first():
    """Without noise one round is enough, if it does not include compiling."""
    _within(_compare(rounds=1), "one round")


def flushes():
    """An input that the previous call left in L2 halves the time; a user's input is not in L2."""
    _within(_compare(warm=0.5), "a call that finds its input in L2 takes half the time")
    _within(_compare(us={"short": 20.0}), "a short kernel, asked for while the GPU flushes", {"short": 20.0})


def feeds_random_numbers():
    """Zeros flip no bits and take less power, so the clock is higher."""
    _within(_compare(constant=0.13), "on zeros a call takes 13% less")


def takes_the_median():
    """One call in 6 is disturbed, or runs at a higher clock: the median is neither."""
    _within(_compare(rounds=101, noise=1 / 6), "one call in 6 takes 10 times as long, or 0.7 times")


def takes_turns():
    """The GPU warms up and slows by 30% in 200 calls, so without interleaving the first kernel looks faster."""
    for order in (("ours", "theirs"), ("theirs", "ours")):
        got = _compare(rounds=100, us={name: US[name] for name in order}, drift=0.3)
        ratio, exact = got["theirs"] / got["ours"], US["theirs"] / US["ours"]
        said = f"measured in the order {', '.join(order)} theirs takes {ratio:.2f} times ours, it is {exact:.2f}"
        assert abs(ratio / exact - 1) < 0.02, f"{said}: the clock was not the same for both"


EVENTS = """        start, end = gpu.event(), gpu.event()
        start.record()
        kernels[name](x)
        end.record()
        gpu.synchronize()
        times[name].append(start.us_until(end))
"""
CLOCK = """        began = gpu.host_us()
        kernels[name](x)
        times[name].append(gpu.host_us() - began)
        gpu.synchronize()
"""

EXERCISE = Exercise(
    claims=(waits_for_the_gpu, compiles_first, flushes, feeds_random_numbers, takes_the_median, takes_turns),
    hints=(
        "Ask of every line: is this what a user waits for, and was the same held still for both kernels?",
        "Before the loop: an input, and one call of each kernel. In the loop: turns, a flush outside of what is timed, "
        "two events around the call alone, a wait before they are read. After it: which number of a list is not moved "
        "by one that is ten times too large?",
        "gpu.random(); a first call of each kernel and gpu.synchronize(); for name in list(kernels) * rounds; "
        "gpu.flush_l2() before start.record(); start.us_until(end) after gpu.synchronize(); statistics.median.",
    ),
    wrong=(
        Wrong("the host's clock around a call that has only been asked for", EVENTS, CLOCK, "waits_for_the_gpu",
              planted=True),
        Wrong("compiling is timed", "    for kernel in kernels.values():\n        kernel(x)  # compiles\n", "",
              "compiles_first", planted=True),
        Wrong("everything lies in L2", "        gpu.flush_l2()\n", "", "flushes", planted=True),
        Wrong("zeros in, which no user has", "x = gpu.random()", "x = gpu.zeros()", "feeds_random_numbers",
              planted=True),
        Wrong("a mean, which one stray call moves", "statistics.median(each)", "statistics.mean(each)",
              "takes_the_median", planted=True),
        Wrong("one kernel after the other: the second runs on a warm GPU", "for name in list(kernels) * rounds:",
              "for name in [name for name in kernels for _ in range(rounds)]:", "takes_turns", planted=True),
        Wrong("the flush is timed too", "        start.record()\n",
              "        start.record()\n        gpu.flush_l2()\n", "waits_for_the_gpu"),
        Wrong("the least of all calls: a moment in which the clock was high", "statistics.median(each)", "min(each)",
              "takes_the_median"),
        Wrong("events are read before they have happened", "        gpu.synchronize()\n        times", "        times",
              "waits_for_the_gpu"),
    ),
)  # fmt: skip
