"""Norms of modules and blocks, made of their parameters' norms: no gradient is read again."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gradsight.values.measured import Floats
from gradsight.values.steps import block_of


class GroupNorms:
    """Gradient norms of named groups of parameters, which may overlap."""

    def __init__(self, members: Mapping[str, Iterable[int]], size: int) -> None:
        """members: the rows of each group's parameters; size: how many parameters there are."""
        groups = {name: list(rows) for name, rows in members.items()}
        self._size = size
        self._names = list(groups)
        self._lengths = np.array([len(rows) for rows in groups.values()], dtype=np.intp)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._rows = np.array([row for rows in groups.values() for row in rows], dtype=np.intp)

    def of(self, l2: Floats, rows: Sequence[int] | None = None) -> dict[str, float]:
        """The norm of each group that has a gradient.

        l2: norms of the parameters with a gradient; rows: which these are, None: all.
        """
        if not self._names:
            return {}
        chosen = slice(None) if rows is None else list(rows)
        norms = np.zeros(self._size)
        norms[chosen] = l2
        has_gradient = np.zeros(self._size, dtype=bool)
        has_gradient[chosen] = True
        is_known = np.logical_or.reduceat(has_gradient[self._rows], self._starts)
        found = zip(self._names, self._combined(norms[self._rows]).tolist(), strict=True)
        return {name: norm for (name, norm), known in zip(found, is_known, strict=True) if known}

    def _combined(self, norms: Floats) -> Floats:
        """As `norms.combine` does it, for all groups at once."""
        # A call of it per group takes 1 ms for a hundred groups, on the thread that trains.
        peak = np.maximum.reduceat(norms, self._starts)
        unit = np.where((peak > 0) & np.isfinite(peak), peak, 1.0)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = (norms / np.repeat(unit, self._lengths)) ** 2
            roots = unit * np.sqrt(np.add.reduceat(squares, self._starts))
        return np.where(np.isfinite(peak), roots, peak)


def by_module(names: Sequence[Sequence[str]]) -> GroupNorms:
    """Every module below the root; `names` are all names of every parameter.

    A tied parameter is in each module that holds it, once.

    >>> modules = by_module([("wte.weight", "head.weight"), ("h.0.weight",), ("h.0.bias",)])
    >>> modules.of(np.array([2.0, 3.0, 4.0]))
    {'wte': 2.0, 'head': 2.0, 'h': 5.0, 'h.0': 5.0}
    """
    members: dict[str, dict[int, None]] = {}
    for row, known in enumerate(names):
        for name in known:
            for module in _modules_around(name):
                members.setdefault(module, {})[row] = None
    # Torch lets no module have a parameter's name; wrappers, whose names we leave out, might.
    for known in names:
        for name in known:
            members.pop(name, None)
    return GroupNorms(members, len(names))


def by_block(names: Sequence[str]) -> GroupNorms:
    """Every block; each parameter is in one.

    >>> by_block(["h.0.attn.weight", "h.0.mlp.weight"]).of(np.array([3.0, 4.0]))
    {'h.0': 5.0}
    """
    members: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        members.setdefault(block_of(name), []).append(row)
    return GroupNorms(members, len(names))


def _modules_around(name: str) -> list[str]:
    """The modules that a parameter of this name lies in, without the root.

    >>> _modules_around("h.0.attn.weight")
    ['h', 'h.0', 'h.0.attn']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
