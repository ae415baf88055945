"""Hugging Face's Trainer, watched by its callback."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import gradsight
from gradsight.cli import main
from gradsight.errors import GradsightWarning, UsageError
from gradsight.integrations import hf
from gradsight.integrations.broken_steps import BrokenSteps
from gradsight.integrations.hf import GradsightCallback
from gradsight.train.sample_texts import SampleTexts
from integrations.tiny import (
    WORDS,
    PlainLoop,
    are_equal,
    llama,
    set_weights,
    token_loss,
    token_rows,
    tokenizer,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:.*os.fork.*")


def trainer_of(
    folder: Path, callbacks: list[Any], model: nn.Module | None = None, **changes: Any
) -> Trainer:
    collator = changes.pop("data_collator", default_data_collator)
    rows = changes.pop("rows", None) or token_rows(22)
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | changes
    return Trainer(
        llama() if model is None else model,
        TrainingArguments(**settings),
        train_dataset=rows,
        eval_dataset=rows[:2],
        data_collator=collator,
        callbacks=callbacks,
    )


def recorded(folder: Path) -> list[Any]:
    return list(gradsight.open_run(folder).steps())


def test_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Two epochs, whose last steps are shorter; the loss is divided by the tokens of the step."""
    plain = PlainLoop(default_data_collator)
    trainer = trainer_of(tmp_path, [plain, GradsightCallback()], data_collator=plain.collate)
    names = [name for name, _ in trainer.model.named_parameters()]
    trainer.train()
    run = gradsight.open_run(tmp_path / "gradsight")
    steps = list(run.steps())
    assert [step.step for step in steps] == list(range(6)) == list(range(trainer.state.global_step))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    # An epoch has 11 micro-batches: 4, 4 and 3.
    truths = plain.truths(trainer.model, token_loss, [4, 4, 3] * 2)
    for step, expected, entry in zip(steps, truths, logged, strict=True):
        assert step.gradient == "true"
        assert step.loss == pytest.approx(expected.loss, rel=1e-6)
        assert step.total_norm == pytest.approx(expected.norm, rel=1e-5)
        assert step.clip_coef == pytest.approx(min(1.0, 0.8 / expected.norm), rel=1e-4)
        assert step.lr == entry["learning_rate"]
        assert "gradsight/nan_steps" not in entry
    assert [each["name"] for each in run.config["parameters"]] == names
    assert sum(step.clip_coef < 1 for step in steps) == 4


def test_training_is_not_changed(tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [GradsightCallback(recorder="batch")]):
        trainer = trainer_of(tmp_path, callbacks)
        trainer.train()
        trained.append(weights(trainer.model))
    assert are_equal(*trained)
    assert len(recorded(tmp_path / "gradsight")) == 6


@pytest.mark.slow
def test_exact_grad_leaves_the_weights_of_plain_training(tmp_path: Path) -> None:
    trained = []
    for ghost in (None, True, {"exact_grad": True}):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(WORDS),
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            loss_type="ForCausalLM",
        )
        model = GPT2LMHeadModel(config)
        trainer = trainer_of(tmp_path / str(len(trained)), [GradsightCallback(ghost=ghost)], model)
        trainer.train()
        trained.append(weights(model))
    plain, scored, exact = trained
    assert are_equal(plain, exact)
    # Otherwise this model would not tell exact gradients from those that are summed by sample.
    assert not are_equal(plain, scored)
    assert gradsight.read_scores(tmp_path / "2" / "gradsight").num_rows == 44


def unshifted(row: dict[str, Tensor]) -> Tensor:
    return row["labels"]


def shifted(row: dict[str, Tensor]) -> Tensor:
    return torch.cat([row["labels"][1:], torch.tensor([-100])])


def with_padding(row: dict[str, Tensor]) -> Tensor:
    return row["input_ids"]


def of_few_samples(row: dict[str, Tensor]) -> Tensor:
    return row["labels"] if int(row["labels"][0]) < 8 else torch.full_like(row["labels"], -100)


