"""Keeps what a model was called with during the step under way.

References, so that a bad step can be run again.

Only the module given is hooked, and only calls that record gradients are kept. Nothing is copied
but the state of the random numbers (5 kB) and the few vectors of spectral norms, nothing waits for
a device. The newest call is always kept; earlier ones of the same step as long as they hold less
memory together than the limit.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core import moments
from gradsight.core.autocast import current_autocast
from gradsight.core.beside import called_modules
from gradsight.core.calls import CallNumber, RecordedCall
from gradsight.core.devices import accelerators
from gradsight.core.guard import Guard, put_back
from gradsight.core.hooks import put_module_hook
from gradsight.core.layouts import held_bytes, versions
from gradsight.core.loss_graph import nodes_below
from gradsight.core.parameters import called_module, unwrapped
from gradsight.core.passes import BackwardPass, this_thread
from gradsight.core.random_state import torch_states
from gradsight.core.samples import tensors_in
from gradsight.core.source import users_line
from gradsight.errors import UsageError
from gradsight.incidents.kept_call import (
    KeptCall,
    around,
    is_not_training,
)
from gradsight.incidents.loss_lines import Between, LossLines, nodes_since

_SPECTRAL = ("_SpectralNorm", "SpectralNorm")
_MOST = 256
"""Calls of one step that are kept, whatever they hold."""
_MOST_LOSSES_READ = 8
"""Losses of a run, none of them finite, whose saved values are read."""
_MOST_NODES = 10_000
"""Autograd nodes that are followed from the arguments of one call."""


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """How much may be held until a step ends."""

    argument_bytes: int
    gradient_bytes: int
    """Of the gradients that came back to the model's outputs."""
    lasting: bool
    """Whether calls are kept from the end of their step until the model is called again."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The calls of a step that was made."""

    step: int
    calls: list[KeptCall]
    dropped: Counter[tuple[int, str]]
    root: Tensor | None


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """The autograd graph of a backward pass, kept for steps that call no module."""

    nodes: Sequence[Any]
    values: Any
    """What autograd had saved of it, if the loss was not finite (incidents.loss_values)."""
    lines: Mapping[Any, str]
    backward_caller: str | None
    """None for a loss that backward was not called on."""


