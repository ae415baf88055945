"""A build function named on the command line: file.py:build."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gradsight.errors import UsageError, UserCodeError


def load_build(place: str) -> Callable[[], Any]:
    """The function that `file.py:name` names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not name or path.suffix != ".py":
        raise UsageError(f"a build function is given as file.py:function, got {place!r}")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = spec_from_file_location(f"gradsight_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # The file may import its neighbours, as when a script is run.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        kind = type(error).__name__
        raise UserCodeError(f"{path} raised {kind} when it was read: {error}") from error
    finally:
        sys.path.pop(0)
    build = getattr(module, name, None)
    if not callable(build):
        public = {known: value for known, value in vars(module).items() if known[0] != "_"}
        functions = [known for known, value in public.items() if callable(value)]
        known = ", ".join(functions) or "none"
        raise UsageError(f"{path} has no function {name!r}; it has {known}")
    return build  # type: ignore[no-any-return]
