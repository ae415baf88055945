"""A step of the run, the parameters of the model, and when something is due. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gradsight.errors import UsageError
from gradsight.values.whole_numbers import whole_number


@dataclass(frozen=True, slots=True)
class Schedule:
    """When something is due.

    start_step: the first step that is due.
    end_step: the last one that may be due; None has no end.
    step_interval: how many steps there are from one that is due to the next.

    >>> schedule = Schedule(start_step=2, end_step=9, step_interval=3)
    >>> [step for step in range(12) if schedule.due(step)]
    [2, 5, 8]
    """

    start_step: int = 0
    end_step: int | None = None
    step_interval: int = 1

    def __post_init__(self) -> None:
        self._keep("step_interval", whole_number(self.step_interval, "step_interval", least=1))
        self._keep("start_step", whole_number(self.start_step, "start_step"))
        if self.end_step is None:
            return
        self._keep("end_step", whole_number(self.end_step, "end_step"))
        if self.end_step < self.start_step:
            raise UsageError(f"end_step {self.end_step} lies before start_step {self.start_step}")

    def _keep(self, name: str, number: int) -> None:
        # Numbers of numpy are kept as Python's own: config.json takes no others.
        object.__setattr__(self, name, number)

    def due(self, step: int) -> bool:
        """Whether this step is on the schedule."""
        if step < self.start_step or (self.end_step is not None and step > self.end_step):
            return False
        return (step - self.start_step) % self.step_interval == 0


@dataclass(frozen=True, slots=True)
class CloserLooks:
    """When the judge wants details: early and often at first, then every 50 steps.

    Most faults of a set-up show at once.
    """

    first_step: int

    def due(self, step: int) -> bool:
        """Whether this step is looked at closely."""
        made = step - self.first_step
        return made % 50 == 0 or made in (1, 2, 4, 8, 16, 24, 32)


def block_of(name: str) -> str:
    """The block of a parameter: its name up to the first number, or else without its last part.

    >>> block_of("transformer.h.0.attn.c_attn.weight"), block_of("transformer.wte.weight")
    ('transformer.h.0', 'transformer.wte')
    >>> block_of("weight")
    'weight'
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model under its own dotted name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor (tied weights)."""


TRUE_GRADIENT = "true"
"""Accumulated over micro-batches, reduced over ranks, unscaled, before clipping."""
LATE_GRADIENT = "at the optimizer"
"""Seen only when the optimizer stepped, so possibly clipped already."""
LOCAL_GRADIENT = "not reduced over ranks"
PART_GRADIENT = "the shards of one rank"
"""Other ranks did not open the watch: what they hold of each gradient is not in the record."""
CHANGED_GRADIENT = "changed between backward passes"
"""A backward pass added to what was clipped, unscaled or edited already: none of it is true."""
EDITED_GRADIENT = "changed after backward"
"""Replaced, scaled, masked or reduced by hand: the numbers are of what the optimizer used.

Where torch's functions clipped it after that, they are of the gradient before clipping.
"""
REPAIRED_GRADIENT = "not finite after backward, changed since"
"""Edited by hand like the above, but the numbers are those of backward: a NaN is not hidden."""
HOOKED_GRADIENT = "after hooks on parameters"
"""Hooks on parameters ran during backward, and may have clipped or edited the gradient there."""
UNWATCHED_GRADIENT = "without new parameters"
"""Parameters were added in the middle of a run on several ranks: these are not in the record."""
SHARED_GRADIENT = "written by several threads at once"
"""Nobody can tell what the optimizer has used, so nothing was measured."""
NO_GRADIENT = "none seen"
THINNED = "thinned: "
THINNED_LOW = f"{THINNED}the lowest from here to the next recorded step"
"""Several old steps stand for all between them: here the lowest of their numbers."""
THINNED_HIGH = f"{THINNED}the highest since the recorded step before"


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    `gradient` says what the numbers of this step are measured on: "true" is the gradient
    accumulated over micro-batches, reduced over ranks, unscaled, before clipping; anything else
    names what is different.
    """

    step: int
    time: float
    """Seconds since the epoch when the step was made."""
    loss: float | None = None
    lr: float | None = None
    total_norm: float | None = None
    """L2 norm over all parameters; None where no gradient was seen or statistics were not due."""
    clip_coef: float | None = None
    """What the optimizer used, divided by the gradient; None where that is not one number."""
    scale: float | None = None
    """The loss scale of automatic mixed precision; None without a GradScaler."""
    skipped: bool = False
    """Whether this step was left out: by the GradScaler, or by on_finding="skip"."""
    gradient: str = TRUE_GRADIENT
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Whatever else was logged for this step."""

    @property
    def left_out_by(self) -> str | None:
        """Who left this step out; None where it was made."""
        if not self.skipped:
            return None
        return "on_finding" if self.scale is None else "the GradScaler"


@dataclass(frozen=True, slots=True)
class ParameterStat:
    """One parameter's gradient at one step. A field that was not measured is None."""

    step: int
    parameter: str
    l2: float
    max_abs: float
    nan: int | None = 0
    """How many entries are NaN; None where they are known to exist but were not counted."""
    inf: int | None = 0
    update_ratio: float | None = None
    """||new weight - weight|| / ||weight|| of this optimizer step, on histogram steps."""
    update_ratio_error: float | None = None
    """Standard error of update_ratio from sampling; 0 where every entry was read."""
    weight_rms: float | None = None
    """Root mean square of the weight's entries before this step, on histogram steps."""
    update_rms: float | None = None
    """Root mean square of what this optimizer step added to them."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number logged under a name of the user's."""

    step: int
    name: str
    value: float
    source: str = "watch"
    """Who counted `step`: "watch", which counts the optimizer's, or "tracker", its own."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What watching a run took of the training itself."""

    seconds_per_step: float
    """Host seconds that the training thread spent in Gradsight; opening and closing not counted."""
    steps: int
    """Over how many steps this was measured."""


@runtime_checkable
class ScalarTracker(Protocol):
    """Whoever takes scalars: a tracker of ours, a watch, or an object of the user's."""

    def log_scalar(self, name: str, value: float, step: int) -> object:
        """One number under a name."""


def check_tracker(tracker: object) -> None:
    """What a user hands in to be told of scalars must be able to take them."""
    if isinstance(tracker, type):
        raise UsageError(f"tracker must be an object, got the class {tracker.__name__}")
    if not hasattr(tracker, "log_scalar"):
        raise UsageError(
            "a tracker needs a method log_scalar(name, value, step); "
            f"{type(tracker).__name__} has none"
        )
