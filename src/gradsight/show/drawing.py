"""Plain SVG: an area with a step axis and a logarithmic one, thinned curves, safe text. No torch.

Nothing is needed to draw it, and nothing in it can run: no script, no link, no font from elsewhere.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.etree import ElementTree

from gradsight.values.texts import for_terminal

Point = tuple[float, float]
"""A step and its value."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MOST_TICKS = 8


@dataclass(frozen=True)
class Area:
    """Where a plot lies on the picture, and what its edges stand for."""

    left: float
    top: float
    width: float
    height: float
    first: int
    last: int
    low: float
    """The logarithm to base ten of the lower edge."""
    high: float
    """The same of the upper edge."""

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height

    def x(self, step: float) -> float:
        """Where a step lies."""
        if self.last == self.first:
            return self.left + self.width / 2
        return self.left + self.width * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        """Where a value above zero lies."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.bottom - self.height * share

    def holds(self, value: float) -> bool:
        """Whether a value above zero lies between the edges."""
        return self.low <= math.log10(value) <= self.high

    def column(self, step: float) -> int:
        """The column of pixels that a step falls into."""
        return int(self.x(step) - self.left)


def logarithmic_range(values: Iterable[float]) -> tuple[float, float]:
    """The edges for these values as logarithms to base ten, at least two decades apart.

    So a flat curve is not blown up into a jagged one.

    >>> logarithmic_range([1.0, 10_000.0])
    (-0.2, 4.2)
    >>> logarithmic_range([])
    (-1.0, 1.0)
    """
    heights = [math.log10(value) for value in values if 0 < value < math.inf]
    low = min(heights, default=0.0) - 0.2
    high = max(heights, default=0.0) + 0.2
    missing = max(0.0, 2.0 - (high - low))
    return low - missing / 2, high + missing / 2


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms; every second, third ... where there are many.

    >>> logarithmic_ticks(-1.2, 2.3)
    [0.1, 1.0, 10.0, 100.0]
    """
    decades = range(math.ceil(low), math.floor(high) + 1)
    every = max(1, math.ceil(len(decades) / _MOST_TICKS))
    return [10.0**decade for decade in decades if decade % every == 0]


def step_ticks(first: int, last: int) -> list[int]:
    """Round numbers between two steps.

    >>> step_ticks(0, 730), step_ticks(5, 5)
    ([0, 100, 200, 300, 400, 500, 600, 700], [5])
    """
    if first == last:
        return [first]
    rough = max(1.0, (last - first) / _MOST_TICKS)
    power = 10 ** math.floor(math.log10(rough))
    every = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return list(range(-(-first // every) * every, last + 1, every))


def curves(points: Iterable[Point], area: Area) -> Iterator[list[Point]]:
    """Pixels of the curve through these points, in pieces between what is not finite.

    Each column of pixels keeps its lowest and its highest value: a hundred thousand steps stay
    small, and no single step's spike is lost. Zero lies on the lower edge.
    """
    piece: list[Point] = []
    for _, group in groupby(points, key=lambda point: area.column(point[0])):
        finite = [point for point in group if math.isfinite(point[1])]
        if finite:
            ends = {min(finite, key=_height), max(finite, key=_height)}
            piece += [(area.x(step), _pixel(value, area)) for step, value in sorted(ends)]
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _height(point: Point) -> float:
    return point[1]


def _pixel(value: float, area: Area) -> float:
    return area.y(value) if value > 0 else area.bottom


def path_data(pieces: Iterable[list[Point]]) -> str:
    """Curves as the data of one path; a single point is a dot.

    >>> path_data([[(0, 1), (2, 3.26)], [(5, 5)]])
    'M0 1L2 3.3M5 5h.01'
    """
    parts = []
    for piece in pieces:
        places = [f"{_short(x)} {_short(y)}" for x, y in piece]
        dot = "h.01" if len(piece) == 1 else ""
        parts.append("M" + "L".join(places) + dot)
    return "".join(parts)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def element(
    parent: ElementTree.Element, tag: str, text: str = "", /, **attributes: object
) -> ElementTree.Element:
    """A new element; `class_` stands for class, and `_` in a name for `-`."""
    written = {}
    for name, value in attributes.items():
        if isinstance(value, float):
            value = _short(value)
        written[name.rstrip("_").replace("_", "-")] = safe(str(value))
    made = ElementTree.SubElement(parent, tag, written)
    made.text = safe(text) or None
    return made


def safe(text: str) -> str:
    r"""Text without signs that XML has no place for; what has a meaning in it is escaped later.

    >>> safe("a" + chr(0) + "b")
    'a\\x00b'
    """
    return _NOT_XML.sub("?", for_terminal(text))
