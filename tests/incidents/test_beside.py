"""The recorder beside others who run or hook the model: the ghost engine, torch.func, Hugging
Face's Trainer.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsight
from incidents.faults import mlp


def test_the_ghost_engine_scores_as_without(tmp_path: Path) -> None:
    """The diagnosis runs inside the engine's block, at the look after backward."""

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def scores(recorder: bool) -> tuple[list[Tensor], Any]:
        model = mlp()
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = gradsight.GhostEngine(
            model, loss_of, (torch.randn(4, 4), torch.randn(4, 1)), optimizer=optimizer
        )
        found = []
        with gradsight.watch(model, optimizer, recorder=recorder) as watch:
            for step in range(5):
                x, y = torch.randn(6, 4), torch.randn(6, 1)
                x[2, 1] = math.nan if step == 3 else 0.0
                with engine.observe():
                    loss_of(model, (x, y)).backward()
                assert engine.scores.total is not None
                found.append(engine.scores.total.clone())
                optimizer.step()
                optimizer.zero_grad()
                if step == 3:
                    break
            report = watch.report()
        engine.close()
        return found, next(finding for finding in report.findings if finding.code == "GS103")

    alone, _ = scores(recorder=False)
    beside, finding = scores(recorder=True)
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert [sample.row for sample in finding.diagnosis.samples] == [2]


def test_calls_inside_torch_func_are_no_passes() -> None:
    model = mlp()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x[None],)).sum()

    with gradsight.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watch:
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(3, 4))
        assert watch._instruments.incidents is not None
        assert watch._instruments.incidents.calls.calls == []
        assert watch._problems.all() == []


def test_hugging_faces_trainer(tmp_path: Path) -> None:
    import transformers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            prediction = self.net(x)
            return {"loss": (prediction[:, 0] - labels).square().mean(), "logits": prediction}

    data = [{"x": torch.randn(4), "labels": torch.tensor(0.5)} for _ in range(32)]
    data[21]["x"][1] = math.nan
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), per_device_train_batch_size=8, max_steps=3, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, gradient_accumulation_steps=1, max_grad_norm=1.0, seed=0,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    trainer = InOrder(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))  # type: ignore[arg-type]
    with gradsight.watch(model, optimizer, run_dir=tmp_path / "run", recorder="batch"):
        trainer.train()
    (incident,) = gradsight.open_run(tmp_path / "run").incidents()
    assert (incident.step, incident.code, incident.replayable) == (2, "GS103", True)
    assert incident.diagnosis is not None
    assert incident.diagnosis.operation is not None
    assert incident.diagnosis.operation.operation == "input"
    assert [sample.row for sample in incident.diagnosis.samples] == [5]
