"""What all ranks' gradients are like together, known on all of them before anybody clips.

One small all-reduce per look, on a group of its own: looks are exchanged in the order of backward
passes, which the watch's other messages do not keep to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from torch import Tensor, nn

from gradsight.core.group import ProcessGroup
from gradsight.core.held_parts import parts_left_out
from gradsight.core.meeting import RanksMissing
from gradsight.core.problems import Problems
from gradsight.core.shards import are_spread
from gradsight.core.sharing import allows_uneven_steps
from gradsight.measure.norms import with_total
from gradsight.values.measured import Norms

PATIENCE = timedelta(seconds=30)
"""How long the ranks wait for each other: their backward passes have just met."""


@dataclass(frozen=True, slots=True)
class SharedLook:
    """What is known of a look: on one rank, or on all of them together."""

    norms: Norms
    """Without a scaler's factor; together it is the whole gradient alone, as if one parameter's."""
    nan_loss: bool
    dump_wanted: bool
    """Whether a finding of an earlier step asks for a dump of this one."""


class RankAgreement:
    """Adds up what every rank knows of a look. To be made on all ranks."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], problems: Problems) -> None:
        self._model = model
        self._problems = problems
        self._works = True
        self._group = ProcessGroup(alone=True)
        try:
            self._group = ProcessGroup("findings", timeout=PATIENCE)
        except RanksMissing as error:
            self._give_up(f"dump_on must be set on every rank: {error}")
        # Where nothing is sharded all ranks hold the same gradients: rank 0 speaks for them.
        self._counts = [self._group.is_first] * len(parameters)
        if are_spread(parameters):
            self._counts = [not left for left in parts_left_out(self._group, parameters)]

    def agree(self, rows: Sequence[int], mine: SharedLook) -> SharedLook | None:
        """The look of all ranks together; `rows`: the parameters whose norms these are.

        None where the others do not answer: then nobody asks them again.
        """
        if not self._works:
            return None
        if allows_uneven_steps(self._model):
            self._give_up("under torch's Join a rank may make steps that others do not make")
            return None
        try:
            (total,) = self._group.start_sum(self._numbers(rows, mine)).wait()
        except Exception as error:
            self._give_up(f"the ranks did not answer each other: {type(error).__name__}: {error}")
            return None
        return _together(total)

    def _give_up(self, why: str) -> None:
        self._works = False
        text = "steps are not dumped because of a finding (dump_on); dumps by schedule go on"
        self._problems.report("dump-on", f"{text}: {why}")

    def close(self) -> None:
        """Give the group back."""
        self._works = False
        self._group.close()

    def _numbers(self, rows: Sequence[int], mine: SharedLook) -> np.ndarray:
        counted = np.array([self._counts[row] for row in rows], dtype=bool)
        norms = mine.norms
        nan = inf = 0.0
        if norms.counts is not None:
            # A count that is not known is -1: broken all the same.
            nan = float(np.abs(norms.counts[0][counted]).sum())
            inf = float(np.abs(norms.counts[1][counted]).sum())
        finite = norms.l2[counted & np.isfinite(norms.l2)]
        square = float(finite.dot(finite))
        return np.array([square, nan, inf, mine.nan_loss, mine.dump_wanted], dtype=float)


def _together(numbers: np.ndarray) -> SharedLook:
    square, nan, inf, nan_losses, wishes = numbers.tolist()
    total = np.array([np.sqrt(square)])
    norms = with_total(total, total)
    if nan or inf:
        norms = Norms(total, total, (np.array([nan]), np.array([inf])), float(total[0]), wide=True)
    return SharedLook(norms, nan_loss=bool(nan_losses), dump_wanted=bool(wishes))
