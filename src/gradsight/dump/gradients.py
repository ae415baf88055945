"""Which gradients a model has at this moment, in whole or in part, and under which names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.gradient_parts import gradient_parts, lies_like_its_parameter
from gradsight.core.parameters import named_parameters
from gradsight.core.shards import Place, is_sharded, like, local_part, place_of, sharding
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


class Collector:
    """Finds the pieces of gradients that this rank should write, and remembers their rows."""

    def __init__(self, world_size: int = 1, rank: int = 0, first_n: int | None = None) -> None:
        self._world_size = world_size
        self._rank = rank
        self._first_n = first_n
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
        owners: dict[str, int] = {}
        if reduced and self._world_size > 1:
            # The first rows are written by rank 0: sharing them out would only send them about.
            owners = _owners(named, 1 if self._first_n else self._world_size)
        rows: list[Row] = []
        tensors: list[torch.Tensor] = []
        left_out: dict[str, str] = {}
        seen = 0
        moved = _laid_like_parameters(named)
        for turn, (name, parameter) in enumerate(named.items()):
            gradient, source = moved.get(name) or _gradient(parameter)
            if gradient is None:
                continue
            seen += 1
            owned = owners.get(name, self._rank) == self._rank
            held = _HeldGradient(name, gradient, source, turn, owned, reduced, unscale)
            try:
                row = self._row(held, parameter)
            except UsageError as problem:
                left_out[name] = str(problem)
                continue
            if row is not None:
                rows.append(row)
                # The shard itself: torch's staging raises on a gradient of FSDP2 at a nonzero
                # offset of its buffer.
                part = local_part(gradient)
                tensors.append(_cut(part, row) if self._first_n else part)
        return Gradients(tuple(rows), tuple(tensors), tuple(named), aliases, left_out, seen)

    def _row(self, held: "_HeldGradient", parameter: torch.Tensor) -> Row | None:
        """The row of this rank's piece, or None if it has none.

        Looked up where the gradient is like the last one, to be quick.
        """
        gradient = held.gradient
        likeness = (*held[2:], gradient.shape, gradient.dtype, gradient.layout, sharding(gradient))
        known = self._known.get(held.name)
        if known is None or known[0] != likeness:
            known = likeness, self._describe(held, parameter)
            self._known[held.name] = known
        return known[1]

    def _describe(self, held: "_HeldGradient", parameter: torch.Tensor) -> Row | None:
        gradient = held.gradient
        place = place_of(gradient, held.turn)
        if problem := _refusal(gradient, parameter, place):
            raise UsageError(problem)
        if self._first_n is not None:
            place = _first_rows(place, self._first_n)
        if not _writes(place, held.owned):
            return None
        stored = gradient.dtype
        if held.unscale and stored in HALVES:
            # Divided by its scale, a half's small entries would underflow.
            stored = torch.float32
        alone = self._world_size == 1 or held.reduced or place.mesh is not None
        return Row(
            held.name,
            _word(stored),
            place,
            tuple(gradient.shape),
            _word(gradient.layout),
            held.source,
            alone,
        )


class _HeldGradient(NamedTuple):
    """A gradient as this rank holds it."""

    name: str
    gradient: torch.Tensor
    source: str
    turn: int
    owned: bool
    reduced: bool
    unscale: bool


def _writes(place: Place, owned: bool) -> bool:
    """Whether this rank writes a piece; an empty shard is none, a gradient without entries is."""
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
    for parameter in named_parameters(model):
        name = parameter.name
        if name in named:
            raise UsageError(
                f"two parameters of the model have the name {name!r} without their wrappers; "
                "rename one"
            )
        named[name] = parameter.tensor
        aliases |= dict.fromkeys(parameter.names[1:], name)
    return named, aliases


def _gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """A parameter's gradient; frameworks that accumulate in fp32 keep it in `main_grad`."""
    main = getattr(parameter, "main_grad", None)
    if main is not None:
        return main, "main_grad"
    return parameter.grad, "grad"


def _laid_like_parameters(
    named: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, str]]:
    """Gradients that lie otherwise on the ranks than their parameters, brought into line."""
    otherwise = {
        name: parameter
        for name, parameter in named.items()
        if is_sharded(parameter) and not lies_like_its_parameter(parameter)
    }
    parts = gradient_parts(list(otherwise.values()))
    return {
        name: (like(parameter, part), "grad")
        for (name, parameter), part in zip(otherwise.items(), parts, strict=True)
    }


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
    """Which rank writes which replicated gradient: neighbours, about as many bytes for each."""
    sizes = {
        name: parameter.numel() * parameter.element_size() for name, parameter in named.items()
    }
    total = max(1, sum(sizes.values()))
    before = 0
    owners = {}
    for name, size in sizes.items():
        owners[name] = min(world_size - 1, (before + size // 2) * world_size // total)
        before += size
    return owners


def _first_rows(place: Place, first_n: int) -> Place:
    """The part of a piece that lies in the first rows of the whole tensor."""
    if not place.shape:
        return place
    # No rank gathers a whole gradient for this: those that hold the first rows cut them off.
    rows = min(first_n, place.shape[0])
    mine = max(0, min(place.sizes[0], rows - place.offsets[0]))
    return replace(place, shape=(rows, *place.shape[1:]), sizes=(mine, *place.sizes[1:]))


def _cut(local: torch.Tensor, row: Row) -> torch.Tensor:
    """The first rows of the part that this rank holds."""
    return local[: row.place.sizes[0]] if row.place.sizes and not local.is_sparse else local


def _refuse_flat(kinds: set[type[torch.nn.Module]]) -> None:
    """The older FSDP has pieces of one flat vector, without a shape of their own."""
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        raise UsageError(
            "FullyShardedDataParallel is not supported: its gradients are flat pieces. "
            "Use torch's fully_shard"
        )
