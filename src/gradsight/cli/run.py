"""gradsight run SCRIPT [ARGS...]"""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gradsight.cli.check import attached_environment, script_command
from gradsight.core.switch import is_switched_off
from gradsight.errors import UsageError

_RUNS = Path("runs")


def run(
    script: str,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    run_dir: Annotated[Path | None, Parameter(name="--run_dir")] = None,
) -> int:
    """Run an unmodified training script and record its gradients.

    Options come before SCRIPT; what follows it is the script's. Its output, its exit code and what
    it does are its own: the record is all that is new. Under Hugging Face's Trainer and Lightning
    the callback is put in, so that loss, ids and resuming are right.

    SCRIPT may also be -m and a module: gradsight run -m package.train. Or it is a launcher with its
    own arguments: gradsight run torchrun --nproc_per_node 2 train.py

    Parameters
    ----------
    script
        A Python file, -m for a module, or a launcher such as torchrun or accelerate.
    args
        Its arguments.
    run_dir
        Where the record goes; a run that is there is continued. Without it, a new folder of the
        script's name in runs/, which is said.
    """
    command = script_command(script, args)
    environment = dict(os.environ)
    if not is_switched_off():
        name = args[0].rpartition(".")[2] if script == "-m" else Path(script).stem
        folder = _folder(run_dir, name)
        environment = attached_environment({"run_dir": str(folder), "keep": True})
    sys.stdout.flush()
    sys.stderr.flush()
    # In the place of this process: signals, standard input and the exit code are the script's.
    os.execvpe(command[0], command, environment)


def _folder(given: Path | None, name: str) -> Path:
    if given is not None:
        if given.exists() and not given.is_dir():
            raise UsageError(f"--run_dir {given} is a file; give a directory")
        return given.resolve()
    folder = _RUNS / name
    number = 1
    while folder.exists():
        number += 1
        folder = _RUNS / f"{name}-{number}"
    print(f"gradsight: recording into {folder}", file=sys.stderr)
    return folder.resolve()
