"""A kernel for the split product: compared with today's route first, and given up in words."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsight.core.devices import is_accelerator, multiplies_in_tf32
from gradsight.core.problems import say
from gradsight.values.texts import on_one_line

Pairs = list[tuple[int, Tensor]]
"""Slots of the table of scores, and every sample's score for them."""
Made = tuple[Tensor, Pairs]
"""The sum of the samples' products, and their dots with the directions."""
Today = Callable[[Tensor, Tensor], Made]
"""Today's route to the same, of left [B, T, p] and right [B, T, d]."""

_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""What matrix units multiply and add up in float32."""
_TOLERANCE = 1e-4
"""Of a sum in float32; the largest difference against the largest entry."""
_TOLERANCE_TF32 = 1e-2


class ProductKernel:
    """Makes split products by a kernel where that gives today's numbers.

    Every kind of product (shapes and types) is made both ways when it is first met, and today's
    result is the one that is used. A difference beyond rounding, and any error of importing,
    compiling or launching, ends the kernel's use for good, and is said once.
    """

    def __init__(self) -> None:
        self.in_use = True
        """Whether the kernel has not been given up."""
        self.products = 0
        """How many products it has made."""
        self._compared: set[Any] = set()

    def make(
        self, left: Tensor, right: Tensor, tangents: Sequence[tuple[int, Tensor]], today: Today
    ) -> Made | None:
        """The products' sum and dots; None where today's route has to make them."""
        # Compiled code has no place for a comparison, nor for giving up.
        if not self.in_use or not tangents or torch.compiler.is_compiling():
            return None
        if left.dtype not in _TYPES or right.dtype != left.dtype or not left.numel():
            return None
        try:
            kind = (left.shape, right.shape, left.dtype, left.device, len(tangents))
            if kind not in self._compared:
                return self._compare(kind, left, right, tangents, today)
            made = _by_triton(left, right, tangents)
        except Exception as error:  # of a compiler or a driver: they raise what they like
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self.products += 1
        return made

    def _compare(
        self,
        kind: Any,
        left: Tensor,
        right: Tensor,
        tangents: Sequence[tuple[int, Tensor]],
        today: Today,
    ) -> Made:
        """Make one product both ways; today's is returned."""
        total, pairs = _by_triton(left, right, tangents)
        # Widened: in 16 bits today's route rounds every sample's product, and the kernel does not.
        right_total, right_pairs = today(left.float(), right.float())
        tf32 = multiplies_in_tf32() and is_accelerator(left.device)
        tolerance = _TOLERANCE_TF32 if tf32 else _TOLERANCE
        apart = _apart(total, right_total)
        for (_, own), (_, other) in zip(pairs, right_pairs, strict=True):
            apart = max(apart, _apart(own, other))
        if not apart <= tolerance:
            self._give_up(
                f"it is {apart:.1e} away from today's route for the product of "
                f"{tuple(left.shape)} and {tuple(right.shape)} in {left.dtype}"
            )
        self._compared.add(kind)
        return right_total, right_pairs

    def _give_up(self, reason: str) -> None:
        self.in_use = False
        say(f"kernel='triton' is not used: {on_one_line(reason)}. Scores are made as without it.")


def _apart(own: Tensor, other: Tensor) -> float:
    """The largest difference against the largest entry; not a number is infinitely far."""
    largest = float(other.abs().max())
    apart = float((own - other.to(own.dtype)).abs().max())
    if not largest:
        return apart
    return apart / largest if apart == apart else float("inf")


def _by_triton(left: Tensor, right: Tensor, tangents: Sequence[tuple[int, Tensor]]) -> Made:
    from gradsight.ghost.kernels.triton_split_product import split_product

    shape = (left.shape[2], right.shape[2])
    parts = [direction.reshape(shape).float() for _, direction in tangents]
    # One direction is taken where it lies; several are copied side by side.
    directions = parts[0].contiguous().unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
    total, scores = split_product(_dense_rows(left), _dense_rows(right), directions)
    slots = [slot for slot, _ in tangents]
    return total, list(zip(slots, scores.unbind(), strict=True))


def _dense_rows(matrices: Tensor) -> Tensor:
    """The tensor with its last dimension without gaps."""
    return matrices if matrices.stride(2) == 1 else matrices.contiguous()
