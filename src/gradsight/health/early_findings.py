"""Says while a gradient is still true what will be found of it, so that it can be dumped."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.health.alarm import Alarm
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
        self._settles = False

    def decide(self, look: Look, wanted: bool) -> DumpDecision:
        """Whether to dump; `wanted`: a finding of an earlier step asks for it, on this rank."""
        finite = look.loss is None or bool(torch.isfinite(look.loss.detach()).all())
        known: SharedLook | None = SharedLook(look.norms, finite, wanted)
        if self._ranks is not None and known is not None:
            known = self._ranks.agree(look.rows, known)
        if known is None:
            return DumpDecision()
        self._norms = known.norms
        self._settles = look.scaled and known.loss_is_finite
        return DumpDecision(self._alarm.suspects(known.norms, self._settles), known.dump_wanted)

    def end_step(self) -> None:
        """The step is made, with the gradients of the last look."""
        norms = self._norms
        self._norms = None
        if norms is not None:
            self._alarm.not_finite(norms, self._settles)
            self._alarm.too_large(norms, None)
            self._alarm.end_step(norms)

    def close(self) -> None:
        """Leave the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
