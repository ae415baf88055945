"""What users hand to the engine, checked before anything is computed with it."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core.optimizers import innermost_optimizer
from gradsight.core.samples import LOSSES
from gradsight.errors import GradsightError, UsageError, UserCodeError, in_one_line
from gradsight.values.whole_numbers import LARGEST

NOT_SCORED = "the samples of this pass cannot be scored"
INCOMPLETE = f"{NOT_SCORED}, and .grad may be incomplete: clear it and repeat the step"
"""What an error inside of a backward pass says."""
ONLY_TARGET = "validation"
"""The name of the target that is given as val_data."""
_WANTED = "a function loss_fn(model, batch) that returns the scalar mean loss of the batch"
_EXAMPLE = "def loss_fn(model, batch): return F.cross_entropy(model(batch[0]), batch[1])"


def check_model(model: object) -> None:
    """An error for what is no model, or nothing to train."""
    if isinstance(model, type) or not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {described(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "the model has no trainable parameter: there is no gradient to score samples by"
        )


def check_loss_fn(loss_fn: object) -> None:
    """An error for what cannot be called as loss_fn(model, batch)."""
    is_function = any(loss_fn is known for known in LOSSES)
    if is_function or isinstance(loss_fn, nn.modules.loss._Loss):
        raise UsageError(
            f"loss_fn must be {_WANTED}; got {described(loss_fn)}, which takes predictions and "
            f"labels. Write for example: {_EXAMPLE}"
        )
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise UsageError(f"loss_fn must be {_WANTED}; got {described(loss_fn)}")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # functions in C do not tell
    try:
        signature.bind("model", "batch")
    except TypeError:
        raise UsageError(
            f"loss_fn must be {_WANTED}; got {described(loss_fn)} with the arguments {signature}"
        ) from None


@contextmanager
def calling_loss_fn(where: str, batch: object) -> Iterator[None]:
    """Errors of the user's loss function say what it was called for, as "on target 'a'"."""
    try:
        yield
    except (GradsightError, torch.OutOfMemoryError):
        raise  # whoever catches a full device must find it
    except Exception as error:
        raise UserCodeError(
            f"loss_fn(model, batch) failed {where}: {in_one_line(error)}. "
            f"It was called with the model and {described(batch)}; "
            f"expected {_WANTED}, for batches of training and of targets alike"
        ) from error


def named_targets(val_data: Any, targets: Any) -> dict[str, Any]:
    """Validation batches by name, from whichever of the two was given."""
    if (val_data is None) == (targets is None):
        raise UsageError("pass exactly one of val_data (a batch) and targets (batches by name)")
    if targets is None:
        named = {ONLY_TARGET: val_data}
    elif isinstance(targets, Mapping):
        named = dict(targets)
    else:
        raise UsageError(
            "targets must be a mapping from names to batches, {name: batch}, got "
            f"{described(targets)}"
        )
    for name, batch in named.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"names of targets must be text, got {name!r}")
        if isinstance(batch, torch.utils.data.DataLoader | Iterator):
            raise UsageError(
                f"the validation data of target {name!r} must be one batch, as loss_fn takes it; "
                f"got {described(batch)}. From a data loader: next(iter(loader))"
            )
    return named


def checked_optimizer(optimizer: Any, parameters: Mapping[str, Tensor]) -> Optimizer | None:
    """The optimizer itself, without wrappers; an error unless it trains some of the parameters."""
    if optimizer is None:
        return None
    inner = innermost_optimizer(optimizer)
    # A scheduler holds an optimizer too, but is no wrapper of one.
    if not isinstance(inner, Optimizer) or not hasattr(optimizer, "param_groups"):
        raise UsageError(
            "optimizer must be one torch optimizer, the one that trains the model, got "
            f"{described(optimizer)}"
        )
    own = {id(parameter) for parameter in parameters.values()}
    groups = inner.param_groups
    if not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise UsageError(
            f"this {type(inner).__name__} holds none of the model's parameters: expected the "
            "optimizer that trains this model. Was it made for another model, or before the model "
            "was moved or wrapped? Without optimizer=, every block counts as a step."
        )
    return inner


