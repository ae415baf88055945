"""File names that parameters of any name can be given."""

import hashlib
import re
from collections.abc import Iterable

LONGEST = 180
"""Bytes of a file name that come from the parameter's name; file systems allow 255 in all."""


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A file name for each parameter name: the name itself where safe and short, else a readable
    part and a hash.

    >>> file_stems(["wte.weight", "a/b"])
    {'wte.weight': 'wte.weight', 'a/b': 'a_b-c14cddc033f6'}
    """
    stems: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem = re.sub(r"[\x00-\x1f\x7f/\\:*?\"<>|]", "_", name)
        if (
            stem != name
            or len(stem.encode()) > LONGEST
            or stem.casefold() in taken
            or not stem.strip(". ")
        ):
            stem = f"{_shorten(stem)}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
        stems[name] = stem
        taken.add(stem.casefold())
    return stems


def _shorten(stem: str) -> str:
    """The beginning of a name that fits, cut between characters."""
    return stem.encode()[: LONGEST - 13].decode(errors="ignore")
