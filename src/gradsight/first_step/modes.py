"""Parts of a model in evaluation mode whose parameters learn."""

from collections.abc import Collection

from torch import nn

from gradsight.core.parameters import clean_name

_DROPOUTS = nn.modules.dropout._DropoutNd
_NORMS = nn.modules.batchnorm._BatchNorm


def evaluating_parts(root: nn.Module, learning: Collection[int]) -> dict[str, str]:
    """By name, what evaluation mode switches off in parts whose parameters get gradients.

    `learning`: the ids of those parameters.

    A single layer that is frozen in a model that trains is so on purpose: many keep the statistics
    of BatchNorm while they fine-tune.
    """
    found: dict[str, str] = {}
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if module.training:
            below = module.named_children()
            waiting += [(f"{name}.{key}".lstrip("."), child) for key, child in below]
        elif not isinstance(module, (_DROPOUTS, _NORMS)) and _learns(module, learning):
            off = _switched_off(module)
            if off:
                found[clean_name(root, name) or "the model"] = off
    return found


def _learns(module: nn.Module, learning: Collection[int]) -> bool:
    return any(each.requires_grad and id(each) in learning for each in module.parameters())


def _switched_off(module: nn.Module) -> str:
    """What does not work as in training, in words."""
    inner = [each for each in module.modules() if not each.training]
    dropouts = [each for each in inner if isinstance(each, _DROPOUTS) and each.p > 0]
    norms = [each for each in inner if isinstance(each, _NORMS) and each.track_running_stats]
    # BatchNorm whose scale is frozen is meant to stay as it is.
    norms = [each for each in norms if each.weight is None or each.weight.requires_grad]
    words = []
    if dropouts:
        words.append(f"{len(dropouts)} dropout layers are off")
    if norms:
        words.append(f"{len(norms)} BatchNorm layers use kept statistics")
    return " and ".join(words)
