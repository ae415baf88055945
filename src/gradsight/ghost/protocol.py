"""The batch-wise protocol of training loops that build their own forward pass, in either mode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradsight.errors import UsageError
from gradsight.ghost.concat import Concatenation

if TYPE_CHECKING:
    from gradsight.ghost.engine import GhostEngine


class BatchProtocol:
    """attach -> prepare_forward_input -> forward and backward -> prepare_gradients -> optimizer
    step -> aggregate_and_log.
    """

    def __init__(self, engine: "GhostEngine") -> None:
        self._engine = engine
        self._stage = "idle"
        self._ids: list[int | str] = []
        self.iteration = 0

    def attach(
        self, x: Any, y: Any, iteration: int, batch_idx: int | Sequence[int | str] | Tensor
    ) -> None:
        """Announce a batch; batch_idx is the number of the batch, or the sample ids."""
        self._expect("idle", "attach_train_batch")
        if not isinstance(x, Tensor) or x.dim() == 0:
            raise UsageError(
                "attach_train_batch(X, Y, ...): expected X to be a tensor with one row per sample"
            )
        self._ids = _identities(batch_idx, x.shape[0])
        self.iteration = iteration
        self._stage = "attached"

    def forward_input(self, x: Any, y: Any) -> tuple[Any, Any]:
        """What to run the model on; from here to prepare_gradients() the pass is observed."""
        self._expect("attached", "prepare_forward_input")
        self._stage = "idle"
        if len(x) != len(self._ids):
            raise UsageError(
                f"prepare_forward_input got {len(x)} rows, attach_train_batch {len(self._ids)}"
            )
        if self._engine.mode == "concat":
            joined: Concatenation = self._engine.concatenation()
            x, y = joined.join(x, y)
            self._engine.begin(joined.total, self.iteration, joined)
        else:
            self._engine.begin(len(self._ids), self.iteration)
        self._stage = "forward"
        return x, y

    def gradients(self) -> None:
        """After backward: .grad is the training gradient, and the scores are taken."""
        self._expect("forward", "prepare_gradients")
        self._stage = "idle"
        self._engine.end(self._ids, None)
        self._stage = "scored"

    def aggregate(self) -> None:
        """After the optimizer's step: hand the scores over and let go of the step."""
        self._expect("scored", "aggregate_and_log")
        self._stage = "idle"
        self._ids = []
        self._engine.finish_step(self.iteration)

    def _expect(self, stage: str, call: str) -> None:
        order = {
            "idle": "attach_train_batch",
            "attached": "prepare_forward_input",
            "forward": "prepare_gradients",
        }
        if self._stage != stage:
            due = order.get(self._stage, "aggregate_and_log")
            stuck, self._stage = self._stage, "idle"
            if stuck == "forward":
                self._engine.abandon()
            raise UsageError(
                f"{call}() was called out of order: {due}() is due. The step is given up; begin with attach_train_batch()."
            )


def _identities(batch_idx: int | Sequence[int | str] | Tensor, rows: int) -> list[int | str]:
    """Sample ids: as given, or "batch:row" from the number of the batch."""
    if isinstance(batch_idx, Tensor):
        batch_idx = batch_idx.tolist()
    if isinstance(batch_idx, int):
        return [f"{batch_idx}:{row}" for row in range(rows)]
    if len(batch_idx) != rows:
        raise UsageError(
            f"expected one sample id per row: {rows} rows, got {len(batch_idx)} ids in batch_idx"
        )
    return list(batch_idx)
