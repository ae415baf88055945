"""The switch: GRADSIGHT=0 in the environment, and nothing of ours looks or writes. No torch."""

import os

VARIABLE = "GRADSIGHT"
_OFF = ("0", "off", "false", "no")


def is_switched_off() -> bool:
    """Whether whoever started this process wants none of it."""
    # Asked at every opening, not once at import: a notebook may set it later.
    return os.environ.get(VARIABLE, "").strip().lower() in _OFF
