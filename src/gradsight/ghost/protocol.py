"""The batch-wise protocol of training loops that build their own forward pass, in either mode."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

from torch import Tensor

from gradsight.core.function_modes import take_off_ended
from gradsight.errors import UsageError
from gradsight.ghost.arguments import checked_ids
from gradsight.ghost.blocks import BlockScorer
from gradsight.ghost.training_passes import TrainingPasses
from gradsight.values.whole_numbers import whole_number

ORDER = {
    "idle": "attach_train_batch",
    "attached": "prepare_forward_input",
    "forward": "prepare_gradients",
    "scored": "aggregate_and_log",
}
"""The call that is due in each stage of a step."""


class BatchProtocol:
    """Keeps the order: attach, forward input, the user's pass, gradients, optimizer, aggregate.

    A call that fails or comes out of order gives the step up.
    """

    def __init__(self, blocks: BlockScorer, passes: TrainingPasses) -> None:
        self._blocks = blocks
        self._passes = passes
        self._stage = "idle"
        self._ids: list[int | str] = []
        self._domains: list[str | None] | None = None
        self._iteration = 0

    def attach(
        self,
        x: Any,
        iteration: int,
        batch_idx: int | Sequence[int | str] | Tensor,
        domains: Sequence[str | None] | None,
    ) -> None:
        """Announce a batch; batch_idx is the number of the batch, or the sample ids."""
        if self._stage == "forward" and not self._blocks.is_open:
            self._stage = "idle"  # the last step was refused on its way
        take_off_ended()
        another_micro_batch = self._stage == "scored" and iteration == self._iteration
        if not another_micro_batch:
            self._expect("idle", "attach_train_batch")
        if not isinstance(x, Tensor) or x.dim() == 0:
            raise UsageError(
                "attach_train_batch(X, Y, ...): expected X to be a tensor with one row per sample"
            )
        self._ids = _identities(batch_idx, x.shape[0])
        self._domains = None if domains is None else list(domains)
        self._iteration = whole_number(iteration, "iteration")
        self._stage = "attached"

    def forward_input(self, x: Any, y: Any) -> tuple[Any, Any]:
        """What to run the model on; from here to prepare_gradients() the pass is observed."""
        self._expect("attached", "prepare_forward_input")
        self._stage = "idle"
        if len(x) != len(self._ids):
            raise UsageError(
                f"prepare_forward_input got {len(x)} rows, attach_train_batch {len(self._ids)}"
            )
        joined = self._passes.joined_pair(x, y, self._iteration)
        if joined is None:
            self._blocks.begin(len(self._ids), self._iteration)
        else:
            x, y = joined.rows
            self._blocks.begin_joined(joined.parts, self._iteration, splits_loss=True)
        self._stage = "forward"
        return x, y

    def gradients(self) -> None:
        """After backward: .grad is the training gradient, and the scores are taken."""
        self._expect("forward", "prepare_gradients")
        self._stage = "idle"
        self._blocks.end(self._ids, self._domains)
        self._stage = "scored"

    def aggregate(self) -> None:
        """After the optimizer's step: hand the scores over and let go of the step."""
        self._expect("scored", "aggregate_and_log")
        self._stage = "idle"
        self._ids = []
        self._domains = None
        self._blocks.finish_step(self._iteration)

    def _expect(self, stage: str, call: str) -> None:
        if self._stage == stage:
            return
        due = ORDER[self._stage]
        if self._stage == "forward":
            self._blocks.abandon()
        self._stage = "idle"
        raise UsageError(
            f"{call}() was called out of order: {due}() is due. The step is given up; begin with "
            "attach_train_batch()."
        )


def _identities(batch_idx: int | Sequence[int | str] | Tensor, rows: int) -> list[int | str]:
    """Sample ids: as given, or "batch:row" from the number of the batch."""
    if isinstance(batch_idx, Tensor):
        batch_idx = batch_idx.tolist()
    if isinstance(batch_idx, SupportsIndex):
        number = whole_number(batch_idx, "batch_idx")
        return [f"{number}:{row}" for row in range(rows)]
    ids = checked_ids(batch_idx, "batch_idx")
    if len(ids) != rows:
        raise UsageError(
            f"expected one sample id per row: {rows} rows, got {len(ids)} ids in batch_idx"
        )
    return ids
