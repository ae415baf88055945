"""Loops that are not the user's own: Hugging Face Trainer and Lightning, both clipping by
themselves.
"""

import logging
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsight

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 50
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def true_norm() -> float:
    model = net().double()
    (model(X.double()) - Y.double()).square().mean().backward()
    return float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hugging_face_trainer(accumulated: int, tmp_path: Path) -> None:
    import transformers

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - labels).square().mean()}

    model = Wrapped()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        max_steps=3,
        per_device_train_batch_size=16 // accumulated,
        gradient_accumulation_steps=accumulated,
        learning_rate=0.0,
        report_to=[],
        save_strategy="no",
        max_grad_norm=1.0,
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = [{"x": X[i], "labels": Y[i]} for i in range(16)]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, schedule)
    )
    with gradsight.watch(model, optimizer, run_dir=tmp_path / "run"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    steps = list(gradsight.open_run(tmp_path / "run").steps())
    assert len(steps) == 3
    for step in steps:
        assert step.gradient == "true"
        assert step.total_norm == pytest.approx(true_norm(), rel=1e-4)
        assert step.clip_coef == pytest.approx(1 / true_norm(), rel=1e-3)


@pytest.mark.parametrize("algorithm", ["norm", pytest.param("value", marks=pytest.mark.slow)])
def test_lightning(algorithm: str, tmp_path: Path) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            gradient_clip_val=0.5,
            gradient_clip_algorithm=algorithm,
        )
        with gradsight.watch(module, optimizer, run_dir=tmp_path):
            trainer.fit(module, loader)
    steps = list(gradsight.open_run(tmp_path).steps())
    assert len(steps) == 3
    for step in steps:
        assert step.gradient == "true"
        assert step.total_norm == pytest.approx(true_norm(), rel=1e-4)
        assert step.clip_coef == (
            pytest.approx(0.5 / true_norm(), rel=1e-3) if algorithm == "norm" else None
        )
