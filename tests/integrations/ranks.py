"""Two ranks train through each door; rank 0 compares with a float64 loop over the whole batch.

Started by torchrun: python -m torch.distributed.run ranks.py FOLDER
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import Trainer, TrainingArguments

import gradsight
from gradsight.integrations import accelerate as accelerate_door
from gradsight.integrations.door import Door
from gradsight.integrations.hf import GradsightCallback as ForHuggingFace
from gradsight.integrations.lightning import GradsightCallback as ForLightning
from integrations.tiny import llama, token_loss, token_rows, truth

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(1))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def check(folder: Path, name: str, expected: Any, norm_limit: float) -> None:
    """The first step; both were made, and seen by rank 0 alone."""
    steps = list(gradsight.open_run(folder / name).steps())
    assert [step.step for step in steps] == [0, 1], steps
    for step in steps:
        assert step.gradient == "true", (name, step)
    first = steps[0]
    assert abs(first.loss - expected.loss) < 1e-6 * expected.loss, (name, first, expected)
    assert abs(first.total_norm - expected.norm) < 1e-5 * expected.norm, (name, first, expected)
    assert abs(first.clip_coef - norm_limit / expected.norm) < 1e-4, (name, first, expected)
    print(f"{name} is right")


def hugging_face(folder: Path) -> None:
    rows = token_rows(16)
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        llama(), arguments, train_dataset=rows, callbacks=[ForHuggingFace(folder / "hf")]
    ).train()
    if dist.get_rank() == 0:
        batch = {name: torch.stack([row[name] for row in rows[:8]]) for name in rows[0]}
        check(folder, "hf", truth(llama(), lambda model: token_loss(model, [batch])), 0.1)


def accelerate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = classifier()
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    with accelerate_door.watch(accelerator, model, optimizer, run_dir=folder / "accelerate"):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    check_classifier(folder, "accelerate")


def check_classifier(folder: Path, name: str) -> None:
    if dist.get_rank() == 0:
        expected = truth(
            classifier(),
            lambda model: nn.functional.cross_entropy(model(X[:8].double()), Y[:8]),
        )
        check(folder, name, expected, 0.1)


class Module(lightning.pytorch.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def training_step(self, batch: Any, index: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_lightning(folder: Path) -> None:
    trainer = lightning.pytorch.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        default_root_dir=folder,
        callbacks=[ForLightning(folder / "lightning")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(X, Y)
    in_order = DistributedSampler(data, shuffle=False)
    trainer.fit(Module(), DataLoader(data, batch_size=2, sampler=in_order))
    check_classifier(folder, "lightning")


def sharded(folder: Path) -> None:
    """FSDP2, which keeps gradients to itself until the last micro-batch; FSDP1 is refused."""
    mesh = init_device_mesh("cpu", (2,))
    net = classifier()
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    door = Door(folder / "fsdp2", {})
    door.open(net, optimizer)
    for step in range(2):
        for part in range(2):
            first = 8 * step + 4 * dist.get_rank() + 2 * part
            rows = slice(first, first + 2)
            net.set_requires_gradient_sync(part == 1)
            (nn.functional.cross_entropy(net(X[rows]), Y[rows]) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    door.close()
    check_classifier(folder, "fsdp2")
    flat = FullyShardedDataParallel(classifier(), device_id=torch.device("cpu"))
    with pytest.raises(gradsight.GradsightError, match="Use FSDP2"):
        gradsight.watch(flat, torch.optim.SGD(flat.parameters(), lr=0.1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hugging_face(Path(sys.argv[1]))
    accelerate(Path(sys.argv[1]))
    with_lightning(Path(sys.argv[1]))
    sharded(Path(sys.argv[1]))
    dist.destroy_process_group()
