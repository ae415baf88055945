"""What notebooks show of a report, a run and a peak of memory: readable, and nothing that runs."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradsight.store.reader import open_run
from gradsight.values.findings import Finding
from gradsight.values.health_report import ParameterCounts, make_report
from gradsight.values.memory import MemoryUse
from show.page.runs import finding, plain_norms, record

TRICK = "<script>taken()</script><img src=x onerror=taken()> \u202eexe"
HARMLESS = {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}


class Seen(HTMLParser):
    """Every tag and every text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert attrs == []
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(thing: object) -> list[str]:
    html = thing._repr_html_()  # type: ignore[attr-defined]
    seen = Seen(html)
    assert seen.tags <= HARMLESS
    assert "\u202e" not in html
    return seen.texts


def tricky() -> Finding:
    return finding("GS103", 3, "critical", name=TRICK, evidence=TRICK)


def test_a_health_report() -> None:
    report = make_report(9, 1.5, ParameterCounts(0, 0, 0, 4), [tricky()], steps=10)
    texts = shown(report)
    assert "❌ critical: 1 finding in 10 steps" in texts
    assert "GS103" in texts
    assert any("<script>taken()" in text and "\\u202e" in text for text in texts)
    healthy = shown(make_report(9, 1.5, ParameterCounts(0, 0, 0, 4), [], steps=10))
    assert "✅ healthy: no finding in 10 steps" in healthy


def test_a_run(tmp_path: Path) -> None:
    run = record(tmp_path / "first", plain_norms(12, 14), findings=[tricky()])
    texts = shown(open_run(run.path))
    assert "first: steps up to 11, 1 finding" in texts
    assert "GS103" in texts


@pytest.mark.parametrize(("predicted", "word"), [(True, "predicted"), (False, "measured")])
def test_a_peak_of_memory(predicted: bool, word: str) -> None:
    kinds = {"parameters": 1_000_000, "activations": 3_000_000}
    texts = shown(MemoryUse(4_000_000, kinds, predicted=predicted, notes=(TRICK,)))
    assert f"Peak 4.00 MB, {word} on cpu" in texts
    assert texts.index("activations") < texts.index("parameters")
    assert "75%" in texts
