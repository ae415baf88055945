"""Running a model on fake tensors: shapes, types and lifetimes without data."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import init

from gradsight.errors import GradsightError

NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside is fake; initialisers do nothing."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_initialisers_do_nothing())
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _copy, create=True))
        stack.enter_context(patch.object(torch.utils, "swap_tensors", _take_over))
        yield


def _copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy with a storage of its own; torch's makes one that its own views do not share."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        wanted = tensor.requires_grad
        memo[id(tensor)] = (
            torch.nn.Parameter(copied, wanted)
            if isinstance(tensor, torch.nn.Parameter)
            else copied.requires_grad_(wanted)
        )
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _take_over(tensor: torch.Tensor, converted: torch.Tensor) -> None:
    """A module converted to another type; torch cannot swap fake tensors that something refers to
    weakly.
    """
    tensor.data = converted.data


def _keep(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


@contextmanager
def _initialisers_do_nothing() -> Iterator[None]:
    """There is nothing to fill, and initialisers that look at what they drew would fail
    (trunc_normal_ draws again).

    Many modules hold the public functions under names of their own, so what those call inside is
    replaced as well.
    """
    with ExitStack() as stack:
        for name in [n for n in vars(init) if n.startswith("_no_grad_")] + [
            "orthogonal_",
            "sparse_",
        ]:
            stack.enter_context(patch.object(init, name, _keep))
        held = getattr(sys.modules.get("transformers.initialization"), "TORCH_INIT_FUNCTIONS", {})
        stack.enter_context(patch.dict(held, dict.fromkeys(held, _keep)))
        yield


@contextmanager
def sequences_not_packed() -> Iterator[None]:
    """Hugging Face looks at positions for packed sequences, and takes every fake batch for one; a
    real one rarely is.

    Enter it after the model was built: what is not imported yet cannot be replaced.
    """
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if hasattr(masks, "find_packed_sequence_indices"):
            stack.enter_context(patch.object(masks, "find_packed_sequence_indices", _nothing))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def data_dependence_refused() -> Iterator[None]:
    """A model or a build function whose shapes or branches depend on values ends in a clear error."""
    try:
        yield
    except NEEDS_DATA as error:
        raise _refusal(error) from error
    except GradsightError as error:
        if isinstance(error.__cause__, NEEDS_DATA):
            raise _refusal(error.__cause__) from error
        raise


def _refusal(error: Exception) -> GradsightError:
    """What to do about it, and the line where it happened."""
    where = _line_of_the_user(error)
    return GradsightError(
        f"this model needs real data: {error.__class__.__name__} at {error}{where}. A prediction knows shapes, "
        "not values, so what depends on values (.item(), if on a tensor, nonzero, boolean masks) has no answer. Use "
        "measure_peak_memory on a real step, or give build() a batch and settings that avoid it"
    )


def _line_of_the_user(error: Exception) -> str:
    """The innermost line outside torch and this package, if there is one."""
    step, found = error.__traceback__, ""
    while step is not None:
        code = step.tb_frame.f_code
        if "/torch/" not in code.co_filename and "/gradsight/" not in code.co_filename:
            found = f" (in {code.co_name}, {code.co_filename}:{step.tb_lineno})"
        step = step.tb_next
    return found
