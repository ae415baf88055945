"""What was found out about a bad step, and the incident it is kept in. No torch."""

from dataclasses import dataclass

BROKEN_OPERAND = "that needs no gradient is not finite"
"""The words in the details of an operation if labels or a constant made its result non-finite."""

NO_SINGLE_SAMPLE = "no single sample is the cause"
"""The end of the note about a batch in which nearly all samples have a non-finite gradient."""


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """What a tensor held, in a few numbers."""

    shape: tuple[int, ...]
    dtype: str
    smallest: float | None
    """Of the finite values; None where there are none."""
    largest: float | None
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class GuiltyOperation:
    """The first operation of a step with finite inputs and a non-finite output.

    Deliberate fills, such as an attention mask's, do not count.
    """

    operation: str
    """As torch names it: "log", "div", "to(float16)".

    Or what was not finite beforehand: "input", "parameter", "buffer".
    """
    phase: str
    """"forward", "backward", "loss" (outside the model, before backward()), or "before" it."""
    module: str | None
    """The model's own dotted name of the innermost module it ran in."""
    place: str | None
    """File and line of the user's source."""
    source: str | None
    """The text of that line."""
    inputs: tuple[TensorSummary, ...]
    micro_batch: int
    detail: str = ""
    """The argument and its rows, the names of parameters, how sure a guess is."""
    rank: int = 0
    call: int | None = None
    """Which call of the model in its micro-batch, from 0; None: the only one, or none in
    particular."""
    calls: int = 1
    """How many calls of the model that micro-batch had."""


@dataclass(frozen=True, slots=True)
class GuiltySample:
    """One sample of the bad step and its part in it."""

    row: int
    """Its row in the arguments of the model."""
    sample_id: int | str | None
    micro_batch: int
    rank: int
    norm: float
    """The exact norm of the sample's own share of the gradient; it may be NaN or infinite."""
    share: float | None
    """Its part of the squared norms of all samples; None where their sum is not finite."""
    call: int | None = None
    """Which call of the model in its micro-batch, from 0; None: all of them together."""
    calls: int = 1
    """How many calls of the model that micro-batch had."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found out about a bad step, and what finding it out cost."""

    operation: GuiltyOperation | None
    samples: tuple[GuiltySample, ...]
    """The worst first."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What could not be found out, and why."""
    micro_batches: int = 1
    """How many backward passes the step had that followed calls of the model."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A bundle that the flight recorder wrote: a folder of the run directory."""

    step: int
    code: str
    """The finding's, or "exception"."""
    path: str
    reason: str = ""
    """What happened, in one line."""
    diagnosis: Diagnosis | None = None
    """Of all ranks together; None where nothing was diagnosed."""
    replayable: bool = False
    """Whether the batch is in it, so that `gradsight replay` can run it again."""
    damage: str | None = None
    """Why it cannot be read, where it cannot."""
