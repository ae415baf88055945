# mypy: allow-untyped-calls
"""A training step as a value: what the user's build function returns, checked, and its loss."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradsight.core.parameters import type_name
from gradsight.errors import GradsightError, UsageError, UserCodeError
from gradsight.memory.cuda import is_cuda
from gradsight.memory.fake import fake_twin, needs_data_hint

Build = Callable[[], object]
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
EXPECTED = "build() must return (model, batch) or (model, batch, loss_fn)"


class StepFailed(UserCodeError):
    """The step that build() made raised; what it raised is the cause."""

    @classmethod
    @contextmanager
    def said(cls, what: str) -> Iterator[None]:
        """Say of an error inside where in the step it came from."""
        try:
            yield
        except (GradsightError, torch.OutOfMemoryError):
            raise  # both say already what to do
        except Exception as error:
            raise cls(
                f"{what} raised {type(error).__name__}: {error}. Try the step by itself first: "
                "loss_fn(model, batch).backward(), with what build() returns; without loss_fn the "
                f"batch is the model's own arguments{needs_data_hint()}"
            ) from error


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a batch, and how a loss comes of them."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]

    def loss(self) -> torch.Tensor:
        """The scalar loss of the batch."""
        with StepFailed.said("the step's loss"):
            loss = self.loss_fn(self.model, self.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = type(loss).__name__
            if isinstance(loss, torch.Tensor):
                got = f"a tensor of shape {tuple(loss.shape)}"
            raise UsageError(
                f"the loss must be a tensor with one element, got {got}: "
                "return (model, batch, loss_fn) from build()"
            )
        if loss.is_complex():
            raise UsageError(f"the loss must be a real number, got one of {loss.dtype}")
        if not loss.requires_grad:
            raise UsageError(
                "the loss has no gradient: nothing that it was computed from requires one. "
                "Compute it from the model's output, without torch.no_grad(), detach() or .item()"
            )
        return loss


def call_build(build: Build) -> Workload:
    """Call the user's build function and refuse whatever is not a model with its batch."""
    if not callable(build):
        raise UsageError(
            f"build must be a function without arguments, got {type(build).__name__}; {EXPECTED}"
        )
    try:
        built = build()
    except GradsightError:
        raise  # it says already what to do
    except Exception as error:
        raise UserCodeError(
            f"build() raised {type(error).__name__}: {error}. Call it by itself first; {EXPECTED}"
            f"{needs_data_hint()}"
        ) from error
    return as_workload(fake_twin(built))


def as_workload(built: object) -> Workload:
    """The build function's return value, checked; its model is put into training mode."""
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        got = f"a tuple of {len(built)}" if isinstance(built, tuple) else type(built).__name__
        raise UsageError(f"{EXPECTED}, got {got}")
    model, batch, *rest = built
    if not isinstance(model, nn.Module):
        raise UsageError(f"{EXPECTED}: the first must be a torch.nn.Module, got {type_name(model)}")
    if rest:
        _check_loss_fn(rest[0])
    workload = checked_workload(model, batch, *rest)
    model.train()  # checkpointing acts in training mode alone, and dropout's masks take memory
    return workload


def checked_workload(model: nn.Module, batch: Any, loss_fn: Any = None) -> Workload:
    """A step of this model; a batch and a loss that cannot be meant are refused."""
    if isinstance(batch, Iterator | torch.utils.data.DataLoader):
        raise UsageError(
            f"{EXPECTED}: the step runs more than once on the same batch, got "
            f"{type_name(batch)}, which gives another each time. Return one of its batches, "
            "such as next(iter(loader))"
        )
    if loss_fn is not None:
        _check_loss_fn(loss_fn)
    elif not isinstance(batch, Mapping | tuple | list | torch.Tensor):
        raise UsageError(
            f"{EXPECTED}: without loss_fn the batch is a dict or tuple of arguments, "
            f"got {type(batch).__name__}"
        )
    return Workload(model, batch, loss_fn or model_loss)