@pytest.mark.parametrize(
    ("labels", "codes"),
    [
        (unshifted, []),
        (shifted, ["GS612"]),
        (with_padding, ["GS613"]),
        (of_few_samples, ["GS614"]),
    ],
)
def test_labels_are_judged_at_the_first_step(
    labels: Callable[[dict[str, Tensor]], Tensor], codes: list[str], tmp_path: Path
) -> None:
    rows = [{**row, "labels": labels(row)} for row in token_rows(22)]
    trainer_of(tmp_path, [GradsightCallback()], rows=rows, max_steps=2).train()
    found = [each.code for each in gradsight.open_run(tmp_path / "gradsight").findings()]
    assert [code for code in found if code.startswith("GS6")] == codes


def test_resume_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    first = trainer_of(
        tmp_path, [GradsightCallback()], save_strategy="steps", save_steps=2, max_steps=6
    )
    first.train()
    before = recorded(tmp_path / "gradsight")
    second = trainer_of(tmp_path, [GradsightCallback()], max_steps=6)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = recorded(tmp_path / "gradsight")
    assert [step.step for step in after] == list(range(6))
    assert [step.loss for step in after] == pytest.approx([step.loss for step in before], rel=1e-6)
    # The first two were not made again.
    assert [step.time for step in after[:2]] == [step.time for step in before[:2]]
    assert all(new.time > old.time for new, old in zip(after[2:], before[2:], strict=True))


class Breaks(nn.Module):
    """A model that fails, or returns a NaN, at some calls of training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.calls = 0
        self.error: Exception | None = None
        self.fails_at = -1
        self.nan_at: tuple[int, ...] = ()
        self.most_rows = 100

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            call = self.calls
            self.calls += 1
            if call == self.fails_at and self.error is not None:
                raise self.error
            if len(x) > self.most_rows:
                raise RuntimeError("CUDA out of memory.")
            if call in self.nan_at:
                x = x * float("nan")
        logits = self.net(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


def number_rows(count: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}
        for _ in range(count)
    ]


SIMPLE = {"gradient_accumulation_steps": 1, "max_steps": 6}


def test_an_exception_reaches_the_user_and_leaves_a_record(tmp_path: Path) -> None:
    model = Breaks()
    model.fails_at = 3
    model.error = KeyError("mine")
    callback = GradsightCallback(quiet=True)
    trainer = trainer_of(tmp_path, [callback], model, rows=number_rows(), **SIMPLE)
    with pytest.raises(KeyError) as raised:
        trainer.train()
    assert raised.value is model.error
    assert [step.step for step in recorded(tmp_path / "gradsight")] == [0, 1, 2]
    trainer.train()
    assert callback.watch is None
    assert [step.step for step in recorded(tmp_path / "gradsight")] == list(range(6))


def test_a_callback_that_was_added_later_closes_when_training_begins_again(tmp_path: Path) -> None:
    model = Breaks()
    model.fails_at = 3
    model.error = KeyError("mine")
    trainer = trainer_of(tmp_path, [], model, rows=number_rows(), **SIMPLE)
    callback = GradsightCallback(quiet=True)
    trainer.add_callback(callback)
    with pytest.raises(KeyError):
        trainer.train()
    assert [step.step for step in recorded(tmp_path / "gradsight")] == [0, 1, 2]
    earlier = callback.watch
    trainer.train()
    assert [step.step for step in recorded(tmp_path / "gradsight")] == list(range(6))
    with pytest.warns(GradsightWarning, match="closed"):
        earlier.log(loss=1.0)


@pytest.mark.slow
def test_a_smaller_batch_size_begins_anew(tmp_path: Path) -> None:
    model = Breaks()
    model.most_rows = 4
    trainer = trainer_of(
        tmp_path,
        [GradsightCallback(quiet=True)],
        model,
        rows=number_rows(),
        per_device_train_batch_size=5,
        auto_find_batch_size=True,
        **SIMPLE,
    )
    trainer.train()
    steps = recorded(tmp_path / "gradsight")
    assert [step.step for step in steps] == list(range(6))
    assert model.calls > 6


class Heard(TrainerCallback):
    """What reaches a reporter, such as W&B's callback."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_a_nan_step_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Breaks()
    model.nan_at = (2, 4)
    reporter = Heard()
    trainer = trainer_of(
        tmp_path, [reporter, GradsightCallback()], model, rows=number_rows(), **SIMPLE
    )
    # Else everything after the first NaN is NaN.
    zeros = [torch.zeros_like(each) for each in model.parameters()]
    model.register_forward_pre_hook(lambda *_: set_weights(model, zeros))
    trainer.train()
    history = trainer.state.log_history
    counts = [entry.get("gradsight/nan_steps") for entry in history if "loss" in entry]
    assert counts == [None, None, 1, 1, 2, 2]
    assert [entry.get("gradsight/nan_steps") for entry in history if "train_loss" in entry] == [2]
    assert [logs.get("gradsight/nan_steps") for logs in reporter.logs] == [*counts, 2]
    # The Trainer's own loss hides it.
    assert all(entry["loss"] == entry["loss"] for entry in history if "loss" in entry)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradsight:")]
    assert len(said) == 1
    assert re.match(r"gradsight: step 2: GS103 ", said[0])
    assert "gradsight/nan_steps" not in trainer.evaluate()
    steps = recorded(tmp_path / "gradsight")
    assert [step.step for step in steps if step.loss != step.loss] == [2, 4]


