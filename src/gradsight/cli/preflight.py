"""gradsight preflight SCRIPT [ARGS...] | file.py:build"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gradsight.cli.build_function import load_build
from gradsight.cli.check import make_new_run, run_watched, script_command, show_result
from gradsight.cli.check_result import read_result
from gradsight.core import rundir
from gradsight.core.files import write_text
from gradsight.errors import UsageError
from gradsight.show.terminal import health_lines
from gradsight.show.text import json_text, wants_colour
from gradsight.values.health_report import HealthReport
from gradsight.values.texts import for_terminal

_BUILD = re.compile(r".+\.py:[A-Za-z_]\w*$")
_LEARNED = 0.2
"""A batch is learned when its loss is below this share of what it was."""


def preflight(
    script: str,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    json: bool = False,
    run_dir: Annotated[Path | None, Parameter(name="--run_dir")] = None,
    overfit: int | None = None,
) -> int:
    """Judge what a first step decides: leaks, targets, losses, modes, lost gradients.

    Options come before SCRIPT; what follows it is the script's. An unmodified training script runs
    until its first optimizer step and is ended there, without failing. A build function,
    file.py:build, returns (model, batch) or (model, batch, loss_fn).

    Exits with 0 if all is fine, 1 with a warning (or if no optimizer step was seen), 2 if something
    is critical, 3 if the script itself failed without a critical finding, 64 for wrong usage.

    Parameters
    ----------
    script
        A Python file, -m for a module, a launcher such as torchrun, or file.py:build.
    args
        Its arguments.
    json
        Print the report as JSON on standard output; the script's own output then goes to standard
        error.
    run_dir
        Keep the record and the report here.
    overfit
        With file.py:build: train a copy of the model on its one batch for so many steps, and say
        whether it learned it.
    """
    if _BUILD.match(script):
        if args:
            raise UsageError(f"{script} is a build function, which is given no arguments")
        return _judge_build(script, json, run_dir, overfit)
    if overfit is not None:
        raise UsageError("--overfit needs a build function: gradsight preflight file.py:build")
    command = script_command(script, args)
    with tempfile.TemporaryDirectory(prefix="gradsight-") as temporary:
        folder = (run_dir or Path(temporary)).resolve()
        make_new_run(folder)
        told = {"run_dir": str(folder), "steps": 1, "first_step_only": True}
        code, error = run_watched(command, told, json, Path(temporary))
        result = read_result(folder, command, code, error)
        if run_dir is None:
            result.forget_incidents()
        else:
            result.write(folder)
        show_result(result, json, run_dir)
        return result.exit_code()


def _judge_build(place: str, as_json: bool, run_dir: Path | None, overfit: int | None) -> int:
    if overfit is not None and overfit < 1:
        raise UsageError(f"--overfit must be 1 or more, got {overfit}")
    if run_dir is not None:
        make_new_run(run_dir)
    build = load_build(place)
    from gradsight.memory.workload import call_build
    from gradsight.session.preflight import preflight as look

    work = call_build(build)
    report = look(work.model, work.batch, work.loss_fn)
    losses: tuple[float, float] | None = None
    if overfit is not None:
        from gradsight.session.preflight import overfit_one_batch

        losses = overfit_one_batch(work.model, work.batch, work.loss_fn, overfit)
    if run_dir is not None:
        write_text(run_dir / rundir.REPORT, report.to_markdown())
    has_learned = losses is None or losses[1] < _LEARNED * losses[0]
    if as_json:
        answer: dict[str, Any] = {"build": place, **report.to_dict()}
        if losses is not None:
            answer["overfit"] = {"steps": overfit, "losses": losses, "learned": has_learned}
        print(json_text(answer))
    else:
        _show(report, overfit, losses, run_dir)
    return max(report.exit_code, 0 if has_learned else 1)


def _show(
    report: HealthReport,
    overfit: int | None,
    losses: tuple[float, float] | None,
    run_dir: Path | None,
) -> None:
    lines = health_lines(report, wants_colour(sys.stdout))
    for each in report.abstained:
        lines.append(for_terminal(f"not judged: {each.code} {each.name}: {each.reason}"))
    if losses is not None:
        word = "learned" if losses[1] < _LEARNED * losses[0] else "not learned"
        lines.append(f"one batch, {overfit} steps: {word}, loss {losses[0]:.4g} -> {losses[1]:.4g}")
    print("\n".join(lines))
    if run_dir is not None:
        print(f"report: {run_dir / rundir.REPORT}")
