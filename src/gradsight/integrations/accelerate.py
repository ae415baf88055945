"""Accelerate's loops: one line after `prepare`, and a tracker for what the user logs."""

import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gradsight.core import moments
from gradsight.core.documents import document_text, read_document
from gradsight.core.files import write_text
from gradsight.core.guard import Guard
from gradsight.core.passes import BackwardPass
from gradsight.core.problems import say
from gradsight.errors import MissingPackage, RunError, UsageError
from gradsight.integrations.door import Door
from gradsight.integrations.logger_sink import LoggerSink
from gradsight.session.watch_session import Watch, open_watches

try:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise MissingPackage("accelerate", "hf", "gradsight.integrations.accelerate") from error

_NAME = "gradsight"
_BESIDE = ("wandb", "trackio")
"""Trackers with rows that only go forward: ours go to a run beside the user's."""


def watch(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> "AcceleratedWatch":
    """Watch what an accelerator trains; model and optimizer are what `prepare` returned.

    run_dir: as for `gradsight.watch`.
    options: those of `gradsight.watch`. `sinks` are by default the accelerator's own trackers.

    `save_state` keeps the number of the next step in a file of its own beside the checkpoint, and
    after `load_state` the next step has the number that it had; steps that were recorded from there
    on are replaced. A checkpoint without that file loads too, and ours loads without us.
    """
    if not isinstance(accelerator, Accelerator):
        raise UsageError(f"accelerator must be an Accelerator, got {type(accelerator).__name__}")
    return AcceleratedWatch(
        accelerator, model, optimizer, Door(run_dir, options, stops_itself=False)
    )


def register() -> None:
    """Let `Accelerator(log_with="gradsight")` log into the open watch."""
    try:
        from accelerate.tracking import register_tracker_class
    except ImportError:
        raise UsageError(
            "this version of accelerate knows no trackers by name but its own; give it the tracker "
            "itself: Accelerator(log_with=GradsightTracker())"
        ) from None
    register_tracker_class(GradsightTracker)


class AcceleratedWatch:
    """The watch of an accelerator: it goes on at another step when a checkpoint is loaded.

    A context manager, closed at the latest when the process ends. It takes everything, and records
    nothing, where nothing can be seen.
    """

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, door: Door) -> None:
        self._accelerator = accelerator
        self._model = model
        self._optimizer = optimizer
        self._door = door
        self._sink = LoggerSink()
        self._watch: Watch | None = None
        """The last one that was opened: it can be asked for its report when it is closed."""
        self._guard: Guard | None = None
        self._handles: list[Any] = []
        others = _watches_of(accelerator)
        taken = {other.place for other in others}
        self.place: int = next(each for each in range(len(taken) + 1) if each not in taken)
        self._open(_loaded_steps(accelerator).pop(self.place, None))
        if self._watch is not None:
            others.append(self)
            saving = Guard(None, "save_state", "a checkpoint does not tell its step")
            save = functools.partial(saving.attempt, self._save)
            self._handles.append(accelerator.register_save_state_pre_hook(save))
            self._listen()

    # For the user: as of a Watch.

    def log(self, **scalars: object) -> None:
        """Add loss=, lr= or anything else to the current step."""
        if self._watch is not None:
            self._watch.log(**scalars)

    def log_scalar(self, name: str, value: float, step: int) -> None:
        """One number of a step, as trackers take it."""
        if self._watch is not None:
            self._watch.log_scalar(name, value, step)

    def step(self, step: int | None = None, **scalars: object) -> None:
        """As `Watch.step`: beside a watched optimizer it does nothing but log."""
        if self._watch is not None:
            self._watch.step(step, **scalars)

    def ids(self, sample_ids: Sequence[int | str] | Tensor) -> None:
        """Name the samples of the next call of the model."""
        if self._watch is not None:
            self._watch.ids(sample_ids)

    def close(self) -> None:
        """Write what is left, take every hook away. Closing again does nothing."""
        self._close(None)

    def __enter__(self) -> "AcceleratedWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        self._close(error)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a Watch has, such as its report."""
        watch = self.__dict__.get("_watch")
        if watch is None:
            raise AttributeError(f"nothing is watched here, so there is no {name}")
        return getattr(watch, name)

    # What others tell.

    def before_backward(self, begun: BackwardPass) -> None:
        """On the thread that trains: trackers are handed what has come."""
        self._hand_over()

    def go_on_at(self, step: int) -> None:
        """A checkpoint was loaded: the next step has this number."""
        self._stop_listening()
        try:
            self._open(step)
        except Exception as error:
            say(f"not watched any more after load_state: {type(error).__name__}: {error}")
            self._watch = None
        self._listen()

    def _listen(self) -> None:
        if self._watch is not None:
            what = "the trackers get no more gradients"
            self._guard = Guard(self._watch.problems, "trackers", what)
            moments.listen(self, self._guard)

    def _stop_listening(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _open(self, start_step: int | None) -> None:
        known = {getattr(each, "name", str(each)) for each in self._accelerator.log_with}
        beside = [name for name in _BESIDE if name in known]
        opened = self._door.open(
            self._model,
            self._optimizer,
            sinks=[*beside, self._sink],
            start_step=start_step,
        )
        self._watch = opened

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        watch = self._door.watch
        if watch is None or not self._accelerator.is_main_process:
            return
        try:
            text = document_text({"step": watch.step_under_way})
            write_text(Path(folder) / _file(self.place), text)
        except OSError as error:
            say(f"the checkpoint does not say at which step it was saved: {error}")

    def _close(self, error: BaseException | None) -> None:
        self._stop_listening()
        while self._handles:
            self._handles.pop().remove()
        others = _watches_of(self._accelerator)
        if self in others:
            others.remove(self)
        self._door.close(error)
        self._hand_over()

    def _hand_over(self) -> None:
        trackers = [each for each in self._accelerator.trackers if each.name not in _NOT_BY_ROW]
        self._sink.hand_over({id(tracker): tracker.log for tracker in trackers})


class GradsightTracker(GeneralTracker):  # type: ignore[misc]
    """What the user logs with `accelerator.log`, in the steps of the open watch."""

    name = _NAME
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, project_name: str = "", **_: Any) -> None:
        super().__init__()

    @property
    def tracker(self) -> list[Watch]:
        """The watches that are open now."""
        return open_watches()

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Numbers of a step; what is no number is not kept.

        step: that of the record. Right after step N it may be N, or N + 1 as a count of the steps
          that were made. None: the step under way, or the one just made.
        """
        for watched in self.tracker:
            is_now = step is None or step == watched.step_under_way
            number = watched.step_to_log if is_now else step
            for name, value in values.items():
                if isinstance(value, int | float) or (
                    isinstance(value, Tensor) and value.dim() == 0
                ):
                    watched.log_scalar(name, float(value), int(number))  # type: ignore[arg-type]


_NOT_BY_ROW = {_NAME, *_BESIDE}

# Checkpoints. A watch may be opened before or after one is loaded, so that loading itself tells.

_open: "weakref.WeakKeyDictionary[Accelerator, list[AcceleratedWatch]]" = (
    weakref.WeakKeyDictionary()
)
_loaded: "weakref.WeakKeyDictionary[Accelerator, dict[int, int]]" = weakref.WeakKeyDictionary()
"""The steps of a checkpoint, by the place of a watch that has not been opened yet."""


def _watches_of(accelerator: Accelerator) -> list[AcceleratedWatch]:
    return _open.setdefault(accelerator, [])


def _file(place: int) -> str:
    """In a checkpoint: named as Accelerate names its own files, by their order."""
    return f"gradsight_{place}.json" if place else "gradsight.json"


def _loaded_steps(accelerator: Accelerator) -> dict[int, int]:
    return _loaded.setdefault(accelerator, {})


def _steps_in(folder: Path) -> dict[int, int]:
    """The number of the next step that a checkpoint has for every watch, by its place."""
    steps: dict[int, int] = {}
    while (folder / _file(len(steps))).exists():
        file = _file(len(steps))
        try:
            steps[len(steps)] = int(read_document(folder, file)["step"])
        except (RunError, KeyError, TypeError, ValueError) as error:
            say(f"{folder / file} does not tell the step of the checkpoint: {error}")
            break
    return steps


def _tell_of_loading() -> None:
    original = Accelerator.load_state

    @functools.wraps(original)
    def load_state(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        folders: list[str] = []

        def note(models: Any, folder: str) -> None:
            folders.append(folder)

        watches = list(_watches_of(accelerator))
        # Loading an optimizer under FSDP2 makes a step of its own, with zeros.
        before = [watched.step_under_way for watched in watches]
        handle = accelerator.register_load_state_pre_hook(note)
        try:
            result = original(accelerator, *args, **kwargs)
        finally:
            handle.remove()
        saved = {
            place: step for folder in folders for place, step in _steps_in(Path(folder)).items()
        }
        _loaded[accelerator] = saved
        # On all ranks alike, with a file of ours and without one: opening is done together.
        for watched, step in zip(watches, before, strict=True):
            watched.go_on_at(saved.pop(watched.place, step))
        return result

    Accelerator.load_state = load_state


_tell_of_loading()
