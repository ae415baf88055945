"""The instruments beside each other in one training run: none changes what another sees."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsight
from gradsight.train.config import ModelShape
from gradsight.train.evaluate import NextTokenLoss
from gradsight.train.models import build_model

STEPS = 6
loss_of = NextTokenLoss("float32", torch.device("cpu"))


def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 32, (size, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(run_dir: Path, everything: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shape = ModelShape(n_layer=2, n_head=2, n_embd=16, vocab_size=32)
    model = build_model("char", shape, block_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    target = batch(generator, 2)
    dumper = engine = None
    if everything:
        gradsight.apply_checkpointing(model, "full")
        dumper = gradsight.GradientDumper(run_dir, step_interval=3)
        engine = gradsight.GhostEngine(
            model,
            loss_of,
            target,
            optimizer=optimizer,
            exact_grad=True,
            run_dir=run_dir,
            save_interval=2,
        )
    with gradsight.watch(model, optimizer, run_dir=run_dir, dump=dumper) as watched:
        for _ in range(STEPS):
            for rows in (3, 2):  # two micro-batches
                samples = batch(generator, rows)
                if engine is not None:
                    with engine.observe(domains=["a"] * rows):
                        loss = loss_of(model, samples) / 2
                        loss.backward()
                else:
                    loss = loss_of(model, samples) / 2
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
    if engine is not None:
        engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_watch_is_a_tracker_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with gradsight.watch(model, run_dir=tmp_path) as watched:
        model(torch.ones(1, 2)).sum().backward()
        monitored = gradsight.MemoryMonitor().sample(watched, 0)
        norms = gradsight.log_gradient_distribution(model, watched, 0)
        watched.step()
    run = gradsight.open_run(tmp_path)
    assert {scalar.name: scalar.value for scalar in run.memory()} == monitored
    assert {scalar.name: scalar.value for scalar in run.scalars()}[
        "gradients/weight/norm"
    ] == norms["weight"]


def test_all_instruments_at_once(tmp_path: Path) -> None:
    together, alone = train(tmp_path / "all", True), train(tmp_path / "plain", False)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)), (
        "the instruments changed training"
    )
    ours, plain = gradsight.open_run(tmp_path / "all"), gradsight.open_run(tmp_path / "plain")
    assert [step.total_norm for step in ours.steps()] == [step.total_norm for step in plain.steps()]
    assert [step.clip_coef for step in ours.steps()] == pytest.approx(
        [step.clip_coef for step in plain.steps()]
    )
    assert [(stat.parameter, stat.l2) for stat in ours.parameter_stats()] == [
        (stat.parameter, stat.l2) for stat in plain.parameter_stats()
    ]
    scores = list(ours.scores())
    assert len(scores) == STEPS * 5
    assert {score.step for score in scores} == set(range(STEPS))
    clipped = {step.step: step.clip_coef for step in ours.steps()}
    assert [score.clip_coef for score in scores] == pytest.approx(
        [clipped[score.step] for score in scores], rel=1e-5
    )
    assert ours.to_arrow("scores").num_rows == len(scores)
    stats = {(stat.step, stat.parameter): stat.l2 for stat in ours.parameter_stats()}
    for step in (0, 3):
        folder = tmp_path / "all" / "gradient_dumper" / f"step{step}" / "full_gradients"
        names = list(gradsight.get_checkpoint_metadata(folder).tensors)
        for name, gradient in zip(names, gradsight.load_keys(folder, names), strict=True):
            assert float(gradient.norm()) == pytest.approx(stats[step, name], rel=1e-5)


@pytest.mark.parametrize("refresh_every", [1, 3])
def test_the_recorder_names_samples_beside_the_engine(tmp_path: Path, refresh_every: int) -> None:
    """The engine's own passes over its target are no part of the step that the flight recorder
    diagnoses.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def loss_fn(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        return (nn.functional.cross_entropy(model(rows[0]), rows[1], reduction="none")).mean()

    target = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    engine = gradsight.GhostEngine(
        model, loss_fn, target, optimizer=optimizer, refresh_every=refresh_every
    )
    with gradsight.watch(model, optimizer, run_dir=tmp_path) as watched:
        for step in range(31):
            rows = (
                torch.randn(5, 4, generator=generator),
                torch.randint(0, 3, (5,), generator=generator),
            )
            if step == 30:
                rows[0][2] *= 1000.0
            ids = [f"sample {step}-{row}" for row in range(5)]
            watched.ids(ids)
            with engine.observe(sample_ids=ids):
                loss_fn(model, rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    (incident,) = gradsight.open_run(tmp_path).incidents()
    assert (incident.step, incident.code) == (30, "GS201")
    assert incident.diagnosis is not None
    assert incident.diagnosis.samples[0].sample_id == "sample 30-2"
    assert incident.diagnosis.samples[0].share == pytest.approx(1.0, abs=1e-3)
    assert incident.diagnosis.micro_batches == 1
    assert not incident.diagnosis.notes
