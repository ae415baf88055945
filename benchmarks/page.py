"""The page of long runs: how large, how long to write, how long until it is seen, how it answers.

Real Chromium, best of five. Beside each time stands that of an empty page, or of a command that
does nothing, in the same minute: on a busy machine the ratio tells more than the time.

    python benchmarks/page.py [--only 150x1000]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from long_run import write_run
from playwright.sync_api import Browser, Page, sync_playwright

SIZES = {(150, 1_000): (0.6, 0.5, 2), (150, 100_000): (3.5, 1.5, 8), (1_500, 20_000): (6.0, 2, 15)}
"""Parameters and steps; megabytes, seconds to the first paint and of the command, at most."""
TRIES = 5
QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
EMPTY = "<!doctype html><html data-ready><title>empty</title><p>empty</p></html>"
SEEN = """async () => {
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() / 1000;
}"""
TIMED = """async ([kind, value]) => {
  const target = document.getElementById(kind === "key" ? "heat" : "filter");
  if (kind !== "key") target.value = value;
  const event = kind === "key" ? new KeyboardEvent("keydown", {key: value, bubbles: true})
    : new Event("input", {bubbles: true});
  const started = performance.now();
  target.dispatchEvent(event);
  await new Promise(done => setTimeout(done));
  return performance.now() - started;
}"""


def command_seconds(*arguments: str) -> float:
    """The best of a few runs of a command."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gradsight", *arguments], capture_output=True)
        best = min(best, time.perf_counter() - started)
    return best


def first_paint(browser: Browser, file: Path) -> float:
    """Seconds from the beginning of the navigation until the picture is on the screen."""
    best = float("inf")
    for _ in range(TRIES):
        page = browser.new_page()
        page.goto(file.as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]")
        best = min(best, page.evaluate(SEEN))
        page.close()
    return best


def answer(page: Page, kind: str, *values: str) -> float:
    """The slowest answer to some actions, each the best of a few, in milliseconds."""
    best = [min(page.evaluate(TIMED, [kind, value]) for _ in range(3)) for value in values]
    return max(best)


def measure(browser: Browser, folder: Path, parameters: int, steps: int) -> None:
    limits = SIZES[parameters, steps]
    run = folder / f"{parameters}x{steps}"
    write_run(run, parameters, steps)
    nothing = command_seconds("--help")
    writing = command_seconds("report", str(run))
    file = run / "report.html"
    blank = folder / "empty.html"
    blank.write_text(EMPTY)
    empty = first_paint(browser, blank)
    paint = first_paint(browser, file)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.evaluate("document.getElementById('heat').focus()")
    zoom = answer(page, "key", "+", "-", "0")
    page.keyboard.press("+")
    pan = answer(page, "key", "ArrowRight", "ArrowLeft")
    page.evaluate("document.getElementById('fold').click()")
    unfolded = answer(page, "key", "+", "-", "0")
    sift = answer(page, "text", "h.1", "attn", "weight", "")
    page.close()
    size = file.stat().st_size / 1e6
    print(f"{parameters:,} parameters x {steps:,} steps")
    print(f"  file          {size:6.2f} MB   (at most {limits[0]})")
    print(f"  first paint   {paint:6.2f} s    (at most {limits[1]}; an empty page {empty:.2f} s)")
    print(f"  report        {writing:6.2f} s    (at most {limits[2]}; --help {nothing:.2f} s)")
    print(f"  zoom, pan     {zoom:6.1f} ms, {pan:.1f} ms   (at most 50)")
    print(f"  other folds   {unfolded:6.1f} ms   (zoom with blocks unfolded, or folded)")
    print(f"  filter        {sift:6.1f} ms   (at most 100)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one of the sizes, such as 150x1000")
    only = parser.parse_args().only
    path = shutil.which("chromium") or shutil.which("google-chrome")
    alone = ["--no-sandbox"] * (os.geteuid() == 0)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, *alone])
        for parameters, steps in SIZES:
            if only in (None, f"{parameters}x{steps}"):
                measure(browser, Path(folder), parameters, steps)
        browser.close()


if __name__ == "__main__":
    main()
