"""Lightning's Trainer, by both of its names, and Fabric."""

import contextlib
import csv
import pickle
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsight
from gradsight.errors import UsageError
from gradsight.integrations import lightning as door
from gradsight.integrations.lightning import GradsightCallback, MemoryMonitorCallback
from integrations.tiny import are_equal, truth, weights

PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
pytestmark = pytest.mark.filterwarnings("ignore")

_generator = torch.Generator().manual_seed(0)
X = torch.randn(22, 6, generator=_generator)
Y = torch.randint(0, 3, (22,), generator=_generator)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def module_of(package: Any, *, several: bool = False, optimizer: Any = None) -> Any:
    class Module(package.LightningModule):  # type: ignore[name-defined,misc]
        """Keeps weights and batches of every step, for the plain loop."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0))
            self.head = nn.Linear(8, 3)
            self.automatic_optimization = not several
            self.starts: list[tuple[list[Tensor], list[Any]]] = []
            self.fails_at = -1
            self.nan_at = -1

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

        def training_step(self, batch: Any, index: int) -> Tensor:
            if self.trainer.global_step == self.fails_at:
                raise KeyError("mine")
            self.starts.append((weights(self), batch))
            loss = cross_entropy(self, batch)
            if self.trainer.global_step == self.nan_at:
                loss = loss * float("nan")
            self.log("train_loss", loss)
            if several:
                for each in self.optimizers():
                    each.zero_grad()
                self.manual_backward(loss)
                for each in self.optimizers():
                    each.step()
            return loss

        def configure_optimizers(self) -> Any:
            if optimizer is not None:
                return optimizer(self.parameters())
            if not several:
                return torch.optim.AdamW(self.parameters(), lr=1e-2)
            first = torch.optim.SGD(self.body.parameters(), lr=0.1)
            return [first, torch.optim.AdamW(self.head.parameters(), lr=1e-2)], []

    return Module()


def fit(package: Any, module: Any, folder: Path, callbacks: list[Any], **changes: Any) -> Any:
    checkpoint = changes.pop("ckpt_path", None)
    settings = {
        "max_epochs": 2,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
    } | changes
    trainer = package.Trainer(callbacks=callbacks, **settings)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer


def recorded(folder: Path) -> list[Any]:
    return list(gradsight.open_run(folder).steps())


def truths(module: Any, counts: list[int], divided_by: int) -> list[Any]:
    """What a float64 loop says of the steps, each of so many micro-batches."""
    found = []
    starts = iter(module.starts)
    twin = module_of(lightning.pytorch)
    for count in counts:
        mine = [next(starts) for _ in range(count)]
        with torch.no_grad():
            for parameter, value in zip(twin.parameters(), mine[0][0], strict=True):
                parameter.copy_(value)
        batches = [batch for _, batch in mine]
        found.append(
            truth(twin, lambda model: sum(cross_entropy(model, b) for b in batches) / divided_by)  # noqa: B023
        )
    return found


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("accumulated", [1, 4])
def test_steps_are_those_of_a_plain_loop(accumulated: int, package: Any, tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [GradsightCallback()]):
        module = module_of(package)
        trainer = fit(
            package,
            module,
            tmp_path,
            callbacks,
            gradient_clip_val=0.5,
            accumulate_grad_batches=accumulated,
        )
        trained.append(weights(module))
    assert are_equal(*trained)
    # 6 batches an epoch: all of their own, or 4 and 2; the shorter step is divided by 4 too.
    counts = [1] * 12 if accumulated == 1 else [4, 2, 4, 2]
    run = gradsight.open_run(tmp_path / "gradsight")
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(trainer.global_step))
    for step, expected in zip(steps, truths(module, counts, accumulated), strict=True):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.total_norm == pytest.approx(expected.norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(min(1.0, 0.5 / expected.norm), rel=1e-4)
        assert step.lr == 1e-2
    names = [each["name"] for each in run.config["parameters"]]
    assert names == [name for name, _ in module.named_parameters()]


def test_several_optimizers_make_one_step(tmp_path: Path) -> None:
    package = lightning.pytorch
    whole = module_of(package, several=True)
    trainer = fit(package, whole, tmp_path, [GradsightCallback(tmp_path / "whole")])
    assert trainer.global_step == 24
    for step, expected in zip(
        recorded(tmp_path / "whole"), truths(whole, [1] * 12, 1), strict=True
    ):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.total_norm == pytest.approx(expected.norm, rel=1e-5)
    # Half of it, and the rest from its checkpoint.
    callback = GradsightCallback(tmp_path / "parts")
    module = module_of(package, several=True)
    trainer = fit(package, module, tmp_path, [callback], max_epochs=1, enable_checkpointing=True)
    saved = trainer.checkpoint_callback.best_model_path
    again = module_of(package, several=True)
    fit(package, again, tmp_path, [GradsightCallback(tmp_path / "parts")], ckpt_path=saved)
    assert [step.step for step in recorded(tmp_path / "parts")] == list(range(12))
    assert are_equal(weights(again), weights(whole))
    # The checkpoint loads without us.
    plain = module_of(package, several=True)
    fit(package, plain, tmp_path, [], ckpt_path=saved)
    assert are_equal(weights(plain), weights(whole))


def test_optimizers_of_different_rhythms(tmp_path: Path) -> None:
    """The second one steps with every other batch; a loss is of the step that its batch makes."""

    class Module(lightning.pytorch.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.body = nn.Linear(X.shape[1], 4)
            self.head = nn.Linear(4, 2)
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> None:
            often, seldom = self.optimizers()
            loss = self.head(torch.tanh(self.body(batch[0]))).square().mean()
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss)
            often.step()
            often.zero_grad()
            if index % 2:
                seldom.step()
                seldom.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.body, self.head)]

    module = Module()
    fit(lightning.pytorch, module, tmp_path, [GradsightCallback(tmp_path / "gradsight")])
    found = [step.loss for step in recorded(tmp_path / "gradsight")]
    assert found == pytest.approx(module.losses)


def test_resume_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    package = pytorch_lightning
    saving = package.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    module = module_of(package)
    fit(package, module, tmp_path, [saving, GradsightCallback()], enable_checkpointing=True)
    before = recorded(tmp_path / "gradsight")
    saved = next(tmp_path.glob("*step=6.ckpt"))
    fit(package, module_of(package), tmp_path, [GradsightCallback()], ckpt_path=saved)
    after = recorded(tmp_path / "gradsight")
    assert [step.step for step in after] == list(range(12))
    assert [step.time for step in after[:6]] == [step.time for step in before[:6]]
    assert [step.loss for step in after] == pytest.approx([step.loss for step in before], rel=1e-6)
    assert after[6].time > before[-1].time


def test_an_exception_closes_the_record(tmp_path: Path) -> None:
    module = module_of(lightning.pytorch)
    module.fails_at = 3
    callback = GradsightCallback()
    with pytest.raises(KeyError, match="mine"):
        fit(lightning.pytorch, module, tmp_path, [callback])
    assert callback.watch is None
    assert [step.step for step in recorded(tmp_path / "gradsight")] == [0, 1, 2]
    module.fails_at = -1
    fit(lightning.pytorch, module, tmp_path, [callback])
    assert [step.step for step in recorded(tmp_path / "gradsight")] == list(range(12))


def test_a_finding_stops_training(tmp_path: Path) -> None:
    module = module_of(lightning.pytorch)
    module.nan_at = 3
    callback = GradsightCallback(quiet=True, on_finding={"critical": "stop"})
    trainer = fit(lightning.pytorch, module, tmp_path, [callback])
    assert trainer.global_step == 4
    assert [step.step for step in recorded(tmp_path / "gradsight")] == [0, 1, 2, 3]


def test_the_trainers_loggers_are_sinks(tmp_path: Path) -> None:
    package = lightning.pytorch
    logger = package.loggers.CSVLogger(tmp_path)
    module = module_of(package)
    fit(package, module, tmp_path, [GradsightCallback()], logger=logger, max_steps=4)
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    ours = [row for row in rows if row["gradients/total_norm"]]
    steps = recorded(tmp_path / "gradsight")
    assert [int(row["step"]) for row in ours] == [0, 1, 2, 3]
    for row, step in zip(ours, steps, strict=True):
        assert float(row["gradients/total_norm"]) == step.total_norm
        assert float(row["gradsight/loss"]) == step.loss
    assert len([row for row in rows if row["train_loss"]]) == 4


def test_a_logger_that_fails_does_not_end_training(tmp_path: Path) -> None:
    class Fails(lightning.pytorch.loggers.CSVLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "gradients/total_norm" in metrics:
                raise OSError("full")

    with pytest.warns(gradsight.errors.GradsightWarning, match="Fails failed .*OSError: full"):
        trainer = fit(
            lightning.pytorch,
            module_of(lightning.pytorch),
            tmp_path,
            [GradsightCallback()],
            logger=Fails(tmp_path),
        )
    assert trainer.global_step == 12


class ScaledOnly(MixedPrecision):  # type: ignore[misc]
    """The scaler of 16-mixed, and float32 all the same: the twin can be compared."""

    def forward_context(self) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_divided(fused: bool, tmp_path: Path) -> None:
    """A fused optimizer unscales inside of its step, after every hook of Lightning's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=fused)

    module = module_of(lightning.pytorch, optimizer=optimizer)
    fit(
        lightning.pytorch,
        module,
        tmp_path,
        [GradsightCallback()],
        plugins=[ScaledOnly("16-mixed", "cpu", scaler)],
        accumulate_grad_batches=2,
    )
    for step, expected in zip(
        recorded(tmp_path / "gradsight"), truths(module, [2] * 6, 2), strict=True
    ):
        assert step.scale == 1024.0
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.total_norm == pytest.approx(expected.norm, rel=1e-5)


