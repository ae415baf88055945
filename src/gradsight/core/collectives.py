"""No collective in a pass of ours: other ranks may not be making it, and would wait for ever."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from gradsight.core.calls import is_suspended
from gradsight.core.guard import lock
from gradsight.errors import GradsightError


class CollectiveRefused(GradsightError):
    """A model communicates by itself, so that it cannot be run by one rank alone."""


@contextmanager
def without_collectives() -> Iterator[None]:
    """In here, a collective that a pass of ours comes to raises; those of other threads do not."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    # Every collective of torch's asks this first, and goes on to communicate.
    original = dist.distributed_c10d._rank_not_in_group

    def refused(group: Any) -> bool:
        if is_suspended():
            raise CollectiveRefused("the model communicates with other ranks by itself")
        return bool(original(group))

    with lock:
        dist.distributed_c10d._rank_not_in_group = refused
    try:
        yield
    finally:
        with lock:
            dist.distributed_c10d._rank_not_in_group = original
