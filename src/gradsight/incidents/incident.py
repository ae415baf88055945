"""Composes an incident.

Statistics, diagnosis and, where wanted, the batch and the parameters, in one bundle.
"""

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.calls import RecordedCall
from gradsight.core.group import rank, world_size
from gradsight.core.parameters import clean_name, named_parameters
from gradsight.core.shards import is_sharded
from gradsight.incidents.arguments import CannotStore, pack_passes
from gradsight.incidents.bundle import Bundle, remove_unfinished
from gradsight.store.incident_format import BATCH, PARAMETERS
from gradsight.values.diagnoses import Diagnosis
from gradsight.values.findings import Finding
from gradsight.values.plain import plain

MOST_PARAMETER_BYTES = 2 * 10**9
MOST_BATCH_BYTES = 2 * 10**9


class StagedIncident:
    """A bundle begun while the parameters were still those of the bad step."""

    def __init__(self, bundle: Bundle, facts: dict[str, Any]) -> None:
        self.bundle = bundle
        self.facts = facts


class IncidentWriter:
    """Writes bundles below a run directory, each rank its own."""

    def __init__(self, run_dir: str | os.PathLike[str], model: nn.Module, with_batch: bool) -> None:
        self._run_dir = Path(run_dir).resolve()
        self._model = model
        self._with_batch = with_batch
        remove_unfinished(self._run_dir, rank())

    def stage(self, passes: Sequence[RecordedCall], refusal: str | None = None) -> StagedIncident:
        """Begin a bundle, with batch and parameters as they are now if those are wanted.

        refusal: why they are not those of the step, and are left out.
        """
        bundle = Bundle(self._run_dir, rank())
        try:
            if not self._with_batch:
                return StagedIncident(bundle, {"replay": _NO_BATCH})
            if refusal is not None:
                return StagedIncident(bundle, {"replay": refusal})
            return StagedIncident(bundle, self._data(bundle, passes))
        except BaseException:
            bundle.discard()
            raise

    def write(self, name: str, staged: StagedIncident, what: Mapping[str, Any]) -> Path:
        """Finish a bundle under this name."""
        bundle = staged.bundle
        try:
            return bundle.finish(name, {**_circumstances(), **staged.facts, **what})
        except BaseException:
            bundle.discard()
            raise

    def _data(self, bundle: Bundle, passes: Sequence[RecordedCall]) -> dict[str, Any]:
        """Write the calls and the parameters; say why, where that is not possible."""
        from safetensors.torch import save_file

        if not passes:
            return {"replay": "the model had not been called in this step when it was written"}
        try:
            structure, tensors = pack_passes(passes)
        except CannotStore as error:
            return {"replay": f"the batch cannot be stored: {error}"}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > MOST_BATCH_BYTES:
            return {
                "replay": (
                    f"the batch takes {size / 1e9:.1f} GB, more than "
                    f"{MOST_BATCH_BYTES / 1e9:.0f} GB"
                )
            }
        bundle.add(BATCH, lambda file: save_file(storable(tensors), file))
        state = state_of(self._model)
        facts: dict[str, Any] = {"passes": structure, "replay": None, "state": _described(state)}
        size = sum(tensor.nbytes for tensor in state.values())
        # Each rank would write its own shard, and nobody could load them as one.
        if any(is_sharded(tensor) for tensor in state.values()):
            facts["parameters"] = "the parameters are spread over ranks"
        elif size > MOST_PARAMETER_BYTES:
            facts["parameters"] = (
                f"the parameters take {size / 1e9:.1f} GB, more than "
                f"{MOST_PARAMETER_BYTES / 1e9:.0f} GB"
            )
        else:
            bundle.add(PARAMETERS, lambda file: save_file(storable(state), file))
        return facts


_NO_BATCH = 'the batch was not written: watch with recorder="batch" to replay an incident elsewhere'


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the model's own names, tied ones once."""
    state = {named.name: named.tensor.detach() for named in named_parameters(model)}
    return state | {
        clean_name(model, name): buffer.detach() for name, buffer in model.named_buffers()
    }


def _described(state: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in state.items()
    }


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, none of which shares memory with another: safetensors takes no others."""
    return {
        name: tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        for name, tensor in tensors.items()
    }


def _circumstances() -> dict[str, Any]:
    return {
        "created": time.time(),
        "rank": rank(),
        "world_size": world_size(),
        "versions": {"gradsight": metadata.version("gradsight"), "torch": torch.__version__},
    }


def facts_of_finding(step: int, finding: Finding, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """What an incident says of a finding."""
    found = {
        name: plain(getattr(finding, name))
        for name in Finding.__slots__
        if name not in ("diagnosis", "incident")
    }
    reason = f"{finding.name}: {finding.evidence}"
    return {
        "step": step,
        "code": finding.code,
        "reason": reason,
        "finding": found,
        "diagnosis": plain(diagnosis),
    }


def facts_of_ending(
    step: int, code: str, reason: str, diagnosis: Diagnosis | None
) -> dict[str, Any]:
    """What an incident says of a run that ended."""
    return {
        "step": step,
        "code": code,
        "reason": reason,
        "finding": None,
        "diagnosis": plain(diagnosis),
    }


def describe_error(error: BaseException) -> str:
    """An exception in one line: what, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
