"""Watches that see no step: each says why, in a warning, in the record and in its reports."""

from pathlib import Path

import pytest
import torch
from torch import nn

import gradsight
from gradsight import Schedule, open_run, watch
from gradsight.cli import main
from gradsight.errors import GradsightWarning


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.rand(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def problem(run_dir: Path) -> str:
    (only,) = open_run(run_dir).problems()
    assert (only.key, only.count) == ("no-steps", 1)
    return only.message


def test_an_optimizer_that_was_not_given_is_named_while_it_trains(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, None, run_dir=tmp_path):
        train(model, optimizer, 9)
        with pytest.warns(GradsightWarning, match="AdamW has made 10 steps with parameters"):
            train(model, optimizer, 1)
        train(model, optimizer, 5)
    assert "watch() was given no optimizer, and Watch.step() was not called" in problem(tmp_path)


def test_steps_of_other_models_and_steps_by_hand_need_no_warning(tmp_path: Path) -> None:
    model, other = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, None, run_dir=tmp_path) as watched:
        train(other, torch.optim.SGD(other.parameters(), lr=0.1), 12)
        for _ in range(12):
            model(torch.rand(4, 3)).square().mean().backward()
            watched.step()
            optimizer.step()
            optimizer.zero_grad()
    assert list(open_run(tmp_path).problems()) == []


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (0, "no gradient of the model was seen after any backward(); watch() was given no opt"),
        (3, "AdamW has made 3 steps with parameters of the model, but watch() was given no opt"),
    ],
)
def test_without_an_optimizer_it_is_said_at_the_end(
    steps: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    watched = watch(model, None, run_dir=tmp_path)
    train(model, torch.optim.AdamW(model.parameters()), steps)
    with pytest.warns(GradsightWarning, match="no step was recorded"):
        watched.close()
    assert text in problem(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "⚠️ no steps: no optimizer step was seen" in capsys.readouterr().out
    written = (tmp_path / "report.md").read_text()
    assert "no steps: no optimizer step was seen" in written
    assert text in written


def test_the_wrong_optimizer_and_one_that_never_steps(tmp_path: Path) -> None:
    model = net()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(GradsightWarning, match="it is not the optimizer that watch"),
        watch(model, given, run_dir=tmp_path / "wrong"),
    ):
        train(model, torch.optim.AdamW(model.parameters()), 3)
    with (
        pytest.warns(GradsightWarning, match="gradients of the model were seen, and SGD never"),
        watch(model, given, run_dir=tmp_path / "never"),
    ):
        model(torch.rand(4, 3)).square().mean().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_is_compiled_as_a_whole_is_said_once_and_leaves_no_rows(
    backend: str, tmp_path: Path
) -> None:
    model = net()
    parameters = list(model.parameters())

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        return loss

    said = "is compiled as a whole.*optimizer.step.. outside of the compiled function"
    with (
        pytest.warns(GradsightWarning, match=said),
        watch(model, torch.optim.SGD(parameters, lr=0.1), run_dir=tmp_path),
    ):
        losses = [float(step(torch.ones(4, 3)).detach()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert list(open_run(tmp_path).steps()) == []
    assert "is compiled as a whole" in problem(tmp_path)


def test_a_compiled_step_that_calls_backward_is_seen_and_we_are_not_compiled(
    tmp_path: Path,
) -> None:
    from torch._dynamo import convert_frame

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.reset()
    before = len(convert_frame.input_codes.seen)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with watch(model, optimizer, run_dir=tmp_path):
        for _ in range(3):
            step(torch.ones(4, 3))
    steps = list(open_run(tmp_path).steps())
    assert {each.gradient for each in steps} == {"true"}
    norms = [each.total_norm for each in steps]
    assert len(norms) == len(set(norms)) == 3
    compiled = [reference() for reference in convert_frame.input_codes.seen[before:]]
    files = [code.co_filename for code in compiled if code is not None]
    assert files
    package = str(Path(gradsight.__file__).parent)
    assert [path for path in files if path.startswith(package)] == []


def test_gradients_of_a_compiled_function_are_seen_at_the_optimizer(tmp_path: Path) -> None:
    model = net()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    @torch.compile(backend="aot_eager")
    def gradients(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(x).square().mean(), parameters)

    true = []
    with watch(model, optimizer, run_dir=tmp_path):
        for batch in torch.rand(4, 4, 3):
            for parameter, gradient in zip(parameters, gradients(batch), strict=True):
                parameter.grad = gradient
            true.append(float(nn.utils.get_total_norm([each.grad for each in parameters])))
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path)
    assert [step.total_norm for step in run.steps()] == pytest.approx(true, rel=1e-5)
    assert {step.gradient for step in run.steps()} == {"at the optimizer"}
    assert list(run.problems()) == []


def test_a_run_that_fails_before_its_first_step_knows_why(tmp_path: Path) -> None:
    model = net()
    with (
        pytest.raises(ZeroDivisionError),
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path),
    ):
        raise ZeroDivisionError
    assert list(open_run(tmp_path).problems()) == []


def test_the_report_of_no_steps_claims_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as watched:
        report = watched.report()
        train(model, optimizer, 1)
    assert (report.status, report.exit_code, report.steps) == ("warning", 1, 0)
    assert str(report) == "no steps: no optimizer step was seen"
    text = report.to_markdown()
    assert "no steps: no optimizer step was seen. A watch sees a step when" in text
    assert "❌" not in text
    assert "None needed" not in text
    assert report.to_dict()["total_norm"] == "nan"


def test_steps_that_were_not_measured_leave_the_last_measured_one_in_the_report() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, stats=Schedule(step_interval=10)) as watched:
        train(model, optimizer, 15)
        report = watched.report()
    assert (report.step, report.num_params, report.status) == (10, 2, "healthy")
    assert report.total_norm > 0
    with watch(model, optimizer, stats=Schedule(start_step=100)) as watched:
        train(model, optimizer, 1)
        report = watched.report()
    assert str(report) == "Step 0: no gradient was measured"


def test_hooks_on_every_optimizer_go_with_the_watch() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    before = dict(_global_optimizer_post_hooks)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        train(model, optimizer, 1)
    assert dict(_global_optimizer_post_hooks) == before


def test_hugging_face_before_and_after_its_optimizer_exists(tmp_path: Path) -> None:
    import transformers

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.head(x), labels)}

    data = [{"x": torch.rand(3), "labels": torch.tensor(1)} for _ in range(24)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=data)
    assert trainer.optimizer is None
    with (
        pytest.warns(GradsightWarning, match=r"trainer.create_optimizer\(\) first"),
        watch(trainer.model, trainer.optimizer, run_dir=tmp_path / "early"),
    ):
        trainer.train()
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=data)
    trainer.create_optimizer()
    with watch(trainer.model, trainer.optimizer, run_dir=tmp_path / "run"):
        trainer.train()
    assert len(list(open_run(tmp_path / "run").steps())) == 12
