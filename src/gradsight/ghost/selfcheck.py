"""The engine against its twin, on the user's own model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradsight.core.distributed import local_part
from gradsight.core.samples import collecting, rowed, tolerance
from gradsight.core.sharing import Ranks, like
from gradsight.errors import GradsightError
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.oracle import TwinError, twin_scores
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import ModelCall, aside, eager, tensors_in
from gradsight.ghost.sample_axis import Key, LayoutMemory
from gradsight.ghost.tangent_sources import keep
from gradsight.ghost.targets import Direction
from gradsight.ghost.tracer import Options, Plan, Tracer, tracing

MOST_ROWS = 64
"""How many samples of a batch the twin looks at; of larger ones, evenly spread."""
MOST_ATTEMPTS = 24
"""How many combinations of layouts are tried where the likeliest ones are wrong."""


@dataclass(frozen=True)
class Comparison:
    """Scores of the engine and of the twin, by parameter, for some rows of the batch."""

    engine: dict[str, Tensor]
    twin: dict[str, Tensor]
    summed: dict[str, Tensor]
    """The sum of the engine's scores over the whole batch."""
    whole: dict[str, Tensor]
    """<D, the batch's gradient> by plain autograd: what the scores must add up to."""

    def errors(self) -> dict[str, float]:
        """By parameter: the largest difference, over the largest score of the whole comparison."""
        scale = max((float(t.abs().max()) for t in self.twin.values() if t.numel()), default=0.0)
        scale = max(scale, max((float(t.abs()) for t in self.whole.values()), default=0.0), 1e-30)
        found = {}
        for name in self.twin:
            rows = (
                float((self.engine[name] - self.twin[name]).abs().max())
                if self.twin[name].numel()
                else 0.0
            )
            found[name] = max(rows, float((self.summed[name] - self.whole[name]).abs())) / scale
        return found


def random_direction(parameters: Parameters) -> Direction:
    """A direction in which every parameter has its part, scaled to unit length each; the same on
    every call.
    """
    direction = {}
    for seed, (name, parameter) in enumerate(parameters.trainable.items()):
        part = local_part(parameter)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(part.shape, generator=generator, dtype=torch.float32).to(
            part.device, torch.float32
        )
        values = (values / max(parameter.numel(), 1) ** 0.5).to(
            torch.promote_types(part.dtype, torch.float32)
        )
        direction[name] = like(parameter, values)
    return direction