def test_a_closure_that_is_evaluated_often(tmp_path: Path) -> None:
    """LBFGS: the loss of a step is that of its first evaluation, where the step starts."""

    def optimizer(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)

    module = module_of(lightning.pytorch, optimizer=optimizer)
    fit(lightning.pytorch, module, tmp_path, [GradsightCallback()], max_steps=3)
    steps = recorded(tmp_path / "gradsight")
    assert len(module.starts) > 3
    seen = {round(float(cross_entropy_at(start)), 4) for start in module.starts}
    assert [step.step for step in steps] == [0, 1, 2]
    assert {round(step.loss, 4) for step in steps} <= seen


def cross_entropy_at(start: Any) -> Tensor:
    twin = module_of(lightning.pytorch)
    with torch.no_grad():
        for parameter, value in zip(twin.parameters(), start[0], strict=True):
            parameter.copy_(value)
        return cross_entropy(twin, start[1])


def test_options_are_those_of_watch() -> None:
    with pytest.raises(UsageError, match="there is no option 'steps'"):
        GradsightCallback(steps=3)


@pytest.mark.parametrize("kind", [GradsightCallback, MemoryMonitorCallback])
def test_a_package_that_is_imported_later(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        """The Callback of a package that was not there when our module was imported."""

    now = door._callback_classes()
    monkeypatch.setattr(door, "_callback_classes", lambda: [*now, Later])
    for callback in (kind(), pickle.loads(pickle.dumps(kind()))):
        assert isinstance(callback, kind)
        assert isinstance(callback, (lightning.pytorch.Callback, pytorch_lightning.Callback))
        assert isinstance(callback, Later)
        assert callback.state_key == kind.__name__


def test_a_copy_for_another_process() -> None:
    callback = pickle.loads(pickle.dumps(GradsightCallback("somewhere", quiet=True)))
    assert callback._door.run_dir == "somewhere"
    assert callback._door.is_quiet


@pytest.mark.parametrize("accumulated", [1, 2])
def test_fabric_needs_no_door(accumulated: int, tmp_path: Path) -> None:
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    twin = truth(net, lambda model: cross_entropy(model, (X[:8], Y[:8])))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.0))
    with gradsight.watch(model, optimizer, run_dir=tmp_path) as watched:
        for _ in range(2):
            for part in range(accumulated):
                rows = slice(part * 8 // accumulated, (part + 1) * 8 // accumulated)
                fabric.backward(cross_entropy(model, (X[rows], Y[rows])) / accumulated)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=twin.loss)
    for step in recorded(tmp_path):
        assert step.gradient == "true"
        assert step.total_norm == pytest.approx(twin.norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(0.1 / twin.norm, rel=1e-4)
