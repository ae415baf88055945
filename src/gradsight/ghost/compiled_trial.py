# mypy: allow-untyped-calls
"""The compiled pass against the eager one, on the arguments of an earlier block."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsight.core.autocast import current_autocast
from gradsight.core.beside import beside_training, eager
from gradsight.core.random_state import set_torch_states, torch_states
from gradsight.core.samples import SplitCall, nearly_equal, tensors_in
from gradsight.errors import GradsightError
from gradsight.ghost.arguments import in_one_line
from gradsight.ghost.compiled_plan import PassPlan
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import gradients
from gradsight.ghost.joined_calls import JoinedCalls
from gradsight.ghost.one_pass import OnePass, joined_gradients
from gradsight.ghost.one_pass_check import training_rows
from gradsight.ghost.refusals import PassGuard
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.selfcheck import cotangents_for, rounding
from gradsight.ghost.tracer import TraceOptions, Tracer
from gradsight.ghost.tracing import paused, tracing


@dataclass(frozen=True, slots=True)
class Found:
    """What one way of running the pass has found."""

    outputs: list[Tensor]
    """Those with a gradient, detached."""
    gradient: Direction
    table: Tensor | None
    """The scores [slots, B]."""


class CompiledTrial:
    """Runs one call in compiled code and eagerly, beside training."""

    def __init__(
        self, model: Any, plan: PassPlan, options: TraceOptions, one_pass: OnePass | None
    ) -> None:
        self._model = model
        self._plan = plan
        self._parameters = plan.parameters
        self._root = plan.parameters.root
        self._options = options
        self._one_pass = one_pass

    @property
    def _parts(self) -> RowParts | None:
        return None if self._one_pass is None else self._one_pass.parts

    def fault(self, call: SplitCall, autocast: tuple[str, str] | None) -> str | None:
        """Why compiled code would be wrong here; None where it was found to be right."""
        with _autocast(autocast):
            try:
                return self._fault(call)
            except Exception as error:
                return reason_of(error)

    def _fault(self, call: SplitCall) -> str | None:
        limit = rounding(self._parameters)
        with beside_training(self._root):
            start = torch_states()
            compiled = self._compiled(call)
            after = torch_states()
            set_torch_states(start)
            wrong = what_differs(compiled, self._eager(call), limit)
            if wrong is None or not self._root.training:
                return wrong
        # It may be dropout alone: compilers draw other random numbers. So without it; and with it
        # against the training rows in the model's own compiled code.
        with beside_training(self._root, evaluating=True):
            wrong = what_differs(self._compiled(call), self._eager(call), limit)
            if wrong is not None:
                return wrong
        with beside_training(self._root):
            set_torch_states(start)
            plain = self._plain(call)
            if not _same_states(torch_states(), after):
                return "it draws other random numbers than plain training"
            return what_differs(self._of_training(compiled), plain, limit)

    def _compiled(self, call: SplitCall) -> Found:
        parts = self._parts
        sizes = (call.batch,) if parts is None else parts.sizes
        args, kwargs = call.whole()
        probes = self._plan.probes(sizes[0])
        with self._plan.marked(probes):
            with self._plan.mode(sizes):
                outputs = with_gradient(self._model(*args, **kwargs))
            pulled = torch.autograd.grad(
                outputs,
                [*self._parameters.trainable.values(), *probes.leaves],
                cotangents_for(outputs),
                allow_unused=True,
            )
        own = len(self._parameters.trainable)
        named = zip(self._parameters.trainable, pulled[:own], strict=True)
        gradient = {name: value for name, value in named if value is not None}
        return Found([y.detach() for y in outputs], gradient, probes.table(pulled[own:]))

    def _eager(self, call: SplitCall) -> Found:
        options, one_pass = self._eager_options()
        rows = call.batch if one_pass is None else one_pass.parts.train
        probe = torch.zeros(
            options.directions.slots,
            rows,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        tracer = Tracer(options, self._parameters.name, probe)
        tracer.mark_model(self._root)
        tracer.mark_call(call)
        args, kwargs = call.whole()
        with eager(), tracing(tracer, self._root):
            outputs = with_gradient(self._root(*args, **kwargs))
            with paused(tracer):
                cotangents = cotangents_for(outputs)
            gradient, table = joined_gradients(
                outputs, cotangents, self._parameters.trainable, probe, one_pass
            )
        tracer.release()
        return Found([y.detach() for y in outputs], gradient, table)

    def _eager_options(self) -> tuple[TraceOptions, OnePass | None]:
        options = self._options
        given = self._one_pass
        if given is None:
            return TraceOptions(options.directions, options.memory, options.rules), None
        names = None
        if self._plan.by_parameter:
            names = tuple(self._parameters.trainable)
        own = OnePass(given.parts, given.targets, names, given.scales)
        own.loss_scale = self._plan.seed
        joined = JoinedCalls(own, splits_loss=self._plan.splits_loss)
        guard = PassGuard(joined, judges_loss=False)
        return TraceOptions(own.directions, options.memory, options.rules, own, guard), own

    def _plain(self, call: SplitCall) -> Found:
        """The training rows in the model's own compiled code, unobserved."""
        args, kwargs = call.whole() if self._parts is None else training_rows(call, self._parts)
        outputs = with_gradient(self._model(*args, **kwargs))
        whole = cotangents_for([self._whole(y) for y in outputs])
        pieces = [self._rows(c, y.shape) for c, y in zip(whole, outputs, strict=True)]
        gradient, _ = gradients(outputs, pieces, self._parameters.trainable, False)
        return Found([y.detach() for y in outputs], gradient, None)

    def _whole(self, y: Tensor) -> Tensor:
        """Something of the shape that this output has for all rows."""
        parts = self._parts
        if parts is None or y.dim() == 0:
            return y
        return y.new_empty(1).expand(y.shape[0] // parts.train * parts.total, *y.shape[1:])

    def _rows(self, whole: Tensor, shape: torch.Size) -> Tensor:
        return whole if whole.dim() == 0 else whole[: shape[0]]

    def _of_training(self, found: Found) -> Found:
        parts = self._parts
        if parts is None:
            return Found(found.outputs, found.gradient, None)
        rows = [
            y if y.dim() == 0 else y[: y.shape[0] // parts.total * parts.train]
            for y in found.outputs
        ]
        return Found(rows, found.gradient, None)


def _autocast(wanted: tuple[str, str] | None) -> AbstractContextManager[Any]:
    """The autocast of an earlier call, with its cache: compiled code asks for the same state."""
    now = current_autocast()
    if wanted is not None:
        return torch.autocast(wanted[0], dtype=getattr(torch, wanted[1]))
    return nullcontext() if now is None else torch.autocast(now[0], enabled=False)


def reason_of(error: Exception) -> str:
    """An error in one line; of what a compiler says of an error while it traces, that error."""
    traced = str(error.__cause__ or "").removeprefix("raised exception ")
    if traced.startswith(GradsightError.__name__):
        return traced.removeprefix(GradsightError.__name__).strip("()'\"")
    return str(error).rstrip(".") if isinstance(error, GradsightError) else in_one_line(error)


def _same_states(a: Any, b: Any) -> bool:
    left, right = tensors_in(a), tensors_in(b)
    return len(left) == len(right) and all(
        torch.equal(x, y) for x, y in zip(left, right, strict=True)
    )


def with_gradient(output: Any) -> list[Tensor]:
    """The tensors of a model's output that have a gradient."""
    return [y for y in tensors_in(output) if y.is_floating_point() and y.requires_grad]


def what_differs(found: Found, right: Found, limit: float) -> str | None:
    """What is not as it should be; None where only rounding is."""
    if len(found.outputs) != len(right.outputs):
        return "it returns other outputs"
    for mine, theirs in zip(found.outputs, right.outputs, strict=True):
        if mine.shape != theirs.shape or not nearly_equal(mine, theirs, limit):
            return "its outputs are not those of the eager pass"
    if found.table is not None and right.table is not None:
        largest = float(right.table.abs().max())
        if not float((found.table - right.table).abs().max()) <= limit * largest:
            return "its scores are not those of the eager pass"
    longest = max((float(value.norm()) for value in right.gradient.values()), default=0.0)
    for name, value in right.gradient.items():
        own = found.gradient.get(name)
        if own is None or not float((own - value).norm()) <= limit * longest:
            return f"the gradient of {name} is not that of the eager pass"
    return None
