"""Checkpoints: all that a run needs to go on bit for bit, complete or not there at all.

Safetensors and JSON, no pickle.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import rundir
from gradsight.core.files import whole_folder
from gradsight.core.parameters import named_parameters
from gradsight.core.random_state import device_state, set_device_state
from gradsight.core.shards import held_like, whole
from gradsight.errors import RunError, UsageError
from gradsight.train.processes import Processes

_TENSORS = "tensors.safetensors"
_FACTS = "checkpoint.json"


def newest(run_dir: Path) -> Path | None:
    """The checkpoint of the latest step; None where there is none."""
    folders = (run_dir / rundir.CHECKPOINTS).glob(rundir.CHECKPOINT_FOLDERS)
    complete = [folder for folder in folders if (folder / _FACTS).is_file()]
    return max(complete, key=_step, default=None)


def save(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    processes: Processes,
    facts: dict[str, Any],
    keep: int,
) -> str | None:
    """Write a checkpoint of the step in `facts`; to be called by all processes.

    The oldest beyond `keep` go. Returns the fault where the checkpoint could not be written.
    """
    fault = None
    tensors = {name: value for name, value in _gathered(model, optimizer) if processes.first}
    # Each process draws its own dropout, so that bit for bit takes the generators of all.
    for kind, state in _random_state(processes.device).items():
        for rank, one in enumerate(processes.gather(state) or ()):
            tensors[f"rng/{rank}/{kind}"] = one
    if processes.first:
        folder = run_dir / rundir.CHECKPOINTS / rundir.checkpoint_folder(facts["step"])
        try:
            _write(folder, tensors, facts)
        except (OSError, SafetensorError) as error:
            # A full disk must not end what the checkpoint was to protect.
            fault = f"the checkpoint {folder} cannot be written: {error}. "
            fault += "Training goes on; the one before stays"
        for old in sorted(folder.parent.glob(rundir.CHECKPOINT_FOLDERS), key=_step)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    processes.wait()
    return fault


def load(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, processes: Processes
) -> dict[str, Any]:
    """Fill model, optimizer and random generators from a checkpoint; returns its facts."""
    try:
        facts: dict[str, Any] = json.loads((folder / _FACTS).read_text())
        tensors = load_file(folder / _TENSORS)
    except Exception as error:
        raise RunError(f"the checkpoint {folder} cannot be read: {error}") from error
    with torch.no_grad():
        for name, parameter in _parameters(model):
            _fill(parameter, tensors, f"model/{name}", folder)
    if optimizer is None:
        return facts
    for name, parameter in _parameters(model):
        prefix = f"optimizer/{name}/"
        keys = [key for key in tensors if key.startswith(prefix)]
        optimizer.state[parameter] = {
            key.removeprefix(prefix): _state(parameter, tensors[key]) for key in keys
        }
    for device in _devices(processes.device):
        key = f"rng/{processes.rank}/{device.type}"
        if key in tensors:
            set_device_state(device, tensors[key])
    return facts


def _step(folder: Path) -> int:
    text = folder.name.removeprefix("step_")
    return int(text) if text.isdigit() else -1


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((parameter.name, parameter.tensor) for parameter in named_parameters(model))


def _gathered(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor to be kept, whole; of sharded ones every process sends its part."""
    for name, parameter in _parameters(model):
        yield f"model/{name}", _kept(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer/{name}/{key}", _kept(value)


def _kept(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().cpu().contiguous()


def _state(parameter: Tensor, stored: Tensor) -> Tensor:
    """A tensor of the optimizer's, sharded as its parameter is."""
    if stored.dim() == 0:  # AdamW's count of steps is one number, which stays on the CPU
        return stored
    return held_like(parameter, stored)


def _fill(parameter: Tensor, tensors: dict[str, Tensor], key: str, folder: Path) -> None:
    """Copy a stored tensor into a parameter; refuse one of another shape or type."""
    stored = tensors.get(key)
    what = "does not have it"
    if stored is not None:
        if stored.shape == parameter.shape and stored.dtype == parameter.dtype:
            parameter.copy_(held_like(parameter, stored))
            return
        what = f"has {tuple(stored.shape)} {stored.dtype}"
    raise UsageError(
        f"the checkpoint {folder} is of another model: {key.removeprefix('model/')} is "
        f"{tuple(parameter.shape)} {parameter.dtype} here, and the checkpoint {what}. "
        f"Give the settings that the run was started with"
    )


def _random_state(device: torch.device) -> dict[str, Tensor]:
    return {each.type: device_state(each) for each in _devices(device)}


def _devices(device: torch.device) -> list[torch.device]:
    """The devices whose generators a process draws from: the CPU and its own."""
    if device.type == "cpu":
        return [device]
    return [torch.device("cpu"), device]


def _write(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    with whole_folder(folder, folder.with_name(f"partial_{folder.name}")) as partial:
        save_file(tensors, partial / _TENSORS)
        (partial / _FACTS).write_text(json.dumps(facts, indent=1))
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner's eyes only
