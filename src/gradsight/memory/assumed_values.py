# mypy: allow-untyped-calls
"""What is assumed where a step decides by values that nobody can know before it runs.

The routing of tokens to experts (an even load), random numbers drawn in forward (close to 1, which
drops no layer), and whether activations are finite (they are). An assumed value carries its reason
wherever it goes; a prediction names the reasons of those that something was decided by.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
Reasons = frozenset[str]
CERTAIN: Reasons = frozenset()

UNIFORM = "uniform"
"""A number in [0, 1) as it was drawn; compared with what lies outside, the answer is certain."""
RANDOM = "random numbers"
DRAWN = "drawn"
ROUTING = "routing"
FINITE = "finite"

ASSUMPTIONS = {
    DRAWN: "random numbers of build() decide what the step runs: as they were drawn once",
    RANDOM: "random numbers drawn in the step decide what it runs: close to 1, so no layer drops",
    ROUTING: "routing spreads tokens evenly over the experts",
    FINITE: "activations and the loss are finite",
}

EVEN = "even"
ONE_EXPERT = "one expert"
"""All tokens go to the first expert (the first k where a token chooses k) but one for each other.

Of the uneven loads that were tried, this one needs the most memory: every expert runs.
"""


def keeps_all_layers(drawn: torch.Tensor) -> torch.Tensor:
    """Uniform random numbers so close to 1 that layer dropping keeps every layer."""
    with _disable_current_modes():
        return torch.full_like(drawn, 1 - torch.finfo(drawn.dtype).eps)


def routes(routing: str, rows: int, chosen: int, experts: int) -> torch.Tensor:
    """The experts of every row, (rows, chosen)."""
    with _disable_current_modes():
        slots = torch.arange(chosen)
        spread = (torch.arange(rows)[:, None] * chosen + slots) % experts
        if routing == ONE_EXPERT:
            # The first rows go to one expert after the other.
            spread[-(-experts // chosen) :] = slots
        return spread


def reasons_after(func: Any, args: tuple[Any, ...], given: Reasons, *, stepping: bool) -> Reasons:
    """What had to be assumed for a result, from what had to be for the operator's arguments."""
    name = func._overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in func.tags:
        if not stepping:
            return given | {DRAWN}
        if name in ("rand", "rand_like"):
            return given | {UNIFORM}
        return given | {RANDOM}
    if UNIFORM not in given:
        return given
    passes_on = name in ("detach", "lift_fresh", "alias", "clone", "_to_copy", "view", "squeeze")
    if passes_on:
        return given
    if name in ("lt", "ge", "le", "gt") and _outside(args):
        return given - {UNIFORM}
    return (given - {UNIFORM}) | {RANDOM}


def _outside(args: tuple[Any, ...]) -> bool:
    """Whether a number is compared with one that no draw from [0, 1) can reach from either side."""
    limit = args[1]
    return isinstance(limit, int | float) and (limit <= 0 or limit >= 1)


@dataclass(frozen=True, slots=True)
class AssumedValue:
    """The value that a fake tensor is assumed to have."""

    tensor: torch.Tensor
    value: torch.Tensor
    reasons: Reasons


def assumed(func: Any, args: tuple[Any, ...], out: Any, routing: str) -> AssumedValue | None:
    """What is assumed of an operator's result whose arguments are not known; None: nothing."""
    name = func._overloadpacket.__name__
    if name in ("isnan", "isinf") and isinstance(out, torch.Tensor):
        return _finite(out, True)
    if name == "isfinite" and isinstance(out, torch.Tensor):
        return _finite(out, False)
    if name == "topk":
        return _routed(args[0], out[1], routing)
    if name == "argmax" and len(args) > 1:
        return _routed(args[0], out, routing)
    return None


def _finite(out: torch.Tensor, looks_for_the_opposite: bool) -> AssumedValue | None:
    # One number stands for all, however large the tensor is: no memory is taken.
    with _disable_current_modes():
        if out.numel() > 1 << 20:
            return None
        value = torch.full(tuple(out.shape), not looks_for_the_opposite)
    return AssumedValue(out, value, frozenset({FINITE}))


def _routed(scores: torch.Tensor, indices: torch.Tensor, routing: str) -> AssumedValue | None:
    """Indices into the last dimension, spread as `routing` says."""
    if indices.numel() == 0 or indices.numel() > 1 << 20 or scores.dim() < 1:
        return None
    keeps_dimension = indices.dim() == scores.dim()
    chosen = indices.shape[-1] if keeps_dimension else 1
    rows = indices.numel() // chosen
    over_the_last = scores.shape[:-1] == (indices.shape[:-1] if keeps_dimension else indices.shape)
    if not over_the_last:
        return None
    chosen_experts = routes(routing, rows, chosen, scores.shape[-1])
    with _disable_current_modes():
        value = chosen_experts.reshape(tuple(indices.shape)).contiguous()
    return AssumedValue(indices, value, frozenset({ROUTING}))
