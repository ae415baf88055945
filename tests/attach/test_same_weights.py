"""Scripts train the same weights with and without `gradsight check`."""

from pathlib import Path

import pytest

import warm
from attach.situations import Situation, check
from attach.situations.side_effects import SITUATIONS


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_the_weights_are_the_same(situation: Situation, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(situation.source)
    plain = warm.run([tmp_path / "plain.py"], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    checked = check(situation, tmp_path)
    assert trained(checked.output) == trained(plain.stdout)


def trained(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("trained ")]
    return line
