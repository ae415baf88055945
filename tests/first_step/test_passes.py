"""What a watched run shows in passing: modes, accumulation, sums, gradients that are lost."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradsight
from first_step.models import CLASSES, LENGTH, WORDS, Causal, tokens
from gradsight.core import moments
from gradsight.first_step.aside import look_aside
from gradsight.first_step.recorder import RECORDER
from gradsight.session import first_look

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(16, 6, generator=generator)
        yield x, x[:, :CLASSES].argmax(1)


def watched(loop: Loop, model: nn.Module | None = None, rate: float = 0.05, **options: Any) -> Any:
    torch.manual_seed(0)
    model = body() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with gradsight.watch(model, optimizer, quiet=True, **options) as run:
        loop(model, optimizer)
        return run.report()


def first_codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings if finding.code.startswith("GS6")]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, mode: bool = True) -> None:
    model.train(mode)
    for x, y in batches(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def in_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain(model, optimizer, mode=False)


def left_in_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (x, y) in enumerate(batches(30)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 10:
            model.eval()


def back_in_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (x, y) in enumerate(batches(30)):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 10:
            model.eval()


def accumulated(factor: float, later: float = 1.0) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, (x, y) in enumerate(batches(12)):
            (F.cross_entropy(model(x), y) * factor).backward()
            if number % 4 == 3:
                for parameter in model.parameters():
                    parameter.grad.mul_(later)  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

    return loop


def two_terms(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model(x).square().mean().backward()
        optimizer.step()


def two_on_a_line(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a discriminator is trained: of what is real, and of what is not."""
    term = F.cross_entropy
    for x, y in batches(6):
        optimizer.zero_grad()
        (term(model(x), y).backward(), term(model(x + 1), y).backward())
        optimizer.step()


def terms_in_turn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches(6):
        optimizer.zero_grad()
        out = model(x)
        for term in (F.cross_entropy(out, y), out.square().mean()):
            term.backward(retain_graph=True)
        optimizer.step()


