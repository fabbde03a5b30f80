"""What the kit raises and more than one of its groups catches."""


class Unsupported(ValueError):
    """This rung cannot do that shape (a later one can): checks and benchmarks pass it over and say why."""


class Misdeclared(ValueError):
    """What a lesson declares does not fit its code; says which lesson, which case or mutant, and what to write."""


class Missing(RuntimeError):
    """A compiler is not on this machine; the text is the one line that says which, and the command that mends it."""


class BuildError(RuntimeError):
    """A program does not compile; the text is the compiler's."""


class Fault(RuntimeError):
    """The emulator stopped a kernel. kind: out of bounds, misaligned, uninitialised, race or barrier."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class OutOfBounds(IndexError):
    """A program touched an address outside every tensor that its kernel was given."""


class BlockAsCondition(TypeError):
    """A kernel asks a block of several elements for one truth value, which the compiler for a GPU refuses."""


class Rejected(AssertionError):
    """A wrong kernel, and the property that gave it away."""

    def __init__(self, caught_by: str, why: str) -> None:
        super().__init__(f"{caught_by}: {why}")
        self.caught_by = caught_by
