"""The table of rules."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsight.ghost.use import Use

DECLINED: Any = type("Declined", (), {"__repr__": lambda self: "DECLINED"})()
"""What a rule returns for a call that it does not know."""

Rule = Callable[["Use"], Any]

RULES: dict[Callable[..., Any], Rule] = {}
"""From torch functions to rules."""


def rule(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Make a function the rule of these torch functions."""

    def register(function: Rule) -> Rule:
        for torch_function in functions:
            RULES[torch_function] = function
        return function

    return register
