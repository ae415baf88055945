"""Is it worth training on what helps? Selection by scores against random order and against loss.

A small GPT learns the bytes of Python's standard library, six of its packages as domains; what
counts is the held-out loss of one of them, the target's own domain, and of all six. The corpus is
once as it is, and once with a fifth of the training samples corrupted (their bytes shuffled). Four
ways to choose the samples of a step:

    random     shuffled epochs, each sample once: what everybody does, and the cheapest
    loss       an InfluenceSampler that is told each sample's loss beyond the batch's mean instead
               of its score: hard samples more often
    samples    an InfluenceSampler, told the scores of a GhostEngine against 16 rows of the target,
               whose gradient is computed anew every fourth step
    domains    a DomainMixer, told the same

Everything else is the same: weights, learning rate, batch size. Losses are compared after equal
steps, and after equal time: the time that `samples` took for these steps, scores included, but no
more than 1.6 times the steps. Time is the CPU time of the one thread that a run has, so that a busy
machine does not decide; evaluation does not count. No setting was tuned here: floor, decay and
sharpness are the defaults.

    python benchmarks/selection.py [--steps 120] [--seeds 3] [--quick]
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
import torch.nn.functional as F
from influence_quality import DOMAINS, OWN, sample_windows
from small_gpt import GPT, GPTConfig
from torch import Tensor, nn

from gradsight import DomainMixer, GhostEngine, InfluenceSampler
from gradsight.train.data import standard_library

LENGTH, BATCH, PER_DOMAIN, TARGET_ROWS = 64, 16, 200, 16
RATE, WARM_UP, EVALUATED, REFRESH = 1e-3, 20, 10, 4
CORRUPTED = {"clean": 0.0, "corrupted": 0.2}
WAYS = ("random", "loss", "samples", "domains")
LONGER = 1.6
"""Steps that a run makes for each that is compared: cheap ways get further in equal time."""


@dataclass(frozen=True)
class Setting:
    """One training run."""

    way: str
    corpus: str
    seed: int
    steps: int


@dataclass(frozen=True)
class Data:
    """Training samples with their domains, the target, and what nothing was scored against."""

    samples: Tensor
    domains: list[str]
    target: Tensor
    held_out: dict[str, Tensor]


@dataclass(frozen=True)
class Point:
    """Where a run was at an evaluation."""

    step: int
    seconds: float
    losses: dict[str, float]
    """Of the target's own domain ("target") and of all domains ("all"), held out."""


