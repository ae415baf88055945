"""--select: samples are drawn by the scores so far, the same on any number of ranks, and resumed."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import gradsight
from gradsight.cli import main
from gradsight.errors import UsageError
from gradsight.train.config import Settings
from gradsight.train.samples import open_samples
from gradsight.train.selected_order import SelectedOrder
from launch import torchrun
from train.small import differing, options, run, weights, write_text

LONG = {"max_steps": 12, "eval_interval": 12, "checkpoint_interval": 12}


def ids(place: Path) -> list[tuple[int, int | str]]:
    return [(score.step, score.sample_id) for score in gradsight.open_run(place).scores()]


def test_what_was_selected_is_what_helped(tmp_path: Path) -> None:
    place = run(tmp_path, select="samples", **LONG)
    settings = gradsight.open_run(place).config["settings"]
    assert settings["select"] == settings["train"]["select"] == "samples"
    learnt = weights(place)
    seen = learnt["select/counts"] > 0
    by_sample: Counter[int | str] = Counter()
    for score in gradsight.open_run(place).scores():
        by_sample[score.sample_id] += 1
    assert set(by_sample) == set(torch.nonzero(seen).flatten().tolist())
    order = SelectedOrder("samples", open_samples(settings), 0)
    assert order.take(0, 8) == [each for _, each in ids(place)][:4] + order.take(4, 4)
    order.restore(learnt)
    often = Counter(order.take(0, 20_000))
    helped = learnt["select/sums"] > 0
    mean_helped = sum(often[row] for row in range(len(helped)) if helped[row]) / int(helped.sum())
    assert mean_helped > 1.1 * 20_000 / len(helped)


def test_domains_are_selected_as_a_whole(tmp_path: Path) -> None:
    place = run(tmp_path, select="domains", max_steps=4)
    assert len(weights(place)["select/sums"]) == 3


def test_two_ranks_draw_as_one_and_resume_bit_for_bit(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    # At one learning rate the first half of a run is as the same run cut short.
    common = {
        "select": "samples",
        "max_steps": 6,
        "warmup_steps": 0,
        "optimizer__min_lr_ratio": 1.0,
    }
    place = {"data": tmp_path / "text", "results_dir": tmp_path / "Results", "batch_size": 2}
    straight = options(**common, **place, experiment="straight")
    half = options(**common | {"max_steps": 3}, **place, experiment="again")
    back = ["--resume", f"--results_dir={tmp_path / 'Results'}", "--experiment=again"]
    runs = [straight, half, [*back, "--max_steps=6"]]
    torchrun(Path(__file__).with_name("ranks.py"), json.dumps(runs))
    results = tmp_path / "Results"
    learnt = weights(results / "straight")
    assert differing(learnt, weights(results / "again")) == []
    alone = run(tmp_path, **common, experiment="alone")
    assert Counter(ids(alone)) == Counter(ids(results / "straight"))
    for name in ("select/sums", "select/counts"):
        assert torch.allclose(weights(alone)[name], learnt[name], atol=1e-4)


def test_a_run_may_begin_to_select_and_end_it(tmp_path: Path) -> None:
    place = run(tmp_path, max_steps=2)
    back = ["train", "--resume", f"--results_dir={tmp_path / 'Results'}", "--experiment=a"]
    assert main([*back, "--select=samples", "--max_steps=4"]) == 0
    assert "select/sums" in weights(place)
    assert main([*back, "--eval_only"]) == 0


def test_a_part_of_what_was_learnt_is_refused(tmp_path: Path) -> None:
    samples = open_samples({"data": str(write_text(tmp_path / "text")), "block_size": 16})
    order = SelectedOrder("samples", samples, 0)
    with pytest.raises(UsageError, match="a part is missing"):
        order.restore({"select/sums": order.tensors()["select/sums"]})
    with pytest.raises(UsageError, match="entries"):
        order.restore({name: tensor[:3] for name, tensor in order.tensors().items()})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"method": "Regular"}, "--method Regular makes none"),
        ({"data_weights": "keep.txt"}, "give one of them"),
    ],
)
def test_what_samples_cannot_be_selected_with(wrong: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Settings(select="samples", **wrong)  # type: ignore[arg-type]
