"""A small training run under a watch on any device, and what it waited for."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsight
from device.clock import Wait
from device.tensors import THE_DEVICE, DeviceTensor, moved, peek

WIDTH, CLASSES, BATCH = 8, 6, 4


class Net(nn.Module):
    """Embedding, two layers, dropout, a norm, and a head tied to the embedding."""

    def __init__(self, dropout: float = 0.0, experts: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.wide = nn.Linear(WIDTH, 12)
        self.narrow = nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight
        self.experts = None
        if experts:
            self.experts = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.drop(self.narrow(self.wide(x).relu()))
        if self.experts is not None:  # the last of them gets nothing
            for expert in self.experts.unbind(0)[:-1]:
                x = x + x @ expert
        out: Tensor = self.head(self.norm(x))
        return out


def cross_entropy(model: nn.Module, batch: Tensor) -> Tensor:
    """The next token's."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@dataclass(frozen=True)
class Settings:
    """One row of the table of waits."""

    log: bool = False
    accumulation: int = 1
    clip: bool = False
    clips_every_pass: bool = False
    """Also between micro-batches; gradients are cleared in place then."""
    scaler: str | None = None
    """"unscaled" before the step, or "inside" a fused one."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.AdamW(ps, 1e-3)
    ghost: dict[str, Any] | None = None
    """Options of an engine, where there is one."""
    one_pass: bool = False
    """Whether losses are the engine's."""
    dump: bool = False
    dropout: float = 0.0
    experts: int = 0
    watch: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """What a run has come to."""

    run_dir: Path
    weights: list[Tensor]
    generators: list[Tensor]
    steps: list[tuple[list[Wait], Counter[bool]]] = field(default_factory=list)

    @property
    def run(self) -> Any:
        return gradsight.open_run(self.run_dir)

    def drains(self, first: int) -> list[tuple[int, Wait]]:
        """Waits from this step on after which the device had nothing to do."""
        return [
            (number, wait)
            for number, (waits, _) in enumerate(self.steps)
            for wait in waits
            if number >= first and wait.drains
        ]

    def numbers(self) -> dict[str, list[float | None]]:
        """All that the contract says is the CPU's."""
        run = self.run
        steps = list(run.steps())
        stats = list(run.parameter_stats())
        found: dict[str, list[float | None]] = {
            name: [getattr(step, name) for step in steps]
            for name in ("loss", "total_norm", "lr", "clip_coef", "scale")
        }
        found["l2"] = [stat.l2 for stat in stats]
        found["max_abs"] = [stat.max_abs for stat in stats]
        found["experts"] = [stat.l2 for stat in run.expert_stats()]
        found["scores"] = [row.score for row in run.scores()]
        for folder in sorted(self.run_dir.glob("gradient_dumper/step*/full_gradients")):
            names = list(gradsight.get_checkpoint_metadata(folder).tensors)
            dumped = gradsight.load_keys(folder, names)
            found[folder.parent.name] = [float(each.norm()) for each in dumped]
        return found


def train(
    settings: Settings, device: torch.device, run_dir: Path, steps: int = 10, watched: bool = True
) -> Trained:
    """Train the net for some steps; without a watch as the twin of one with it."""
    torch.manual_seed(0)
    model = moved(Net(settings.dropout, settings.experts), device)
    data = torch.randint(0, CLASSES, (steps * settings.accumulation + 1, BATCH, 5))
    batches = list(data.to(device).unbind())
    optimizer = settings.optimizer(list(model.parameters()))
    scaler = None
    if settings.scaler is not None:
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)
    result = Trained(run_dir, [], [])
    with contextlib.ExitStack() as stack:
        watch = _watch(settings, model, optimizer, run_dir, stack) if watched else None
        engine = None
        if settings.ghost is not None and watched:
            options = {"optimizer": optimizer, "run_dir": run_dir, **settings.ghost}
            engine = gradsight.GhostEngine(model, cross_entropy, batches[-1], **options)
            stack.callback(engine.close)
        for number in range(steps):
            THE_DEVICE.clock.take()
            for micro in range(settings.accumulation):
                batch = batches[number * settings.accumulation + micro]
                observes = engine is not None and not settings.one_pass
                with engine.observe() if observes else contextlib.nullcontext():
                    if engine is None or observes:
                        loss = cross_entropy(model, batch) / settings.accumulation
                    else:
                        loss = engine.loss(batch) / settings.accumulation
                    (loss if scaler is None else scaler.scale(loss)).backward()
                if settings.clips_every_pass:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            _update(settings, model, optimizer, scaler)
            if watch is not None and settings.log:
                watch.log(loss=loss)
            result.steps.append(THE_DEVICE.clock.take())
    result.weights = [peek(parameter) for parameter in model.parameters()]
    result.generators = [torch.get_rng_state(), *map(Tensor.clone, THE_DEVICE.generators.states)]
    return result


def _watch(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run_dir: Path,
    stack: contextlib.ExitStack,
) -> Any:
    options: dict[str, Any] = {"run_dir": run_dir, **settings.watch}
    if settings.dump:
        options["dump"] = gradsight.GradientDumper(run_dir)
    return stack.enter_context(gradsight.watch(model, optimizer, **options))


def _update(
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
) -> None:
    if scaler is not None and settings.scaler == "unscaled":
        scaler.unscale_(optimizer)
    if settings.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=not settings.clips_every_pass)


def on_device(tensors: Iterator[Tensor]) -> bool:
    """Whether these are of the simulated device."""
    return all(isinstance(each, DeviceTensor) for each in tensors)