@pytest.mark.parametrize("options", [{"health": False}, {"health": {"GS103": False}}], ids=str)
def test_a_nan_step_shows_where_nothing_is_judged(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Breaks()
    model.nan_at = (1,)
    trainer = trainer_of(
        tmp_path, [GradsightCallback(**options)], model, rows=number_rows(), **SIMPLE
    )
    trainer.train()
    last = trainer.state.log_history[-1]
    assert last["gradsight/nan_steps"] == 5
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradsight:")]
    assert [re.match(r"gradsight: step (\d+): GS103 ", line)[1] for line in said] == ["1"]


def scaled_run(losses: list[float], scale: float) -> BrokenSteps:
    """A loop with a GradScaler whose loss is multiplied by these numbers, step by step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    broken = BrokenSteps(quiet=True)
    with gradsight.watch(net, optimizer, quiet=True) as watched:
        watched.also_writes_to(broken)
        for factor in losses:
            loss = net(torch.ones(2, 4)).square().mean() * factor
            scaler.scale(loss).backward()
            watched.log(loss=loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return broken


def test_overflows_of_a_scaler_are_not_counted() -> None:
    assert scaled_run([1e30, 1e30, 1.0, 1.0], scale=2.0**40).count == 0
    assert scaled_run([1.0, float("nan"), 1.0], scale=2.0).count == 1
    # A scaler that has never found its scale is no longer on its way there.
    assert scaled_run([1e38] * 12, scale=2.0**60).count == 4


def test_reporting_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setattr(
        integration_utils, "INTEGRATION_TO_CALLBACK", {**integration_utils.INTEGRATION_TO_CALLBACK}
    )
    hf.register()
    trainer = trainer_of(tmp_path, [], report_to=["gradsight", "tensorboard"], max_steps=2)
    trainer.train()
    assert len(recorded(tmp_path / "gradsight")) == 2
    assert list((tmp_path / "gradsight" / "tensorboard").glob("events*"))


def test_of_two_callbacks_the_users_own_watches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    default, own = GradsightCallback(), GradsightCallback(tmp_path / "mine")
    trainer_of(tmp_path, [default, own], max_steps=2).train()
    assert not (tmp_path / "gradsight").exists()
    assert len(recorded(tmp_path / "mine")) == 2


def test_options_are_those_of_watch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no option 'histogram'; .*histograms"):
        GradsightCallback(histogram=1)
    with pytest.raises(UsageError, match="ghost must be True"):
        GradsightCallback(ghost=3)
    sent: list[str] = []

    class Sink:
        def log_scalar(self, name: str, value: float, step: int) -> None:
            sent.append(name)

    dumper = gradsight.GradientDumper(tmp_path / "dumps", step_interval=1)
    callback = GradsightCallback(
        tmp_path / "run", dump=dumper, stats=gradsight.Schedule(step_interval=2), sinks=[Sink()]
    )
    trainer_of(tmp_path, [callback], max_steps=3).train()
    assert [step.total_norm is None for step in recorded(tmp_path / "run")] == [False, True, False]
    assert "gradients/total_norm" in sent
    assert {each.name for each in (tmp_path / "dumps").glob("**/step*")} >= {"step0", "step2"}


def test_ids_and_scores(tmp_path: Path) -> None:
    """The Trainer drops the column of ids; the model gets what it gets without us."""
    rows = [{**row, "id": f"text {number}"} for number, row in enumerate(token_rows(16))]
    losses = []
    for ghost in (None, {"val_data": rows[:4], "exact_grad": True}):
        callback = GradsightCallback(ghost=ghost)
        trainer = trainer_of(tmp_path, [callback], rows=rows, max_steps=2, eval_strategy="epoch")
        trainer.train()
        losses.append([step.loss for step in recorded(tmp_path / "gradsight")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    scores = gradsight.read_scores(tmp_path / "gradsight").to_pylist()
    assert {row["step"] for row in scores} == {0, 1}
    assert {row["sample_id"] for row in scores} == {f"text {number}" for number in range(16)}


def test_scores_add_up_to_the_predicted_change(tmp_path: Path) -> None:
    """Against the evaluation data, and in accumulation: the sum is <its gradient, the step's>."""
    plain = PlainLoop(default_data_collator)
    trainer = trainer_of(
        tmp_path,
        [GradsightCallback(ghost=True)],
        data_collator=plain.collate,
        max_steps=1,
        per_device_eval_batch_size=2,
    )
    start = weights(trainer.model)
    trainer.train()
    set_weights(trainer.model, start)
    model = trainer.model.double()

    def gradient(batches: list[Any]) -> Tensor:
        model.zero_grad()
        token_loss(model, batches).backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    evaluation, *trained = plain.batches[:5]
    expected = float(gradient([evaluation]) @ gradient(trained))
    scores = gradsight.read_scores(tmp_path / "gradsight").to_pylist()
    assert len(scores) == 8
    assert sum(row["score"] for row in scores) == pytest.approx(expected, rel=1e-4)


def test_a_diagnosis_calls_samples_by_their_ids(tmp_path: Path) -> None:
    rows = [{**row, "id": 100 + number} for number, row in enumerate(number_rows(8))]
    rows[5]["x"] = rows[5]["x"] * float("nan")
    model = Breaks()
    trainer = trainer_of(
        tmp_path,
        [GradsightCallback(quiet=True)],
        model,
        rows=rows,
        **SIMPLE | {"max_steps": 4},
    )
    trainer.train()
    finding = next(
        each
        for each in gradsight.open_run(tmp_path / "gradsight").findings()
        if each.code == "GS103"
    )
    assert "105" in str(finding.diagnosis)


def test_texts_are_kept_where_data_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "id": f"text {number}"} for number, row in enumerate(token_rows(8))]
    asked = {"plain": {}, "scored": {"ghost": {"val_data": rows[:2]}}}
    for name, options in asked.items():
        trainer = trainer_of(
            tmp_path, [GradsightCallback(tmp_path / name, **options)], rows=rows, max_steps=1
        )
        trainer.processing_class = tokenizer()
        trainer.train()
    assert not (tmp_path / "plain" / "sample_texts.json").exists()
    texts = SampleTexts(tmp_path / "scored")
    tokens = rows[3]["input_ids"][rows[3]["attention_mask"].bool()]
    assert texts("text 3") == " ".join(WORDS[token] for token in tokens)
    assert texts("text 8") is None
    capsys.readouterr()
    assert main(["influence", str(tmp_path / "scored")]) == 0
    assert WORDS[tokens[0]] in capsys.readouterr().out


