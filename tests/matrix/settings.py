"""Ways to train the tiny model in a loop of one's own, with torch alone."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gradsight
from matrix.nets import (
    LIMIT,
    ROWS,
    STEPS,
    VALIDATION,
    Batch,
    Gradients,
    Net,
    double_loss,
    gradients_of,
    loss_of,
    rows_of_step,
    scores_of,
    single_rows,
    weights_of,
)


@dataclass(frozen=True)
class Work:
    """What is wanted of one training run."""

    watch: dict[str, Any] | None = None
    """Options of the watch; None: unwatched."""
    scores: Path | None = None
    """Where samples' scores go; None: none are made."""
    checkpointed: bool = False
    bad_step: int | None = None
    """Whose loss is NaN."""

    def spoils(self, step: int) -> float:
        """A factor of the loss."""
        return float("nan") if step == self.bad_step else 1.0

    def prepare(self, net: nn.Module) -> None:
        if self.checkpointed:
            gradsight.apply_checkpointing(net)


class Setting(Protocol):
    """A way to train, and what is true of its first step."""

    tolerance: float = 1e-5

    def train(self, work: Work) -> list[Tensor]:
        """All steps; the weights after them."""

    def gradients(self) -> Gradients:
        """By parameter, before clipping."""

    def scores(self) -> Tensor:
        """Of all samples."""

    def clip_coef(self, norm: float) -> float:
        return min(1.0, LIMIT / norm)

    def uncheckpointed(self) -> "Setting":
        """The same without activation checkpointing."""
        return self


class Loop(Setting):
    """A plain loop. Settings that differ from it change one of its parts."""

    micro_batches = 1

    def train(self, work: Work) -> list[Tensor]:
        net = self.changed(Net())
        work.prepare(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = self.wrapped(net, optimizer)
        with contextlib.ExitStack() as stack:
            if work.watch is not None:
                stack.enter_context(self.opened(model, optimizer, work.watch))
            engine = None
            if work.scores is not None:
                engine = self.engine(model, optimizer, work.scores)
                stack.callback(engine.close)
            for step in range(STEPS):
                for part in range(self.micro_batches):
                    with engine.observe() if engine else contextlib.nullcontext():
                        loss = self.loss(model, self.rows(step, part)) * work.spoils(step)
                        self.backward(model, loss / self.micro_batches, part)
                self.update(model, optimizer)
        return weights_of(net)

    # Its parts.

    def changed(self, net: nn.Module) -> nn.Module:
        return net

    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return net, optimizer

    def opened(self, model: Any, optimizer: Any, options: dict[str, Any]) -> Any:
        return gradsight.watch(model, optimizer, **options)

    def engine(self, model: Any, optimizer: Any, run_dir: Path) -> gradsight.GhostEngine:
        return gradsight.GhostEngine(
            model, self.loss, VALIDATION, optimizer=optimizer, run_dir=run_dir
        )

    def rows(self, step: int, part: int) -> Batch:
        """Of one micro-batch."""
        x, y = rows_of_step(step)
        count = ROWS // self.micro_batches
        return x[part * count : (part + 1) * count], y[part * count : (part + 1) * count]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return loss_of(model, batch)

    def backward(self, model: Any, loss: Tensor, part: int) -> None:
        loss.backward()

    def update(self, model: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()

    # What is true of its first step.

    def twin(self) -> tuple[nn.Module, Callable[[nn.Module, Batch], Tensor]]:
        """A model and its loss in the precision of the truth."""
        return self.changed(Net()).double(), double_loss

    def gradients(self) -> Gradients:
        model, loss = self.twin()
        return gradients_of(model, lambda twin: loss(twin, rows_of_step(0)))

    def scores(self) -> Tensor:
        model, loss = self.twin()
        direction = gradients_of(model, lambda twin: loss(twin, VALIDATION))
        shares = [
            gradients_of(model, lambda twin, row=row: loss(twin, row) / ROWS)
            for row in single_rows(rows_of_step(0))
        ]
        return scores_of(direction, shares)


class Accumulation(Loop):
    micro_batches = 2


class BFloat16(Loop):
    """The truth is plain training's, in bfloat16 too."""

    # Samples by themselves are rounded in another way than together.
    tolerance = 2e-2

    def loss(self, model: Any, batch: Batch) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        # The loss is in bfloat16 too.
        return nn.functional.cross_entropy(outputs, y)

    def twin(self) -> Any:
        return self.changed(Net()), self.loss


class Scaled(Loop):
    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return net, optimizer

    def backward(self, model: Any, loss: Tensor, part: int) -> None:
        self.scaler.scale(loss).backward()

    def update(self, model: Any, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


class Compiled(Loop):
    def wrapped(self, net: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return torch.compile(net, backend="aot_eager"), optimizer


class Recomputed(Loop):
    """torch's own activation checkpointing."""

    def uncheckpointed(self) -> Loop:
        return Loop()

    def changed(self, net: Any) -> nn.Module:
        for block in net.blocks:
            block.recomputes = True
        return net  # type: ignore[no-any-return]


LOOPS: dict[str, Loop] = {
    "plain": Loop(),
    "accumulation": Accumulation(),
    "bf16": BFloat16(),
    "GradScaler": Scaled(),
    "compile": Compiled(),
    "activation checkpointing": Recomputed(),
}
