"""Sizes of memory as people write and read them: GB is 1e9 bytes, GiB 2**30."""

import re

from gradsight.errors import UsageError

UNITS = {
    "B": 1,
    "": 1,
    **{f"{p}B": 1000**k for k, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**k for k, p in enumerate("KMGT", 1)},
}


def parse_size(size: str | int | float) -> int:
    """Bytes of "6GB", "512MiB" or a plain number of bytes.

    >>> parse_size("6GB"), parse_size("512 MiB"), parse_size(1e6)
    (6000000000, 536870912, 1000000)
    """
    # A bool is an int to Python, and True would be one byte.
    if isinstance(size, bool) or not isinstance(size, str | int | float):
        kind = type(size).__name__
        raise UsageError(f"a size of memory is text such as '6GB' or a number of bytes, got {kind}")
    text = str(size).strip()
    parts = re.fullmatch(r"(-?[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text, re.IGNORECASE)
    if parts is None or parts[2].upper() not in UNITS:
        raise _not_a_size(size)
    try:
        count = int(float(parts[1]) * UNITS[parts[2].upper()])
    except (ValueError, OverflowError):
        raise _not_a_size(size) from None
    if count <= 0:
        raise UsageError(f"a size of memory must be above zero, got {size!r}")
    return count


def _not_a_size(size: object) -> UsageError:
    return UsageError(
        f"{size!r} is not a size of memory: "
        "write for example '6GB' (6e9 bytes), '512MiB' or a number of bytes"
    )


def format_size(count: float, places: int | None = None) -> str:
    """Bytes as text in powers of 1000, with so many decimal places; by default three digits in all.

    >>> format_size(6_100_000_000), format_size(75_226_000), format_size(12)
    ('6.10 GB', '75.2 MB', '12 B')
    >>> format_size(6_100_000_000, places=1)
    '6.1 GB'
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            value = count / scale
            return f"{value:.{_three_digits(value) if places is None else places}f} {unit}"
    return f"{count:.0f} B"


def _three_digits(value: float) -> int:
    """The decimal places with which a number below 1000 has three digits."""
    if abs(value) < 10:
        return 2
    if abs(value) < 100:
        return 1
    return 0


def gigabytes(size: int) -> str:
    """Bytes in GB with three decimal places; small sizes get six.

    >>> gigabytes(6_123_400_000), gigabytes(1_234_000)
    ('6.123 GB', '0.001234 GB')
    """
    places = 3
    if size and abs(size) < 10_000_000:
        places = 6
    return f"{size / 1e9:.{places}f} GB"
