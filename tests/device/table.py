"""The table of waits: every setting of a watched run in which nothing may drain the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gradsight
from device.training import Settings


def _adamw(**options: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, 1e-3, **options)


def _capturable(parameters: list[Tensor]) -> torch.optim.Optimizer:
    there = parameters[0].device.type != "cpu"  # what can be captured is not on the CPU
    return torch.optim.AdamW(parameters, 1e-3, capturable=there)


def _with_tensor_rate(parameters: list[Tensor]) -> torch.optim.Optimizer:
    device = parameters[0].device
    if device.type == "cpu":
        return torch.optim.AdamW(parameters, 1e-3)
    rate = torch.tensor(1e-3, device=device)
    return torch.optim.AdamW(parameters, rate, capturable=True, foreach=True)


_EVERY_STEP = gradsight.Schedule(step_interval=1)

SETTINGS = {
    "watch": Settings(),
    "watch, log": Settings(log=True),
    "recorder=False": Settings(log=True, watch={"recorder": False}),
    'recorder="batch"': Settings(log=True, watch={"recorder": "batch"}),
    "health=False": Settings(log=True, watch={"health": False}),
    "accumulation, clipping": Settings(log=True, accumulation=2, clip=True),
    "clipping every micro-batch": Settings(accumulation=2, clips_every_pass=True),
    "GradScaler, unscaled before": Settings(log=True, scaler="unscaled", clip=True),
    "GradScaler, inside fused": Settings(log=True, scaler="inside", optimizer=_adamw(fused=True)),
    "foreach": Settings(log=True, optimizer=_adamw(foreach=True)),
    "fused": Settings(log=True, optimizer=_adamw(fused=True)),
    "fused, on_finding skip": Settings(
        log=True, optimizer=_adamw(fused=True), watch={"on_finding": {"critical": "skip"}}
    ),
    "capturable": Settings(log=True, optimizer=_capturable),
    "learning rate as a tensor": Settings(log=True, optimizer=_with_tensor_rate),
    "histograms every step": Settings(log=True, watch={"histograms": _EVERY_STEP}),
    "experts": Settings(log=True, experts=4, watch={"histograms": _EVERY_STEP}),
    "GhostEngine.observe": Settings(log=True, ghost={}),
    "GhostEngine.loss, one pass": Settings(log=True, ghost={"mode": "concat"}, one_pass=True),
    "refresh_every=3": Settings(log=True, ghost={"refresh_every": 3}),
    'precondition="adam"': Settings(log=True, ghost={"precondition": "adam"}),
    "a dump every step": Settings(log=True, clip=True, dump=True),
}
