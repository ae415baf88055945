"""What a check came to: the runs it recorded, the script's own end, the verdict over all."""

import json
import os
import signal
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from gradsight.core import limits, rundir
from gradsight.core.documents import load_json, load_object
from gradsight.core.places import kind_below, names_in, read_file
from gradsight.core.records import read_record, read_value
from gradsight.dump.reader import dumps_in
from gradsight.errors import RunError
from gradsight.show.run_report import write_empty_reports, write_reports
from gradsight.show.summary import Summary, summarize
from gradsight.show.terminal import findings_lines, health_lines
from gradsight.show.text import BOLD, RED, WIDTH, tinted, wants_colour
from gradsight.store.reader import open_run
from gradsight.store.run_files import write_report
from gradsight.values.causes import roots_of
from gradsight.values.health_report import SEVERITIES, SIGNS
from gradsight.values.plain import counted
from gradsight.values.steps import Step
from gradsight.values.texts import for_terminal, on_one_line

FAILED = 3


@dataclass
class CheckResult:
    """The runs of one check by the names of their models, and how the script ended."""

    command: list[str]
    code: int
    runs: dict[str, Summary] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    """The exception that ended the script, if that is known."""

    @property
    def judged(self) -> dict[str, Summary]:
        """The runs in which steps or faults were seen, the most severe first."""
        seen = [
            (name, summary)
            for name, summary in self.runs.items()
            if summary.steps or summary.health.findings
        ]
        seen.sort(key=lambda each: -SEVERITIES.index(each[1].health.status))
        return dict(seen)

    @property
    def root_codes(self) -> list[str]:
        """The codes of all findings that follow from none, in the order shown."""
        health = [summary.health for summary in self.judged.values()]
        codes = [finding.code for each in health for finding in roots_of(each.findings)]
        return list(dict.fromkeys(codes))

    @property
    def failure(self) -> str | None:
        """How the script failed, in a sentence without a full stop; None if it did not."""
        if not self.code:
            return None
        how = f"failed with exit code {self.code}"
        if self.code < 0:
            how = f"was killed by signal {-self.code}"
        if self.code == -signal.SIGINT:
            how = "was interrupted"
        steps = max((len(summary.steps) for summary in self.judged.values()), default=0)
        when = f"after {counted(steps, 'optimizer step')}"
        if not steps:
            when = "before its first optimizer step"
        error = f": {self.error}" if self.error else ""
        return f"The script {how} {when}{error}"

    @property
    def status(self) -> str:
        """The worst of all runs; a warning where nothing was seen."""
        statuses = [summary.health.status for summary in self.judged.values()]
        return max(statuses, key=SEVERITIES.index, default="warning")

    def exit_code(self, fail_on: str = "warning") -> int:
        """0 fine, 1 warning, 2 critical, 3 the script failed without a critical finding."""
        level = SEVERITIES.index(self.status)
        if self.code and level < 2:
            return FAILED
        least = {"warning": 1, "critical": 2, "never": 3}[fail_on]
        if level >= least:
            return level
        return FAILED if self.code else 0

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "status": self.status,
            "script": {"command": self.command, "exit_code": self.code, "error": self.error},
            "models": {name: summary.health.to_dict() for name, summary in self.judged.items()},
            "optimizers": self.optimizers,
        }

    def lines(self, stream: TextIO) -> list[str]:
        """For the terminal."""
        colour = wants_colour(stream)
        lines = ["", "─" * 79]
        if self.failure is not None:
            failure = _wrapped(f"{SIGNS['critical']} {self.failure}")
            lines += [tinted(line, f"{BOLD};{RED}", colour) for line in failure]
        elif not self.judged:
            lines += _wrapped(
                f"{SIGNS['warning']} no optimizer step was seen: nothing to judge. "
                "Does the script make a torch optimizer and step it?"
            )
        for name, summary in self.judged.items():
            if len(self.judged) > 1:
                lines.append(f"{on_one_line(name)}:")
            if summary.steps:
                lines += health_lines(summary.health, colour, failed=self.failure is not None)
            else:
                lines += findings_lines(summary.health.findings, colour)
        notes = [*self._apart(), *self._optimizers(), *self._clipping_and_scaling()]
        if notes:
            lines.append("")
        return [*lines, *(line for note in notes for line in _wrapped(note))]

    def notes(self) -> list[str]:
        """How the script failed, and where its optimizers are."""
        failure = [] if self.failure is None else [f"{self.failure}."]
        return [
            *failure,
            *self._apart(),
            *self._optimizers(),
            *self._clipping_and_scaling(),
        ]

    def _apart(self) -> list[str]:
        """Return the line on processes that were launched together and share nothing."""
        counts = [each.get("processes_apart") or 0 for each in self.optimizers]
        count = max(counts, default=0)
        # A single process that trains has nothing to share.
        if not count or len(self.judged) < 2:
            return []
        return [_APART.format(count=count)]

    def _optimizers(self) -> list[str]:
        return [self._described(each) for each in self.optimizers]

    def _described(self, optimizer: Mapping[str, Any]) -> str:
        """An optimizer as a sentence: of which model, where it is made and steps, its rate."""
        if isinstance(optimizer.get("passes"), int):
            return _OWN_UPDATES.format(passes=optimizer["passes"])
        if isinstance(optimizer.get("frozen"), str):
            text = _FROZEN.format(model=optimizer["frozen"])
            return text + _FROZEN_ADAPTERS * (optimizer.get("adapters") is True)
        text = (
            f"{optimizer['optimizer']} of {optimizer.get('model') or 'a model that was not found'}"
        )
        made = optimizer.get("made")
        if made:
            text += f": made at {self._place(*made)}"
        steps = optimizer.get("steps")
        if steps:
            text += f", steps at {self._place(*steps)}"
        elif made:
            text += ", never stepped"
        recorded = self._recorded_rates(optimizer)
        known = [optimizer.get("lr"), *recorded]
        rates = [rate for rate in known if isinstance(rate, (int, float))]
        if optimizer.get("scheduler"):
            return (
                f"{text}, lr up to {max(rates):g} with a scheduler."
                if rates
                else f"{text}, with a scheduler."
            )
        if len(recorded) > 1:
            return f"{text}, lr up to {max(rates):g}, set by the script."
        if rates:
            text += f", lr {rates[0]:g}"
        return f"{text}, no scheduler."

    def _place(self, file: str, line: int) -> str:
        """Return file:line, relative to the working directory unless it is in the script itself."""
        name = os.path.basename(file)
        is_script = any(os.path.basename(token) == name for token in self.command)
        if not is_script and Path(file).is_relative_to(Path.cwd()):
            name = str(Path(file).relative_to(Path.cwd()))
        return f"{name}:{line}"

    def _recorded_rates(self, optimizer: Mapping[str, Any]) -> set[float]:
        """The rates that it had at its steps; none where other optimizers share its model.

        A scheduler may begin at zero and end there, so that one rate says nothing.
        """
        name = optimizer.get("model")
        sharing = [each for each in self.optimizers if each.get("model") == name]
        if len(sharing) > 1 or name not in self.runs:
            return set()
        return {step.lr for step in self.runs[name].steps if step.lr is not None}

    def _clipping_and_scaling(self) -> list[str]:
        """Return the line on clipping and loss scaling, counted over the steps of each model."""
        steps = {name: summary.steps for name, summary in self.runs.items() if summary.steps}
        if not steps:
            return []
        counts = {
            name: (sum(step.clip_coef is not None and step.clip_coef < 1 for step in own), len(own))
            for name, own in steps.items()
        }
        clipped = {name: count for name, count in counts.items() if count[0]}
        if len(counts) == 1:
            ((some, all_steps),) = counts.values()
            text = f"{some} of {all_steps} steps"
        elif clipped:
            # A sum over models would count one step of the script several times.
            text = ", ".join(
                f"{name} in {some} of {all_steps} steps"
                for name, (some, all_steps) in clipped.items()
            )
        else:
            text = "none, in any model"
        scaled = any(step.scale is not None for own in steps.values() for step in own)
        scaling = f"yes{_skipped_by_scaler(steps)}" if scaled else "no"
        return [f"Clipping: {text}. Loss scaling: {scaling}."]

    def forget_incidents(self) -> None:
        """The folder of this check is about to go: nothing may point there."""
        for name, summary in self.runs.items():
            findings = tuple(replace(finding, incident=None) for finding in summary.health.findings)
            health = replace(summary.health, findings=findings)
            self.runs[name] = replace(summary, health=health)

    def write(self, folder: Path) -> None:
        """The report in every run's directory, and check.json beside the first."""
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may be reading it.
        write_report(folder / rundir.CHECK, json.dumps(self.to_dict(), indent=1))
        for number, (name, summary) in enumerate(self.runs.items()):
            place = folder / name if number else folder
            shown = replace(summary, failure=self.failure)
            write_reports(open_run(place), shown, notes=self.notes())
        if not self.runs:
            write_empty_reports(folder, self.notes(), self.failure)


