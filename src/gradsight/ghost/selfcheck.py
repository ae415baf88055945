"""The engine against its twin, on the user's own model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsight.core.autocast import autocast_dtype, autocast_to
from gradsight.core.beside import beside_training, eager
from gradsight.core.per_sample import BatchOutputs, outputs_with_rows
from gradsight.core.samples import SplitCall, tolerance
from gradsight.core.shards import like, local_part
from gradsight.core.sharing import ModelGroup
from gradsight.errors import GradsightError
from gradsight.ghost.directions import Direction, Directions
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.oracle import TwinError, twin_scores
from gradsight.ghost.parameters import ScoredParameters, TypesMet
from gradsight.ghost.sample_axis import LayoutMemory, Place
from gradsight.ghost.tracer import RuleOptions, TraceOptions, Tracer
from gradsight.ghost.tracing import tracing

MOST_ROWS = 64
"""Samples of a batch that the twin looks at; of larger ones, evenly spread."""
ROWS_OF_NEW_SHAPES = 8
"""Samples that it looks at in a batch of other shapes than the first."""
MOST_ATTEMPTS = 24
"""Combinations of layouts that are tried where the likeliest ones are wrong."""


SMALL = 1e-3
"""Scores below this fraction of the largest are compared as if they were as large: rounding."""


class NoLayout(GradsightError):
    """No layout of the samples gives the scores of the reference implementation."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the engine and of the twin, by parameter, for some rows of the batch."""

    engine: dict[str, Tensor]
    twin: dict[str, Tensor]
    summed: dict[str, Tensor]
    """The sum of the engine's scores over the whole batch."""
    whole: dict[str, Tensor]
    """<D, the batch's gradient> by plain autograd: what the scores must add up to."""

    def errors(self) -> dict[str, float]:
        """By parameter: the largest difference, relative to the parameter's largest score."""
        sizes = {
            name: max(_largest(scores), float(self.whole[name].abs()))
            for name, scores in self.twin.items()
        }
        least = SMALL * max(sizes.values(), default=0.0)
        errors = {}
        for name, scores in self.twin.items():
            rows = _largest(self.engine[name] - scores)
            sums = float((self.summed[name] - self.whole[name]).abs())
            errors[name] = max(rows, sums) / max(sizes[name], least, 1e-30)
        return errors


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def random_direction(parameters: ScoredParameters) -> Direction:
    """The same direction on every call; each parameter has a part in it, of about unit length."""
    direction = {}
    for seed, (name, parameter) in enumerate(parameters.trainable.items()):
        part = local_part(parameter)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float32, device="cpu")
        values = noise.to(part.device, torch.float32) / max(parameter.numel(), 1) ** 0.5
        wide = torch.promote_types(part.dtype, torch.float32)
        direction[name] = like(parameter, values.to(wide))
    return direction


