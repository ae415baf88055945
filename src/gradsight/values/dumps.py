"""What a gradient dump holds. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """Shape and dtype by parameter name; of a sampled dump, of the rows that were kept."""
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
