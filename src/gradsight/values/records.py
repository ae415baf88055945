"""The types that travel between stages: frozen, plain, without torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from gradsight.errors import UsageError


def plain(value: Any) -> Any:
    """A record as values that JSON knows: mappings, lists, text, and numbers; what is not finite is "nan", "inf" or "-inf".

    >>> plain({"norm": math.inf, "rows": (1, 2.5)})
    {'norm': 'inf', 'rows': [1, 2.5]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Schedule:
    """When something is due: from start_step to end_step (inclusive), every step_interval steps.

    >>> [step for step in range(12) if Schedule(start_step=2, end_step=9, step_interval=3).due(step)]
    [2, 5, 8]
    """

    start_step: int = 0
    end_step: int | None = None
    step_interval: int = 1

    def __post_init__(self) -> None:
        if self.step_interval < 1:
            raise UsageError(f"step_interval must be 1 or more, got {self.step_interval}")
        if self.start_step < 0:
            raise UsageError(f"start_step must be 0 or more, got {self.start_step}")
        if self.end_step is not None and self.end_step < self.start_step:
            raise UsageError(f"end_step {self.end_step} lies before start_step {self.start_step}")

    def due(self, step: int) -> bool:
        """Whether this step is on the schedule."""
        if step < self.start_step or (self.end_step is not None and step > self.end_step):
            return False
        return (step - self.start_step) % self.step_interval == 0


def block_of(name: str) -> str:
    """The block a parameter belongs to: its name up to the first number in it, or else without its last part.

    >>> block_of("transformer.h.0.attn.c_attn.weight"), block_of("transformer.wte.weight"), block_of("weight")
    ('transformer.h.0', 'transformer.wte', 'weight')
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


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step.

    `gradient` says what the numbers of this step are measured on: "true" is the gradient accumulated over micro-batches,
    reduced over ranks, unscaled, before clipping; anything else names what is different.
    """

    step: int
    time: float
    """Seconds since the epoch when the step was made."""
    loss: float | None = None
    lr: float | None = None
    total_norm: float | None = None
    """L2 norm over all parameters; None where no gradient was seen or statistics were not due."""
    clip_coef: float | None = None
    """What the optimizer used, divided by the gradient; 1 without clipping, None where that is not one number."""
    scale: float | None = None
    """The loss scale of automatic mixed precision; None without a GradScaler."""
    skipped: bool = False
    """Whether the GradScaler left this step out."""
    gradient: str = "true"
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Whatever else was logged for this step."""


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


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of gradient entries by sign and power of two, of one parameter or (parameter None) of all together.

    `positive[k]` counts entries in [2**(low+k), 2**(low+k+1)), `negative[k]` the same of their magnitude. Zeros, NaN,
    infinities and `underflow` (not zero, but below 2**-126) are kept apart. Large tensors are sampled: then the counts are
    of `sampled` entries out of `size`, and `error` is the largest standard error of any bin's share.
    """

    step: int
    parameter: str | None
    low: int
    negative: tuple[float, ...]
    positive: tuple[float, ...]
    zero: float
    nan: float
    inf: float
    underflow: float
    size: int
    sampled: int

    @property
    def error(self) -> float:
        """The largest standard error of a bin's share that sampling can cause; 0 where everything was counted."""
        return 0.0 if self.sampled >= self.size else 0.5 / self.sampled**0.5

    def bins(self) -> tuple[list[float], list[float]]:
        """Counts and ascending edges of the finite entries; the bin around 0 holds zeros and what underflowed.

        >>> Histogram(0, None, -1, negative=(3,), positive=(4,), zero=2, nan=0, inf=0, underflow=0, size=9, sampled=9).bins()
        ([3, 2, 4], [-1.0, -0.5, 0.5, 1.0])
        """
        magnitudes = [2.0**exponent for exponent in range(self.low, self.low + len(self.positive) + 1)]
        edges = [-edge for edge in reversed(magnitudes)] + magnitudes
        return [*reversed(self.negative), self.zero + self.underflow, *self.positive], edges

    def linear(self, bins: int = 101, covered: float = 0.99) -> tuple[list[float], list[float]]:
        """Counts and edges of equally wide bins centred on 0, for trackers that draw no others.

        The range is the smallest power of two that covers this share of the entries; the few beyond it are counted in the outer
        bins. Within a power of two the entries are spread evenly.
        """
        reach = self._reach(covered)
        width = 2 * reach / bins
        edges = [-reach + width * index for index in range(bins)] + [reach]
        counts = [0.0] * bins
        counts[bins // 2] += self.zero + self.underflow
        for sign, tallies in ((-1, self.negative), (1, self.positive)):
            for index, tally in enumerate(tallies):
                _spread(counts, width, sign, 2.0 ** (self.low + index), tally)
        return counts, edges

    def _reach(self, covered: float) -> float:
        """The smallest power of two whose range around 0 holds this share of the finite entries."""
        total = sum(self.negative) + sum(self.positive)
        inside = 0.0
        for index, tally in enumerate(map(sum, zip(self.negative, self.positive, strict=True))):
            inside += tally
            if inside >= covered * total:
                return 2.0 ** (self.low + index + 1)
        return 1.0


def _spread(counts: list[float], width: float, sign: int, start: float, tally: float) -> None:
    """Add entries spread evenly over sign * [start, 2 * start) to bins of one width centred on 0."""
    middle, outermost = len(counts) // 2, len(counts) - 1
    low, high = start / width + 0.5, 2 * start / width + 0.5  # in bins, from the left edge of the middle one
    for offset in range(int(low), int(high) + 1):
        share = max(0.0, min(high, offset + 1) - max(low, offset)) / (high - low)
        counts[min(max(middle + sign * offset, 0), outermost)] += tally * share


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number logged under a name of the user's."""

    step: int
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A judged fact: what, how bad, where, since when, why we say so, and what to do."""

    code: str
    name: str
    severity: str
    """ "warning" or "critical"."""
    parameters: tuple[str, ...]
    first_step: int
    evidence: str
    message: str
    recommendation: str
    fix: str
    diagnosis: "Diagnosis | None" = None
    """The guilty operation and the guilty samples, where the step was diagnosed when it happened."""
    incident: str | None = None
    """The folder that the flight recorder wrote for it, as a path inside the run directory."""


@dataclass(frozen=True, slots=True)
class SampleScore:
    """<direction, g_i> of one training sample at one step. Positive helps the target."""

    step: int
    sample_id: int | str
    domain: str | None
    target: str
    score: float
    lr: float | None
    clip_coef: float | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of Gradsight's own that training survived: said once, counted, shown in the report."""

    key: str
    message: str
    first_step: int
    count: int


@dataclass(frozen=True, slots=True)
class DumpMetadata:
    """What a gradient dump holds, known without opening its tensors."""

    step: int
    kind: str
    """ "full" or "sampled"."""
    world_size: int
    gradient: str
    """What the values are: "true", as in Step, or else what is different."""
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype by parameter name; of a sampled dump, the shape of the rows that were kept."""
    parameters: tuple[str, ...]
    """All parameter names of the model, also of those without a gradient."""
    bytes: int
    created: float
    """Seconds since the epoch."""
    reason: str = "schedule"
    clip_coef: float | None = None
    scale: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Gradients that could not be had whole, and why."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A bundle that the flight recorder wrote: a folder of the run directory."""

    step: int
    code: str
    """The finding's, or "exception", or "SIGTERM"."""
    path: str
    reason: str = ""
    """What happened, in one line."""
    diagnosis: "Diagnosis | None" = None
    """Of all ranks together; None where nothing was diagnosed."""
    replayable: bool = False
    """Whether the batch is in it, so that `gradsight replay` can run it again."""
    damage: str | None = None
    """Why it cannot be read, where it cannot."""


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
    """The first operation of a step with finite inputs and a non-finite output, deliberate fills apart."""

    operation: str
    """As torch names it: "log", "div", "to(float16)"; or what was not finite beforehand: "input", "parameter", "buffer"."""
    phase: str
    """ "forward", "backward", "loss" (outside the model, between its outputs and backward()), or "before" it."""
    module: str | None
    """The model's own dotted name of the innermost module it ran in."""
    place: str | None
    """File and line of the user's source."""
    source: str | None
    """The text of that line."""
    inputs: tuple[TensorSummary, ...]
    micro_batch: int
    detail: str = ""
    """What else is known: the argument and its rows, the names of parameters, how sure a guess is."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class GuiltySample:
    """One sample of the bad step and its part in it."""

    row: int
    """Its row in its micro-batch."""
    sample_id: int | str | None
    micro_batch: int
    rank: int
    norm: float
    """The exact norm of the sample's own share of the gradient; NaN or infinite where that is not finite."""
    share: float | None
    """Its part of the sum of squared norms over the step's samples; None where that is not finite."""


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
    """How many passes the step had."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak of live tensor bytes of some work, and what those bytes were at that moment."""

    peak_bytes: int
    by_kind: Mapping[str, int]
    """Bytes at the peak: parameters, gradients, optimizer, activations, temporaries, inputs. Their sum is peak_bytes."""
    device: str = "cpu"
    predicted: bool = False
    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention while the work ran."""
    operator_bytes: int | None = None
    """What operators used inside themselves on top of peak_bytes; None where that was not looked at."""
    notes: tuple[str, ...] = ()
    """What this number does not know."""

    @property
    def activation_share(self) -> float:
        """Share of the peak that activations are: no activation checkpointing can save more.

        >>> MemoryUse(400, {"activations": 100, "parameters": 300}).activation_share
        0.25
        """
        return self.by_kind.get("activations", 0) / self.peak_bytes if self.peak_bytes else 0.0


@dataclass(frozen=True, slots=True)
class CheckpointingReport:
    """A plain step against a checkpointed one: memory, work, and whether anything else changed."""

    policy: str
    baseline: MemoryUse
    optimized: MemoryUse
    gradients_identical: bool
    """Whether loss, gradients, buffers and every random state are bit for bit those of the plain step."""
    first_difference: str | None = None
    """The first tensor that is not, and the module whose recomputation went another way."""
    cause: str | None = None
    """The likely cause of the difference, and what to do about it."""

    @property
    def baseline_bytes(self) -> int:
        return self.baseline.peak_bytes

    @property
    def optimized_bytes(self) -> int:
        return self.optimized.peak_bytes

    @property
    def reduction(self) -> float:
        """Share of the plain peak that checkpointing saved; negative where it cost memory."""
        return 1 - self.optimized_bytes / self.baseline_bytes if self.baseline_bytes else 0.0

    @property
    def ceiling(self) -> float:
        """Share of the plain peak that activations are."""
        return self.baseline.activation_share

    @property
    def extra_flops(self) -> float:
        """Recomputation as a share of the plain step's floating-point operations."""
        return self.optimized.flops / self.baseline.flops - 1 if self.baseline.flops else 0.0

    @property
    def passed(self) -> bool:
        """Memory went down and nothing else changed."""
        return self.gradients_identical and self.optimized_bytes < self.baseline_bytes

    @property
    def remark(self) -> str:
        """How the reduction compares with the usual 20 to 40 percent, and why it is not there."""
        share, low, high = self.reduction, 0.2, 0.4
        if low <= share <= high:
            return f"Memory reduction ({share:.1%}) is within expected range (20-40%)"
        if share <= 0:
            return f"Memory was not reduced ({share:.1%}): activations are {self.ceiling:.1%} of the baseline's peak"
        side, only = ("below", "only ") if share < low else ("above", "")
        return (
            f"Memory reduction ({share:.1%}) is {side} the usual range (20-40%): "
            f"activations are {only}{self.ceiling:.1%} of the baseline's peak"
        )

    def scalars(self) -> dict[str, float]:
        """The verification as numbers for a run's record."""
        return {
            "checkpointing/baseline_gb": self.baseline_bytes / 1e9,
            "checkpointing/optimized_gb": self.optimized_bytes / 1e9,
            "checkpointing/reduction": self.reduction,
            "checkpointing/ceiling": self.ceiling,
            "checkpointing/extra_flops": self.extra_flops,
            "checkpointing/gradients_identical": float(self.gradients_identical),
            "checkpointing/passed": float(self.passed),
        }


@dataclass(frozen=True, slots=True)
class CheckpointingPlan:
    """A choice of what every block recomputes, made for a memory budget; apply_checkpointing takes it as its policy."""

    policy: str
    """The choice as text, for example "full:0-5,selective:6-10"; apply_checkpointing takes that too."""
    blocks: tuple[str, ...]
    """The blocks that the numbers in the policy count, by module name."""
    predicted_bytes: int
    extra_flops: float
    """Recomputation as a share of the plain step's floating-point operations."""
    budget_bytes: int
    baseline_bytes: int
    """The predicted peak without any checkpointing."""
    device: str = "cpu"
