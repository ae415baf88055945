"""What the scores are worth: do they find corrupted samples, know a target's own domain, and save
training steps?

A small GPT learns the bytes of Python's standard library, six of its packages as domains. A tenth
of the training samples is corrupted: their bytes are shuffled. Every sample is scored each time it
is seen, about 13 times, and the scores are added up as `gradsight influence` does: divided by their
typical size in the step, the first tenth of the run left out. Printed are

    the AUC of finding the corrupted samples by score, for plain and for Adam-aware scores
    how the samples of the target's own domain rank among all domains, for a target of one domain
    how many fewer steps a run without the worst-scored samples needs to the held-out loss that
        all samples reach
    the honesty of both kinds of scores: the correlation of predicted and measured changes of the
        target's loss

No step of the scoring knows which samples are corrupted. But this setting was chosen once by
looking at the AUC with seed 0, as the best affordable of three: samples of 128 bytes rather than 64
(0.89 plain, 0.92 Adam-aware), the learning rate, how often the targets (96 rows, 48 of one domain)
are refreshed, the normalisation among six, the tenth that is left out. Other seeds are the fair
test. What counts as worst needs no choice: the samples with a score below 0. The steps saved are
those to a loss on held-out rows, of the corpus's test split, which nothing was scored against.

    python benchmarks/influence_quality.py [--steps 480] [--seed 0] [--quick]
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from small_gpt import GPT, GPTConfig, next_token_loss
from torch import Tensor, nn

from gradsight import GhostEngine
from gradsight.show.influence import Influence, influence_of
from gradsight.store.scores import readable_scores
from gradsight.train.data import Tokens, standard_library

DOMAINS = ("encodings", "pydoc_data", "distutils", "asyncio", "email", "tkinter")
OWN = "email"
LENGTH, BATCH, CORRUPTED = 128, 32, 0.1
RATE, WARM_UP, REFRESH, EVALUATED = 1e-3, 20, 4, 10


@dataclass(frozen=True)
class Setting:
    """One training run: on which samples, scored how, for how long."""

    seed: int
    steps: int
    per_domain: int
    scores: str | None = None
    """ "plain", "adam", or None for no scores."""
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Data:
    """Training samples with their domain, some corrupted, and clean targets."""

    samples: Tensor
    domains: list[str]
    corrupted: npt.NDArray[np.bool_]
    targets: dict[str, Tensor]
    held_out: Tensor


@dataclass(frozen=True)
class Outcome:
    """What one training run gave."""

    curve: list[tuple[int, float]]
    """Steps and held-out loss."""
    seconds: float
    by_target: dict[str, Influence] = field(default_factory=dict)
    honesty: float = float("nan")


def data(seed: int, per_domain: int) -> Data:
    """Random stretches of every domain; a tenth of the training ones with their bytes shuffled."""
    corpus, generator = standard_library(), np.random.default_rng(seed)

    def windows(split: str, domain: str, count: int) -> npt.NDArray[np.int64]:
        return sample_windows(corpus.parts[split][domain], LENGTH + 1, count, generator)

    samples = np.concatenate([windows("train", domain, per_domain) for domain in DOMAINS])
    corrupted = generator.random(len(samples)) < CORRUPTED
    samples[corrupted] = generator.permuted(samples[corrupted], axis=1)
    everywhere = np.concatenate([windows("val", domain, 16) for domain in DOMAINS])
    targets = {"all": torch.from_numpy(everywhere), OWN: torch.from_numpy(windows("val", OWN, 48))}
    held_out = torch.from_numpy(np.concatenate([windows("test", domain, 16) for domain in DOMAINS]))
    return Data(
        torch.from_numpy(samples),
        list(np.repeat(DOMAINS, per_domain)),
        corrupted,
        targets,
        held_out,
    )


def sample_windows(
    text: Tokens, length: int, count: int, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """`count` random stretches of `length` tokens."""
    starts = generator.integers(0, len(text) - length, size=count)
    windows: npt.NDArray[np.int64] = text[starts[:, None] + np.arange(length)].astype(np.int64)
    return windows


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def train(setting: Setting) -> Outcome:
    """One training run from the same weights, on one core."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    given, started = data(setting.seed, setting.per_domain), time.perf_counter()
    model = GPT(GPTConfig(block_size=LENGTH, width=64, heads=4, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    with TemporaryDirectory() as folder:
        engine = None
        if setting.scores is not None:
            engine = scorer(model, optimizer, given, setting.scores, Path(folder))
        curve = loop(model, optimizer, given, setting, engine)
        if engine is None:
            return Outcome(curve, time.perf_counter() - started)
        engine.close()
        table, _ = readable_scores(Path(folder))
        found = {name: influence_of(table, name) for name in given.targets}
        return Outcome(
            curve, time.perf_counter() - started, found, engine.honesty()["all"].correlation
        )


def scorer(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Data, kind: str, folder: Path
) -> GhostEngine:
    return GhostEngine(
        model,
        loss_of,
        targets=given.targets,
        optimizer=optimizer,
        precondition="adam" if kind == "adam" else None,
        refresh_every=REFRESH,
        run_dir=folder,
        save_interval=100,
    )


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Data,
    setting: Setting,
    engine: GhostEngine | None,
) -> list[tuple[int, float]]:
    """Train for a number of steps on shuffled epochs; returns the held-out loss as it went."""
    kept = np.array([row for row in range(len(given.samples)) if row not in setting.left_out])
    order, queue, curve = np.random.default_rng(setting.seed), kept[:0], []
    for step in range(setting.steps):
        if len(queue) < BATCH:
            queue = order.permutation(kept)
        chosen, queue = queue[:BATCH], queue[BATCH:]
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        batch = given.samples[torch.from_numpy(chosen)]
        if engine is None:
            loss_of(model, batch).backward()
        else:
            with engine.observe(
                sample_ids=chosen.tolist(), domains=[given.domains[row] for row in chosen]
            ):
                loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVALUATED == 0:
            with torch.no_grad():
                curve.append((step + 1, float(loss_of(model, given.held_out))))
    return curve


def auc(found: Influence, corrupted: npt.NDArray[np.bool_]) -> float:
    """The chance that a random corrupted sample scores lower than a random clean one."""
    bad = corrupted[found.sample_ids.astype(int)]
    low, high = found.scores[bad], found.scores[~bad]
    return float(
        (low[:, None] < high[None, :]).mean() + 0.5 * (low[:, None] == high[None, :]).mean()
    )


def own_domain(found: Influence) -> str:
    """The rank of the target's own domain, its share of the best tenth, and all domains' scores."""
    names = [domain.name for domain in found.domains]
    best = found.sample_domains[-len(found.scores) // 10 :]
    scores = ", ".join(f"{domain.name} {domain.score:+.2f}" for domain in found.domains)
    share = float((best == OWN).mean())
    rank = f"rank {names.index(OWN) + 1} of {len(names)}"
    chance = f"{1 / len(names):.0%} by chance"
    return f"{rank}, {share:.0%} of the best tenth ({chance})\n    {scores}"


def first_below(run: Outcome, goal: float) -> int | None:
    """The first step at which the held-out loss is no more than the goal; None: never."""
    return next((step for step, loss in run.curve if loss <= goal), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--per-domain", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="few steps: shows that everything runs"
    )
    options = parser.parse_args()
    steps, per_domain = (20, 40) if options.quick else (options.steps, options.per_domain)
    started, corrupted = time.perf_counter(), data(options.seed, per_domain).corrupted
    samples = f"{len(corrupted)} samples of {LENGTH} bytes, {corrupted.sum()} corrupted"
    print(f"{samples}; {steps} steps of {BATCH}")
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        scored = list(
            pool.map(
                train,
                [Setting(options.seed, steps, per_domain, kind) for kind in ("plain", "adam")],
            )
        )
        below = [
            run.by_target["all"].sample_ids[run.by_target["all"].scores < 0].astype(int)
            for run in scored
        ]
        again = pool.map(
            train,
            [
                Setting(options.seed, steps, per_domain, None, frozenset(rows.tolist()))
                for rows in below
            ],
        )
        cleaned = list(again)
    goal, until = min((loss, step) for step, loss in scored[0].curve)
    for kind, run, rows, better in zip(
        ("plain", "Adam-aware"), scored, below, cleaned, strict=True
    ):
        sooner = first_below(better, goal)
        print(f"\n{kind} scores")
        print(f"  AUC of finding the corrupted samples: {auc(run.by_target['all'], corrupted):.3f}")
        print(f"  samples below 0: {len(rows)}, {corrupted[rows].sum()} of them corrupted")
        print(f"  samples of the target's own domain, {OWN}: {own_domain(run.by_target[OWN])}")
        saved = (
            "never" if sooner is None else f"after {sooner} steps ({1 - sooner / until:.0%} fewer)"
        )
        print(f"  held-out loss {goal:.3f}: after {until} steps with all samples,")
        print(f"    {saved} without those below 0")
        with_all, without = run.curve[-1][1], better.curve[-1][1]
        ends = f"{with_all:.3f} with all, {without:.3f} without those"
        print(f"  held-out loss after {steps} steps: {ends}")
        print(f"  honesty: predicted and measured changes of the loss correlate {run.honesty:+.3f}")
    print(f"\n{time.perf_counter() - started:.0f} s in all, two processes of one thread")


if __name__ == "__main__":
    main()
