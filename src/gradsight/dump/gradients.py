"""Which gradients a model has at this moment, in whole or in part, and under which names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.parameters import named_parameters
from gradsight.core.shards import Place, local_part, place_of, sharding
from gradsight.core.sharing import reduces_gradients
from gradsight.dump.manifest import ITEM_BYTES
from gradsight.errors import UsageError

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Row:
    """What other ranks need to know of a piece of a gradient: everything but its bytes."""

    name: str
    dtype: str
    place: Place
    parameter_shape: tuple[int, ...]
    layout: str = "strided"
    source: str = "grad"
    alone: bool = True
    """Whether no other rank offers the same piece; otherwise one of them is chosen."""
    crc32: int | None = None

    @property
    def bytes(self) -> int:
        """The size of the piece."""
        return math.prod(self.place.sizes) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that this rank is to stage, and the names of everything else."""

    rows: tuple[Row, ...]
    tensors: tuple[torch.Tensor, ...]
    parameters: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    seen: int = 0
    """How many parameters have a gradient here, staged or not."""
    capped: tuple[str, ...] = ()
    """Parameters with fewer rows than were asked for."""


class Collector:
    """Finds the pieces of gradients that this rank should write; remembers what it found, to be
    quick the next time.
    """

    def __init__(self, world_size: int = 1, rank: int = 0, first_n: int | None = None) -> None:
        self._world_size, self._rank, self._first_n = world_size, rank, first_n
        self._known: dict[str, tuple[object, Row | None]] = {}

    @torch.no_grad()
    def collect(self, model: torch.nn.Module, unscale: bool = False) -> Gradients:
        """Look at every parameter."""
        modules = list(model.modules())
        _refuse_flat({type(module) for module in modules})
        named, aliases = _distinct(model)
        reduced = any(
            isinstance(module, DistributedDataParallel) and reduces_gradients(module)
            for module in modules
        )
        owners = (
            _owners(named, 1 if self._first_n else self._world_size)
            if reduced and self._world_size > 1
            else {}
        )
        rows, tensors, left_out, capped, seen = [], [], dict[str, str](), list[str](), 0
        for turn, (name, parameter) in enumerate(named.items()):
            gradient, source = _gradient(parameter)
            if gradient is None:
                continue
            seen += 1
            owned = owners.get(name, self._rank) == self._rank
            found = _Found(name, gradient, source, turn, owned, reduced, unscale)
            try:
                row = self._row(found, parameter)
            except UsageError as problem:
                left_out[name] = str(problem)
                continue
            if self._first_n is not None and self._first_n > (
                gradient.shape[0] if gradient.dim() else 1
            ):
                capped.append(name)
            if row is not None:
                rows.append(row)
                tensors.append(
                    _cut(local_part(gradient), row) if self._first_n else local_part(gradient)
                )
        return Gradients(
            tuple(rows), tuple(tensors), tuple(named), aliases, left_out, seen, tuple(capped)
        )

    def _row(self, found: "_Found", parameter: torch.Tensor) -> Row | None:
        """The row of this rank's piece, or None if it has none; looked up if the gradient is like
        the last one.
        """
        gradient = found.gradient
        likeness = (*found[2:], gradient.shape, gradient.dtype, gradient.layout, sharding(gradient))
        known = self._known.get(found.name)
        if known is None or known[0] != likeness:
            known = likeness, self._describe(found, parameter)
            self._known[found.name] = known
        return known[1]

    def _describe(self, found: "_Found", parameter: torch.Tensor) -> Row | None:
        gradient = found.gradient
        place = place_of(gradient, found.turn)
        if problem := _refusal(gradient, parameter, place):
            raise UsageError(problem)
        if self._first_n is not None:
            place = _first_rows(place, self._first_n)
        if not _writes(place, found.owned):
            return None
        stored = torch.float32 if found.unscale and gradient.dtype in HALVES else gradient.dtype
        alone = self._world_size == 1 or found.reduced or place.mesh is not None
        return Row(
            found.name,
            _word(stored),
            place,
            tuple(gradient.shape),
            _word(gradient.layout),
            found.source,
            alone,
        )


class _Found(NamedTuple):
    """A gradient as it was found."""

    name: str
    gradient: torch.Tensor
    source: str
    turn: int
    owned: bool
    reduced: bool
    unscale: bool


def _writes(place: Place, owned: bool) -> bool:
    """Whether this rank has anything to write of a gradient; an empty shard has not, a gradient
    without entries has.
    """
    if place.mesh is None:
        return owned
    return place.writes and (math.prod(place.sizes) > 0 or math.prod(place.shape) == 0)


@cache
def _word(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _distinct(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The parameters by name, and further names of tied ones."""
    named: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for found in named_parameters(model):
        if found.name in named:
            raise UsageError(
                f"two parameters of the model have the name {found.name!r} without their wrappers; rename one"
            )
        named[found.name] = found.tensor
        aliases |= dict.fromkeys(found.names[1:], found.name)
    return named, aliases


def _gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """A parameter's gradient; frameworks that accumulate in fp32 keep it in `main_grad`."""
    main = getattr(parameter, "main_grad", None)
    return (main, "main_grad") if main is not None else (parameter.grad, "grad")


def _refusal(gradient: torch.Tensor, parameter: torch.Tensor, place: Place) -> str | None:
    """Why a gradient cannot be dumped, if so."""
    if _word(gradient.dtype) not in ITEM_BYTES:
        return f"its dtype {gradient.dtype} is not one of {', '.join(ITEM_BYTES)}"
    if gradient.shape != parameter.shape:
        return f"its shape {tuple(gradient.shape)} is not the parameter's {tuple(parameter.shape)}"
    if place.partial:
        return "it is not yet reduced over ranks (a Partial placement)"
    return None


def _owners(named: Mapping[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """Which rank writes which replicated gradient: consecutive parameters, about the same bytes for
    everyone.
    """
    sizes = {
        name: parameter.numel() * parameter.element_size() for name, parameter in named.items()
    }
    total, before, owners = max(1, sum(sizes.values())), 0, {}
    for name, size in sizes.items():
        owners[name] = min(world_size - 1, (before + size // 2) * world_size // total)
        before += size
    return owners


def _first_rows(place: Place, first_n: int) -> Place:
    """The part of a piece that lies in the first rows of the whole tensor."""
    if not place.shape:
        return place
    rows = min(first_n, place.shape[0])
    mine = max(0, min(place.sizes[0], rows - place.offsets[0]))
    return replace(place, shape=(rows, *place.shape[1:]), sizes=(mine, *place.sizes[1:]))


def _cut(local: torch.Tensor, row: Row) -> torch.Tensor:
    """The first rows of the part that this rank holds."""
    return local[: row.place.sizes[0]] if row.place.sizes and not local.is_sparse else local


def _refuse_flat(kinds: set[type[torch.nn.Module]]) -> None:
    """The older FSDP keeps gradients as pieces of one flat vector, which have no shape of their
    own.
    """
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        text = "FullyShardedDataParallel is not supported: its gradients are flat pieces. Use torch's fully_shard"
        raise UsageError(text)
