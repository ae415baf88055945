"""A record as values that JSON knows. No torch."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """A record as mappings, lists, text and numbers.

    JSON knows no number that is not finite, so those become "nan", "inf" and "-inf".

    >>> plain({"norm": math.inf, "rows": (1, 2.5)})
    {'norm': 'inf', 'rows': [1, 2.5]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
