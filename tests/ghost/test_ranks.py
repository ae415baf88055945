"""Two gloo ranks: the direction is the global one, every rank scores its own samples, and the sums
add up.
"""

from pathlib import Path

import pytest

from launch import run_ranks

SCRIPT = Path(__file__).with_name("ranks.py")


@pytest.mark.parametrize(
    ("kind", "exact_grad"),
    [
        ("ddp", "exact"),
        ("fsdp2", "fast"),
        pytest.param("ddp", "fast", marks=pytest.mark.slow),
        pytest.param("fsdp2", "exact", marks=pytest.mark.slow),
    ],
)
def test_two_ranks(kind: str, exact_grad: str, tmp_path: Path) -> None:
    printed = run_ranks(SCRIPT, kind, tmp_path, exact_grad)
    checks = 3 if kind == "ddp" else 1
    if exact_grad == "fast":
        checks += 2  # one pass, and both modes in bf16
    assert printed.count("ok") == 2 * checks, printed
