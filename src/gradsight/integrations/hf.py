"""Hugging Face's Trainer, and those that derive from it, such as TRL's."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsight.core.group import rank, world_size
from gradsight.core.problems import say
from gradsight.errors import GradsightError, MissingPackage, UsageError, WrongPlace
from gradsight.ghost.engine import GhostEngine
from gradsight.integrations.broken_steps import BrokenSteps
from gradsight.integrations.door import Door, caller_of
from gradsight.integrations.hf_samples import (
    is_packed,
    keep_ids,
    keep_texts,
    open_engine,
    refuse_wrong_scores,
    say_packs,
    scored_step,
    taken_ids,
)
from gradsight.memory.monitor import MemoryMonitor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingPackage("transformers", "hf", "gradsight.integrations.hf") from error

NAN_STEPS = "gradsight/nan_steps"
"""In the Trainer's logs: how many steps had a loss or a gradient that is not finite."""
_SINKS = ("wandb", "tensorboard", "trackio")
"""Names in `report_to` that a watch has sinks for."""


class GradsightCallback(TrainerCallback):  # type: ignore[misc]
    """Watches what the Trainer trains, from its first step to its last.

        trainer = Trainer(..., callbacks=[GradsightCallback()])

    run_dir: where the record goes; None is `output_dir/gradsight`.
    ghost: True scores every sample against the first batch of the evaluation data; a mapping has
      arguments of `gradsight.GhostEngine`: val_data or targets (batches, or rows that the Trainer's
      collator makes one of), and any other. loss_fn is `model(**batch).loss` where none is given.
    options: those of `gradsight.watch`. `sinks` are by default those that `report_to` names;
      steps are numbered by the Trainer's `global_step`.

    A column of the dataset that is called id, sample_id, idx or uid names the samples. The Trainer
    drops it, so that the callback must be there when the Trainer is made.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        ghost: bool | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_wrong_scores(ghost)
        self._door = Door(run_dir, options)
        self._ghost = ghost
        self._engine: GhostEngine | None = None
        self._is_unscored = True
        """Whether the engine has not scored any micro-batch yet."""
        self._broken: BrokenSteps | None = None
        self._trainer: Any = None

    @property
    def watch(self) -> Any:
        """The open `Watch`, for `log` and `report`; None where nothing is being trained."""
        return self._door.watch

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the ids of samples before the Trainer drops them."""
        trainer = calling_trainer()
        keep_ids(trainer)
        _surround_steps(trainer)
        _surround_training(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the watch: now there is an optimizer."""
        # After an exception, and when a smaller batch size is tried, no end has come.
        self._close_engine()
        self._broken = None
        trainer = calling_trainer()
        if _watching_callback(trainer) not in (self, None):
            return
        watch = self._door.open(
            trainer.model_wrapped,
            trainer.optimizer,
            run_dir=self._door.run_dir or Path(args.output_dir) / "gradsight",
            sinks=[name for name in args.report_to if name in _SINKS],
            start_step=state.global_step,
        )
        if watch is None:
            return
        self._trainer = trainer
        self._broken = BrokenSteps(self._door.is_quiet)
        watch.also_writes_to(self._broken)
        _add_to_logs(trainer)
        _surround_steps(trainer)
        if self._ghost:
            self._score(trainer, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop training where an action of the user's asks for it."""
        if self._door.should_stop():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the watch."""
        self.close()

    def training_step(self, original: Any, model: Any, inputs: Any, *args: Any) -> Any:
        """Run the Trainer's own step on one micro-batch, forward and backward, and score it."""
        ids = taken_ids(inputs)
        watch = self._door.watch
        if watch is not None and ids is not None:
            watch.ids(ids)
        if self._engine is not None and watch is not None and is_packed(inputs):
            say_packs(watch.problems)
            self._close_engine()
        step = functools.partial(original, model, inputs, *args)
        try:
            if self._engine is None:
                return step()
            scored = scored_step(self._engine, ids, step, inputs, model, is_first=self._is_unscored)
            self._is_unscored = False
            if scored.refusal is not None:
                self._train_without_scores(scored.refusal)
            return scored.result
        except BaseException:
            # Other ranks may not come to this point.
            if watch is not None and world_size() == 1:
                watch.finish_steps(on_disk=True)
            raise

    def _train_without_scores(self, refusal: Exception) -> None:
        """Warn why samples are not scored; training and the watch continue."""
        watch = self._door.watch
        self._close_engine()
        if watch is not None:
            reason = str(refusal).rstrip(".")
            watch.problems.report("scores", f"{reason}. Training goes on without scores")

    def _score(self, trainer: Any, start_step: int) -> None:
        watch = self._door.watch
        try:
            self._engine = open_engine(
                trainer,
                self._ghost,
                optimizer=trainer.optimizer,
                run_dir=self._door.opened_in,
                start_step=start_step,
            )
        except UsageError:
            self.close()
            raise
        except GradsightError as refusal:
            self._train_without_scores(refusal)
            return
        except BaseException:
            self.close()
            raise
        self._is_unscored = True
        if self._engine is None and watch is not None:
            say_packs(watch.problems)

    def close(self, error: BaseException | None = None) -> None:
        """Close what is open; `error` is what ended training."""
        # Scores first: their steps are those of the watch.
        self._close_engine()
        self._door.close(error)
        if self._trainer is not None and self._may_keep_data() and rank() == 0:
            self._keep_texts()
        self._trainer = None

    def _may_keep_data(self) -> bool:
        """Whether the user has asked for what cannot be shown without their data."""
        return bool(self._ghost) or self._door.options.get("recorder") == "batch"

    def _keep_texts(self) -> None:
        if self._door.opened_in is None:
            return
        try:
            keep_texts(self._trainer, self._door.opened_in)
        except WrongPlace:
            return  # Training ended before its first step: there is no record to keep texts in.
        except Exception as error:
            say(f"the texts of samples could not be kept: {type(error).__name__}: {error}")

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def numbers_for_the_log(self) -> dict[str, int]:
        """What the Trainer's own log would hide: a NaN that it filters out of the loss."""
        watch = self._door.watch
        if watch is not None:
            try:
                # The Trainer has waited for the device just now, to read its loss.
                watch.finish_steps()
            except Exception as error:
                watch.problems.report("log", f"steps not finished: {type(error).__name__}: {error}")
        if self._broken is None or self._broken.count == 0:
            return {}
        return {NAN_STEPS: self._broken.count}


class MemoryMonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Adds memory to what the Trainer logs of training, every `logging_steps` steps.

    `trainer.state.log_history` has it, and trainer_state.json. The names and units are those of
    `gradsight.MemoryMonitor`: memory/gpu_allocated_gb, memory/gpu_reserved_gb and
    memory/gpu_max_allocated_gb on a GPU, elsewhere memory/rss_gb, memory/peak_rss_gb and
    memory/tensor_gb. Callbacks that come after this one see it too; the Trainer puts its own
    reporters (W&B, TensorBoard) before the user's callbacks.
    """

    def __init__(self) -> None:
        self._monitor = MemoryMonitor()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: object
    ) -> None:
        """Add memory to the entry of a training step."""
        # Evaluations and the summary come here too, in the very dict that is returned to the user.
        if not logs or "loss" not in logs:
            return
        memory = self._monitor.sample(None, state.global_step)
        logs.update(memory)
        # The Trainer has made the entry from a copy of these logs already.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(memory)


def register() -> None:
    """Let `TrainingArguments(report_to="gradsight")` add the callback."""
    from transformers.integrations import integration_utils

    integration_utils.INTEGRATION_TO_CALLBACK["gradsight"] = GradsightCallback


def calling_trainer() -> Any:
    """The Trainer that is calling its callbacks. It hands them everything but itself."""
    from transformers import Trainer

    return caller_of(Trainer)


def _watching_callback(trainer: Any) -> GradsightCallback | None:
    """The one callback of ours that watches: the user's own come after those of `report_to`."""
    callbacks = trainer.callback_handler.callbacks
    ours = [callback for callback in callbacks if isinstance(callback, GradsightCallback)]
    return ours[-1] if ours else None


def _add_to_logs(trainer: Any) -> None:
    """Put our numbers into all that the Trainer logs.

    Not in `on_log`: by then the entry of `log_history` is made, and W&B's callback has been called.
    """
    if getattr(trainer.log, "adds_numbers", False):
        return
    original = trainer.log

    @functools.wraps(original)
    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        callback = _watching_callback(trainer)
        added = {} if callback is None else callback.numbers_for_the_log()
        entry = {**logs, **added}
        original(entry, *args, **kwargs)
        # The user gets these logs back from `evaluate`: with what the Trainer adds, without ours.
        logs.update({name: value for name, value in entry.items() if name not in added})

    # Known by its mark when training begins again.
    log.adds_numbers = True  # type: ignore[attr-defined]
    trainer.log = log


def _surround_training(trainer: Any) -> None:
    """Close the record when training raises: no callback is called then."""
    original = trainer.train

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            callback = _watching_callback(trainer)
            if callback is not None:
                callback.close(error)
            raise

    trainer.train = train


def _surround_steps(trainer: Any) -> None:
    """Have our callback around every training step: it names the samples, and scores them."""
    if getattr(trainer.training_step, "is_surrounded", False):
        return
    original = trainer.training_step

    @functools.wraps(original)
    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        callback = _watching_callback(trainer)
        plain = functools.partial(original, **kwargs)
        if callback is None:
            taken_ids(inputs)
            return plain(model, inputs, *args)
        return callback.training_step(plain, model, inputs, *args)

    training_step.is_surrounded = True  # type: ignore[attr-defined]
    trainer.training_step = training_step
