"""The twin with the user's own loss: where the gradient of the loss meets the model's outputs, and
how it splits by rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradsight.core.samples import collecting, usable
from gradsight.core.sharing import without_reduction
from gradsight.errors import UsageError
from gradsight.ghost.gradients import gradients
from gradsight.ghost.observation import Observation
from gradsight.ghost.oracle import TwinError, twin_scores
from gradsight.ghost.parameters import Parameters
from gradsight.ghost.passes import ModelCall, aside, eager, tensors_in
from gradsight.ghost.scores import VerifyReport
from gradsight.ghost.targets import Direction, LossFn, Targets, check_loss

Dots = dict[str, Tensor]
"""<D, gradient> by target."""


@dataclass
class LossTwin:
    """Scores of the samples of a batch by the twin, for the gradient of a loss function."""

    root: nn.Module
    parameters: Parameters
    directions: dict[str, Direction]
    loss: Callable[[], Tensor]

    def scores(self, calls: Sequence[ModelCall]) -> dict[str, Tensor]:
        """<D, g_i> by target: [B] each. The first cut through the graph whose parts add up to the
        whole gradient is taken.
        """
        outputs, inputs, loss = self._forward()
        whole = self._dots([loss], None, keep_graph=True)
        reasons = []
        for find in (self._at_outputs, self._behind_inner_loss, self._at_loss_functions):
            for tensors, cotangents in find(outputs, inputs, loss):
                try:
                    found = self._rows(calls, tensors, cotangents)
                except TwinError as error:
                    reasons.append(str(error))
                    continue
                if all(adds_up(found[name], whole[name]) for name in found):
                    return found
        raise TwinError(
            "the twin cannot take the loss apart by samples: "
            + (
                reasons[0]
                if reasons
                else "no outputs of the model carry the whole of its gradient (a regulariser in the loss?)"
            )
        )

    def _forward(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outputs: list[Tensor] = []
        inputs: list[Tensor] = []
        handle = self.root.register_forward_hook(
            lambda module, args, output: outputs.extend(tensors_in(output))
        )
        try:
            with collecting(inputs):
                loss = self.loss()
        finally:
            handle.remove()
        check_loss(loss, "in verify()")
        return outputs, inputs, loss

    def _at_outputs(
        self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The loss as a function of the model's outputs alone, cut off from the model."""
        leaves: list[Tensor] = []

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            leaves.append(x.detach().requires_grad_())
            return leaves[-1]

        handle = self.root.register_forward_hook(lambda module, args, output: tree_map(cut, output))
        try:
            loss = self.loss()
        finally:
            handle.remove()
        if not loss.requires_grad or not leaves:
            return []
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        rows = [y for y in leaves if y.dim() > 0]
        return [
            (
                rows,
                [
                    torch.zeros_like(y) if g is None else g
                    for y, g in zip(leaves, found, strict=True)
                    if y.dim() > 0
                ],
            )
        ]

    def _behind_inner_loss(
        self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The model computes its loss itself: one of its other outputs is what the loss is made of."""
        rows = [y for y in outputs if usable(y)]
        cuts = []
        for chosen in rows:
            (found,) = torch.autograd.grad(loss, [chosen], retain_graph=True, allow_unused=True)
            if found is not None:
                cuts.append((rows, [found if y is chosen else torch.zeros_like(y) for y in rows]))
        return cuts

    def _at_loss_functions(
        self, outputs: list[Tensor], inputs: list[Tensor], loss: Tensor
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """The model returns nothing but its loss: cut at what its loss functions are given."""
        rows = [y for y in inputs if usable(y)]
        if not rows or any(usable(y) for y in outputs):
            return []
        found = torch.autograd.grad(loss, rows, retain_graph=True, allow_unused=True)
        return [
            (
                rows,
                [torch.zeros_like(y) if g is None else g for y, g in zip(rows, found, strict=True)],
            )
        ]

    def _rows(
        self, calls: Sequence[ModelCall], tensors: list[Tensor], cotangents: list[Tensor]
    ) -> dict[str, Tensor]:
        turns = [(i, True) for i in range(calls[0].batch)]
        table = twin_scores(
            self.root, calls, [t.detach() for t in tensors], cotangents, self._dots, turns
        )
        return {name: torch.stack(values) for name, values in table.items()}

    def _dots(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None,
        keep_graph: bool = False,
    ) -> Dots:
        named = self.parameters.trainable
        found = torch.autograd.grad(
            outputs, list(named.values()), cotangents, allow_unused=True, retain_graph=keep_graph
        )
        sums = {}
        for target, direction in self.directions.items():
            parts = [
                (direction[n].to(torch.float64) * g.to(torch.float64))
                .sum()
                .to(self.parameters.device)
                for n, g in zip(named, found, strict=True)
                if g is not None and n in direction
            ]
            sums[target] = (
                torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
            )
        return sums


def adds_up(parts: Tensor, whole: Tensor) -> bool:
    """Whether the samples' scores add up to <D, the gradient>, up to rounding."""
    return bool((parts.sum() - whole).abs() <= 1e-2 * parts.abs().sum() + 1e-30)


def compare(
    model: nn.Module,
    root: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    targets: Targets,
    parameters: Parameters,
    watch: Callable[[Callable[[ModelCall], None]], Observation],
) -> VerifyReport:
    """The engine's scores of a batch and the twin's, in passes beside training."""
    with aside(root), eager(), without_reduction(model):
        watched = watch(lambda call: None)
        watched.start()
        try:
            loss = loss_fn(model, batch)
            check_loss(loss, "in verify()")
            if not watched.calls:
                raise UsageError("verify(): loss_fn did not call the model")
            probe = watched.tracer.probe
            _, table = gradients([loss], None, parameters.trainable, False, probe)
        finally:
            watched.stop()
        twin = LossTwin(root, parameters, targets.directions, lambda: loss_fn(model, batch)).scores(
            watched.calls
        )
        watched.release()
    found = torch.zeros_like(probe) if table is None else table.detach()
    sums = found.view(len(targets.names), -1, found.shape[1]).sum(1).double().cpu()
    engine = dict(zip(targets.names, sums, strict=True))
    twin = {name: values.double().cpu() for name, values in twin.items()}
    scale = max(*(float(values.abs().max()) for values in twin.values()), 1e-300)
    worst = max(float((engine[name] - twin[name]).abs().max()) for name in twin)
    return VerifyReport(worst / scale, verify_tolerance(parameters), engine, twin)


def verify_tolerance(parameters: Parameters) -> float:
    """What rounding may cause: 1e-9 in fp64, 1e-5 in fp32, 5e-2 where products are rounded to 16
    bits.
    """
    low = any(p.dtype in {torch.bfloat16, torch.float16} for p in parameters.trainable.values())
    if low or torch.is_autocast_enabled(parameters.device.type):
        return 5e-2
    return 1e-9 if parameters.score_dtype == torch.float64 else 1e-5
