# mypy: allow-untyped-calls
"""The batch's own random numbers for one sample of it.

Dropout drops in the sample alone what it dropped in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gradsight.core.random_state import as_bytes, set_torch_states, torch_states
from gradsight.incidents.diagnosis.watcher import Budget, OperationWatcher, operation_name

RANDOM = frozenset(
    {
        "bernoulli", "bernoulli_", "native_dropout", "rand", "rand_like", "randn", "randn_like",
        "normal", "normal_", "uniform_", "exponential_", "randint", "randint_like", "random_",
    }
)  # fmt: skip
"""Operations that draw one number per entry of their result."""

State = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """The random numbers of one operation in the batch."""

    result: Any
    after: Mapping[str, Tensor]
    """The generators' states behind it."""


class RandomTape(OperationWatcher):
    """Records what a batch draws; then hands out a sample's rows of it.

    What is drawn is found by the state of the generators, and the generators go on as in the batch.
    So recomputation under activation checkpointing, which puts the generators back, finds the same
    numbers again.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget)
        self.row: tuple[int, int] | None = None
        """The sample and the size of the batch; None while recording."""
        self.unknown = False
        """Whether a sample drew what cannot be found in the batch's."""
        self._drawn: dict[State, Draw] = {}

    @property
    def has_drawn(self) -> bool:
        """Whether the batch drew any random numbers."""
        return bool(self._drawn)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation; a random one is recorded, or answered from the record."""
        kwargs = kwargs or {}
        self._budget.check()
        name = operation_name(func)
        if self.row is not None and draws_inside(func, args, kwargs):
            self.unknown = True
        # A generator of the model's own has a state that torch's generators do not tell.
        if name not in RANDOM or kwargs.get("generator") is not None:
            return self.run(func, args, kwargs)
        state = tuple(as_bytes(each) for each in torch_states().values())
        out = self.run(func, args, kwargs)
        if self.row is None:
            copied = tree_map_only(Tensor, Tensor.clone, out)
            self._drawn[state] = Draw(copied, torch_states())
            return out
        return self._answer(state, out, name, args)

    def _answer(self, state: State, out: Any, name: str, args: Sequence[Any]) -> Any:
        """The sample's rows of what the batch drew here, in place where the operation was."""
        draw = self._drawn.get(state)
        if draw is None or self.row is None:
            self.unknown = True
            return out
        set_torch_states(draw.after)
        whole, _ = tree_flatten(draw.result)
        alone, spec = tree_flatten(out)
        parts = [_rows(w, a, *self.row) for w, a in zip(whole, alone, strict=True)]
        if any(part is None for part in parts):
            self.unknown = True
            return out
        if name == "native_dropout":  # of its two results only the mask is drawn
            mask = parts[1]
            return args[0] * mask / (1 - args[1]), mask
        if name.endswith("_"):
            return args[0].copy_(parts[0])
        return tree_unflatten(parts, spec)


def draws_inside(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a fused attention draws its dropout inside the kernel, where nobody can repeat it."""
    schema = getattr(func, "_schema", None)
    if schema is None or "attention" not in schema.name or schema.name.endswith("_math"):
        return False
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p"))


def _rows(whole: Tensor, alone: Tensor, row: int, batch: int) -> Tensor | None:
    """Sample `row`'s part of what was drawn for the batch; None where it cannot be told."""
    if whole.shape == alone.shape:
        return whole.clone()
    if whole.dim() != alone.dim():
        return None
    dims = [d for d in range(whole.dim()) if whole.shape[d] != alone.shape[d]]
    if len(dims) != 1 or whole.shape[dims[0]] != batch * alone.shape[dims[0]]:
        return None
    size = alone.shape[dims[0]]
    return whole.narrow(dims[0], row * size, size).clone()
