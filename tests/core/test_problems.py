"""How faults of Gradsight that training survives are shown."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from gradsight.core import problems
from gradsight.core.problems import Problems, say, show_lines_of_the_script
from gradsight.errors import GradsightWarning


@pytest.fixture
def shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings as Python formats them; pytest would collect them unformatted."""
    # Lightning sets a format of its own when it is imported.
    monkeypatch.setattr(warnings, "formatwarning", warnings._formatwarning_orig)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        yield caplog
        logging.captureWarnings(False)


def formatted(shown: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in shown.records if each.name == "py.warnings"]


def test_a_warning_shows_its_text_and_no_line_of_gradsight(
    shown: pytest.LogCaptureFixture,
) -> None:
    usual = warnings.formatwarning
    Problems().report("recorder", "the recorder is off: it failed")
    say("said directly")
    warnings.warn("a warning of the script", UserWarning, stacklevel=1)
    *ours, other = formatted(shown)
    assert ours == [
        "GradsightWarning: the recorder is off: it failed\n",
        "GradsightWarning: said directly\n",
    ]
    assert "test_problems.py" in other
    assert "UserWarning: a warning of the script\n" in other
    assert warnings.formatwarning is usual


def test_the_format_that_a_script_has_set_stays(
    shown: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", lambda *args: f"mine: {args[0]}")
    say("the recorder is off")
    assert formatted(shown) == ["mine: the recorder is off"]


def test_a_warning_can_be_caught_by_its_class() -> None:
    with pytest.warns(GradsightWarning, match="the recorder is off"):
        say("the recorder is off")


def test_a_warning_about_a_call_of_ours_shows_the_line_of_the_script(
    shown: pytest.LogCaptureFixture,
) -> None:
    show_lines_of_the_script()
    ours = problems.__file__
    warnings.warn_explicit("said by torch", UserWarning, ours, 12)
    warnings.warn_explicit("said elsewhere", UserWarning, "elsewhere.py", 12)
    first, second = formatted(shown)
    assert first.startswith(f"{__file__}:")
    assert "UserWarning: said by torch\n" in first
    assert second.startswith("elsewhere.py:12: UserWarning: said elsewhere")
