"""gradsight.preflight: every fault that one batch shows, and the nearest healthy case."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight
from first_step.models import (
    CLASSES,
    LENGTH,
    WORDS,
    Causal,
    Experts,
    Flat,
    Graph,
    OnlyLoss,
    Packed,
    Rows,
    Similarities,
    TimeFirst,
    Zeroed,
    labelled,
    tokens,
)
from gradsight.errors import UsageError, UserCodeError

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor] | None]


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).reshape(-1, WORDS), batch[:, 1:].reshape(-1))


def time_first(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[:-1]), batch[1:].reshape(-1))


def same_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch).reshape(-1, WORDS), batch.reshape(-1))


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def picked(model: nn.Module, batch: Any) -> Tensor:
    """As preference losses do: no loss function is called."""
    logits = model(batch[:, :-1]).log_softmax(-1)
    return -logits.gather(-1, batch[:, 1:, None]).squeeze(-1).sum(-1).mean()


def packed(model: nn.Module, batch: Any) -> Tensor:
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2]).repeat(len(batch), 1)
    logits = model(batch[:, :-1], position_ids=positions)
    return F.cross_entropy(logits.reshape(-1, WORDS), batch[:, 1:].reshape(-1))


def of(function: Any, change: Callable[[Tensor], Tensor] = lambda x: x, **options: Any) -> Any:
    return lambda model, batch: function(change(model(batch[0])), batch[1], **options)


def distilled(change: Callable[[Tensor], Tensor]) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        taught = F.one_hot(batch[1], CLASSES).float() * 0.9 + 0.02
        return F.kl_div(change(model(batch[0])), taught, reduction="batchmean")

    return loss


def binary(change: Callable[[Tensor], Tensor]) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        wanted = F.one_hot(batch[1], CLASSES).float()
        return F.binary_cross_entropy_with_logits(change(model(batch[0])), wanted)

    return loss


def logs(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def series(both_ways: bool) -> Case:
    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(2, 8, batch_first=True, bidirectional=both_ways)
            self.head = nn.Linear(8 * (1 + both_ways), 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0])  # type: ignore[no-any-return]

    values = torch.randn(4, 10, 2)
    return (
        Forecast(),
        values,
        lambda model, batch: F.mse_loss(model(batch[:, :-1]), batch[:, 1:]),
    )


class Padded(nn.Module):
    """Is given a mask, or has a layer that knows which token pads."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=padding)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.cell(self.words(x))[0])  # type: ignore[no-any-return]


def padded_tokens() -> Tensor:
    texts = torch.randint(1, WORDS, (4, 14), generator=torch.Generator().manual_seed(0))
    return texts * (torch.arange(14) < torch.tensor([[14], [5], [9], [3]]))


def next_padded(masked: bool, **options: Any) -> Any:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x, y = batch[:, :-1], batch[:, 1:]
        logits = model(x, x != 0) if masked else model(x)
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)
        return losses if losses.dim() == 0 else (losses * (y != 0).flatten()).mean()

    return loss


