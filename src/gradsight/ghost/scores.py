"""The scores of an observed block, and the report of a comparison with the twin."""

from dataclasses import dataclass

from torch import Tensor

from gradsight.errors import UsageError


@dataclass(frozen=True)
class Scores:
    """<direction, g_i> of every sample of one block, by target. Positive helps the target.

    g_i is sample i's share of the gradient: of the mean over the global batch, unscaled and before
    clipping. So the scores of all blocks and processes of a step sum to <direction, the gradient>.
    """

    step: int
    sample_ids: list[int | str]
    by_target: dict[str, Tensor]
    by_target_and_parameter: dict[str, dict[str, Tensor]]
    """Filled with per_parameter=True."""
    direction: str
    """ "plain", or "adam" where the direction is scaled by the optimizer's second moments."""
    mode: str = "two_pass"
    """ "concat" where training and validation rows went through one pass, else "two_pass"."""

    @property
    def total(self) -> Tensor:
        """The scores along the only target."""
        return self.by_target[self._only_target()]

    @property
    def by_parameter(self) -> dict[str, Tensor]:
        """Each trainable parameter's part of the scores along the only target."""
        if not self.by_target_and_parameter:
            raise UsageError(
                "scores by parameter are kept with GhostEngine(..., per_parameter=True)"
            )
        return self.by_target_and_parameter[self._only_target()]

    def _only_target(self) -> str:
        if len(self.by_target) != 1:
            raise UsageError(
                f"there are {len(self.by_target)} targets ({', '.join(self.by_target)}): use "
                "by_target or by_target_and_parameter"
            )
        return next(iter(self.by_target))


@dataclass(frozen=True)
class VerifyReport:
    """The engine's scores of a batch against those of the slow exact twin."""

    max_relative_error: float
    """max |difference| / max |score|, over all samples and targets."""
    tolerance: float
    """What rounding in the model's type may cause."""
    engine: dict[str, Tensor]
    twin: dict[str, Tensor]

    @property
    def passed(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.max_relative_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        error, limit = f"{self.max_relative_error:.1e}", f"{self.tolerance:.0e}"
        return f"{verdict}: largest relative error {error} (tolerance {limit})"