def check_precondition(precondition: object, optimizer: Optimizer | None) -> None:
    """An error for a scale that the optimizer does not keep."""
    if precondition is None:
        return
    if precondition != "adam":
        raise UsageError(f"precondition must be None or 'adam', got {precondition!r}")
    if optimizer is None:
        raise UsageError(
            "precondition='adam' needs the optimizer, whose second moments it uses: "
            "GhostEngine(..., optimizer=optimizer)"
        )
    # Before a first step there are no moments yet, so the kind is told by what all of Adam's have.
    settings = optimizer.param_groups[0]
    if not {"betas", "eps"} <= set(settings) or isinstance(optimizer, torch.optim.Adamax):
        raise without_second_moments(type(optimizer).__name__)


def without_second_moments(optimizer: str) -> UsageError:
    """The error for an optimizer that is none of Adam's kind."""
    return UsageError(
        "precondition='adam' needs an optimizer that keeps exp_avg_sq, such as AdamW; "
        f"{optimizer} does not. Pass that optimizer, or precondition=None."
    )


def check_choice(given: object, name: str, *known: str) -> None:
    """An error for anything but these texts."""
    if given not in known:
        listed = " or ".join(repr(each) for each in known)
        raise UsageError(f"{name} must be {listed}, got {given!r}")


def check_switch(given: object, name: str) -> None:
    """An error for anything but True and False: "no" would count as yes."""
    if not isinstance(given, bool):
        raise UsageError(f"{name} must be True or False, got {given!r}")


def checked_ids(given: object, name: str = "sample_ids") -> list[int | str]:
    """Sample ids as plain ints and strings."""
    expected = f"{name} must be one int or string per sample"
    if isinstance(given, Tensor) or hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{expected}, got {described(given)}")
    ids: list[int | str] = []
    for number, each in enumerate(given):
        plain = each
        if not isinstance(each, str | int) and hasattr(each, "item") and _is_single(each):
            plain = each.item()  # of numpy or of torch
        if isinstance(plain, bool) or not isinstance(plain, int | str):
            raise UsageError(f"{expected}; number {number} is {described(each)}")
        if isinstance(plain, int) and abs(plain) > LARGEST:
            raise UsageError(
                f"{expected}, below 2**63; number {number} is {plain}. Give it as a string."
            )
        ids.append(plain)
    return ids


def _is_single(value: Any) -> bool:
    return getattr(value, "size", 1) == 1 or (isinstance(value, Tensor) and value.numel() == 1)


def checked_domains(given: object, ids: Sequence[object] | None) -> list[str | None]:
    """Domains as plain strings."""
    expected = "domains must be one string (or None) per sample"
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{expected}, got {described(given)}")
    domains: list[str | None] = []
    for number, each in enumerate(given):
        if each is not None and not isinstance(each, str):
            raise UsageError(f"{expected}; number {number} is {described(each)}")
        domains.append(None if each is None else str(each))
    if ids is not None and len(ids) != len(domains):
        raise UsageError(f"{expected}, got {len(domains)} domains for {len(ids)} sample_ids")
    return domains


def described(value: object) -> str:
    """A value in an error: its kind, and what tells it from others of its kind."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} ({value.dtype})"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, Mapping):
        listed = ", ".join(f"{name!r}" for name in list(value)[:4])
        return f"a {kind} with the keys {listed}"
    if isinstance(value, list | tuple):
        listed = ", ".join(described(each) for each in value[:3])
        more = "" if len(value) <= 3 else ", ..."
        return f"a {kind} of {len(value)}: ({listed}{more})"
    name = getattr(value, "__qualname__", None)
    if callable(value) and isinstance(name, str):
        return f"the function {name}"
    return f"a {kind}"