def data(corpus: str, seed: int) -> Data:
    """Random stretches of every domain, some of the training ones with their bytes shuffled."""
    text, generator = standard_library().parts, np.random.default_rng(seed)

    def rows(
        split: str, domain: str, count: int
    ) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        return sample_windows(text[split][domain], LENGTH + 1, count, generator)

    samples = np.concatenate([rows("train", domain, PER_DOMAIN) for domain in DOMAINS])
    bad = generator.random(len(samples)) < CORRUPTED[corpus]
    samples[bad] = generator.permuted(samples[bad], axis=1)
    everywhere = np.concatenate([rows("test", domain, 32) for domain in DOMAINS])
    held_out = {"target": rows("test", OWN, 96), "all": everywhere}
    return Data(
        torch.from_numpy(samples),
        list(np.repeat(DOMAINS, PER_DOMAIN)),
        torch.from_numpy(rows("val", OWN, TARGET_ROWS)),
        {name: torch.from_numpy(each) for name, each in held_out.items()},
    )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean loss of rows."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def row_losses(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean loss of each row."""
    logits = model(rows[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1)


class Chooser:
    """Chooses the samples of a step in one of the ways, and trains on them."""

    def __init__(
        self, way: str, given: Data, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int
    ) -> None:
        self._given = given
        self._model = model
        self._way = way
        self._sampler: InfluenceSampler | DomainMixer | None = None
        self._engine: GhostEngine | None = None
        if way in ("loss", "samples"):
            self._sampler = InfluenceSampler(given.samples, seed=seed)
        if way == "domains":
            self._sampler = DomainMixer(given.domains, seed=seed)
        if way in ("samples", "domains"):
            self._engine = GhostEngine(
                model,
                loss_of,
                given.target,
                optimizer=optimizer,
                refresh_every=REFRESH,
                self_check=False,  # it costs as much as some steps, and belongs to the first one
            )
        self._rows = self._endless(np.random.default_rng(seed))

    def _endless(self, order: np.random.Generator) -> Iterator[int]:
        while True:
            yield from self._sampler or order.permutation(len(self._given.samples)).tolist()

    def backward(self) -> None:
        """The gradient of the next batch."""
        ids = [next(self._rows) for _ in range(BATCH)]
        batch = self._given.samples[ids]
        if self._engine is not None:
            with self._engine.observe(sample_ids=ids):
                loss_of(self._model, batch).backward()
            self._told(ids, self._engine.scores.total)
        elif self._way == "loss":
            losses = row_losses(self._model, batch)
            losses.mean().backward()
            self._told(ids, losses.detach() - losses.detach().mean())
        else:
            loss_of(self._model, batch).backward()

    def _told(self, ids: list[int], values: Tensor) -> None:
        assert self._sampler is not None
        self._sampler.update(ids, values)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def train(setting: Setting) -> list[Point]:
    """One training run on one core; returns its evaluations."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    given = data(setting.corpus, setting.seed)
    model = GPT(GPTConfig(block_size=LENGTH, width=64, heads=4, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    chooser = Chooser(setting.way, given, model, optimizer, setting.seed)
    points, seconds = [], 0.0
    for step in range(1, int(LONGER * setting.steps) + 1):
        started = time.process_time()
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        chooser.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.process_time() - started
        if step % EVALUATED == 0:
            with torch.no_grad():
                losses = {name: float(loss_of(model, x)) for name, x in given.held_out.items()}
            points.append(Point(step, seconds, losses))
    chooser.close()
    return points


def after_steps(run: list[Point], steps: int) -> Point:
    return next(point for point in run if point.step == steps)


def after_seconds(run: list[Point], seconds: float) -> Point:
    """The last evaluation within the time."""
    return [point for point in run if point.seconds <= seconds or point is run[0]][-1]


def show(runs: dict[tuple[str, str, int], list[Point]], seeds: int, steps: int) -> None:
    """Losses by corpus and way: the mean over seeds, and each seed's difference to random."""
    for corpus in CORRUPTED:
        print(f"\n{corpus} corpus; held-out loss, and by seed the difference to random")
        for what in ("equal steps", "equal time"):
            for domain in ("target", "all"):
                print(f"  {what}, {domain}")
                chosen: dict[str, list[float]] = {}
                for way in WAYS:
                    chosen[way] = []
                    for seed in range(seeds):
                        point = after_steps(runs[way, corpus, seed], steps)
                        if what == "equal time":
                            budget = after_steps(runs["samples", corpus, seed], steps).seconds
                            point = after_seconds(runs[way, corpus, seed], budget)
                        chosen[way].append(point.losses[domain])
                    pairs = zip(chosen[way], chosen["random"], strict=True)
                    apart = "  ".join(f"{own - plain:+.3f}" for own, plain in pairs)
                    print(f"    {way:8} {np.mean(chosen[way]):.3f}   {apart}")
    print("\nseconds of CPU per step, against random")
    for way in WAYS:
        ratios = [
            after_steps(runs[way, corpus, seed], steps).seconds
            / after_steps(runs["random", corpus, seed], steps).seconds
            for corpus in CORRUPTED
            for seed in range(seeds)
        ]
        print(f"  {way:8} {np.median(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that all runs")
    options = parser.parse_args()
    steps, seeds = (20, 1) if options.quick else (options.steps, options.seeds)
    settings = [
        Setting(way, corpus, seed, steps)
        for seed in range(seeds)
        for corpus in CORRUPTED
        for way in WAYS
    ]
    started = time.perf_counter()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        found = list(pool.map(train, settings))
    print(f"{steps} steps of {BATCH} samples, {seeds} seeds, {6 * PER_DOMAIN} training samples")
    keys = [(each.way, each.corpus, each.seed) for each in settings]
    show(dict(zip(keys, found, strict=True)), seeds, steps)
    print(f"\n{time.perf_counter() - started:.0f} s in all, processes of one thread")


if __name__ == "__main__":
    main()
