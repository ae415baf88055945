"""Published recipes that look like faults, and the faults that look like them: real loops."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsight


def codes(report: Any) -> set[str]:
    return {finding.code for finding in report.findings}


def summed(lr: float, optimizer: type[torch.optim.Optimizer]) -> Any:
    """An autoencoder whose loss is a sum over entries and rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 64))
    patterns = (torch.rand(6, 64) > 0.5).float()
    steps = optimizer(model.parameters(), lr=lr)  # type: ignore[call-arg]
    with gradsight.watch(model, steps, quiet=True) as watched:
        for _ in range(70):
            x = patterns[torch.randint(6, (256,))]
            F.binary_cross_entropy_with_logits(model(x), x, reduction="sum").backward()
            steps.step()
            steps.zero_grad()
        report = watched.report()
    assert report.total_norm > 100
    return report


def test_a_loss_that_is_a_sum_is_no_fault_unless_its_steps_are_too_long() -> None:
    assert summed(1e-3, torch.optim.Adam).status == "healthy"
    assert codes(summed(3e-2, torch.optim.SGD)) & {"GS101", "GS102", "GS401"}


@pytest.mark.parametrize("copied", [False, True])
def test_a_third_optimizer_over_two_networks_is_a_method(copied: bool) -> None:
    torch.manual_seed(0)
    maker = nn.Linear(6, 4)
    critic = nn.ModuleDict({"real": nn.Linear(4, 1), "code": nn.Linear(4, 2)})
    both = nn.ModuleDict({"maker": maker, "critic": critic})
    second_net = maker if copied else critic
    first = torch.optim.Adam(maker.parameters(), 1e-3)
    second = torch.optim.Adam(second_net.parameters(), 1e-3)
    third = torch.optim.Adam(itertools.chain(maker.parameters(), critic.parameters()), 1e-3)
    optimizers = [first, second] if copied else [first, second, third]
    with gradsight.watch(both, optimizers, quiet=True) as watched:
        for _ in range(30):
            noise, real = torch.randn(16, 6), torch.randn(16, 4) + 1
            for optimizer in (first, second, third):
                optimizer.zero_grad()
                if optimizer is first:
                    loss = (critic["real"](maker(noise)) - 1).square().mean()
                elif optimizer is second:
                    loss = _judged(critic, real, maker(noise).detach())
                else:
                    loss = F.cross_entropy(critic["code"](maker(noise)), (noise[:, 0] > 0).long())
                loss.backward()
                optimizer.step()
        found = codes(watched.report())
    assert ("GS303" in found) == copied
    assert "GS304" not in found


def _judged(critic: nn.ModuleDict, real: Tensor, made: Tensor) -> Tensor:
    seen = (critic["real"](real) - 1).square().mean()
    return seen + critic["real"](made).square().mean()


@pytest.mark.parametrize("anew", [False, True])
def test_weights_that_are_drawn_anew_between_the_steps(anew: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, quiet=True) as watched:
        for _ in range(12):
            x = torch.randn(16, 8)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if anew:
                model[0].reset_parameters()  # type: ignore[operator]
            with torch.no_grad():
                model[2].weight.clamp_(-0.2, 0.2)
        report = watched.report()
    named = [finding.parameters for finding in report.findings if finding.code == "GS304"]
    assert named == ([("0.weight", "0.bias")] if anew else [])


@pytest.mark.parametrize(("decay", "found"), [(0.1, False), (30.0, True)])
def test_decay_that_eats_the_weights_is_known_at_once(decay: float, found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    with gradsight.watch(model, optimizer, quiet=True) as watched:
        for _ in range(6):
            x = torch.randn(16, 8)
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        findings = {finding.code: finding for finding in watched.report().findings}
    assert ("GS406" in findings) == found
    if found:
        assert findings["GS406"].first_step == 0
        assert findings["GS406"].severity == "critical"
