"""What is wrong with the score files of a run: damaged ones, and those that are gone. No torch."""

import fnmatch
from collections.abc import Iterator
from pathlib import Path

from gradsight.core import rundir
from gradsight.errors import RunError
from gradsight.store.parquet_footer import read_footer
from gradsight.store.score_seal import footer_start, read_sealed
from gradsight.store.scores import BEFORE, iteration_of, score_files
from gradsight.values.findings import Problem


def score_problems(run_dir: Path) -> Iterator[Problem]:
    """A problem for each file that cannot be trusted, or is known to others and is not there.

    A file knows the name of the one before it. That the last one is gone cannot be seen.
    """
    files = score_files(run_dir)
    present = {file.name for file in files}
    start = 0
    for file in files:
        try:
            before = _file_before(read_sealed(file), str(file))
        except FileNotFoundError:
            continue  # a writer has taken it into another file meanwhile
        except (OSError, RunError) as error:
            yield Problem(f"scores {file.name}", str(error), start, 1)
            before = None
        if before is not None and before not in present:
            yield Problem(f"scores {before}", _is_missing(before), start, 1)
        start = iteration_of(file) or start


def _file_before(data: bytes, name: str) -> str | None:
    """The name of the file before, as the bytes of a score file tell it; None for the first."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        read_footer(data, footer_start(data))
        schema = ParquetFile(pyarrow.BufferReader(data)).schema_arrow
        metadata = schema.field("step").metadata or {}
        before = metadata.get(BEFORE.encode(), b"").decode()
    except (OSError, KeyError, TypeError, ValueError, pyarrow.ArrowException) as error:
        first_line = next(iter(str(error).splitlines()), error)
        raise RunError(f"{name} cannot be read: {first_line}") from error
    # A stranger may have written it: only a name of ours is one.
    is_ours = fnmatch.fnmatch(before, rundir.SCORE_FILES) and len(before) < 60
    return before if is_ours else None


def _is_missing(name: str) -> str:
    return (
        f"{rundir.SCORES}/{name} is missing: the scores of its steps are nowhere. It was there "
        f"when the file after it was written"
    )
