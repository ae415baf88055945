"""The live page in a real browser, beside a real training process."""

import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page

import warm
from browser import Visits
from gradsight import open_run
from show.serve.served import NAMES, norm, record, serving

pytestmark = pytest.mark.slow

TRAINING = """
import sys
import time
from pathlib import Path

import torch

import gradsight

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gradsight.watch(model, optimizer, run_dir=sys.argv[1], quiet=True) as watch:
    print("training", flush=True)
    while not Path(sys.argv[2]).exists():
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        if Path(sys.argv[3]).exists():
            model[2].weight.grad.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        watch.log(loss=loss)
        time.sleep(0.02)
"""
AT_LEAST = "step => Number(document.getElementById('steps').dataset.last) >= step"


def last_step(page: Page) -> int:
    return int(page.locator("#steps").get_attribute("data-last") or -1)


def wait_for(page: Page, step: int) -> None:
    """Until the page shows this step."""
    page.wait_for_function(AT_LEAST, arg=step)


@contextmanager
def training(run: Path, stop: Path, spoil: Path) -> Iterator[subprocess.Popen[str]]:
    process = warm.Popen(
        ["-c", TRAINING, run, stop, spoil],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "training\n"
        yield process
    finally:
        stop.touch()
        process.communicate(timeout=60)


def test_a_run_that_is_being_trained(visit: Visits, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spoil = tmp_path / "spoil"
    with (
        training(run, tmp_path / "stop", spoil) as process,
        serving(run, tmp_path / "cache") as server,
    ):
        page = visit(server.url)
        assert "token" not in page.url
        assert page.locator("#verdict").get_attribute("data-status") == "healthy"
        seen = last_step(page)
        wait_for(page, seen + 20)
        heat = page.locator("#heat")
        assert int(heat.get_attribute("data-to") or 0) >= seen + 20, "the picture has grown too"
        page.fill("#filter", "weight")
        spoil.touch()
        page.wait_for_selector('[data-finding="GS103"]')
        page.wait_for_selector('#verdict[data-status="critical"]')
        assert "critical" in page.title()
        assert page.input_value("#filter") == "weight", "what the reader chose stays"
        page.fill("#filter", "")
        (tmp_path / "stop").touch()
        process.wait(timeout=60)
        made = [step.step for step in open_run(run).steps()]
        wait_for(page, made[-1])
        hover_and_compare(page, run)


def hover_and_compare(page: Page, run: Path) -> None:
    """Random cells of the page are those of the record."""
    recorded = {(stat.parameter, stat.step): stat.l2 for stat in open_run(run).parameter_stats()}
    page.locator("#heat").scroll_into_view_if_needed()
    box = page.locator("#heat").bounding_box()
    assert box is not None
    choice = random.Random(0)
    parameters = 0
    for _ in range(30):
        x = box["x"] + choice.random() * (box["width"] - 1)
        y = box["y"] + choice.random() * (box["height"] - 1)
        page.mouse.move(x, y)
        cell = page.locator("#cell").evaluate("cell => ({...cell.dataset})")
        steps = range(int(cell["from"]), int(cell["to"]) + 1)
        norms = [recorded.get((cell["parameter"], step)) for step in steps]
        if norms[0] is None:
            continue  # a block
        parameters += 1
        finite = [value for value in norms if value is not None and value == value]
        if len(finite) < len(norms):
            assert cell["max"] == "nan"
        else:
            assert float(cell["max"]) == pytest.approx(max(finite), rel=2e-3)
        if finite:
            assert float(cell["min"]) == pytest.approx(min(finite), rel=2e-3)
    assert parameters > 5


def test_a_long_run_grows_is_zoomed_and_outgrows_its_columns(visit: Visits, tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run, range(4000))
    with serving(run, tmp_path / "cache") as server:
        page = visit(f"{server.url}#from=3000&to=3019&step=3005&row=head")
        page.wait_for_selector('#heat[data-from="3000"]')
        # Zoomed in, every step is a column of its own: finer columns are asked for.
        page.wait_for_selector('#cell[data-from="3005"][data-to="3005"]')
        value = float(page.locator("#cell").get_attribute("data-max") or 0)
        assert value == pytest.approx(norm(3005, NAMES.index("head")), rel=2e-3)
        record(run, range(4000, 4100))
        wait_for(page, 4099)
        assert page.locator("#heat").get_attribute("data-to") == "3019", "what is seen stays"
        page.wait_for_selector('#cell[data-from="3005"][data-to="3005"]')
        # Twice as many columns as there should be: the page takes coarser ones.
        record(run, range(4100, 9000))
        wait_for(page, 8999)
        page.keyboard.press("0")
        assert page.locator("#heat").get_attribute("data-to") == "8999"
        assert page.locator("#live").text_content() == "live"
        hover_and_compare(page, run)


def test_a_run_is_removed_while_it_is_shown_and_comes_again(visit: Visits, tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run, range(30))
    with serving(run, tmp_path / "cache") as server:
        page = visit(server.url)
        shutil.rmtree(run)
        page.wait_for_selector("#live.trouble")
        assert "no run directory" in (page.locator("#live").text_content() or "")
        assert last_step(page) == 29, "what was read is still shown"
        record(run, range(12), finding="warning")
        page.wait_for_selector('#verdict[data-status="warning"]')
        wait_for(page, 11)
        assert last_step(page) == 11


def test_the_server_is_started_again(visit: Visits, tmp_path: Path) -> None:
    run = tmp_path / "run"
    record(run, range(30))
    with serving(run, tmp_path / "cache") as server:
        port = server.port
    with serving(run, tmp_path / "cache", port) as server:
        page = visit(server.url)
        other = visit(server.url)
        token = server.token
    page.wait_for_selector("#live.trouble")
    record(run, range(30, 40))
    with serving(run, tmp_path / "cache", port) as server:
        assert server.token == token
        for each in (page, other):
            wait_for(each, 39)
            page.wait_for_selector("#live:not(.trouble)")
    # The browser itself complains while nobody is there.
    visit.errors[:] = [text for text in visit.errors if "ERR_CONNECTION_REFUSED" not in text]


def test_the_list_of_runs_is_live(visit: Visits, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with serving(runs, tmp_path / "cache") as server:
        page = visit(server.url)
        assert page.locator("[data-run]").count() == 0
        assert page.locator("#none").is_visible()
        record(tmp_path / "other", range(3))
        for number in range(100):
            shutil.copytree(tmp_path / "other", runs / f"run{number}")
        record(runs / "<script>alert(1)</script>\u202e\x1b[31m", range(3), finding="critical")
        page.wait_for_function("() => document.querySelectorAll('[data-run]').length === 101")
        bad = page.locator('[data-status="critical"]')
        assert bad.count() == 1
        assert bad.get_attribute("data-run") == "<script>alert(1)</script>\\u202e\\x1b[31m"
        page.fill("#filter", "run7")
        assert page.locator("[data-run]:visible").count() == 11
        shutil.rmtree(runs / "run7")
        page.wait_for_function("() => document.querySelectorAll('[data-run]').length === 100")
        page.fill("#filter", "script")
        bad.click()
        page.wait_for_selector("html[data-ready] #verdict[data-status=critical]")
        assert last_step(page) == 2


def test_a_run_that_has_not_begun(visit: Visits, tmp_path: Path) -> None:
    record(tmp_path / "run", range(0))
    with serving(tmp_path / "run", tmp_path / "cache") as server:
        page = visit(server.url)
        assert page.locator("#verdict").get_attribute("data-status") == "warning"
        record(tmp_path / "run", range(5))
        wait_for(page, 4)
        page.wait_for_selector("#heat[data-to='4']")
