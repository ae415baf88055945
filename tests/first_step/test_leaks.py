"""Leaks against a slow twin: every derivative of every output by every input, in float64."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from first_step.models import LENGTH, WORDS, Causal, tokens
from gradsight.core.guard import Guard
from gradsight.first_step.documents import documents_of
from gradsight.first_step.leaks import SEES, Traced, look_ahead
from gradsight.first_step.operations import Operations, SeenTargets
from gradsight.first_step.recorder import RECORDER
from gradsight.first_step.targets import find_placements


class Banded(nn.Module):
    """Sums over inputs through a matrix of who sees whom."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen
        self.head = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.seen.double() @ x).tanh())  # type: ignore[no-any-return]


def slow_twin(model: nn.Module, x: Tensor, ahead: int) -> bool:
    """Whether any output has a derivative at an input that is so far ahead of it."""
    for row in range(len(x)):
        derivative = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], x[row])
        sizes = derivative.abs().sum((1, 3))  # [outputs, inputs]
        if bool(sizes.triu(ahead).any()):
            return True
    return False


@pytest.mark.parametrize("length", [2, 9, 40])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("extra", [None, (0, -1), (-2, -1), (0, 1), "band", "chunks"])
def test_a_few_passes_say_what_all_derivatives_say(
    length: int, ahead: int, extra: tuple[int, int] | str | None
) -> None:
    torch.manual_seed(0)
    seen = torch.ones(length, length).tril()
    if extra == "band":
        seen = torch.ones(length, length).tril(1)
    elif extra == "chunks":
        seen = torch.block_diag(*[torch.ones(3, 3)] * (length // 3 + 1))[:length, :length]
    elif extra is not None:
        seen[extra] = 1
    model = Banded(seen)
    x = torch.randn(4, length, 3, dtype=torch.float64)
    probe = torch.zeros_like(x, requires_grad=True)
    traced = Traced(model(x + probe), torch.ones(4, length, dtype=torch.bool), (probe,))
    found = look_ahead(traced, ahead, 8, torch.Generator().manual_seed(1))
    is_seen = found is not None and found.ratio > SEES
    assert is_seen is slow_twin(model, x, ahead)


def test_only_outputs_that_count_are_asked() -> None:
    """A position without a label, as of padding, may see what it likes."""
    seen = torch.ones(6, 6).tril()
    seen[2, 5] = 1
    model = Banded(seen)
    probe = torch.zeros(2, 6, 3, dtype=torch.float64, requires_grad=True)
    counts = torch.ones(2, 6, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 3, dtype=torch.float64)
    found = look_ahead(Traced(model(x + probe), counts, (probe,)), 1, 8, generator)
    assert found is not None
    assert found.ratio > SEES
    assert "at the input of position 5" in found.example
    counts[:, 2] = False
    found = look_ahead(Traced(model(x + probe), counts, (probe,)), 1, 8, generator)
    assert found is not None
    assert found.ratio == 0


def placed(source: Tensor, target: Tensor) -> int | None:
    found = find_placements(source, [SeenTargets(target, target != -100)])
    return found[0].ahead if found else None


def test_targets_are_found_in_the_inputs() -> None:
    x = tokens()
    assert placed(x[:, :-1], x[:, 1:]) == 1
    assert placed(x[:, :-1], x[:, 1:].reshape(-1)) == 1
    assert placed(x, x[:, 1:].reshape(-1)) == 1
    assert placed(x, F.pad(x, (0, 1), value=-100)[:, 1:].reshape(-1)) == 1
    assert placed(x[:, :-2], x[:, 2:]) == 2
    assert placed(x, x) == 0
    assert placed(x.T, x[:, 1:].T.reshape(-1)) == 1
    assert placed(x, torch.randint_like(x, WORDS)) is None
    assert placed(torch.zeros_like(x), torch.zeros_like(x)) is None


def documents(**named: Tensor) -> list[list[int]] | None:
    found = documents_of(named, ())
    return None if found is None else found.tolist()


def test_documents_are_told_by_what_the_script_says() -> None:
    restarts = torch.tensor([[0, 1, 2, 0, 1]])
    assert documents(position_ids=restarts) == [[0, 0, 0, 1, 1]]
    assert documents(document_ids=torch.tensor([[3, 3, 7]])) == [[3, 3, 7]]
    assert documents(attention_mask=torch.tensor([[1, 1, 2, 0]])) == [[1, 1, 2, -1]]
    assert documents(position_ids=torch.arange(5)[None]) is None
    padded = torch.tensor([[1, 1, 0, 1, 2]])
    assert documents(position_ids=padded, attention_mask=torch.tensor([[0, 0, 1, 1, 1]])) is None
    picture = torch.tensor([[0, 0, 1, 1, 0, 0]])
    assert documents(position_ids=picture) is None
    assert documents(attention_mask=torch.tensor([[0, 1, 1]])) is None


def test_a_lookup_is_seen_however_it_is_written() -> None:
    guard = Guard(None, "test", "test")
    table = torch.randn(WORDS, 5, requires_grad=True)
    x = tokens()
    ways = {
        "embedding": lambda: F.embedding(x, table),
        "index": lambda: table[x],
        "one_hot": lambda: F.one_hot(x, WORDS).float() @ table,
    }
    for name, way in ways.items():
        with Operations(guard, probing=True) as operations:
            out = way()
        (probe,) = operations.probes
        assert torch.equal(probe.source, x), name
        (gradient,) = torch.autograd.grad(out[:, 0].sum(), probe.zeros)
        assert gradient[:, 0].any()
        assert not gradient[:, 1:].any()


def test_calls_are_seen_once_and_outermost() -> None:
    model = Causal()
    holder = object()
    RECORDER.hold(holder, [model])
    try:
        model(tokens()[:, :LENGTH])
        assert [call.module for call in RECORDER._calls] == [model]
        with torch.no_grad():
            model(tokens()[:, :LENGTH])
        assert len(RECORDER._calls) == 1
    finally:
        RECORDER.let_go(holder)
    assert torch.overrides._get_current_function_mode_stack() == []
