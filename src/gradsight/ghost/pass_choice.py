"""One pass over training and validation rows, or two: which is right, and which is cheaper.

A step of n micro-batches of B rows, with V validation rows, runs n (B + V) rows in one pass and
n B + V in two. On equal rows both were measured even, within a few percent, and two passes keep a
copy of the gradient besides: one pass is chosen where n (B + V) is no more than MOST_ROWS times
n B + V. It also holds the activations of B + V rows at once, so V may not be more than
MOST_VALIDATION times B.
"""

from gradsight.core.problems import say
from gradsight.errors import GradsightError
from gradsight.ghost.one_pass import OnePassRefusal

MOST_ROWS = 1.05
"""Rows of one pass over those of two up to which it is taken (benchmarks/ghost.py)."""
MOST_VALIDATION = 4
"""Validation rows per training row from which one pass holds too much at once."""


def is_bargain(train: int, validation: int, micro_batches: int) -> bool:
    """Whether one pass is worth it for this many rows in this many micro-batches.

    >>> is_bargain(8, 1, 1), is_bargain(8, 1, 4), is_bargain(16, 8, 1), is_bargain(1, 32, 4)
    (True, False, True, False)
    """
    if validation > MOST_VALIDATION * train:
        return False
    one = micro_batches * (train + validation)
    two = micro_batches * train + validation
    return one <= MOST_ROWS * two


class PassChoice:
    """Decides by what is asked for, by what was refused, and by the number of micro-batches."""

    def __init__(self, mode: str, against: str | None) -> None:
        """mode: as the user asked. against: why one pass cannot be, as far as settings tell."""
        if mode == "concat" and against is not None:
            raise OnePassRefusal(f"mode='concat' cannot be had: {against}.")
        self.mode = mode
        self._against = against
        self._said = False
        self._step = -1
        self._blocks = 0
        self._micro_batches = 1

    @property
    def possible(self) -> bool:
        """Whether one pass is to be tried."""
        return self.mode != "two_pass" and self._against is None

    def say_settings(self) -> None:
        """Tell, once, that settings stand against one pass."""
        if self.mode == "auto" and self._against is not None:
            self._say(self._against)

    def refused(self, error: GradsightError, *, for_good: bool) -> None:
        """One pass was refused: raised again where the user asked for it, else told once."""
        if self.mode == "concat":
            raise error
        reason = error.reason if isinstance(error, OnePassRefusal) else str(error)
        reason = reason.rstrip(".")
        if for_good:
            self._against = reason
        self._say(reason)

    def begin_block(self, step: int) -> None:
        """Count the micro-batches of a step."""
        if step != self._step:
            self._micro_batches = max(1, self._blocks)
            self._blocks = 0
            self._step = step
        self._blocks += 1

    def is_cheaper(self, train: int, validation: int) -> bool:
        """Whether one pass is worth it, judged by the step before; always where it is asked for."""
        if self.mode == "concat" or is_bargain(train, validation, self._micro_batches):
            return True
        self._say(
            f"{validation} validation rows with each of {self._micro_batches} micro-batches of "
            f"{train} rows cost more than a pass of their own"
        )
        return False

    def _say(self, reason: str) -> None:
        if self._said:
            return
        self._said = True
        say(
            f"samples are scored in mode 'two_pass', not in one pass: {reason}. The scores are "
            "the same.",
            stacklevel=7,
        )
