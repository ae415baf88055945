"""Runs a recorded incident again.

Its batch through a model in the state that was recorded, under the same diagnosis.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall, micro_batches
from gradsight.errors import RunError, UsageError
from gradsight.incidents.arguments import unpack_passes
from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from gradsight.incidents.incident import state_of
from gradsight.store.diagnoses import is_broken, merge_diagnoses, of_rank
from gradsight.store.incident_format import BATCH, PARAMETERS, checked_file, read_incident
from gradsight.store.incidents import rank_parts
from gradsight.values.diagnoses import Diagnosis, GuiltySample

_ALIKE = 1e-3
"""Relative difference of norms that another machine may bring."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Replayed:
    """What running an incident again came to."""

    diagnosis: Diagnosis
    reproduced: bool
    agrees: bool | None
    """Whether it is what was found in process; None where nothing was."""


def replay(path: Path, model: nn.Module, seconds: float, found: Diagnosis | None) -> Replayed:
    """Run an incident again, and compare with what was `found` in process.

    Ranks' own parts are run one after the other.
    """
    parts = []
    for folder in (path, *rank_parts(path)):
        body = read_incident(folder)
        if body.get("passes") is not None:
            parts.append(_replay_part(folder, body, model, seconds))
    diagnosis = merge_diagnoses(parts)
    if diagnosis is None:
        raise UsageError(f"{path} cannot be replayed: {read_incident(path).get('replay')}")
    agrees = None if found is None else _agree(found, diagnosis)
    return Replayed(diagnosis, _is_reproduced(read_incident(path), diagnosis, agrees), agrees)


def _is_reproduced(body: Mapping[str, Any], diagnosis: Diagnosis, agrees: bool | None) -> bool:
    """Whether what was recorded has come back.

    Something not finite, the samples of a spike, or the exception.
    """
    if body.get("kind") == "spike":
        return bool(diagnosis.samples) and agrees is not False
    raised = f" raised {str(body.get('reason')).partition(':')[0]}:"
    return is_broken(diagnosis) or (
        body.get("code") == "exception" and any(raised in note for note in diagnosis.notes)
    )


def _replay_part(
    path: Path, body: Mapping[str, Any], model: nn.Module, seconds: float
) -> Diagnosis:
    """One rank's batch."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    tensors = _tensors(path, body, BATCH, device)
    passes = unpack_passes(body["passes"], tensors)
    notes = restore(path, body, model, device)
    if body.get("after"):
        notes.append("the parameters were recorded after the optimizer had stepped")
    first = body.get("first_pass") or 0
    scale = float(body.get("scale") or 1.0)
    kind: Literal["spike", "nonfinite"] = "spike" if body.get("kind") == "spike" else "nonfinite"
    chosen = [_on_cpu(each) for each in passes[first:]]
    made = diagnose(model, chosen, DiagnosisOptions(seconds=seconds, kind=kind, scale=scale))
    made = replace(made, notes=(*notes, *made.notes))
    return of_rank(made, body.get("rank") or 0, micro_batches(passes))


def _on_cpu(each: RecordedCall) -> RecordedCall:
    """Random states live on the CPU, whatever generator they are of."""
    return replace(each, rng={device: state.cpu() for device, state in each.rng.items()})


def _tensors(
    path: Path, body: Mapping[str, Any], name: str, device: torch.device
) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = checked_file(path, body, name)
    if file is None:
        raise RunError(f"{path} is damaged: it names no {name}")
    try:
        loaded: dict[str, Tensor] = load_file(file, device=str(device))
        return loaded
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, OSError) as error:
        raise RunError(f"{file} is damaged: {error}") from error


def restore(
    path: Path, body: Mapping[str, Any], model: nn.Module, device: torch.device
) -> list[str]:
    """Put the recorded parameters and buffers into a model; what could not be, in words."""
    state = state_of(model)
    _check_fit(body.get("state") or {}, state)
    if PARAMETERS not in (body.get("files") or {}):
        return [
            (
                f"{body.get('parameters') or 'no parameters were recorded'}: those of the build "
                "function are used as they are"
            )
        ]
    recorded = _tensors(path, body, PARAMETERS, device)
    _check_fit({name: [list(each.shape), _dtype(each)] for name, each in recorded.items()}, state)
    with torch.no_grad():
        for name, tensor in recorded.items():
            state[name].copy_(tensor)
    return []


def _check_fit(recorded: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Refuse a model whose parameters or buffers are others than those that were recorded."""
    wrong = [f"{name} is missing" for name in recorded if name not in state]
    wrong += [f"{name} was not there then" for name in state if name not in recorded]
    for name, (shape, dtype) in recorded.items():
        if name in state and (
            list(state[name].shape) != list(shape) or _dtype(state[name]) != dtype
        ):
            wrong.append(
                f"{name} is {list(state[name].shape)} {_dtype(state[name])}, and was "
                f"{list(shape)} {dtype}"
            )
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UsageError(
            f"this model is not the one of the incident: {'; '.join(wrong[:_NAMED])}{more}. "
            "Build it with the code and the settings of that run"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _agree(found: Diagnosis, again: Diagnosis) -> bool:
    """Whether two diagnoses name the same operation and the same worst sample."""
    one, other = found.operation, again.operation
    # Outside the model: a replay sees only that a bad gradient came in.
    if one is not None and one.phase == "loss":
        same = other is not None and other.phase == "loss"
    else:
        names = [
            None if each is None else (each.operation, each.phase, each.module)
            for each in (one, other)
        ]
        same = names[0] == names[1]
    if not found.samples or not again.samples:
        return same and bool(found.samples) == bool(again.samples)
    return same and _alike(found.samples[0], again.samples[0])


def _alike(one: GuiltySample, other: GuiltySample) -> bool:
    if (one.rank, one.micro_batch, one.row) != (other.rank, other.micro_batch, other.row):
        return False
    finite = math.isfinite(one.norm), math.isfinite(other.norm)
    return finite == (False, False) or (
        all(finite) and abs(one.norm - other.norm) <= _ALIKE * one.norm
    )
