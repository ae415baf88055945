"""The losses of train, val and test."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight.core.sharing import reshard
from gradsight.train.batches import BatchStream, spread_evenly
from gradsight.train.data import SPLITS
from gradsight.train.processes import Processes


class NextTokenLoss:
    """The mean cross-entropy of the next token, computed in the wanted type."""

    def __init__(self, train_dtype: str, device: torch.device) -> None:
        self._autocast = {
            "device_type": device.type,
            "dtype": torch.bfloat16,
            "enabled": train_dtype == "bfloat16",
        }

    def __call__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean over rows of inputs and targets; a third tensor says how much each counts."""
        if len(batch) > 2:
            return (self.by_row(model, batch) * batch[2]).mean()
        # One call with its own mean: --ghost_mode concat splits it into training and validation.
        return F.cross_entropy(self._logits(model, batch), batch[1])

    def by_row(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of each row."""
        return F.cross_entropy(self._logits(model, batch), batch[1], reduction="none").mean(1)

    def _logits(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The model's logits [rows, vocabulary, tokens]."""
        with torch.autocast(**self._autocast):  # type: ignore[arg-type]
            logits: Tensor = model(input_ids=batch[0]).logits
        return logits.float().transpose(1, 2)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: NextTokenLoss,
    batches: BatchStream,
    wanted: int,
    processes: Processes,
) -> dict[str, float | None]:
    """The mean loss of up to `wanted` samples of each split; None for a split without samples."""
    was_training = model.training
    model.eval()
    losses: dict[str, float | None] = {}
    for split in SPLITS:
        samples = batches.samples.of(split)
        rows = spread_evenly(len(samples), wanted)
        total = torch.zeros((), device=processes.device)
        at_once = batches.batch_size * processes.world
        for start in range(0, len(rows), at_once):
            mine = rows[start : start + at_once][processes.rank :: processes.world]
            # A sharded model needs every process: one without rows of its own computes another's
            # and does not count it.
            batch = batches.make(samples, mine or rows[:1])
            total += loss.by_row(model, batch.for_loss).sum() * bool(mine)
        summed = float(processes.sum(total))
        losses[f"{split}_loss"] = summed / len(rows) if rows else None
    model.train(was_training)
    # fully_shard keeps the outermost parameters whole for a backward pass, and none follows.
    reshard(model)
    return losses
