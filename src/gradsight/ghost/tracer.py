# mypy: allow-untyped-calls
"""Sees every operation of an observed pass, and gives those with a parameter to a rule.

Without a rule the universal way takes them.

An operation whose inputs are parameters and constants only has no samples to tell apart: its
derivative is carried on. One that mixes in batch data is where the samples part: there the scores
are taken, as the gradient of a zero table, the probe, that autograd adds up. Where the samples do
not lie in rows (tokens routed to experts) the derivative is carried on as well, until they do.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradsight.core.autocast import autocast_dtype
from gradsight.core.carried import current_task
from gradsight.core.guard import Guard, raise_as_gradsight_error
from gradsight.core.random_state import randomness_kept
from gradsight.core.samples import SplitCall, tensors_in
from gradsight.core.shards import is_sharded
from gradsight.errors import GradsightError, in_one_line
from gradsight.ghost.arguments import NOT_SCORED
from gradsight.ghost.derivative import OperatorCall, function_name, generator_state
from gradsight.ghost.directions import Directions
from gradsight.ghost.fallback import attach_derivative
from gradsight.ghost.in_place import changes_in_place, first_changed, out_of_place
from gradsight.ghost.joined_operations import JoinedCall, run_joined
from gradsight.ghost.joined_rules import JOINED_RULES
from gradsight.ghost.one_pass import OnePass, OnePassRefusal
from gradsight.ghost.refusals import PassGuard
from gradsight.ghost.row_moves import DRAWING, NOT_PICKED, RowMoves, described_value, memory_of
from gradsight.ghost.rules import DECLINED, RULES, descend
from gradsight.ghost.sample_axis import Key, LayoutMemory, Place, SampleLayout
from gradsight.ghost.scratch import Scratch
from gradsight.ghost.tangent_sources import (
    FixedTangents,
    OperationTangents,
    ParameterTangents,
    TangentSource,
    origins_of,
    push_forward,
)
from gradsight.ghost.use import Use

MOST_INDICES = 1_000_000
"""Entries of an argument without samples up to which its contents are compared."""
BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@dataclass(frozen=True, slots=True)
class RuleOptions:
    """How rules score an operation."""

    exact_grad: bool = False
    """Whether the gradient must be the plain operation's own, bit for bit."""
    route: str | None = None
    """A route to take everywhere, for comparisons; None: by the cost rule."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a pass is scored along, and how."""

    directions: Directions
    memory: LayoutMemory
    rules: RuleOptions = RuleOptions()
    one_pass: OnePass | None = None
    """The pass over joined rows that this is; None where training rows are alone."""
    guard: PassGuard | None = None
    """Asked before every operation; None in passes beside training."""
    scratch: Scratch = field(default_factory=Scratch)
    """Memory for the products of a layer."""
    trusts_shapes: bool = True
    """Whether layouts that no proof has covered may be assumed: in the proof itself, and where the
    user has switched it off.
    """


