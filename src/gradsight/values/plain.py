"""A record as values that JSON knows. No torch."""

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """A record as values that JSON knows: mappings, lists, text, and numbers; what is not finite is
    "nan", "inf" or "-inf".

    >>> plain({"norm": math.inf, "rows": (1, 2.5)})
    {'norm': 'inf', 'rows': [1, 2.5]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