class Unscorable(nn.Module):
    """A classifier with dropout, whose samples have no gradient of their own."""

    def __init__(self, why: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.why = why
        self.embedding = nn.Embedding(len(WORDS), 8)
        self.norm = nn.BatchNorm1d(8) if why == "BatchNorm" else nn.LayerNorm(8)
        self.head = nn.Linear(8, len(WORDS))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        features = nn.functional.dropout(self.embedding(input_ids).mean(1), training=self.training)
        logits = self.head(self.norm(features))
        if self.why == "mixes samples":
            loss = nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))
        else:
            loss = nn.functional.cross_entropy(logits, input_ids[:, 0])
        if self.why == "regulariser":
            loss = loss + 0.1 * self.head.weight.square().sum()
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("why", ["BatchNorm", "mixes samples", "regulariser"])
def test_training_goes_on_where_samples_cannot_be_scored(why: str, tmp_path: Path) -> None:
    trained, losses = [], []
    for ghost in (None, True):
        folder = tmp_path / str(ghost)
        rows = [{**row, "id": number} for number, row in enumerate(token_rows(16))]
        torch.manual_seed(4)
        callback = GradsightCallback(folder, ghost=ghost)
        trainer = trainer_of(folder, [callback], Unscorable(why), rows=rows, max_steps=3)
        if ghost is None:
            trainer.train()
        else:
            with pytest.warns(GradsightWarning, match=f"{why}.*Training goes on without scores"):
                trainer.train()
        trained.append(weights(trainer.model))
        steps = recorded(folder)
        losses.append([(step.loss, step.total_norm, step.gradient) for step in steps])
    assert are_equal(*trained)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


