"""Opens the record and the sinks of a run: on rank 0; all ranks learn the first step."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import torch

from gradsight.core.group import ProcessGroup, rank, world_size
from gradsight.core.parameters import Named
from gradsight.core.problems import Problems
from gradsight.errors import RunError, UsageError
from gradsight.session.continuing import refuse_another_model, say_continued
from gradsight.session.line import Output
from gradsight.session.options import WatchOptions
from gradsight.session.outputs import RecordOutput, SinkOutput
from gradsight.store.sinks import open_sinks
from gradsight.store.sinks.queue import SinkQueue
from gradsight.store.sinks.step_sink import SinkPlace
from gradsight.store.store import Store, open_store

GRADIENT = "accumulated over micro-batches, reduced over ranks, unscaled, before clipping"
_FAILED = -1
"""Stands for the first step where rank 0 could not open the run."""


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """Where a run's steps go, and the number of its first one.

    Only rank 0 has a store and sinks.
    """

    first_step: int
    problems: Problems
    """The faults of the run, shared by all who have its record open."""
    store: Store | None = None
    sinks: SinkQueue | None = None

    def outputs(self, parameters: Sequence[Named], sink_detail: str | None) -> list[Output]:
        """What finished steps are written to."""
        outputs: list[Output] = []
        if self.store is not None:
            names = [parameter.name for parameter in parameters]
            outputs.append(RecordOutput(self.store, names, self.first_step))
        if self.sinks is not None:
            outputs.append(SinkOutput(self.sinks, parameters, sink_detail))
        return outputs


def open_run_outputs(
    options: WatchOptions, parameters: Sequence[Named], group: ProcessGroup
) -> OpenedRun:
    """Open store and sinks, on the first rank; tell the first step, on all ranks."""
    if group.size == 1:
        if group.is_first:
            return _open_here(options, parameters)
        # Another rank writes the record, and nobody is there to tell where it begins.
        return OpenedRun(options.start_step or 0, Problems())
    opened: OpenedRun | None = None
    first_step = _FAILED
    try:
        if group.is_first:
            opened = _open_here(options, parameters)
            first_step = opened.first_step
    finally:
        # Also where opening failed: the other ranks are waiting for this number.
        first_step = group.from_first(first_step)
    if first_step == _FAILED:
        raise RunError("rank 0 could not open the run; its own error says why")
    return OpenedRun(first_step, Problems()) if opened is None else opened


def ranks_missing(group: ProcessGroup, attached: bool = False) -> str:
    """What is said where a watch was not opened on every rank, and this one goes on alone.

    `attached`: a command opened it, and nobody can be told to open it elsewhere.
    """
    met = group.incomplete
    if met is None:
        return ""
    writer = min(met.present)
    text = f"gradsight.watch must be opened on every rank, but {met.sentence()}"
    if attached:
        text = f"the ranks of this script are not compared, because {met.sentence()}"
    if not group.is_first:
        return f"{text}. Rank {writer} records alone; what rank {rank()} sees is in no record"
    if attached:
        return f"{text}. Training goes on, and rank {writer} records what it sees itself"
    return (
        f"{text}. Training goes on, and rank {writer} records what it sees itself; ranks are not "
        "compared. Call gradsight.watch outside of any `if rank == 0:`"
    )


def _open_here(options: WatchOptions, parameters: Sequence[Named]) -> OpenedRun:
    first_step = options.start_step or 0
    problems = Problems()
    store: Store | None = None
    place = SinkPlace()
    try:
        if options.run_dir is not None:
            store = open_store(options.run_dir)
            problems = store.problems
            following = store.next_step()
            first_step = _claim(store, options, parameters)
            replaces = first_step < following
            place = SinkPlace(store.path, replaced_from=first_step if replaces else None)
        sinks = open_sinks(options.sinks, place)
    except BaseException:
        if store is not None:
            store.close()
        raise
    queue = SinkQueue(sinks, problems, first_step) if sinks else None
    return OpenedRun(first_step, problems, store, queue)


def _claim(store: Store, options: WatchOptions, parameters: Sequence[Named]) -> int:
    """Make the store this watch's own, from the step that is returned on."""
    if store.recording:
        raise UsageError(
            f"this process is already recording steps into {options.run_dir}; "
            "give each watch its own run_dir"
        )
    following = store.next_step()
    first_step = following
    if options.start_step is not None:
        first_step = options.start_step
    # Where no earlier step stays, another model may take the place of the old one.
    if following > 0 and first_step > 0:
        refuse_another_model(store, parameters)
    if options.start_step is not None:
        store.forget_from(first_step)
    if not options.quiet:
        say_continued(options.run_dir, following, first_step)
    store.recording = True
    store.limit(options.max_bytes)
    return first_step


def write_run_config(
    store: Store,
    options: WatchOptions,
    first_step: int,
    parameters: Sequence[Named],
    optimizers: Sequence[Any],
) -> None:
    """Write config.json: what ran, on what, with which settings."""
    described = [parameter.describe() for parameter in parameters]
    config = {
        "settings": {"watch": options.for_the_record(first_step)},
        "versions": {
            "gradsight": metadata.version("gradsight"),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "started": time.time(),
        "world_size": world_size(),
        "gradient": GRADIENT,
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "parameters": [_fields(parameter) for parameter in described],
    }
    store.write_config(config)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
