"""How processes share a model: the manners of DistributedDataParallel and of FSDP2."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsight.core.beside import process_compiles
from gradsight.core.group import ProcessGroup, is_distributed, world_size
from gradsight.core.shards import are_spread, is_sharded, local_part
from gradsight.errors import GradsightError


def reduces_gradients(model: nn.Module) -> bool:
    """False inside DistributedDataParallel's `no_sync`, where gradients are each rank's own."""
    return bool(getattr(model, "require_backward_grad_sync", True))


Kind = Literal["ddp", "loose ddp", "uncalled ddp", "fsdp", "other"]
"""How ranks share a model.

"loose ddp": DistributedDataParallel that may let ranks differ for some steps on purpose.
"uncalled ddp": a DistributedDataParallel exists, but the script calls the module inside it.
"other": another way, such as tensor parallelism.
"""


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards this model or a part of it."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(each, FSDPModule) for each in model.modules())


class Sharing:
    """How ranks share some parameters of a model."""

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self._without: Kind | None = None
        if world_size() == 1:
            return
        modules = list(model.modules())
        wrappers = [each for each in modules if isinstance(each, DistributedDataParallel)]
        if not wrappers:
            # The wrapper may be around the model that is looked at.
            wrappers = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
        keys = {id(tensor) for tensor in tensors}
        for wrapper in wrappers:
            if any(id(parameter) in keys for parameter in wrapper.parameters()):
                self._wrappers.append(weakref.ref(wrapper))
        if is_fully_sharded(model):
            self._without = "fsdp"
        elif are_spread(tensors):
            self._without = "other"

    def kind(self) -> Kind | None:
        """Return how the ranks share the parameters now; None if they share nothing."""
        wrappers = [wrapper for each in self._wrappers if (wrapper := each()) is not None]
        if not wrappers:
            return "ddp" if self._wrappers else self._without
        if not any(_was_called(wrapper) for wrapper in wrappers):
            return "uncalled ddp"
        return "loose ddp" if any(map(_is_loose, wrappers)) else "ddp"


def _was_called(wrapper: DistributedDataParallel) -> bool:
    """Whether this wrapper was called; True where that is not known."""
    # Compiled code and the Python reducer leave no trace of the first call.
    if process_compiles() or getattr(wrapper, "_use_python_reducer", False):
        return True
    return bool(getattr(wrapper, "_lazy_init_ran", True))


def _is_loose(wrapper: DistributedDataParallel) -> bool:
    """Return whether ranks may differ on purpose, as with local SGD, join or a hook."""
    return (
        not reduces_gradients(wrapper)
        or allows_uneven_steps(wrapper)
        or bool(getattr(wrapper, "_comm_hooks", ()))
        or wrapper.process_group.size() != world_size()
    )


class Reduction:
    """Whether the gradients of a model are the same on all ranks after a backward pass."""

    def __init__(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._is_shared: bool | None = None
        self.is_confirmed = False
        """Whether a comparison of ranks has shown that all of them use the same gradient."""

    def holds(self) -> bool:
        """Whether a wrapper, or a comparison, is known to make them so."""
        if self._is_shared is None:
            # Asked after the first pass: a model may be wrapped after its watch was opened.
            kind = Sharing(self._model, self._tensors).kind()
            self._is_shared = world_size() == 1 or kind not in (None, "uncalled ddp")
        return (self._is_shared or self.is_confirmed) and reduces_gradients(self._model)


def allows_uneven_steps(model: nn.Module) -> bool:
    """Whether torch's Join lets the ranks of this model make different numbers of steps."""
    config = getattr(model, "_join_config", None)
    return bool(getattr(config, "enable", False))


def replicated_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters that DistributedDataParallel keeps alike on all ranks."""
    replicated = set()
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        if module.process_group.size() == world_size():
            replicated |= {id(one) for one in module.parameters() if not is_sharded(one)}
    return replicated


@contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Backward passes in here stay in this process (under DistributedDataParallel)."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def reduced_at_last(model: nn.Module, last: bool) -> Iterator[None]:
    """Under DDP only the last micro-batch's backward pass sends gradients, added up by then."""
    if last:
        yield
    else:
        with without_reduction(model):
            yield


def reshard(model: nn.Module) -> None:
    """Shard parameters again that an evaluation, a forward pass without backward, has left whole.

    FSDP2 keeps its outermost parameters whole for a backward pass to come; until then the model's
    own parameters are other tensors than those that the optimizer has.
    """
    if not is_distributed():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule) and not all(is_sharded(p) for p in module.parameters()):
            module.reshard()


def share_model(
    model: nn.Module, parallel: str, blocks: Sequence[nn.Module], device: torch.device
) -> nn.Module:
    """The model as all processes share it: replicated (ddp) or sharded block by block (fsdp)."""
    if world_size() == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class ModelGroup(ProcessGroup):
    """The processes that share one model, in a group of our own on the model's device."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        parameters = list(model.parameters())
        self.sharded = are_spread(parameters)
        replicated = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        shared = self.sharded or replicated
        for parameter in parameters:
            if is_sharded(parameter):
                _check_mesh(parameter, world_size())
        device = parameters[0].device if parameters else None
        super().__init__("model", backend=None, device=device, timeout=None, alone=not shared)

    def gather_shards(self, sharded: Tensor) -> Tensor:
        """The whole of a tensor of which each rank holds some rows."""
        if not is_sharded(sharded):
            return sharded
        return self.gather_rows(local_part(sharded), sharded.shape[0])


def _check_mesh(parameter: Any, processes: int) -> None:
    """Refuse what is not sharded by rows over all processes."""
    from torch.distributed.tensor import Shard

    mesh = parameter.device_mesh
    by_rows = isinstance(parameter.placements[0], Shard) and parameter.placements[0].dim == 0
    if mesh.ndim != 1 or mesh.size() != processes or not by_rows:
        raise GradsightError(
            f"expected parameters sharded over all {processes} processes along dimension 0 "
            f"(fully_shard on one mesh), got {parameter.placements} on a mesh of shape "
            f"{tuple(mesh.shape)}. Other ways of sharding are not supported by the ghost engine."
        )
