"""A finished step, as it goes to the judge, the recorder and the outputs. No torch.

Arrays are never written to after a value has been made: whoever gets one only reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from gradsight.values.first_step import FirstStep, StepPasses
from gradsight.values.histograms import Histogram
from gradsight.values.steps import Step

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norm and largest magnitude of n gradients, as arrays of length n."""

    l2: Floats
    # Beside the norm, since finite entries of 1e30 have an infinite one: it tells the two apart.
    max_abs: Floats
    counts: tuple[Floats, Floats] | None = None
    """How many entries are NaN and how many infinite; None where all are finite.

    -1 stands for a count that is not known.
    """
    total: float = 0.0
    """The norm over all of them."""
    wide: bool = False
    """Whether some norm may not fit a float32."""

    def divided_by(self, factor: float) -> "Norms":
        """The norms of the same gradients without a scaler's factor."""
        if factor == 1.0:
            return self
        return Norms(
            self.l2 / factor, self.max_abs / factor, self.counts, self.total / factor, self.wide
        )


@dataclass(frozen=True, slots=True)
class Details:
    """A closer look, taken on some steps only."""

    step: int
    columns: Mapping[str, Floats]
    """By name, one number for every parameter of the model; NaN where it is not known."""
    recorded: bool = False
    """Whether the record gets it; else it was taken for the judge alone."""
    histograms: tuple[Histogram, ...] = ()
    """Of every gradient and, last, of all together, where they are recorded."""
    share_within_a_tenth: float | None = None
    """The share of all gradient entries within +-0.1, where histograms are recorded."""

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]


@dataclass(frozen=True, slots=True)
class RankComparison:
    """What every rank brought to the common gradient of one step, before reduction."""

    step: int
    rows: Rows
    """The parameters that were looked at."""
    norms: Floats
    """The norms of each rank's own gradients, [ranks, rows]."""
    always: Flags
    """Which of the rows are looked at on every step, so that they can be compared over time."""


@dataclass(frozen=True, slots=True)
class RankDigests:
    """How the checksums of all ranks compare at one step; None where they were not comparable."""

    step: int
    ranks: int
    parallel: Literal["ddp", "loose ddp", "uncalled ddp", "fsdp", "other"] | None
    """How the model is shared (core.sharing.Kind); None where it is not."""
    same_start: bool | None
    """Whether all ranks began with the same weights."""
    same_gradient: bool | None
    """Whether their optimizers used the same gradient."""
    same_weights: bool | None
    """Whether their weights are the same after the step."""
    same_batch: bool | None


@dataclass(frozen=True, slots=True)
class BrokenWeights:
    """Weights that are not finite any more: nothing brings them back."""

    since: int
    """The step that made them so."""
    are: str
    """ "NaN" or "infinite"."""


@dataclass(frozen=True, slots=True)
class StepSignals:
    """What was noticed during a step beside its gradients; None where it could not be seen."""

    loss: float | None = None
    """The single number that backward was called on, or else the loss that was logged."""
    uncleared: bool | None = None
    """Whether the optimizer stepped on gradients that nobody had cleared since its last step."""
    is_one_of_several: bool = False
    """Whether other models are watched too; only set if gradients were not cleared."""
    alike_batches: int | None = None
    """How many batches in a row were the same; None where no batch was seen."""
    half: bool | None = None
    """Whether the forward pass ran under float16 autocast."""
    one_batch: bool = False
    """Whether every batch so far was the same one."""
    guess: float | None = None
    """The loss of a model that knows nothing; None where the loss is of no kind that tells."""
    unigram: float | None = None
    """The loss of a model that knows how frequent each target is; told once, after a few passes."""
    broken_weights: BrokenWeights | None = None
    """Looked for only where the gradient is not finite; None where none are known to be broken."""
    updated_twice: tuple[int, ...] = ()
    """The parameters that two optimizers have updated by the same gradient, by position."""
    reached: tuple[int, ...] = ()
    """The parameters whose gradient a backward pass has written for the first time, by position."""
    held_in_vain: tuple[int, ...] = ()
    """Those that two optimizers hold, one of which has never found a gradient, by position."""
    scaled_limit: float | None = None
    """The limit of a clipping that came while a GradScaler's factor was in the gradients."""
    first: FirstStep | None = None
    """What the first step decides; on one step of a run only."""
    passes: StepPasses | None = None
    """What its backward passes were like, on the steps that are looked at."""
    unseen: tuple[tuple[str, str], ...] = ()
    """Names of signals that will not come in this run, each with the reason."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step, complete. Norms are of `rows`, those parameters that had a gradient."""

    step: Step
    rows: tuple[int, ...] | None = None
    """Positions in the model's list of parameters; None: all of them."""
    norms: Norms | None = None
    """None where norms were not due, or no gradient was seen."""
    details: Details | None = None
    signals: StepSignals = field(default_factory=StepSignals)
    rank_comparisons: tuple[RankComparison, ...] = ()
    """Comparisons that have arrived since the step before; they are of earlier steps."""
    rank_digests: tuple[RankDigests, ...] = ()
    """The same for comparisons by checksum."""
    experts: Mapping[str, Floats] = field(default_factory=dict)
    """By group of experts: the norm of each one's gradient, 0 where it has none.

    Where parameters are sharded, on the steps of closer looks only.
    """

    @property
    def finite(self) -> bool:
        """Whether no gradient that was seen holds a NaN or an infinity."""
        return self.norms is None or self.norms.counts is None
