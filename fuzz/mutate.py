"""Bytes that are nearly what a reader expects: flipped, cut, spliced, and JSON with odd values."""

import atexit
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 2, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**12, 10**30, -(2**63))
ODD: tuple[Any, ...] = (
    *NUMBERS, None, True, False, "", "x" * 5000, "\x1b]52;c;AA\x07", "../../etc/passwd", "a\0b",
    "\ud800", "‮", 0.5, 1e308, float("nan"), float("inf"), [], {}, [[]], [None], {"": None},
    [2**40] * 3, [1] * 70, list(range(300)), "nan", "step", "float32",
)  # fmt: skip
DEEP = 200


def scratch() -> Path:
    """A folder for a target's files, that goes when its process ends."""
    folder = tempfile.mkdtemp(prefix="gradsight-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One input more: a few changes to one that is known."""
    if rng.random() < 0.7:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                value = _edited(value, rng)
            # ASCII: halves of characters cannot be written in any other way.
            return json.dumps(value).encode()
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        _change_bytes(changed, others, rng)
    return bytes(changed)


def _edited(value: Any, rng: random.Random) -> Any:
    """The value with something at a random place replaced, removed, doubled or wrapped."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.8:
            return {**value, key: _edited(value[key], rng)}
        if action < 0.9:
            return {name: each for name, each in value.items() if name != key}
        return {**value, str(rng.choice(ODD)): value[key]}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        action = rng.random()
        if action < 0.8:
            return [*value[:place], _edited(value[place], rng), *value[place + 1 :]]
        if action < 0.9:
            return value[:place] + value[place + 1 :]
        return value + [value[place]] * rng.choice((1, 2, 50))
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 8, -8, 1 << 20))
    if rng.random() < 0.02:
        for _ in range(DEEP):
            value = [value]
        return value
    return rng.choice(ODD)


def _change_bytes(data: bytearray, others: list[bytes], rng: random.Random) -> None:
    place = rng.randrange(len(data) + 1)
    action = rng.randrange(7)
    if action == 0 and data:
        data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
    elif action == 1 and data:
        data[min(place, len(data) - 1)] = rng.choice((0, 1, 127, 128, 255))
    elif action == 2:
        del data[place : place + rng.choice((1, 4, 64, 10_000))]
    elif action == 3:
        data[place:place] = rng.randbytes(rng.choice((1, 4, 64)))
    elif action == 4:
        data[place : place + 8] = rng.choice(NUMBERS).to_bytes(16, "little", signed=True)[:8]
    elif action == 5:
        other = rng.choice(others)
        data[place:] = other[rng.randrange(len(other) + 1) :]
    else:
        data[place:place] = data[place : place + rng.choice((8, 200))]
