"""TRL's trainers, with their own defaults: gradient checkpointing, losses in chunks, packing.

TRL is imported by the tests and not by this module: the import takes seconds, also for those who
only collect.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsight
from gradsight.errors import GradsightWarning
from gradsight.integrations.hf import GradsightCallback
from integrations.tiny import PlainLoop, Texts, are_equal, llama, token_loss, tokenizer, weights

pytestmark = pytest.mark.slow

SETTINGS = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


@pytest.fixture(autouse=True, scope="module")
def _no_progress_bars() -> None:
    from datasets import disable_progress_bars

    disable_progress_bars()


def recorded(folder: Path) -> list[Any]:
    return list(gradsight.open_run(folder / "gradsight").steps())


def sft(folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Texts()
    rows = [{"text": texts.of_any_length(), "id": f"text {number}"} for number in range(24)]
    dataset = Dataset.from_list(rows)
    return SFTTrainer(
        llama(),
        args=SFTConfig(output_dir=str(folder), **SETTINGS | changes),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def loss_of_samples(model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """As `token_loss`, but every sample of a pack is run by itself."""
    alone = []
    for batch in batches:
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], batch["input_ids"].shape[1]]
        for start, end in zip(starts, ends, strict=True):
            names = ("input_ids", "labels")
            alone.append({name: batch[name][:, start:end] for name in names})
    return token_loss(model, alone)


def check_steps(trainer: Any, folder: Path, expected: list[Any]) -> None:
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, truth, entry in zip(recorded(folder), expected, logged, strict=True):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(truth.loss, rel=2e-6)
        assert step.total_norm == pytest.approx(truth.norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(min(1.0, 0.2 / truth.norm), rel=1e-4)
        assert step.lr == entry["learning_rate"]


LAYOUTS = {
    "padded": ({}, token_loss),
    "packing": ({"packing": True, "max_length": 32}, loss_of_samples),
    "padding free": ({"padding_free": True, "max_length": None}, loss_of_samples),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sft(layout: Any, tmp_path: Path) -> None:
    changes, loss = layout
    trained = []
    for watched in (False, True):
        callback = GradsightCallback(tmp_path / "gradsight")
        trainer = sft(tmp_path, [callback] if watched else [], **changes)
        plain = PlainLoop(trainer.data_collator)
        trainer.data_collator = plain.collate
        trainer.add_callback(plain)
        trainer.train()
        trained.append(weights(trainer.model))
    assert trainer.args.gradient_checkpointing
    assert are_equal(*trained)
    check_steps(trainer, tmp_path, plain.truths(llama(), loss, [2, 2, 2]))


def test_packs_are_not_scored_and_that_is_said(tmp_path: Path) -> None:
    trainer = sft(tmp_path, [GradsightCallback(ghost=True)], packing=True, max_length=32)
    with pytest.warns(GradsightWarning, match="no samples are scored: .*packing=False"):
        trainer.train()
    assert len(recorded(tmp_path)) == 3
    problems = list(gradsight.open_run(tmp_path / "gradsight").problems())
    assert [problem.key for problem in problems] == ["scores"]


def test_a_loss_in_a_function_of_its_own_is_scored_by_a_pass_for_each_sample(
    tmp_path: Path,
) -> None:
    """tests/matrix compares these scores with a loop over samples."""
    trainer = sft(tmp_path, [GradsightCallback(tmp_path / "gradsight", ghost=True)])
    with pytest.warns(GradsightWarning, match=r"one backward pass each.*lm_head\.weight"):
        trainer.train()
    scores = gradsight.read_scores(tmp_path / "gradsight")
    assert set(scores["step"].to_pylist()) == {0, 1, 2}
    assert all(math.isfinite(score) for score in scores["score"].to_pylist())


def preference_loss(reference: nn.Module, model: nn.Module, batches: Sequence[Any]) -> Tensor:
    """Of the paper: -log sigmoid(0.1 * ((chosen - reference's) - (rejected - reference's)))."""
    losses = []
    for batch in batches:
        ratios = log_probability(model, batch) - log_probability(reference, batch).detach()
        chosen, rejected = ratios.chunk(2)
        losses.append(-nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean())
    return torch.stack(losses).mean()


def log_probability(model: nn.Module, batch: Any) -> Tensor:
    """Of each row's completion."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    taken = batch["input_ids"][:, 1:, None]
    each = logits.log_softmax(-1).gather(-1, taken).squeeze(-1)
    return (each * batch["completion_mask"][:, 1:]).sum(1)


def test_dpo(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    texts = Texts()
    rows = [
        {"prompt": texts.of(4), "chosen": f" {texts.of(5)}", "rejected": f" {texts.of(3)}"}
        for _ in range(24)
    ]
    trained = []
    for callbacks in ([], [GradsightCallback()]):
        trainer = DPOTrainer(
            llama(),
            ref_model=llama(),
            args=DPOConfig(output_dir=str(tmp_path), **SETTINGS),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        plain = PlainLoop(trainer.data_collator)
        trainer.data_collator = plain.collate
        trainer.add_callback(plain)
        trainer.train()
        trained.append(weights(trainer.model))
    assert are_equal(*trained)
    reference = llama().double()

    def loss(model: nn.Module, batches: Sequence[Any]) -> Tensor:
        return preference_loss(reference, model, batches)

    check_steps(trainer, tmp_path, plain.truths(llama(), loss, [2, 2, 2]))


def test_grpo(tmp_path: Path) -> None:
    """Several steps on what was generated once."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    texts = Texts()
    rows = Dataset.from_list([{"prompt": texts.of(4), "id": number} for number in range(24)])
    trained = []
    returned: list[list[float]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._step % 2 == 0:
                returned.append([])
            loss = super().training_step(*args, **kwargs)
            returned[-1].append(float(loss))
            return loss

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    for callbacks in ([], [GradsightCallback()]):
        returned.clear()
        trainer = Watched(
            llama(),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=str(tmp_path),
                num_generations=4,
                num_iterations=2,
                max_completion_length=6,
                **SETTINGS,
            ),
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
        trainer.train()
        trained.append(weights(trainer.model))
    assert are_equal(*trained)
    steps = recorded(tmp_path)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step.step for step in steps] == [0, 1, 2]
    for step, losses, entry in zip(steps, returned, logged, strict=True):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(sum(losses), abs=1e-6)
        assert step.total_norm == pytest.approx(entry["grad_norm"], rel=1e-5)
