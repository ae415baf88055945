"""The tiny models inside trainers: Hugging Face's, TRL's and Lightning's."""

import tempfile
from collections.abc import Callable
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import gradsight
from gradsight.integrations.hf import GradsightCallback as ForHuggingFace
from gradsight.integrations.lightning import GradsightCallback as ForLightning
from integrations.tiny import Texts, llama, token_loss, token_rows, tokenizer
from matrix.nets import (
    LIMIT,
    ROWS,
    STEPS,
    VALIDATION,
    Gradients,
    Net,
    X,
    Y,
    gradients_of,
    scores_of,
    weights_of,
)
from matrix.settings import Loop, Setting, Work

VALIDATION_ROWS = 4
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS // 2,
    "per_device_eval_batch_size": VALIDATION_ROWS,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": LIMIT,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def spoiled(kind: type[Trainer], work: Work) -> type[Trainer]:
    """A Trainer with one bad step, as the setting wants it."""

    class Spoiled(kind):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            given = super().compute_loss(*args, **kwargs)
            factor = work.spoils(self.state.global_step) if self.model.training else 1.0
            if isinstance(given, tuple):
                return given[0] * factor, given[1]
            return given * factor

    return Spoiled


class HuggingFace(Setting):
    """A language model on padded rows; a step has two micro-batches of different token counts."""

    def train(self, work: Work) -> list[Tensor]:
        net = llama()
        work.prepare(net)
        with tempfile.TemporaryDirectory() as folder:
            self.trainer(net, work, folder).train()
        return weights_of(net)

    def trainer(self, net: nn.Module, work: Work, folder: str) -> Trainer:
        rows = token_rows(STEPS * ROWS)
        return spoiled(Trainer, work)(
            net,
            TrainingArguments(folder, train_sampling_strategy="sequential", **SETTINGS),
            train_dataset=rows,
            eval_dataset=rows[:VALIDATION_ROWS],
            callbacks=self.callbacks(work),
        )

    def callbacks(self, work: Work) -> list[Any]:
        if work.watch is None and work.scores is None:
            return []
        if work.scores is not None:
            return [ForHuggingFace(work.scores, ghost=True, quiet=True)]
        options = {"run_dir": None, **(work.watch or {})}
        return [ForHuggingFace(options.pop("run_dir"), **options)]

    # What is true of its first step.

    def batch(self, count: int) -> list[Any]:
        """The first rows, each a batch of its own."""
        rows = token_rows(STEPS * ROWS)[:count]
        return [{name: value[None] for name, value in row.items()} for row in rows]

    def gradients(self) -> Gradients:
        batches = self.batch(ROWS)
        return gradients_of(llama().double(), lambda twin: token_loss(twin, batches))

    def scores(self) -> Tensor:
        twin = llama().double()
        target = self.batch(VALIDATION_ROWS)
        direction = gradients_of(twin, lambda model: token_loss(model, target))
        batches = self.batch(ROWS)
        total = sum(predicted(batch) for batch in batches)
        shares = [gradients_of(twin, share_of(batch, total)) for batch in batches]
        return scores_of(direction, shares)


def predicted(batch: Any) -> int:
    """How many tokens of it count."""
    return int((batch["labels"][:, 1:] != -100).sum())


def share_of(batch: Any, total: int) -> Callable[[nn.Module], Tensor]:
    """A sample's share of a loss that is the mean over all tokens of a step."""
    return lambda model: token_loss(model, [batch]) * (predicted(batch) / total)


class FineTuning(HuggingFace):
    """TRL's SFT with its defaults, but that its rows come in order."""

    def __init__(self, checkpoints_itself: bool = True) -> None:
        """`checkpoints_itself`: its default; beside it our own checkpointing is refused."""
        self._checkpoints_itself = checkpoints_itself

    def uncheckpointed(self) -> HuggingFace:
        return FineTuning(checkpoints_itself=False)

    def trainer(self, net: nn.Module, work: Work, folder: str) -> Trainer:
        # Imported here: TRL takes seconds, and only the slow tier trains with it.
        from datasets import Dataset, disable_progress_bars
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        texts = Texts()
        rows = [{"text": texts.of_any_length()} for _ in range(STEPS * ROWS)]
        dataset = Dataset.from_list(rows)
        return spoiled(SFTTrainer, work)(
            net,
            args=SFTConfig(
                output_dir=folder,
                bf16=False,
                train_sampling_strategy="sequential",
                gradient_checkpointing=self._checkpoints_itself and not work.checkpointed,
                **SETTINGS,
            ),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(VALIDATION_ROWS)),
            processing_class=tokenizer(),
            callbacks=self.callbacks(work),
        )

    def batch(self, count: int) -> list[Any]:
        texts = Texts()
        words = tokenizer()
        batches = []
        for _ in range(count):
            ids = torch.tensor([[*words(texts.of_any_length())["input_ids"], 1]])
            batches.append({"input_ids": ids, "labels": ids})
        return batches


class Module(lightning.pytorch.LightningModule):  # type: ignore[misc]
    """The tiny model; scores are made in a loop of its own."""

    def __init__(self, net: nn.Module, work: Work) -> None:
        super().__init__()
        self.net = net
        self.work = work
        self.automatic_optimization = work.scores is None
        self.engine: gradsight.GhostEngine | None = None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * self.work.spoils(self.global_step)

    def on_train_end(self) -> None:
        if self.engine is not None:
            self.engine.close()


class Scored(Module):
    def on_train_start(self) -> None:
        self.engine = gradsight.GhostEngine(
            self.net,
            Loop().loss,
            VALIDATION,
            optimizer=self.optimizers(),
            run_dir=self.work.scores,
        )

    def training_step(self, batch: Any, index: int) -> Any:
        assert self.engine is not None
        with self.engine.observe():
            self.manual_backward(Loop().loss(self.net, batch))
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class InLightning(Loop):
    """Parameters have the names that the module around them gives them."""

    def train(self, work: Work) -> list[Tensor]:
        net = Net()
        work.prepare(net)
        module = Module(net, work) if work.scores is None else Scored(net, work)
        callbacks = [] if work.watch is None else [ForLightning(**work.watch)]
        with tempfile.TemporaryDirectory() as folder:
            lightning.pytorch.Trainer(
                max_epochs=1,
                accelerator="cpu",
                gradient_clip_val=LIMIT if work.scores is None else None,
                default_root_dir=folder,
                callbacks=callbacks,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module, DataLoader(TensorDataset(X, Y), batch_size=ROWS))
        return weights_of(net)

    def gradients(self) -> Gradients:
        return {f"net.{name}": gradient for name, gradient in super().gradients().items()}


TRAINERS: dict[str, Any] = {
    "HF": HuggingFace(),
    "TRL SFT": FineTuning(),
    "Lightning": InLightning(),
}
