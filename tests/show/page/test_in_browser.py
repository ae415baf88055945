"""The page as people see it: real Chromium, from a file, without a network."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from browser import Visits
from gradsight.show.page.assemble import page as page_of
from gradsight.show.page.payload import run_payload
from gradsight.show.summary import summarize
from gradsight.store.reader import open_run
from gradsight.store.store import open_store
from gradsight.values.diagnoses import Diagnosis, GuiltyOperation, GuiltySample
from show.page.runs import NONE, Recorded, finding, parameter_names, plain_norms, record

pytestmark = pytest.mark.slow

SPIKE, DIP, BROKEN = 3_041, 6_007, 7_500


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """300 steps with every kind of cell; every number of it is in the page."""
    norms = plain_norms(300, 14)
    norms[200:, 1] = np.nan
    norms[210, 5] = np.inf
    norms[50:60, 2] = 0.0
    norms[80:120, 3] = NONE
    norms[:, 9] = NONE
    norms[150, :] *= 40
    norms[:, 13] *= 1e-14
    operation = GuiltyOperation("log", "forward", "h.0", "model.py:8", "x.log()", (), 0)
    cause = Diagnosis(operation, (GuiltySample(3, "doc-17", 0, 0, math.nan, None),), 0.2)
    findings = [
        finding("GS201", 150),
        finding("GS103", 200, "critical", name="NaN gradient", diagnosis=cause),
    ]
    place = tmp_path_factory.mktemp("runs") / "small"
    return record(place, norms, findings=findings, histograms=50)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """40,000 steps of plain noise, with one spike, one dip and one NaN of a single step each."""
    norms = plain_norms(40_000, 14)
    norms[SPIKE, 1] *= 2**9
    norms[DIP, 2] *= 2**-9
    norms[BROKEN, 3] = np.nan
    findings = [finding("GS201", 20_123, parameters=("h.1.mlp.bias",))]
    return record(tmp_path_factory.mktemp("runs") / "long", norms, findings=findings)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A model of 402 parameters in 100 blocks."""
    names = parameter_names(100)
    place = tmp_path_factory.mktemp("runs") / "many"
    return record(place, plain_norms(60, len(names)), names=names)


def address(run: Recorded, fragment: str = "") -> str:
    return run.html().as_uri() + fragment


def cell(page: Page) -> dict[str, str]:
    told: dict[str, str] = page.evaluate("({...document.getElementById('cell').dataset})")
    return told


def box(page: Page) -> dict[str, float]:
    """Where the map is, once it is on the screen."""
    page.evaluate("document.getElementById('heat').scrollIntoView({block: 'center'})")
    found = page.locator("#heat").bounding_box()
    assert found is not None
    return {name: float(value) for name, value in found.items()}


def unfold(page: Page) -> None:
    """Open whatever is behind a fold."""
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")


def hover(page: Page, across: float, down: float) -> dict[str, str]:
    """Point at a place of the map, in shares of its width and height."""
    area = box(page)
    page.mouse.move(area["x"] + area["width"] * across, area["y"] + area["height"] * down)
    return cell(page)


def check_cell(told: dict[str, str], run: Recorded, within: float) -> None:
    """What the page says of a cell is what the record has for its steps."""
    first, last = int(told["from"]), int(told["to"])
    chosen = (run.steps >= first) & (run.steps <= last)
    there = [value for value in run.row(told["parameter"])[chosen] if value != NONE]
    if not there:
        assert (told["min"], told["max"]) == ("", "")
        return
    finite = [value for value in there if math.isfinite(value)]
    largest = math.nan if any(map(math.isnan, there)) else max(there)
    assert float(told["max"]) == pytest.approx(largest, rel=within, abs=0, nan_ok=True), told
    if finite:
        assert float(told["min"]) == pytest.approx(min(finite), rel=within, abs=0), told


