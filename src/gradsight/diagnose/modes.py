# mypy: allow-untyped-calls
"""What our dispatch modes have in common."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Eyes(TorchDispatchMode):
    """A mode that watches operations in eager code."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be skipped is to import the compiler, seconds, and where it is loaded already, its code runs eagerly."""
        return False


def name_of(func: Any) -> str:
    """An operation's name without its overload."""
    packet = getattr(func, "overloadpacket", None)
    return str(func.name() if packet is None else packet.__name__)
