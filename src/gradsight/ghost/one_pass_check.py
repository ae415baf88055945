"""One pass proven on the user's own model: against single rows, and against plain training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradsight.core.autocast import current_autocast
from gradsight.core.beside import beside_training, eager, replaying
from gradsight.core.calls import RecordedCall
from gradsight.core.per_sample import BatchOutputs, outputs_with_rows
from gradsight.core.random_state import torch_states
from gradsight.core.samples import SplitCall, nearly_equal, tensors_in
from gradsight.core.sharing import reshard
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.one_pass import OnePass, OnePassRefusal, joined_gradients
from gradsight.ghost.parameters import ScoredParameters
from gradsight.ghost.row_parts import RowParts
from gradsight.ghost.sample_axis import Place
from gradsight.ghost.selfcheck import (
    MOST_ATTEMPTS,
    SMALL,
    assume_otherwise,
    cotangents_for,
    rounding,
    spread,
)
from gradsight.ghost.tracer import TraceOptions, Tracer
from gradsight.ghost.tracing import tracing

Scores = dict[tuple[int, str], Tensor]
"""By the number of a target and a parameter, the scores of some training rows."""


@contextmanager
def as_in_training(root: nn.Module, *, sharded: bool) -> Iterator[None]:
    """A pass beside training in the very state of training; the same random numbers, once more."""
    if sharded:
        # fully_shard changes parameters' places in the modules: they cannot be put back for it.
        with beside_training(root), eager():
            yield
        reshard(root)
        return
    now = RecordedCall((), {}, torch_states(), {}, current_autocast(), root.training, None)
    with replaying(root, now):
        yield


def rehearse(root: nn.Module, call: SplitCall, parts: RowParts, *, sharded: bool) -> list[Tensor]:
    """The model's outputs for the training rows alone, with the random numbers of this very call.

    The validation rows have no part in them: what one pass gives the training rows must be equal.
    """
    args, kwargs = training_rows(call, parts)
    with as_in_training(root, sharded=sharded), torch.no_grad():
        return [t.detach() for t in tensors_in(root(*args, **kwargs))]


def training_rows(call: SplitCall, parts: RowParts) -> tuple[tuple[Any, ...], dict[str, Any]]:
    flat = list(call.flat)
    for position, dim in call.dims.items():
        entries = flat[position].shape[dim] // call.batch
        flat[position] = flat[position].narrow(dim, 0, parts.train * entries)
    return SplitCall(flat, call.spec, {}, parts.train).whole()


def _some_rows(call: SplitCall, rows: Sequence[int]) -> SplitCall:
    """The same call with some of its samples, in this order."""
    flat = list(call.flat)
    for position, dim in call.dims.items():
        pieces = flat[position].chunk(call.batch, dim)
        flat[position] = torch.cat([pieces[row] for row in rows], dim)
    return SplitCall(flat, call.spec, call.dims, len(rows))


def _of_training(whole: Tensor, shape: torch.Size) -> Tensor:
    """The first entries of a tensor of all rows: as many as the training rows alone have."""
    if whole.dim() != len(shape) or any(
        mine > all_ for mine, all_ in zip(shape, whole.shape, strict=True)
    ):
        raise OnePassRefusal(
            f"the model's output has shape {tuple(whole.shape)} for all rows and {tuple(shape)} "
            "for the training rows alone."
        )
    return whole[tuple(slice(size) for size in shape)]


def compare_rehearsal(
    alone: Sequence[Tensor], found: Sequence[Tensor], parts: RowParts, within: float
) -> None:
    """An error unless the training rows' outputs are those of the training rows alone."""
    for mine, whole in zip(alone, found, strict=False):
        if mine.dim() != whole.dim() or not mine.is_floating_point():
            continue
        dims = [d for d in range(mine.dim()) if mine.shape[d] != whole.shape[d]]
        rows = whole.detach()
        for dim in dims:
            rows = rows.narrow(dim, 0, min(mine.shape[dim], rows.shape[dim]))
        if len(dims) > 1 or rows.shape != mine.shape or not nearly_equal(rows, mine, within):
            raise OnePassRefusal(
                "the output for the training rows changes if validation rows are in the same pass "
                f"(an output of shape {tuple(mine.shape)}): the model applies dropout or draws "
                "random numbers on a tensor without a sample dimension, or samples influence each "
                "other."
            )