class SelfCheck:
    """Scores a batch with random output gradients along a random direction, with the engine and
    with the twin.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Parameters,
        ranks: Ranks,
        memory: LayoutMemory,
        options: Options,
    ) -> None:
        self._root, self._parameters, self._ranks = root, parameters, ranks
        self._memory, self._options = memory, options
        self._direction = random_direction(parameters)
        self._slots = {name: slot for slot, name in enumerate(parameters.trainable)}
        self._whole: dict[str, Tensor] = {}

    def run(self, calls: Sequence[ModelCall]) -> set[Key]:
        """Find layouts under which the engine agrees with the twin on every parameter, or refuse;
        returns the uses met.
        """
        with aside(self._root), eager():
            outputs, cotangents = self._outputs(calls)
            rows = spread(calls[0].batch)
            twin = self._twin(calls, outputs, cotangents, rows)
            del outputs
            for _ in range(MOST_ATTEMPTS):
                assumed = self._memory.snapshot()
                comparison, keys = self._compare(calls, cotangents, twin, rows)
                wrong = self._wrong(comparison)
                if not wrong:
                    return set(keys)
                if not self._agreed(self._memory.snapshot() != assumed) and not self._agreed(
                    self._assume_otherwise(wrong, keys)
                ):
                    break
        raise GradsightError(refusal(comparison, wrong))

    def _agreed(self, flag: bool) -> bool:
        """Whether it holds on any process: sharded models have to go the same way everywhere."""
        if not self._ranks.sharded:
            return flag
        return bool(self._ranks.sum(torch.tensor(float(flag))) > 0)

    def _assume_otherwise(self, wrong: set[str], keys: Mapping[Key, tuple[str, ...]]) -> bool:
        """Other layouts at the uses of the wrong parameters, counting through the combinations;
        False when all were tried.
        """
        moved: set[Key] = set()
        changed = False
        for name in sorted(wrong):
            mine = [key for key, origins in keys.items() if name in origins]
            if moved & set(mine):
                continue
            moved |= set(mine)
            changed |= any(self._memory.advance(key) for key in mine)
        return changed

    def _outputs(self, calls: Sequence[ModelCall]) -> tuple[list[Tensor], list[Tensor]]:
        """The model's outputs for the batch, and random gradients for them."""
        outputs = self._forward(calls)
        if not outputs:
            raise TwinError(
                "the self-check found no output with rows of samples: the model returns only a loss, and computes it "
                "with no loss "
                "function of torch. Return the predictions too, or pass self_check=False."
            )
        generator = torch.Generator().manual_seed(len(outputs))
        cotangents = [
            torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
            / max(y.numel(), 1) ** 0.5
            for y in outputs
        ]
        return [y.detach() for y in outputs], cotangents

    def _forward(self, calls: Sequence[ModelCall]) -> list[Tensor]:
        outputs: list[Tensor] = []
        losses: list[Tensor] = []
        with collecting(losses):
            for call in calls:
                args, kwargs = call.whole()
                outputs += tensors_in(self._root(*args, **kwargs))
        return rowed(outputs, losses)

    def _twin(
        self,
        calls: Sequence[ModelCall],
        outputs: list[Tensor],
        cotangents: list[Tensor],
        rows: Sequence[int],
    ) -> dict[str, Tensor]:
        turns = self._turns(len(rows), calls[0].batch, rows)
        table = twin_scores(self._root, calls, outputs, cotangents, self._pull, turns)
        mine = [t for t, (_, active) in enumerate(turns) if active]
        return {name: torch.stack(values)[mine] for name, values in table.items()}

    def _turns(self, count: int, batch: int, rows: Sequence[int]) -> list[tuple[int, bool]]:
        """Which row is run when. Sharded models run in step: each process has its turns, the others
        add nothing then.
        """
        if not self._ranks.sharded:
            return [(row, True) for row in rows]
        most = self._ranks.largest(count, self._parameters.device)
        return [
            (rows[i] if i < count else rows[0], owner == self._ranks.rank and i < count)
            for owner in range(self._ranks.size)
            for i in range(most)
        ]

    def _pull(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> Mapping[str, Tensor]:
        found, _ = gradients(outputs, cotangents, self._parameters.trainable, self._ranks.sharded)
        return self._dots(found)

    def _dots(self, found: Direction) -> dict[str, Tensor]:
        """<D, gradient> by parameter; of sharded ones the whole, undoing the mean over processes."""
        dtype = self._parameters.score_dtype
        values = [
            dot(self._direction[n], found[n]).to(dtype)
            if n in found
            else torch.zeros((), dtype=dtype)
            for n in self._slots
        ]
        stacked = torch.stack([v.to(self._parameters.device) for v in values])
        if self._ranks.sharded:
            stacked = self._ranks.sum(stacked) * self._ranks.size
        return dict(zip(self._slots, stacked, strict=True))

    def _compare(
        self,
        calls: Sequence[ModelCall],
        cotangents: list[Tensor],
        twin: dict[str, Tensor],
        rows: Sequence[int],
    ) -> tuple[Comparison, dict[Key, tuple[str, ...]]]:
        batch = calls[0].batch
        probe = torch.zeros(
            len(self._slots),
            batch,
            device=self._parameters.device,
            dtype=self._parameters.score_dtype,
            requires_grad=True,
        )
        look_up = keep(
            lambda name: ((self._slots[name], self._ranks.gather_shards(self._direction[name])),)
        )
        on_source = look_up if self._ranks.sharded else None
        plan = Plan(look_up, self._memory, self._options, on_source=on_source)
        tracer = Tracer(plan, self._parameters.name, probe)
        tracer.mark_constant(self._root.buffers())
        for call in calls:
            tracer.mark_call(call)
        with tracing(tracer, self._root):
            outputs = self._forward(calls)
            found, scores = gradients(
                outputs, cotangents, self._parameters.trainable, self._ranks.sharded, probe
            )
        tracer.release()
        table = torch.zeros_like(probe) if scores is None else scores
        summed = table.detach().sum(1)
        if self._ranks.sharded:
            summed = self._ranks.sum(summed)
        mine = dict(zip(self._slots, table.detach()[:, list(rows)], strict=True))
        return Comparison(
            mine, twin, dict(zip(self._slots, summed, strict=True)), self._dots(found)
        ), tracer.keys

    def _wrong(self, comparison: Comparison) -> set[str]:
        limit = max(tolerance(p.dtype) for p in self._parameters.trainable.values())
        if torch.is_autocast_enabled(self._parameters.device.type):
            limit = tolerance(torch.bfloat16)
        wrong = [not error <= limit for error in comparison.errors().values()]
        if self._ranks.sharded:
            flags = self._ranks.sum(
                torch.tensor(wrong, dtype=torch.float32, device=self._parameters.device)
            )
            wrong = [bool(flag) for flag in flags]
        return {name for name, bad in zip(comparison.errors(), wrong, strict=True) if bad}


def spread(batch: int) -> list[int]:
    """The rows that the twin looks at.

    >>> spread(3)
    [0, 1, 2]
    """
    return (
        list(range(batch))
        if batch <= MOST_ROWS
        else [i * batch // MOST_ROWS for i in range(MOST_ROWS)]
    )


def refusal(comparison: Comparison, wrong: set[str]) -> str:
    """The text of the refusal, naming the worst parameters."""
    errors = comparison.errors()
    worst = sorted(wrong, key=lambda name: -errors[name])[:3]
    listed = ", ".join(f"{name} ({errors[name]:.1e})" for name in worst)
    return (
        f"the self-check refuses this model: the scores of {len(wrong)} of {len(errors)} parameters differ from those "
        "of the exact "
        f"twin by more than rounding, most of all {listed}. Either the samples are routed or mixed in a way that cannot "
        "be told "
        "from the shapes, or a parameter is used where torch functions are not seen (a custom autograd function). Freeze these "
        "parameters, or train without the engine."
    )
