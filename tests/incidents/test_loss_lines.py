"""The line that made the guilty operation of a loss, in training loops of all kinds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsight
from gradsight.core.guard import Guard
from gradsight.incidents.loss_lines import LossLines

HEAD = """
import sys, torch
from torch import nn
import torch.nn.functional as F
import gradsight
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS, BAD = 12, 10
model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
logits = nn.Linear(4, 3)
opt = torch.optim.SGD([*model.parameters(), *logits.parameters()], lr=1e-3)
nan = torch.tensor(float("nan"))
def batches(of=model):
    with gradsight.watch(of, opt, run_dir=sys.argv[1], quiet=True):
        for step in range(STEPS):
            opt.zero_grad()
            bad = step >= BAD
            # So far out that the softmax is exactly 0 for most classes.
            x = torch.randn(8, 4) * (1e5 if bad else 1.0)
            yield step, x, torch.randint(0, 3, (8,)), bad
            opt.step()
"""
SCRIPTS = {
    "a log": (
        "log",
        """
for step, x, y, bad in batches():
    p = model(x)
    keep = p.mean()
    loss = -(p.log() * F.one_hot(y, 3)).mean()  # guilty
    loss = loss / 2
    loss.backward()
""",
    ),
    "a constant": (
        "mul",
        """
for step, x, y, bad in batches(logits):
    loss = F.cross_entropy(logits(x), y)
    loss = loss * torch.log(torch.tensor(-1.0 if bad else 2.0))  # guilty
    loss.backward()
""",
    ),
    "a function": (
        "log",
        """
def criterion(p, y):
    chosen = p.gather(1, y[:, None])
    logs = chosen.log()  # guilty
    return -logs.mean()

for step, x, y, bad in batches():
    p = model(x)
    loss = criterion(p, y)
    loss.backward()
""",
    ),
    "a module": (
        "mse_loss",
        """
class Criterion(nn.Module):
    def forward(self, p, y):
        target = F.one_hot(y, 3).float()
        if y[0] < 0:
            target = target
        first = F.mse_loss(p, target * self.factor)  # guilty
        return first + p.sum().square()
criterion = Criterion()
for step, x, y, bad in batches():
    criterion.factor = float("nan") if bad else 1.0
    total = criterion(model(x), y)
    total.backward()
""",
    ),
    "a criterion of torch's": (
        "mse_loss",
        """
criterion = nn.MSELoss()
for step, x, y, bad in batches():
    p = model(x)
    target = F.one_hot(y, 3) * (nan if bad else 1.0)
    loss = criterion(p, target)  # guilty
    loss.backward()
""",
    ),
    "micro-batches": (
        "sqrt",
        """
for step, x, y, bad in batches():
    for half in (x[:4], x[4:]):
        p = model(half)
        distance = p - (p.detach() if bad and half is not x else 0)
        loss = distance.square().sum(-1).sqrt().mean()  # guilty
        (loss / 2).backward()
""",
    ),
    "two calls": (
        "sqrt",
        """
for step, x, y, bad in batches():
    one = model(x)
    one = one + 0.0
    two = model(x if bad else x + 1)
    gap = (one - two).square().sum(-1).sqrt()  # guilty
    loss = 1 / (1 + gap.mean())
    loss.backward()
""",
    ),
    "a single line": (
        "log",
        """
for step, x, y, bad in batches():
    model(x).log().mean().backward()  # guilty
""",
    ),
    "the very first step": (
        "log",
        """
BAD = 0
for step, x, y, bad in batches():
    p = model(x)
    loss = p.log()  # guilty
    loss = loss.mean()
    loss.backward()
""",
    ),
    "lightning": (
        "log",
        """
import lightning, logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, index):
        p = self.net(batch[0] * (1e5 if index >= BAD else 1.0))
        return -p.log().mean()  # guilty
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=1e-3)
    def on_train_start(self):
        self.watch = gradsight.watch(model, self.trainer.optimizers[0], run_dir=sys.argv[1])
    def on_train_end(self):
        self.watch.close()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=8)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), data)
""",
    ),
    "transformers": (
        "log",
        """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, x=None, labels=None):
        return {"p": self.net(x)}
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):
        p = model(**inputs)["p"]
        return -(p.log() * F.one_hot(inputs["labels"], 3)).mean()  # guilty
    def _get_train_sampler(self, *given):
        return torch.utils.data.SequentialSampler(rows)
class Watching(TrainerCallback):
    def on_train_begin(self, *told, model=None, optimizer=None, **more):
        self.watch = gradsight.watch(model, optimizer, run_dir=sys.argv[1])
    def on_train_end(self, *told, **more):
        self.watch.close()
