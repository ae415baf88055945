"""FSDP2's buffers told apart: gathered parameters, and what gradients are reduced in.

Its own operators show them: what a collective gathers into, what the parameters of a layer are
copied out to, and what their gradients are put together in.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

GATHERED = "gathered"
BUCKETS = "buckets"
LASTING = (GATHERED, BUCKETS)
"""Kinds that are right from the first: a gathered parameter is a Parameter as well."""


def communicated(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, str]]:
    """The buffers that one of FSDP2's operators fills, with their kinds."""
    if getattr(func, "namespace", None) != "fsdp":
        return
    name = func._overloadpacket.__name__
    if name == "all_gather_copy_in":
        yield args[1], GATHERED
    elif name == "split_with_sizes_copy":
        for tensor in tree_leaves(kwargs["out"]):
            yield tensor, GATHERED
    elif name == "chunk_cat":
        yield kwargs["out"], BUCKETS