def moved(begin: int, end: int, ahead: int) -> Any:
    """Compare the outputs from `begin` on with tokens so far ahead of the first one."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch)[:, begin:end]
        targets = batch[:, ahead : ahead + logits.shape[1]]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss


def of_one_sample(model: nn.Module, batch: Tensor) -> Tensor:
    targets = batch[:, 1:].clone()
    targets[1:] = -100
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets.flatten())


PADS = padded_tokens()
LONG = torch.randint(WORDS, (4, 30), generator=torch.Generator().manual_seed(0))
NO_WEIGHT = torch.ones(WORDS).index_fill(0, torch.tensor(0), 0.0)
T = tokens()
SAME = T[:, :-1]
IGNORED = (labelled()[0], torch.full((6,), -100))
FAULTS: dict[str, tuple[str, Callable[[], Case]]] = {
    "mask forgotten": ("GS601", lambda: (Causal(masked=False), T, next_token)),
    "the first position sees the last": ("GS601", lambda: (Causal(((0, 7),)), T, next_token)),
    "the last but one sees the last": ("GS601", lambda: (Causal(((6, 7),)), T, next_token)),
    "one position in the middle": ("GS601", lambda: (Causal(((3, 4),)), T, next_token)),
    "its own loss, flat": ("GS601", lambda: (Flat(masked=False), (SAME, T[:, 1:]), lambda m, b: m(*b)[1])),
    "nothing but the loss": ("GS601", lambda: (OnlyLoss(masked=False), (SAME, T[:, 1:]), None)),
    "labels are picked": ("GS601", lambda: (Causal(masked=False), T, picked)),
    "weights of zero hide it": ("GS601", lambda: (Zeroed(masked=False), T, next_token)),
    "time first, both ways": ("GS601", lambda: (TimeFirst(both_ways=True), T.T.contiguous(), time_first)),
    "a forecast both ways": ("GS601", lambda: series(both_ways=True)),
    "recurrence over rows": ("GS602", lambda: (Rows("recurrence"), labelled(), classes)),
    "softmax over rows": ("GS602", lambda: (Rows("softmax"), labelled(), classes)),
    "centred over rows": ("GS602", lambda: (Rows("centred"), labelled(), classes)),
    "documents not kept apart": ("GS603", lambda: (Packed(apart=False), T, packed)),
    "targets not shifted": ("GS604", lambda: (Causal(), SAME, same_token)),
    "softmax, then cross-entropy": ("GS605", lambda: (Rows("probabilities"), labelled(), classes)),
    "softmax by hand": ("GS605", lambda: (Rows(), labelled(), of(F.cross_entropy, lambda x: x.exp() / x.exp().sum(1, True)))),
    "sigmoid, then cross-entropy": ("GS605", lambda: (Rows(), labelled(), of(F.cross_entropy, torch.sigmoid))),
    "nll_loss of probabilities": ("GS605", lambda: (Rows("probabilities"), labelled(), of(F.nll_loss))),
    "nll_loss of logits": ("GS605", lambda: (Rows(), labelled(), of(F.nll_loss))),
    "kl_div of probabilities": ("GS605", lambda: (Rows("probabilities"), labelled(), distilled(lambda x: x))),
    "sigmoid twice": ("GS605", lambda: (Rows(), labelled(), binary(torch.sigmoid))),
    "all labels ignored": ("GS606", lambda: (Rows(), IGNORED, classes)),
    "the input is overwritten": ("GS607", lambda: (Rows("noise"), labelled(), classes)),
    "times zero": ("GS607", lambda: (Rows("nothing"), labelled(), classes)),
    "labels shifted twice": ("GS612", lambda: (Padded(), LONG, moved(0, -2, 2))),
    "padding counts, by a mask": ("GS613", lambda: (Padded(), PADS, next_padded(True))),
    "padding counts, by a layer": ("GS613", lambda: (Padded(0), PADS, next_padded(False))),
    "one sample has labels": ("GS614", lambda: (Padded(), LONG, of_one_sample)),
    "evaluation mode": ("GS608", lambda: (Rows().eval(), labelled(), classes)),
}  # fmt: skip
ADJACENCY = (torch.rand(12, 12) > 0.6).float()
HEALTHY: dict[str, Callable[[], Case]] = {
    "causal": lambda: (Causal(), T, next_token),
    "causal, its own loss": lambda: (Flat(), (SAME, T[:, 1:]), lambda m, b: m(*b)[1]),
    "causal, nothing but the loss": lambda: (OnlyLoss(), (SAME, T[:, 1:]), None),
    "causal, labels are picked": lambda: (Causal(), T, picked),
    "weights of zero": lambda: (Zeroed(), T, next_token),
    "time first": lambda: (TimeFirst(), T.T.contiguous(), time_first),
    "a forecast": lambda: series(both_ways=False),
    "an autoencoder of tokens": lambda: (Causal(masked=False), SAME, same_token),
    "masked language model": lambda: (Causal(masked=False), SAME, _masked),
    "BatchNorm": lambda: (Rows(), labelled(), classes),
    "similarities": lambda: (Similarities(), labelled(), _contrastive),
    "similarities, and its rows": lambda: (nn.Linear(6, 8), labelled(), _contrastive_outside),
    "a graph": lambda: (Graph(), (torch.randn(12, 6), torch.arange(12) % CLASSES), _nodes),
    "experts with capacity": lambda: (Experts(), (torch.randn(9, 6), torch.arange(9) % CLASSES), classes),
    "documents kept apart": lambda: (Packed(apart=True), T, packed),
    "documents in one stream": lambda: (Causal(), T, next_token),
    "log_softmax, then cross-entropy": lambda: (Rows(), labelled(), of(F.cross_entropy, logs)),
    "log_softmax, then nll_loss": lambda: (Rows(), labelled(), of(F.nll_loss, logs)),
    "label smoothing": lambda: (Rows(), labelled(), of(F.cross_entropy, label_smoothing=0.1)),
    "soft targets": lambda: (Rows(), labelled(), _soft),
    "distilled": lambda: (Rows(), labelled(), distilled(logs)),
    "logits": lambda: (Rows(), labelled(), binary(lambda x: x)),
    "the first two outputs left out": lambda: (Padded(), LONG, moved(1, -1, 2)),
    "padding ignored, by a mask": lambda: (Padded(), PADS, next_padded(True, ignore_index=0)),
    "padding ignored, by a layer": lambda: (Padded(0), PADS, next_padded(False, ignore_index=0)),
    "padding without weight": lambda: (Padded(), PADS, next_padded(True, weight=NO_WEIGHT)),
    "losses masked afterwards": lambda: (Padded(), PADS, next_padded(True, reduction="none")),
    "padding that nothing declares": lambda: (Padded(), PADS, next_padded(False)),
    "some labels ignored": lambda: (Rows(), (labelled()[0], torch.tensor([0, 1, -100, 2, -100, 3])), classes),
    "frozen body in evaluation mode": lambda: (_frozen_body(), labelled(), classes),
    "single layers in evaluation mode": lambda: (_kept_statistics(), labelled(), classes),
    "one sequence without a batch": lambda: (_Tagger(), (torch.arange(9), torch.arange(9) % CLASSES), classes),
}  # fmt: skip


def _masked(model: nn.Module, batch: Tensor) -> Tensor:
    hidden = torch.rand(batch.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    logits = model(batch.masked_fill(hidden, 0))
    return F.cross_entropy(logits.reshape(-1, WORDS), batch.masked_fill(~hidden, -100).reshape(-1))


def _contrastive(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0][:, 0]
    return F.cross_entropy(model(x, x + 0.1), torch.arange(len(x)))


def _contrastive_outside(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0][:, 0]
    return F.cross_entropy(model(x) @ model(x + 0.1).T, torch.arange(len(x)))


def _nodes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0], ADJACENCY), batch[1])


def _soft(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), F.one_hot(batch[1], CLASSES) * 0.8 + 0.04)


def _frozen_body() -> nn.Module:
    body = nn.Sequential(nn.Flatten(), nn.Linear(42, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model = nn.Sequential(body.requires_grad_(False), nn.Linear(8, CLASSES))
    body.eval()
    return model


def _kept_statistics() -> nn.Module:
    model = Rows()
    model.norm.eval()
    return model


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.cell = nn.LSTM(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.words(x).view(len(x), 1, -1))[0].view(len(x), -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    torch.manual_seed(0)
    code, case = FAULTS[name]
    report = gradsight.preflight(*case())
    found = [finding.code for finding in report.findings if finding.code.startswith("GS6")]
    assert found == [code], report.to_markdown()
    finding = next(each for each in report.findings if each.code == code)
    assert report.status == ("critical" if code in CRITICAL else "warning")
    assert finding.evidence
    assert finding.fix


CRITICAL = {"GS601", "GS603", "GS604", "GS606", "GS607"}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_case_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    report = gradsight.preflight(*HEALTHY[name]())
    assert report.status == "healthy", report.to_markdown()


def everything(model: nn.Module) -> list[Any]:
    """All that a look could change."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [tensor.detach().clone() for tensor in tensors],
        [tensor._version for tensor in tensors],
        [tensor.data_ptr() for tensor in tensors],
        [None if each.grad is None else each.grad.clone() for each in model.parameters()],
        [each.training for each in model.modules()],
        [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()],
        [sorted(vars(each)) for each in model.modules()],
        [torch.get_rng_state(), np.random.get_state()[1], random.getstate()],
        torch.overrides._get_current_function_mode_stack(),
    ]


