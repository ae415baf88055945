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
from gradsight.train.batches import make_batch, spread_evenly
from gradsight.train.data import SPLITS
from gradsight.train.processes import Processes
from gradsight.train.samples import Samples


class NextTokenLoss:
    """The mean cross-entropy of the next token, computed in the wanted type."""

    def __init__(self, train_dtype: str, device: torch.device) -> None:
        self._autocast = {
            "device_type": device.type,
            "dtype": torch.bfloat16,
            "enabled": train_dtype == "bfloat16",
        }

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.by_row(model, batch).mean()

    def by_row(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss of each row."""
        inputs, targets = batch
        with torch.autocast(**self._autocast):  # type: ignore[arg-type]
            logits = model(input_ids=inputs).logits
        return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").mean(1)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: NextTokenLoss,
    samples: Samples,
    wanted: int,
    batch_size: int,
    vocabulary: int,
    processes: Processes,
) -> dict[str, float | None]:
    """The mean loss of up to `wanted` samples of each split, evenly spaced; None for a split
    without samples.
    """
    was_training = model.training
    model.eval()
    found = {}
    for split in SPLITS:
        part = samples.of(split)
        rows = spread_evenly(len(part), wanted)
        total = torch.zeros((), device=processes.device)
        at_once = batch_size * processes.world
        for start in range(0, len(rows), at_once):
            mine = rows[start : start + at_once][processes.rank :: processes.world]
            batch = make_batch(
                part, mine or rows[:1], vocabulary, processes.device
            )  # a sharded model needs every process
            total += loss.by_row(model, batch.pair).sum() * bool(mine)
        found[f"{split}_loss"] = float(processes.sum(total)) / len(rows) if rows else None
    model.train(was_training)
    reshard(model)
    return found


class TrainingLog:
    """training_log.json: one object per evaluation, rewritten whole or not at all; NaN is null."""

    def __init__(self, run_dir: Path, up_to: int, problems: RunProblems) -> None:
        self._problems = problems
        self._file = run_dir / rundir.TRAINING_LOG
        self.entries = [entry for entry in _read(self._file) if entry["step"] <= up_to]

    def add(self, entry: dict[str, Any]) -> None:
        """One evaluation; it replaces an earlier one of the same step."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entry.items()
        }
        self.entries = [known for known in self.entries if known["step"] != entry["step"]] + [plain]
        try:
            write_text(self._file, json.dumps(self.entries, indent=1) + "\n")
        except OSError as error:
            text = f"{self._file} cannot be written: {error.strerror}. Training goes on"
            self._problems.report("training-log", text, entry["step"])


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
