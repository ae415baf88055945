"""What a watch is given to look at, checked: a model that can be trained, and its optimizers."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from gradsight.core.optimizers import innermost_optimizer, optimizer_list
from gradsight.core.parameters import Named, check_module, named_parameters
from gradsight.errors import UsageError


def watched_parameters(model: nn.Module) -> list[Named]:
    """The parameters of the model, of which at least one can be trained."""
    check_module(model)
    parameters = named_parameters(model)
    if not any(parameter.tensor.requires_grad for parameter in parameters):
        what = "no parameters"
        if parameters:
            what = f"{len(parameters)} parameters, all of them frozen"
        raise UsageError(
            f"{type(model).__name__} has nothing to watch: {what}. "
            "Set requires_grad on what is to be trained."
        )
    return parameters


def watched_optimizers(
    optimizer: object, model: nn.Module, parameters: Sequence[Named]
) -> list[Optimizer]:
    """The optimizers as a list, each once, and each holding parameters of the model."""
    optimizers = optimizer_list(optimizer)
    if optimizer is not None and not optimizers:
        raise UsageError("optimizer is an empty sequence: give an optimizer, or None")
    inner = [innermost_optimizer(each) for each in optimizers]
    held = {id(named.tensor) for named in parameters}
    for number, each in enumerate(inner):
        name = type(each).__name__
        if any(each is earlier for earlier in inner[:number]):
            raise UsageError(f"the same {name} was given twice; give every optimizer once")
        given = (tensor for group in each.param_groups for tensor in group["params"])
        if not any(id(tensor) in held for tensor in given):
            raise UsageError(
                f"{name} holds none of the parameters of this {type(model).__name__}: it was made "
                "for another model, or before the parameters were replaced (fully_shard does "
                "that). Give the optimizer that trains this model; where it trains copies of the "
                "parameters, give none and call Watch.step() after backward()."
            )
    return optimizers
