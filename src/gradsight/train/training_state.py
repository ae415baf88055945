"""What a run needs to go on bit for bit, to and from checkpoints.

Parameters, the optimizer's state, random generators: whatever a checkpoint holds is compared with
this model and this optimizer before any of it is used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsight.core import rundir
from gradsight.core.devices import generator_state, is_accelerator, set_generator_state
from gradsight.core.parameters import named_parameters
from gradsight.core.shards import held_like, whole
from gradsight.errors import GradsightError, RunError, UsageError
from gradsight.train.checkpoint import (
    CheckpointFacts,
    checkpoint_names,
    damaged_checkpoint,
    read_facts,
    tensors_file,
    write,
)
from gradsight.train.processes import Processes
from gradsight.values.findings import Damage

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every parameter, in the parameter's shape and type."""
_ROOM = 1 << 26
"""Bytes that a checkpoint may have beside its tensors, for names and random generators."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
_Kind = tuple[tuple[int, ...], torch.dtype | str]
"""Shape and type of a tensor; a type that none of ours can have is safetensors' name of it."""


@dataclass(frozen=True)
class Trained:
    """What training changes."""

    model: nn.Module
    optimizer: Optimizer | None
    """None where only the model is wanted."""


def save(
    run_dir: Path, trained: Trained, processes: Processes, facts: CheckpointFacts, keep: int
) -> str | None:
    """Write a checkpoint; to be called by all processes. The oldest beyond `keep` go.

    Returns the fault where it could not be written.
    """
    fault = None
    tensors = {name: value for name, value in _gathered(trained) if processes.first}
    # Each process draws its own dropout, so that bit for bit takes the generators of all.
    for kind, state in _random_state(processes.device).items():
        for rank, one in enumerate(processes.gather(state) or ()):
            tensors[f"rng/{rank}/{kind}"] = one
    if processes.first:
        try:
            write(run_dir, tensors, facts, keep)
        except (OSError, SafetensorError, RunError) as error:
            # A full disk must not end what the checkpoint was to protect.
            folder = run_dir / rundir.CHECKPOINTS / rundir.checkpoint_folder(facts.step)
            fault = f"the checkpoint {folder} cannot be written: {error}. "
            fault += "Training goes on; the one before stays"
    processes.wait()
    return fault


def load_newest(
    run_dir: Path, trained: Trained, processes: Processes
) -> tuple[CheckpointFacts, list[Damage]]:
    """Fill what is trained, and random generators, from the newest checkpoint that is intact.

    Returns its facts, and the newer ones that are damaged; an error where none is intact.
    """
    passed_over: list[Damage] = []
    for name in checkpoint_names(run_dir):
        try:
            facts = read_facts(run_dir, name)
            _load(tensors_file(run_dir, name), facts, trained, processes)
        except RunError as error:
            passed_over.append(Damage(f"{rundir.CHECKPOINTS}/{name}", str(error)))
            continue
        if processes.from_first(name) != name:
            raise RunError(
                f"process {processes.rank} found {name} to be the newest checkpoint in {run_dir} "
                f"that is intact, and process 0 another one. Do they see the same files?"
            )
        return facts, passed_over
    said = "; ".join(damage.what for damage in passed_over)
    raise RunError(f"no checkpoint in {run_dir} is intact: {said}")


def _load(file: Path, facts: CheckpointFacts, trained: Trained, processes: Processes) -> None:
    """Take a checkpoint; nothing is changed where it is refused."""
    name = file.parent.name
    model = trained.model
    expected = {f"model/{key}": _kind(value) for key, value in _parameters(model)}
    state = _expected_state(model, processes, facts)
    try:
        _refuse_too_large(file, expected, name)
        found = _kinds_in(file)
        _refuse_another_model(expected, found, name)
        _refuse_incomplete(state, found.keys() - expected.keys(), found, name)
        tensors = load_file(file)
    except GradsightError:
        raise
    except Exception as error:
        raise damaged_checkpoint(name, f"{file.name} cannot be read: {error}") from error
    if trained.optimizer is not None:
        _set_optimizer_and_generators(model, trained.optimizer, tensors, facts, processes, name)
    with torch.no_grad():
        for key, parameter in _parameters(model):
            parameter.copy_(held_like(parameter, tensors[f"model/{key}"]))


def _set_optimizer_and_generators(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    facts: CheckpointFacts,
    processes: Processes,
    name: str,
) -> None:
    states = {}
    for key, parameter in _parameters(model):
        prefix = f"optimizer/{key}/"
        steps = tensors[f"{prefix}step"]
        if steps.item() != facts.step:
            raise damaged_checkpoint(
                name, f"{prefix}step is {steps.item():g} after {facts.step} steps"
            )
        states[parameter] = {"step": steps}  # one number, which stays on the CPU
        for moment in _MOMENTS:
            states[parameter][moment] = held_like(parameter, tensors[f"{prefix}{moment}"])
    for device in _devices(processes.device):
        random = f"rng/{processes.rank}/{device.type}"
        if random in tensors:
            try:
                set_generator_state(device, tensors[random])
            except RuntimeError as error:
                raise damaged_checkpoint(
                    name, f"{random} is no state of a generator: {error}"
                ) from error
    optimizer.state.update(states)


