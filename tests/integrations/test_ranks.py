"""Two ranks, as torchrun starts them: loss and norm are those of the whole batch."""

from pathlib import Path

import pytest

from launch import run_ranks


@pytest.mark.slow
def test_two_ranks_through_every_door(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ranks.py")
    said = run_ranks(script, tmp_path)
    for name in ("hf", "accelerate", "lightning", "fsdp2"):
        assert f"{name} is right" in said, said