def test_a_training_without_a_step_warns_of_no_texts(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "id": number} for number, row in enumerate(token_rows(16))]
    callback = GradsightCallback(ghost=True)
    trainer = trainer_of(tmp_path, [callback], rows=rows)
    trainer.processing_class = tokenizer()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("before the first step")

    trainer.training_step = fail
    with pytest.raises(RuntimeError, match="before the first step"):
        trainer.train()
    said = capsys.readouterr().err + " ".join(str(warning.message) for warning in recwarn)
    assert "texts" not in said


class DeepSpeedEngine(nn.Module):
    """Of the same shape as DeepSpeed's: it wraps the model, and steps inside of its backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_what_cannot_be_seen_is_said_and_trained_unwatched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainer_of(tmp_path, [GradsightCallback()], max_steps=2)

    class Wraps(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.model_wrapped = DeepSpeedEngine(trainer.model)

    trainer.callback_handler.callbacks.insert(0, Wraps())
    trainer.train()
    assert trainer.state.global_step == 2
    assert not (tmp_path / "gradsight").exists()
    assert (
        "gradsight: not watched: DeepSpeed steps inside backward and keeps gradients in partitions; "
        "nothing true can be seen. Use FSDP2 or DDP, or train without Gradsight.\n"
    ) in capsys.readouterr().err


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSIGHT", "0")
    threads = threading.active_count()
    trainer = trainer_of(tmp_path, [GradsightCallback()], max_steps=2)
    trainer.train()
    assert not (tmp_path / "gradsight").exists()
    assert threading.active_count() == threads


def test_a_finding_stops_training(tmp_path: Path) -> None:
    model = Breaks()
    model.nan_at = (2,)
    callback = GradsightCallback(quiet=True, on_finding={"GS103": "stop"})
    trainer = trainer_of(tmp_path, [callback], model, rows=number_rows(), **SIMPLE)
    trainer.train()
    assert trainer.state.global_step == 3
    assert [step.step for step in recorded(tmp_path / "gradsight")] == [0, 1, 2]


def test_a_step_that_is_left_out_is_counted_all_the_same(tmp_path: Path) -> None:
    model = Breaks()
    model.nan_at = (2,)
    callback = GradsightCallback(quiet=True, on_finding={"GS103": "skip"})
    trainer = trainer_of(tmp_path, [callback], model, rows=number_rows(), **SIMPLE)
    trainer.train()
    steps = recorded(tmp_path / "gradsight")
    assert [step.skipped for step in steps] == [False, False, True, False, False, False]
    assert trainer.state.log_history[-1]["gradsight/nan_steps"] == 1
    assert all(bool(each.isfinite().all()) for each in model.parameters())