def summed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in batches(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()


def thrown_away(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()


def cleared_too_early(to_none: bool) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches(6):
            F.cross_entropy(model(x), y).backward()
            optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()

    return loop


def last_layer_held_still(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By taking its gradient away, as recipes do in the first epoch."""
    for x, y in batches(6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in list(model.parameters())[-2:]:
            parameter.grad = None
        optimizer.step()


def from_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients are kept under another name until the optimizer steps."""
    for x, y in batches(6):
        F.cross_entropy(model(x), y).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()

        def give(*_: Any, kept: list[Tensor | None] = kept) -> None:
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad = gradient

        handle = optimizer.register_step_pre_hook(give)
        optimizer.step()
        handle.remove()
        optimizer.zero_grad()


def warmed_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, _ = next(batches(1))
    model(x).sum().backward()
    model.zero_grad()
    plain(model, optimizer)


def with_closure(model: nn.Module, _: torch.optim.Optimizer) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with gradsight.watch(model, optimizer, quiet=True) as run:
        for x, y in batches(3):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        assert first_codes(run.report()) == []


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Inner steps by hand, then one of the optimizer."""
    for number, (x, y) in enumerate(batches(8)):
        F.cross_entropy(model(x), y).backward()
        if number % 2:
            optimizer.step()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
        optimizer.zero_grad()


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "evaluation mode": ("GS608", lambda: watched(in_evaluation)),
    "left by a validation": ("GS608", lambda: watched(left_in_evaluation)),
    "not divided": ("GS609", lambda: watched(accumulated(1.0))),
    "a sum": ("GS610", lambda: watched(summed, rate=0.2)),
    "thrown away": ("GS611", lambda: watched(thrown_away)),
    "cleared too early": ("GS611", lambda: watched(cleared_too_early(True))),
    "zeroed too early": ("GS611", lambda: watched(cleared_too_early(False))),
}
HEALTHY: dict[str, Callable[[], Any]] = {
    "plain": lambda: watched(plain),
    "back in training mode": lambda: watched(back_in_training),
    "divided": lambda: watched(accumulated(0.25)),
    "divided later": lambda: watched(accumulated(1.0, later=0.25)),
    "two terms": lambda: watched(two_terms),
    "two on a line": lambda: watched(two_on_a_line),
    "terms in turn": lambda: watched(terms_in_turn),
    "a sum with a rate for it": lambda: watched(summed, rate=1e-3),
    "a pass to warm up": lambda: watched(warmed_up),
    "a closure": lambda: watched(with_closure),
    "steps by hand": lambda: watched(by_hand),
    "a layer held still": lambda: watched(last_layer_held_still),
    "gradients from elsewhere": lambda: watched(from_elsewhere),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    code, run = FAULTS[name]
    assert first_codes(run()) == [code]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name: str) -> None:
    assert first_codes(HEALTHY[name]()) == []


def language(model: nn.Module) -> Loop:
    def loop(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            out = model(tokens()[:, :-1])
            F.cross_entropy(out.reshape(-1, WORDS), tokens()[:, 1:].reshape(-1)).backward()
            optimizer.step()

    return loop


def test_a_watch_sees_a_leak_on_two_rows() -> None:
    leaky = Causal(masked=False)
    assert first_codes(watched(language(leaky), leaky)) == ["GS601"]
    causal = Causal()
    report = watched(language(causal), causal)
    assert first_codes(report) == []
    assert not [each for each in report.abstained if each.code == "GS601"]


@pytest.mark.parametrize("rows", [8, 16])
def test_a_pass_aside_takes_no_more_memory_than_a_step(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Causal()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(WORDS, (rows, LENGTH + 1))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).reshape(-1, WORDS), ids[:, 1:].reshape(-1)).backward()
        optimizer.step()

    step()
    of_the_step = gradsight.measure_peak_memory(step).peak_bytes
    peaks = []

    def measured(*arguments: Any) -> Any:
        found: list[Any] = []
        use = gradsight.measure_peak_memory(lambda: found.append(look_aside(*arguments)))
        # Gradients and the optimizer's two moments are held meanwhile, and not used.
        weights = sum(each.nbytes for each in model.parameters())
        peaks.append(use.peak_bytes + 3 * weights)
        return found[0]

    monkeypatch.setattr(first_look, "look_aside", measured)
    with gradsight.watch(model, optimizer, quiet=True):
        step()
    assert len(peaks) == 1
    assert peaks[0] <= of_the_step


def test_no_label_is_said_where_a_trainer_divides_by_their_number() -> None:
    """As Hugging Face's does: the loss is a sum, divided by nothing."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches(4):
            optimizer.zero_grad()
            summed = F.cross_entropy(model(x), torch.full_like(y, -100), reduction="sum")
            (summed / torch.tensor(0)).backward()
            optimizer.step()

    report = watched(loop)
    assert first_codes(report) == ["GS606"]
    assert "GS106" not in [finding.code for finding in report.findings]


def test_a_process_that_compiles_hides_its_operations_and_that_is_said() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    compiled(torch.ones(1, 2))
    report = watched(plain)
    said = {each.code: str(each) for each in report.abstained}
    assert "uses torch.compile" in said["GS605"]
    for code in ("GS606", "GS612", "GS613", "GS614"):
        assert "uses torch.compile" in said[code]
    torch._dynamo.reset()
    said = {each.code: str(each) for each in watched(plain).abstained}
    assert not {"GS605", "GS606"} & said.keys()


def test_it_can_be_left_out_and_silenced() -> None:
    leaky = Causal(masked=False)
    assert first_codes(watched(language(leaky), leaky, preflight=False)) == []
    leaky = Causal(masked=False)
    assert first_codes(watched(language(leaky), leaky, health={"GS601": False})) == []
    with pytest.raises(gradsight.GradsightError, match="preflight must be True or False"):
        gradsight.watch(leaky, preflight="yes")  # type: ignore[arg-type]


def test_a_watched_run_is_bit_for_bit_the_same() -> None:
    torch.manual_seed(0)
    one = Causal(masked=False)
    other = copy.deepcopy(one)
    watched(language(one), one)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    language(other)(other, optimizer)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_nothing_is_left_behind() -> None:
    model = Causal()
    before = list(moments._listeners)
    watched(language(model), model)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not RECORDER._hooked
    assert moments._listeners == before
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    assert not any(hooks)
    assert torch.utils.checkpoint.check_backward_validity.__module__ == "torch.utils.checkpoint"


def test_modes_of_the_users_stay_in_order() -> None:
    """A mode that is entered before our own goes, and left after it, is left as it was."""
    model = Causal()

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        out = model(tokens()[:, :-1])
        with torch.device("cpu"):
            F.cross_entropy(out.reshape(-1, WORDS), tokens()[:, 1:].reshape(-1)).backward()
            assert len(torch.overrides._get_current_function_mode_stack()) >= 1
        optimizer.step()
        assert torch.overrides._get_current_function_mode_stack() == []

    assert first_codes(watched(loop, model)) == []


class Gathering(nn.Module):
    """Communicates by itself, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(x.clone())
        return self.body(x)  # type: ignore[no-any-return]


def test_a_pass_aside_makes_no_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        report = watched(plain, Gathering())
        dist.barrier()
    finally:
        dist.destroy_process_group()
    reasons = {each.code: each.reason for each in report.abstained}
    assert "communicates with other ranks" in reasons["GS602"]
    assert first_codes(report) == []


def test_two_networks_against_each_other() -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3)
    second = torch.optim.Adam(critic.parameters(), lr=1e-3)
    binary = nn.BCEWithLogitsLoss()
    with (
        gradsight.watch(maker, first, quiet=True) as one,
        gradsight.watch(critic, second, quiet=True) as two,
    ):
        for _ in range(6):
            real = torch.randn(8, 2)
            critic.zero_grad()
            binary(critic(real), torch.ones(8, 1)).backward()
            fake = maker(torch.randn(8, 4))
            binary(critic(fake.detach()), torch.zeros(8, 1)).backward()
            second.step()
            maker.zero_grad()
            binary(critic(fake), torch.ones(8, 1)).backward()
            first.step()
        assert first_codes(one.report()) == first_codes(two.report()) == []


class Adapted(nn.Module):
    """Frozen embeddings, adapters inside a reentrant checkpoint, and a head that learns."""

    def __init__(self, input_learns: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.input_learns = input_learns

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        if self.input_learns:
            h.requires_grad_(True)
        h = checkpoint(self.adapter, h, use_reentrant=True)
        return self.head(h.mean(1))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("input_learns", [False, True])
def test_a_reentrant_checkpoint_of_frozen_inputs_is_named(input_learns: bool) -> None:
    model = Adapted(input_learns)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(12):
            optimizer.zero_grad()
            x = torch.randint(0, WORDS, (8, LENGTH))
            F.cross_entropy(model(x), x[:, 0] % CLASSES).backward()
            optimizer.step()

    report = watched(loop, model)
    found = {finding.code: finding.evidence for finding in report.findings}
    assert ("GS301" in found) is not input_learns
    assert input_learns or "enable_input_require_grads()" in found["GS301"]
