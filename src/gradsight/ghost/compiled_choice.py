"""Which blocks of a compiled model stay in compiled code, and why others do not.

A block of new shapes runs eagerly. Before the next one of its kind, compiled code is compared with
the eager pass on its arguments; from then on blocks of these shapes run compiled.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gradsight.core.samples import SplitCall
from gradsight.errors import GradsightWarning
from gradsight.ghost.compiled_plan import Shapes
from gradsight.ghost.observation import Observation
from gradsight.ghost.sample_axis import Place

MOST_SHAPES = 8
"""Shapes that are compared; each may be a graph of its own, of which torch keeps that many."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """What a pass is like, whatever its rows are."""

    joined: bool
    """Whether it has the validation rows in it."""
    splits_loss: bool
    direction: str
    """ "plain" or "adam"."""


@dataclass(frozen=True, slots=True)
class PastPass:
    """An eager training pass of a compiled model."""

    call: SplitCall
    autocast: tuple[str, str] | None
    tied: frozenset[str]
    """Parameters that are both looked up and multiplied with."""


@dataclass(frozen=True, slots=True)
class Proven:
    """Shapes on which compiled code was found to be right."""

    batch: int
    tied: frozenset[str]


Trial = Callable[[PastPass], str | None]
"""Compares compiled code with an earlier pass: why it is wrong, None where it is not."""


class CompiledChoice:
    """Remembers eager blocks of a compiled model, and what compiled code made of them."""

    def __init__(self, against: str | None) -> None:
        """against: why nothing is compiled, as far as settings tell."""
        self._against = against
        self._said = False
        self._past: dict[tuple[PassKind, Shapes], PastPass] = {}
        self._found: dict[tuple[PassKind, Shapes], Proven | str] = {}
        """What trials have found: the shapes proven, or a reason against them."""

    @property
    def possible(self) -> bool:
        """Whether any block can stay compiled."""
        return self._against is None

    def compare(self, kind: PassKind, trial: Trial) -> None:
        """Try the passes of a kind that were remembered."""
        for key, past in list(self._past.items()):
            if key[0] != kind:
                continue
            del self._past[key]
            if len(self._found) >= MOST_SHAPES:
                reason: str | None = f"its batches are of more than {MOST_SHAPES} shapes"
            else:
                reason = trial(past)
            if reason is None:
                self._found[key] = Proven(past.call.batch, past.tied)
            elif len(self._found) < MOST_SHAPES:
                self._found[key] = reason

    def proven(self, kind: PassKind, shapes: Shapes) -> Proven | None:
        """What is known of these shapes, where compiled code is right on them."""
        found = self._found.get((kind, shapes))
        return found if isinstance(found, Proven) else None

    def any_proven(self, kind: PassKind) -> Proven | None:
        """What is known of some shapes of a kind."""
        for key, found in self._found.items():
            if key[0] == kind and isinstance(found, Proven):
                return found
        return None

    def ran_eagerly(self, observation: Observation, kind: PassKind, shapes: Shapes | None) -> None:
        """Remember a block that did not run compiled; say so, unless a first one had to."""
        if observation.passes_by_sample is not None:
            self._against = observation.passes_by_sample
        elif observation.tracer.packed:
            self._against = "activation checkpointing does not ask a function mode in compiled code"
        if len(observation.calls) != 1:
            self._against = f"it is called {len(observation.calls)} times in a pass"
        if self._against is not None:
            self._say(self._against)
            return
        call = observation.calls[0]
        key = kind, observation.call_shapes if shapes is None else shapes
        found = self._found.get(key)
        if isinstance(found, str):
            self._say(found)
            return
        if self._found:
            self._say("a batch of other shapes than before runs eagerly once, to be compared with")
        tied = tied_weights(observation.tracer.keys)
        self._past[key] = PastPass(call, observation.autocast, tied)

    def _say(self, reason: str) -> None:
        """Say, once, why a compiled model is observed uncompiled."""
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"the compiled model runs eagerly while its samples are scored, because {reason}. The "
            "scores are exact; only speed is lost.",
            GradsightWarning,
            stacklevel=6,
        )


def tied_weights(places: Mapping[Place, tuple[str, ...]]) -> frozenset[str]:
    """Parameters that are both looked up and multiplied with."""
    by_function: dict[str, set[str]] = {}
    for place, names in places.items():
        by_function.setdefault(place.use[0], set()).update(names)
    return frozenset(by_function.get("embedding", set()) & by_function.get("linear", set()))