@pytest.mark.parametrize("name", ["weights of zero hide it", "evaluation mode", "times zero"])
def test_everything_is_left_as_it_was_found(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = FAULTS[name][1]()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = everything(model)
    gradsight.preflight(model, batch, loss_fn)
    torch.testing.assert_close(everything(model)[0], before[0], rtol=0, atol=0)
    for one, other in zip(everything(model)[1:], before[1:], strict=True):
        assert str(one) == str(other)


def test_wrong_usage_is_said() -> None:
    model = nn.Linear(6, CLASSES)
    with pytest.raises(UsageError, match="loss_fn must be a function"):
        gradsight.preflight(model, labelled(), nn.CrossEntropyLoss())
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        gradsight.preflight(labelled(), model)  # type: ignore[arg-type]
    with pytest.raises(UserCodeError, match=r"loss_fn\(model, batch\) raised"):
        gradsight.preflight(model, labelled(), lambda m, b: m(b))
    with pytest.raises(UsageError, match="has no gradient"):
        gradsight.preflight(model, labelled(), lambda m, b: b[0].sum())


def test_what_cannot_be_run_again_is_said() -> None:
    class Particular(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:  # as in an extra pass, which reads gradients at inputs
                raise RuntimeError("no such input")
            return super().forward(x)

    x, y = labelled()
    report = gradsight.preflight(Particular(6, CLASSES), (x[:, 0], y), classes)
    reasons = {each.code: each.reason for each in report.abstained}
    assert "no such input" in reasons["GS601"]
    assert report.status == "healthy"


def test_length_is_what_the_mask_has() -> None:
    assert tokens().shape == (4, LENGTH + 1)
