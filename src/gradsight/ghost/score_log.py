"""The scores of a run: which step they belong to, what the optimizer did, when they go to disk."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradsight.core import moments
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_hook
from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.sharing import ModelGroup
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.prediction_check import LossHistory
from gradsight.ghost.step_count import StepCount
from gradsight.measure.clipping import ClipMeter, ClipReading
from gradsight.measure.host_copy import HostCopy
from gradsight.store.run_problems import RunProblems
from gradsight.store.score_folder import ScoreFolder
from gradsight.store.scores import ScoreFile, score_path
from gradsight.values.scores import SavedScore


@dataclass(slots=True)
class BlockScores:
    """The scores of one block: a table [targets, B], or by parameter [targets, parameters, B]."""

    step: int
    sample_ids: list[int | str]
    domains: list[str | None]
    table: HostCopy
    direction: str
    lr: float | HostCopy | None = None
    clip: ClipReading | None = None
    """Filled in when the optimizer steps."""


class PendingScores:
    """Scores by step, until they are saved or dropped."""

    def __init__(
        self, targets: tuple[str, ...], trainable: frozenset[str], format: ScoreFile
    ) -> None:
        self.format = format
        self.blocks: list[BlockScores] = []
        self._targets = targets
        self._trainable = trainable

    @property
    def are_on_their_way(self) -> bool:
        """Whether scores come from an accelerator."""
        return any(block.table.is_from_device for block in self.blocks)

    def take(self, before: int | None) -> list[BlockScores]:
        """Remove and return the blocks of all steps before the given one; None: of all steps."""
        due = [b for b in self.blocks if before is None or b.step < before]
        self.blocks = [b for b in self.blocks if before is not None and b.step >= before]
        return due

    def rows(self, blocks: Iterable[BlockScores]) -> list[SavedScore]:
        """The rows of these blocks. Waits for the device."""
        return [row for block in blocks for row in self._rows(block)]

    def drop(self, before: int) -> None:
        """Forget the steps before the given one."""
        self.blocks = [block for block in self.blocks if block.step >= before]

    def _rows(self, block: BlockScores) -> list[SavedScore]:
        clip_coef = None
        if block.clip is not None:
            clip_coef = block.clip.read()
        rows = []
        lr = block.lr.number() if isinstance(block.lr, HostCopy) else block.lr
        table = block.table.read()
        for number, target in enumerate(self._targets):
            values = table[number]
            by_parameter: list[Any] = [None] * len(block.sample_ids)
            if self.format.parameters is not None:
                by_parameter = [self._in_order(each) for each in values.T.tolist()]
                values = values.sum(0)
            columns = (block.sample_ids, block.domains, values.tolist(), by_parameter)
            for sample_id, domain, score, parts in zip(*columns, strict=True):
                rows.append(
                    SavedScore(
                        step=block.step,
                        sample_id=sample_id,
                        domain=domain,
                        target=target,
                        score=score,
                        lr=lr,
                        clip_coef=clip_coef,
                        by_parameter=parts,
                        direction=block.direction,
                    )
                )
        return rows

    def _in_order(self, values: list[float]) -> tuple[float | None, ...]:
        """One entry per parameter of the model; frozen ones have none."""
        given = iter(values)
        names = self.format.parameters or ()
        return tuple(next(given) if name in self._trainable else None for name in names)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Where scores are saved, and how often."""

    run_dir: Path | None
    interval: int
    """In steps."""
    start_step: int | None = None
    """The first step, where the user says it."""
    pickles: bool = False
    """Whether each file has a pickle of the same columns beside it."""


