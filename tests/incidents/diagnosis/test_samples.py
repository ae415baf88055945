"""The guilty samples: every norm against a plain loop of autograd in float64."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghost.models import BATCH, MODELS, UNEQUAL, build, rows_of
from gradsight.core.calls import RecordedCall
from gradsight.incidents.diagnosis.diagnose import DiagnosisOptions, diagnose
from gradsight.values.diagnoses import Diagnosis
from incidents.diagnosis.capture import captured, step
from incidents.diagnosis.faults import gpt2, own_loss, rows, squared, tokens

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Case:
    """A model, its batch, its loss, and the share of one sample in that loss, written out."""

    model: nn.Module
    batch: Any
    loss: Loss
    share: Callable[[nn.Module, Any, int], Tensor]
    rows: int
    rounding: float = 1e-11
    """What float64 may differ by; GPT-2 computes its loss in float32 whatever it is given."""


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def class_share(model: nn.Module, batch: tuple[Tensor, Tensor], row: int) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]) / len(x)


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))
    return Case(model, (rows((3, 9.0)), torch.arange(16) % 3), classified, class_share, 16)


def convolution() -> Case:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )
    return Case(model, (torch.randn(5, 2, 6, 6), torch.arange(5) % 3), classified, class_share, 5)


class Reader(nn.Module):
    """Reads sequences that stand in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7)
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> Case:
    def share(model: nn.Module, x: Tensor, row: int) -> Tensor:
        return model(x[:, row : row + 1]).square().sum() / (x.shape[0] * x.shape[1] * 2)

    model = Reader()
    model.batch_first = False
    return Case(model, torch.randn(6, 4, 5), squared, share, 4)


def labelled() -> dict[str, Tensor]:
    batch = tokens(4)
    labels = batch["labels"].clone()
    labels[0, :5], labels[2, 3:] = -100, -100
    return {**batch, "labels": labels}


def token_share(model: nn.Module, batch: dict[str, Tensor], row: int) -> Tensor:
    labels = batch["labels"][:, 1:]
    logits = model(input_ids=batch["input_ids"][row : row + 1]).logits[0, :-1]
    return F.cross_entropy(logits, labels[row], reduction="sum") / (labels != -100).sum()


def tied() -> Case:
    return Case(gpt2(dropout=0.0, checkpointed=False), labelled(), own_loss, token_share, 4, 1e-7)


class OnlyLoss(nn.Module):
    """Returns nothing but its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2(dropout=0.0, checkpointed=False)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.inner(**batch).loss


def only_loss() -> Case:
    def share(model: nn.Module, batch: dict[str, Tensor], row: int) -> Tensor:
        return token_share(model.inner, batch, row)  # type: ignore[arg-type]

    return Case(OnlyLoss(), labelled(), lambda model, batch: model(**batch), share, 4, 1e-7)


def hidden_states() -> Case:
    """An output that the other outputs are computed from, and that is used outside as well."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(**batch, output_hidden_states=True)
        return out.loss + out.hidden_states[1].square().mean()

    def share(model: nn.Module, batch: dict[str, Tensor], row: int) -> Tensor:
        hidden = model(
            input_ids=batch["input_ids"][row : row + 1], output_hidden_states=True
        ).hidden_states[1]
        return token_share(model, batch, row) + hidden.square().mean() / 4

    return Case(gpt2(dropout=0.0, checkpointed=False), labelled(), loss, share, 4, 1e-7)


class Twofold(nn.Module):
    """The same tensor twice among the outputs, and two halves of one of which only one goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        left, right = self.first(x).tanh().split(4, dim=-1)
        y = self.last(left)
        return {"right": right, "all": (y, right), "y": y}


def twofold() -> Case:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out["y"], batch[1]) + out["right"].square().mean()

    def share(model: nn.Module, batch: tuple[Tensor, Tensor], row: int) -> Tensor:
        return loss(model, (batch[0][row : row + 1], batch[1][row : row + 1])) / 16

    return Case(Twofold(), (rows((3, 9.0)), torch.arange(16) % 3), loss, share, 16)


CASES = {f.__name__: f for f in (mlp, convolution, lstm, tied, only_loss, hidden_states, twofold)}


def norm(gradient: Any) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradient if g is not None))


def truth(case: Case) -> list[float]:
    """The norm of each sample's share by a loop of backward passes in float64."""
    model = copy.deepcopy(case.model).double()
    batch = doubled(case.batch)
    parameters = list(model.parameters())
    return [
        norm(torch.autograd.grad(case.share(model, batch, row), parameters, allow_unused=True))
        for row in range(case.rows)
    ]


