"""On several ranks."""

import json
from pathlib import Path
from typing import Any

from launch import run_ranks

SCRIPT = Path(__file__).with_name("ranks.py")


def told(kind: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run_ranks(SCRIPT, kind).split("RESULT ")[1].splitlines()[0])
    return answer


def test_the_module_inside_ddp_is_looked_at() -> None:
    found = told("ddp")
    assert found["False"]["codes"] == ["GS601"]
    assert found["True"]["codes"] == []


def test_fsdp2_is_left_out_and_said() -> None:
    found = told("fsdp")
    assert found["False"]["codes"] == found["True"]["codes"] == []
    assert "FSDP2" in found["True"]["abstained"]["GS601"]
