"""The norm of every expert's part of a gradient [E, ...]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsight.core.devices import is_accelerator, widest_float
from gradsight.measure.flatten import dense_real
from gradsight.measure.host_copy import HostCopy
from gradsight.values.measured import Floats

_TOO_SMALL_TO_SQUARE = 1e-15


@dataclass(frozen=True, slots=True)
class ExpertReading:
    """Norms by expert, of some gradients: started on the device, read on the host later."""

    _arrivals: tuple[tuple[dict[int, int], HostCopy], ...]
    """By device: how many experts each gradient has, and their norms on the way."""

    @classmethod
    def of(cls, gradients: Mapping[int, Tensor]) -> "ExpertReading":
        """Start measuring; by the place of their parameter, the first axis is over experts."""
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        with torch.no_grad():
            for row, gradient in gradients.items():
                # One kernel per tensor, however many experts it has.
                by_device.setdefault(gradient.device, {})[row] = norms_by_expert(gradient)
            arrivals = [
                (
                    {row: len(norms) for row, norms in found.items()},
                    HostCopy.of(torch.cat(list(found.values()))),
                )
                for found in by_device.values()
            ]
        return cls(tuple(arrivals))

    def ready(self) -> bool:
        """Whether reading would not wait."""
        return all(arrival.ready() for _, arrival in self._arrivals)

    def read(self) -> dict[int, Floats]:
        """By the place of the parameter, the norm of every expert that this rank holds."""
        result: dict[int, Floats] = {}
        for sizes, arrival in self._arrivals:
            parts = np.split(arrival.read(), np.cumsum(list(sizes.values()))[:-1])
            result.update(zip(sizes, parts, strict=True))
        return result


def norms_by_expert(gradient: Tensor) -> Tensor:
    """The norm of every slice along the first axis, on the gradient's device."""
    entries = dense_real(gradient.detach())
    if gradient.is_sparse:
        entries = dense_real(gradient.detach().to_dense())
    axes = tuple(range(1, entries.dim()))
    if is_accelerator(entries.device):
        wide = widest_float(entries.device)
        on_device: Tensor = torch.linalg.vector_norm(entries, dim=axes, dtype=wide)
        return on_device
    # float64 takes twenty times as long on a CPU: only what float32 cannot say is read again.
    wide = torch.promote_types(entries.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(entries, dim=axes, dtype=wide).double()
    doubtful = (norms < _TOO_SMALL_TO_SQUARE) | torch.isinf(norms)
    for expert in torch.nonzero(doubtful).flatten().tolist():
        norms[expert] = _carefully(entries[expert])
    return norms


def _carefully(entries: Tensor) -> Tensor:
    """A norm whose squares would overflow or vanish."""
    if entries.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    peak = entries.abs().max().double()
    if not 0 < float(peak) < float("inf"):
        return peak
    norm: Tensor = torch.linalg.vector_norm(entries.double() / peak) * peak
    return norm


def exact_expert_norms(gradient: Tensor) -> list[float]:
    """The plain twin: a loop over the experts in float64."""
    norms = []
    for entries in gradient.detach().double():
        largest = float(entries.abs().max())
        unit = largest if 0 < largest < float("inf") else 1.0
        norms.append(unit * float((entries / unit).norm()))
    return norms


def norms_of_members(l2: Floats, members: Sequence[Sequence[int]]) -> Floats:
    """By expert, where experts are modules: the norm over its parameters; NaN means no gradient."""
    squares = np.nan_to_num(l2, nan=0.0, posinf=np.inf) ** 2
    return np.sqrt([float(squares[list(each)].sum()) for each in members])