class KeptCalls:
    """Hooks one module; `calls` are those of the step under way, the oldest first."""

    def __init__(self, model: nn.Module, limits: KeptLimits, guard: Guard) -> None:
        self.model = called_module(model)
        self._whole = unwrapped(model)
        self.calls: list[KeptCall] = []
        self.dropped: Counter[tuple[int, str]] = Counter()
        """By micro-batch and part of the model: calls of this step that were let go."""
        self.root: Tensor | None = None
        """What backward was last called on in this step."""
        self.last: FinishedStep | None = None
        """The step before, where its numbers may come late: until the next one is made."""
        self.made_step: int | None = None
        """The last step that was made."""
        self._limits = limits
        self._guard = guard
        self._loss_lines = LossLines(guard)
        self._step_is_over = False
        self._held = 0
        self._micro_batch = 0
        self._called_since_backward = False
        self._without_calls = False
        """Whether no module was called in the step before."""
        self._graph: tuple[Between, Any, str | None] | None = None
        self._loss_is_broken = False
        """Whether the loss was not finite when backward began last."""
        self._ids: tuple[int | str, ...] | None = None
        self._handles: list[Any] = []
        self._part_handles: list[Any] = []
        self._losses_read = 0
        self._inside_parts = 0
        self._compiled: Any = None
        self._thread: int | None = None  # that called the model last
        self._looks_away = False
        self._devices: list[torch.device] | None = None
        self._spectral = _spectral_buffers(model)
        # Running statistics change with every call; they are no sign of a changed model.
        normalising = {id(buffer) for buffer in _normalising_buffers(model)}
        self._buffers = {
            name: buffer for name, buffer in model.named_buffers() if id(buffer) not in normalising
        }

    def start(self) -> None:
        """Begin to watch."""
        guard = self._guard
        moments.listen(self, guard)
        # Hooks inside a compiled call would break its graph.
        compiled = getattr(self.model, "_compiled_call_impl", None)
        if compiled is not None:
            self._compiled = compiled
            before = partial(guard.run, self.before)
            ours = around(before, compiled, partial(guard.run, self.after))
            get = partial(getattr, self.model, "_compiled_call_impl")
            put = partial(setattr, self.model, "_compiled_call_impl")
            put(ours)
            guard.at_end(put_back, [], None, get, put, (ours, compiled))
            return
        self._handles = self._hook(self.model, self.before, self.after)
        # A module that only groups networks is never called; neither is a LightningModule.
        names = {id(module): name for name, module in self._whole.named_modules()}
        for part in called_modules(self.model)[1:]:
            before = partial(self._before_part, names.get(id(part), ""))
            # Also after an error: else all that follows would seem to run inside of the part.
            self._part_handles += self._hook(part, before, self._after_part, always_call=True)

    def _hook(
        self,
        module: nn.Module,
        before: Callable[..., None],
        after: Callable[..., None],
        **options: Any,
    ) -> list[Any]:
        register = module.register_forward_pre_hook
        return [
            put_module_hook(self._guard, register, before, with_kwargs=True),
            put_module_hook(self._guard, module.register_forward_hook, after, **options),
        ]

    def stop(self) -> None:
        """Leave everything as it was found."""
        moments.leave(self)
        for handle in [*self._handles, *self._part_handles]:
            handle.remove()
        self._handles.clear()
        self._part_handles.clear()
        if self._compiled is not None:
            self.model._compiled_call_impl = self._compiled
            self._compiled = None
        self.last = None
        self.release()

    def look_away(self) -> None:
        """Keep no more calls, but leave the hooks in place."""
        self._looks_away = True
        moments.leave(self)
        self.last = None
        self.release()

    def end_step(self, step: int) -> None:
        """The step is over."""
        self.made_step = step
        self.last = None
        self._without_calls = not self.calls and self.root is not None
        if self.calls and self._devices:
            self.last = FinishedStep(step, list(self.calls), self.dropped.copy(), self.root)
        self._step_is_over = True
        if not self._limits.lasting:
            self.release()
        if self._without_calls:
            self._loss_lines.model_returned(None)  # all that follows is like a loss

    def release(self) -> None:
        """Hold on to nothing."""
        self.calls.clear()
        self._loss_lines.forget()
        self.root = None
        self.dropped.clear()
        self._held = 0
        self._micro_batch = 0
        self._graph = None
        self._called_since_backward = False
        self._step_is_over = False
        self._inside_parts = 0

    def name_samples(self, ids: Sequence[int | str] | Tensor) -> None:
        """What the samples of the next call are called."""
        given = ids.tolist() if isinstance(ids, Tensor) else ids
        # A text is a sequence of texts to Python: nobody means its letters.
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise UsageError(f"sample ids must be a sequence of integers or text, got {given!r}")
        given = list(given)
        for each in given:
            if not isinstance(each, (int, str)):
                raise UsageError(f"sample ids must be integers or text, got {each!r}")
        self._ids = tuple(given)

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is about to be called."""
        if self._looks_away or is_not_training():
            return
        if self._step_is_over:
            self.release()
        if torch.is_grad_enabled():
            # A validation may call the model although training calls its parts.
            for handle in self._part_handles:
                handle.remove()
            self._part_handles.clear()
            self._before("", args, kwargs)

    def after(self, args: tuple[Any, ...], output: Any) -> None:
        """It has returned."""
        if self._looks_away or not self.calls:
            return
        if torch.is_grad_enabled() and not is_not_training():
            self._after(output)

    def _before_part(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of the model is about to be called, and the model never was."""
        if self._looks_away or is_not_training():
            return
        if self._step_is_over:
            self.release()
        self._inside_parts += 1
        if self._inside_parts == 1 and torch.is_grad_enabled():
            self._before(name, args, kwargs)

    def _after_part(self, args: tuple[Any, ...], output: Any) -> None:
        if self._looks_away or is_not_training():
            return
        self._inside_parts -= 1
        if self._inside_parts == 0:
            self.after(args, output)

    def _before(self, part: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._loss_lines.model_called()
        self._thread = this_thread()
        ids = self._ids
        self._ids = None
        tensors = tensors_in(*args, *kwargs.values())
        made = RecordedCall(
            args=args,
            kwargs=kwargs,
            rng=torch_states(self._devices_of(tensors)),
            buffers={name: buffer.clone() for name, buffer in self._spectral},
            autocast=current_autocast(),
            training=self.model.training,
            caller=users_line(),
            sample_ids=ids,
            part=part,
        )
        call = KeptCall(made, tensors, self._micro_batch)
        self._called_since_backward = True
        if self._buffers:
            call.buffer_versions = versions(self._buffers.values())
        self._held += call.bytes
        self.calls.append(call)
        while len(self.calls) > 1 and (
            self._held > self._limits.argument_bytes or len(self.calls) > _MOST
        ):
            oldest = self.calls.pop(0)
            self._held -= oldest.bytes
            self.dropped[oldest.micro_batch, oldest.part] += 1

    def _devices_of(self, tensors: Iterable[Tensor]) -> list[torch.device]:
        """The accelerators that a call may draw random numbers on: of the model and its batch."""
        if self._devices is None:
            self._devices = accelerators(self.model.parameters())
        return list(dict.fromkeys([*self._devices, *accelerators(tensors)]))

    def _after(self, output: Any) -> None:
        call = self.calls[-1]
        found = tensors_in(output)
        # An evaluation inside the step: nothing can come back to it.
        if not any(tensor.requires_grad for tensor in found):
            self._held -= self.calls.pop().bytes
            return
        call.gradients = [None] * len(found)
        for place, tensor in enumerate(found):
            if tensor.requires_grad:
                # A weak reference: the hook lives as long as the graph, the call only for its step.
                keeper = partial(self._guard.run, self._keep, weakref.ref(call), place)
                tensor.register_hook(keeper)  # type: ignore[no-untyped-call]
        self._loss_lines.model_returned(call.made.caller)

    def used(self) -> list[KeptCall]:
        """The calls whose outputs a gradient came back to: those that the step is made of.

        Before backward, all of them.
        """
        return [call for call in self.calls if call.nodes] or self.calls

    def note_clean(self) -> None:
        """The gradient is still finite after the calls so far."""
        for call in self.used():
            call.is_clean = True

    def clean(self) -> int:
        """How many of the first calls left a finite gradient."""
        used = self.used()
        return next((place for place, call in enumerate(used) if not call.is_clean), len(used))

    def passes(self, everything: bool = False) -> tuple[list[RecordedCall], list[str]]:
        """The calls of this step with the gradients that came back to their outputs, and what is
        missing or in doubt.

        `everything`: also calls that no gradient has come back to, such as one that has just
        raised an exception.
        """
        used = self.calls if everything else self.used()
        return self._recorded(used, self.dropped)

    def passes_of(self, step: FinishedStep) -> tuple[list[RecordedCall], list[str]]:
        """The same of a step that was made."""
        used = [call for call in step.calls if call.nodes] or step.calls
        return self._recorded(used, step.dropped)

    def _recorded(
        self, used: Sequence[KeptCall], dropped: Counter[tuple[int, str]]
    ) -> tuple[list[RecordedCall], list[str]]:
        notes: dict[str, None] = {}
        made: list[RecordedCall] = []
        if dropped:
            text = "earlier calls of the model were not kept: they hold too much memory"
            notes[f"{dropped.total()} {text}"] = None
        for call, number in zip(used, _numbers(used, dropped), strict=True):
            notes.update(dict.fromkeys(self._doubts(call)))
            came_back = not call.too_large and any(
                gradient is not None for gradient in call.gradients
            )
            nodes = tuple(map(call.nodes.get, range(len(call.gradients))))
            made.append(
                replace(
                    call.made,
                    output_gradients=tuple(call.gradients) if came_back else None,
                    output_nodes=nodes if came_back else None,
                    backward_caller=call.backward_caller,
                    loss_root=call.root,
                    loss_lines=self._loss_lines.of(call.root, call.loss),
                    loss_values=call.loss_values,
                    number=number,
                )
            )
        return made, list(notes)

    def graph(self) -> BackwardGraph | None:
        """Return the graph of the last backward pass, or None if the step called a module."""
        if self.calls or self.root is None or self._graph is None:
            return None
        loss, values, backward_caller = self._graph
        nodes = nodes_since(self.root, loss.since)
        lines = self._loss_lines.of(self.root, loss)
        return BackwardGraph(nodes, values, lines, backward_caller)

    def unfinished(self, loss: Tensor) -> BackwardGraph | None:
        """Return the graph of a loss of the current step on which backward was not called."""
        between = self._loss_lines.under_way(loss)
        if between is None:
            return None
        nodes = nodes_since(loss, between.since)
        lines = self._loss_lines.of_unfinished(loss, between)
        return BackwardGraph(nodes, _values_read(loss, nodes), lines, None)

    def _doubts(self, call: KeptCall) -> Iterator[str]:
        """Why running this call again may not be what it was."""
        if call.changed():
            yield (
                "the batch was changed in place after the model had seen it: what is run again is "
                "the changed one"
            )
        if call.too_large:
            limit = f"{self._limits.gradient_bytes / 2**20:.0f} MiB"
            missing = "where they are missing, backward was not run again"
            yield f"gradients at the model's outputs beyond {limit} were not kept: {missing}"
        now = versions(self._buffers.values())
        counters = zip(self._buffers, now, call.buffer_versions, strict=True)
        changed = [
            name
            for name, now, before in counters
            if now != before and name not in call.made.buffers
        ]
        if changed:
            yield f"buffers have changed since the model was called: {', '.join(changed[:3])}"

    def _keep(
        self, reference: "weakref.ref[KeptCall]", place: int, gradient: Tensor | None
    ) -> None:
        """Keep the gradient at one output, as long as the limit allows."""
        call = reference()
        # At an output that the loss does not use, where its operation has others that it does.
        if gradient is None:
            return
        # torch.autograd.grad is not a step's backward.
        if call is None or not moments.inside_backward():
            return
        call.nodes[place] = torch._C._current_autograd_node()
        if call.too_large:
            return
        known = call.gradients[place]
        call.gradients[place] = gradient.detach() if known is None else known + gradient.detach()
        call.gradient_bytes += held_bytes([gradient]) if known is None else 0
        held = sum([each.gradient_bytes for each in self.calls])
        # The oldest go first; the call that has just got a gradient goes last.
        if held > self._limits.gradient_bytes:
            self._drop_gradients(held, call)

    def _drop_gradients(self, held: int, newest: KeptCall) -> None:
        """Drop those of the oldest calls first, and of the newest last, down to the limit."""
        for call in [*(other for other in self.calls if other is not newest), newest]:
            if held <= self._limits.gradient_bytes:
                return
            held -= call.gradient_bytes
            call.drop_gradients()

    def before_backward(self, begun: BackwardPass) -> None:
        """A backward pass begins."""
        if self._thread not in (None, begun.thread):  # another thread's is of another model
            return
        tensors = begun.tensors
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
        self.root = next((root for root in reversed(roots) if isinstance(root, Tensor)), None)
        self._forget_cleared()
        if self.calls or self._without_calls:
            self._end_losses(users_line())
        if self._called_since_backward:
            self._called_since_backward = False
            self._micro_batch += 1

    def after_backward(self, begun: BackwardPass, _: object) -> None:
        """It has returned; a gradient may still come to some calls."""
        if self._thread not in (None, begun.thread):
            return
        for call in self.calls:
            if not call.nodes:
                self._loss_lines.loss_goes_on()
                return

    def _forget_cleared(self) -> None:
        """Let go of calls whose gradients were cleared: they are no part of the step.

        A critic is called for its generator's step too.
        """
        reached = [call for call in self.calls if call.nodes]
        if reached and all(parameter.grad is None for parameter in self.model.parameters()):
            self.calls[:] = [call for call in self.calls if not call.nodes]
            self._held = sum(call.bytes for call in self.calls)
            self.dropped.clear()

    def _end_losses(self, backward_caller: str | None) -> None:
        """The losses of the calls that no gradient has come to may end here."""
        loss = self._loss_lines.backward_begins(self.root, backward_caller)
        values = self._values_of_loss(loss)
        if not self.calls:
            self._graph = (loss, values, backward_caller)
        for call in self.calls:
            if not call.nodes:
                call.backward_caller = backward_caller
                call.root = self.root
                call.loss = loss
                call.loss_values = values

    def _values_of_loss(self, loss: Between) -> Any:
        """Return the saved values of a non-finite loss, if the loss before it was finite."""
        was_broken = self._loss_is_broken
        root = self.root
        # To ask a tensor on the CPU waits for no device.
        self._loss_is_broken = (
            type(root) is Tensor
            and root.device.type == "cpu"
            and root.numel() == 1
            and not math.isfinite(abs(root.detach().item()))
        )
        if root is None or was_broken or not self._loss_is_broken:
            return None
        self._losses_read += 1
        if self._losses_read > _MOST_LOSSES_READ:
            return None
        return _values_read(root, nodes_since(root, loss.since))


def _values_read(loss: Tensor, nodes: Sequence[Any]) -> Any:
    """Return what autograd has saved of a loss that is not finite; None if it cannot be read."""
    # Here, because it imports much that a healthy run never needs.
    from gradsight.incidents.loss_values import loss_values

    try:
        return loss_values(loss, nodes)
    except Exception:  # what cannot be computed again is not known
        return None


def _numbers(used: Sequence[KeptCall], dropped: Counter[tuple[int, str]]) -> list[CallNumber]:
    """Which micro-batch each call was in, and which of its calls it was."""
    made = dropped + Counter((call.micro_batch, call.part) for call in used)
    micro_batches = sorted({micro_batch for micro_batch, _ in made})
    seen = dropped.copy()
    earlier: set[Any] = set()
    numbers = []
    for call in used:
        # Two calls of one graph: the outputs of the earlier one, before the arguments of the later.
        continues = bool(earlier) and _reaches(call.tensors, earlier)
        key = (call.micro_batch, call.part)
        place = micro_batches.index(call.micro_batch)
        numbers.append(CallNumber(place, seen[key], made[key], continues))
        seen[key] += 1
        earlier.update(call.nodes.values())
    return numbers


def _reaches(tensors: Iterable[Tensor], targets: set[Any]) -> bool:
    """Return whether one of these autograd nodes is among those that made some tensors."""
    below = nodes_below((tensor.grad_fn for tensor in tensors), _MOST_NODES)
    return any(node in targets for node in below)


def _spectral_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The vectors of spectral norms by name: a call in training changes them."""
    buffers = []
    for name, module in model.named_modules():
        if type(module).__name__ in _SPECTRAL:
            for key, buffer in module.named_buffers(recurse=False):
                buffers.append((f"{name}.{key}" if name else key, buffer))
    return buffers


def _normalising_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            yield from module.buffers()
