"""Says while a gradient is still true what will be found of it, so that it can be dumped."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradsight.health.alarm import Alarm
from gradsight.health.bad_steps import is_nan_loss
from gradsight.health.rank_agreement import RankAgreement, SharedLook
from gradsight.values.findings import Suspicion
from gradsight.values.measured import Norms


@dataclass(frozen=True, slots=True)
class Look:
    """The gradients of some parameters at the moment when they are true."""

    rows: Sequence[int]
    norms: Norms
    """Without a scaler's factor."""
    scaled: bool
    """Whether a GradScaler is at work."""
    loss: Tensor | None


@dataclass(frozen=True, slots=True)
class DumpDecision:
    """Why the gradients of a look are to be dumped: the same on every rank."""

    suspicion: Suspicion | None = None
    wanted: bool = False
    """Because of a finding of an earlier step."""


class EarlyFindings:
    """Asks an alarm of its own, with the norms of all ranks together, at every look.

    Clipping and the optimizer come later: what they leave is not the gradient any more.
    """

    def __init__(self, alarm: Alarm, ranks: RankAgreement | None) -> None:
        """`ranks`: where there are several, they decide together."""
        self._alarm = alarm
        self._ranks = ranks
        self._norms: Norms | None = None
        self._scaled = False
        self._nan_loss = False

    def decide(self, look: Look, wanted: bool) -> DumpDecision:
        """Whether to dump; `wanted`: a finding of an earlier step asks for it, on this rank."""
        known: SharedLook | None = SharedLook(look.norms, is_nan_loss(look.loss), wanted)
        if self._ranks is not None and known is not None:
            known = self._ranks.agree(look.rows, known)
        if known is None:
            return DumpDecision()
        self._norms = known.norms
        self._scaled = look.scaled
        self._nan_loss = known.nan_loss
        suspicion = self._alarm.suspects(known.norms, look.scaled, known.nan_loss)
        return DumpDecision(suspicion, known.dump_wanted)

    def end_step(self) -> None:
        """The step is made, with the gradients of the last look."""
        norms = self._norms
        self._norms = None
        if norms is not None:
            self._alarm.not_finite(norms, self._scaled, self._nan_loss)
            self._alarm.too_large(norms, None)
            self._alarm.end_step(norms)

    def close(self) -> None:
        """Leave the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
