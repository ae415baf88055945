"""What a rule sees of an operation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradsight.ghost.derivative import name_of
from gradsight.ghost.fallback import Score, attach
from gradsight.ghost.gram import Factor
from gradsight.ghost.sample_axis import Layout
from gradsight.ghost.tangent_sources import Carrier, Source

if TYPE_CHECKING:
    from gradsight.ghost.tracer import Tracer


@dataclass
class Use:
    """One operation in which parameters meet batch data, as a rule sees it."""

    tracer: "Tracer"
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    origins: tuple[str, ...]

    @property
    def batch(self) -> int:
        """How many samples."""
        return self.tracer.batch

    @property
    def probe(self) -> Tensor:
        """The zero table whose gradient is the scores."""
        return self.tracer.probe

    @property
    def exact_grad(self) -> bool:
        """Whether the gradient must be the plain operation's own, bit for bit."""
        return self.tracer.plan.options.exact_grad

    @property
    def route(self) -> str | None:
        """The route to take, where the cost rule is not to decide."""
        return self.tracer.plan.options.route

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def carrier(self, x: Any) -> Carrier | None:
        """What a tensor carries, if anything."""
        return self.tracer.carrier(x)

    def factors(self, weight: Tensor) -> list[list[Factor]] | None:
        """The factors of a weight's part of each direction, for the Gram route; None where they are
        not kept.
        """
        carrier, look_up = self.carrier(weight), self.tracer.plan.factors
        if look_up is None or not isinstance(carrier, Source) or self.func is not F.linear:
            return None
        return look_up(carrier.origins[0])

    def layout(self, shape: torch.Size) -> Layout | None:
        """Where the samples are in the tensor that the rule splits."""
        return self.tracer.layout((name_of(self.func), "rule", *self.origins), shape, self.origins)

    def plain(self) -> Any:
        """The operation as the model meant it."""
        return self.func(*self.args, **self.kwargs)

    def attach(self, y: Tensor, score: Score, saved: Sequence[Tensor] = ()) -> Tensor:
        """y, scored by a function of its gradient and the saved tensors."""
        return attach(y, self.probe, score, saved)
