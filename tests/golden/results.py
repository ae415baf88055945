"""Groups of cases: how they are run, stored and compared."""

import builtins
import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import gradsight

HERE = Path(__file__).parent
WIDTH = 120


@dataclass(frozen=True)
class Group:
    """Cases that are stored in one file, and the tolerance of their floats.

    Everything but floats is compared exactly. Two floats agree if they differ by at most
    `tolerance` times the stored one. With `of_largest`, it is `tolerance` times the largest number
    of the same list: scores are sums that may cancel out.
    """

    name: str
    cases: Mapping[str, Callable[[], Any]]
    tolerance: float
    of_largest: bool = False
    tolerance_of: Mapping[str, float] = field(default_factory=dict)
    """Cases with a tolerance of their own, each with its reason in the group's file."""
    slow: frozenset[str] = frozenset()
    """Cases of the slow tier."""

    @property
    def file(self) -> Path:
        """The file with the stored results."""
        return HERE / f"{self.name}.json"

    def run(self, case: str) -> Any:
        """Run a case and return its result as JSON gives it back."""
        with fixed_settings():
            return json.loads(as_json(self.cases[case]()))

    def stored(self) -> dict[str, Any]:
        """Return the stored results by case."""
        stored: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return stored

    def differences(self, case: str, stored: Any, new: Any) -> list[str]:
        """Return one line per field that differs: case, field, stored value, new value."""
        tolerance = self.tolerance_of.get(case, self.tolerance)
        found = _differences("", stored, new, tolerance, 0.0, self.of_largest)
        return [f"{self.name}, {case}: {line}" for line in found]


@contextlib.contextmanager
def fixed_settings() -> Iterator[None]:
    """Run with one thread, a fixed seed, and warnings shown to nobody; restore torch's settings."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def public_types(error: BaseException) -> list[str]:
    """Return the names under which a user can catch an exception, apart from `Exception`."""
    public = [getattr(gradsight, name) for name in gradsight.__all__] + [*vars(builtins).values()]
    return [kind.__name__ for kind in type(error).__mro__[:-3] if kind in public]


def _differences(
    at: str, stored: Any, new: Any, tolerance: float, scale: float, of_largest: bool
) -> Iterator[str]:
    inside = tolerance, scale, of_largest
    if isinstance(stored, dict) and isinstance(new, dict):
        for key in stored.keys() | new.keys():
            name = f"{at}.{key}" if at else key
            if key not in new:
                yield f"{name}: stored {stored[key]!r}, now missing"
            elif key not in stored:
                yield f"{name}: not stored, now {new[key]!r}"
            else:
                yield from _differences(name, stored[key], new[key], *inside)
    elif isinstance(stored, list) and isinstance(new, list) and len(stored) == len(new):
        if of_largest:
            numbers = [abs(each) for each in stored if isinstance(each, float)]
            inside = tolerance, max(numbers, default=scale), of_largest
        for index, (one, other) in enumerate(zip(stored, new, strict=True)):
            yield from _differences(f"{at}[{index}]", one, other, *inside)
    elif isinstance(stored, float) and isinstance(new, float):
        allowed = tolerance * max(abs(stored), scale)
        if not abs(stored - new) <= allowed:
            yield f"{at}: stored {stored!r}, now {new!r} (allowed difference {allowed:.1e})"
    elif type(stored) is not type(new) or stored != new:
        yield f"{at}: stored {stored!r}, now {new!r}"


def as_json(value: Any, indent: str = "") -> str:
    """Return a value as JSON with twelve digits: on one line where it is short.

    Numbers that are not finite become the texts "nan", "inf" and "-inf".
    """
    line = json.dumps(_plain(value), ensure_ascii=False)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list | tuple):
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {as_json(each, deeper)}" for key, each in value.items()]
    else:
        parts = [as_json(each, deeper) for each in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    inner = f",\n{deeper}".join(parts)
    return f"{opened}\n{deeper}{inner}\n{indent}{closed}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.12g}") if math.isfinite(value) else str(value)
    return value