# What a checkpoint of this model has to hold.


def _expected_state(
    model: nn.Module, processes: Processes, facts: CheckpointFacts
) -> dict[str, _Kind]:
    """All that is not a parameter: of AdamW, and of the generators of all processes."""
    expected: dict[str, _Kind] = {}
    for name, parameter in _parameters(model):
        expected[f"optimizer/{name}/step"] = ((), torch.float32)
        for moment in _MOMENTS:
            expected[f"optimizer/{name}/{moment}"] = _kind(parameter)
    # Another kind of device may have been at work then: the CPU's generator is always there.
    for rank in range(1 if facts.processes is None else facts.processes):
        expected[f"rng/{rank}/cpu"] = _kind(generator_state(torch.device("cpu")))
    return expected


def _refuse_too_large(file: Path, parameters: Mapping[str, _Kind], name: str) -> None:
    """Refuse a file before it is read into memory that is not of this model's size."""
    size = file.stat().st_size
    most = _ROOM
    for shape, dtype in parameters.values():
        assert isinstance(dtype, torch.dtype)
        most += (1 + len(_MOMENTS)) * torch.Size(shape).numel() * dtype.itemsize
    if size > most:
        raise damaged_checkpoint(
            name, f"{file.name} has {size:,} bytes; of this model it has below {most:,}"
        )


def _kinds_in(file: Path) -> dict[str, _Kind]:
    """What the header of a safetensors file says of its tensors."""
    kinds: dict[str, _Kind] = {}
    with safe_open(file, "pt") as opened:
        for key in opened.keys():  # noqa: SIM118  (it is no dict)
            part = opened.get_slice(key)
            word = part.get_dtype()
            kinds[key] = (tuple(part.get_shape()), _DTYPES.get(word, word))
    return kinds


def _refuse_another_model(
    expected: Mapping[str, _Kind], found: Mapping[str, _Kind], name: str
) -> None:
    """Refuse parameters of another shape or type, missing ones, and those beyond."""
    wrong = [key for key, kind in expected.items() if found.get(key) != kind]
    beyond = [key for key in found if key.startswith("model/") and key not in expected]
    for key in (*wrong, *beyond):
        here, there = expected.get(key), found.get(key)
        raise UsageError(
            f"the checkpoint {name} is of another model: {key.removeprefix('model/')} "
            f"{_said('is', here, 'is not')} here, and the checkpoint "
            f"{_said('has', there, 'does not have it')}. "
            f"Give the settings that the run was started with"
        )


def _said(verb: str, kind: _Kind | None, otherwise: str) -> str:
    return otherwise if kind is None else f"{verb} {kind[0]} {kind[1]}"


def _refuse_incomplete(
    expected: Mapping[str, _Kind], others: set[str], found: Mapping[str, _Kind], name: str
) -> None:
    """Refuse state that is missing, is of another kind, or belongs to nothing here."""
    for key, kind in expected.items():
        if found.get(key) != kind:
            there = _said("is", found.get(key), "is missing")
            raise damaged_checkpoint(name, f"{key} {there}, and should be {kind[0]} {kind[1]}")
    for key in sorted(others - expected.keys()):
        # Of another kind of device, or of more processes.
        if not key.startswith("rng/"):
            raise damaged_checkpoint(name, f"{key!r:.80} belongs to nothing in this model")


def _kind(tensor: Tensor) -> _Kind:
    return tuple(tensor.shape), tensor.dtype


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((parameter.name, parameter.tensor) for parameter in named_parameters(model))


def _gathered(trained: Trained) -> Iterator[tuple[str, Tensor]]:
    """Every tensor to be kept, whole; of sharded ones every process sends its part."""
    state = {} if trained.optimizer is None else trained.optimizer.state
    for name, parameter in _parameters(trained.model):
        yield f"model/{name}", _kept(parameter)
        for key, value in state.get(parameter, {}).items():
            yield f"optimizer/{name}/{key}", _kept(value)


def _kept(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().cpu().contiguous()


def _random_state(device: torch.device) -> dict[str, Tensor]:
    return {each.type: generator_state(each) for each in _devices(device)}


def _devices(device: torch.device) -> list[torch.device]:
    """The devices whose generators a process draws from: the CPU and its own."""
    if not is_accelerator(device):
        return [device]
    return [torch.device("cpu"), device]
