"""Memory in the logs of other people's trainers, by real runs of them."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import warm
from gradsight.integrations.hf import MemoryMonitorCallback as ForHuggingFace
from gradsight.integrations.lightning import MemoryMonitorCallback as ForLightning

PROCESS = {"memory/rss_gb", "memory/peak_rss_gb", "memory/tensor_gb"}
GPU = {"memory/gpu_allocated_gb", "memory/gpu_reserved_gb", "memory/gpu_max_allocated_gb"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Heard(TrainerCallback):
    """What reaches a callback of the user's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


ROWS = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(24)]


def hf_trainer(folder: Path, callbacks: list[TrainerCallback], **changes: Any) -> Trainer:
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | changes
    torch.manual_seed(0)
    model = Net()
    arguments = TrainingArguments(**settings)
    return Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=callbacks)


def memory_in(entry: dict[str, Any]) -> set[str]:
    return {name for name in entry if name.startswith("memory/")}


def test_hugging_face(tmp_path: Path) -> None:
    before, after = Heard(), Heard()
    trainer = hf_trainer(
        tmp_path,
        [before, ForHuggingFace(), after],
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=6,
    )
    result = trainer.train()
    history = trainer.state.log_history
    steps = [entry["step"] for entry in history if "loss" in entry]
    assert steps == [2, 4, 6]
    for entry in history:
        assert memory_in(entry) == (PROCESS if "loss" in entry else set()), entry
    for entry in (entry for entry in history if "loss" in entry):
        assert 0.05 < entry["memory/rss_gb"] <= entry["memory/peak_rss_gb"] < 100
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert [memory_in(entry) for entry in saved["log_history"] if "loss" in entry] == [PROCESS] * 3
    assert [memory_in(logs) for logs in after.logs if "loss" in logs] == [PROCESS] * 3
    assert not any(memory_in(logs) for logs in before.logs)
    # What the Trainer returns is the user's.
    assert not memory_in(result.metrics)
    assert not memory_in(trainer.evaluate())


def test_training_is_not_changed(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [ForHuggingFace()]):
        trainer = hf_trainer(tmp_path, callbacks)
        trainer.train()
        weights.append(trainer.model.layer.weight.detach().clone())
    assert torch.equal(*weights)


def test_on_a_gpu_the_three_names_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = hf_trainer(tmp_path, [ForHuggingFace()])
    figures = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    for number, name in enumerate(figures):
        monkeypatch.setattr(torch.cuda, name, lambda number=number: (number + 1) * 10**9)
    # Only the monitor is told that there is one: it asks through core/devices.py.
    monkeypatch.setattr(
        "torch.cuda.is_available",
        lambda: sys._getframe(2).f_globals["__name__"] == "gradsight.memory.monitor",
    )
    trainer.train()
    assert [memory_in(entry) for entry in trainer.state.log_history[:3]] == [GPU] * 3
    assert trainer.state.log_history[0]["memory/gpu_max_allocated_gb"] == 3.0


def lightning_module(package: Any, *, several: bool = False) -> Any:
    class Module(package.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.automatic_optimization = not several

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.log("train_loss", loss)
            if several:
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD([self.net.weight], lr=0.1)
            if not several:
                return first
            return [first, torch.optim.SGD([self.net.bias], lr=0.1)], []

    return Module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(lightning.pytorch, id="lightning"),
        pytest.param(pytorch_lightning, id="pytorch_lightning", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"several": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lightning(package: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    changes = dict(changes)
    module = lightning_module(package, several=changes.pop("several", False))
    accumulation = changes.get("accumulate_grad_batches", 1)
    logger = package.loggers.CSVLogger(tmp_path)
    trainer = package.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=6 * accumulation,
        log_every_n_steps=2,
        logger=logger,
        callbacks=[ForLightning()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **changes,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=1))
    assert memory_in(trainer.logged_metrics) == PROCESS
    assert 0.05 < float(trainer.logged_metrics["memory/rss_gb"]) < 100
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 3, 5]
    assert all(float(row[name]) > 0 for row in rows for name in PROCESS)


WITHOUT = """
import sys
from gradsight.errors import MissingPackage
for name in ("transformers", "accelerate", "lightning", "lightning.pytorch", "pytorch_lightning"):
    sys.modules[name] = None
import importlib.util
importlib.util.find_spec = lambda name: None
try:
    import gradsight.integrations.{name}
except MissingPackage as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("hf", "transformers", "hf"),
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "hf"),
    ],
)
def test_a_missing_package(name: str, package: str, extra: str) -> None:
    code = WITHOUT.format(name=name)
    done = warm.run(["-c", code], capture_output=True, text=True)
    assert done.stdout == (
        f"gradsight.integrations.{name} needs the package '{package}'. "
        f"Install it with: pip install 'gradsight[{extra}]'\n"
    ), done.stderr
