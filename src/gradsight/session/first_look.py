"""The look at a run's first step: what its pass shows, and passes aside when its graph is freed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass
from gradsight.first_step.aside import AsideOptions, left_out, look_aside
from gradsight.first_step.labels import LABEL_CODES, LabelLook, look_at_labels
from gradsight.first_step.recorder import NOTE, RECORDER, SeenCall, SeenPass
from gradsight.session.pass_watch import PassWatch
from gradsight.session.step_passes import PassesOnTheWay
from gradsight.values.first_step import ConstantLoss, CountedLabels, FedLoss, FirstStep

_LEAST_SECONDS = 0.25
"""What a pass aside may take however short a step is."""
_LATEST = 3
"""Steps after which nobody waits for a call any more."""
_LABEL_LOOKS = 16
"""Passes of the first step whose labels are looked at."""
_BY_OPERATIONS = ("GS605", "GS606", *LABEL_CODES)
"""What is read from the operations of the training pass itself."""
FIRST_SIGNALS = ("first step", "passes")
"""The names of the signals that come from here."""
_FAILED = 'Gradsight failed internally: see "What Gradsight could not do" in the report'


@dataclass(frozen=True, slots=True)
class PreflightOptions:
    """How much of the pre-flight is done."""

    is_whole: bool = False
    """All of it, as long as it takes; else no longer than a step, on two rows."""


class FirstLook:
    """Sees the first passes of one model, and all of its passes' circumstances."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        options: PreflightOptions,
        guard: Guard,
        extra: Guard,
    ) -> None:
        """`extra` is for the extra passes: if they fail, the rest goes on."""
        self.guard = guard
        self._extra = extra
        self._model = model
        self._parameters = parameters
        self._known = {id(tensor) for tensor in parameters}
        self._options = options
        self._passes = PassWatch(model, parameters, optimizers, guard)
        self._seen: SeenPass | None = None
        self._call: SeenCall | None = None
        self._fed: list[FedLoss] = []
        self._labels: list[CountedLabels] = []
        self._constant: ConstantLoss | None = None
        self._label_look: LabelLook | None = None
        self._label_looks = 0
        self._steps = 0
        self._is_over = False

    def start(self) -> None:
        """Begin to watch."""
        RECORDER.hold(self, [self._model])
        self.guard.at_end(RECORDER.let_go, self)
        moments.listen(self, self.guard, self._parameters)
        self._passes.start()

    def stop(self) -> None:
        """Leave everything as it was found."""
        self._end()
        self._passes.stop()
        moments.leave(self)

    def after_backward(self, begun: BackwardPass, rows: Sequence[int]) -> None:
        """A pass of this model has returned."""
        seen: SeenPass | None = begun.notes.get(NOTE)
        if self._is_over or seen is None:
            return
        self._fed += seen.fed
        self._labels += seen.labels
        self._constant = self._constant or seen.constant
        if self._label_looks < _LABEL_LOOKS:
            self._label_looks += 1
            look = self._extra.run(look_at_labels, seen)
            if look is not None:
                before = self._label_look
                self._label_look = look if before is None else before.joined(look)
        if self._call is None:
            self._call = self._largest(seen)
            self._seen = seen

    def take(self) -> tuple[FirstStep | None, PassesOnTheWay | None]:
        """What is to be said at the end of a step."""
        passes = self._passes.take()
        if self._is_over:
            return None, passes
        self._steps += 1
        if self._call is None and not self._fed and not self._labels and self._steps < _LATEST:
            return None, passes
        first = replace(
            self._aside(),
            fed=tuple(self._fed),
            labels=tuple(self._labels),
            constant=self._constant,
        )
        if self._label_look is not None:
            unjudged = (*first.left_out, *self._label_look.left_out)
            first = replace(first, **self._label_look.findings(), left_out=unjudged)
        if self._seen is not None and self._seen.hidden is not None:
            unseen = left_out(self._seen.hidden, _BY_OPERATIONS).left_out
            first = replace(first, left_out=(*first.left_out, *unseen))
        self._end()
        return first, passes

    def unseen(self) -> tuple[tuple[str, str], ...]:
        """The signals that will not come any more after a fault, each with the reason."""
        return tuple((signal, _FAILED) for signal in FIRST_SIGNALS)

    def _aside(self) -> FirstStep:
        call = self._call
        if call is None or self._seen is None:
            return left_out("no call of the model was seen before its first backward passes")
        if not call.is_unchanged():
            return left_out("the batch was changed in place after the model had seen it")
        seconds: float | None = None
        if not self._options.is_whole:
            seconds = max(_LEAST_SECONDS, perf_counter() - call.began)
        options = AsideOptions(seconds)
        found = self._extra.run(look_aside, call.module, call.made, self._seen, options)
        return left_out(_FAILED) if found is None else found

    def _largest(self, seen: SeenPass) -> SeenCall | None:
        """The first call of the module that holds most of this model's parameters."""
        sizes = [
            sum(id(each) in self._known for each in call.module.parameters()) for call in seen.calls
        ]
        if not any(sizes):
            return None
        return seen.calls[sizes.index(max(sizes))]

    def _end(self) -> None:
        self._is_over = True
        self._seen = None
        self._call = None
        RECORDER.let_go(self)
