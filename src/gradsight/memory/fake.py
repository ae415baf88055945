"""Running a model on fake tensors: shapes, types and lifetimes without data."""

import copy
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from traceback import extract_tb
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
from torch.utils._python_dispatch import _disable_current_modes

from gradsight.core.samples import tensors_in
from gradsight.core.source import owner_of
from gradsight.errors import GradsightError
from gradsight.memory.compiled import compiled_code_eager

SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}
NEEDS_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Every tensor made inside is fake; initialisers do nothing."""
    with ExitStack() as stack:
        # Real tensors are let in: a model may use constants that were made before.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_initialisers_do_nothing())
        stack.enter_context(_imports_are_real())
        stack.enter_context(compiled_code_eager())
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _copy, create=True))
        stack.enter_context(patch.object(torch.utils, "swap_tensors", _take_over))
        yield


def is_faking() -> bool:
    """Whether a fake pass is under way."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fake_twin(built: object) -> object:
    """What build() returned; a model from before the fake pass is copied, and so is its batch.

    The copy is fake, and nothing of the user's own model is touched. Outside of a fake pass
    everything is as it is.
    """
    if not is_faking() or not isinstance(built, tuple) or not built:
        return built
    if not isinstance(built[0], torch.nn.Module):
        return built
    model = built[0]
    if all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return built
    memo: dict[int, Any] = {}
    held = [value for module in model.modules() for value in vars(module).values()]
    for tensor in tensors_in(*held, *built[1:2]):
        _copy(tensor, memo)
    try:
        return copy.deepcopy(built, memo)
    except Exception as error:
        raise GradsightError(
            "build() returned a model that was made before, and a prediction cannot copy it "
            f"({type(error).__name__}: {error}): make the model inside of build()"
        ) from error


@contextmanager
def _imports_are_real() -> Iterator[None]:
    """What a module makes while it is imported is real: it stays when the fake pass is over."""
    original = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: Any) -> None:
        if owner_of(loader.path) not in ("user", "library"):
            original(loader, module)  # torch imports parts of itself in order to leave its modes
            return
        with _disable_current_modes():
            original(loader, module)

    with patch.object(SourceFileLoader, "exec_module", exec_module):
        yield


def _copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy with a storage of its own; torch's makes one that its own views do not share."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _take_over(tensor: torch.Tensor, converted: torch.Tensor) -> None:
    """Replace a parameter when its module is converted to another type.

    torch cannot swap fake tensors that something refers to weakly.
    """
    tensor.data = converted.data


def _keep(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


@contextmanager
def _initialisers_do_nothing() -> Iterator[None]:
    """Replace torch's initialisers: there is nothing to fill.

    Those that look at what they drew would even fail (trunc_normal_ draws again). Many modules hold
    the public functions under names of their own, so what those call inside is replaced as well.
    """
    inner_functions = [name for name in vars(init) if name.startswith("_no_grad_")]
    with ExitStack() as stack:
        for name in (*inner_functions, "orthogonal_", "sparse_"):
            stack.enter_context(patch.object(init, name, _keep))
        # Hugging Face keeps the originals in a table and calls them from there.
        held = getattr(sys.modules.get("transformers.initialization"), "TORCH_INIT_FUNCTIONS", {})
        stack.enter_context(patch.dict(held, dict.fromkeys(held, _keep)))
        yield


@contextmanager
def data_dependence_refused() -> Iterator[None]:
    """Refuse a model or build function whose shapes or branches depend on values, clearly."""
    try:
        yield
    except NEEDS_DATA as error:
        raise _refusal(error) from error
    except GradsightError as error:
        if isinstance(error.__cause__, NEEDS_DATA):
            raise _refusal(error.__cause__) from error
        raise


def _refusal(error: Exception) -> GradsightError:
    """The error for the user: the line where it happened, and what to do."""
    return GradsightError(
        f"this model needs real data: {error.__class__.__name__} at {error}"
        f"{_line_of_the_user(error)}. A prediction knows shapes, not values, so what depends on "
        "values (.item(), if on a tensor, nonzero, boolean masks) has no answer. Use "
        "measure_peak_memory on a real step, or give build() a batch and settings that avoid it"
    )


def _line_of_the_user(error: Exception) -> str:
    """Return the innermost line outside torch and this package, if there is one."""
    line = ""
    for step in extract_tb(error.__traceback__):
        if owner_of(step.filename) not in ("torch", "ours"):
            line = f" (in {step.name}, {step.filename}:{step.lineno})"
    return line


def refuse_sparse(func: object, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse an operator that takes or makes a sparse tensor: a fake one loses its entries."""
    for tensor in tensors:
        if tensor.layout in SPARSE:
            raise GradsightError(
                f"this step uses a sparse tensor ({tensor.layout}, in {func}), for example the "
                "gradient of nn.Embedding(..., sparse=True). A prediction cannot count the "
                "entries of sparse tensors. Use measure_peak_memory on a real step, or predict the "
                "model with sparse=False"
            )


def needs_data_hint() -> str:
    """Return what to do where code raised on fake tensors that may work on real ones."""
    if not is_faking():
        return ""
    return (
        ". If that works, your code fails only without real data: a prediction runs on tensors "
        "that have shapes but no values. Measure a real step instead, with "
        "measure_peak_memory(lambda: loss_fn(model, batch).backward())"
    )
