"""What a step is predicted for: checkpointing, optimizer, device, and how many devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradsight.errors import UsageError
from gradsight.values.memory import CheckpointingPlan

PARALLEL = ("ddp", "fsdp2")


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many devices train the model, and how they share it."""

    count: int = 1
    parallel: str | None = None
    """"ddp" or "fsdp2"; None on one device."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"the number of devices must be 1 or more, got {self.count}")
        if self.parallel is not None and self.parallel not in PARALLEL:
            known = ", ".join(PARALLEL)
            raise UsageError(f"unknown way to train in parallel {self.parallel!r}; known: {known}")
        if (self.parallel is None) != (self.count == 1):
            raise UsageError(
                f"{self.count} devices and parallel={self.parallel!r}: several devices need one "
                f"of {', '.join(PARALLEL)}, and one device none"
            )


ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class StepSetting:
    """The circumstances of a predicted step; the defaults are those of `predict_peak_memory`."""

    policy: str | CheckpointingPlan | None = None
    optimizer: str | None = "adamw"
    device: str = "cpu"
    blocks: Sequence[str] | None = None
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        # Here, since it imports torch, which the command's options have to do without.
        from gradsight.memory.cuda import SIMULATED

        if self.device not in SIMULATED:
            known = ", ".join(SIMULATED)
            raise UsageError(f"device must be one of {known}, got {self.device!r}")
        sharded = self.ranks.parallel == "fsdp2"
        if self.policy is None and self.blocks is not None and not sharded:
            raise UsageError(
                "blocks are those that a policy recomputes, and policy=None recomputes nothing: "
                "give for example policy='full', or leave blocks out"
            )