rows = [{"x": torch.randn(4) * (1e5 if i >= 80 else 1), "labels": i % 3} for i in range(96)]
settings = TrainingArguments(
    sys.argv[1] + "-out", per_device_train_batch_size=8, max_steps=12, report_to=[], use_cpu=True,
    disable_tqdm=True, save_strategy="no",
)
Mine(Net(), settings, train_dataset=rows, callbacks=[Watching()]).train()
""",
    ),
}


def named(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The operation that the incident of a script names."""
    monkeypatch.setattr(sys, "argv", [str(script), str(folder)])
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    (incident, *_) = sorted((folder / "incidents").iterdir())
    document = json.loads((incident / "incident.json").read_text())
    operation: dict[str, Any] = document["incident"]["diagnosis"]["operation"]
    return operation


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_line_that_made_it_is_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, text = SCRIPTS[kind]
    script = tmp_path / "train.py"
    script.write_text(HEAD + text)
    lines = script.read_text().splitlines()
    (guilty,) = [number for number, line in enumerate(lines, 1) if line.endswith("# guilty")]
    operation = named(script, tmp_path / "run", monkeypatch)
    assert operation["phase"] == "loss"
    assert (operation["operation"], operation["place"]) == (expected, f"{script}:{guilty}")
    assert operation["source"] == lines[guilty - 1].strip()


def test_a_loss_never_seen_before_gives_the_lines_it_is_among(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
for step, x, y, bad in batches(logits):
    z = logits(x)
    loss = z.square().mean()
    if bad:
        loss = loss + (z - z).abs().exp().log().rsqrt().mean()
    loss.backward()
"""
    script = tmp_path / "train.py"
    script.write_text(HEAD + text)
    first = len(HEAD.splitlines()) + 3
    operation = named(script, tmp_path / "run", monkeypatch)
    assert operation["place"] == f"{script}:{first}-{first + 4}"
    assert operation["source"] is None


def test_several_lines_that_may_have_done_it_are_all_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
for step, x, y, bad in batches(logits):
    z = logits(x)
    near = (z * (0.0 if bad else 1.0)).abs().sum(1).sqrt()
    keep = near.detach()
    loss = near.mean() + (z + 1).norm()
    loss.backward()
"""
    script = tmp_path / "train.py"
    script.write_text(HEAD + text)
    first = len(HEAD.splitlines()) + 4
    operation = named(script, tmp_path / "run", monkeypatch)
    assert operation["place"] == f"{script}:{first}-{first + 2}"
    likely = f"likely sqrt (train.py:{first}) or linalg_vector_norm (train.py:{first + 2})"
    assert operation["detail"].endswith(likely)


def loss_of(lines: LossLines, model: nn.Module, *, kind: int = 0) -> torch.Tensor:
    lines.model_called()
    y = model(torch.randn(3, 2))
    lines.model_returned("caller")
    if kind == 0:
        return y.exp().mean()
    return y.exp().mean()


def test_only_a_few_losses_are_noted_and_nothing_is_left_switched_on() -> None:
    lines, model = LossLines(Guard(None, "test", "a line was not noted")), nn.Linear(2, 2)
    noted = []
    for number in range(1, 40):
        loss = loss_of(lines, model)
        if torch.is_anomaly_enabled():
            noted.append(number)
        between = lines.backward_begins(loss, "backward")
        assert not torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
        assert {node.name() for node in lines.of(loss, between)} == {
            "ExpBackward0",
            "MeanBackward0",
        }
    assert noted == [1, 2, 4, 8, 16, 32]


def test_the_same_operations_from_two_lines_name_neither() -> None:
    lines, model = LossLines(Guard(None, "test", "a line was not noted")), nn.Linear(2, 2)
    for kind in (0, 1):
        loss = loss_of(lines, model, kind=kind)
        between = lines.backward_begins(loss, "backward")
    assert lines.of(loss, between) == {}
    loss = loss_of(lines, model)
    elsewhere = lines.backward_begins(loss, "another backward")
    assert lines.of(loss, elsewhere) == {}
    loss = loss_of(lines, model)  # the fourth is noted, and this backward knows one line only
    elsewhere = lines.backward_begins(loss, "another backward")
    assert len(lines.of(loss, elsewhere)) == 2


def test_a_users_own_anomaly_detection_is_left_alone() -> None:
    lines, model = LossLines(Guard(None, "test", "a line was not noted")), nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        loss = loss_of(lines, model)
        lines.backward_begins(loss, "backward")
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()
    loss = loss_of(lines, model)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        lines.backward_begins(loss, "backward")
        assert torch.is_anomaly_enabled()
    lines.model_called()
    assert not torch.is_anomaly_enabled()


def test_a_watch_that_ends_before_backward_leaves_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer):
        model(torch.randn(3, 2)).sum()
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