class Tracer(TorchFunctionMode):
    """The function mode of one observed pass."""

    def __init__(
        self,
        options: TraceOptions,
        name: Callable[[Tensor], str | None],
        probe: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.keys: dict[Place, tuple[str, ...]] = {}
        """The places met in the pass, with their parameters."""
        self.unscored: str | None = None
        """Why the table of scores cannot be used; None where it can."""
        self.runs_plain = False
        """Whether every operation runs as it is, and nothing is scored on the way."""
        self.moves = RowMoves(self._without_samples)
        self._picked = NOT_PICKED
        """The rows that the operation at hand is about."""
        self.slow: dict[str, set[str]] = {}
        """Operations that went the universal way, with their parameters."""
        self.paused = False
        self.is_over = False
        """Whether its block has ended: it may be on torch's stack for a moment still."""
        self._probe = probe
        self._name = name
        # Weak references: a tensor's id is reused as soon as it is gone.
        self._carried: dict[int, tuple[weakref.ref[Tensor], TangentSource]] = {}
        self._constant: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Tensors without samples, and how each was made."""
        self._written: set[int] = set()
        """Memory of such tensors that samples were written to later."""
        self._layouts: dict[tuple[Key, tuple[int, ...]], set[SampleLayout | None]] = {}
        """The layouts met in the forward pass, for activation checkpointing's second run."""
        self._parameters: dict[str, ParameterTangents] = {}
        self.on_recompute: Callable[[], None] | None = None
        """Called once, when an operation is met that a backward pass may run again."""
        self.guard: Guard | None = None
        """Closed when an operation is refused."""
        self.expects_recompute = False
        """Whether such an operation was met."""
        self.packed = False
        """Whether activation checkpointing, or somebody else, took what autograd keeps."""
        self.preferred: int | None = None
        """The likely dimension of samples in here, where it is another than the model's own."""
        self._stand_ins: dict[int, tuple[weakref.ref[Tensor], list[Tensor]]] = {}

    @property
    def probe(self) -> Tensor:
        """The zero table [slots, B] whose gradient is the scores."""
        if self._probe is None:
            raise GradsightError(
                "the size of the batch cannot be told: a parameter was used before the model was "
                "called. Pass sample_ids to observe()."
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
        """The number of samples: of rows, in a pass over joined rows."""
        if self.options.one_pass is not None:
            return self.options.one_pass.parts.total
        return self.probe.shape[1]

    @property
    def likely_dim(self) -> int:
        """The dimension that samples are likely in."""
        return self.options.memory.preferred if self.preferred is None else self.preferred

    @property
    def looks_away(self) -> bool:
        """Whether operations pass it by: for a while, or because its block is over."""
        return self.paused or self.is_over

    @property
    def active(self) -> bool:
        """Whether this thread's operations are being seen."""
        # Function modes are not active during backward, where checkpointed code runs again.
        return any(mode is self for mode in _get_current_function_mode_stack())

    def release(self) -> None:
        """Let go of every tensor: the graph of a pass holds its tracer."""
        self._probe = None
        self._carried.clear()
        self._constant.clear()
        self._layouts.clear()
        self.moves.release()
        self._parameters.clear()
        self._stand_ins.clear()
        if self.options.one_pass is not None:
            self.options.one_pass.release()

    def mark_model(self, root: nn.Module) -> None:
        """The tensors of a model that hold no samples: its buffers and frozen parameters."""
        frozen = (p for p in root.parameters() if not p.requires_grad)
        for number, tensor in enumerate(itertools.chain(root.buffers(), frozen)):
            self._constant[id(tensor)] = (weakref.ref(tensor), hash(("model", number)))

    def mark_call(self, call: SplitCall) -> None:
        """Tell a call's arguments with samples in them from constants, whoever made them."""
        self.moves.begin(call.batch)
        for position, x in enumerate(call.flat):
            if isinstance(x, Tensor):
                if position in call.dims:
                    self._constant.pop(id(x), None)
                else:
                    self._constant[id(x)] = (weakref.ref(x), _content(x))

    def source(self, x: Any) -> TangentSource | None:
        """A tensor's source of derivatives: as a trainable parameter, a derived one, or None."""
        if not isinstance(x, Tensor):
            return None
        entry = self._carried.get(id(x))
        if entry is not None and entry[0]() is x:
            return entry[1]
        name = self._name(x)
        if name is None or (self.options.one_pass is not None and is_sharded(x)):
            return None  # rows meet whole parameters, not a process's part of them
        if name not in self._parameters:
            self._parameters[name] = ParameterTangents(name, self.options.directions)
            self.options.directions.fetch(name)
        self._carry(x, self._parameters[name])
        return self._parameters[name]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, scored or carried on if a parameter takes part in it."""
        if self.paused or self.is_over:
            return func(*args, **(kwargs or {}))
        try:
            if func not in BACKWARD:
                return self._follow(func, types, args, kwargs or {})
            self._before_backward(func, args)
        except Exception as error:
            if self._is_users(error, func, args, kwargs or {}):
                raise
            if self.guard is not None:
                self.guard.close()
            raise_as_gradsight_error(error, NOT_SCORED)
        return func(*args, **(kwargs or {}))

    def _is_users(
        self,
        error: Exception,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Return whether an operation fails without the engine too: then the error is the user's.

        A model may catch it and go on.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, GradsightError) or func in BACKWARD:
            return False
        if current_task() != -1:
            # An operation that activation checkpointing repeats has not failed the first time.
            return type(error).__name__ == "_StopRecomputationError"
        try:
            with randomness_kept():  # torch has taken the mode off for this long
                func(*args, **kwargs)
        except Exception:
            return True
        return False

    def _follow(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one operation, and note which rows its result has."""
        tensors = tensors_in(*args, *kwargs.values())
        self._picked = NOT_PICKED
        nothing = self.moves.is_empty and func in self.moves.harmless
        if nothing or self._probe is None or self.runs_plain or current_task() != -1:
            return self._see(func, types, args, kwargs, tensors)
        picked = self.moves.note(func, args, kwargs, tensors)
        self._picked = picked
        out = self._see(func, types, args, kwargs, tensors)
        if picked.path:
            self.moves.mark(tensors_in(out), picked)
            if changes_in_place(func) and args and isinstance(args[0], Tensor):
                self.moves.mark_memory(args[0], picked)
        return out

    def _see(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        guard = self.options.guard
        if guard is not None:
            replaced = guard.intercept(func, args, kwargs, self)
            if replaced is not DECLINED:
                return replaced
        if self.runs_plain:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._expect_recompute()
            return self._plain(func, args, kwargs, tensors)
        sources = [source for x in tensors if (source := self.source(x)) is not None]
        if not sources:
            return self._plain(func, args, kwargs, tensors)
        inner = descend(func)
        if inner is not None:
            return self._inside(inner, args, kwargs)
        if not self.packed and saves_are_packed():
            self.packed = True
            self._expect_recompute()
        one_pass = self.options.one_pass
        if one_pass is not None and changes_in_place(func):
            return self._out_of_place(func, types, args, kwargs)
        if any(self.source(x) is None and self._recipe(x) is None for x in tensors):
            rules = RULES
            if one_pass is not None:
                rules = JOINED_RULES
                one_pass.count(name for source in sources for name in source.origins)
            if func in rules:
                use = Use(self, func, args, kwargs, origins_of(sources))
                scored = self._attempt(rules[func], use)
                if scored is not DECLINED:
                    return scored
        return self._attempt(self._general, Use(self, func, args, kwargs, origins_of(sources)))

    def _attempt(self, score: Callable[[Use], Any], use: Use) -> Any:
        """What a rule gives; where it fails, the operation as it is, and no scores."""
        try:
            return score(use)
        except (GradsightError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if current_task() != -1:
                raise  # activation checkpointing ends its second run by an exception
            if changes_in_place(use.func) or function_name(use.func) in DRAWING:
                raise  # to run it twice would change what the model computes
            out = use.plain()  # where the operation itself is wrong, its own error is raised
            self.refuse_unscored(
                f"the gradient of {_listed(use.origins)} in {function_name(use.func)} cannot be "
                f"split by sample ({in_one_line(error)})"
            )
            return out

    def refuse_unscored(self, reason: str) -> None:
        """Nothing that this pass finds for its samples can be used: an error in one pass."""
        if self.options.one_pass is not None:
            raise OnePassRefusal(f"{reason}.")
        if self.unscored is None:
            self.unscored = reason

    def _out_of_place(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Change a tensor's rows with a parameter's help: by a copy, which then takes its place."""
        first = args[0]
        plain = out_of_place(func)
        if plain is None or self.source(first) is not None:
            raise OnePassRefusal(f"{function_name(func)} changes a tensor in place.")
        copy = first.clone()
        self.moves.mark([copy], self.moves.of([first]))
        changed = self.__torch_function__(plain, types, (copy, *args[1:]), kwargs)
        return first.copy_(changed)

    def stand_ins(self, x: Any) -> list[Tensor]:
        """A parameter's or derived tensor's stand-ins, one per target; none for other tensors."""
        if self.source(x) is None:
            return []
        entry = self._stand_ins.get(id(x))
        if entry is not None and entry[0]() is x:
            return entry[1]
        name = self._name(x)
        one_pass = self.options.one_pass
        assert one_pass is not None
        if name is None:
            raise OnePassRefusal("a tensor that is made of parameters cannot be followed.")
        return one_pass.stand_ins(name, x)

    def joined_call(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[JoinedCall, list[tuple[int, Tensor]]]:
        """An operation with what its inputs carry, and its tensors by position."""
        flat, spec = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [(i, x) for i, x in enumerate(flat) if isinstance(x, Tensor)]
        carried = {i: c for i, x in tensors if (c := self.source(x)) is not None}
        device = tensors[0][1].device
        call = OperatorCall(
            func, spec, device.type, generator_state(func, device), autocast_dtype(device.type)
        )
        stand_ins = {}
        if self.options.one_pass is not None:
            stand_ins = {i: self.stand_ins(flat[i]) for i in carried}
        return JoinedCall(call, flat, carried, stand_ins), tensors

    def _before_backward(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        guard = self.options.guard
        if guard is None or func is torch.autograd.grad:
            return
        losses = args[0]
        # Before the model's own call it is another model's loss.
        loss = losses if isinstance(losses, Tensor) else losses[0]
        if guard.judges_loss and self.bound:
            guard.judge_loss(loss, self.batch)
        guard.before_backward(loss, keeps_outputs=self.needs_passes_by_sample)

    @property
    def needs_passes_by_sample(self) -> bool:
        """Whether the scores have to come from a backward pass for each sample."""
        return self.runs_plain or self.unscored is not None

    def _inside(
        self, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a composite function with every operation in it seen."""
        outside = self.preferred
        self.preferred = 1  # nn.MultiheadAttention has turned its inputs to [time, samples, width]
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.preferred = outside

    def _expect_recompute(self) -> None:
        """Some operations of this pass may run again in its backward pass."""
        if self.on_recompute is not None:
            self.on_recompute()
            self.on_recompute = None
            self.expects_recompute = True

    def _plain(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        out = func(*args, **kwargs)
        if all(self._recipe(x) is not None for x in tensors):
            changed = args[0] if args and changes_in_place(func) else out
            if isinstance(changed, Tensor):
                made = self._how_made(func, args, kwargs)
                self._constant[id(changed)] = (weakref.ref(changed), made)
                if changed is not out and changed._is_view():
                    self._written.add(memory_of(changed))
        elif changes_in_place(func) and args and isinstance(args[0], Tensor):
            self._written.add(memory_of(args[0]))
        return out

    def _how_made(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> int:
        name = function_name(func)
        if name in DRAWING:
            return described_value(object())
        return hash((name, described_value((args, dict(kwargs)), self._recipe)))

    def _general(self, use: Use) -> Any:
        """The universal way, for operations without a rule."""
        func, args, kwargs = use.func, use.args, use.kwargs
        operation, tensors = self.joined_call(func, args, kwargs)
        call, carried = operation.call, operation.carried
        flat = list(operation.flat)
        if changes_in_place(func):
            return self._run_in_place(call, flat, carried, args, kwargs)
        out = func(*args, **kwargs)
        outputs, out_spec = tree_flatten(out)
        scored = [j for j, y in enumerate(outputs) if _differentiable(y)]
        if not scored:
            return out
        if all(
            self._recipe(x) is not None or (i in carried and not carried[i].rows)
            for i, x in tensors
        ):
            self._carry_on(OperationTangents(call, flat, carried), outputs, scored)
            self._stand_in_for(operation, outputs, scored)
            return out
        origins = origins_of(carried.values())
        layouts = {}
        for j in scored:
            layout = self.layout((call.name, str(j), *origins), outputs[j].shape, origins)
            if layout is not None:
                layouts[j] = layout
        self.slow.setdefault(call.name, set()).update(origins)
        rest = [j for j in scored if j not in layouts]
        one_pass = self.options.one_pass
        if one_pass is not None:
            self._refuse_routed(call.name, origins, rest)
            return tree_unflatten(run_joined(one_pass, operation, outputs, layouts), out_spec)
        if rest:
            self._carry_on(OperationTangents(call, flat, carried), outputs, rest)
        outputs = attach_derivative(outputs, layouts, call, flat, carried, self.probe)
        return tree_unflatten(outputs, out_spec)

    def _stand_in_for(
        self, operation: JoinedCall, outputs: Sequence[Any], which: Sequence[int]
    ) -> None:
        """Carry the stand-ins through an operation that no sample takes part in."""
        one_pass = self.options.one_pass
        if one_pass is None:
            return
        versions = [operation.with_stand_ins(number) for number in range(len(one_pass.targets))]
        for j in which:
            made = [version[j] for version in versions]
            self._stand_ins[id(outputs[j])] = (weakref.ref(outputs[j]), made)

    def _refuse_routed(self, name: str, origins: Sequence[str], rest: Sequence[int]) -> None:
        if rest:
            raise OnePassRefusal(
                f"the samples are not in rows behind {name} with {', '.join(origins[:3])}, so "
                "training and validation rows cannot be told apart there."
            )

    def layout(self, key: Key, shape: torch.Size, origins: tuple[str, ...]) -> SampleLayout | None:
        """Where the samples are in a tensor met at this use of these parameters."""
        sizes = tuple(shape)
        if current_task() != -1:
            return self._layout_again(key, sizes, origins)
        memory = self.options.memory
        place = Place(key, sizes, self.batch, self._picked.path)
        self.keys[place] = origins
        layout = memory.find(place, self.preferred)
        self._layouts.setdefault((key, sizes), set()).add(layout)
        if self.batch > 1 and self._picked.by_values is not None:
            self.refuse_unscored(
                f"the model selects rows by the data ({self._picked.by_values}) before it uses "
                f"{_listed(origins)}"
            )
        elif not self.options.trusts_shapes and not memory.is_proven(place):
            self.refuse_unscored(
                f"training uses {_listed(origins)} differently than the self-check did, as in a "
                "branch on self.training, or with other lengths"
            )
        return layout

    def _layout_again(
        self, key: Key, shape: tuple[int, ...], origins: tuple[str, ...]
    ) -> SampleLayout | None:
        """The layout of a use that activation checkpointing runs again in the backward pass."""
        met = self._layouts.get((key, shape), set())
        if len(met) != 1:
            raise GradsightError(
                f"activation checkpointing repeats an operation on {_listed(origins)} with a shape "
                f"of {shape}, which the forward pass did not have, or had in several layouts. "
                "Nothing of this step is scored."
            )
        return next(iter(met))

    def _carry(self, x: Tensor, source: TangentSource) -> None:
        self._carried[id(x)] = (weakref.ref(x), source)

    def _carry_on(
        self, operation: OperationTangents, outputs: Sequence[Any], which: Sequence[int]
    ) -> None:
        for j in which:
            self._carry(outputs[j], operation.output(j))

    def _run_in_place(
        self,
        call: OperatorCall,
        flat: list[Any],
        carried: Mapping[int, TangentSource],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call that may change its first argument; if so, that carries the derivative on."""
        changed = flat[0]
        version = changed._version if isinstance(changed, Tensor) else None
        before = [x.detach().clone() if isinstance(x, Tensor) else x for x in flat]
        out = call.func(*args, **kwargs)
        if changed._version != version:
            run = replace(call, func=first_changed(call.func))
            tangents = [
                (slot, outs[0]) for slot, outs in push_forward(run, before, carried).items()
            ]
            pairs = tuple((slot, tangent) for slot, tangent in tangents if tangent is not None)
            self._constant.pop(id(changed), None)
            self._written.add(memory_of(changed))
            self._carry(changed, FixedTangents(origins_of(carried.values()), pairs))
        return out

    def _without_samples(self, x: Tensor) -> int | None:
        """How a tensor was made of constants and parameters; None where samples took part."""
        source = self.source(x)
        if source is not None and not source.rows:
            return hash((source.origins, tuple(x.shape)))
        return self._recipe(x)

    def _recipe(self, x: Tensor) -> int | None:
        """How a tensor without samples was made; None for all others."""
        entry = self._constant.get(id(x))
        if entry is None or entry[0]() is not x:
            return None
        if self._written and memory_of(x) in self._written:
            return None
        return entry[1]


def _content(x: Tensor) -> int:
    """A number for what an argument without samples holds, where that is cheap to read."""
    if x.is_floating_point() or x.is_complex():
        return hash(("floats", tuple(x.shape)))  # they pick no rows
    if x.device.type != "cpu" or x.numel() > MOST_INDICES:
        return described_value(object())
    return described_value(x.numpy())


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def saves_are_packed() -> bool:
    """Whether activation checkpointing, or somebody else, takes the tensors that autograd keeps."""
    # A private name of torch's: where it is missing, hooks are put on, which is slower but right.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _differentiable(y: Any) -> bool:
    return isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad
