"""Key-value caches of Hugging Face among a checkpointed block's arguments.

A cache is written to by every run of a block, so a recomputation must not meet the one that the
forward pass filled. An empty one is of no use in training and is left out; one with something in
it (prefix tuning, a cached prompt) is copied for each run.
"""

import copy
import sys
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def without_empty_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a block without caches that hold nothing."""
    if not any(_is_empty_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    kept_args = tuple(None if _is_empty_cache(value) else value for value in args)
    kept = {name: None if _is_empty_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return kept_args, kept


def with_own_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of one run of a block, in which caches are the run's own."""
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    own_args = tuple(_own(value) for value in args)
    return own_args, {name: _own(value) for name, value in kwargs.items()}


def _cache_class() -> Any:
    """Hugging Face's class, where it was imported; it is not imported for the question."""
    return getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)


def _is_cache(value: Any) -> bool:
    cache = _cache_class()
    return cache is not None and isinstance(value, cache)


def _is_empty_cache(value: Any) -> bool:
    return _is_cache(value) and not _holds_something(value)


def _holds_something(cache: Any) -> bool:
    """Whether a cache has keys or values, its own or those of caches and layers in it."""
    for value in vars(cache).values():
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            return True
        parts = value if isinstance(value, list) else [value]
        if any(_is_part(part) and _holds_something(part) for part in parts):
            return True
    return False


def _is_part(value: Any) -> bool:
    """Whether this is a cache in a cache, or a layer of one."""
    return _is_cache(value) or type(value).__module__ == "transformers.cache_utils"


def _own(value: Any) -> Any:
    """A copy of a cache with layers of its own; the tensors in them are the same.

    A layer that takes in new keys puts another tensor in place of the one that it has.
    """
    if not _is_part(value):
        return value
    own = copy.copy(value)
    for name, part in vars(value).items():
        if isinstance(part, list):
            vars(own)[name] = [_own(each) for each in part]
        elif isinstance(part, dict):
            vars(own)[name] = dict(part)
        else:
            vars(own)[name] = _own(part)
    return own