class SelfCheck:
    """A batch scored along a random direction by the engine and by the twin, and compared."""

    def __init__(
        self,
        parameters: ScoredParameters,
        group: ModelGroup,
        memory: LayoutMemory,
        rules: RuleOptions,
    ) -> None:
        self._root = parameters.root
        self._parameters = parameters
        self._group = group
        self._memory = memory
        self._rules = rules
        self._direction = random_direction(parameters)
        self._slots = {name: slot for slot, name in enumerate(parameters.trainable)}

    def run(self, calls: Sequence[SplitCall], most_rows: int = MOST_ROWS) -> None:
        """Prove layouts that give the scores of the reference implementation, or raise NoLayout."""
        # Dropout is off: stock GPT-2 has it on, and a comparison in flight would reject it.
        device = self._parameters.device.type
        with (
            beside_training(self._root, evaluating=True),
            eager(),
            # Without autocast's cache: its copies of weights outlive a pass, and fully_shard has
            # let go of the weights by then.
            autocast_to(device, autocast_dtype(device)),
        ):
            outputs, cotangents = self._outputs(calls)
            rows = spread(calls[0].batch, most_rows)
            twin = self._twin(calls, outputs, cotangents, rows)
            for _ in range(MOST_ATTEMPTS):
                comparison, places = self._compare(calls, cotangents, twin, rows)
                wrong = self._wrong(comparison)
                picked = len(rows) < calls[0].batch and any(place.path for place in places)
                if not wrong and self._agreed(picked):
                    # Where rows are picked, some samples say nothing of the others.
                    rows = range(calls[0].batch)
                    twin = self._twin(calls, outputs, cotangents, rows)
                elif not wrong:
                    self._memory.prove(places)
                    return
                elif not self._agreed(assume_otherwise(self._memory, wrong, places)):
                    break
        self._memory.forget_unproven()
        raise NoLayout(refusal(comparison, wrong))

    def _agreed(self, flag: bool) -> bool:
        """Whether it holds on any process: sharded models have to go the same way everywhere."""
        if not self._group.sharded:
            return flag
        return bool(self._group.sum(torch.tensor(float(flag))) > 0)

    def _outputs(self, calls: Sequence[SplitCall]) -> tuple[list[Tensor], list[Tensor]]:
        """The model's outputs for the batch, and random gradients for them."""
        with TypesMet(self._parameters):
            outputs = outputs_with_rows(self._root, calls)
        if not outputs:
            raise TwinError(
                "the self-check found no output with rows of samples: the model returns only a "
                "loss, and computes it with no loss function of torch. Call the part of the model "
                "that makes the predictions, and compute the loss from them in loss_fn; or pass "
                "self_check=False."
            )
        return [y.detach() for y in outputs], cotangents_for(outputs)

    def _twin(
        self,
        calls: Sequence[SplitCall],
        outputs: list[Tensor],
        cotangents: list[Tensor],
        rows: Sequence[int],
    ) -> dict[str, Tensor]:
        turns = turns_of(rows, self._group)
        within = rounding(self._parameters)
        batch = BatchOutputs(outputs, cotangents, calls[0].batch, within)
        table = twin_scores(self._root, calls, batch, self._pull, turns)
        mine = [t for t, (_, active) in enumerate(turns) if active]
        return {name: torch.stack(values)[mine] for name, values in table.items()}

    def _pull(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> Mapping[str, Tensor]:
        parts, _ = gradients(outputs, cotangents, self._parameters.trainable, self._group.sharded)
        return self._dots(parts)

    def _dots(self, gradient: Direction) -> dict[str, Tensor]:
        """<D, gradient> by parameter; of sharded models the whole."""
        zero = torch.zeros((), dtype=self._parameters.score_dtype, device=self._parameters.device)
        values = []
        for name in self._slots:
            value = zero
            if name in gradient:
                value = dot(self._direction[name], gradient[name]).to(zero)
            values.append(value)
        stacked = torch.stack(values)
        if self._group.sharded:
            # fully_shard averages gradients over the processes: the factor undoes it.
            stacked = self._group.sum(stacked) * self._group.size
        return dict(zip(self._slots, stacked, strict=True))

    def _compare(
        self,
        calls: Sequence[SplitCall],
        cotangents: list[Tensor],
        twin: dict[str, Tensor],
        rows: Sequence[int],
    ) -> tuple[Comparison, dict[Place, tuple[str, ...]]]:
        batch = calls[0].batch
        probe = torch.zeros(
            len(self._slots),
            batch,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        directions = Directions(
            {"random": self._direction},
            ("random",),
            parameters=tuple(self._slots),
            group=self._group,
        )
        options = TraceOptions(directions, self._memory, self._rules)
        tracer = Tracer(options, self._parameters.name, probe)
        tracer.mark_model(self._root)
        for call in calls:
            tracer.mark_call(call)
        with tracing(tracer, self._root):
            outputs = outputs_with_rows(self._root, calls)
            gradient, scores = gradients(
                outputs, cotangents, self._parameters.trainable, self._group.sharded, probe
            )
        tracer.release()
        if self._agreed(tracer.unscored is not None):
            raise NoLayout(tracer.unscored or "another process cannot tell its samples apart")
        table = scores
        if table is None:  # no parameter met a sample
            table = torch.zeros_like(probe)
        summed = table.detach().sum(1)
        if self._group.sharded:
            summed = self._group.sum(summed)
        comparison = Comparison(
            engine=dict(zip(self._slots, table.detach()[:, list(rows)], strict=True)),
            twin=twin,
            summed=dict(zip(self._slots, summed, strict=True)),
            whole=self._dots(gradient),
        )
        return comparison, tracer.keys

    def _wrong(self, comparison: Comparison) -> set[str]:
        limit = rounding(self._parameters)
        errors = comparison.errors()
        wrong = [not error <= limit for error in errors.values()]  # so that a NaN is wrong
        if self._group.sharded:
            flags = torch.tensor(wrong, dtype=torch.float32, device=self._parameters.device)
            wrong = [bool(flag) for flag in self._group.sum(flags)]
        return {name for name, bad in zip(errors, wrong, strict=True) if bad}


def rounding(parameters: ScoredParameters) -> float:
    """The relative difference that rounding may cause in this model, by the narrowest type met."""
    if autocast_dtype(parameters.device.type) is not None:
        return tolerance(torch.bfloat16)
    types = {p.dtype for p in parameters.trainable.values()} | parameters.types_met
    return max(tolerance(each) for each in types)


def turns_of(rows: Sequence[int], group: ModelGroup) -> list[tuple[int, bool]]:
    """Which row is run when, and whether it counts here.

    Sharded models run in step: each process has its turns, the others add nothing then.
    """
    if not group.sharded:
        return [(row, True) for row in rows]
    count = len(rows)
    most = group.largest(count)
    turns = []
    for owner in range(group.size):
        for i in range(most):
            row = rows[i] if i < count else rows[0]
            turns.append((row, owner == group.rank and i < count))
    return turns


def assume_otherwise(
    memory: LayoutMemory, wrong: set[str], places: Mapping[Place, tuple[str, ...]]
) -> bool:
    """Assume the next combination of layouts at the wrong parameters; False after the last."""
    moved: set[Place] = set()
    changed = False
    for name in sorted(wrong):
        mine = [place for place, origins in places.items() if name in origins]
        if moved & set(mine):
            continue
        moved |= set(mine)
        changed |= any(memory.advance(place) for place in mine)
    return changed


def cotangents_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Random gradients for a model's outputs, the same on every call."""
    generator = torch.Generator().manual_seed(len(outputs))
    cotangents = []
    for y in outputs:
        noise = torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)
        cotangents.append(noise / max(y.numel(), 1) ** 0.5)
    return cotangents


def spread(batch: int, most: int = MOST_ROWS) -> Sequence[int]:
    """The rows that the twin looks at.

    >>> list(spread(3)), spread(16, 4)
    ([0, 1, 2], [0, 5, 10, 15])
    """
    if batch <= most:
        return range(batch)
    return [i * (batch - 1) // (most - 1) for i in range(most)]


def refusal(comparison: Comparison, wrong: set[str]) -> str:
    """The text of the refusal, naming the worst parameters."""
    errors = comparison.errors()
    worst = sorted(wrong, key=lambda name: -errors[name])[:3]
    listed = ", ".join(f"{name} ({errors[name]:.1e})" for name in worst)
    return (
        f"the fast scores of {len(wrong)} of {len(errors)} parameters are wrong, most of all "
        f"those of {listed}: the shapes do not show where the samples are, or a parameter is used "
        "in a custom autograd function"
    )
