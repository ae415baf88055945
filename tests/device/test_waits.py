"""Nothing drains the device, and all numbers are the CPU's: for every setting, at every lag."""

import math
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from device.clock import Speed
from device.simulated import simulated
from device.table import SETTINGS
from device.training import Settings, Trained, train
from gradsight.measure import host_copy
from gradsight.measure.host_copy import HostCopy

STEPS = 9
"""Step 8 is a closer look, as step 4 is."""
LONGER = {"watch": 28, "GradScaler, unscaled before": 28}
"""Steps 25 and 26 look at backward passes again, as the first ones do."""
STEADY = 5

LAGS: dict[str, tuple[Speed, ...]] = {
    "watch, log": ("slow", "fast", 20, 300),
    "accumulation, clipping": ("slow", 100),
    "histograms every step": ("slow", "fast"),
}
"""Where a setting runs at other lags than "slow"."""
FIRST_TIER = (
    ("watch, log", "slow"),
    ("watch, log", 20),
    ("accumulation, clipping", "slow"),
    ("GradScaler, unscaled before", "slow"),
    ("histograms every step", "slow"),
    ("a dump every step", "slow"),
    ("GhostEngine.observe", "slow"),
    ("GhostEngine.loss, one pass", "slow"),
)
CASES = [
    pytest.param(name, lag, marks=() if (name, lag) in FIRST_TIER else pytest.mark.slow)
    for name in SETTINGS
    for lag in LAGS.get(name, ("slow",))
]


@lru_cache
def on_the_cpu(name: str) -> dict[str, list[float | None]]:
    with TemporaryDirectory() as folder:
        steps = LONGER.get(name, STEPS)
        return train(SETTINGS[name], torch.device("cpu"), Path(folder), steps).numbers()


def differences(found: dict[str, list[float | None]], right: dict[str, list[float | None]]) -> Any:
    """The first number of each kind that is another."""
    assert found.keys() == right.keys()
    wrong = {}
    for name, numbers in right.items():
        assert len(found[name]) == len(numbers), name
        for number, expected in zip(found[name], numbers, strict=True):
            if not is_near(number, expected):
                wrong.setdefault(name, (number, expected))
    return wrong


def is_near(number: float | None, expected: float | None) -> bool:
    if number is None or expected is None:
        return number is expected
    return math.isclose(number, expected, rel_tol=1e-3, abs_tol=1e-7)


@pytest.mark.parametrize(("name", "speed"), CASES)
def test_no_step_drains_the_device(name: str, speed: Speed, tmp_path: Path) -> None:
    with simulated(speed) as there:
        trained = train(SETTINGS[name], there.device, tmp_path, LONGER.get(name, STEPS))
    assert trained.drains(STEADY) == []
    assert differences(trained.numbers(), on_the_cpu(name)) == {}
    assert [problem.message for problem in trained.run.problems()] == []


@pytest.mark.parametrize(
    "name",
    [
        "watch, log",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("GhostEngine.observe", "a dump every step")
        ),
    ],
)
@pytest.mark.parametrize("kind", ["cuda:1", "without float64"])
def test_other_devices_give_the_same_numbers(name: str, kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": kind} if ":" in kind else {"float64": False}
    with simulated(**options) as there:
        trained = train(SETTINGS[name], there.device, tmp_path, STEPS)
    assert differences(trained.numbers(), on_the_cpu(name)) == {}
    assert trained.drains(STEADY) == []


def test_training_is_bit_for_bit_what_it_is_alone(tmp_path: Path) -> None:
    settings = Settings(log=True, dropout=0.1, clip=True)
    with simulated(kind="cuda:1") as there:
        watched = train(settings, there.device, tmp_path, 6)
    with simulated(kind="cuda:1") as there:
        alone = train(settings, there.device, tmp_path, 6, watched=False)
    assert all(map(torch.equal, watched.weights, alone.weights))
    assert all(map(torch.equal, watched.generators, alone.generators))


# The tests can fail.


def trained_with(patched: Any, tmp_path: Path, kind: str = "simulated") -> Trained:
    with simulated(kind=kind) as there:
        return train(patched, there.device, tmp_path, STEPS)


def test_a_number_that_is_not_waited_for_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCopy, "read", lambda copy: copy._host.double().numpy().copy())
    trained = trained_with(SETTINGS["watch, log"], tmp_path)
    assert any(math.isnan(step.total_norm) for step in trained.run.steps())


def test_an_event_on_the_wrong_device_makes_numbers_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(device: torch.device) -> torch.Event:
        event = torch.Event(device)
        event.record()
        return event

    monkeypatch.setattr(host_copy, "record_event", careless)
    trained = trained_with(SETTINGS["watch, log"], tmp_path, "cuda:1")
    assert any(math.isnan(step.total_norm) for step in trained.run.steps())


def test_pageable_memory_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pageable = lambda shape, dtype, device: torch.empty(tuple(shape), dtype=dtype)  # noqa: E731
    monkeypatch.setattr(host_copy, "host_memory", pageable)
    trained = trained_with(SETTINGS["watch, log"], tmp_path)
    assert trained.drains(STEADY)
