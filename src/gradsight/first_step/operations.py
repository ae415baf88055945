"""Sees the torch functions of a pass: lookups of tokens, and losses with what they are given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradsight.core.function_modes import drop_own_frame
from gradsight.core.guard import Guard
from gradsight.core.samples import LOSSES
from gradsight.core.source import users_line
from gradsight.first_step.loss_inputs import (
    Cut,
    constant_loss,
    counted_labels,
    cuts_of,
    what_was_fed,
)
from gradsight.values.first_step import ConstantLoss, CountedLabels, FedLoss

_MOST = 64
"""Calls of one pass that are looked at."""
_GATHERS = frozenset({torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim})
_SCATTERS = frozenset({torch.scatter, Tensor.scatter, Tensor.scatter_})
_CLASSIFYING = frozenset({F.cross_entropy, F.nll_loss})
_CLASSIFYING_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction")
"""What may follow the target, in this order."""
_AS_FLOATS = frozenset({Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to})
_CONVERSIONS = _AS_FLOATS | {Tensor.type, Tensor.type_as}


@dataclass(frozen=True, eq=False, slots=True)
class SeenTargets:
    """What the scores of one call of a loss are compared with."""

    values: Tensor
    counts: Tensor
    """Which of them count; of the same shape."""
    is_classes: bool = False
    """Whether these are classes that a loss function was given."""
    is_reduced: bool = False
    """Whether the loss function reduces them, so that no mask can be applied afterwards."""
    cuts: tuple[Cut, ...] = ()
    """What was cut off the scores on their way to the loss."""
    place: str | None = None
    """File and line of the user's call."""


@dataclass(frozen=True, eq=False, slots=True)
class Probe:
    """A tensor of zeros that was added to what came of an input: gradients are read there."""

    zeros: Tensor
    source: Tensor
    """The integers that were looked up."""


class Operations(TorchFunctionMode):
    """Collects what a pass looks up and what its losses are given; may add probes to lookups."""

    def __init__(self, guard: Guard, probing: bool = False) -> None:
        super().__init__()
        self.looked_up: list[Tensor] = []
        self.padded: list[tuple[Tensor, int]] = []
        """Lookups of a layer that knows which token pads, and that token."""
        self.targets: list[SeenTargets] = []
        self.fed: list[FedLoss] = []
        self.labels: list[CountedLabels] = []
        self.constant: ConstantLoss | None = None
        self.scores: list[Tensor] = []
        """What the losses were given; kept in a pass of ours only, for it holds the graph."""
        self.probes: list[Probe] = []
        self.is_over = False
        """Whether nothing is looked at any more, though it may be on torch's stack still."""
        self._probing = probing
        self._guard = guard
        self._one_hot: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and look at it."""
        given = kwargs or {}
        try:
            result = func(*args, **given)
        except BaseException as error:
            drop_own_frame(error)
            raise
        if self.is_over or func not in _SEEN:
            return result
        seen = self._guard.run(self._see, func, args, given, result)
        return result if seen is None else seen

    def _see(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> Tensor | None:
        """What the caller gets instead of the result; None: the result."""
        if func in LOSSES:
            self._see_loss(func, args, kwargs)
            return None
        if func in _GATHERS:
            self._see_gather(args, kwargs)
            return None
        if func in _SCATTERS:
            self._see_scatter(args, kwargs)
            return None
        return self._see_lookup(func, args, kwargs, result)

    def _see_loss(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if len(self.labels) >= _MOST or len(args) + len(kwargs) < 2:
            return
        scores = args[0] if args else kwargs["input"]
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
            return
        if not torch.is_grad_enabled() or not scores.requires_grad:
            return
        if self._probing:
            self.scores.append(_classes_last(func, scores))
        place = users_line()
        fed = what_was_fed(func, scores, target, kwargs, place)
        if fed is not None:
            self.fed.append(fed)
        if self.constant is None:
            self.constant = constant_loss(func, scores, target, kwargs, place)
        is_classes = func in _CLASSIFYING and not target.is_floating_point()
        counts = torch.ones_like(target, dtype=torch.bool)
        if not is_classes:
            self.targets.append(SeenTargets(target.detach(), counts))
            return
        options = dict(zip(_CLASSIFYING_OPTIONS, args[2:], strict=False)) | dict(kwargs)
        counts = target.detach() != options.get("ignore_index", -100)
        weight = options.get("weight")
        if isinstance(weight, Tensor):
            # A class without weight is ignored, too.
            counts &= (weight != 0)[target.detach().clamp(0, len(weight) - 1)]
        self.labels.append(counted_labels(func, target, counts, options, place))
        self.targets.append(
            SeenTargets(
                target.detach(),
                counts,
                is_classes=True,
                is_reduced=options.get("reduction", "mean") != "none"
                and options.get("reduce") is not False,
                cuts=cuts_of(scores),
                place=place,
            )
        )

    def _see_gather(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Log-probabilities that are picked by their labels, where no loss function is called."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(tensors) != 2 or len(self.targets) >= _MOST:
            return
        scores, index = tensors
        is_picked = index.dim() == scores.dim() >= 2 and index.shape[-1] == 1
        if not is_picked or not scores.requires_grad or index.is_floating_point():
            return
        values = index.detach().squeeze(-1)
        self.targets.append(SeenTargets(values, torch.ones_like(values, dtype=torch.bool)))

    def _see_scatter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record labels that are scattered into one-hot targets, as in manual label smoothing."""
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(tensors) != 2 or len(self.targets) >= _MOST:
            return
        table, index = tensors
        is_one_hot = index.dim() == table.dim() >= 2 and index.shape[-1] == 1
        if not is_one_hot or table.requires_grad or index.shape[:-1] != table.shape[:-1]:
            return
        values = index.detach().squeeze(-1)
        self.targets.append(SeenTargets(values, torch.ones_like(values, dtype=torch.bool)))

    def _see_lookup(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Tensor | None:
        if not isinstance(result, Tensor):
            return None
        if func is F.one_hot:
            source = args[0] if args else kwargs["tensor"]
            self._one_hot[id(result)] = (result, source)
            return None
        source = self._source(func, args, kwargs)
        if source is None or not result.is_floating_point() or len(self.looked_up) >= _MOST:
            return None
        self.looked_up.append(source.detach())
        padding = args[2] if func is F.embedding and len(args) > 2 else kwargs.get("padding_idx")
        if func is F.embedding and isinstance(padding, int):
            self.padded.append((source.detach(), padding))
        if not self._probing or result.shape[: source.dim()] != source.shape:
            return None
        with torch.enable_grad():
            zeros = torch.zeros_like(result, requires_grad=True)
            self.probes.append(Probe(zeros, source.detach()))
            probed: Tensor = result + zeros
            return probed

    def _source(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The integers that an operation looks up in a table."""
        if func is F.embedding:
            source: Tensor = args[0] if args else kwargs["input"]
            return source
        if func in _CONVERSIONS:
            kept = self._one_hot.get(id(args[0])) if args else None
            return None if kept is None else kept[1]
        # A table that is indexed by a tensor of integers.
        table = args[0]
        index = args[1]
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype is torch.bool:
            return None
        is_table = table.is_floating_point() and table.requires_grad and table.dim() == 2
        return index if is_table else None


def _classes_last(func: Any, scores: Tensor) -> Tensor:
    """The scores of a loss by positions; those of classification have the classes second."""
    return scores.movedim(1, -1) if func in _CLASSIFYING and scores.dim() > 2 else scores


_SEEN = LOSSES | _GATHERS | _SCATTERS | _CONVERSIONS | {F.embedding, F.one_hot, Tensor.__getitem__}
