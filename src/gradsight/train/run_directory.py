"""The trainer's run directory: what there is to go on from, and nobody else at work in it."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from gradsight.core import rundir
from gradsight.core.places import names_in, remove_below
from gradsight.errors import UsageError, WrongPlace
from gradsight.store.run_files import read_run_config
from gradsight.train.checkpoint import checkpoint_names, is_leftover
from gradsight.train.processes import Processes


class Beginning(Enum):
    """What a run begins from."""

    ANEW = "nothing"
    AGAIN = "nothing, though steps were made before: they left no checkpoint"
    FROM_CHECKPOINT = "the newest checkpoint that is intact"


def how_to_begin(run_dir: Path, resume: bool, overwrite: bool) -> Beginning:
    """What to begin from; refuses to put two runs into one directory, or to resume none.

    A run that ended before its first checkpoint has nothing to go on from, and nothing to lose but
    steps that would be made again: it is begun again, with --resume and without.
    """
    if overwrite:
        return Beginning.ANEW
    if not run_dir.is_dir():
        if resume:
            raise UsageError(f"--resume: {run_dir} is not there. Start it without --resume")
        return Beginning.ANEW
    if resume and checkpoint_names(run_dir):
        return Beginning.FROM_CHECKPOINT
    if _ended_without_checkpoint(run_dir):
        return Beginning.AGAIN
    if resume:
        raise UsageError(
            f"--resume: {run_dir} has no checkpoint, and is no training that was broken off. "
            f"Start it without --resume and with --overwrite"
        )
    if rundir.is_run(run_dir):
        raise UsageError(
            f"{run_dir} holds a run already. Continue it with --resume, replace it with "
            f"--overwrite, or name this one with --experiment NAME"
        )
    return Beginning.ANEW


@contextmanager
def run_directory(run_dir: Path, processes: Processes, beginning: Beginning) -> Iterator[None]:
    """Make the directory, and empty it of a run that is replaced; nobody else trains into it.

    To be entered only when all settings have been found in order: a wrong one must not cost an old
    run.
    """
    processes.wait()
    lock = None
    try:
        if processes.first:
            lock = _made(run_dir, anew=beginning is not Beginning.FROM_CHECKPOINT)
        processes.wait()
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _made(run_dir: Path, anew: bool) -> int:
    """The directory, locked as long as the descriptor is open."""
    lock = None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _locked(run_dir)
        if anew and rundir.is_run(run_dir):
            # Names, not the folder: it may be a link, and what links in it lead to stays.
            for name in names_in(run_dir):
                remove_below(run_dir, name)
        # Before anything else is: a run that is killed early is known as the trainer's by it.
        (run_dir / rundir.CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        raise WrongPlace(f"{run_dir} cannot be written: {error.strerror}") from error
    return lock


def _locked(run_dir: Path) -> int:
    handle = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks: there nobody can be told from anybody.
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            os.close(handle)
            raise WrongPlace(
                f"another process is training into {run_dir}: wait for its end, or name this run "
                f"with --experiment NAME"
            ) from error
    return handle


def _ended_without_checkpoint(run_dir: Path) -> bool:
    """Whether a training was begun here, and ended neither well nor with a checkpoint."""
    if checkpoint_names(run_dir) or (run_dir / rundir.REPORT).exists():
        return False
    # In a folder with anything else somebody keeps checkpoints of their own.
    if rundir.CHECKPOINTS in names_in(run_dir):
        return all(map(is_leftover, names_in(run_dir, rundir.CHECKPOINTS)))
    # Older versions made that folder only for the first checkpoint.
    settings = read_run_config(run_dir).get("settings")
    return rundir.is_run(run_dir) and isinstance(settings, dict) and "train" in settings
