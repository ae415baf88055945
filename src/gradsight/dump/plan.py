"""Who writes what: rank 0's decision, made from what every rank offers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsight.dump.gradients import Row
from gradsight.dump.manifest import tiles


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a dump was given up; `key` names the kind of fault."""

    key: str
    message: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank holds: its staged pieces and its model's names."""

    step: int
    rows: tuple[Row, ...]
    parameters: tuple[str, ...]
    aliases: Mapping[str, str]
    left_out: Mapping[str, str]
    seen: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which of its rows each rank writes, and what the manifest will have to admit."""

    choices: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Bytes that each rank writes."""
    parameters: tuple[str, ...]
    aliases: Mapping[str, str]
    left_out: Mapping[str, str]


def decide(offers: Sequence[Offer | Fault]) -> Plan | Fault:
    """Choose one writer for each piece; a gradient that is nowhere whole is left out."""
    held = []
    for rank, offer in enumerate(offers):
        if isinstance(offer, Fault):
            if len(offers) == 1:
                return offer
            return Fault(offer.key, f"rank {rank}: {offer.message}")
        held.append(offer)
    if len({offer.step for offer in held}) > 1:
        text = "the ranks dump different steps: " + ", ".join(str(offer.step) for offer in held)
        return Fault("usage", f"{text}; call dump() on every rank at the same steps")
    if not any(offer.seen for offer in held):
        return Fault(
            "no gradient",
            "no parameter has a gradient on any rank: dump after backward() and before zero_grad()",
        )
    chosen = _choose(held)
    left_out = {name: why for offer in held for name, why in offer.left_out.items()}
    left_out |= _holes(held, chosen)
    kept = [
        tuple(index for index in indices if held[rank].rows[index].name not in left_out)
        for rank, indices in enumerate(chosen)
    ]
    if not any(kept):
        name, why = next(iter(left_out.items()))
        return Fault("no gradient", f"no gradient could be had whole; {name}: {why}")
    lengths = tuple(
        sum(held[rank].rows[index].bytes for index in indices) for rank, indices in enumerate(kept)
    )
    names = tuple(dict.fromkeys(name for offer in held for name in offer.parameters))
    aliases = {alias: name for offer in held for alias, name in offer.aliases.items()}
    return Plan(tuple(kept), lengths, names, aliases, left_out)


def _choose(offers: Sequence[Offer]) -> list[list[int]]:
    """For each piece the offering rank with the least to do; the first one where values differ."""
    pieces: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for index, row in enumerate(offer.rows):
            pieces[row.name, row.place.offsets].append((rank, index))
    load = [0] * len(offers)
    chosen: list[list[int]] = [[] for _ in offers]
    for holders in pieces.values():
        rows = [offers[rank].rows[index] for rank, index in holders]
        # Gradients that are not reduced yet must not come from several ranks in one dump.
        if any(row != rows[0] for row in rows):
            rank, index = holders[0]
        else:
            rank, index = min(holders, key=lambda holder: load[holder[0]])
        load[rank] += rows[0].bytes
        chosen[rank].append(index)
    return chosen


def _holes(offers: Sequence[Offer], chosen: Sequence[Sequence[int]]) -> dict[str, str]:
    """Gradients of which a part is nowhere to be had."""
    boxes = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for offer, indices in zip(offers, chosen, strict=True):
        for index in indices:
            row = offer.rows[index]
            shapes.setdefault(row.name, row.place.shape)
            boxes[row.name].append((row.place.offsets, row.place.sizes))
    why = "some ranks have their part of this gradient, others have None"
    return {name: why for name, shape in shapes.items() if not tiles(shape, boxes[name])}
