"""A build function named on the command line: file.py:build."""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from gradsight.errors import GradsightError, UsageError


def load_build(place: str) -> Callable[[], Any]:
    """The function that `file.py:name` names; the file's folder can be imported from, as when a
    script is run.
    """
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
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise GradsightError(
            f"{path} raised {type(error).__name__} when it was read: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    build = getattr(module, name, None)
    if not callable(build):
        functions = [
            known
            for known, value in vars(module).items()
            if callable(value) and not known.startswith("_")
        ]
        raise UsageError(
            f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}"
        )
    return build  # type: ignore[no-any-return]
