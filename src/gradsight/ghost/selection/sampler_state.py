"""A sampler's state as a plain dict, which opens with `torch.load(weights_only=True)`, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.errors import UsageError
from gradsight.values.whole_numbers import whole_number

_KEYS = {
    "kind",
    "rows",
    "names",
    "seed",
    "floor",
    "decay",
    "epoch",
    "place",
    "pending",
    "rank",
    "world_size",
    "sums",
    "counts",
}


@dataclass(frozen=True)
class SamplerState:
    """What a sampler knows, and where in its order it is."""

    kind: str
    """The class of the sampler."""
    rows: int
    names: tuple[str, ...]
    """Of the entries that have a weight each, where they have names."""
    seed: int
    floor: float
    decay: float
    epoch: int
    place: int
    """How far all ranks together have come in the epoch."""
    pending: tuple[int, ...]
    """Rows that this rank has drawn and not used."""
    turns: tuple[int, int]
    """The rank that saved it, and how many took turns; it matters to pending rows alone."""
    sums: Tensor
    counts: Tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and tensors."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "names": list(self.names),
            "seed": self.seed,
            "floor": self.floor,
            "decay": self.decay,
            "epoch": self.epoch,
            "place": self.place,
            "pending": torch.tensor(self.pending, dtype=torch.int64),
            "rank": self.turns[0],
            "world_size": self.turns[1],
            "sums": self.sums,
            "counts": self.counts,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "SamplerState":
        """The state in a dict; an error where it cannot be one."""
        if not isinstance(state, Mapping) or set(state) != _KEYS:
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state)
            raise UsageError(f"this is no state of a sampler: it should hold {_KEYS}, got {found}")
        if not isinstance(state["names"], list | tuple):
            raise UsageError(f"names in a sampler's state are a list, got {state['names']!r:.60}")
        rows = whole_number(state["rows"], "rows", least=1)
        pending = _tensor(state, "pending", torch.int64)
        if len(pending) and not 0 <= int(pending.min()) <= int(pending.max()) < rows:
            raise UsageError(
                f"pending in a sampler's state names a row beyond the {rows} there are"
            )
        sums = _tensor(state, "sums", torch.float64)
        counts = _tensor(state, "counts", torch.float64)
        if len(sums) != len(counts) or bool((counts < 0).any()):
            raise UsageError("a sampler's state has sums and counts that do not go together")
        return cls(
            kind=str(state["kind"]),
            rows=rows,
            names=tuple(map(str, state["names"])),
            seed=whole_number(state["seed"], "seed"),
            floor=_share(state, "floor"),
            decay=_share(state, "decay"),
            epoch=whole_number(state["epoch"], "epoch"),
            place=whole_number(state["place"], "place"),
            pending=tuple(pending.tolist()),
            turns=(
                whole_number(state["rank"], "rank"),
                whole_number(state["world_size"], "world_size", least=1),
            ),
            sums=sums,
            counts=counts,
        )

    def refuse_other(self, kind: str, rows: int, names: tuple[str, ...]) -> None:
        """An error for the state of a sampler over other rows."""
        if self.kind != kind:
            raise UsageError(f"this is the state of a {self.kind}, not of a {kind}")
        if self.rows != rows:
            raise UsageError(
                f"this state is of a sampler over {self.rows} rows, and this one has {rows}: row "
                f"numbers would mean other samples"
            )
        if self.names != names:
            raise UsageError(
                f"this state is of the domains {', '.join(self.names)}, and here are "
                f"{', '.join(names)}"
            )
        entries = len(names) or rows
        if len(self.sums) != entries:
            raise UsageError(f"this state has values of {len(self.sums)} entries, not of {entries}")

    def refuse_other_rank(self, turns: tuple[int, int]) -> None:
        """An error for rows in flight of another rank."""
        if self.pending and self.turns != turns:
            raise UsageError(
                f"this state holds rows that rank {self.turns[0]} of {self.turns[1]} had drawn and "
                f"not used, and this is rank {turns[0]} of {turns[1]}: load each rank's own state"
            )


def _tensor(state: Mapping[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    value = state[name]
    if not isinstance(value, Tensor) or value.dtype is not dtype or value.dim() != 1:
        raise UsageError(f"{name} in a sampler's state should be a line of {dtype} numbers")
    if not bool(value.isfinite().all()):
        raise UsageError(f"{name} in a sampler's state should be finite numbers")
    return value.detach().cpu()


def _share(state: Mapping[str, Any], name: str) -> float:
    value = state[name]
    if not isinstance(value, float) or not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} in a sampler's state should be from 0 to 1, got {value!r:.60}")
    return value
