"""`gradsight explain`: the page of a check, made from the check itself, without torch."""

import subprocess
import sys

import pytest

from gradsight.cli import main
from gradsight.health.explanation import explained
from gradsight.health.registry import CHECKS


@pytest.mark.parametrize("code", sorted(CHECKS))
def test_every_check_has_a_page(code: str) -> None:
    check = CHECKS[code]
    page = explained(code)
    assert page.startswith(f"{code} {check.name} ({check.severity}")
    for title in ("What", "Why", "How it is judged", "Fix", "How to silence it"):
        assert f"\n{title}\n    " in page
    for name, value in check.defaults.items():
        assert f"    {name} = {value:g}\n" in f"{page}\n"
    assert f'health={{"{code}": False}}' in page
    for line in check.advice.fix.splitlines():
        assert line in page
    assert "Why:" not in page


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gs401"]) == 0
    assert capsys.readouterr().out == f"{explained('GS401')}\n"
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(CHECKS)
    assert main(["explain", "GS999"]) == 64
    message = capsys.readouterr().err
    assert "GS999" in message
    assert all(code in message for code in CHECKS)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from gradsight.cli import main; "
        "assert main(['explain', 'GS103']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
