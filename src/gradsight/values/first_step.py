"""What the first steps of a run decide by themselves: leaks, losses, modes, passes. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FedLoss:
    """A loss function that was given something else than it takes."""

    function: str
    given: str
    """What it was given: "probabilities", "logits", "log-probabilities"."""
    wanted: str
    place: str | None = None
    """File and line of the user's call."""


@dataclass(frozen=True, slots=True)
class CountedLabels:
    """How many labels of one call of a loss function count."""

    function: str
    labels: int
    counted: int
    is_mean: bool = True
    """Whether the loss divides by the number that counts."""
    place: str | None = None


CULPRITS = {
    "added mask": (
        "attention is given a float mask of zeros and ones, which is added to the scores and so "
        "hides nothing"
    ),
    "inverted mask": "the attention mask hides earlier positions instead of later ones",
    "attention": "attention has no causal mask",
    "recurrence": "a recurrent layer is bidirectional",
    "convolution": "a convolution is padded on both sides",
}
"""What lets a position see later ones, in words."""


@dataclass(frozen=True, slots=True)
class ConstantLoss:
    """A loss function that was given what no gradient can come of."""

    function: str
    reason: Literal["one class", "equal"]
    """A softmax over one class is always 1; "equal": the output is its target already."""
    place: str | None = None

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        if self.reason == "one class":
            return f"{self.function}{where} is given scores of a single class"
        return f"{self.function}{where} is given an output that equals its target"


@dataclass(frozen=True, slots=True)
class Leak:
    """How much an output sees of what it must not see, beside what it may see."""

    ratio: float
    """Largest gradient where there must be none, over the largest elsewhere; 0: it sees nothing."""
    looks: int
    """How many places were looked at."""
    example: str = ""
    """The worst place in words."""
    culprit: str = ""
    """What lets positions see later ones, where that is known: a key of `CULPRITS`."""


@dataclass(frozen=True, slots=True)
class CopiedTargets:
    """Targets that are the inputs at the same place."""

    share: float
    """Of the labels that count."""
    sees_itself: bool
    """Whether the output at a position depends on the input there."""
    is_causal: bool
    """Whether it depends on earlier inputs, and on no later one."""
    has_other_input: bool = False
    """Whether the model is given another input too, as an encoder with a decoder is."""
    time_first: bool = False
    """Whether the inputs and targets are [time, rows]."""


@dataclass(frozen=True, slots=True)
class DoubleShift:
    """Targets that are the inputs two places ahead."""

    share: float
    """Share of the compared labels that equal the input two places ahead."""
    by_model: bool
    """Whether the labels were one place ahead already when the model was given them."""
    place: str | None = None


@dataclass(frozen=True, slots=True)
class PaddingLabels:
    """Labels at places of padding."""

    places: int
    """Places of padding that were looked at."""
    counted: int
    """How many of them have a label that counts."""
    labels: int
    """How many labels count in all."""
    token: int
    """What pads the input."""
    in_decoder: bool = False
    """Whether these are the labels of a decoder, known as padding by their token alone."""
    place: str | None = None
    in_targets: bool = False
    """Whether the token marks only padding in the labels too, as in next-token prediction."""


@dataclass(frozen=True, slots=True)
class SampleLabels:
    """How labels that count are spread over samples."""

    samples: int
    empty: int
    """Samples of which no label counts."""
    labels: int
    counted: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What was seen of the first step; None where it could not be told."""

    fed: tuple[FedLoss, ...] = ()
    labels: tuple[CountedLabels, ...] = ()
    constant: ConstantLoss | None = None
    """Read only where gradients are zero: other losses of the step may have some."""
    positions: Leak | None = None
    """Whether a position sees later ones, where targets are inputs moved ahead."""
    rows: Leak | None = None
    documents: Leak | None = None
    """Whether packed documents see each other, where the script says that rows are packed."""
    copied: CopiedTargets | None = None
    shifted_twice: DoubleShift | None = None
    padding: PaddingLabels | None = None
    samples: SampleLabels | None = None
    depends: bool | None = None
    """Whether what the model gives changes when its input does."""
    independence: str = ""
    """How it is known that it does not."""
    dead_layer: str = ""
    """The layer whose units are all dead and so hide the input; empty: there is none."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Codes that could not be judged, each with the reason."""

    @property
    def label_share(self) -> float | None:
        """How many of the labels of classes count; None where there are none."""
        labels = sum(each.labels for each in self.labels)
        return sum(each.counted for each in self.labels) / labels if labels else None


LABEL_SHARE = "first_step/label_share"
"""The scalar of a record that has the share of labels that count, where it is not 1."""


_NEARLY_ALL = 0.9


def label_note(share: float | None) -> str | None:
    """Say how many labels count, unless nearly all do.

    Models that shift labels themselves ignore the last one of every sequence.

    >>> label_note(0.15)
    '15% of the labels counted in the loss at the first step'
    """
    if share is None or not 0 < share < _NEARLY_ALL:
        return None
    return f"{_percent(share)} of the labels counted in the loss at the first step"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"


@dataclass(frozen=True, slots=True)
class RepeatedPass:
    """A line that ran backward several times for one step."""

    times: int
    factor: float
    """What every loss was multiplied by after its mean was taken."""
    place: str | None = None


@dataclass(frozen=True, slots=True)
class StepPasses:
    """What the backward passes of one step were like."""

    count: int = 1
    """How many have made its gradient."""
    evaluating: tuple[tuple[str, str], ...] = ()
    """Parts in evaluation mode whose parameters learn: name, and what that switches off."""
    repeated: RepeatedPass | None = None
    why_not_repeated: str | None = None
    """Why Gradsight does not know whether a line ran backward on several micro-batches."""
    summed: int | None = None
    """How many entries the loss is a sum over with a factor of one, before an optimizer that takes
    gradients as they are; None: it is no such sum."""
    thrown_away: tuple[int, str | None] | None = None
    """How many passes of a line were cleared before any optimizer stepped, and that line."""
    cut_by_checkpoint: bool = False
    """Whether reentrant checkpointing was given inputs that need no gradient."""