def doubled(batch: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, batch
    )


def norms(found: Diagnosis) -> dict[tuple[int, int], float]:
    return {(sample.micro_batch, sample.row): sample.norm for sample in found.samples}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_norms_are_exact(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.to(dtype)
    if dtype == torch.float64:
        case.batch = doubled(case.batch)
    passes, _ = step(case.model, [case.batch], case.loss)
    found = diagnose(case.model, passes, DiagnosisOptions(seconds=60, kind="spike", most=None))
    assert found.notes == ()
    expected = {(0, row): value for row, value in enumerate(truth(case))}
    assert norms(found) == pytest.approx(
        expected, rel=1e-5 if dtype == torch.float32 else case.rounding
    )
    assert found.samples[0].norm == max(norms(found).values())
    assert sum(sample.share or 0.0 for sample in found.samples) == pytest.approx(1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_the_batchs_own(checkpointed: bool) -> None:
    torch.manual_seed(0)
    model = gpt2(dropout=0.3, checkpointed=checkpointed).double()
    torch.manual_seed(5)
    passes, _ = step(model, [labelled()], own_loss)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=None))
    assert found.notes == ()
    assert norms(found) == pytest.approx(
        {(0, row): value for row, value in enumerate(masked_out(model, 4))}, rel=1e-7
    )


def masked_out(model: nn.Module, count: int) -> Iterator[float]:
    """Each sample's norm out of the batch's own graph, without the loss of the other samples."""
    labels = labelled()["labels"][:, 1:]
    for row in range(count):
        torch.manual_seed(5)
        logits = model(input_ids=tokens(4)["input_ids"]).logits[row, :-1]
        loss = F.cross_entropy(logits, labels[row], reduction="sum") / (labels != -100).sum()
        yield norm(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", ["gpt2", "llama", "transformer", "experts"])
def test_coarse_numbers_do_not_look_like_mixed_samples(name: str) -> None:
    case = build(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        passes, _ = step(case.model.train(), [case.batch], case.loss_fn)
    found = diagnose(case.model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert (len(found.samples), found.notes) == (BATCH, ())


def test_a_loss_with_a_dimension_of_its_own_is_a_loss() -> None:
    class Unsqueezed(OnlyLoss):
        def forward(self, **batch: Tensor) -> Tensor:
            return super().forward(**batch)[None]

    torch.manual_seed(0)
    model = Unsqueezed()
    passes, _ = step(model, [labelled()], lambda model, batch: model(**batch).sum())
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert (len(found.samples), found.notes) == (4, ())


def test_dropout_that_is_one_operation() -> None:
    """As it is on a GPU."""

    class Dropping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(super().forward(x), 0.4, True)[0]

    torch.manual_seed(0)
    model = Dropping(6, 4).double()
    passes, _ = step(model, [rows().double()], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=None))
    torch.set_rng_state(passes[0].rng["cpu"])
    y = model(rows().double())
    pulled = [
        torch.autograd.grad(y[row].square().sum() / 64, list(model.parameters()), retain_graph=True)
        for row in range(16)
    ]
    assert norms(found) == pytest.approx(
        {(0, row): norm(each) for row, each in enumerate(pulled)}, rel=1e-11
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table(name: str) -> None:
    """In evaluation against a loop of backward passes; in training, with dropout, nothing but that
    all is well.
    """
    case = build(name)
    for training in (False, True):
        case.model.train(training)
        passes, loss = step(case.model, [case.batch], case.loss_fn)
        found = diagnose(
            case.model,
            passes,
            DiagnosisOptions(seconds=60, kind="nonfinite", loss_root=loss, most=None),
        )
        assert found.operation is None
        assert [note for note in found.notes if "everything was finite" not in note] == []
        assert len(found.samples) == BATCH
        if not training and name not in UNEQUAL:
            parameters = [p for p in case.model.parameters() if p.requires_grad]
            losses = [
                case.loss_fn(case.model, row) / BATCH for row in rows_of(case.batch, case.model)
            ]
            expected = {
                (0, i): norm(torch.autograd.grad(each, parameters, allow_unused=True))
                for i, each in enumerate(losses)
            }
            assert norms(found) == pytest.approx(expected, rel=1e-7)


def test_a_spike_in_one_of_four_micro_batches_is_named_by_its_id() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.2))
    batches = [rows(count=4), rows((2, 300.0), count=4), rows(count=4), rows(count=4)]
    ids = [tuple(f"doc-{number}-{row}" for row in range(4)) for number in range(4)]
    with captured(model, ids) as passes:
        for batch in batches:
            (squared(model, batch) / 4).backward()
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=2, scale=8.0))
    assert found.operation is None
    assert found.micro_batches == 4
    first, second = found.samples
    assert (first.micro_batch, first.row, first.sample_id, first.rank) == (1, 2, "doc-1-2", 0)
    assert first.share is not None
    assert first.share > 0.999
    unscaled = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=2))
    assert unscaled.samples[0].norm == pytest.approx(8 * first.norm)
    assert second.norm < first.norm


