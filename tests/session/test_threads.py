"""Threads that train at once: no crash, exact numbers, nothing called true that is not."""

from pathlib import Path

import pytest

import warm
from session import threads_campaign


def test_threads_train_at_once(tmp_path: Path) -> None:
    """All scenes of the campaign, several times, in one process: what went wrong was a crash."""
    command = [threads_campaign.__file__, "--here", tmp_path, "--tries", 2]
    done = warm.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_comparison_of_weights_can_fail() -> None:
    trainee = threads_campaign.Trainee(0)
    trainee.train()
    trainee.check()
    next(trainee.model.parameters()).data += 1e-6
    with pytest.raises(AssertionError, match="training was changed"):
        trainee.check()