def _check_loss_fn(loss_fn: object) -> None:
    """Refuse what cannot be called as loss_fn(model, batch)."""
    expected = f"{EXPECTED}: loss_fn must be a function (model, batch) -> loss"
    if not callable(loss_fn):
        raise UsageError(f"{expected}, got {type_name(loss_fn)}")
    if isinstance(loss_fn, nn.modules.loss._Loss):
        raise UsageError(
            f"{expected}, got {type_name(loss_fn)}, which takes predictions and labels. Write for "
            "example: lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if refusal := refused_call(loss_fn, 2):
        raise UsageError(f"{expected}; this one cannot be called so: {refusal}")


def refused_call(fn: Callable[..., object], arguments: int) -> str | None:
    """Why a function does not take so many arguments; None where it does, or does not tell."""
    if isinstance(fn, nn.Module):
        fn = fn.forward  # a module's own call takes anything
    try:
        inspect.signature(fn).bind(*range(arguments))
    except TypeError as error:
        return str(error)
    except ValueError:  # a function that is not Python's tells nothing of itself
        return None
    return None


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss a model gives by itself: its output's .loss, its first element, or the output."""
    out = _called(model, batch)
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    first = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(first, torch.Tensor):
        raise UsageError(
            f"the model returned {type(out).__name__} without a loss: "
            "return (model, batch, loss_fn) from build()"
        )
    return first


def _called(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch that is its arguments."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, torch.Tensor):
        args = (batch,)
    elif isinstance(batch, Mapping):
        kwargs = {str(name): value for name, value in batch.items()}
    else:
        args = tuple(batch)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except ValueError:  # a forward that is not Python's tells nothing of itself
        pass
    except TypeError as error:
        names = f"the keywords {', '.join(kwargs)}" if kwargs else f"{len(args)} arguments"
        raise UsageError(
            f"{type(model).__name__}.forward does not take the batch, {names}: {error}. Without "
            "loss_fn the batch is the arguments of the model, which gives its own loss: return "
            "(model, batch, loss_fn) from build(), with loss_fn(model, batch) -> loss"
        ) from error
    return model(*args, **kwargs)


def make_optimizer(
    optimizer: str | None, model: nn.Module, *, device: str = "cpu"
) -> torch.optim.Optimizer | None:
    """The named optimizer over the trainable parameters, in torch's default form for the device."""
    if optimizer is None:
        return None
    known = f"known are {', '.join(OPTIMIZERS)}, or None for none"
    if not isinstance(optimizer, str):
        raise UsageError(f"optimizer must be a name, got {type_name(optimizer)}; {known}")
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {optimizer!r}; {known}")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UsageError(
            "the model has no trainable parameters: there is nothing to train, and no backward "
            "pass to save memory in"
        )
    # torch chooses the multi-tensor form by the parameters' device, and where CUDA is predicted
    # they lie on the CPU.
    foreach = True if is_cuda(device) else None
    return OPTIMIZERS[optimizer](trainable, foreach=foreach, lr=0.0)  # type: ignore[call-arg]


def warm_up(optimizer: torch.optim.Optimizer | None) -> None:
    """Make the optimizer's state, as every step but the first finds it.

    One step of rate 0 on zero gradients does it and changes no parameter.
    """
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def state_bytes(optimizer: torch.optim.Optimizer | None, granule: int = 1) -> int:
    """Bytes of the tensors in an optimizer's state, each rounded up to a multiple of `granule`."""
    if optimizer is None:
        return 0
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                # A rank holds its own part of a sharded state.
                local = value.to_local() if hasattr(value, "to_local") else value
                granules = -(-local.numel() * local.element_size() // granule)
                total += granules * granule
    return total


def backward(workload: Workload) -> torch.Tensor:
    """Forward and backward; the loss, without its graph."""
    loss = workload.loss()
    with StepFailed.said("the backward pass"):
        loss.backward()
    trainable = [each for each in workload.model.parameters() if each.requires_grad]
    if trainable and all(parameter.grad is None for parameter in trainable):
        raise UsageError(
            "backward() gave no parameter of the model a gradient: the loss does not come from "
            "the model that build() returns"
        )
    return loss.detach()
