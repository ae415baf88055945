# mypy: allow-untyped-calls
"""The exact count of live tensor bytes: every storage that an operator takes or makes, from its
first sight to its end.

A storage is entered into a log when an operator first shows it and is closed when its last
reference goes. Nothing else is needed for the exact peak, on real tensors and on fake ones. What a
storage was for is judged afterwards, from the log: a buffer turns out to be a gradient only once
autograd has handed it over.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from gradsight.memory.flops import flops_of
from gradsight.memory.workspace import workspace_of


@dataclass(slots=True)
class Allocation:
    """One storage's life on the log's clock; born at -1: it was there before."""

    size: int
    born: int
    phase: str
    """ "forward", "recompute", "backward" or "optimizer": when it was made."""
    device: str
    died: int | None = None
    kind: str | None = None
    """What it is for, where that was seen; else it follows from phase and life."""

    def alive_at(self, moment: int) -> bool:
        return self.born <= moment and (self.died is None or self.died > moment)


def storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages behind a tensor; of a wrapper such as a DTensor those of its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:  # a DTensor names its mesh among them
            yield from storages(part) if isinstance(part, torch.Tensor) else ()
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices().untyped_storage(), tensor._values().untyped_storage())


class StorageCounter(TorchDispatchMode):
    """Logs every storage that operators touch while active, and counts their floating-point
    operations.
    """

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.log: list[Allocation] = []
        self.flops = 0
        self.backward_starts: list[int] = []
        self.operators: set[tuple[str, torch.dtype | None]] = set()
        """The operators that ran, by name, with the type of the result where that is one tensor."""
        self.peak_moment = -1
        self.levels: list[int] = []
        """Bytes alive after each event, less those alive when counting began."""
        self._granule = granule
        self._open: dict[int, tuple[Allocation, weakref.ref[torch.UntypedStorage]]] = {}
        self._moved = 0
        self._peak_moved = 0
        self._in_optimizer = 0
        self._in_backward = False
        self._parameters = WeakIdKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._patches = ExitStack()

    def __enter__(self) -> "StorageCounter":
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._patches.enter_context(
            patch.object(torch.UntypedStorage, "resize_", self._watching_resizes())
        )
        for name in ("get_rng_state", "from_numpy"):
            self._patches.enter_context(
                patch.object(torch, name, self._seeing_the_result(getattr(torch, name)))
            )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters.keys():  # noqa: SIM118
            self._mark(parameter.grad, "gradients")
        self._open.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)  # a fake tensor asked for its device, the most frequent call of all
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper unwraps itself first; its parts come back here
        kwargs = kwargs or {}
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._see(
                    given, before=func is not torch.ops.aten.lift_fresh.default
                )  # torch.tensor(...) ends in one
        out = func(*args, **kwargs)
        result_type = out.dtype if isinstance(out, torch.Tensor) else None
        self.operators.add((getattr(func, "_overloadpacket", func).__name__, result_type))
        self.flops += flops_of(func, args, kwargs, out)
        if workspace := workspace_of(func, args, out):
            self._enter_log(workspace[0].untyped_storage(), before=False, size=workspace[1])
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._see(made, before=False)
        return out

    @property
    def clock(self) -> int:
        """The number of events so far; an event's moment is the clock before it."""
        return len(self.levels)

    def peak(self) -> int:
        """The largest sum of sizes alive at one moment."""
        return self.at(self.peak_moment)

    def at(self, moment: int) -> int:
        """Bytes alive at a moment of the log's clock."""
        return sum(entry.size for entry in self.log if entry.alive_at(moment))

    def _see(self, tensor: torch.Tensor, *, before: bool) -> None:
        for storage in storages(tensor):
            if storage._cdata not in self._open:
                self._enter_log(storage, before=before)
        if isinstance(tensor, torch.nn.Parameter) and tensor not in self._parameters:
            self._parameters[tensor] = True
            self._mark(tensor, "parameters")
            if tensor.requires_grad and tensor.is_leaf:
                self._handles.append(
                    tensor.register_post_accumulate_grad_hook(
                        lambda p: self._mark(p.grad, "gradients")
                    )
                )

    def _enter_log(
        self, storage: torch.UntypedStorage, *, before: bool, size: int | None = None
    ) -> None:
        """Open an entry; what an operator was given without our having seen it made was there
        before.
        """
        phase = self._phase()
        size = -(-(storage.nbytes() if size is None else size) // self._granule) * self._granule
        entry = Allocation(size, -1 if before else self.clock, phase, storage.device.type)
        self.log.append(entry)
        key = storage._cdata
        self._open[key] = (entry, weakref.ref(storage, lambda _: self._close(key, entry)))
        if not before:
            self._move(size)

    def _close(self, key: int, entry: Allocation) -> None:
        if self._open.get(key, (None,))[0] is entry:
            del self._open[key]
            entry.died = self.clock
            self._move(-entry.size)

    def _move(self, size: int) -> None:
        self._moved += size
        if self._moved > self._peak_moved:
            self._peak_moved, self.peak_moment = self._moved, self.clock
        self.levels.append(self._moved)

    def _phase(self) -> str:
        """What is going on; a backward pass that runs with gradients enabled is recomputing."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._in_backward:
            self.backward_starts.append(self.clock)
        self._in_backward = in_backward
        if self._in_optimizer:
            return "optimizer"
        if in_backward:
            return "recompute" if torch.is_grad_enabled() else "backward"
        return "forward"

    def _mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        if tensor is None:
            return
        for storage in storages(tensor):
            if storage._cdata in self._open:
                self._open[storage._cdata][0].kind = kind

    def _before_optimizer(self, *_: Any) -> None:
        self._in_optimizer += 1

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._in_optimizer -= 1
        for state in tree_leaves([dict(entry) for entry in optimizer.state.values()]):
            if isinstance(state, torch.Tensor):
                self._mark(state, "optimizer")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._mark(parameter, "parameters")
                self._mark(parameter.grad, "gradients")

    def _watching_resizes(self) -> Callable[..., Any]:
        """Storages that are resized by hand (FSDP frees and refills its buffers so) end one life
        and begin another.
        """
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            known = self._open.get(storage._cdata)
            result = resize(storage, size)
            if known is not None:
                self._close(storage._cdata, known[0])
                self._enter_log(storage, before=False)
                self._open[storage._cdata][0].kind = known[0].kind
            return result

        return resized

    def _seeing_the_result(self, fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function that makes a tensor without an operator: a checkpointed block keeps the random
        state so.
        """

        def seen(*args: Any) -> torch.Tensor:
            result = fn(*args)
            self._see(result, before=False)
            return result

        return seen
