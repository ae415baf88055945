# mypy: allow-untyped-calls
"""When a tracer looks: in a pass, also where checkpointing runs it again, and when not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from gradsight.ghost.tracer import Tracer


@contextmanager
def tracing(tracer: Tracer, root: nn.Module) -> Iterator[None]:
    """Operations are seen in here, also those that activation checkpointing runs again."""
    with recompute_seen(tracer, root), tracer:
        yield


@contextmanager
def recompute_seen(tracer: Tracer, root: nn.Module) -> Iterator[None]:
    """Operations that activation checkpointing runs again are seen in here."""
    entered: list[nn.Module] = []

    def before(module: nn.Module, args: Any) -> None:
        if not tracer.active:
            entered.append(module)
            tracer.__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if entered and entered[-1] is module:
            entered.pop()
            tracer.__exit__(None, None, None)

    with ExitStack() as stack:
        # A module with hooks of ours is slower to call, so they are put on only where a backward
        # pass may run modules again.
        def enter_with_modules() -> None:
            for module in root.modules():
                stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                # always_call: checkpointing ends its recomputation early, by an exception.
                stack.callback(module.register_forward_hook(after, always_call=True).remove)

        tracer.on_recompute = enter_with_modules
        stack.callback(setattr, tracer, "on_recompute", None)
        yield


@contextmanager
def paused(tracer: Tracer) -> Iterator[None]:
    """Operations pass unseen in here."""
    tracer.paused = True
    try:
        yield
    finally:
        tracer.paused = False
