"""gradsight replay INCIDENT_DIR"""

import textwrap
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.cli.build_function import load_build
from gradsight.errors import GradsightError, RunError, UsageError, UserCodeError
from gradsight.show.text import json_text
from gradsight.store.incident_format import batch_entries, read_incident, refuse_large_files
from gradsight.store.incidents import merged, rank_parts
from gradsight.store.run_files import read_run_config
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.plain import plain
from gradsight.values.texts import cleaned, for_terminal, on_one_line
from gradsight.values.wording import diagnosis_lines

REPRODUCED = 2


def replay(
    incident_dir: Path,
    /,
    *,
    build: str | None = None,
    json: bool = False,
    diagnose_seconds: Annotated[float, Parameter(name="--diagnose_seconds")] = 60.0,
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
        A file and its function that returns (model, batch) or (model, batch, loss_fn); the model
        is used. The file is imported: what trains in it must stand below
        `if __name__ == "__main__":`.
    json
        Print everything as JSON.
    diagnose_seconds
        How long the diagnosis may take.
    """
    if not diagnose_seconds > 0:
        raise UsageError(f"--diagnose_seconds must be more than 0, got {diagnose_seconds}")
    body = read_incident(incident_dir)
    in_process = merged(incident_dir, body)
    facts: dict[str, Any] = {
        "step": body.get("step"),
        "code": body.get("code"),
        "reason": body.get("reason"),
        "versions": body.get("versions"),
        "incident": str(incident_dir),
        "in_process": None if in_process is None else plain(in_process),
        "replayed": None,
        "reproduced": None,
        "agrees": None,
    }
    title = on_one_line(f"step {body.get('step')}, {body.get('code')}: {body.get('reason')}")
    lines = textwrap.wrap(title, 79, subsequent_indent="  ")
    lines += ["", *_block("found in process:", in_process)]
    code = 0
    model = _model(incident_dir, body, build)
    if model is None:
        reason = body.get("replay") or "give the model with --build file.py:build"
        lines += ["", on_one_line(f"Not run again: {reason}.")]
    else:
        from gradsight.incidents.replay import replay as run_again

        try:
            again = run_again(incident_dir, model, diagnose_seconds, in_process)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if build is not None or isinstance(error, GradsightError):
                raise
            # The model is ours, and the batch a stranger's, that fits nothing.
            raise RunError(
                f"{incident_dir} cannot be run again: {type(error).__name__}: {error}"
            ) from error
        facts["replayed"] = plain(again.diagnosis)
        facts["reproduced"] = again.reproduced
        facts["agrees"] = again.agrees
        lines += ["", *_block("run again:", again.diagnosis)]
        lines += ["", _verdict(again.reproduced, again.agrees)]
        if again.reproduced:
            code = REPRODUCED
    print(json_text(facts) if json else "\n".join(lines))
    return code


def _model(path: Path, body: dict[str, Any], build: str | None) -> Any:
    """The model to run the incident with; None where it cannot be known."""
    if build is not None:
        # Of several ranks each writes its own batch, in a folder beside the first one's.
        if body.get("passes") is None and not rank_parts(path):
            raise UsageError(f"{path} cannot be run again: {body.get('replay')}")
        return _built(build)
    settings = None
    if body.get("passes") is not None:
        settings = _train_settings(path)
    if settings is None:
        return None
    from gradsight.train.models import bounded_model

    refuse_large_files(path, body)
    return bounded_model(settings, batch_entries(path, body))


def _built(place: str) -> Any:
    """The model of a build function."""
    build = load_build(place)
    try:
        model, *_ = build()
    except GradsightError:
        raise
    except Exception as error:
        raise UserCodeError(f"{place} raised {type(error).__name__}: {error}") from error
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{place} must return (model, batch), got a {type(model).__name__} as its model"
        )
    return model


def _train_settings(path: Path) -> dict[str, Any] | None:
    """The settings of `gradsight train` in the incident's run; None for any other run."""
    try:
        settings = read_run_config(path.resolve().parents[1]).get("settings")
    except (RunError, IndexError):
        return None
    train = settings.get("train") if isinstance(settings, dict) else None
    return train if isinstance(train, dict) else None


def _block(title: str, diagnosis: Diagnosis | None) -> list[str]:
    if diagnosis is None:
        return [title, "  nothing was diagnosed"]
    safe = cleaned(diagnosis, for_terminal)
    return [title, *(f"  {line}" for line in diagnosis_lines(safe, 77))]


def _verdict(reproduced: bool, agrees: bool | None) -> str:
    if not reproduced:
        return "⚠️ The fault did not come back."
    if agrees is None:
        return "❌ Reproduced."
    if agrees:
        return "❌ Reproduced: the same as was found in process."
    return (
        "❌ Reproduced, but it is not what was found in process: "
        "another machine, build or version may round differently."
    )
