"""What in a model lets a position see later ones: its attention masks, recurrence, convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradsight.core.function_modes import drop_own_frame
from gradsight.core.guard import Guard

_MOST = 256
"""Calls of attention that are examined."""
_HIDDEN = -1e4
"""Scores get this or less added where a mask hides a position."""
_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax})


class Mixing(TorchFunctionMode):
    """Notes how the attention of a pass is masked."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard
        self._masks: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        given = kwargs or {}
        try:
            result = func(*args, **given)
        except BaseException as error:
            drop_own_frame(error)
            raise
        if func in _READERS and len(self._masks) < _MOST:
            masked = self._guard.run(_READERS[func], args, given, result)
            if masked is not None:
                self._masks.append(masked)
        return result

    def culprit(self, root: nn.Module) -> str:
        """The one thing that lets positions see later ones; empty where there may be several."""
        for mask in ("added mask", "inverted mask"):
            if mask in self._masks:
                return mask
        found = []
        if "attention" in self._masks:
            found.append("attention")
        if any(isinstance(each, nn.RNNBase) and each.bidirectional for each in root.modules()):
            found.append("recurrence")
        if any(_pads_both_sides(each) for each in root.modules()):
            found.append("convolution")
        return found[0] if len(found) == 1 else ""


def _pads_both_sides(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d) or module.kernel_size[0] == 1:
        return False
    return module.padding == "same" or module.padding[0] not in (0, "v")


def _of_scaled_dot_product(
    args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> str | None:
    query, key = args[:2] if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    is_causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return None
    if is_causal or query.shape[-2] != key.shape[-2] or query.shape[-2] < 2:
        return None
    return _of_mask(mask, True)


def _of_multi_head(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    query, key = args[:2] if len(args) > 1 else (kwargs.get("query"), kwargs.get("key"))
    mask = kwargs.get("attn_mask")
    if not isinstance(query, Tensor) or query is not key:
        return None
    return None if kwargs.get("is_causal") else _of_mask(mask, False)


def _of_mask(mask: Any, true_is_visible: bool) -> str | None:
    """What is wrong with a mask of attention of a sequence to itself; None where nothing is."""
    if not isinstance(mask, Tensor):
        return "attention"
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return None
    mask = mask.detach().reshape(-1, *mask.shape[-2:])[0].cpu()
    if mask.dtype is torch.bool:
        visible = mask if true_is_visible else ~mask
    else:
        values = mask.float()
        if bool(((values == 0) | (values == 1)).all()) and bool(values.any()):
            return "added mask"
        visible = values > _HIDDEN
    return _of_visible(visible)


def _of_visible(visible: Tensor) -> str | None:
    """What is wrong if these positions are visible: [outputs, inputs]."""
    sees_later = bool(visible.triu(1).any())
    sees_earlier = bool(visible.tril(-1).any())
    if not sees_later:
        return None
    return "attention" if sees_earlier else "inverted mask"


def _of_softmax(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> str | None:
    """Attention that is written by hand ends in a softmax over square scores."""
    if not isinstance(result, Tensor) or result.dim() < 3 or result.shape[-1] < 2:
        return None
    if result.shape[-1] != result.shape[-2]:
        return None
    return _of_visible(result.detach().reshape(-1, *result.shape[-2:])[0].cpu() > 0)


_READERS = {
    F.scaled_dot_product_attention: _of_scaled_dot_product,
    F.multi_head_attention_forward: _of_multi_head,
    **dict.fromkeys(_SOFTMAX, _of_softmax),
}
