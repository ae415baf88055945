"""The names of the files and folders of a run directory. No torch.

run.sqlite                            the record: steps, statistics, scalars, findings, problems
run.sqlite-tail                       frames on their way into the record
config.json                           settings, versions, parameters
report.md, report.html, norms.svg     `gradsight report`, and others at the end of a run
incidents/step{N}-{CODE}/             the flight recorder's bundles
gradient_dumper/step{N}/              dumps
grad_dotprods/iter_{N}.parquet        scores of samples; .pkl beside it where that is asked for
training_log.json, checkpoints/       of the reference trainer
check.json, script.json               of `gradsight check`
tensorboard/                          the events of that sink
"""

import os
from pathlib import Path

from gradsight.core.places import kind_below
from gradsight.errors import UsageError, WrongPlace

RECORD = "run.sqlite"
TAIL = "run.sqlite-tail"
CONFIG = "config.json"
REPORT = "report.md"
PAGE = "report.html"
NORMS = "norms.svg"
INCIDENTS = "incidents"
DUMPS = "gradient_dumper"
SCORES = "grad_dotprods"
SCORE_FILES = "iter_*.parquet"
TRAINING_LOG = "training_log.json"
CHECKPOINTS = "checkpoints"
CHECKPOINT_FOLDERS = "step_*"
CHECK = "check.json"
SCRIPT = "script.json"
TENSORBOARD = "tensorboard"
SAMPLE_TEXTS = "sample_texts.json"


def directory_path(given: object, name: str) -> Path:
    """A directory that a user names; what is no path is an error that names the argument.

    >>> directory_path("runs/first", "run_dir").name
    'first'
    """
    if not isinstance(given, str | os.PathLike) or isinstance(os.fspath(given), bytes):
        raise UsageError(f"{name} must be a path, such as 'runs/first', got {given!r}")
    # Python takes an empty path for the working directory: nobody means that.
    if not os.fspath(given):
        raise UsageError(f"{name} must be a path, such as 'runs/first', got an empty text")
    return Path(given)


def score_file(iteration: int) -> str:
    """The name of the score file that ends before this step."""
    return f"iter_{iteration:06d}.parquet"


def checkpoint_folder(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step_{step:06d}"


def is_run(path: Path) -> bool:
    """Whether a folder holds a recorded run; one behind a link inside it does not count."""
    return kind_below(path, RECORD) == "file"


def make_run_dir(path: Path) -> None:
    """Make a run directory where there is none; an error where it could not be written."""
    if path.exists() and not path.is_dir():
        raise WrongPlace(
            f"run_dir {path} is a file; give a directory, or a name that does not exist yet"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongPlace(f"run_dir {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise WrongPlace(f"run_dir {path} is not writable")
