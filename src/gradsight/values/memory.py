"""Peaks of memory, what checkpointing does to them, and plans for it. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradsight.values.notebook import html_card
from gradsight.values.sizes import format_size

# A GPT of 124M parameters with AdamW saves 35%; of 6.6B only 14%, for there it is weights and
# optimizer that fill the memory.
USUAL_LEAST = 0.2
USUAL_MOST = 0.4
"""The share of the plain peak that checkpointing usually saves."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak of live tensor bytes of some work, and what those bytes were at that moment."""

    peak_bytes: int
    by_kind: Mapping[str, int]
    """Bytes at the peak: parameters, gradients, optimizer, activations, temporaries, inputs.

    On several devices also gathered (parameters of FSDP2) and buckets (in which gradients are
    reduced). Their sum is peak_bytes.
    """
    device: str = "cpu"
    predicted: bool = False
    flops: int = 0
    """Floating-point operations of matrix products, convolutions and attention in the work."""
    operator_bytes: int | None = None
    """Bytes that CUDA's allocator held beyond the tensors seen; None elsewhere."""
    notes: tuple[str, ...] = ()
    """What this number does not know."""
    assumptions: tuple[str, ...] = ()
    """What was assumed about values; empty where the number is exact."""
    bounds: tuple[int, int] | None = None
    """The peaks with an even load and with almost all tokens at one expert, the lower one first.

    None where routing does not change the peak.
    """

    @property
    def activation_share(self) -> float:
        """Share of the peak that activations are: no activation checkpointing can save more.

        >>> MemoryUse(400, {"activations": 100, "parameters": 300}).activation_share
        0.25
        """
        if self.peak_bytes == 0:
            return 0.0
        return self.by_kind.get("activations", 0) / self.peak_bytes

    def _repr_html_(self) -> str:
        """For notebooks: the peak and its parts."""
        how = "predicted" if self.predicted else "measured"
        title = f"Peak {format_size(self.peak_bytes)}, {how} on {self.device}"
        rows = [
            (kind, format_size(size), f"{size / max(1, self.peak_bytes):.0%}")
            for kind, size in sorted(self.by_kind.items(), key=lambda pair: -pair[1])
        ]
        return html_card(title, rows, ("kind", "size", "share"), " ".join(self.notes))


@dataclass(frozen=True, slots=True)
class CheckpointingReport:
    """A plain step against a checkpointed one: memory, work, and whether anything else changed."""

    policy: str
    baseline: MemoryUse
    optimized: MemoryUse
    gradients_identical: bool
    """Whether loss, gradients, buffers and random states are bit for bit the plain step's."""
    first_difference: str | None = None
    """The first tensor that is not, and the module whose recomputation went another way."""
    cause: str | None = None
    """The likely cause of the difference, or of no savings, and what to do about it."""

    @property
    def baseline_bytes(self) -> int:
        return self.baseline.peak_bytes

    @property
    def optimized_bytes(self) -> int:
        return self.optimized.peak_bytes

    @property
    def reduction(self) -> float:
        """Share of the plain peak that checkpointing saved; negative where it cost memory."""
        if self.baseline_bytes == 0:
            return 0.0
        return 1 - self.optimized_bytes / self.baseline_bytes

    @property
    def ceiling(self) -> float:
        """Share of the plain peak that activations are."""
        return self.baseline.activation_share

    @property
    def extra_flops(self) -> float:
        """Recomputation as a share of the plain step's floating-point operations."""
        if self.baseline.flops == 0:
            return 0.0
        return self.optimized.flops / self.baseline.flops - 1

    @property
    def passed(self) -> bool:
        """Memory went down and nothing else changed."""
        return self.gradients_identical and self.optimized_bytes < self.baseline_bytes

    @property
    def remark(self) -> str:
        """How the reduction compares with the usual 20 to 40 percent, and why it is not there."""
        share = self.reduction
        if USUAL_LEAST <= share <= USUAL_MOST:
            return f"Memory reduction ({share:.1%}) is within expected range (20-40%)"
        if share <= 0:
            return (
                f"Memory was not reduced ({share:.1%}): "
                f"activations are {self.ceiling:.1%} of the baseline's peak"
            )
        if share < USUAL_LEAST:
            return (
                f"Memory reduction ({share:.1%}) is below the usual range (20-40%): "
                f"activations are only {self.ceiling:.1%} of the baseline's peak"
            )
        return (
            f"Memory reduction ({share:.1%}) is above the usual range (20-40%): "
            f"activations are {self.ceiling:.1%} of the baseline's peak"
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

    def kind_scalars(self) -> dict[str, float]:
        """The bytes of both peaks by kind, for a run's record.

        >>> use = MemoryUse(3_000_000, {"inputs": 3_000_000})
        >>> CheckpointingReport("full", use, use, True).kind_scalars()
        {'checkpointing/plain/inputs_gb': 0.003, 'checkpointing/optimized/inputs_gb': 0.003}
        """
        named = {"plain": self.baseline, "optimized": self.optimized}
        return {
            f"checkpointing/{which}/{kind}_gb": size / 1e9
            for which, use in named.items()
            for kind, size in use.by_kind.items()
        }


@dataclass(frozen=True, slots=True)
class CheckpointingPlan:
    """What every block recomputes to fit a budget; apply_checkpointing takes it as its policy."""

    policy: str
    """The choice as text, such as "full:0-5,selective:6-10"; apply_checkpointing takes that too."""
    blocks: tuple[str, ...]
    """The blocks that the numbers in the policy count, by module name."""
    predicted_bytes: int
    extra_flops: float
    """Recomputation as a share of the plain step's floating-point operations."""
    budget_bytes: int
    baseline_bytes: int
    """The predicted peak without any checkpointing."""
    device: str = "cpu"