def _skipped_by_scaler(steps: Mapping[str, Sequence[Step]]) -> str:
    """How many of the steps a GradScaler skipped, in brackets; empty if it skipped none.

    steps: those of each model.
    """
    counts = {
        name: sum(step.skipped and step.scale is not None for step in own)
        for name, own in steps.items()
    }
    skipped = [
        f"{count} skipped by the GradScaler" + (f" in {name}" if len(counts) > 1 else "")
        for name, count in counts.items()
        if count
    ]
    return f" ({', '.join(skipped)})" if skipped else ""


def _wrapped(text: str) -> list[str]:
    # Names and commands stay whole, so that they can be copied.
    line = for_terminal(text)
    return textwrap.wrap(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def read_result(
    folder: Path, command: Sequence[str] = (), code: int = 0, error: str = ""
) -> CheckResult:
    """The result that a script has left in a directory.

    Without a command, that of the check which wrote there, if one did.
    """
    if not command:
        kept = load_check(_bytes_of(folder, rundir.CHECK), str(folder / rundir.CHECK))
        command, code, error = kept.command, kept.exit_code, kept.error
    result = CheckResult(list(command), code, error=error)
    result.optimizers = load_script(_bytes_of(folder, rundir.SCRIPT), str(folder / rundir.SCRIPT))
    for name, place in _recorded_runs(folder, result.optimizers).items():
        try:
            result.runs[name] = summarize(open_run(place), dumps_in(place))
        except RunError:
            continue
    return result


@dataclass(frozen=True, slots=True)
class KeptCheck:
    """What check.json says of the script that was run."""

    command: tuple[str, ...] = ()
    exit_code: int = 0
    error: str = ""


def load_check(data: bytes | None, name: str) -> KeptCheck:
    """What check.json says; nothing where there is none."""
    if data is None:
        return KeptCheck()
    return read_record(KeptCheck, load_object(data, name).get("script"), f"the script in {name}")


def load_script(data: bytes | None, name: str) -> list[dict[str, Any]]:
    """The optimizers of script.json; none where there is none."""
    if data is None:
        return []
    optimizers: list[dict[str, Any]] = load_json(data, name)
    described = read_value(tuple[Mapping[str, Any], ...], optimizers, name)
    if len(described) > limits.OPTIMIZERS:
        raise RunError(f"{name} names {len(described)} optimizers; at most {limits.OPTIMIZERS}")
    for optimizer in described:
        for key, kind in _OPTIMIZER.items():
            read_value(kind, optimizer.get(key), f"{key!r} in {name}")
    return optimizers


_OPTIMIZER: dict[str, Any] = {
    "optimizer": str,
    "model": str | None,
    "made": tuple[str, int] | None,
    "steps": tuple[str, int] | None,
    "processes_apart": int | None,
}
"""What is used of an optimizer, and what it has to be."""


def _bytes_of(folder: Path, name: str) -> bytes | None:
    """The bytes of a file that a check left; None where it left none."""
    if kind_below(folder, name) is None:
        return None
    try:
        return read_file(folder, name, limits.DOCUMENT_BYTES)
    except OSError as error:
        raise RunError(f"{folder / name} cannot be read: {error.strerror}") from error


def runs_inside(folder: Path) -> list[Path]:
    """The runs in a run's directory: those of a script's further models."""
    names = [name for name in names_in(folder) if kind_below(folder, name) == "folder"]
    return [folder / name for name in names if rundir.is_run(folder / name)][: limits.MODELS]


def _recorded_runs(folder: Path, optimizers: list[dict[str, Any]]) -> dict[str, Path]:
    """Where the runs are, by the names of their models: the first in the folder itself."""
    if not folder.is_dir():
        return {}
    models = [optimizer["model"] for optimizer in optimizers if optimizer.get("model") is not None]
    first = models[0] if models else "model"
    own = {first: folder} if rundir.is_run(folder) else {}
    return own | {place.name: place for place in runs_inside(folder)}


_APART = (
    "{count} processes were launched together, but the script created no process group. Unless it "
    "averages gradients in another way, each process trains its own model. To train one model "
    "together, call torch.distributed.init_process_group(), wrap the model in "
    "DistributedDataParallel, and give each rank its part of the data (DistributedSampler)."
)
_OWN_UPDATES = (
    "Gradsight saw {passes} backward passes, but no torch optimizer. The script seems to update "
    "its weights itself, so nothing was checked. To check it, use `with gradsight.watch(model) as "
    "watched:` and call watched.step() once per update, after backward() and before clipping."
)


_FROZEN = "No parameter of {model} requires a gradient, so there is nothing to train."
_FROZEN_ADAPTERS = (
    " Its adapters are frozen: PeftModel.from_pretrained() freezes them unless you pass "
    "is_trainable=True."
)
