"""The losses of train, val and test, and the file they are kept in."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight.core import rundir
from gradsight.core.files import write_text
from gradsight.core.sharing import reshard
from gradsight.errors import RunError
from gradsight.store.run_problems import RunProblems
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
        losses = self.by_row(model, batch)
        if len(batch) > 2:
            losses = losses * batch[2]
        return losses.mean()

    def by_row(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of each row."""
        inputs, targets = batch[:2]
        with torch.autocast(**self._autocast):  # type: ignore[arg-type]
            logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(1)


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


class TrainingLog:
    """training_log.json: one object per evaluation, rewritten whole or not at all; NaN is null."""

    def __init__(self, run_dir: Path, up_to: int, problems: RunProblems) -> None:
        self._problems = problems
        self._file = run_dir / rundir.TRAINING_LOG
        self.entries = [entry for entry in _read(self._file) if entry["step"] <= up_to]

    def add(self, entry: dict[str, Any]) -> None:
        """One evaluation; it replaces an earlier one of the same step."""
        plain = {name: _finite(value) for name, value in entry.items()}
        earlier = [known for known in self.entries if known["step"] != entry["step"]]
        self.entries = [*earlier, plain]
        try:
            write_text(self._file, json.dumps(self.entries, indent=1) + "\n")
        except OSError as error:
            text = f"{self._file} cannot be written: {error.strerror}. Training goes on"
            self._problems.report("training-log", text, entry["step"])


def _finite(value: Any) -> Any:
    """The value; None for NaN and Inf, which JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read(file: Path) -> list[dict[str, Any]]:
    """The evaluations of a run that is resumed."""
    if not file.is_file():
        return []
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} cannot be read: {error}. Move it away to go on without what it holds"
        ) from error
    return entries
