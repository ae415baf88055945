"""gradsight replay INCIDENT_DIR"""

import json as json_format
import textwrap
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.core import rundir
from gradsight.errors import GradsightError, RunError, UsageError
from gradsight.store.incident_format import read_document
from gradsight.store.incidents import merged
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.plain import plain
from gradsight.values.wording import diagnosis_lines

REPRODUCED = 2


def replay(
    incident_dir: Path,
    /,
    *,
    build: str | None = None,
    json: bool = False,
    diagnose_seconds: Annotated[
        float, Parameter(name=("--diagnose_seconds", "--diagnose-seconds"))
    ] = 60.0,
) -> int:
    """Run a recorded incident again: the first bad operation, the guilty samples.

    What was found in process, at the moment itself, is printed first, and needs nothing else. To
    run it again takes an incident of a run watched with recorder="batch", and the model: that of
    `gradsight train` is known, any other comes from --build.

    Exits with 2 if the fault was reproduced, 0 if not (or if nothing was run), 64 for wrong usage.

    Parameters
    ----------
    incident_dir
        A folder of a run's incidents/, for example runs/mine/incidents/step120-GS103.
    build
        A file and its function that returns (model, batch) or (model, batch, loss_fn); the model is used.
    json
        Print everything as JSON.
    diagnose_seconds
        How long the diagnosis may take.
    """
    if not diagnose_seconds > 0:
        raise UsageError(f"--diagnose_seconds must be more than 0, got {diagnose_seconds}")
    body = read_document(incident_dir)
    try:
        found = merged(incident_dir, body)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{incident_dir} is damaged: its diagnosis cannot be read: {error}"
        ) from error
    told: dict[str, Any] = {name: body.get(name) for name in ("step", "code", "reason", "versions")}
    told |= {
        "incident": str(incident_dir),
        "in_process": plain(found) if found is not None else None,
    }
    told |= {"replayed": None, "reproduced": None, "agrees": None}
    title = f"step {body.get('step')}, {body.get('code')}: {body.get('reason')}"
    lines = [
        *textwrap.wrap(title, 79, subsequent_indent="  "),
        "",
        *_block("found in process:", found),
    ]
    code = 0
    if build is None and (model := _model_of_run(incident_dir)) is None:
        lines += [
            "",
            f"Not run again: {body.get('replay') or 'give the model with --build file.py:build'}.",
        ]
    else:
        again = _again(
            incident_dir, body, build, None if build is not None else model, diagnose_seconds, found
        )
        told |= {
            "replayed": plain(again.diagnosis),
            "reproduced": again.reproduced,
            "agrees": again.agrees,
        }
        lines += [
            "",
            *_block("run again:", again.diagnosis),
            "",
            _verdict(again.reproduced, again.agrees),
        ]
        code = REPRODUCED if again.reproduced else 0
    print(json_format.dumps(told, indent=1) if json else "\n".join(lines))
    return code


def _again(
    path: Path,
    body: dict[str, Any],
    build: str | None,
    model: Any,
    seconds: float,
    found: Diagnosis | None,
) -> Any:
    """Run the incident with this model, or that of this build function."""
    if body.get("passes") is None and not list(
        path.parent.glob(f"{path.name.partition('-')[0]}-rank*")
    ):
        raise UsageError(f"{path} cannot be run again: {body.get('replay')}")
    from gradsight.incidents.replay import replay as run_again

    if build is not None:
        from gradsight.cli.build_function import load_build

        made = load_build(build)
        try:
            model, *_ = made()
        except GradsightError:
            raise
        except Exception as error:
            raise GradsightError(f"{build} raised {type(error).__name__}: {error}") from error
        import torch

        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"{build} must return (model, batch), got a {type(model).__name__} as its model"
            )
    return run_again(path, model, seconds, found)


def _model_of_run(path: Path) -> Any:
    """The model of a run of `gradsight train`, from the settings in its config.json; None for any
    other run.
    """
    file = path.resolve().parents[1] / rundir.CONFIG
    try:
        settings = json_format.loads(file.read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (
        not isinstance(settings, dict)
        or "train" not in settings
        or read_document(path).get("passes") is None
    ):
        return None
    from gradsight.train.models import model_from_settings

    return model_from_settings(settings["train"])


def _block(title: str, diagnosis: Diagnosis | None) -> list[str]:
    if diagnosis is None:
        return [title, "  nothing was diagnosed"]
    return [title, *(f"  {line}" for line in diagnosis_lines(diagnosis, 77))]


def _verdict(reproduced: bool, agrees: bool | None) -> str:
    if not reproduced:
        return "⚠️ The fault did not come back."
    if agrees is None:
        return "❌ Reproduced."
    if agrees:
        return "❌ Reproduced: the same as was found in process."
    return "❌ Reproduced, but it is not what was found in process: another machine, build or version may round differently."
