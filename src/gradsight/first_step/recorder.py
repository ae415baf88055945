# mypy: allow-untyped-calls
"""Notes what each pass of the first steps consists of: calls of models, lookups, losses.

One recorder serves a whole process. It hooks the models that somebody asks for, sees the torch
functions between a call of theirs and backward, and leaves when nobody asks any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from gradsight.core import moments
from gradsight.core.autocast import current_autocast
from gradsight.core.beside import called_modules, is_compiled, process_compiles
from gradsight.core.calls import RecordedCall, is_suspended
from gradsight.core.carried import current_task
from gradsight.core.devices import accelerators
from gradsight.core.function_modes import end_mode, take_off_ended
from gradsight.core.guard import Guard
from gradsight.core.hooks import put_module_hook
from gradsight.core.layouts import is_in_memory
from gradsight.core.parameters import called_module
from gradsight.core.passes import BackwardPass
from gradsight.core.random_state import torch_states
from gradsight.core.samples import tensors_in
from gradsight.core.source import users_frames, users_line
from gradsight.first_step.operations import Operations, SeenTargets
from gradsight.values.first_step import ConstantLoss, CountedLabels, FedLoss

_CALLS = 16
"""Calls before one backward pass that are kept."""
_FRAMES = 8
"""How many frames of the script identify the place of a call."""
_PASSES = 64
"""Passes that are recorded for one holder; then nobody will come for more."""
NOTE = "gradsight.preflight"
"""Under this name a backward pass carries what was seen of it."""


@dataclass(frozen=True, eq=False, slots=True)
class SeenCall:
    """One outermost call of a module."""

    module: nn.Module
    made: RecordedCall
    versions: tuple[int, ...]
    """Of the tensors it was given: whoever changes them in place spoils them for us."""
    began: float
    place: tuple[object, ...] = ()
    """Where it was made: the lines of the script on the stack, and the places within them."""

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], began: float
    ) -> "SeenCall":
        """The call that is about to be made."""
        given = tensors_in(*args, *kwargs.values())
        made = RecordedCall(
            args=args,
            kwargs=kwargs,
            rng=torch_states(accelerators([*given, *module.parameters()])),
            buffers={},
            autocast=current_autocast(),
            training=module.training,
            caller=users_line(),
        )
        called_from = tuple(
            (frame.f_code, frame.f_lasti) for frame in islice(users_frames(), _FRAMES)
        )
        return cls(module, made, tuple(tensor._version for tensor in given), began, called_from)

    def is_unchanged(self) -> bool:
        """Whether its arguments are still what they were."""
        given = tensors_in(*self.made.args, *self.made.kwargs.values())
        same = tuple(tensor._version for tensor in given) == self.versions
        return same and all(map(is_in_memory, given))


@dataclass(frozen=True, eq=False, slots=True)
class SeenPass:
    """What led to one backward pass."""

    calls: tuple[SeenCall, ...] = ()
    looked_up: tuple[Tensor, ...] = ()
    targets: tuple[SeenTargets, ...] = ()
    fed: tuple[FedLoss, ...] = ()
    labels: tuple[CountedLabels, ...] = ()
    constant: ConstantLoss | None = None
    padded: tuple[tuple[Tensor, int], ...] = ()
    """Lookups of layers that know which token pads, with that token."""
    hidden: str | None = None
    """Why the operations of this pass were not seen; None: they were."""


class PassRecorder:
    """Hooks models, and tells every backward pass what was seen before it."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._hooked: set[int] = set()
        self._called: set[int] = set()
        """The ids of modules that the script called directly, not through another module."""
        self._guard: Guard | None = None
        self._calls: list[SeenCall] = []
        self._open: nn.Module | None = None
        self._operations: Operations | None = None
        self._hidden: str | None = None
        self._thread = 0

    def hold(self, holder: object, models: Sequence[nn.Module]) -> None:
        """Record passes of these models for somebody, until it lets go."""
        if self._guard is None:
            self._guard = Guard(
                None, "preflight", "Gradsight no longer sees what passes consist of"
            )
            # Whatever fails, the guard does the rest when it is closed.
            self._guard.at_end(self._stop_looking)
            moments.listen(self, self._guard)
        self._holders[id(holder)] = _PASSES
        self._thread = self._thread or get_ident()
        for model in models:
            for module in called_modules(called_module(model)):
                self._hook(module, self._guard)

    def has_called(self, model: nn.Module) -> bool:
        """Return whether the script was seen to call a model as a whole, to train it."""
        return id(called_module(model)) in self._called

    def let_go(self, holder: object) -> None:
        """Somebody has seen enough; the last one takes every hook away."""
        self._holders.pop(id(holder), None)
        if self._holders or self._guard is None:
            return
        # An optimizer may step inside backward. torch has removed the mode from its stack there and
        # restores it afterwards, so it cannot be removed now: the model's next call removes it.
        if current_task() != -1:
            return
        guard = self._guard
        self._guard = None
        self._hooked.clear()
        self._called.clear()
        self._calls.clear()
        self._open = None
        self._thread = 0
        guard.close()

    def _hook(self, module: nn.Module, guard: Guard) -> None:
        if id(module) in self._hooked:
            return
        self._hooked.add(id(module))
        put_module_hook(
            guard, module.register_forward_pre_hook, partial(self._before, module), with_kwargs=True
        )
        put_module_hook(
            guard, module.register_forward_hook, partial(self._after, module), always_call=True
        )

    # What torch tells.

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        # torch calls a hook that another thread is taking away without its keywords.
        if kwargs is None or get_ident() != self._thread:
            return
        if not self._holders:
            self.let_go(self)
            return
        if self._open is not None or self._looks_away():
            return
        self._open = module
        self._called.add(id(module))
        self._look(module)
        self._calls.append(SeenCall.of(module, args, kwargs, perf_counter()))
        del self._calls[:-_CALLS]

    def _after(self, module: nn.Module, *_: Any) -> None:
        if self._open is module:
            self._open = None

    def before_backward(self, begun: BackwardPass) -> None:
        """A pass begins: what was seen since the last one led to it."""
        if get_ident() != self._thread:
            return
        seen = self._operations
        self._stop_looking()
        calls = tuple(self._calls)
        self._calls.clear()
        if seen is None:
            begun.notes[NOTE] = SeenPass(calls, hidden=self._hidden)
        else:
            begun.notes[NOTE] = SeenPass(
                calls,
                tuple(seen.looked_up),
                tuple(seen.targets),
                tuple(seen.fed),
                tuple(seen.labels),
                seen.constant,
                tuple(seen.padded),
            )
        self._holders = {key: left - 1 for key, left in self._holders.items() if left > 1}

    def _looks_away(self) -> bool:
        return (
            get_ident() != self._thread
            or not torch.is_grad_enabled()
            or is_suspended()
            or moments.inside_backward()
            or torch._C._functorch.peek_interpreter_stack() is not None
        )

    # The mode that sees operations.

    def _look(self, module: nn.Module) -> None:
        """See operations from now on, if nobody else's mode could get in its way."""
        take_off_ended()
        if self._operations is not None or self._guard is None:
            return
        self._hidden = _what_hides(module)
        if self._hidden is not None:
            return
        self._operations = Operations(self._guard)
        self._operations.__enter__()

    def _stop_looking(self) -> None:
        ours = self._operations
        self._operations = None
        if ours is not None:
            ours.is_over = True
            # `loss.backward()` is an operation too: in there ours is not on the stack, and comes
            # back to it.
            end_mode(ours)
        take_off_ended()


def _what_hides(module: nn.Module) -> str | None:
    """Why a mode of ours must not see the operations of this module's pass."""
    if is_compiled(module):
        return "the model is compiled: its operations cannot be seen"
    if _get_current_function_mode_stack():
        # A mode that ends after ours began would take ours away instead of its own.
        return "a torch function mode of the script is on: operations cannot be seen beside it"
    if process_compiles():
        return "this process uses torch.compile, which would compile Gradsight's hooks too"
    return None


RECORDER = PassRecorder()
"""The one of this process."""
