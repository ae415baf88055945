"""A run that is followed while it is written: what is new is read, and nothing twice. No torch."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from gradsight.errors import GradsightError
from gradsight.show.page.payload import WholeRun
from gradsight.show.serve.cache import KeptState, PictureFolder
from gradsight.show.serve.live_lines import LiveLines
from gradsight.show.serve.picture import Picture
from gradsight.store.reader import open_run
from gradsight.store.run_listing import Fingerprint, fingerprint
from gradsight.store.stat_chunks import StatChunk
from gradsight.values.steps import Step

_LOOK_BACK = 500
"""Steps from which a kept picture learns again what is usual: ten times as many as it needs."""
_KEEP_EVERY = 30.0
_AT_ONCE = 2000
_NO_END = 2**63
_MOST_BROKEN = 1000
_NAMED = 4


class GrowingRun(WholeRun, Protocol):
    """A run that is read again and again."""

    def steps(self, after: int = ...) -> Iterator[Step]: ...
    def stat_chunks(self, after: int = ...) -> Iterator[StatChunk]: ...
    def close(self) -> None: ...


class LiveRun:
    """What is known of one run. One thread at a time reads or asks; each holds `lock`."""

    def __init__(self, path: Path, cache: Path | None = None) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.run: GrowingRun | None = None
        self.steps: list[Step] = []
        self.lines = LiveLines()
        self.picture: Picture | None = None
        self.broken: dict[int, list[str]] = {}
        """The first steps whose gradient is not finite, with some of the parameters concerned."""
        self.version = 0
        """Goes up with whatever changes."""
        self.generation = 0
        """Another one when nothing of what was read before holds any more."""
        self.trouble: str | None = None
        """Why it cannot be read, or that it is gone; what was read before is still shown."""
        self._cache = cache
        self._folder: PictureFolder | None = None
        self._seen: Fingerprint | None = None
        self._unread = False
        self._kept_at = time.monotonic()

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Read what is new, for about so long; True where there is more to be read."""
        with self.lock:
            seen = fingerprint(self.path)
            if seen == self._seen and not self._unread:
                return False
            deadline = time.monotonic() + seconds
            # Taken before reading: what is written meanwhile is noticed the next time.
            self._seen = seen
            self.version += 1
            self.trouble = None
            try:
                self._unread = self._read(self._opened(), deadline)
            except GradsightError as error:
                self._unread = False
                self.trouble = str(error)
                self._close_run()
            return self._unread

    def _opened(self) -> GrowingRun:
        """The run, kept open: what its tail has got since is all that is read again."""
        if self._seen is None or self._seen[0] is None:
            self._close_run()  # what was opened would still be read where the folder is gone
        if self.run is None:
            self.run = open_run(self.path)
        return self.run

    def _close_run(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run = None

    def _read(self, run: GrowingRun, deadline: float) -> bool:
        """Add the new steps; True where the time was up before all were read."""
        new = self._new_steps(run)
        if new is None:
            self._forget()
            new = run.steps()
        self._take_kept(run)
        # Steps and their norms side by side: whoever looks early sees a whole part of the run.
        for chunk in run.stat_chunks(after=self._last_measured()):
            picture = self.picture
            if picture is None:
                picture = self._new_picture(chunk.names)
            if not picture.knows(chunk.names):
                # Another row changes all that was drawn: it is read again, with a row for each.
                self._new_picture([*picture.rows.names, *chunk.names])
                return True
            picture.extend(chunk)
            self._notice_broken(chunk)
            self._take_steps(new, int(chunk.steps[-1]), deadline)
            if time.monotonic() > deadline:
                return True
        if not self._take_steps(new, _NO_END, deadline):
            return True
        self._keep()
        return False

    def _notice_broken(self, chunk: StatChunk) -> None:
        broken = chunk.broken()
        for place in np.flatnonzero(broken.any(axis=1))[:_MOST_BROKEN].tolist():
            names = [chunk.names[column] for column in np.flatnonzero(broken[place])]
            if len(self.broken) < _MOST_BROKEN:
                self.broken[int(chunk.steps[place])] = names[:_NAMED]

    def _take_steps(self, new: Iterator[Step], last: int, deadline: float) -> bool:
        """Take steps up to this one; False where the time was up before."""
        while not self.steps or self.steps[-1].step < last:
            some = list(itertools.islice(new, _AT_ONCE))
            self.steps += some
            self.lines.add(some)
            if len(some) < _AT_ONCE:
                return True
            if time.monotonic() > deadline:
                return False
        return True

    def _new_steps(self, run: GrowingRun) -> Iterator[Step] | None:
        """The steps that have come; None where those that are known have been replaced."""
        if not self.steps:
            return run.steps()
        last = self.steps[-1]
        steps = run.steps(after=last.step - 1)
        again = next(steps, None)
        if again is None or (again.step, again.time) != (last.step, last.time):
            return None
        # Its loss may have been logged after it was made.
        self.steps[-1] = again
        self.lines.add([again])
        return steps

    def _forget(self) -> None:
        """The run was started again from an earlier step, or is another one."""
        self.steps = []
        self.lines = LiveLines()
        self._drop_picture()
        self.generation += 1

    def _new_picture(self, names: Sequence[str]) -> Picture:
        """An empty picture with a row for each of these."""
        self._drop_picture()
        folder = self._own_folder()
        folder.empty()
        self.picture = Picture(folder.path, list(dict.fromkeys(names)))
        return self.picture

    def _drop_picture(self) -> None:
        if self.picture is not None:
            self.picture.close()
            self.picture = None
            self.generation += 1
        self.broken = {}

    def _own_folder(self) -> PictureFolder:
        if self._folder is None:
            self._folder = PictureFolder(self.path, self._cache)
        return self._folder

    def _take_kept(self, run: GrowingRun) -> None:
        """Take up the picture that an earlier server has kept, if it is of this very run."""
        if self.picture is not None:
            return
        folder = self._own_folder()
        kept = folder.kept()
        if kept is None or not _is_of(run, kept):
            return
        picture = Picture(folder.path, kept.names, kept.steps)
        if len(picture) != kept.steps:
            picture.close()
            return
        for chunk in run.stat_chunks(after=kept.last_step - _LOOK_BACK):
            known = np.flatnonzero(chunk.steps <= kept.last_step)
            if len(known):
                picture.look_back(chunk.at(known))
        self.picture = picture
        self.broken = {int(step): list(names) for step, names in kept.broken}

    def _keep(self) -> None:
        now = time.monotonic()
        if now - self._kept_at > _KEEP_EVERY:
            self._kept_at = now
            self._keep_now()

    def _keep_now(self) -> None:
        if self.picture is None or not len(self.picture) or self._folder is None:
            return
        last = self._last_measured()
        times = {step.step: step.time for step in self.steps}
        if last in times:
            names = self.picture.rows.names
            broken = list(self.broken.items())
            size = len(self.picture)
            state = KeptState(names, broken, size, last, times[last], self.steps[0].time)
            self._folder.keep(state)

    def _last_measured(self) -> int:
        """The last step of the picture."""
        if self.picture is None or not len(self.picture):
            return -1
        return self.picture.last_step

    def close(self) -> None:
        """Keep the picture for the next server."""
        with self.lock:
            self._keep_now()
            self._close_run()
            if self.picture is not None:
                self.picture.close()
            if self._folder is not None:
                self._folder.close()


def _is_of(run: GrowingRun, kept: KeptState) -> bool:
    """Whether a kept picture is of this run: its first step and its last are."""
    first = next(run.steps(), None)
    last = next(run.steps(after=kept.last_step - 1), None)
    if first is None or last is None:
        return False
    seen = (first.time, last.step, last.time)
    return seen == (kept.first_time, kept.last_step, kept.last_time)
