"""norms.svg: what it shows of a run, how small it stays, and that no text in it can do harm."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from gradsight.show.drawing import Area, curves
from gradsight.show.markdown import report_text
from gradsight.show.norm_chart import norm_chart
from gradsight.show.summary import summarize
from gradsight.store.run_files import write_run_report
from gradsight.values.findings import Finding
from gradsight.values.steps import Step
from show.test_summary import Recorded

RISING = Finding("GS202", "rising gradient", "warning", (), 60, "1 → 9", "m", "r", "")
NOT_A_NUMBER = Finding("GS103", "NaN gradient", "critical", (), 30, "seen", "m", "r", "")


def steps(norms: Sequence[float | None], clipped_to: float = math.inf) -> list[Step]:
    made = []
    for number, norm in enumerate(norms):
        clip = None
        if norm is not None and norm > clipped_to:
            clip = clipped_to / norm
        made.append(Step(number, float(number), total_norm=norm, clip_coef=clip))
    return made


def drawn(run: Recorded) -> str:
    text = norm_chart(summarize(run))
    assert text is not None
    return text


def texts(picture: str) -> list[str]:
    return [text for text in ElementTree.fromstring(picture).itertext() if text.strip()]


def elements(picture: str, kind: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(picture).iter() if each.get("class") == kind]


def curve(picture: str) -> list[tuple[float, float]]:
    data = elements(picture, "curve")[0].get("d", "")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([\d.]+)", data)]


def test_the_norm_is_drawn_on_a_logarithmic_axis() -> None:
    picture = drawn(Recorded(steps([1.0, 10.0, 100.0, 10_000.0])))
    assert {"Gradient Norm Over Training", "Step", "Gradient Norm"} <= set(texts(picture))
    assert {"1", "10", "100", "1000", "10000"} <= set(texts(picture))
    heights = [y for _, y in curve(picture)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    assert heights[2] - heights[3] == pytest.approx(2 * (heights[0] - heights[1]), abs=0.21)
    assert {"> 1000: critical", "> 100: warning", "0.1 to 10: healthy"} <= set(texts(picture))


def test_a_finding_stands_over_its_step() -> None:
    norms = np.linspace(1, 20, 101)
    picture = drawn(Recorded(steps(norms.tolist()), judged=[RISING, NOT_A_NUMBER]))
    labels = {each.text: each for each in elements(picture, "small warning")}
    line = elements(picture, "mark warning")[0].get("d", "")
    at = curve(picture)[60][0]
    assert line.startswith(f"M{at:.1f} ")
    assert float(labels["GS202"].get("x", "0")) == pytest.approx(at, abs=0.1)
    assert elements(picture, "small critical")[0].text == "GS103"
    assert "GS202 rising gradient, warning, from step 60" in texts(picture)


def test_labels_of_near_steps_lie_in_rows_of_their_own() -> None:
    near = [replace(RISING, code=f"GS20{n}", first_step=95 + n) for n in range(5)]
    same = [replace(RISING, code=f"GS40{n}", first_step=10) for n in range(5)]
    picture = drawn(Recorded(steps([1.0] * 101), judged=near + same))
    labels = elements(picture, "small warning")
    assert len({each.get("y") for each in labels if (each.text or "").startswith("GS2")}) == 5
    assert labels[0].text == "GS400, GS401, GS402 and 2 more"


def test_broken_and_zero_steps_are_marked_and_break_the_curve() -> None:
    picture = drawn(Recorded(steps([1.0, math.nan, 1.0, 0.0, math.inf, 1.0])))
    assert len(elements(picture, "mark critical")) == 2
    assert elements(picture, "curve")[0].get("d", "").count("M") == 3
    assert "✕ not finite on 2 steps, first at 1" in texts(picture)
    assert "on the lower edge: zero on 1 step" in texts(picture)


def test_what_the_grad_scaler_left_out_is_no_fault() -> None:
    made = [replace(step, skipped=True) for step in steps([math.inf, 1.0])]
    picture = drawn(Recorded(made))
    assert not elements(picture, "mark critical")
    assert len(elements(picture, "mark skipped")) == 1


def test_the_level_of_clipping_is_a_line() -> None:
    picture = drawn(Recorded(steps([0.5, 2.0, 8.0, 0.7], clipped_to=1.0)))
    assert "clipped to 1" in texts(picture)
    assert re.fullmatch(r"M\S+ \S+H\S+", elements(picture, "clip")[0].get("d", ""))
    varying = [replace(step, clip_coef=0.5) for step in steps([1.0, 2.0, 8.0])]
    assert "after clipping" in texts(drawn(Recorded(varying)))
    assert not elements(drawn(Recorded(steps([1.0, 2.0]))), "clip")


def test_a_long_run_stays_small_and_hides_nothing() -> None:
    norms = np.exp(np.random.default_rng(0).normal(size=100_000))
    norms[[40_000, 70_001]] = 1e6, 1e-9
    picture = drawn(Recorded(steps(norms.tolist())))
    assert len(picture.encode()) < 100_000
    area = Area(0, 0, 700, 1000, 0, 99_999, -10, 10)
    (piece,) = curves(list(enumerate(norms)), area)
    shown = np.array(piece)
    for column in range(700):
        here = norms[(np.arange(100_000) * 700 // 99_999) == column]
        heights = shown[shown[:, 0].astype(int) == column, 1]
        assert heights.min() == pytest.approx(area.y(here.max()))
        assert heights.max() == pytest.approx(area.y(here.min()))


@pytest.mark.parametrize(
    "norms",
    [[1.0], [math.nan], [0.0], [1e-320, 1e300], [None, 1.0, None]],
    ids=["one step", "nothing finite", "zero", "every size", "not measured on each step"],
)
def test_every_run_gives_a_picture(norms: list[float | None]) -> None:
    picture = drawn(Recorded(steps(norms)))
    assert "nan" not in "".join(re.findall(r' (?:d|x|y)="([^"]*)"', picture))


def test_text_from_a_record_is_only_text() -> None:
    evil = replace(RISING, code='"><script>', name="</text><script>\x00 & more", evidence="<b>")
    picture = drawn(Recorded(steps([1.0, 2.0]), judged=[evil]))
    assert "<script" not in picture
    assert "</text><script>\\x00 & more" in " ".join(texts(picture))


def test_it_is_readable_on_light_and_dark_pages() -> None:
    picture = drawn(Recorded(steps([1.0])))
    assert "@media (prefers-color-scheme: dark)" in picture
    # It brings its own paper: a page may be dark where the system is light.
    assert len(elements(picture, "paper")) == 1
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("made", [[], steps([None, None])], ids=["no steps", "no norms"])
def test_a_run_without_norms_has_no_picture(made: list[Step], tmp_path: Path) -> None:
    summary = summarize(Recorded(made))
    (tmp_path / "norms.svg").write_text("of an earlier report")
    write_run_report(tmp_path, report_text(summary), "", norm_chart(summary))
    assert "norms.svg" not in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "norms.svg").exists()


def test_the_report_shows_the_picture_beside_it(tmp_path: Path) -> None:
    summary = summarize(Recorded(steps([1.0])))
    write_run_report(tmp_path, report_text(summary), "", norm_chart(summary))
    (link,) = re.findall(r"!\[.*\]\((.*)\)", (tmp_path / "report.md").read_text())
    assert (tmp_path / link).read_text() == norm_chart(summary)
