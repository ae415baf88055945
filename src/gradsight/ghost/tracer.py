"""Sees every operation of an observed pass, and gives those that a parameter takes part in to a
rule or to the fallback.

An operation whose inputs are parameters and constants only has no samples to tell apart: its
derivative is carried on. One that mixes in batch data is where the samples part: there the scores
are taken, as the gradient of a zero table, the probe, that autograd adds up. Where the samples do
not lie in rows (tokens routed to experts) the derivative is carried on as well, until they do.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.errors import GradsightError
from gradsight.ghost.derivative import Call, autocast_dtype, generator_state, name_of
from gradsight.ghost.fallback import attach_derivative
from gradsight.ghost.gram import Factor
from gradsight.ghost.passes import ModelCall
from gradsight.ghost.rules import DECLINED, RULES, descend
from gradsight.ghost.sample_axis import Key, Layout, LayoutMemory
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.tangent_sources import (
    Carrier,
    Fixed,
    Operation,
    Source,
    Tangents,
    origins_of,
    push_forward,
)
from gradsight.ghost.use import Use

LookUp = Callable[[str], Tangents]
BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@dataclass(frozen=True)
class Options:
    """How operations are scored."""

    exact_grad: bool = False
    """Whether the gradient must be the plain operation's own, bit for bit."""
    route: str | None = None
    """A route to take everywhere, for comparisons; None: by the cost rule."""


@dataclass
class Plan:
    """What a pass is traced for."""

    look_up: LookUp
    """From a parameter's name to its part of every direction."""
    memory: LayoutMemory
    options: Options
    factors: Callable[[str], list[list[Factor]] | None] | None = None
    """From a parameter's name to the factors of its part of each direction, where they are kept."""
    on_source: Callable[[str], object] | None = None
    """Called when a parameter is met for the first time in a pass."""
    on_backward: Callable[[Tensor], None] | None = None
    """Called with the loss before its backward pass."""
    on_call: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any] | None = None
    """May refuse or replace a call; returns DECLINED to leave it."""
    scratch: Scratch = field(default_factory=Scratch)
    """Memory for the products of a layer."""
    slow: dict[str, set[str]] = field(default_factory=dict)
    """Operations that went the universal way, with their parameters."""