def test_broken_samples_come_alone() -> None:
    model = nn.Linear(6, 6)
    x = rows((7, math.nan), (9, 1e38))
    passes, _ = step(model, [x], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert [(sample.row, sample.share) for sample in found.samples] == [(7, None), (9, None)]
    assert math.isnan(found.samples[0].norm)


def test_a_second_output_that_is_broken_counts() -> None:
    model = Twofold()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (
            out["y"].square().mean()
            + (out["right"] * torch.where(x[:, :1] == 9.0, math.nan, 1.0)).mean()
        )

    passes, _ = step(model, [rows((3, 9.0))], loss)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="nonfinite"))
    assert [sample.row for sample in found.samples] == [3]
    assert found.operation is not None
    assert found.operation.phase == "loss"


def test_samples_that_batch_norm_mixes_are_not_taken_apart() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    passes, _ = step(model, [rows()], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert found.samples == ()
    assert (
        "BatchNorm1d takes statistics over the batch, so no sample has a gradient of its own"
        in found.notes[0]
    )


def test_samples_that_look_at_each_other_are_not_taken_apart() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y - y.mean(0)

    model = Centred(6, 4)
    passes, _ = step(model, [rows((0, 5.0))], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert found.samples == ()
    assert "alone gives another output than in the batch" in found.notes[0]


def test_a_penalty_of_the_models_own_is_said() -> None:
    class Penalised(OnlyLoss):
        def forward(self, **batch: Tensor) -> Tensor:
            return super().forward(**batch) + sum(p.square().sum() for p in self.parameters())

    torch.manual_seed(0)
    model = Penalised()
    passes, _ = step(model, [labelled()], lambda model, batch: model(**batch))
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert "do not add up to the gradient" in found.notes[0]


def test_randomness_that_cannot_be_dealt_out_is_turned_off_and_said() -> None:
    class Own(nn.Module):
        """Draws a different number of values for one sample than its share of the batch's."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y * torch.rand(len(x) + 3)[: len(x), None] if self.training else y

    torch.manual_seed(0)
    model = Own()
    passes, _ = step(model, [rows()], squared)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike", most=None))
    assert found.notes == (
        "norms were taken with dropout off: "
        "the batch's random numbers could not be dealt out to its samples",
    )
    quiet: RecordedCall = passes[0]
    model.eval()
    cotangent = (quiet.output_gradients or (None,))[0]
    assert cotangent is not None
    for sample in found.samples:
        y = model(quiet.args[0][sample.row : sample.row + 1])
        pulled = torch.autograd.grad(
            y, list(model.parameters()), cotangent[sample.row : sample.row + 1]
        )
        assert sample.norm == pytest.approx(norm(pulled), rel=1e-5)


def test_an_output_that_is_one_number_per_sample() -> None:
    """Alone it looks like a loss: the outputs taken are those that were taken for the batch."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(6, 1)
            self.policy = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.value(x), self.policy(x)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value, policy = model(x)
        return value.square().mean() + policy.square().mean()

    model = ActorCritic()
    passes, _ = step(model, [rows((3, 40.0))], loss)
    found = diagnose(model, passes, DiagnosisOptions(seconds=60, kind="spike"))
    assert found.notes == ()
    assert found.samples[0].row == 3
    assert sum(sample.share or 0.0 for sample in found.samples) == pytest.approx(1.0)
