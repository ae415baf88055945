"""What a check came to: the runs it recorded, the script's own end, the verdict over all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.show.markdown import report_text
from gradsight.show.summary import Summary, summarize
from gradsight.show.terminal import health_lines
from gradsight.show.text import wants_colour
from gradsight.store.reader import open_run
from gradsight.store.run_files import write_report
from gradsight.values.health_report import SEVERITIES

FAILED = 3


@dataclass
class Outcome:
    """The runs of one check by the names of their models, and how the script ended."""

    command: list[str]
    code: int
    runs: dict[str, Summary] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    ours: Sequence[str] = ()
    """Options of ours that stood behind the script's name, and so went to the script."""

    @property
    def status(self) -> str:
        """The worst of all runs; a warning where nothing was seen."""
        seen = [summary.health.status for summary in self.runs.values() if summary.steps]
        return max(seen, key=SEVERITIES.index) if seen else "warning"

    def exit_code(self, fail_on: str = "warning") -> int:
        """0 fine, 1 warning, 2 critical, 3 the script failed without a critical finding."""
        level = SEVERITIES.index(self.status)
        if self.code and level < 2:
            return FAILED
        least = {"warning": 1, "critical": 2, "never": 3}[fail_on]
        return level if level >= least else FAILED if self.code else 0

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        models = {
            name: summary.health.to_dict() for name, summary in self.runs.items() if summary.steps
        }
        script = {"command": self.command, "exit_code": self.code}
        return {
            "status": self.status,
            "script": script,
            "models": models,
            "optimizers": self.optimizers,
        }

    def lines(self, stream: TextIO) -> list[str]:
        """For the terminal."""
        colour = wants_colour(stream)
        lines = ["", "─" * 79]
        shown = {name: summary for name, summary in self.runs.items() if summary.steps}
        if not shown:
            lines.append(
                "⚠️ no optimizer step was seen: nothing to judge. Does the script make a torch optimizer and step it?"
            )
        for name, summary in shown.items():
            lines += [f"{name}:"] if len(shown) > 1 else []
            lines += health_lines(summary.health, colour)
        return [*lines, "", *self.notes()]

    def notes(self) -> list[str]:
        """Where the optimizers are, and how the script ended."""
        lines = [_described(each) for each in self.optimizers]
        lines += self._ways()
        if self.code:
            how = (
                f"was killed by signal {-self.code}"
                if self.code < 0
                else f"failed with exit code {self.code}"
            )
            lines.append(f"The script {how}; the report covers what was seen before.")
            if self.ours:
                lines.append(
                    f"{', '.join(self.ours)} went to the script: options of gradsight check come before SCRIPT."
                )
        return lines

    def _ways(self) -> list[str]:
        """Whether gradients are clipped and scaled, as seen from the steps."""
        steps = [step for summary in self.runs.values() for step in summary.steps]
        if not steps:
            return []
        clipped = sum(step.clip_coef is not None and step.clip_coef < 1 for step in steps)
        scaled = any(step.scale is not None for step in steps)
        return [
            f"Clipping: {clipped} of {len(steps)} steps. Loss scaling: {'yes' if scaled else 'no'}."
        ]

    def forget_incidents(self) -> None:
        """The folder of this check is about to go: nothing may point there."""
        for name, summary in self.runs.items():
            findings = tuple(replace(finding, incident=None) for finding in summary.health.findings)
            health = replace(summary.health, findings=findings)
            self.runs[name] = replace(summary, health=health)

    def write(self, folder: Path) -> None:
        """report.md in every run's directory, and check.json beside the first."""
        folder.mkdir(parents=True, exist_ok=True)
        write_report(folder / rundir.CHECK, json.dumps(self.to_dict(), indent=1))
        for name, summary in self.runs.items():
            place = folder if name == next(iter(self.runs)) else folder / name
            write_report(place / rundir.REPORT, report_text(summary) + script_section(self.notes()))
        if not self.runs:
            write_report(
                folder / rundir.REPORT,
                "# Gradsight report\n\n**⚠️ no optimizer step was seen**\n"
                + script_section(self.notes()),
            )

    def write_patch(self, script: Path, file: Path) -> None:
        """A unified diff that mends the script, where that is known."""
        from gradsight.cli.patch import proposed_patch

        findings = [
            finding for summary in self.runs.values() for finding in summary.health.findings
        ]
        file.write_text(proposed_patch(script, findings, self.optimizers), encoding="utf-8")


def script_section(notes: Sequence[str]) -> str:
    """What is known of the script, as a section of report.md."""
    return "\n## The script\n\n" + "\n".join(f"- {note}" for note in notes) + "\n" if notes else ""


def gather(
    folder: Path, command: Sequence[str] = (), code: int = 0, ours: Sequence[str] = ()
) -> Outcome:
    """Read what a script has left in a directory; without a command, that of the check which wrote
    there, if one did.
    """
    kept = folder / rundir.CHECK
    if not command and kept.is_file():
        script = json.loads(kept.read_text())["script"]
        command, code = script["command"], script["exit_code"]
    outcome = Outcome(list(command), code, ours=ours)
    described = folder / rundir.SCRIPT
    if described.is_file():
        outcome.optimizers = json.loads(described.read_text())
    first = next((each["model"] for each in outcome.optimizers if "model" in each), "model")
    places = (
        [
            (first, folder),
            *((place.name, place) for place in sorted(folder.iterdir()) if place.is_dir()),
        ]
        if folder.is_dir()
        else []
    )
    for name, place in places:
        if rundir.is_run(place):
            try:
                outcome.runs[name] = summarize(open_run(place))
            except RunError:
                continue
    return outcome


def _described(optimizer: dict[str, Any]) -> str:
    made, steps = (optimizer.get(key) for key in ("made", "steps"))
    text = f"{optimizer['optimizer']} of {optimizer.get('model', 'a model that was not found')}"
    if made:
        text += f": made at {Path(made[0]).name}:{made[1]}"
    if steps:
        text += f", steps at {Path(steps[0]).name}:{steps[1]}"
    text += f", lr {optimizer['lr']:g}" if isinstance(optimizer.get("lr"), (int, float)) else ""
    return text + (", with a scheduler." if optimizer.get("scheduler") else ", no scheduler.")
