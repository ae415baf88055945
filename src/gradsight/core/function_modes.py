# mypy: allow-untyped-calls
"""Function modes of ours that are over, and how they come off torch's stack.

Torch takes a mode off its stack while that mode handles an operation, and puts it back afterwards.
So a mode that ends inside of an operation (a refusal, `loss.backward()`) is on the stack again when
the operation is over. Such a mode does nothing any more, and is taken off at the next occasion.
"""

import threading
import weakref

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class _Ended(threading.local):
    """Of one thread, as torch's stack is."""

    def __init__(self) -> None:
        self.modes: list[weakref.ref[TorchFunctionMode]] = []


_ended = _Ended()


def drop_own_frame(error: BaseException) -> None:
    """Leave the calling frame out of the traceback of an error that it goes on to raise again.

    An error of the script must not look as if Gradsight had made it. To be called in an except
    clause that ends with a bare `raise`, which adds no entry of its own.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def end_mode(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, whatever was entered above it; inside of its operation, later."""
    _ended.modes.append(weakref.ref(mode))
    take_off_ended()


def take_off_ended() -> None:
    """Take off this thread's modes that are over, as far as they are on the stack."""
    waiting = []
    for reference in _ended.modes:
        mode = reference()
        if mode is not None and not _take_off(mode):
            waiting.append(reference)
    _ended.modes = waiting


def _take_off(ended: TorchFunctionMode) -> bool:
    # By identity: modes may compare as they like.
    if not any(mode is ended for mode in _get_current_function_mode_stack()):
        return False
    above = []
    top = torch._C._pop_torch_function_stack()
    while top is not ended:
        above.append(top)
        top = torch._C._pop_torch_function_stack()
    for mode in reversed(above):
        torch._C._push_on_torch_function_stack(mode)
    return True
