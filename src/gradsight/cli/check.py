"""gradsight check SCRIPT [ARGS...]"""

import ast
import json as json_format
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gradsight.attach import __file__ as _attach
from gradsight.cli.command_lines import CheckCommand
from gradsight.core import rundir
from gradsight.errors import UsageError
from gradsight.show.text import json_text

if TYPE_CHECKING:
    from gradsight.cli.check_result import CheckResult

_WITH_VALUE = {"steps", "run_dir", "fail_on", "nproc_per_node", "health", "stop_on", "overfit"}


def check(
    script: str,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    steps: int | None = None,
    json: bool = False,
    run_dir: Annotated[Path | None, Parameter(name="--run_dir")] = None,
    fail_on: Annotated[
        Literal["warning", "critical", "never"], Parameter(name="--fail-on")
    ] = "warning",
    nproc_per_node: Annotated[int | None, Parameter(name="--nproc_per_node")] = None,
    health: Path | None = None,
    stop_on: Annotated[Literal["warning", "critical"] | None, Parameter(name="--stop-on")] = None,
    no_preflight: Annotated[bool, Parameter(name="--no-preflight", negative=())] = False,
) -> int:
    """Run an unmodified training script and judge its gradients.

    Options come before SCRIPT; what follows it is the script's.

    SCRIPT may also be -m and a module: gradsight check -m package.train. Or it is a launcher with
    its own arguments: gradsight check torchrun --nproc_per_node 2 train.py

    When to check. Before there are problems: a new architecture, a new loss, a switch to mixed
    precision, Transformers, RNNs, and very deep networks. When there are: the loss is NaN, stuck on
    a plateau, or unstable.

    Exits with 0 if all is fine, 1 with a warning (or if no optimizer step was seen), 2 if something
    is critical, 3 if the script itself failed without a critical finding, 64 for wrong usage.

    Parameters
    ----------
    script
        A Python file, -m for a module, or a launcher such as torchrun or accelerate.
    args
        Its arguments.
    steps
        Stop after so many optimizer steps.
    json
        Print the report as JSON on standard output; the script's own output then goes to standard
        error.
    run_dir
        Keep the record, report.md and report.html here. Without it, only the verdict is printed.
    fail_on
        What makes the exit code other than 0: warning, critical or never. A script that fails is
        always 3.
    nproc_per_node
        Run the script on so many ranks of this machine, through torchrun.
    health
        A TOML file that tunes or silences checks: [GS201] with factor = 20, or GS405 = false.
    stop_on
        End the script at the first finding that is at least so bad: warning or critical.
    no_preflight
        Skip the pre-flight: the extra passes at the first step, and the checks GS601 to GS614.
    """
    command = script_command(script, args, nproc_per_node)
    if steps is not None and steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {steps}")
    _check_health(health)
    with tempfile.TemporaryDirectory(prefix="gradsight-") as temporary:
        folder = (run_dir or Path(temporary)).resolve()
        make_new_run(folder)
        told = {
            "run_dir": str(folder),
            "steps": steps,
            "health": None if health is None else str(health.resolve()),
            "stop_on": stop_on,
            "preflight": not no_preflight,
        }
        code, error = run_watched(command, told, json, Path(temporary))
        from gradsight.cli.check_result import read_result

        result = read_result(folder, command, code, error)
        if run_dir is None:
            result.forget_incidents()
        else:
            result.write(folder)
        show_result(result, json, run_dir)
        if not json:
            given = {"steps": steps, "nproc_per_node": nproc_per_node, "stop-on": stop_on}
            again = CheckCommand(
                script=[script, *args],
                plain=command,
                options=_written(given),
                health=health,
                has_preflight=not no_preflight,
            )
            following = _next_commands(result, again)
            for line in ["", *following] if following else []:
                print(line)
        return result.exit_code(fail_on)


def _written(options: Mapping[str, object]) -> list[str]:
    """Options as tokens of a command line."""
    given = {name: value for name, value in options.items() if value is not None}
    return [token for name, value in given.items() for token in (f"--{name}", str(value))]


def _next_commands(result: "CheckResult", again: CheckCommand) -> list[str]:
    """What to type next: how to silence a finding, and how to run a script that failed."""
    lines: list[str] = []
    codes = result.root_codes
    if codes:
        lines += again.to_silence(codes)
    if result.code not in (0, -signal.SIGINT, -signal.SIGTERM):
        is_script = again.plain[0] == sys.executable
        ours = [
            token
            for token in again.script[1:]
            if token.startswith("--") and _option(token) in _WITH_VALUE
        ]
        # Parsers of arguments end the process, or raise an exception that says so.
        may_be_refused = not result.error or "argument" in result.error
        if ours and is_script and may_be_refused and not result.judged:
            given = ", ".join(ours)
            lines.append(
                f"{given} went to the script: options of gradsight check come before SCRIPT."
            )
        lines += again.after_failure()
    return lines