class Tracer(TorchFunctionMode):
    """The function mode of one observed pass."""

    def __init__(
        self, plan: Plan, name: Callable[[Tensor], str | None], probe: Tensor | None = None
    ) -> None:
        super().__init__()
        self.plan = plan
        self._probe = probe
        self.keys: dict[Key, tuple[str, ...]] = {}
        self._name = name
        self._carried: dict[int, tuple[weakref.ref[Tensor], Carrier]] = {}
        self._constant: dict[int, weakref.ref[Tensor]] = {}
        self._sources: dict[str, Source] = {}
        self.paused = False
        self.on_recompute: Callable[[], None] | None = None
        """Called once, when an operation is met that a backward pass may run again."""
        self._preferred: int | None = None

    @property
    def probe(self) -> Tensor:
        """The zero table [slots, B] whose gradient is the scores."""
        if self._probe is None:
            raise GradsightError(
                "the size of the batch cannot be told: a parameter was used before the model was called. Pass "
                "sample_ids to observe()."
            )
        return self._probe

    @probe.setter
    def probe(self, probe: Tensor) -> None:
        self._probe = probe

    @property
    def bound(self) -> bool:
        """Whether the number of samples is known."""
        return self._probe is not None

    @property
    def batch(self) -> int:
        """How many samples."""
        return self.probe.shape[1]

    @property
    def active(self) -> bool:
        """Whether this thread's operations are being seen: not so in backward passes, where
        checkpointed code runs again.
        """
        return any(mode is self for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Let go of every tensor: the graph of a pass holds its tracer, and must not be held by it."""
        self._probe = None
        self._carried.clear()
        self._constant.clear()
        self._sources.clear()

    def mark_constant(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that hold no samples."""
        for tensor in tensors:
            self._constant[id(tensor)] = weakref.ref(tensor)

    def mark_call(self, call: ModelCall) -> None:
        """The arguments of a call of the model: those with samples in them are batch data, wherever
        they were made.
        """
        for position, x in enumerate(call.flat):
            if isinstance(x, Tensor):
                if position in call.dims:
                    self._constant.pop(id(x), None)
                else:
                    self.mark_constant([x])

    def carrier(self, x: Any) -> Carrier | None:
        """What a tensor carries: its own direction if it is a trainable parameter, a derived one,
        or nothing.
        """
        if not isinstance(x, Tensor):
            return None
        entry = self._carried.get(id(x))
        if entry is not None and entry[0]() is x:
            return entry[1]
        name = self._name(x)
        if name is None:
            return None
        if name not in self._sources:
            self._sources[name] = Source(name, self.plan.look_up)
            if self.plan.on_source is not None:
                self.plan.on_source(name)
        self._carry(x, self._sources[name])
        return self._sources[name]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, scored or carried on if a parameter takes part in it."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in BACKWARD:
            if func is not torch.autograd.grad and self.plan.on_backward is not None:
                self.plan.on_backward(args[0] if isinstance(args[0], Tensor) else args[0][0])
            return func(*args, **kwargs)
        if self.plan.on_call is not None:
            replaced = self.plan.on_call(func, args, kwargs)
            if replaced is not DECLINED:
                return replaced
        tensors = _tensors_of(args, kwargs)
        if not torch.is_grad_enabled():
            self._expect_recompute()
            return self._plain(func, args, kwargs, tensors)
        carriers = [carrier for x in tensors if (carrier := self.carrier(x)) is not None]
        if not carriers:
            return self._plain(func, args, kwargs, tensors)
        inner = descend(func)
        if inner is not None:
            return self._inside(inner, args, kwargs)
        if self.on_recompute is not None and saves_are_packed():
            self._expect_recompute()
        if func in RULES and any(
            self.carrier(x) is None and not self._is_constant(x) for x in tensors
        ):
            scored = RULES[func](Use(self, func, args, kwargs, origins_of(carriers)))
            if scored is not DECLINED:
                return scored
        return self._general(func, args, kwargs)

    def _inside(
        self, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a composite function with every operation in it seen; by torch's convention its
        samples are in dimension 1.
        """
        outside, self._preferred = self._preferred, 1
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._preferred = outside

    def _expect_recompute(self) -> None:
        """Some operations of this pass may run again in its backward pass."""
        if self.on_recompute is not None:
            self.on_recompute()
            self.on_recompute = None

    def _plain(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and all(self._is_constant(x) for x in tensors):
            self._constant[id(out)] = weakref.ref(out)
        return out

    def _general(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        flat, spec = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [(i, x) for i, x in enumerate(flat) if isinstance(x, Tensor)]
        carried = {i: c for i, x in tensors if (c := self.carrier(x)) is not None}
        device = tensors[0][1].device
        call = Call(
            func, spec, device.type, generator_state(func, device), autocast_dtype(device.type)
        )
        version = flat[0]._version if isinstance(flat[0], Tensor) else None
        before = (
            [x.detach().clone() if isinstance(x, Tensor) else x for x in flat]
            if changes_in_place(func)
            else None
        )
        out = func(*args, **kwargs)
        if before is not None:
            if flat[0]._version != version:
                self._carry_in_place(call, before, flat[0], carried)
            return out
        outputs, out_spec = tree_flatten(out)
        scored = [j for j, y in enumerate(outputs) if _differentiable(y)]
        if not scored:
            return out
        if all(self._is_constant(x) or (i in carried and not carried[i].rows) for i, x in tensors):
            return self._carry_on(call, flat, carried, outputs, scored, out)
        origins = origins_of(carried.values())
        found = {
            j: self.layout((call.name, str(j), *origins), outputs[j].shape, origins) for j in scored
        }
        layouts = {j: layout for j, layout in found.items() if layout is not None}
        self.plan.slow.setdefault(call.name, set()).update(origins)
        if len(layouts) < len(found):
            rest = [j for j in scored if j not in layouts]
            self._carry_on(call, flat, carried, outputs, rest, out)
        outputs = attach_derivative(outputs, layouts, call, flat, carried, self.probe)
        return tree_unflatten(outputs, out_spec)

    def layout(self, key: Key, shape: torch.Size, origins: tuple[str, ...]) -> Layout | None:
        """Where the samples are in a tensor met at this use of these parameters."""
        key = (*key, f"rank {len(shape)}")
        self.keys[key] = origins
        return self.plan.memory.find(key, shape, self.batch, self._preferred)

    def _carry(self, x: Tensor, carrier: Carrier) -> None:
        self._carried[id(x)] = (weakref.ref(x), carrier)

    def _carry_on(
        self,
        call: Call,
        flat: list[Any],
        carried: Mapping[int, Carrier],
        outputs: Sequence[Any],
        which: Sequence[int],
        out: Any,
    ) -> Any:
        operation = Operation(call, flat, carried)
        for j in which:
            self._carry(outputs[j], operation.output(j))
        return out

    def _carry_in_place(
        self, call: Call, before: list[Any], changed: Tensor, carried: Mapping[int, Carrier]
    ) -> None:
        """A tensor that was changed with a parameter's help carries the derivative from here on."""
        run = Call(
            _first_changed(call.func), call.spec, call.device, call.generator_state, call.autocast
        )
        pairs = [(slot, outs[0]) for slot, outs in push_forward(run, before, carried).items()]
        self._constant.pop(id(changed), None)
        self._carry(
            changed,
            Fixed(origins_of(carried.values()), tuple((s, t) for s, t in pairs if t is not None)),
        )

    def _is_constant(self, x: Tensor) -> bool:
        ref = self._constant.get(id(x))
        return ref is not None and ref() is x


@contextmanager
def tracing(tracer: Tracer, root: nn.Module) -> Iterator[None]:
    """Operations are seen in here, also when activation checkpointing runs modules again in a
    backward pass.
    """
    entered: list[nn.Module] = []

    def before(module: nn.Module, args: Any) -> None:
        if not tracer.active:
            entered.append(module)
            tracer.__enter__()  # type: ignore[no-untyped-call]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if entered and entered[-1] is module:
            entered.pop()
            tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:

        def enter_with_modules() -> None:
            for module in root.modules():
                stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                stack.callback(module.register_forward_hook(after, always_call=True).remove)

        tracer.on_recompute = enter_with_modules
        stack.callback(setattr, tracer, "on_recompute", None)
        stack.enter_context(tracer)
        yield


def saves_are_packed() -> bool:
    """Whether someone takes the tensors that autograd keeps: activation checkpointing does, to
    compute them again instead.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


@contextmanager
def paused(tracer: Tracer) -> Iterator[None]:
    """Operations pass unseen in here."""
    tracer.paused = True
    try:
        yield
    finally:
        tracer.paused = False


def _tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a torch function, which are at most in lists."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [x for x in value if isinstance(x, Tensor)]
    return found


def changes_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, by torch's naming."""
    name = name_of(func)
    if name.startswith("__"):
        return name in {
            "__setitem__",
            "__iadd__",
            "__isub__",
            "__imul__",
            "__itruediv__",
            "__ior__",
            "__iand__",
            "__ipow__",
        }
    return name.endswith("_") and not name.endswith("__")


def _first_changed(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one that returns its first argument after the change, without changing the
    caller's.
    """

    def changed(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = first.clone()
        func(copy, *args, **kwargs)
        return copy

    changed.__name__ = f"{name_of(func)} (in place)"
    return changed


def _differentiable(y: Any) -> bool:
    return isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad
