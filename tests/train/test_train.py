"""gradsight train in this process: what a run computes, and what it leaves behind."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gradsight
from gradsight.cli import main
from gradsight.errors import GradsightWarning
from gradsight.train.batches import Batch
from gradsight.train.config import from_dict
from gradsight.train.models import model_from_settings
from gradsight.train.progress import Progress
from gradsight.train.run import run_training
from gradsight.train.samples import open_samples
from train.small import DUMP, GHOST, differing, log, run, weights

DTYPES = {
    "float32": ("float32", "float32"),
    "autocast": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
THREE = {"max_steps": 3, "eval_interval": 100, "eval_samples": 1}
FIRST_TIER = (
    ("GradDotProd", False, 1, "float32"),
    ("GradDotProd", True, 2, "autocast"),
    ("Regular", True, 1, "bfloat16"),
)
COMBINATIONS = [
    pytest.param(*case, marks=() if case in FIRST_TIER else pytest.mark.slow)
    for case in itertools.product(("GradDotProd", "Regular"), (False, True), (1, 2), DTYPES)
]


@pytest.fixture(scope="module")
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain run of each type."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        name: run(
            folder, method="Regular", experiment=name, model_dtype=model, train_dtype=train, **THREE
        )
        for name, (model, train) in DTYPES.items()
    }


@pytest.mark.parametrize(("method", "checkpointing", "accumulation", "dtype"), COMBINATIONS)
def test_every_combination_trains_alike(
    method: str,
    checkpointing: bool,
    accumulation: int,
    dtype: str,
    plain_runs: dict[str, Path],
    tmp_path: Path,
) -> None:
    model_dtype, train_dtype = DTYPES[dtype]
    place = run(
        tmp_path,
        method=method,
        gradient_checkpointing=checkpointing,
        gradient_accumulation_steps=accumulation,
        batch_size=4 // accumulation,
        model_dtype=model_dtype,
        train_dtype=train_dtype,
        **THREE | {f"{GHOST}.self_check": True},
    )
    recorded, plain = gradsight.open_run(place), gradsight.open_run(plain_runs[dtype])
    assert len(list(recorded.scores())) == (12 if method == "GradDotProd" else 0)
    if method == "Regular" and accumulation == 1:
        assert differing(weights(place), weights(plain.path)) == [], "checkpointing changes nothing"
    exact = (
        dtype == "float32"
    )  # elsewhere sums of other parts are rounded otherwise, and Adam makes much of little
    pairs = list(zip(recorded.steps(), plain.steps(), strict=True))
    assert len(pairs) == 3
    for ours, theirs in pairs:
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5 if exact else 0.01)
        assert ours.total_norm == pytest.approx(theirs.total_norm, rel=1e-4 if exact else 0.05)


def test_scores_do_not_change_training_with_exact_grad(tmp_path: Path) -> None:
    scored = run(tmp_path, experiment="scored", **{f"{GHOST}.exact_grad": True})
    plain = run(tmp_path, experiment="plain", method="Regular")
    assert differing(weights(scored), weights(plain)) == []
    assert log(scored) == log(plain)


def test_the_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = run(tmp_path, **{f"{DUMP}.enabled": True, f"{DUMP}.step_interval": 2})
    assert {path.name for path in place.iterdir() if not path.name.startswith("run.sqlite-")} == {
        "checkpoints",
        "config.json",
        "grad_dotprods",
        "gradient_dumper",
        "norms.svg",
        "report.html",
        "report.md",
        "run.sqlite",
        "training_log.json",
    }
    assert sorted(path.name for path in (place / "gradient_dumper").iterdir()) == ["step0", "step2"]
    assert [entry["step"] for entry in log(place)] == [0, 2, 4]
    assert log(place)[-1]["val_loss"] < log(place)[0]["val_loss"]
    assert set(log(place)[0]) == {"step", "epoch", "train_loss", "val_loss", "test_loss"}
    recorded = gradsight.open_run(place)
    assert recorded.config["settings"]["train"]["batch_size"] == 4
    assert recorded.config["data"]["domains"] == ["birds", "metals", "rivers"]
    assert {scalar.name for scalar in recorded.memory()} >= {
        "memory/rss_gb",
        "memory/peak_rss_gb",
        "memory/tensor_gb",
    }
    assert [s.value for s in recorded.scalars("eval/val_loss")] == pytest.approx(
        [entry["val_loss"] for entry in log(place)]
    )
    text = capsys.readouterr().out
    assert "step 4/4  losses: train" in text
    assert "tokens/s" in text
    assert str(place / "report.md") in text.replace("\n", "")


def test_scores_belong_to_the_samples_of_the_order(tmp_path: Path) -> None:
    place = run(tmp_path)
    recorded = gradsight.open_run(place)
    samples = open_samples(recorded.config["settings"])
    scores = list(recorded.scores())
    assert all(score.domain == samples.domain(int(score.sample_id)) for score in scores)
    assert len({score.sample_id for score in scores}) == 16, "no sample twice in an epoch"
    assert {score.lr for score in scores} == {step.lr for step in recorded.steps()}


def test_loss_and_scores_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """The first step by hand: the loss of its samples, and the dot products of their gradients with
    the target's.
    """
    place = run(tmp_path, max_steps=1, model__n_layer=1, train_dtype="float32")
    recorded = gradsight.open_run(place)
    settings = recorded.config["settings"]
    samples = open_samples(settings)
    torch.manual_seed(0)
    model = model_from_settings(settings)

    def gradient(tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])

    val = samples.of("val")
    rows = torch.stack([torch.from_numpy(val.tokens(n)) for n in (0, len(val) // 2)])
    _, direction = gradient(rows)
    losses = []
    for score in recorded.scores():
        loss, own = gradient(torch.from_numpy(samples.tokens(int(score.sample_id))).unsqueeze(0))
        losses.append(loss)
        assert score.score == pytest.approx(float(direction @ own) / 4, rel=1e-4)
    assert next(iter(recorded.steps())).loss == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_the_same_settings_give_the_same_run(tmp_path: Path) -> None:
    one, two = run(tmp_path, experiment="one"), run(tmp_path, experiment="two")
    assert differing(weights(one), weights(two)) == []
    assert log(one) == log(two)
    other = run(tmp_path, experiment="other", seed=1)
    assert differing(weights(one), weights(other))


def test_config_json_fed_back_repeats_the_run(tmp_path: Path) -> None:
    one = run(tmp_path, gradient_accumulation_steps=2, train_dtype="bfloat16")
    assert main(["train", "--config", str(one / "config.json"), "--experiment", "again"]) == 0
    again = one.with_name("again")
    assert differing(weights(one), weights(again)) == []
    before, after = (
        gradsight.open_run(place).config["settings"]["train"] for place in (one, again)
    )
    assert after == before | {"experiment": "again"}


def test_a_run_is_not_overwritten_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path)
    (place / "mine.txt").write_text("old")
    run(tmp_path, expect=64)
    assert (
        "holds a run already. Continue it with --resume, replace it with --overwrite"
        in capsys.readouterr().err
    )
    assert (place / "mine.txt").exists()
    (tmp_path / "keep.txt").write_text("no number")
    run(tmp_path, "--overwrite", data_weights=tmp_path / "keep.txt", expect=64)
    assert (place / "mine.txt").exists(), "a wrong option does not cost the old run"
    run(tmp_path, "--overwrite", max_steps=2)
    assert not (place / "mine.txt").exists()
    assert len(list(gradsight.open_run(place).steps())) == 2


def test_eval_only_says_what_it_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "Results" / "a"
    run(tmp_path, "--eval_only")
    assert "Evaluating the initial weights" in capsys.readouterr().out
    assert not place.exists(), "evaluating writes nothing"
    run(tmp_path)
    capsys.readouterr()
    before = sorted(path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file())
    assert (
        main(["train", "--eval_only", "--results_dir", str(place.parent), "--experiment", "a"]) == 0
    )
    text = capsys.readouterr().out
    assert "the weights after 4 steps" in text
    assert f"{log(place)[-1]['test_loss']:.4f}" in text
    assert sorted(path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()) == before


def test_data_weights_decide_what_is_trained_on(tmp_path: Path) -> None:
    one = run(tmp_path, max_steps=1)
    samples = open_samples(gradsight.open_run(one).config["settings"])
    (tmp_path / "keep.txt").write_text("\n".join([samples.stamp, *map(str, range(20, 28))]))
    place = run(tmp_path, experiment="kept", data_weights=tmp_path / "keep.txt", max_steps=4)
    ids = [int(score.sample_id) for score in gradsight.open_run(place).scores()]
    assert sorted(ids[:8]) == sorted(ids[8:]) == list(range(20, 28)), (
        "two epochs of the kept samples"
    )


@pytest.mark.parametrize(("every", "expected"), [(5, [0, 5, 10]), (3, [0, 3, 6, 9, 10]), (0, [])])
def test_gradient_distributions_by_epoch(every: int, expected: list[int], tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(8))))
    quick = {"method": "Regular", "eval_interval": 100, "eval_samples": 1}
    place = run(
        tmp_path,
        data_weights=tmp_path / "keep.txt",
        max_steps=20,
        log_grad_dist_every=every,
        **quick,
    )
    recorded = gradsight.open_run(place)
    name = "gradients/transformer.wte.weight/norm"
    assert [scalar.step for scalar in recorded.scalars(name)] == expected
    logged = [histogram for histogram in recorded.histograms(None) if histogram.step in expected]
    assert len(logged) >= len(expected)
    if expected:
        first = next(iter(recorded.scalars(name)))
        stats = {
            (stat.step, stat.parameter): stat.l2
            for stat in recorded.parameter_stats("transformer.wte.weight")
        }
        assert first.value == pytest.approx(stats[0, "transformer.wte.weight"], rel=1e-5), (
            "before clipping"
        )


def test_learning_rates_and_clipping(tmp_path: Path) -> None:
    place = run(tmp_path, max_steps=6, grad_clip=0.1, method="Regular")
    steps = list(gradsight.open_run(place).steps())
    assert [step.lr for step in steps] == pytest.approx(
        [0.005, 0.01, 0.01, 0.00775, 0.00325, 0.001]
    )
    assert all(step.clip_coef == pytest.approx(0.1 / step.total_norm, rel=1e-3) for step in steps)
    free = run(tmp_path, experiment="free", grad_clip=0, method="Regular")
    assert all(step.clip_coef == pytest.approx(1.0) for step in gradsight.open_run(free).steps())


def test_weights_that_blow_up_do_not_stop_training(tmp_path: Path) -> None:
    with pytest.warns(
        GradsightWarning, match=r"scored.*step 1.*: the gradient of target .* NaN or Inf"
    ):
        place = run(tmp_path, learning_rate=1e30, warmup_steps=0)
    recorded = gradsight.open_run(place)
    assert [step.step for step in recorded.steps()] == [0, 1, 2, 3]
    assert {score.step for score in recorded.scores()} == {0}
    assert "critical" in {finding.severity for finding in recorded.findings()}
    assert log(place)[-1]["val_loss"] is None, "NaN is null"


def test_a_program_may_change_batches(tmp_path: Path) -> None:
    plain = run(tmp_path, experiment="plain")
    settings = from_dict(gradsight.open_run(plain).config["settings"]["train"], "here")
    seen = []

    def shuffled(step: int, batch: Batch) -> Batch:
        seen.append((step, len(batch.sample_ids)))
        return replace(batch, targets=batch.targets.flip(1)) if step == 2 else batch

    assert run_training(replace(settings, experiment="changed"), on_batch=shuffled) == 0
    assert seen == [(step, 4) for step in range(4)]
    pairs = list(
        zip(
            *(gradsight.open_run(plain.with_name(name)).steps() for name in ("plain", "changed")),
            strict=True,
        )
    )
    assert [a.loss == b.loss for a, b in pairs] == [True, True, False, False]


def test_tokens_beyond_the_vocabulary_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.arange(5000, dtype=torch.int16).numpy().astype("<u2").tofile(tmp_path / "web.bin")
    run(tmp_path, data=tmp_path / "web.bin", expect=64)
    assert "but the model knows tokens 0 to 255" in capsys.readouterr().err
    place = run(tmp_path, "--overwrite", data=tmp_path / "web.bin", model__vocab_size=5000)
    assert {score.domain for score in gradsight.open_run(place).scores()} == {"web"}


def test_no_validation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("words " * 25)
    run(tmp_path, data=tmp_path / "short.txt", expect=64)
    assert "the val split has no block of 17 tokens" in capsys.readouterr().err
    place = run(tmp_path, "--overwrite", data=tmp_path / "short.txt", method="Regular")
    assert log(place)[0]["val_loss"] is None


def test_heads_that_do_not_divide_the_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, model__n_head=3, expect=64)
    assert "the width 16 cannot be shared among 3 heads" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "meant"), [("true", True), ("false", False), ("batch", "batch")])
def test_the_flight_recorder_is_as_told(tmp_path: Path, given: str, meant: bool | str) -> None:
    place = run(tmp_path, method="Regular", trainer__callbacks__watch__recorder=given)
    assert gradsight.open_run(place).config["settings"]["watch"]["recorder"] == meant


def test_an_incident_is_run_again_without_a_build_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is known from the run's own settings."""
    place = run(
        tmp_path,
        method="Regular",
        learning_rate=1e25,
        grad_clip=0.0,
        trainer__callbacks__watch__recorder="batch",
        max_steps=3,
    )
    incident = next((place / "incidents").iterdir())
    assert main(["replay", str(incident)]) == 2
    assert "Reproduced: the same as was found in process." in capsys.readouterr().out


