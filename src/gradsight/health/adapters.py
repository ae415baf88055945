"""Adapters of a model that are frozen by mistake."""

from collections.abc import Sequence

from torch import nn

from gradsight.core.parameters import Named
from gradsight.values.adapters import is_of_an_adapter, layer_of


def frozen_adapters(model: nn.Module, parameters: Sequence[Named]) -> tuple[int, ...]:
    """Return the rows of adapters that are frozen while other parts of the same model are trained.

    Each model that peft has wrapped is examined by itself. A LoRA of another kind counts only if
    one of its factors is zero everywhere: then it does nothing, and never will.
    """
    if not any(is_of_an_adapter(named.name) for named in parameters):
        return ()
    outermost = _wrapped_by_peft(model)
    found: list[int] = []
    for root in outermost or [model]:
        held = {id(tensor) for tensor in root.parameters()}
        rows = [row for row, named in enumerate(parameters) if id(named.tensor) in held]
        adapters = [row for row in rows if is_of_an_adapter(parameters[row].name)]
        trained = [row for row in rows if parameters[row].tensor.requires_grad]
        if not adapters or not trained or set(adapters) & set(trained):
            continue
        layers = {layer_of(parameters[row].name) for row in adapters}
        if any(_adapted_layer(parameters[row].name) in layers for row in trained):
            continue
        if outermost and not _is_active(root):
            continue
        if outermost or any(not bool(parameters[row].tensor.any()) for row in adapters):
            found += adapters
    return tuple(found)


def _wrapped_by_peft(model: nn.Module) -> list[nn.Module]:
    """The outermost models that know configurations of peft: its own, and those of transformers."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get("peft_config"), dict) and not any(
            name.startswith(f"{outer}." if outer else "") for outer, _ in found
        ):
            found.append((name, module))
    return [module for _, module in found]


def _adapted_layer(name: str) -> str:
    """The layer of a parameter, as its adapters name it."""
    return layer_of(name).removesuffix(".base_layer")


def _is_active(root: nn.Module) -> bool:
    """Whether some layer applies its adapters: they are neither merged nor switched off."""
    layers = [module for module in root.modules() if hasattr(module, "merged_adapters")]
    return not layers or any(
        not getattr(layer, "merged", False) and not getattr(layer, "disable_adapters", False)
        for layer in layers
    )
