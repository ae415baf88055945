"""The user's own line in a stack of frames."""

import functools
import sys
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).resolve().parents[1])
_LIBRARY = f"{sys.base_prefix}/lib/python"


def users_line() -> str | None:
    """File and line of the innermost frame that is the user's own, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor an installed package's nor made up."""
    return not (filename.startswith(("<", _LIBRARY, _OWN)) or "site-packages" in filename)
