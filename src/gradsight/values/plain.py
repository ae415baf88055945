"""Plain forms: a record as values that JSON knows, names and counts as text. No torch."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from gradsight.values.texts import in_code


def plain(value: Any) -> Any:
    """A record as mappings, lists, text and numbers.

    JSON knows no number that is not finite, so those become "nan", "inf" and "-inf".

    >>> plain({"norm": math.inf, "rows": (1, 2.5)})
    {'norm': 'inf', 'rows': [1, 2.5]}
    """
    # Most values are leaves, and a dump's manifest has tens of thousands: they are asked for first.
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    # Before mappings: a record that can be read by key has more fields than keys.
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return value


def listed(names: Sequence[str], most: int) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b", "c"], most=3), listed(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def quoted(names: Sequence[str]) -> list[str]:
    """Names as code of Markdown."""
    return [f"`{in_code(name)}`" for name in names]


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "finding"), counted(2, "finding")
    ('1 finding', '2 findings')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def nearest(name: str, known: Sequence[str]) -> str:
    """The names that may have been meant by one that is not known, or else the first ones.

    >>> nearest("wieght", ["weight", "bias"])
    'nearest: weight'
    >>> nearest("zzz", ["weight", "bias"])
    'it has weight, bias'
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if near:
        return f"nearest: {', '.join(near)}"
    return f"it has {listed(known, most=8) or 'none'}"
