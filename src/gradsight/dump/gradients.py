"""Which gradients a model has at this moment, in whole or in part, and under which names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsight.dump.manifest import ITEM_BYTES
from gradsight.dump.names import clean_parameters
from gradsight.dump.ranks import Place, local_part, place_of
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


def collect(
    model: torch.nn.Module, world_size: int = 1, rank: int = 0, first_n: int | None = None, unscale: bool = False
) -> Gradients:
    """Look at every parameter and find the piece of its gradient that this rank should write."""
    _refuse_flat(model)
    named, aliases = _distinct(model)
    reduced = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    owners = _owners(named, 1 if first_n else world_size) if reduced else {}
    rows, tensors, left_out, capped, seen = [], [], {}, [], 0
    for turn, (name, parameter) in enumerate(named.items()):
        gradient, source = _gradient(parameter)
        if gradient is None:
            continue
        seen += 1
        place = place_of(gradient, turn)
        if problem := _refusal(gradient, parameter, place):
            left_out[name] = problem
            continue
        place, local = _first_rows(place, local_part(gradient), first_n)
        if first_n is not None and first_n > (place.shape[0] if place.shape else 1):
            capped.append(name)
        if not _writes(place, owners.get(name, rank) == rank):
            continue
        stored = torch.float32 if unscale and gradient.dtype in HALVES else gradient.dtype
        alone = world_size == 1 or reduced or place.mesh is not None
        rows.append(Row(name, _word(stored), place, tuple(gradient.shape), _word(gradient.layout), source, alone))
        tensors.append(local.detach())
    return Gradients(tuple(rows), tuple(tensors), tuple(named), aliases, left_out, seen, tuple(capped))


def _writes(place: Place, owned: bool) -> bool:
    """Whether this rank has anything to write of a gradient; an empty shard has not, a gradient without entries has."""
    if place.mesh is None:
        return owned
    return place.writes and (math.prod(place.sizes) > 0 or math.prod(place.shape) == 0)


def _word(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _distinct(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Parameter], dict[str, str]]:
    """The parameters by name, and further names of tied ones."""
    named: dict[str, torch.nn.Parameter] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in clean_parameters(model):
        if id(parameter) in first:
            if first[id(parameter)] != name:
                aliases[name] = first[id(parameter)]
        elif name in named:
            raise UsageError(
                f"two parameters of the model have the name {name!r} once wrappers are taken off; rename one of them"
            )
        else:
            named[name], first[id(parameter)] = parameter, name
    return named, aliases


def _gradient(parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, str]:
    """A parameter's gradient; frameworks that accumulate in fp32 keep it in `main_grad`."""
    main = getattr(parameter, "main_grad", None)
    return (main, "main_grad") if main is not None else (parameter.grad, "grad")


def _refusal(gradient: torch.Tensor, parameter: torch.nn.Parameter, place: Place) -> str | None:
    """Why a gradient cannot be dumped, if so."""
    if _word(gradient.dtype) not in ITEM_BYTES:
        return f"its dtype {gradient.dtype} is not one of {', '.join(ITEM_BYTES)}"
    if gradient.shape != parameter.shape:
        return f"its shape {tuple(gradient.shape)} is not the parameter's {tuple(parameter.shape)}"
    if place.partial:
        return "it is not yet reduced over ranks (a Partial placement)"
    return None


def _owners(named: Mapping[str, torch.nn.Parameter], world_size: int) -> dict[str, int]:
    """Which rank writes which replicated gradient: consecutive parameters, about the same bytes for everyone."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in named.items()}
    total, before, owners = max(1, sum(sizes.values())), 0, {}
    for name, size in sizes.items():
        owners[name] = min(world_size - 1, (before + size // 2) * world_size // total)
        before += size
    return owners


def _first_rows(place: Place, local: torch.Tensor, first_n: int | None) -> tuple[Place, torch.Tensor]:
    """The part of a piece that lies in the first rows of the whole tensor."""
    if first_n is None or not place.shape:
        return place, local
    rows = min(first_n, place.shape[0])
    mine = max(0, min(place.sizes[0], rows - place.offsets[0]))
    shorter = replace(place, shape=(rows, *place.shape[1:]), sizes=(mine, *place.sizes[1:]))
    return shorter, local if local.is_sparse else local[:mine]


def _refuse_flat(model: torch.nn.Module) -> None:
    """The older FSDP keeps gradients as pieces of one flat vector, which have no shape of their own."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UsageError(
            "FullyShardedDataParallel is not supported: its gradients are flat pieces. Use torch's fully_shard"
        )
