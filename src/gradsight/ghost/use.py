"""An operation as a rule sees it, and the table of rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsight.ghost.derivative import function_name
from gradsight.ghost.fallback import Score, attach
from gradsight.ghost.sample_axis import SampleLayout
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.tangent_sources import TangentSource

if TYPE_CHECKING:
    from gradsight.ghost.joined_operations import JoinedCall
    from gradsight.ghost.one_pass import OnePass
    from gradsight.ghost.tracer import Tracer

DECLINED: Any = type("Declined", (), {"__repr__": lambda self: "DECLINED"})()
"""What a rule returns for a call that it does not know."""


@dataclass(slots=True)
class Use:
    """One operation in which parameters meet batch data."""

    tracer: "Tracer"
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    origins: tuple[str, ...]

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.tracer.batch

    @property
    def probe(self) -> Tensor:
        """The zero table whose gradient is the scores."""
        return self.tracer.probe

    @property
    def exact_grad(self) -> bool:
        """Whether the gradient must be the plain operation's own, bit for bit."""
        return self.tracer.options.rules.exact_grad

    @property
    def route(self) -> str | None:
        """The route to take, where the cost rule is not to decide."""
        return self.tracer.options.rules.route

    @property
    def scratch(self) -> Scratch:
        """Memory for the products of a layer."""
        return self.tracer.options.scratch

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def source(self, x: Any) -> TangentSource | None:
        """The source of a tensor's derivatives; None where it carries none."""
        return self.tracer.source(x)

    @property
    def one_pass(self) -> "OnePass":
        """The pass over joined rows that a joined rule belongs to."""
        one_pass = self.tracer.options.one_pass
        assert one_pass is not None
        return one_pass

    def stand_ins(self, x: Any) -> list[Tensor]:
        """A parameter's or derived tensor's stand-ins, one per target; none for other tensors."""
        return self.tracer.stand_ins(x)

    def joined_call(self) -> "JoinedCall":
        """The operation with its stand-ins, for the universal way."""
        return self.tracer.joined_call(self.func, self.args, self.kwargs)[0]

    def layout(self, shape: torch.Size) -> SampleLayout | None:
        """Where the samples are in the tensor that the rule splits."""
        return self.tracer.layout(
            (function_name(self.func), "rule", *self.origins), shape, self.origins
        )

    def plain(self) -> Any:
        """The operation as the model meant it."""
        return self.func(*self.args, **self.kwargs)

    def attach(self, y: Tensor, score: Score, saved: Sequence[Tensor] = ()) -> Tensor:
        """y, scored by a function of its gradient and the saved tensors."""
        return attach(y, self.probe, score, saved)


def argument_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any
) -> Any:
    """An argument of a call, given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


Rule = Callable[[Use], Any]

RULES: dict[Callable[..., Any], Rule] = {}
"""From torch functions to rules."""


JOINED_RULES: dict[Callable[..., Any], Rule] = {}
"""The rules of one pass over training and validation rows."""


def joined_rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Make a function the rule of these torch functions in one pass over joined rows."""
    return partial(_register, JOINED_RULES, functions)


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Make a function the rule of these torch functions."""
    return partial(_register, RULES, functions)


def _register(
    table: dict[Callable[..., Any], Rule], functions: Sequence[Callable[..., Any]], made: Rule
) -> Rule:
    for torch_function in functions:
        table[torch_function] = made
    return made
