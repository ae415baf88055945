"""Which line of the user's made each operation of a loss, between the model's outputs and backward.

The loss is the user's code, which cannot be run again to find out; and to look at every operation
of every step would cost. So autograd is asked to note where its nodes are made, the first time that
a loss is made from a call of the model, the second, the fourth, the eighth, and so on. The loss of
a bad step is compared with those: one of the same operations in the same order, connected in the
same way, comes from the same lines.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsight.core.guard import Guard, put_back
from gradsight.core.source import owner_of

_MOST_NODES = 10_000
_NO_NODE = -2
_OUTSIDE = -1
_FRAME = re.compile(r'\s*File "(.*)", line (\d+), in ')

Structure = tuple[tuple[str, tuple[int, ...]], ...]
"""The operations of a loss in the order in which they ran, and what each one is connected to."""
_Loss = tuple[str | None, str | None, Structure]
"""A loss by the calls that it lies between, and its operations."""


@dataclass(frozen=True, slots=True)
class Between:
    """Where a loss lies: after which call of the model, before which call of backward."""

    since: int = 0
    """Autograd's number of the first operation that the loss may consist of."""
    caller: str | None = None
    backward_caller: str | None = None


class LossLines:
    """Told of the calls of a model and of backward, it knows the lines of the losses between."""

    def __init__(self, guard: Guard) -> None:
        # Ours is the mode that does not check for NaN: it is switched off should all else fail.
        switch = partial(torch.set_anomaly_enabled, False)
        guard.at_end(put_back, [], None, torch.is_anomaly_check_nan_enabled, switch, (False, True))
        self._known: dict[_Loss, tuple[str | None, ...]] = {}
        self._losses: dict[str | None, int] = {}
        self._since = 0
        self._caller: str | None = None
        self._begun = False
        self._noting = False
        self._was_noting = False
        self._switched_on = False

    def model_called(self) -> None:
        """What follows is the model's own, which can be run again."""
        self._switch_off()

    def model_returned(self, caller: str | None) -> None:
        """What follows is the loss's."""
        if not self._begun:
            self._begun = True
            self._since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._caller = caller
            number = self._losses.get(caller, 0) + 1
            self._losses[caller] = number
            self._noting = number & (number - 1) == 0
        if self._noting:
            self._switch_on()

    def backward_begins(self, root: Tensor | None, caller: str | None) -> Between:
        """The loss is made; where it lies is given."""
        self._switch_off()
        between = Between(self._since, self._caller, caller)
        if self._noting and root is not None:
            nodes = nodes_since(root, self._since)
            loss = _loss(nodes, between)
            lines = tuple(_line_of(node, caller) for node in nodes)
            known = self._known.get(loss, lines)
            # If two lines run the same operations, the diagnosis can name neither of them.
            self._known[loss] = tuple(
                line if line == other else None for line, other in zip(lines, known, strict=True)
            )
        self._was_noting = self._noting
        self._begun = self._noting = False
        return between

    def loss_goes_on(self) -> None:
        """Continue to record: the last backward pass was of another loss."""
        self._begun = True
        self._noting = self._was_noting
        if self._noting:
            self._switch_on()

    def forget(self) -> None:
        """No loss is under way any more."""
        self._switch_off()
        self._begun = self._noting = False

    def of(self, root: Tensor | None, between: Between) -> Mapping[Any, str]:
        """The line of every autograd node of a loss, where it is known."""
        if root is None:
            return {}
        nodes = nodes_since(root, between.since)
        lines = self._known.get(_loss(nodes, between), ())
        return {node: line for node, line in zip(nodes, lines, strict=False) if line is not None}

    def under_way(self, loss: Tensor) -> Between | None:
        """Return the place of a loss without a backward pass; None for one of an earlier step."""
        node: Any = loss.grad_fn
        if not self._begun or node._sequence_nr() < self._since:
            return None
        return Between(self._since, self._caller)

    def of_unfinished(self, root: Tensor, between: Between) -> Mapping[Any, str]:
        """The same as `of` for a loss that backward was not called on."""
        nodes = nodes_since(root, between.since)
        structure = _structure(nodes)
        known = [
            lines
            for (caller, _, other), lines in self._known.items()
            if caller == between.caller and other == structure
        ]
        if not known and self._noting:
            known = [tuple(_line_of(node, None) for node in nodes)]
        # If two lines run the same operations, the diagnosis can name neither of them.
        agreed = (each[0] if len(set(each)) == 1 else None for each in zip(*known, strict=True))
        return {node: line for node, line in zip(nodes, agreed, strict=False) if line is not None}

    def _switch_on(self) -> None:
        if not torch.is_anomaly_enabled():
            # Nothing is checked and nothing computed otherwise: every node keeps its stack as text.
            torch.set_anomaly_enabled(True, False)
            self._switched_on = True

    def _switch_off(self) -> None:
        # A user's own detect_anomaly checks for NaN, ours does not: theirs is left to them.
        if self._switched_on and not torch.is_anomaly_check_nan_enabled():
            torch.set_anomaly_enabled(False, True)
            self._switched_on = False


def nodes_since(root: Tensor, since: int) -> list[Any]:
    """The autograd nodes below a tensor that were made since, in the order of their making."""
    nodes: dict[Any, int] = {}
    waiting = [root.grad_fn]
    while waiting and len(nodes) < _MOST_NODES:
        node: Any = waiting.pop()
        if node is None or node in nodes:
            continue
        number = node._sequence_nr()
        if number < since or node.name().endswith("AccumulateGrad"):
            continue
        nodes[node] = number
        waiting += [following for following, _ in node.next_functions]
    return sorted(nodes, key=nodes.__getitem__)


def _structure(nodes: Sequence[Any]) -> Structure:
    places = {node: place for place, node in enumerate(nodes)}
    places[None] = _NO_NODE
    return tuple(
        (node.name(), tuple(places.get(source, _OUTSIDE) for source, _ in node.next_functions))
        for node in nodes
    )


def _loss(nodes: Sequence[Any], between: Between) -> _Loss:
    return between.caller, between.backward_caller, _structure(nodes)


def _line_of(node: Any, backward_caller: str | None) -> str | None:
    """The line that made a node: the user's innermost, else a library's."""
    library = None
    for frame in reversed(node.metadata.get("traceback_", ())):
        found = _FRAME.match(frame)
        if found is None:
            continue
        file, number = found.groups()
        owner = owner_of(file)
        line = f"{file}:{number}"
        if owner == "user":
            # A trainer of somebody else's does it all: the user's line is only its start.
            return library if library and line == backward_caller else line
        if owner == "library" and library is None:
            library = line
    return library