def test_the_report_shows_the_samples_with_their_text(tmp_path: Path) -> None:
    report = (run(tmp_path) / "report.md").read_text()
    assert "## Samples: their influence on 'validation'" in report
    assert any(word in report for word in ("heron", "copper", "Elbe"))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_startup_report(
    checkpointing: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, startup_report=True, gradient_checkpointing=checkpointing, max_steps=1)
    text = capsys.readouterr().out
    assert "Device: cpu, memory available:" in text
    assert "Parameters: 10,944\n" in text
    assert "Expected peak memory: " in text
    assert (
        "✓ Gradient checkpointing: ENABLED (full)"
        if checkpointing
        else "✗ Gradient checkpointing: DISABLED"
    ) in text
    assert re.search(r"Recommended batch size: any: all \d+ samples fit in one batch", text)
    assert re.search(r"^step 1/1  loss .*  memory/peak_rss_gb: \d+\.\d{3}$", text, re.MULTILINE)


def test_memory_is_printed_and_kept_when_a_line_is_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run(tmp_path, max_steps=5, log_interval=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "  loss " in line]
    shown = [float(re.search(r"memory/peak_rss_gb: (\d+\.\d{3})$", line)[1]) for line in lines]
    kept = [s for s in gradsight.open_run(place).memory() if s.name == "memory/peak_rss_gb"]
    # Of the step that the line is about: the first steps of a run do not take the most.
    assert [scalar.step for scalar in kept] == [1, 3, 4]
    assert shown == [pytest.approx(scalar.value, abs=5e-4) for scalar in kept]


def test_all_figures_of_a_gpu_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("gpu_allocated_gb", "gpu_reserved_gb", "gpu_max_allocated_gb")
    memory = {f"memory/{name}": number + 0.25 for number, name in enumerate(names)}
    progress = Progress(4, 16, speaks=True)
    progress.advance()
    progress.numbers(1.0, 2.0, memory)
    assert capsys.readouterr().out.endswith(
        "  memory/gpu_allocated_gb: 0.250  memory/gpu_reserved_gb: 1.250"
        "  memory/gpu_max_allocated_gb: 2.250\n"
    )
