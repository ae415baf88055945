"""Adam's own scale of the parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsight.errors import UsageError
from gradsight.ghost.targets import Direction


def adam_scales(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Direction | None:
    """1 / (sqrt(v) + eps) for every parameter, v corrected for its start as the optimizer does;
    None before the first step.

    Adam moves a weight by -lr m / (sqrt(v) + eps), so a sample's gradient acts on the target's loss
    through this scale.
    """
    names = {id(p): name for name, p in parameters.items()}
    scales: Direction = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if id(parameter) in names and state:
                scales[names[id(parameter)]] = _scale(state, group, type(optimizer).__name__)
    missing = [name for name in parameters if name not in scales]
    if scales and missing:
        scales |= {name: torch.zeros_like(parameters[name]) for name in missing}
    return scales or None


def _scale(state: dict[str, Any], group: dict[str, Any], kind: str) -> Tensor:
    second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if second is None or "betas" not in group:
        raise UsageError(
            f'precondition="adam" needs an optimizer that keeps exp_avg_sq, such as AdamW; {kind} does not. '
            "Pass that optimizer, or precondition=None."
        )
    step, beta2 = state["step"], group["betas"][1]
    if isinstance(step, Tensor):
        step = step.to(second.device, torch.float64) if second.device.type != "cpu" else float(step)
    root = (second / (1 - beta2**step)).sqrt()
    scale: Tensor = (root + group["eps"]).reciprocal()
    return scale
