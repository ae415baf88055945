"""nn.MultiheadAttention: its packed projections are linear layers inside one torch function.

The function is run from the inside: the same code, with its test for overrides answering no, so
that every operation in it is seen on its own.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F

COMPOSITE = frozenset({F.multi_head_attention_forward})


def descend(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a composite function, to be run under the tracer; None for all others."""
    return _body(func) if func in COMPOSITE else None


@cache
def _body(func: Any) -> Callable[..., Any]:
    inside = {**func.__globals__, "has_torch_function": lambda tensors: False}
    body = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
