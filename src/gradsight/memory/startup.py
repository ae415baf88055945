"""The report on memory before a training starts."""

from collections.abc import Callable
from dataclasses import dataclass

from gradsight.memory.monitor import available_memory
from gradsight.memory.predict import largest_batch, model_facts, predict_peak_memory
from gradsight.memory.workload import Build
from gradsight.values.memory import CheckpointingPlan, MemoryUse
from gradsight.values.sizes import format_size

HEADROOM = 0.9
"""The share of the memory that a recommended batch may use."""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Device, parameters, expected peak and the batch size that would fit; str() is the text."""

    device: str
    parameters: int
    batch_size: int
    expected: MemoryUse
    policy: str | None
    memory_bytes: int | None
    recommended_batch_size: int | None
    samples: int | None = None
    """Samples that there are in all, where that is known: no batch need be larger."""

    @property
    def fits(self) -> bool:
        """Whether the expected peak is within the memory; True where the memory is unknown."""
        return self.memory_bytes is None or self.expected.peak_bytes <= self.memory_bytes

    def __str__(self) -> str:
        available = "unknown" if self.memory_bytes is None else format_size(self.memory_bytes)
        lines = [
            f"Device: {self.device}, memory available: {available}",
            f"Parameters: {self.parameters:,}",
            f"Expected peak memory: {format_size(self.expected.peak_bytes)} "
            f"at batch size {self.batch_size} ({self._largest_kinds()})",
        ]
        if self.policy:
            lines.append(f"✓ Gradient checkpointing: ENABLED ({self.policy})")
        else:
            lines.append("✗ Gradient checkpointing: DISABLED")
        if self.recommended_batch_size is not None:
            lines.append(f"Recommended batch size: {self._recommendation()}")
        if not self.fits:
            lines.append("! The expected peak is above the available memory")
        return "\n".join(lines)

    def _largest_kinds(self) -> str:
        """The three kinds of bytes that make most of the peak."""
        kinds = sorted(self.expected.by_kind.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds[:3] if size)

    def _recommendation(self) -> str:
        if self.recommended_batch_size:
            if self.samples is not None and self.samples <= self.recommended_batch_size:
                return f"any: all {self.samples:,} samples fit in one batch"
            share = f"uses {HEADROOM:.0%} of the available memory"
            return f"at most {self.recommended_batch_size} ({share})"
        return (
            "none: not even one sample fits; checkpoint more, or take a smaller model or a "
            "shorter sequence"
        )


def startup_report(
    build_for: Callable[[int], Build],
    batch_size: int,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    memory: int | None = None,
) -> StartupReport:
    """Predict what training will take; `build_for(size)` is the build function for that batch size.

    `memory` is by default what is available now on the device; where that is unknown, no batch size
    is recommended.
    """
    if memory is None:
        memory = available_memory(device)
    parameters = model_facts(build_for(1)).parameters
    expected = predict_peak_memory(
        build_for(batch_size), policy=policy, optimizer=optimizer, device=device
    )
    recommended = None
    if memory is not None:
        recommended = largest_batch(
            build_for, int(HEADROOM * memory), policy=policy, optimizer=optimizer, device=device
        )
    if isinstance(policy, CheckpointingPlan):
        policy = policy.policy
    if policy == "none":
        policy = None
    return StartupReport(device, parameters, batch_size, expected, policy, memory, recommended)
