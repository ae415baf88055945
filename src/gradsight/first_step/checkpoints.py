"""Reentrant checkpoints whose inputs need no gradient: nothing inside of them learns."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.utils.checkpoint as checkpoint
from torch import Tensor

from gradsight.core.guard import Guard, lock, put_back

_NAME = "check_backward_validity"
_users: list[Any] = []
_replaced: list[Any] = []
"""What stands in for torch's function, and that function."""


class CutCheckpoints:
    """Notes whether a reentrant checkpoint was given nothing that requires a gradient."""

    def __init__(self, guard: Guard) -> None:
        self.seen = False
        self.guard = guard

    def start(self) -> None:
        """Look at what torch looks at before it warns of the same."""
        with lock:
            if not _users:
                original = getattr(checkpoint, _NAME, None)
                if original is None:
                    return
                _replaced[:] = [partial(_checked, original), original]
                setattr(checkpoint, _NAME, _replaced[0])
            _users.append(self)
        self.guard.at_end(self.stop)

    def stop(self) -> None:
        """The last one to leave puts torch's own back."""
        if self in _users:
            get = partial(getattr, checkpoint, _NAME)
            put = partial(setattr, checkpoint, _NAME)
            put_back(_users, self, get, put, _replaced)

    def note(self, inputs: Sequence[Any]) -> None:
        """A reentrant checkpoint is given these."""
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        self.seen = self.seen or not any(each.requires_grad for each in tensors)


def _checked(original: Any, inputs: Sequence[Any]) -> Any:
    for user in tuple(_users):
        user.guard.run(user.note, inputs)
    return original(inputs)
