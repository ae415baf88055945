# mypy: allow-untyped-calls, disable-error-code="no-untyped-def"
"""A training pass that stays in compiled code while it is scored.

A function mode that a compiler can trace decides by function and parameter alone. It knows linear
layers, embeddings and LayerNorm, with samples in dimension 0; whatever a model does beside that is
found by comparison with the eager pass, on the arguments of an earlier block, before it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradsight.core.beside import beside_training
from gradsight.core.guard import Guard
from gradsight.core.moments import listen
from gradsight.core.samples import SplitCall, tensors_in
from gradsight.errors import GradsightError
from gradsight.ghost.compiled_functions import (
    OnePassAffine,
    OnePassLookup,
    OnePassProduct,
    OnePassTiedLookup,
    TwoPassAffine,
    TwoPassEmbedding,
    TwoPassLinear,
)
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import gradients
from gradsight.ghost.one_pass import OnePass
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.selfcheck import cotangents_for, rounding
from gradsight.ghost.tracer import TraceOptions, Tracer, tracing


class TraceableMode(TorchFunctionMode):
    """Swaps functions with parameters for those that score; the same object in every step."""

    def __init__(self, parameters: ScoredParameters) -> None:
        super().__init__()
        self.probe: Any = None
        self.rows = 0
        self.known = {id(p) for p in parameters.trainable.values()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}

        def given(position: int, name: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(name)

        if func is F.linear and id(given(1, "weight")) in self.known:
            refuse_flattened(given(0, "input"), self.rows)
            return self.linear(given(0, "input"), given(1, "weight"), given(2, "bias"))
        if func is F.embedding and id(given(1, "weight")) in self.known:
            index = given(0, "input")
            if index.shape[0] != self.rows:
                # Positions, the same for every sample.
                index = index.expand(self.rows, index.shape[-1])
            return self.embedding(index, given(1, "weight"))
        if func is F.layer_norm and id(given(2, "weight")) in self.known:
            shape = given(1, "normalized_shape")
            eps = given(4, "eps")
            if eps is None:
                eps = 1e-5
            refuse_flattened(given(0, "input"), self.rows)
            normalised = F.layer_norm(given(0, "input"), shape, None, None, eps)
            return self.affine(normalised, given(2, "weight"), given(3, "bias"))
        return func(*args, **kwargs)

    def linear(self, x, weight, bias) -> Any:
        """A linear layer."""
        raise NotImplementedError

    def embedding(self, index, weight) -> Any:
        """A lookup."""
        raise NotImplementedError

    def affine(self, normalised, weight, bias) -> Any:
        """What is left of a LayerNorm."""
        raise NotImplementedError


def refuse_flattened(x: Tensor, rows: int) -> None:
    """An error where samples are not the entries of dimension 0."""
    if x.shape[0] != rows:
        raise GradsightError("samples are not in dimension 0 of what goes into a layer")


class OnePassMode(TraceableMode):
    """One pass over joined rows."""

    def __init__(self, parameters: ScoredParameters, parts: RowParts, tied: set[str]) -> None:
        super().__init__(parameters)
        self.train = parts.train
        self.rows = parts.total
        self.tied = {id(parameters.trainable[name]) for name in tied}
        self.head: Any = None
        self.owed: Any = None
        self.tokens: Any = None

    def linear(self, x, weight, bias) -> Any:
        """A linear layer, wired to an embedding of the same weight."""
        wires = (None, None, None)
        if id(weight) in self.tied:
            wires = (self.head, self.owed, self.tokens)
        return OnePassProduct.apply(x, weight, bias, self.probe, self.train, self.rows, *wires)

    def embedding(self, index, weight) -> Any:
        """A lookup; one that a head is tied to leaves wires."""
        if id(weight) not in self.tied:
            return OnePassLookup.apply(index, weight, self.probe, self.train)
        rows, head, owed = OnePassTiedLookup.apply(index, weight, self.probe, self.train)
        self.head = head
        self.owed = owed
        self.tokens = index[self.train :].reshape(-1)
        return rows

    def affine(self, normalised, weight, bias) -> Any:
        """What is left of a LayerNorm."""
        return OnePassAffine.apply(normalised, weight, bias, self.probe, self.train, self.rows)


class TwoPassMode(TraceableMode):
    """The training pass of two, along a direction that is known."""

    def __init__(self, parameters: ScoredParameters, rows: int) -> None:
        super().__init__(parameters)
        self.rows = rows
        self.along: dict[int, Tensor] = {}

    def linear(self, x, weight, bias) -> Any:
        """A linear layer."""
        db = None if bias is None else self.along[id(bias)]
        return TwoPassLinear.apply(x, weight, bias, self.probe, self.along[id(weight)], db)

    def embedding(self, index, weight) -> Any:
        """A lookup."""
        return TwoPassEmbedding.apply(index, weight, self.probe, self.along[id(weight)])

    def affine(self, normalised, weight, bias) -> Any:
        """What is left of a LayerNorm."""
        along = self.along[id(weight)], self.along[id(bias)]
        return TwoPassAffine.apply(normalised, weight, bias, self.probe, *along)


class CompiledObservation:
    """One training pass in compiled code: what `Observation` is to an eager one."""

    def __init__(self, mode: TraceableMode, probe: Tensor, one_pass: OnePass | None) -> None:
        self.scale: Tensor | None = None
        self.on_finished: Callable[[], None] | None = None
        self.on_refusal: Callable[[], None] | None = None
        self.passes_back = 0
        self._mode = mode
        self._mode.probe = probe
        self._probe = probe
        self._one_pass = one_pass
        self._stack = ExitStack()
        self._eyes = ExitStack()

    def start(self) -> None:
        """Begin to look; `stop` must follow."""
        guard = Guard(None, "engine", "the block was not observed", Exception)
        listen(self, guard, own_thread=True)
        self._stack.callback(guard.close)
        count = self._probe.register_post_accumulate_grad_hook(self._count)
        self._stack.callback(count.remove)
        self._eyes.enter_context(self._mode)

    def count_rows(self, outermost: nn.Module) -> None:
        """Find the number of samples when this module, which is not compiled itself, is called."""
        before = outermost.register_forward_pre_hook(self._before_call, with_kwargs=True)
        self._stack.callback(before.remove)

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        rows = [t.shape[0] for t in tensors_in(args, kwargs) if t.dim() > 0]
        if rows and rows[0] != self._mode.rows:
            self._mode.rows = rows[0]
            self._probe = self._probe.new_zeros(1, rows[0]).requires_grad_()
            self._mode.probe = self._probe
            count = self._probe.register_post_accumulate_grad_hook(self._count)
            self._stack.callback(count.remove)

    def look_away(self) -> None:
        """The forward pass is over."""
        self._eyes.close()

    def judge(self, loss: Tensor) -> None:
        """Nothing to judge: eager blocks before this one did."""

    def stop(self) -> None:
        """Leave everything as it was found."""
        self._eyes.close()
        self._stack.close()

    def release(self) -> None:
        """Let go of every tensor of the pass."""
        self._mode.probe = None

    def loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """Remember a GradScaler's factor."""
        self.scale = scaler.scale(torch.ones((), device=self._probe.device))
        if self._one_pass is not None:
            self._one_pass.loss_scale = self.scale

    def after_backward(self, begun: object, rows: object) -> None:
        """A backward pass has returned."""
        if self.on_finished is not None and self.passes_back:
            self.on_finished()

    def backward_failed(self, begun: object) -> None:
        """A backward pass broke off."""
        if self.on_refusal is not None:
            self.on_refusal()

    def scores(self) -> Tensor:
        """The table [1, B], loss scale divided out."""
        if self.passes_back != 1 or self._probe.grad is None:
            raise GradsightError(
                f"expected exactly one loss.backward() for each block, got {self.passes_back}. The "
                "scores of this block are discarded; .grad is untouched."
            )
        table = self._probe.grad
        if self.scale is not None:
            table = table / self.scale.to(table)
            if self._one_pass is not None:
                table = table / self.scale.to(table)
        return table

    def _count(self, probe: Tensor) -> None:
        self.passes_back += 1


