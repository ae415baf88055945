"""The ranks' turns at dumping: a dump begins when all of them have come for it, or not at all."""

from gradsight.core import meeting
from gradsight.core.group import ProcessGroup
from gradsight.dump.plan import Fault

_UNEVEN_PATIENCE = 2.0
"""Seconds to wait under torch's Join, where a rank that does not come at once has no more steps."""
_LOSS = 4.0
"""By what the patience shrinks with every dump that a rank did not come for."""
_LEAST_PATIENCE = 0.1


class Turns:
    """Counts the dumps of this rank; the ranks meet for each of them."""

    def __init__(self) -> None:
        self.uneven = False
        """Whether ranks may make different numbers of steps."""
        self._number = 0
        self._missed = 0

    def meet(self, ranks: ProcessGroup) -> Fault | None:
        """Wait for all ranks to come for the next dump; where some do not, why there is none."""
        self._number += 1
        met = ranks.meet(str(self._number), self._patience())
        if not met.missing:
            self._missed = 0
            return None
        self._missed += 1
        return Fault(
            "uneven",
            f"{met.sentence()}: the dump is given up. A dump takes the same step on every rank; "
            "steps that only some ranks make, as under torch's Join, are not dumped",
        )

    def done(self, ranks: ProcessGroup) -> None:
        """The dump is over, on all ranks."""
        if ranks.is_first:
            ranks.forget_meeting(str(self._number))

    def _patience(self) -> float:
        full = _UNEVEN_PATIENCE if self.uneven else meeting.PATIENCE
        return max(_LEAST_PATIENCE, full / _LOSS**self._missed)
