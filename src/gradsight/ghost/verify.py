"""The twin with the user's own loss: its gradient at the model's outputs, split by rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradsight.core.autocast import autocast_dtype
from gradsight.core.beside import beside_training, eager
from gradsight.core.per_sample import BatchOutputs
from gradsight.core.samples import SplitCall, can_have_rows, collecting_loss_inputs, tensors_in
from gradsight.core.shards import local_part
from gradsight.core.sharing import ModelGroup, reshard, without_reduction
from gradsight.errors import UsageError
from gradsight.ghost.arguments import calling_loss_fn
from gradsight.ghost.directions import Direction
from gradsight.ghost.gradients import dot, gradients
from gradsight.ghost.observation import Observation
from gradsight.ghost.oracle import TwinError, twin_scores
from gradsight.ghost.parameters import ScoredParameters, TypesMet
from gradsight.ghost.scores import VerifyReport
from gradsight.ghost.selfcheck import rounding, turns_of
from gradsight.ghost.targets import LossFn, Targets, check_loss

Dots = dict[str, Tensor]
"""<D, gradient> by target."""
Cut = tuple[list[Tensor], list[Tensor]]
"""A cut through the graph of a loss: tensors with rows of samples, and their gradients."""


@dataclass(frozen=True, slots=True)
class LossTwin:
    """The twin's scores of a batch, for the gradient of a loss function."""

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    parameters: ScoredParameters
    directions: dict[str, Direction]
    group: ModelGroup

    def scores(self, calls: Sequence[SplitCall]) -> dict[str, Tensor]:
        """<D, g_i> by target, [B] each, at the first cut whose parts add up to the gradient."""
        # Not a loop over loss_fn of single rows: with ignored labels their mean is another loss.
        outputs, inputs, loss = self._forward()
        whole = self._dots([loss], None, keep_graph=True)
        if self.group.sharded:  # that pass has let go of its graph
            outputs, inputs, loss = self._forward()
        reasons = []
        for find in (self._at_outputs, self._behind_inner_loss, self._at_loss_functions):
            for tensors, cotangents in find(outputs, inputs, loss):
                try:
                    scores = self._rows(calls, tensors, cotangents)
                except TwinError as error:
                    reasons.append(str(error))
                    continue
                if all(self._adds_up(scores[name], whole[name]) for name in scores):
                    return scores
        reasons.append(
            "no outputs of the model carry the whole of its gradient (a regulariser in the loss?)"
        )
        raise TwinError(f"the twin cannot take the loss apart by samples: {reasons[0]}")

    def _loss(self) -> Tensor:
        return self.loss_fn(self.model, self.batch)

    def _forward(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        handle = self.parameters.root.register_forward_hook(
            lambda module, args, output: outputs.extend(tensors_in(output))
        )
        try:
            with collecting_loss_inputs(inputs), TypesMet(self.parameters):
                loss = self._loss()
        finally:
            handle.remove()
        check_loss(loss, "in verify()")
        return outputs, inputs, loss

    def _at_outputs(self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor) -> list[Cut]:
        """The loss as a function of the model's outputs alone, cut off from the model."""
        leaves: list[Tensor] = []

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            leaves.append(x.detach().requires_grad_())
            return leaves[-1]

        handle = self.parameters.root.register_forward_hook(
            lambda module, args, output: tree_map(cut, output)
        )
        try:
            loss = self._loss()
        finally:
            handle.remove()
        if not loss.requires_grad or not leaves:
            return []
        slopes = _or_zeros(leaves, torch.autograd.grad(loss, leaves, allow_unused=True))
        rows = [number for number, y in enumerate(leaves) if y.dim() > 0]
        return [([leaves[i] for i in rows], [slopes[i] for i in rows])]

    def _behind_inner_loss(
        self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor
    ) -> list[Cut]:
        """The model computes its loss itself, of one of its other outputs."""
        rows = [y for y in outputs if can_have_rows(y)]
        cuts = []
        for chosen in rows:
            (slope,) = torch.autograd.grad(loss, [chosen], retain_graph=True, allow_unused=True)
            if slope is not None:
                cuts.append((rows, [slope if y is chosen else torch.zeros_like(y) for y in rows]))
        return cuts

    def _at_loss_functions(
        self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor
    ) -> list[Cut]:
        """The model returns nothing but its loss: cut at what its loss functions are given."""
        rows = [y for y in inputs if can_have_rows(y)]
        if not rows or any(can_have_rows(y) for y in outputs):
            return []
        slopes = torch.autograd.grad(loss, rows, retain_graph=True, allow_unused=True)
        return [(rows, _or_zeros(rows, slopes))]

    def _rows(
        self, calls: Sequence[SplitCall], tensors: list[Tensor], cotangents: list[Tensor]
    ) -> dict[str, Tensor]:
        turns = turns_of(range(calls[0].batch), self.group)
        rows = [t.detach() for t in tensors]
        within = rounding(self.parameters)
        batch = BatchOutputs(rows, cotangents, calls[0].batch, within)
        table = twin_scores(self.parameters.root, calls, batch, self._dots, turns)
        mine = [turn for turn, (_, counts) in enumerate(turns) if counts]
        return {name: torch.stack(values)[mine] for name, values in table.items()}

    def _adds_up(self, scores: Tensor, whole: Tensor) -> bool:
        """Whether scores add up; of a sharded model those of all processes."""
        if not self.group.sharded:
            return adds_up(scores, whole)
        sums = self.group.sum(torch.stack([scores.sum(), scores.abs().sum()]))
        return bool((sums[0] - whole.to(sums)).abs() <= 1e-2 * sums[1] + 1e-30)

    def _dots(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None,
        keep_graph: bool = False,
    ) -> Dots:
        sharded = self.group.sharded
        slopes, _ = gradients(
            outputs, cotangents, self.parameters.trainable, sharded, keep_graph=keep_graph
        )
        sums = {}
        for target, direction in self.directions.items():
            parts = [
                dot(_widest(direction[n]), _widest(g)) for n, g in slopes.items() if n in direction
            ]
            total = torch.zeros((), dtype=torch.float64)
            if parts:
                total = torch.stack([part.to(self.parameters.device) for part in parts]).sum()
            if sharded:
                # fully_shard averages gradients over the processes: the factor undoes it.
                total = self.group.sum(total) * self.group.size
            sums[target] = total
        return sums


def _or_zeros(tensors: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients of these tensors, zeros for those that autograd has none for."""
    pairs = zip(tensors, slopes, strict=True)
    return [torch.zeros_like(y) if slope is None else slope for y, slope in pairs]


def _widest(tensor: Tensor) -> Tensor:
    part = local_part(tensor)
    return part.to(torch.promote_types(part.dtype, torch.float64))


def adds_up(parts: Tensor, whole: Tensor) -> bool:
    """Whether the samples' scores add up to <D, the gradient>, up to rounding."""
    return bool((parts.sum() - whole).abs() <= 1e-2 * parts.abs().sum() + 1e-30)


def compare_with_twin(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    targets: Targets,
    observation: Observation,
    parameters: ScoredParameters,
) -> VerifyReport:
    """The engine's scores of a batch and the twin's, in passes beside training."""
    with beside_training(parameters.root, evaluating=True), eager(), without_reduction(model):
        try:
            observation.start()
            with calling_loss_fn("in verify()", batch):
                loss = loss_fn(model, batch)
            check_loss(loss, "in verify()")
            if not observation.calls:
                raise UsageError("verify(): loss_fn did not call the model")
            probe = observation.tracer.probe
            if observation.tracer.needs_passes_by_sample:
                table: Tensor | None = observation.score_by_sample([loss])
            else:
                sharded = targets.group.sharded
                _, table = gradients([loss], None, parameters.trainable, sharded, probe)
        finally:
            observation.stop()
        reshard(model)
        twin = LossTwin(model, loss_fn, batch, parameters, targets.directions, targets.group)
        exact = twin.scores(observation.calls)
        observation.release()
        reshard(model)
    scores = torch.zeros_like(probe) if table is None else table.detach()
    sums = scores.view(len(targets.names), -1, scores.shape[1]).sum(1).double().cpu()
    engine = dict(zip(targets.names, sums, strict=True))
    exact = {name: values.double().cpu() for name, values in exact.items()}
    scale = max(*(float(values.abs().max()) for values in exact.values()), 1e-300)
    worst = max(float((engine[name] - exact[name]).abs().max()) for name in exact)
    return VerifyReport(worst / scale, verify_tolerance(parameters), engine, exact)


def verify_tolerance(parameters: ScoredParameters) -> float:
    """What rounding may cause: 1e-9 in fp64, 1e-5 in fp32, 5e-2 with products in 16 bits."""
    types = {p.dtype for p in parameters.trainable.values()} | parameters.types_met
    low = any(each in {torch.bfloat16, torch.float16} for each in types)
    if low or autocast_dtype(parameters.device.type) is not None:
        return 5e-2
    return 1e-9 if types == {torch.float64} else 1e-5
