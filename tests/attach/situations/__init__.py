"""Small training scripts, healthy and faulty, and what `gradsight check` must say about each.

Each module of this package holds one list, `SITUATIONS`. A situation is a script that does not
import Gradsight, with the exit code, the findings, the models and the number of steps that the
command must report. `tests/golden/script_cases.py` runs them and records the rest of the output.

    PYTHONPATH=$PWD/../src python -m attach.situations [NAME...]    # in tests/: run and print them

The scripts may use `torch`, `nn`, `F`, `dist` and `math` without importing them.
"""

import contextlib
import importlib
import io
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gradsight
import warm

HEADER = """import math
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
"""


@dataclass(frozen=True)
class Situation:
    """A script and what the command must say about it."""

    name: str
    script: str
    exit_code: int = 0
    findings: Sequence[str] = ()
    """The codes that must be reported, over all models; no others may be."""
    first: str | None = None
    """The code that must be shown first."""
    caused_by: dict[str, str] = field(default_factory=dict)
    """By code, the finding that it must follow from."""
    models: dict[str, int] | None = None
    """The names of all models with the number of steps of each; None: not compared."""
    says: Sequence[str] = ()
    """Texts that the terminal output must contain, with line breaks read as spaces."""
    never_says: Sequence[str] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    """By code of a check that was skipped: a part of the reason that must be given."""
    not_skipped: Sequence[str] = ()
    """Codes of checks that must not have been skipped."""
    arguments: Sequence[str] = ()
    """Options of `gradsight check` before the script, such as --nproc_per_node 2."""
    preload: Sequence[str] = ()
    """Modules that the process of the script has imported already, to save time."""
    slow: bool = False

    @property
    def source(self) -> str:
        """The whole script."""
        return HEADER + self.script


def all_situations() -> dict[str, Situation]:
    """Return the situations of all modules by name."""
    found: dict[str, Situation] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        for each in importlib.import_module(f"{__name__}.{module.name}").SITUATIONS:
            assert each.name not in found, f"there are two situations {each.name!r}"
            found[each.name] = each
    return found


@dataclass(frozen=True)
class Outcome:
    """What the command said about a script."""

    exit_code: int
    output: str
    errors: str
    report: dict[str, Any]
    """check.json."""
    skipped: dict[str, str]
    """By code: why a check was skipped, in any of the runs."""

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The findings of all models, in the order shown."""
        models = self.report.get("models", {}).values()
        return [finding for model in models for finding in model["findings"]]

    @property
    def words(self) -> str:
        """Everything printed, on one line."""
        return " ".join((self.output + self.errors).split())

    def mistakes(self, expected: Situation) -> list[str]:
        """Return what differs from the expectation."""
        wrong = []

        def compare(what: str, now: object, wanted: object) -> None:
            if now != wanted:
                wrong.append(f"{what}: {now!r}, expected {wanted!r}")

        codes = [finding["code"] for finding in self.findings]
        compare("exit code", self.exit_code, expected.exit_code)
        compare("findings", sorted(codes), sorted(expected.findings))
        if expected.first is not None:
            compare("first finding", codes[:1], [expected.first])
        causes = {finding["code"]: finding["caused_by"] for finding in self.findings}
        for code, cause in expected.caused_by.items():
            compare(f"cause of {code}", causes.get(code), cause)
        if expected.models is not None:
            models = self.report.get("models", {})
            steps = {name: model["steps"] for name, model in models.items()}
            compare("models", steps, dict(expected.models))
        wrong += [f"does not say {text!r}" for text in expected.says if text not in self.words]
        wrong += [f"says {text!r}" for text in expected.never_says if text in self.words]
        for code, reason in expected.reasons.items():
            if reason not in self.skipped.get(code, ""):
                wrong.append(f"{code} skipped because {self.skipped.get(code)!r}, not {reason!r}")
        for code in expected.not_skipped:
            if code in self.skipped:
                wrong.append(f"{code} was skipped: {self.skipped[code]}")
        return wrong


def run(situation: Situation) -> Outcome:
    """Run `gradsight check` on the script of a situation."""
    with tempfile.TemporaryDirectory() as folder:
        return check(situation, Path(folder))


def check(situation: Situation, folder: Path) -> Outcome:
    """Run `gradsight check` on the script of a situation, in this folder."""
    script = folder / "train.py"
    script.write_text(situation.source, encoding="utf-8")
    run_dir = folder / "run"
    command = ["check", "--run_dir", str(run_dir), *situation.arguments, str(script)]
    code, output, errors = _command(command, situation.preload, folder)
    return Outcome(
        code,
        output.replace(str(folder), "FOLDER"),
        errors.replace(str(folder), "FOLDER"),
        json.loads((run_dir / "check.json").read_text(encoding="utf-8")),
        _skipped(run_dir),
    )


def _command(command: list[str], preload: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run the command in this process, and its script in a fork that has torch loaded (warm.py)."""
    from gradsight.cli import main

    said: list[tuple[str, str]] = []

    def start(args: list[str], env: dict[str, str], **_: Any) -> Any:
        settings = {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options |= {"env": settings, "text": True, "cwd": folder}
        is_script = args[0] == sys.executable and args[1] != "-m"
        if is_script:
            child: Any = warm.Popen(args[1:], preload=preload, **options)
        else:
            child = subprocess.Popen(args, **options)

        def wait() -> int:
            said.append(child.communicate())
            return int(child.returncode)

        return SimpleNamespace(wait=wait, terminate=child.terminate)

    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch("gradsight.cli.check.subprocess", SimpleNamespace(Popen=start)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main(command)
    ((script_output, script_errors),) = said
    return code, script_output + output.getvalue(), script_errors + errors.getvalue()


def _skipped(run_dir: Path) -> dict[str, str]:
    folders = [run_dir, *(each for each in sorted(run_dir.iterdir()) if each.is_dir())]
    runs = [folder for folder in folders if (folder / "config.json").exists()]
    return {
        each.code: each.reason
        for folder in runs
        for each in gradsight.open_run(folder).abstentions()
    }
