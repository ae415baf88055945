"""Engines inside other people's trainers: their wrapped optimizers, and their resumed runs."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsight import GhostEngine, GradsightError, read_scores

INPUTS = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
LABELS = (INPUTS.sum(1) > 0).long()
TARGET = (INPUTS[:4] + 0.1, LABELS[:4])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)["loss"]


def plain_scores(run_dir: Path, steps: int, micro: int = 1) -> list[dict[str, Any]]:
    """A plain loop over the same rows."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = GhostEngine(
        model, loss_fn, TARGET, optimizer=optimizer, precondition="adam", run_dir=run_dir
    )
    for step in range(steps):
        for part in range(micro):
            start = (step * micro + part) * 4 % 32
            rows = slice(start, start + 4)
            with engine.observe():
                (loss_fn(model, (INPUTS[rows], LABELS[rows])) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return read_scores(run_dir).to_pylist()


def assert_same(found: Path, expected: list[dict[str, Any]]) -> None:
    rows = read_scores(found).to_pylist()
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row == {**other, "score": pytest.approx(other["score"], rel=1e-4, abs=1e-9)}


def test_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    plain = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, plain)
    assert isinstance(optimizer, AcceleratedOptimizer)
    engine = GhostEngine(
        model,
        loss_fn,
        TARGET,
        optimizer=optimizer,
        precondition="adam",
        run_dir=tmp_path / "accelerate",
    )
    for start in range(0, 32, 4):
        rows = slice(start, start + 4)
        with accelerator.accumulate(model):
            with engine.observe():
                accelerator.backward(loss_fn(model, (INPUTS[rows], LABELS[rows])))
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    assert not plain._optimizer_step_pre_hooks
    assert_same(tmp_path / "accelerate", plain_scores(tmp_path / "plain", 4, micro=2))


def hugging_face_run(run_dir: Path, steps: int, resume: bool) -> None:
    import transformers

    class ScoringTrainer(transformers.Trainer):
        engine: GhostEngine | None = None

        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
            if self.engine is None:
                self.engine = GhostEngine(
                    model,
                    loss_fn,
                    TARGET,
                    optimizer=self.optimizer,
                    precondition="adam",
                    run_dir=run_dir,
                    start_step=self.state.global_step,
                )
            with self.engine.observe():
                return super().training_step(model, inputs, *args)

    pairs = zip(INPUTS, LABELS, strict=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = ScoringTrainer(
        model=model,
        args=transformers.TrainingArguments(
            str(run_dir / "trained"),
            max_steps=steps,
            per_device_train_batch_size=4,
            train_sampling_strategy="sequential",
            max_grad_norm=1e9,
            save_steps=3,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"x": x, "labels": y} for x, y in pairs],
        optimizers=(optimizer, constant),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate's and torch's own
        checkpoint = str(run_dir / "trained" / "checkpoint-3") if resume else None
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.engine.close()


def test_hugging_face_resumes(tmp_path: Path) -> None:
    """Stopped after 5 steps, taken up at the checkpoint of step 3: two steps are made again."""
    run_dir = tmp_path / "hf"
    hugging_face_run(run_dir, 5, resume=False)
    hugging_face_run(run_dir, 8, resume=True)
    assert_same(run_dir, plain_scores(tmp_path / "plain", 8))


def test_lightning(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.core.optimizer import LightningOptimizer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run_dir = tmp_path / "lightning"

    class Module(lightning.LightningModule):
        engine: GhostEngine

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = False

        def on_train_start(self) -> None:
            optimizer = self.optimizers()
            assert isinstance(optimizer, LightningOptimizer)
            self.engine = GhostEngine(
                self.net,
                loss_fn,
                TARGET,
                optimizer=optimizer,
                precondition="adam",
                run_dir=run_dir,
            )

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            with self.engine.observe():
                self.manual_backward(loss_fn(self.net, batch))
            self.optimizers().step()
            self.optimizers().zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    rows = torch.utils.data.TensorDataset(INPUTS, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
    module.engine.close()
    assert_same(run_dir, plain_scores(tmp_path / "plain", 8))


def test_a_wrapped_optimizer_of_another_model() -> None:
    from accelerate import Accelerator

    other = torch.optim.SGD(Net().parameters(), 0.1)
    wrapped = Accelerator(cpu=True).prepare(other)
    with pytest.raises(GradsightError, match="this SGD holds none of the model's parameters"):
        GhostEngine(Net(), loss_fn, TARGET, optimizer=wrapped)
