"""The third route, for short sequences and small targets: inner products of activations.

A linear weight's part of a direction is D = B_v^T A_v, from the target's inputs A_v [N, d] and
output gradients B_v [N, p]:

    <A_i D^T, B_i> = the sum over all entries of (A_i A_v^T) * (B_i B_v^T)

which costs N (d + p) multiply-adds per position instead of d p. So it is worth keeping A_v and B_v
where N (d + p) < d p; they are smaller than D itself then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Factor = tuple[Tensor, Tensor]
"""Inputs [N, d] and output gradients [N, p] of one use of a weight."""
Factors = dict[str, list[Factor]]
"""By parameter, all of its uses."""


class FactorRecorder(TorchFunctionMode):
    """Keeps the factors of linear weights while a target's pass runs."""

    def __init__(self, name: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self.found: Factors = {}
        self._name = name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation; of a linear layer small enough, keep input and output gradient."""
        out = func(*args, **(kwargs or {}))
        if func is F.linear and len(args) > 1 and isinstance(out, Tensor) and out.requires_grad:
            x, weight = args[0], args[1]
            name = self._name(weight)
            if name is not None and worth_keeping(x, weight):
                out.register_hook(self._keeper(name, x.detach()))  # type: ignore[no-untyped-call]
        return out

    def _keeper(self, name: str, x: Tensor) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            factor = x.reshape(-1, x.shape[-1]), grad.detach().reshape(-1, grad.shape[-1])
            self.found.setdefault(name, []).append(factor)

        return keep


def worth_keeping(x: Tensor, weight: Tensor) -> bool:
    """Whether N (d + p) < d p."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] == 0 or x.dtype != weight.dtype:
        return False
    return x.numel() // x.shape[-1] * sum(weight.shape) < weight.numel()


class FactorCache:
    """The factors of every target, of those parameters whose whole direction they are."""

    def __init__(self) -> None:
        self._factors: dict[str, Factors] = {}
        self._proven: dict[tuple[str, str], int] = {}

    def take(self, target: str, found: Factors, direction: Mapping[str, Tensor]) -> None:
        """Keep the factors that make up the whole of a parameter's direction."""
        self._factors[target] = {
            name: uses
            for name, uses in found.items()
            if self._is_whole(target, name, uses, direction)
        }

    def look_up(self, targets: Sequence[str], name: str) -> list[list[Factor]] | None:
        """The factors of a parameter for every target; None where one has none."""
        by_target = []
        for target in targets:
            uses = self._factors.get(target, {}).get(name)
            if uses is None:
                return None
            by_target.append(uses)
        return by_target

    def _is_whole(
        self, target: str, name: str, uses: list[Factor], direction: Mapping[str, Tensor]
    ) -> bool:
        """Whether no other use of the parameter adds to its direction.

        Proven when a parameter is first met, and when it is met with another number of uses.
        """
        known = self._proven.get((target, name))
        if known is None or known != len(uses):
            # A tied head's weight is the embedding too, whose part no linear layer's factors make.
            whole = direction[name]
            made = torch.stack([b.t().to(whole.dtype) @ a.to(whole.dtype) for a, b in uses]).sum(0)
            same = bool((made - whole).norm() <= 1e-3 * whole.norm())
            self._proven[target, name] = known = len(uses) if same else -len(uses)
        return known > 0


def gram_dots(x: Tensor, grad: Tensor, uses: Sequence[Factor]) -> Tensor:
    """The sum over the target's positions of (A A_v^T) * (B B_v^T), by position of the batch."""
    flat = x.reshape(-1, x.shape[-1])
    slopes = grad.reshape(-1, grad.shape[-1])
    parts = [
        torch.linalg.vecdot(flat @ a.t().to(flat.dtype), slopes @ b.t().to(slopes.dtype))
        for a, b in uses
    ]
    total: Tensor = torch.stack(parts).sum(0)
    return total.view(x.shape[:-1])