def split_tokens(tokens: Sequence[str]) -> list[str]:
    """The command line with `--` before SCRIPT, so that whatever follows it is left to the script.

    For every command that runs a script.

    >>> split_tokens(["check", "--steps", "5", "train.py", "--json", "--lr=1"])
    ['check', '--steps', '5', '--', 'train.py', '--json', '--lr=1']
    """
    position = 1
    while position < len(tokens) and tokens[position].startswith("-"):
        token = tokens[position]
        if token == "--":
            return list(tokens)
        if token == "-m":
            break
        takes_next = _option(token) in _WITH_VALUE and "=" not in token
        position += 1 + takes_next
    if position >= len(tokens):
        return list(tokens)
    return [*tokens[:position], "--", *tokens[position:]]


def _option(token: str) -> str:
    """The name of an option, however it is spelled."""
    return token.split("=")[0].lstrip("-").replace("-", "_")


def script_command(script: str, args: Sequence[str], ranks: int | None = None) -> list[str]:
    """The command to run: a Python file or a module with this interpreter, or a launcher."""
    if not script:
        raise UsageError("the script's name is empty; give a training script")
    if script == "-m":
        if not args:
            raise UsageError("-m needs the name of a module, such as package.train")
        return [sys.executable, *_torchrun(ranks), "-m", *args]
    file = Path(script)
    if file.suffix == ".ipynb":
        raise UsageError(
            f"{script} is a notebook; make a script of it: jupyter nbconvert --to script {script}"
        )
    if file.is_dir():
        raise UsageError(f"{script} is a directory; give a training script")
    if file.is_file() and not _is_launcher(file):
        _check_python(file)
        return [sys.executable, *_torchrun(ranks), script, *args]
    if not file.is_file() and (file.suffix == ".py" or "/" in script):
        raise UsageError(f"there is no script {script}")
    if ranks is not None:
        raise UsageError(
            f"--nproc_per_node is for a Python file; {script} is none. "
            f"Give the number of ranks to {script} itself"
        )
    # Beside this interpreter first: its environment need not be the active one.
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    launcher = shutil.which(script, path=folders)
    if launcher is None:
        text = f"there is no script {script}, and no launcher of that name"
        if _is_module(script):
            text += f"; for the module, type -m {script}"
        raise UsageError(text)
    return [launcher, *args]


def _torchrun(ranks: int | None) -> list[str]:
    """Arguments of Python that start so many ranks; none without a number."""
    if ranks is None:
        return []
    if ranks < 1:
        raise UsageError(f"--nproc_per_node must be 1 or more, got {ranks}")
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def _is_module(name: str) -> bool:
    """Whether this is the name of a module or package below the current directory."""
    path = Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _is_launcher(file: Path) -> bool:
    """Whether a file is a program of its own: a binary or a shell script that may be run."""
    if file.suffix == ".py" or not os.access(file, os.X_OK):
        return False
    try:
        _check_python(file)
    except UsageError:
        return True
    return False


def _check_python(file: Path) -> None:
    try:
        # What is not even Python is wrong usage, 64; run, it would count as a failed script, 3.
        ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise UsageError(f"{file} is not Python{where}: {error.msg}") from error
    except ValueError as error:  # a zero byte
        raise UsageError(f"{file} is not Python: {error}") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error


def _check_health(health: Path | None) -> None:
    if health is not None:
        import gradsight.health.judge  # noqa: F401  (files the checks)
        from gradsight.health.registry import chosen

        chosen(health)


def make_new_run(folder: Path) -> None:
    """Make it before the script runs: a long run must not be lost to a mistyped path."""
    if rundir.is_run(folder):
        raise UsageError(f"{folder} holds a run already; give a directory of its own")
    rundir.make_run_dir(folder)


def attached_environment(told: Mapping[str, object]) -> dict[str, str]:
    """The environment of a script that is to be watched; `told` is what `attach` is told."""
    site = Path(_attach).resolve().parent / "site"
    # A `sitecustomize` on the path reaches every process that a launcher starts; running the script
    # in this process would not.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])),
        "GRADSIGHT_CHECK": json_format.dumps(told),
        "GRADSIGHT_HOME": str(Path(_attach).resolve().parents[2]),
    }


def run_watched(
    command: list[str], told: Mapping[str, object], quiet: bool, folder: Path
) -> tuple[int, str]:
    """Run the script to its end.

    Return its exit code, negative for a signal, and the exception that ended it, if there was one.
    folder: for a temporary file.
    """
    error_file = folder / "error.txt"
    environment = {**attached_environment(told), "GRADSIGHT_ERROR": str(error_file)}
    # The child writes to the same stream: what was printed before it must not come after.
    sys.stdout.flush()
    child = subprocess.Popen(command, env=environment, stdout=sys.stderr if quiet else None)
    # Load the report's modules while the script imports torch.
    import gradsight.cli.check_result  # noqa: F401

    # Ctrl-C reaches the script by itself; the report still comes.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_terminate = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_terminate)
    is_known = code > 0 and error_file.exists()
    return code, error_file.read_text(encoding="utf-8") if is_known else ""


def show_result(result: "CheckResult", as_json: bool, run_dir: Path | None) -> None:
    """Print what a script came to."""
    if as_json:
        print(json_text(result.to_dict()))
        return
    print("\n".join(result.lines(sys.stdout)))
    if run_dir is not None:
        print(f"report: {run_dir / rundir.REPORT}")
