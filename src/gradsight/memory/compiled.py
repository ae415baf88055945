"""Compiled models under a count of storages or on fake tensors: they run eagerly, for that time.

Left alone, torch's compiler would meet our dispatch mode, give the code up and never compile it
again. Told to be eager, it forgets nothing: the next plain call is compiled as before.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from gradsight.core.beside import eager

EAGER_NOTE = (
    "compiled code ran eagerly here: this is the peak of the eager program, and what torch.compile "
    "fuses or keeps otherwise is not in it"
)


@contextmanager
def compiled_code_eager(called: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, compiled code runs uncompiled; `called` is told of every such call."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_eager_and_told(called))
        else:
            # To ask for the compiler imports it, which takes seconds. Whoever compiles in here
            # comes through torch.compile, also from nn.Module.compile.
            stack.enter_context(_from_first_use_on(stack, called))
        yield


@contextmanager
def _eager_and_told(called: Callable[[], None]) -> Iterator[None]:
    from torch._dynamo import eval_frame

    original = eval_frame._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        compiles = callback is not None and callback is not False
        if compiles:
            called()
        return original(callback)

    with eager(), patch.object(eval_frame, "_callback_from_stance", callback_from_stance):
        yield


@contextmanager
def _from_first_use_on(stack: ExitStack, called: Callable[[], None]) -> Iterator[None]:
    original = torch.compile
    entered: list[bool] = []

    def compile_eagerly(*args: Any, **kwargs: Any) -> Any:
        if not entered:
            importlib.import_module("torch._dynamo")
            entered.append(True)
            stack.enter_context(_eager_and_told(called))
        return original(*args, **kwargs)

    with patch.object(torch, "compile", compile_eagerly):
        yield
