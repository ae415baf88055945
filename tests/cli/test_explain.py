"""`gradsight explain`: the page of a check, made from the check itself, without torch."""

import subprocess
import sys
import textwrap

import pytest

from gradsight.cli import main
from gradsight.cli.explain import explained
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
    for advice in (check.advice, check.advice.if_clipped or check.advice):
        assert textwrap.indent(advice.fix, "    ") in page
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


@pytest.mark.parametrize(
    ("code", "when"),
    [
        ("GS103", "The check runs at every step."),
        ("GS601", "The check runs once, when the first step has been examined."),
        ("GS607", "The check runs once, when the first step has been examined."),
        ("GS609", "The check runs at steps whose backward passes are recorded"),
    ],
)
def test_it_says_when_the_check_runs(code: str, when: str) -> None:
    page = " ".join(explained(code).split())
    assert when in page
    assert page.count("The check runs") == 1


def test_a_share_is_a_fraction_and_nothing_else() -> None:
    """Settings that compare two sizes have other names."""
    with_share = {code for code, check in CHECKS.items() if "share" in check.defaults}
    assert with_share == {
        *(
            "GS107",
            "GS205",
            "GS401",
            "GS403",
            "GS404",
            "GS405",
            "GS407",
            "GS604",
            "GS610",
            "GS613",
            "GS614",
        )
    }
    for code in with_share:
        assert 0 < CHECKS[code].defaults["share"] <= 1
        assert "A share is a fraction of 1" in explained(code)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from gradsight.cli import main; "
        "assert main(['explain', 'GS103']) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