class OnePassCheck:
    """A joined batch scored in one pass and by single rows, and compared."""

    def __init__(
        self, parameters: ScoredParameters, options: TraceOptions, one_pass: OnePass
    ) -> None:
        self._root = parameters.root
        self._parameters = parameters
        self._options = options
        self._targets = one_pass.targets
        self._parts = one_pass.parts

    def run(self, call: SplitCall, most_rows: int) -> None:
        """Refuse where scores are not those of single rows, or the gradient is not training's."""
        with beside_training(self._root, evaluating=True), eager():
            outputs = outputs_with_rows(self._root, [call])
            cotangents = cotangents_for(outputs)
            detached = [y.detach() for y in outputs]
            limit = rounding(self._parameters)
            whole = BatchOutputs(detached, cotangents, call.batch, limit)
            del outputs
            directions = self._directions(call, whole)
            rows = spread(self._parts.train, most_rows)
            right = self._by_rows(call, whole, directions, rows)
            plain = self._plain_gradient(call, cotangents, limit)
            memory = self._options.memory
            for _ in range(MOST_ATTEMPTS):
                scores, gradient, places = self._by_one_pass(call, cotangents)
                wrong = _wrong_scores(right, scores, rows, limit)
                wrong |= plain.differences(gradient)
                if not wrong or not assume_otherwise(memory, set(wrong), places):
                    break
        if not wrong:
            memory.prove(places)
        else:
            memory.forget_unproven()
            worst = ", ".join(f"{name} ({off:.1e})" for name, off in list(wrong.items())[:3])
            raise OnePassRefusal(
                f"one pass gives wrong scores or a wrong gradient for {worst}: they differ by more "
                "than rounding from those of single samples, or from the gradient of the training "
                "rows alone."
            )

    def _pull(self, call: SplitCall, whole: BatchOutputs, row: int) -> Direction:
        alone = outputs_with_rows(self._root, [call], row)
        pieces = whole.cotangents_of(row, alone)
        return gradients(alone, pieces, self._parameters.trainable, sharded=False)[0]

    def _directions(self, call: SplitCall, whole: BatchOutputs) -> list[Direction]:
        """Each target's direction: the sum of its rows' gradients."""
        start = self._parts.train
        directions = []
        for size in self._parts.targets:
            direction: Direction = {}
            for row in range(start, start + size):
                _add(direction, self._pull(call, whole, row))
            directions.append(direction)
            start += size
        return directions

    def _by_rows(
        self,
        call: SplitCall,
        whole: BatchOutputs,
        directions: Sequence[Direction],
        rows: Sequence[int],
    ) -> Scores:
        table: dict[tuple[int, str], list[Tensor]] = {}
        zero = torch.zeros((), dtype=self._parameters.score_dtype, device=self._parameters.device)
        for row in rows:
            own = self._pull(call, whole, row)
            for number, direction in enumerate(directions):
                for name in self._parameters.trainable:
                    value = zero
                    if name in own and name in direction:
                        value = dot(direction[name], own[name]).to(zero)
                    table.setdefault((number, name), []).append(value)
        return {key: torch.stack(values) for key, values in table.items()}

    def _plain_gradient(
        self, call: SplitCall, cotangents: Sequence[Tensor], limit: float
    ) -> "PlainGradient":
        """The gradient of the training rows alone, and how far rounding moves it.

        Rounding is what a batch that holds every training row twice changes: other kernels run on
        it, but means, sums of squares and maxima over its rows stay as they are.
        """
        own = list(range(self._parts.train))
        shapes = [y.shape for y in outputs_with_rows(self._root, [_some_rows(call, own)])]
        counted = [
            _of_training(cotangent, shape)
            for cotangent, shape in zip(cotangents, shapes, strict=True)
        ]
        alone = self._pull_rows(_some_rows(call, own), counted)
        twice = self._pull_rows(_some_rows(call, [*own, *own]), counted)
        return PlainGradient(alone, twice, limit)

    def _pull_rows(self, call: SplitCall, cotangents: Sequence[Tensor]) -> Direction:
        """The gradient of the first rows of a call, those that there are cotangents for."""
        outputs = outputs_with_rows(self._root, [call])
        own = []
        for y, cotangent in zip(outputs, cotangents, strict=True):
            counted = torch.zeros_like(y)
            counted[tuple(slice(size) for size in cotangent.shape)] = cotangent
            own.append(counted)
        return gradients(outputs, own, self._parameters.trainable, sharded=False)[0]

    def _by_one_pass(
        self, call: SplitCall, cotangents: list[Tensor]
    ) -> tuple[Scores, Direction, dict[Place, tuple[str, ...]]]:
        names = tuple(self._parameters.trainable)
        one_pass = OnePass(self._parts, self._targets, names)
        probe = torch.zeros(
            one_pass.directions.slots,
            self._parts.train,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        options = TraceOptions(
            one_pass.directions, self._options.memory, self._options.rules, one_pass
        )
        tracer = Tracer(options, self._parameters.name, probe)
        tracer.mark_model(self._root)
        tracer.mark_call(call)
        with tracing(tracer, self._root):
            outputs = outputs_with_rows(self._root, [call])
            gradient, table = joined_gradients(
                outputs, cotangents, self._parameters.trainable, probe, one_pass
            )
        tracer.release()
        found = {}
        for number in range(len(self._targets)):
            for name in names:
                found[number, name] = table[one_pass.directions.slot(number, name)]
        return found, gradient, tracer.keys


def _add(total: Direction, part: Direction) -> None:
    for name, value in part.items():
        total[name] = value if name not in total else total[name] + value


def _wrong_scores(
    right: Scores, found: Scores, rows: Sequence[int], limit: float
) -> dict[str, float]:
    """By parameter, how far its scores are off where that is more than rounding."""
    largest = max((float(values.abs().max()) for values in right.values()), default=0.0)
    wrong: dict[str, float] = {}
    for key, values in right.items():
        size = max(float(values.abs().max()), SMALL * largest, 1e-30)
        off = float((found[key][list(rows)] - values).abs().max()) / size
        if not off <= limit:  # so that a NaN is wrong
            wrong[key[1]] = off
    return wrong


class PlainGradient:
    """The gradient of training without the engine, and the differences that rounding explains."""

    def __init__(self, alone: Direction, twice: Direction, limit: float) -> None:
        """twice: the same gradient out of a batch that holds every row twice."""
        self._alone = alone
        self._rounding = {name: float((twice[name] - g).norm()) for name, g in alone.items()}
        # The gradient is promised within 1e-6 in fp32; 16 bits have no such promise.
        self._promised = 1e-3 * limit if limit < 1e-2 else 0.5 * limit
        self._largest = max((float(g.norm()) for g in alone.values()), default=0.0)

    def differences(self, found: Direction) -> dict[str, float]:
        """By parameter, how far a gradient is off where that is more than rounding."""
        wrong: dict[str, float] = {}
        for name in {*self._alone, *found}:
            own = self._alone.get(name)
            other = found.get(name)
            if own is None or other is None:
                there = other if own is None else own
                off = 0.0 if there is None or not bool(there.any()) else float("inf")
                allowed = 0.0
            else:
                off = float((other - own).norm())
                size = max(float(own.norm()), 0.2 * self._largest)
                allowed = self._promised * size + 10 * self._rounding[name]
            if not off <= allowed:  # so that a NaN is wrong
                wrong[name] = off / max(float("-inf") if own is None else float(own.norm()), 1e-30)
        return wrong