class ScoreLog:
    """The scores of a run by step, with learning rate and clipping, saved every so many steps."""

    def __init__(
        self,
        pending: PendingScores,
        history: LossHistory,
        group: ModelGroup,
        optimizer: Optimizer | None,
        saving: SaveOptions,
    ) -> None:
        self.pending = pending
        self.history = history
        self.saving = saving
        self._group = group
        self._optimizer = optimizer
        self._clip = ClipMeter()
        self._count = StepCount(saving.run_dir, saving.start_step, group, optimizer is not None)
        self._folder: ScoreFolder | None = None
        self._saved_before = 0
        self._thread: threading.Thread | None = None
        self._replaced = False
        self._listening = False
        self._called_by_scaler = False
        self._problems = RunProblems(saving.run_dir if group.rank == 0 else None)
        self.guard = Guard(self._problems, "scores", "scores no longer record clipping and steps")
        if optimizer is not None:
            put_hook(self.guard, optimizer.register_step_pre_hook, self._before_optimizer)
            put_hook(self.guard, optimizer.register_step_post_hook, self._after_optimizer)
        # With several processes the others may be gone when one ends: nothing is gathered then.
        if saving.run_dir is not None and group.size == 1:
            saving_last = Guard(self._problems, "last scores", "the last scores were not saved")
            at_exit = partial(saving_last.attempt, _SavesAtExit(self))
            atexit.register(at_exit)
            self.guard.at_end(atexit.unregister, at_exit)

    def step(self, given: int | None) -> int:
        """A block's step: as given, or as it is counted."""
        return self._count.of_block(given)

    @property
    def samples_before(self) -> int:
        """How many samples were scored before the first block, by all processes."""
        return 0 if self._count.first is None else self._count.first.samples

    def begin(self, step: int) -> None:
        """A block of this step begins: earlier steps are complete."""
        first = self._count.first
        if self._folder is None and first is not None and self._writes:
            assert self.saving.run_dir is not None
            start = first.replaced_from
            options = (self.saving.interval, self.saving.pickles)
            self._folder = ScoreFolder(self.saving.run_dir, start, *options)
        if self.saving.run_dir is None:
            self.pending.drop(step)
        else:
            self.save_finished(step)

    def add(self, block: BlockScores, totals: Tensor) -> None:
        """Keep a block's scores; `totals` is their table [targets, B]."""
        self._replace_earlier_scores()
        block.lr = self._learning_rate()
        self.pending.blocks.append(block)
        self.history.add_scores(block.step, totals.sum(1), block.lr)
        self._count.block_scored(block.step)

    @property
    def _writes(self) -> bool:
        """Whether this process writes files."""
        return self.saving.run_dir is not None and self._group.is_first

    def _replace_earlier_scores(self) -> None:
        """Forget what an earlier run saved for the steps that are made again."""
        # Not before a first block is scored: a model that is refused takes nothing away.
        first = self._count.first
        if self._replaced or first is None or self._folder is None:
            return
        self._replaced = True
        try:
            faults = self._folder.forget_from(first.replaced_from)
        except Exception as error:
            faults = [f"earlier scores could not be replaced: {type(error).__name__}: {error}"]
        for fault in faults:
            self._problems.report("damaged scores", fault, first.step)

    def look_at_gradients(self, parameters: ScoredParameters, scale: Tensor | None) -> None:
        """Remember the gradients as backward left them, to see what clipping makes of them."""
        if self._optimizer is None:
            return
        self._clip.after_backward(list(parameters.trainable.values()), scale)
        if scale is not None and not self._listening:
            # A step that a GradScaler leaves out calls no hook of the optimizer.
            self._listening = True
            moments.listen(self, self.guard)

    def save_finished(self, step: int) -> None:
        """Write the file that is due when this step begins; training survives a failure."""
        due = step - step % self.saving.interval
        if self.saving.run_dir is None or due <= self._saved_before:
            return
        self._saved_before = due
        if self._group.size > 1 or not self.pending.are_on_their_way:
            self._attempt(step, self._save, due)
            return
        # In a thread of its own: neither the device nor the disk is waited for.
        self._finish_writing()
        blocks = self.pending.take(due)
        write = partial(self.guard.attempt, self._attempt, step, self._write_blocks, due, blocks)
        self._thread = threading.Thread(target=write, name="gradsight-scores", daemon=True)
        self._thread.start()

    def _attempt(self, step: int, write: Callable[..., Any], *given: Any) -> None:
        try:
            write(*given)
        except Exception as error:
            self._problems.report("scores", _lost(error), step)

    def _finish_writing(self) -> None:
        """Wait for the file that is being written."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _write_blocks(self, before: int, blocks: list[BlockScores]) -> None:
        self._write(before, [self.pending.rows(blocks)])

    def save(self, iteration: int | None) -> Path | None:
        """Write the scores of all steps before this one (None: of all).

        One file with every process's rows, written by the first; returns its path there. A failure
        is raised, and goes to the record too.
        """
        try:
            return self._save(iteration)
        except Exception as error:
            self._problems.record("scores", _lost(error), iteration or self._count.last + 1)
            raise

    def _save(self, iteration: int | None) -> Path | None:
        self._finish_writing()
        rows = self.pending.rows(self.pending.take(iteration))
        nothing_left = iteration is None and not rows and self._group.size == 1
        if self.saving.run_dir is None or nothing_left:
            return None
        gathered = self._group.gather_objects(rows)
        if gathered is None or self._folder is None:
            return None
        before = iteration
        if before is None:
            before = self._count.last + 1
        return self._write(before, gathered)

    def _write(self, before: int, parts: Sequence[Sequence[SavedScore]]) -> Path | None:
        # By step: every process has sent rows of several.
        merged = sorted((row for part in parts for row in part), key=lambda row: row.step)
        if not merged or self._folder is None or self.saving.run_dir is None:
            return None
        for fault in self._folder.write(before, merged, self.pending.format):
            self._problems.report("damaged scores", fault, before)
        return score_path(self.saving.run_dir, before)

    def close(self) -> None:
        """Save what is left and take the hooks off the optimizer."""
        self.guard.close()
        if self._count.unobserved and self._count.first is None:
            steps = self._count.unobserved
            self._problems.report(
                "nothing observed",
                f"the optimizer made {steps} steps and no sample was scored: put every backward "
                "pass into `with engine.observe():`",
                steps - 1,
            )
        try:
            self.save(None)
        finally:
            if self._folder is not None:
                self._folder.close()

    def _learning_rate(self) -> float | HostCopy | None:
        """The learning rate, where all parameters have the same."""
        if self._optimizer is None:
            return None
        rates = [group["lr"] for group in self._optimizer.param_groups]
        on_device = [each for each in rates if isinstance(each, Tensor)]
        if on_device:
            # What is on a device is not compared: schedulers change all groups' rates alike.
            return (
                HostCopy.of(on_device[0].detach().reshape(1).clone()) if len(rates) == 1 else None
            )
        return float(rates[0]) if len(set(rates)) == 1 else None

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Fused optimizers unscale gradients themselves: what they use cannot be seen before.
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        clip = self._clip.before_update(still_scaled=fused)
        blocks = self.pending.blocks
        for block in blocks:
            if block.step == blocks[-1].step:
                block.clip = clip
        self.history.before_step(clip)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._called_by_scaler = True
        self._stepped()

    def scaler_steps(self, optimizer: Optimizer) -> None:
        """A GradScaler is about to step an optimizer, or to leave it out."""
        if innermost_optimizer(optimizer) is self._optimizer:
            self._called_by_scaler = False

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        """It has done one or the other."""
        if innermost_optimizer(optimizer) is self._optimizer and not self._called_by_scaler:
            self._stepped()

    def _stepped(self) -> None:
        self._count.optimizer_stepped()
        # No collective of ours may run inside a hook: with several processes the next block saves.
        if self._group.size == 1 and self.pending.blocks:
            self.save_finished(self._count.last + 1)


def _lost(error: Exception) -> str:
    return f"{type(error).__name__}: {error}; training goes on, these scores are lost"


class _SavesAtExit:
    """Closes the log of an engine that nobody closed, when the process ends."""

    def __init__(self, log: ScoreLog) -> None:
        # Weakly: an engine that is let go of is not kept until the end.
        self._log = weakref.ref(log)
        self._process = os.getpid()

    def __call__(self) -> None:
        log = self._log()
        # A forked child has a copy of what its parent is going to save.
        if log is not None and os.getpid() == self._process:
            log.close()
