"""What contenders answer while they are timed: every answer is compared, and none finds an earlier one in its memory.

A kernel that leaves a tile unwritten passes if the allocator gives it the memory of an earlier, right answer. So each
answer's memory is filled with NaN once it has been compared: the calls of the next round get that memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lessonkit.base.errors import Rejected
from lessonkit.judge.check import Truth, compare, tensors
from lessonkit.measure.rows import WRONG_IN_A_ROUND

import torch

PEER_ERROR, PEER_ROUNDINGS = 8, 2  # a peer's mean error may be so many times PyTorch's, and so many steps of its dtype
PEER_UNEQUAL = 0.01  # of a peer's integers may differ


class Answers:
    """The answers of contenders by name. An answer that has the bits of the one that was judged first is right too.

    judge     judge(name, answer) says what is wrong with an answer, or nothing
    sample    copies what is compared of an answer, on the GPU right after the call; without it all is kept for a round
    wrong     name -> what was wrong with an answer, the first that was
    """

    def __init__(
        self, args: Sequence[Any], judge: Callable[[str, Any], str], sample: Callable[[Any], Any] | None = None
    ) -> None:
        self.judge, self.sample = judge, sample
        self.wrong = dict[str, str]()
        self._args = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        self._judged = dict[str, Any]()
        self._refused = set[str]()  # whose first answer was wrong
        self._newest = list[tuple[str, Any]]()

    def enter(self, name: str, call: Callable[[], Any]) -> str:
        """Call twice, the second time where the first answer was, filled with NaN. Returns what is wrong with it."""
        self._spoil(call())
        answer = call()
        self._judged[name] = self.sample(answer) if self.sample else answer
        if said := self.judge(name, self._judged[name]):
            self.wrong[name] = said
            self._refused.add(name)
        return said

    def called(self, name: str, answer: Any) -> None:
        """A contender was called: nothing here waits for the GPU, or the host would fall behind it."""
        if name not in self._judged:
            return
        if self.sample:
            self._newest.append((name, self.sample(answer)))
            self._spoil(answer)
        else:
            self._newest.append((name, answer))

    def round_over(self) -> None:
        """Compare the answers of a round, and fill their memory with NaN."""
        for name, answer in self._newest:
            if name not in self.wrong and not self._is_known(name, answer) and (said := self.judge(name, answer)):
                self.wrong[name] = said
            if not self.sample:
                self._spoil(answer)
        self._newest.clear()

    def wrong_in_rounds(self) -> dict[str, str]:
        """Name -> why a contender that was right at first has no time, as rows say it (rows.may_be_the_best)."""
        return {name: f"{WRONG_IN_A_ROUND}: {said}" for name, said in self.wrong.items() if name not in self._refused}

    def _is_known(self, name: str, answer: Any) -> bool:
        known = self._judged[name]
        if answer is None or known is None:
            return answer is known
        return all(
            a is b is None or (a is not None and b is not None and _apart(a, b) and torch.equal(a, b))
            for a, b in zip(_all(answer), _all(known), strict=True)
        )

    def _spoil(self, answer: Any) -> None:
        for t in _all(answer):
            if t is not None and t.untyped_storage().data_ptr() not in self._args:
                fill_with_nan(t)


def _all(answer: Any) -> tuple[torch.Tensor | None, ...]:
    return () if answer is None else tensors(answer)


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a has the type of b and memory of its own: a contender may answer in the same memory each time."""
    return a.dtype == b.dtype and a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def fill_with_nan(t: torch.Tensor) -> None:
    """Set all bits of t, which are NaN in every floating-point type; not where elements overlap or lie apart."""
    t = t.detach()
    if t.numel() and t.stride()[-1:] in ((), (1,)) and 0 not in t.stride():
        (t if t.ndim else t[None]).view(torch.uint8).fill_(255)


def another(truth: Truth, answer: Any) -> str:
    """How a peer's answer differs from what was asked, or an empty string. A result that is None is not compared.

    A peer is here for its speed, and rounds as it does: to fewer digits, or the other way where two integers are as
    near. But it must compute the same thing. What is right from a rung is right from a peer too: where a long sum in
    fp32 loses digits, that is more than PEER_ERROR and PEER_ROUNDINGS allow.
    """
    for i, (g, right, rounded) in enumerate(zip(tensors(answer), truth.exact, truth.usual, strict=False)):
        if g is not None and (why := _off(i, g, right, rounded, truth.factor)) and not _right_from_a_rung(truth, i, g):
            return why
    return ""


def _off(i: int, g: torch.Tensor, right: torch.Tensor, rounded: torch.Tensor, factor: float) -> str:
    """How result i of a peer differs by more than PEER_ERROR, PEER_ROUNDINGS or PEER_UNEQUAL allow."""
    if g.shape != right.shape:
        return f"result {i} has shape {tuple(g.shape)}, not {tuple(right.shape)}"
    if not g.is_floating_point():
        share = float((g != rounded).double().mean()) if g.numel() else 0.0
        return f"{share:.0%} of result {i} differ" if share > PEER_UNEQUAL else ""
    finite = right.isfinite() & rounded.isfinite()
    error = (g.double() - right)[finite].abs().mean()
    usual_error, size = (rounded.double() - right)[finite].abs().mean(), right[finite].abs().mean()
    budget = factor * (PEER_ERROR * usual_error + PEER_ROUNDINGS * torch.finfo(g.dtype).eps * size)
    if finite.any() and not error <= budget:
        return f"result {i} is off by {error:.3g} in the mean, PyTorch's by {usual_error:.3g}"
    return ""


def _right_from_a_rung(truth: Truth, i: int, g: torch.Tensor) -> bool:
    """Whether result i is within the error budget of the checks, element by element."""
    this, asked = slice(i, i + 1), truth.asked
    alone = (lambda *args: asked(*args)[this]) if asked else None
    try:
        compare(Truth(truth.args, truth.exact[this], truth.usual[this], truth.factor, alone), g)
    except Rejected:
        return False
    return True
