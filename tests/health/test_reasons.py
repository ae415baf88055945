"""A check that cannot judge says why, and the reason is the real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsight
from gradsight.errors import GradsightWarning

Changes = dict[str, Any]
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def cross_entropy(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), x[:, :4].argmax(1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = cross_entropy,
    steps: int = 4,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.randn(16, 8)).backward()
        optimizer.step()


def reasons(folder: Path, loop: Loop = train, **options: Any) -> dict[str, str]:
    """Train under a watch; return why checks were skipped, by code."""
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsight.watch(model, optimizer, quiet=True, run_dir=folder, **options):
        loop(model, optimizer)
    return {each.code: each.reason for each in gradsight.open_run(folder).abstentions()}


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x[:, :4])


def changed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        targets = x[:, :4].argmax(1)
        with torch.no_grad():
            x.zero_()
        return F.cross_entropy(output, targets)

    # A layer that needs no input in backward, so that torch does not complain.
    model[0].weight.requires_grad_(False)
    train(model, optimizer, loss)


def in_evaluation_mode(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.eval()
    train(model, optimizer)


def hook_of_a_user(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def remembered(module: nn.Module, args: Any, output: Tensor) -> None:
        return None

    model[0].register_forward_hook(remembered)
    train(model, optimizer)


def never_called(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, lambda model, x: sum(p.square().sum() for p in model.parameters()))


def short(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(model, optimizer, steps=1)


def breaks(*_: object, **__: object) -> Any:
    raise RuntimeError("an error of our own")


CASES: list[tuple[str, Loop, Changes, str, str]] = [
    ("switched off", train, {"preflight": False}, "GS601", "preflight=False"),
    ("no scaler", train, {}, "GS404", "no GradScaler is in use"),
    ("one process", train, {}, "GS503", "there is one process"),
    ("squares", lambda *given: train(*given, squared), {}, "GS108", "no plain cross-entropy"),
    ("in place", changed_in_place, {}, "GS602", "changed in place after the model had seen it"),
    ("evaluation", in_evaluation_mode, {}, "GS502", "in training mode"),
    ("hook", hook_of_a_user, {}, "GS602", "remembered"),
    ("never called", never_called, {}, "GS602", "no call of the model was seen"),
    ("short", short, {}, "GS206", "the run was too short"),
    ("no watch of networks", train, {}, "GS306", "gradsight check"),
]


@pytest.mark.parametrize(
    ("loop", "options", "code", "reason"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_the_reason_is_the_real_one(
    loop: Loop, options: Changes, code: str, reason: str, tmp_path: Path
) -> None:
    assert reason in reasons(tmp_path, loop, **options)[code]


def test_an_ordinary_run_skips_only_what_it_cannot_have(tmp_path: Path) -> None:
    """No reason is given for a check that could judge."""
    skipped = reasons(tmp_path, lambda *given: train(*given, steps=60))
    assert set(skipped) == {"GS306", "GS404", "GS409", "GS503", "GS504", "GS505"}


def test_an_error_of_ours_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gradsight.session.first_look.look_aside", breaks)
    with pytest.warns(GradsightWarning, match="an error of our own"):
        skipped = reasons(tmp_path)
    assert (
        skipped["GS602"]
        == 'Gradsight failed internally: see "What Gradsight could not do" in the report'
    )
