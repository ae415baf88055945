"""GradientDumper: gradients to the disk while training goes on."""

import atexit
import math
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from gradsight.core.group import ProcessGroup
from gradsight.core.guard import Guard
from gradsight.core.problems import Problems, say
from gradsight.core.rundir import directory_path
from gradsight.core.sharing import allows_uneven_steps
from gradsight.dump.folders import Layout
from gradsight.dump.gradients import Collector, Gradients
from gradsight.dump.job import Facts, Job, Limits, run, without_tensors
from gradsight.dump.plan import Fault
from gradsight.dump.staging import Pool
from gradsight.dump.turns import Turns
from gradsight.dump.writer import Writer
from gradsight.errors import GradsightError, UsageError
from gradsight.values.findings import Problem
from gradsight.values.steps import Schedule
from gradsight.values.whole_numbers import single_number, whole_number

SEVERITIES = ("warning", "critical")
WAITING = 5.0
"""Seconds that training waits for a copy's place while the dump before waits for other ranks."""
WRITING = timedelta(minutes=60)
"""How long the fastest rank waits for the slowest to write."""


class GradientDumper:
    """Writes a model's gradients to `run_dir/gradient_dumper/step{N}`, complete or not at all.

    Several ranks: make one on each, with the same arguments, and call `dump` on each at the same
    steps, after backward. A fault never stops training: it is warned of once, counted in
    `problems`, and the dump is absent. With several ranks, `close` before the process group is
    destroyed.

    run_dir: the run directory; it need not exist.
    enabled: False writes nothing, and `dump` returns None.
    start_step, end_step, step_interval: which steps are due, as in `Schedule`.
    save_first_n: None writes everything as a torch distributed checkpoint, each rank its own part;
      a number writes that many first rows of each gradient as safetensors.
    keep_last: how many dumps are kept; older ones go once a new one is complete. The first dump of
      each finding (by its code) is kept beside them.
    max_bytes: how much all dumps may take; the oldest go once a new one is complete, the first ones
      of findings last of all.
    asynchronous: whether training waits only for a copy in memory, not for the disk.
    dump_on: under watch, also dump a step when something "warning" or worse, or "critical", is
      found of it, as it was before clipping; once when it begins. On an accelerator this waits for
      the gradients of every step; several ranks agree on it, in one small message a step.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        enabled: bool = True,
        start_step: int = 0,
        end_step: int | None = None,
        step_interval: int = 1,
        save_first_n: int | None = None,
        keep_last: int | None = None,
        max_bytes: int | None = None,
        asynchronous: bool = True,
        dump_on: Literal["warning", "critical"] | None = None,
    ) -> None:
        counts = {
            "save_first_n": save_first_n,
            "keep_last": keep_last,
            "max_bytes": max_bytes,
        }
        for name, value in counts.items():
            if value is not None:
                counts[name] = whole_number(value, name, least=1)
        for name, switch in {"enabled": enabled, "asynchronous": asynchronous}.items():
            # A text such as "no" would count as true.
            if not isinstance(switch, bool):
                raise UsageError(f"{name} must be True or False, got {switch!r}")
        if dump_on not in (None, *SEVERITIES):
            raise UsageError(f"dump_on must be 'warning', 'critical' or None, got {dump_on!r}")
        self.enabled = enabled
        self.dump_on = dump_on
        self.schedule = Schedule(start_step, end_step, step_interval)
        self.written = 0
        self.skipped = 0
        self.failed = 0
        self._limits = Limits(counts["keep_last"], counts["max_bytes"], counts["save_first_n"])
        kind = "full" if save_first_n is None else "sampled"
        self._layout = Layout(_usable(run_dir), kind)
        self._pool = Pool(1)
        self._writer = Writer(self._work, asynchronous)
        self._ranks: ProcessGroup | None = None
        self._turns = Turns()
        self._collector: Collector | None = None
        self._broken: Fault | None = None
        self._problems = Problems()
        self._unsaid: list[str] = []
        self._lock = threading.RLock()
        self._guard = Guard(
            self._problems, "fault", "the gradients were not dumped", passing=GradsightError
        )
        self._started = False
        self._closed = False
        self._guard.at_end(self._say)
        self._guard.at_end(self._leave_group)
        self._guard.at_end(self._writer.close)  # before the group, which its thread uses
        # The writer's thread is a daemon: at the end of the process it would be cut off in a dump.
        self._exit = partial(self._guard.attempt, self.close)
        atexit.register(self._exit)
        self._guard.at_end(atexit.unregister, self._exit)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be dumped any more."""
        return self._closed

    @property
    def problems(self) -> list[Problem]:
        """Faults so far that training survived, each kind once, with its count."""
        return self._problems.all()

    def wants(self, step: int) -> bool:
        """Whether a step is to be dumped by schedule."""
        return self.enabled and self.schedule.due(step)

    def wants_finding(self, severity: str) -> bool:
        """Whether a step of which this is found is to be dumped: as bad as `dump_on`, or worse."""
        if not self.enabled or self.dump_on is None:
            return False
        return severity in SEVERITIES[SEVERITIES.index(self.dump_on) :]

    def dump(self, model: torch.nn.Module, step: int, *, divisor: float = 1.0) -> Path | None:
        """Dump what is in `.grad` now, if the step is due, and return where it will lie.

        None: not due, or given up. `divisor` is the loss scale where gradients are still scaled. If
        asynchronous, the folder is there after wait().
        """
        path: Path | None = self._guard.attempt(self._dump, model, step, divisor)
        return path

    def capture(self, model: torch.nn.Module, step: int, facts: Facts) -> Path | None:
        """Dump now, whatever the schedule says, with known facts; nothing is raised."""
        try:
            return self._take(model, step, facts)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, UsageError):
                text = str(error)
            self._count(step, Fault("fault", text))
            self._say()
            return None

    def stage(self, model: torch.nn.Module, step: int, facts: Facts) -> Job | None:
        """Copy the gradients; `commit` writes them, `discard` forgets them. Nothing is raised."""
        try:
            self._say()
            ranks = self._join(step)
            if ranks is None:
                return None
            return self._look(model, step, facts, ranks)
        except Exception as error:
            self._count(step, Fault("fault", f"{type(error).__name__}: {error}"))
            self._say()
            return None

    def commit(self, job: Job, facts: Facts) -> None:
        """Write what was staged, with the facts as they are known now."""
        self._writer.put(replace(job, facts=facts))
        self._say()

    def discard(self, job: Job) -> None:
        """Forget what was staged."""
        if job.buffer is not None:
            self._pool.give(job.buffer)

    def dump_alone(self, group: ProcessGroup) -> None:
        """Other ranks will not dump: write what this one has whole, if it is the one to write."""
        self._ranks = ProcessGroup(alone=True)
        if not group.is_first:
            self._broken = Fault("ranks", "another rank writes the dumps")

    def wait(self) -> None:
        """Return when every dump so far is complete, or given up."""
        self._guard.attempt(self._wait)

    def close(self) -> None:
        """Finish every dump; afterwards nothing can be dumped."""
        self._closed = True
        self._guard.close()

    def __enter__(self) -> "GradientDumper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._guard.attempt(self.close)

    def _wait(self) -> None:
        self._writer.wait()
        self._say()

    def _leave_group(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def _dump(self, model: torch.nn.Module, step: int, divisor: float) -> Path | None:
        """Check the arguments, and dump the step if it is due."""
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"dump needs a torch.nn.Module, got {type(model).__name__}")
        step = whole_number(step, "step")
        divisor = single_number(divisor, "divisor")
        if not 0 < divisor < math.inf:
            raise UsageError(f"divisor must be a number above 0, got {divisor}")
        if not self.wants(step):
            return None
        facts = Facts(divisor=divisor)
        if divisor != 1.0:
            gradient = f"{facts.gradient}, divided by {divisor:g}"
            facts = replace(facts, scale=divisor, gradient=gradient)
        return self._take(model, step, facts)

    def _take(self, model: torch.nn.Module, step: int, facts: Facts) -> Path | None:
        """Copy the gradients and hand them to the writer."""
        if self._closed:
            raise UsageError("this GradientDumper is closed")
        self._say()
        ranks = self._join(step)
        if ranks is None:
            return None
        job = self._look(model, step, facts, ranks)
        self._writer.put(job)
        self._say()
        if job.buffer is None:
            return None
        return self._layout.final(step)

    def _look(self, model: torch.nn.Module, step: int, facts: Facts, ranks: ProcessGroup) -> Job:
        """Find the gradients and copy them; the other ranks hear of it when that fails here."""
        job = Job(step, facts, Gradients((), (), ()))
        try:
            if self._collector is None:
                self._collector = Collector(ranks.size, ranks.rank, self._limits.first_n)
            self._turns.uneven = allows_uneven_steps(model)
            gradients = self._collector.collect(model, unscale=facts.is_scaled)
            if ranks.size == 1 and not gradients.seen:
                advice = "call dump after backward() and before zero_grad()"
                raise UsageError(f"no parameter has a gradient at step {step}: {advice}")
        except UsageError as error:
            if ranks.size > 1:
                # The others are already on their way to meet this rank: it tells them, then raises.
                self._writer.put(replace(job, fault=Fault("usage", str(error))))
            raise
        except Exception as error:
            text = f"the gradients could not be read: {type(error).__name__}: {error}"
            return replace(job, fault=Fault("fault", text))
        return self._stage(gradients, step, facts)

    def _stage(self, gradients: Gradients, step: int, facts: Facts) -> Job:
        """The one thing that training waits for: a free buffer and a copy in memory."""
        job = Job(step, facts, without_tensors(gradients))
        # Of 200 MiB, training waits 39 ms for memory that is kept and a thread of ours; 160 ms for
        # torch's async_save, 248 ms for a synchronous save.
        buffer = self._pool.take()
        while buffer is None and self._pool.is_worth_waiting_for:
            has_waited = self._writer.wait_for_one()
            # Without a job to wait for, the last one has just ended: its buffer is free now.
            buffer = self._pool.take()
            if not has_waited:
                break
        if buffer is None:
            text = "dumps were skipped because an earlier one was still being written"
            return replace(job, fault=Fault("skipped", text))
        try:
            buffer.fill(gradients)
        except Exception as error:
            self._pool.give(buffer)
            return replace(
                job, fault=Fault("memory", f"the gradients could not be copied: {error}")
            )
        return replace(job, buffer=buffer)

    def _join(self, step: int) -> ProcessGroup | None:
        """The ranks that dump together; they meet at the first dump."""
        if self._ranks is None and self._broken is None:
            try:
                self._ranks = ProcessGroup("dumps", timeout=WRITING)
            except Exception as error:
                self._broken = Fault(
                    "ranks",
                    f"the ranks did not meet ({error}); dump() must be called on every rank",
                )
        if self._broken is not None:
            self._count(step, self._broken)
            self._say()
            return None
        return self._ranks

    def _work(self, job: Job) -> None:
        """Write one dump; runs in the writer's thread and lets nothing escape."""
        assert self._ranks is not None
        try:
            if self._broken is not None:
                self._count(job.step, self._broken)
                return
            with self._pool.freed_by_ranks(WAITING):
                absent = self._turns.meet(self._ranks)
            if absent is not None:
                self._count(job.step, absent)
                return
            outcome = run(job, self._layout, self._ranks, self._limits, first=not self._started)
            self._turns.done(self._ranks)
            self._started = self._started or outcome.fault is None
            for note in outcome.notes:
                self._note(job.step, note)
            if outcome.fault is None:
                self.written += 1
            else:
                self._count(job.step, outcome.fault)
        except Exception as error:
            if self._ranks.size > 1:
                self._broken = Fault(
                    "ranks", f"the ranks lost each other, there will be no further dumps: {error}"
                )
            self._count(
                job.step, self._broken or Fault("fault", f"{type(error).__name__}: {error}")
            )
        finally:
            if job.buffer is not None:
                self._pool.give(job.buffer)

    def _count(self, step: int, fault: Fault) -> None:
        """A dump that will not be there."""
        if fault.key == "skipped":
            self.skipped += 1
        else:
            self.failed += 1
        self._note(step, fault)

    def _note(self, step: int, fault: Fault) -> None:
        """Keep a problem; its first occurrence is to be said."""
        if not self._problems.count(fault.key, fault.message, step):
            return
        if self._ranks is None or self._ranks.rank == 0 or fault.key == "ranks":
            # The other ranks would only say again what rank 0 says.
            with self._lock:
                self._unsaid.append(f"gradient dump of step {step}: {fault.message}")

    def _say(self) -> None:
        """Warn of new problems, in the thread of the caller."""
        with self._lock:
            unsaid = self._unsaid
            self._unsaid = []
        for text in unsaid:
            say(text, stacklevel=5)


def _usable(run_dir: object) -> Path:
    """Where dumps can lie: a directory, or one that can be made."""
    path = directory_path(run_dir, "run_dir").absolute()
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise UsageError(f"run_dir must be a directory, but {place} is a file")
    return path