def test_what_the_contract_names(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    assert page.locator("#verdict").get_attribute("data-status") == "critical"
    assert page.title() == "1 critical, 1 warning - small"
    assert "NaN gradient" in page.inner_text("#verdict")
    codes = page.eval_on_selector_all("[data-finding]", "all => all.map(e => e.dataset.finding)")
    assert codes == ["GS103", "GS201"]
    steps = page.locator("#steps")
    assert (steps.get_attribute("data-first"), steps.get_attribute("data-last")) == ("0", "299")
    heat = page.locator("#heat")
    assert (heat.get_attribute("data-from"), heat.get_attribute("data-to")) == ("0", "299")
    assert heat.get_attribute("tabindex") == "0"
    assert page.locator("#cell").get_attribute("aria-live")
    assert page.eval_on_selector("#filter", "e => e.tagName") == "INPUT"
    modes = page.eval_on_selector_all("#mode option", "all => all.map(e => e.value)")
    assert modes == ["norm", "deviation", "update", "zeros", "weight", "change"]
    assert page.eval_on_selector("link[rel=icon]", "e => e.href").startswith("data:image/svg")
    card = page.inner_text("[data-finding=GS103]")
    for text in ("x.log()", "model.py:8", "doc-17", "clip_grad_norm_", "--data PATH"):
        assert text in card


@pytest.mark.parametrize(("mode", "factor"), [("update", 1e-3), ("weight", 10), ("change", 1e-2)])
def test_what_is_measured_on_some_steps_has_a_map(
    mode: str, factor: float, visit: Visits, small: Recorded
) -> None:
    page = visit(address(small, f"#mode={mode}&row=wte.weight&step=50"))
    page.wait_for_selector("#cell[data-max]")
    told = page.evaluate("({...document.getElementById('cell').dataset})")
    assert (told["parameter"], told["from"]) == ("wte.weight", "50")
    expected = factor * small.row("wte.weight")[50]
    assert float(told["max"]) == pytest.approx(expected, rel=0.005)


def test_experts_have_pictures_of_their_own(visit: Visits, tmp_path: Path) -> None:
    run = record(tmp_path / "run", plain_norms(60, 14))
    store = open_store(run.path)
    for step in (0, 50):
        store.add_experts(step, {"h.0.experts.w1": np.array([3.0, 0.0, 3.0, 0.0])})
    store.close()
    page = visit(run.html().as_uri())
    picture = page.locator("#experts canvas[data-group='h.0.experts.w1']")
    assert "4 experts, 2 without a gradient at step 50" in page.inner_text("#experts")
    picture.hover(position={"x": 40, "y": 5})
    assert "step 0, expert 0: 1.4 times an even share" in page.inner_text("#experts")
    picture.hover(position={"x": 40, "y": 17})
    assert "expert 1: no gradient" in page.inner_text("#experts")
    plain = record(tmp_path / "plain", plain_norms(5, 14))
    assert not visit(plain.html().as_uri()).locator("#experts-title").is_visible()


def test_cells_are_what_the_record_has(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    choose = random.Random(1)
    seen = set()
    for _ in range(70):
        told = hover(page, choose.random(), choose.random())
        check_cell(told, small, within=0.002)
        seen.add(told["max"] if told["max"] in ("", "nan", "inf", "0") else "number")
    assert {"", "nan", "number"} <= seen
    page.goto(address(small, "#rows=h.0.mlp.weight"))  # the parameter that is zero and absent
    for across in (0.18, 0.3, 0.5):
        check_cell(hover(page, across, 0.5), small, within=0.002)


def test_cells_of_a_long_run_are_thinned_and_true(visit: Visits, long: Recorded) -> None:
    page = visit(address(long))
    assert "A column stands for 32 steps" in page.inner_text("#thinned")
    choose = random.Random(2)
    for _ in range(30):
        told = hover(page, choose.random(), choose.random())
        assert int(told["to"]) > int(told["from"])
        check_cell(told, long, within=0.1)
    # Near a finding every step is a column of its own.
    page.goto(address(long, "#from=20100&to=20140"))
    for _ in range(20):
        told = hover(page, choose.random(), choose.random())
        assert told["from"] == told["to"]
        check_cell(told, long, within=0.1)


def row_pixels(page: Page, row: int) -> list[list[int]]:
    """The pixels of a row of the map, from left to right."""
    script = """(row) => {
      const canvas = document.getElementById("heat"), rows = Number(canvas.dataset.rows);
      const y = Math.floor((row + 0.5) * canvas.height / rows);
      const data = canvas.getContext("2d").getImageData(0, y, canvas.width, 1).data;
      return Array.from({length: canvas.width}, (_, x) => [...data.slice(4 * x, 4 * x + 3)]);
    }"""
    pixels: list[list[int]] = page.evaluate(script, row)
    return pixels


def distance(one: list[int], other: list[int]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("mode", ["norm", "deviation"])
@pytest.mark.parametrize(("step", "parameter"), [(SPIKE, 1), (DIP, 2)])
def test_a_single_step_is_seen_among_thousands(
    visit: Visits, long: Recorded, mode: str, step: int, parameter: int
) -> None:
    name = long.names[parameter]
    link = address(long, f"#rows={name}&mode={mode}&step={step}&row={name}")
    # So narrow that several columns share a pixel, and the step's is not the first of them.
    page = visit(link, viewport={"width": 480, "height": 800})
    told = cell(page)
    assert int(told["from"]) + 32 <= step
    assert int(told["from"]) <= step <= int(told["to"])
    check_cell(told, long, within=0.1)
    pixels = row_pixels(page, 0)
    at = int((step + 0.5) / 40_000 * len(pixels))
    here = max(distance(pixels[x], pixels[x + 5]) for x in range(at - 1, at + 2))
    rest = range(len(pixels) // 4, len(pixels) - 20)
    noise = sorted(distance(pixels[x], pixels[x + 5]) for x in rest)
    assert here > 40, "the step has no colour of its own"
    assert here > 2 * noise[len(noise) * 98 // 100], "plain noise is a bar code"


def test_nan_is_hatched(visit: Visits, long: Recorded) -> None:
    name = long.names[3]
    page = visit(address(long, f"#rows={name}&from={BROKEN - 10}&to={BROKEN + 10}"))
    colours = {tuple(pixel) for pixel in row_pixels(page, 0)}
    assert {(0xC2, 0x18, 0x8F), (0xF7, 0xCF, 0xE9)} <= colours
    assert "NaN" in page.inner_text("#legend")


def test_a_link_is_the_state(visit: Visits, small: Recorded) -> None:
    fragment = "#rows=attn&mode=deviation&from=100&to=180&order=name&step=150&row=h.0.attn.bias"
    page = visit(address(small, fragment))
    assert page.input_value("#filter") == "attn"
    assert page.input_value("#mode") == "deviation"
    assert page.input_value("#order") == "name"
    heat = page.locator("#heat")
    assert (heat.get_attribute("data-from"), heat.get_attribute("data-to")) == ("100", "180")
    assert cell(page)["parameter"] == "h.0.attn.bias"
    assert cell(page)["from"] == "150"
    page.fill("#filter", "mlp")
    page.select_option("#mode", "norm")
    page.select_option("#order", "size")
    hashed = page.evaluate("location.hash")
    assert "rows=mlp" in hashed
    assert "order=size" in hashed
    assert "mode" not in hashed  # the usual one needs no word
    page.evaluate("location.hash = 'from=20&to=60&rows=ln_f'")
    page.wait_for_function("() => document.getElementById('heat').dataset.to === '60'")
    assert page.input_value("#filter") == "ln_f"


@pytest.mark.parametrize(
    "fragment", ["#from=abc&to=&mode=evil&order=1&step=NaN", "#from=900&to=-5"]
)
def test_a_link_of_nonsense_shows_the_run(visit: Visits, small: Recorded, fragment: str) -> None:
    page = visit(address(small, fragment))
    heat = page.locator("#heat")
    assert 0 <= int(heat.get_attribute("data-from") or "") <= 299
    assert 0 <= int(heat.get_attribute("data-to") or "") <= 299
    assert page.input_value("#mode") == "norm"


def test_everything_by_keyboard(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    key = page.keyboard.press
    key("j")
    assert page.evaluate("document.activeElement.dataset.finding") == "GS103"
    key("j")
    assert page.evaluate("document.activeElement.dataset.finding") == "GS201"
    key("k")
    assert page.evaluate("document.activeElement.dataset.finding") == "GS103"
    key("/")
    page.keyboard.type("attn.bias")
    assert page.evaluate("location.hash") == "#rows=attn.bias"
    key("Escape")
    assert page.input_value("#filter") == ""
    page.focus("#heat")
    first = cell(page)
    key("ArrowRight")
    key("ArrowDown")
    moved = cell(page)
    assert int(moved["from"]) == int(first["from"]) + 1
    assert moved["parameter"] != first["parameter"]
    check_cell(moved, small, within=0.002)
    key("+")
    heat = page.locator("#heat")
    span = int(heat.get_attribute("data-to") or "") - int(heat.get_attribute("data-from") or "")
    assert 100 < span < 200
    key("-")
    key("0")
    assert (heat.get_attribute("data-from"), heat.get_attribute("data-to")) == ("0", "299")
    before = page.evaluate("document.documentElement.dataset.theme")
    key("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    key("?")
    assert page.locator("dialog").is_visible()
    key("Escape")
    assert not page.locator("dialog").is_visible()


def test_arrows_reach_beyond_the_edge_of_what_is_zoomed(visit: Visits, small: Recorded) -> None:
    page = visit(address(small, "#from=100&to=120&step=119&row=wte.weight"))
    page.focus("#heat")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert cell(page)["from"] == "123"


def test_zoom_by_dragging_and_back(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    area = box(page)
    page.mouse.move(area["x"] + area["width"] * 0.4, area["y"] + 20)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.6, area["y"] + 20, steps=4)
    page.mouse.up()
    heat = page.locator("#heat")
    assert abs(int(heat.get_attribute("data-from") or "") - 120) <= 2
    assert abs(int(heat.get_attribute("data-to") or "") - 180) <= 2
    assert "from=1" in page.evaluate("location.hash")
    page.mouse.dblclick(area["x"] + 50, area["y"] + 20)
    assert heat.get_attribute("data-to") == "299"


def test_a_click_keeps_the_line_of_a_row(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    area = box(page)
    names = []
    for down in (0.1, 0.5):
        page.mouse.click(area["x"] + 100, area["y"] + area["height"] * down)
        names.append(cell(page)["parameter"])
    page.mouse.move(area["x"] + 100, area["y"] + area["height"] * 0.9)
    page.wait_for_function("() => document.querySelectorAll('.pins span').length === 2")
    assert page.eval_on_selector_all(".pins span", "all => all.map(e => e.textContent)") == names
    assert names[0] not in page.inner_text("[data-line=row] .note")
    page.mouse.click(area["x"] + 100, area["y"] + area["height"] * 0.5)
    page.mouse.move(area["x"] + 100, area["y"] + area["height"] * 0.9)
    page.wait_for_function("() => document.querySelectorAll('.pins span').length === 1")


def test_a_frozen_parameter_has_no_row(visit: Visits, tmp_path: Path) -> None:
    norms = plain_norms(20, 14)
    norms[:, 3:6] = NONE
    names = parameter_names(3)
    parameters = [
        {"name": name, "trainable": place not in (3, 4)} for place, name in enumerate(names)
    ]
    run = record(tmp_path / "run", norms, config={"parameters": parameters})
    page = visit(address(run))
    # One that is trained and has no gradient is a fault, and stays in sight.
    assert page.evaluate("Number(document.getElementById('heat').dataset.total)") == 15
    assert "2 frozen parameters without a gradient have no row." in page.inner_text("#thinned")


def test_a_finding_is_shown_on_the_map(visit: Visits, small: Recorded) -> None:
    page = visit(address(small))
    page.click("[data-finding=GS201] button.plain")
    assert cell(page)["from"] == "150"
    assert cell(page)["parameter"] == "h.0.attn.weight"
    heat = page.locator("#heat")
    assert int(heat.get_attribute("data-from") or "") > 100


def test_many_rows_start_folded(visit: Visits, many: Recorded) -> None:
    page = visit(address(many))
    rows = "Number(document.getElementById('heat').dataset.rows)"
    total = "Number(document.getElementById('heat').dataset.total)"
    assert page.evaluate(total) == 102
    told = hover(page, 0.5, 0.5)
    assert told["parameter"].startswith("h.")
    assert told["parameter"].count(".") == 1  # a block
    check_cell(told, many, within=0.002)
    page.click("#fold")
    assert page.evaluate(total) == 502
    assert page.evaluate(rows) < 502  # only what can be seen is painted
    page.focus("#heat")
    for _ in range(10):
        page.keyboard.press("Shift+ArrowDown")
    told = cell(page)
    assert int(told["parameter"].split(".")[1]) > 50
    check_cell(told, many, within=0.002)
    page.fill("#filter", "h.77.attn")
    assert page.evaluate(total) == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_for_people_who_cannot_see_well(
    visit: Visits, small: Recorded, theme: str
) -> None:
    page = visit(address(small), color_scheme=theme)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    unfold(page)
    result = Axe().run(page)
    bad = [
        each for each in result.response["violations"] if each["impact"] in ("serious", "critical")
    ]
    assert not bad, json.dumps(bad, indent=1)[:3000]


def test_a_phone_scrolls_in_one_direction(visit: Visits, small: Recorded, many: Recorded) -> None:
    for run in (small, many):
        page = visit(address(run), viewport={"width": 390, "height": 800})
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        check_cell(hover(page, 0.5, 0.5), run, within=0.002)


def test_it_prints_on_light_paper(visit: Visits, small: Recorded) -> None:
    page = visit(address(small), color_scheme="dark")
    dark = row_pixels(page, 0)
    page.evaluate("""() => {
      const theme = () => document.documentElement.dataset.theme;
      addEventListener("beforeprint", () => { window.paper = theme(); });
    }""")
    printed = page.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000
    assert page.evaluate("window.paper") == "light"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert row_pixels(page, 0) == dark


def test_the_issue_text_holds_no_text_of_a_sample(visit: Visits, small: Recorded) -> None:
    target = small.path / "with-texts.html"
    run = open_run(small.path)
    target.write_text(page_of(run_payload(run, summarize(run), lambda _: "my private diary")))
    page = visit(target.as_uri(), permissions=["clipboard-read", "clipboard-write"])
    assert "my private diary" in page.inner_text("[data-finding=GS103]")
    page.click("#copy")
    page.wait_for_function("() => document.getElementById('copy').textContent === 'Copied'")
    text = page.evaluate("navigator.clipboard.readText()")
    assert "GS103" in text
    assert "diary" not in text


def test_a_run_without_any_gradient_says_what_to_do(visit: Visits, tmp_path: Path) -> None:
    empty = record(tmp_path / "empty", np.zeros((0, 14)))
    page = visit(address(empty))
    assert page.locator("#verdict").get_attribute("data-status") == "warning"
    assert "warning" in page.title()
    assert "No gradient was recorded: watch(model, optimizer" in page.inner_text("#empty")


def test_one_step_is_enough_for_a_page(visit: Visits, tmp_path: Path) -> None:
    one = record(tmp_path / "one", plain_norms(1, 14))
    page = visit(address(one))
    check_cell(hover(page, 0.5, 0.5), one, within=0.002)


def test_steps_between_looks_belong_to_the_look_before(visit: Visits, tmp_path: Path) -> None:
    sparse = record(tmp_path / "sparse", plain_norms(40, 14), first=100, interval=10)
    page = visit(address(sparse))
    for across in (0.02, 0.31, 0.77):
        told = hover(page, across, 0.4)
        assert told["from"] == told["to"]
        assert int(told["from"]) % 10 == 0
        check_cell(told, sparse, within=0.002)
