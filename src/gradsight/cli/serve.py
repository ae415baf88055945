"""gradsight serve RUN|RUNS_DIR"""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gradsight.core import rundir
from gradsight.dump.reader import dumps_in
from gradsight.errors import MissingPackage, WrongPlace
from gradsight.show.serve.server import serve_folder

_PACKAGES = ("starlette", "uvicorn")
"""What the extra `serve` brings."""


def serve(
    folder: Path,
    /,
    *,
    port: int | None = None,
    open_page: Annotated[bool, Parameter(name="--open", negative="")] = False,
) -> int:
    """Show a run, or all runs of a folder, in the browser, live while they are being written.

    Listens on 127.0.0.1 only and prints the address, which carries a token: whoever does not have
    it gets nothing. From another machine, the `ssh -L` line that is printed leads there. Nothing is
    written into a run. Ctrl-C ends it.

    Parameters
    ----------
    folder
        A directory that `gradsight.watch(..., run_dir=...)` writes, or one that holds such.
    port
        Where to listen; 0 takes any free port. By default 6116, or a free one where that is taken.
    open_page
        Open the page in a browser.
    """
    for package in _PACKAGES:
        MissingPackage.refuse(package, "serve", "gradsight serve")
    path = rundir.directory_path(folder, "RUN")
    if not path.is_dir():
        raise WrongPlace(f"there is no folder at {path}")
    serve_folder(path, port, dumps_in, open_page)
    return 0
