"""Hugging Face's branches as on real tensors: it takes every fake tensor for one that is traced."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from gradsight.memory.known_values import KnownValues


@contextmanager
def real_branches(values: KnownValues) -> Iterator[None]:
    """Inside, a step is running, and Hugging Face looks at the values that are known.

    Traced, it keeps a mask of ones, and takes every batch for packed sequences and builds a mask
    that a real step does not have: 2.4% of GPT-2 Small's peak. Where values are not known there are
    no packed sequences: a real batch rarely has any. Enter it after the model was built: what is
    not imported yet cannot be replaced.
    """
    imports: Any = sys.modules.get("transformers.utils.import_utils")
    masks: Any = sys.modules.get("transformers.masking_utils")
    values.stepping = True
    with ExitStack() as stack:
        if hasattr(imports, "is_fake_tensor"):
            asked = _unknown_alone(values, imports.is_fake_tensor)
            stack.enter_context(patch.object(imports, "is_fake_tensor", asked))
        if hasattr(masks, "find_packed_sequence_indices"):
            find = _known_alone(values, masks.find_packed_sequence_indices)
            stack.enter_context(patch.object(masks, "find_packed_sequence_indices", find))
        yield


def _unknown_alone(values: KnownValues, is_fake: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The question whether a tensor is fake, answered with no where its values are known."""

    def asked(tensor: Any) -> bool:
        return is_fake(tensor) and not values.knows(tensor)

    return asked


def _known_alone(values: KnownValues, find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The search for packed sequences, made where positions are known."""

    def found(position_ids: Any) -> Any:
        if not values.knows(position_ids):
            return None
        packed = find(position_ids)
        # Positions of a large batch may be a view of few, and what is made of them is too large.
        if packed is not None and not values.knows(packed):
            return None
        return packed

    return found