class CompiledTrial:
    """The compiled pass against the eager one, on the arguments of an earlier block."""

    def __init__(self, model: Any, parameters: ScoredParameters, options: TraceOptions) -> None:
        self._model = model
        self._parameters = parameters
        self._options = options

    def fault(self, call: SplitCall, mode: TraceableMode, parts: RowParts | None) -> str | None:
        """Why the two differ; None where scores and gradient agree."""
        rows = call.batch if parts is None else parts.train
        root = self._parameters.root
        args, kwargs = call.whole()
        with beside_training(root):
            try:
                with mode:
                    mode.probe = self._probe(rows)
                    outputs = _with_gradient(self._model(*args, **kwargs))
                cotangents = cotangents_for(outputs)
                compiled = self._pull(outputs, cotangents, mode.probe)
            except Exception as error:
                first = str(error).strip().splitlines()[:1]
                return f"{type(error).__name__}: {' '.join(first)}"
            finally:
                mode.probe = None
            eager = self._eager(call, cotangents, parts)
        if eager is None:
            return "its eager pass draws random numbers"
        return _difference(compiled, eager, rounding(self._parameters))

    def _eager(
        self, call: SplitCall, cotangents: list[Tensor], parts: RowParts | None
    ) -> tuple[Direction, Tensor] | None:
        one_pass = None
        directions = self._options.directions
        rows = call.batch
        if parts is not None:
            one_pass = OnePass(parts, ("target",), None)
            directions = one_pass.directions
            rows = parts.train
        probe = self._probe(rows)
        options = TraceOptions(directions, self._options.memory, self._options.rules, one_pass)
        tracer = Tracer(options, self._parameters.name, probe)
        root = self._parameters.root
        tracer.mark_constant(root.buffers())
        tracer.mark_call(call)
        args, kwargs = call.whole()
        with torch.compiler.set_stance("force_eager"), tracing(tracer, root):
            outputs = _with_gradient(root(*args, **kwargs))
            if len(outputs) != len(cotangents):
                return None
            found, table = self._pull(outputs, cotangents, probe)
        if one_pass is not None:
            one_pass.finish()
            if one_pass.table is not None:
                table = table + one_pass.table.to(table)
        tracer.release()
        return found, table

    def _probe(self, rows: int) -> Tensor:
        return torch.zeros(
            1,
            rows,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )

    def _pull(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], probe: Tensor
    ) -> tuple[Direction, Tensor]:
        found, table = gradients(outputs, cotangents, self._parameters.trainable, True, probe)
        return found, torch.zeros_like(probe) if table is None else table.detach()


def _with_gradient(output: Any) -> list[Tensor]:
    return [y for y in tensors_in(output) if y.is_floating_point() and y.requires_grad]


def _difference(
    compiled: tuple[Direction, Tensor], eager: tuple[Mapping[str, Tensor], Tensor], limit: float
) -> str | None:
    largest = float(eager[1].abs().max())
    if not float((compiled[1] - eager[1]).abs().max()) <= limit * largest:
        return "its scores are not those of the eager pass (an operation that it does not know)"
    longest = max(float(value.norm()) for value in eager[0].values())
    for name, value in eager[0].items():
        if name not in compiled[0] or not (compiled[0][name] - value).norm() <= limit * longest:
            return f"the gradient of {name} is not that of the eager pass"
    return None


def tied_weights(uses: Mapping[tuple[str, ...], tuple[str, ...]]) -> set[str]:
    """Parameters that are both looked up and multiplied with."""
    looked_up = {name for key, names in uses.items() if key[0] == "embedding" for name in names}
    multiplied = {name for key, names in uses.items() if key[0] == "linear" for name in names}
    return looked_up & multiplied
