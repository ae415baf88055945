"""What a trainer says about memory before it starts."""

from collections.abc import Callable
from dataclasses import dataclass

from gradsight.memory.available import available_memory
from gradsight.memory.fake import fake_tensors
from gradsight.memory.largest_batch import largest_batch
from gradsight.memory.predict import predict_peak_memory
from gradsight.memory.workload import Build, call_build
from gradsight.values.memory import CheckpointingPlan, MemoryUse
from gradsight.values.sizes import format_size

HEADROOM = 0.9
"""The share of the memory that a recommended batch may use."""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Device, parameters, expected peak, checkpointing and the batch size that would fit; str() is
    the text.
    """

    device: str
    parameters: int
    batch_size: int
    expected: MemoryUse
    policy: str | None
    memory_bytes: int | None
    recommended_batch_size: int | None

    @property
    def fits(self) -> bool:
        """Whether the expected peak is within the memory; True where the memory is unknown."""
        return self.memory_bytes is None or self.expected.peak_bytes <= self.memory_bytes

    def __str__(self) -> str:
        available = "unknown" if self.memory_bytes is None else format_size(self.memory_bytes)
        kinds = sorted(self.expected.by_kind.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds[:3] if size)
        lines = [
            f"Device: {self.device}, memory available: {available}",
            f"Parameters: {self.parameters:,}",
            f"Expected peak memory: {format_size(self.expected.peak_bytes)} at batch size {self.batch_size} ({parts})",
            f"✓ Gradient checkpointing: ENABLED ({self.policy})"
            if self.policy
            else "✗ Gradient checkpointing: DISABLED",
        ]
        if self.recommended_batch_size is not None:
            lines.append(f"Recommended batch size: {self._recommendation()}")
        if not self.fits:
            lines.append("! The expected peak is above the available memory")
        return "\n".join(lines)

    def _recommendation(self) -> str:
        if self.recommended_batch_size:
            return f"at most {self.recommended_batch_size} (uses {HEADROOM:.0%} of the available memory)"
        return "none: not even one sample fits; checkpoint more, or take a smaller model or a shorter sequence"


def startup_report(
    build_for: Callable[[int], Build],
    batch_size: int,
    *,
    policy: str | CheckpointingPlan | None = None,
    optimizer: str | None = "adamw",
    device: str = "cpu",
    memory: int | None = None,
) -> StartupReport:
    """Predict what training will take; `build_for(size)` is the build function for a batch of that
    size.

    `memory` is by default what is available now on the device; where that is unknown, no batch size is recommended.
    """
    memory = available_memory(device) if memory is None else memory
    with fake_tensors():
        parameters = sum(p.numel() for p in call_build(build_for(1)).model.parameters())
    expected = predict_peak_memory(
        build_for(batch_size), policy=policy, optimizer=optimizer, device=device
    )
    recommended = None
    if memory is not None:
        room = int(HEADROOM * memory)
        recommended = largest_batch(
            build_for, room, policy=policy, optimizer=optimizer, device=device
        )
    text = policy.policy if isinstance(policy, CheckpointingPlan) else policy
    return StartupReport(
        device,
        parameters,
        batch_size,
        expected,
        None if text == "none" else text,
        memory,
        recommended,
    )
