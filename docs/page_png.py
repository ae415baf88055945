"""Draws docs/page-light.png, the page of a finished demo run, in the system's Chromium.

gradsight demo --run_dir RUN_DIR && python docs/page_png.py RUN_DIR
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH = 1180
TARGET = Path(__file__).parent / "page-light.png"
TIDY = "document.querySelectorAll('details[open]').forEach(fold => { fold.open = false; })"
BOTTOM = "document.getElementById('largest').getBoundingClientRect().top + scrollY"


def main(run_dir: Path) -> None:
    """Take a picture from the verdict to the heat map."""
    alone = ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--disable-gpu", *alone]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto((run_dir / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready]")
        page.evaluate(TIDY)
        area = {"x": 0, "y": 0, "width": WIDTH, "height": page.evaluate(BOTTOM) - 4}
        page.screenshot(path=TARGET, full_page=True, clip=area)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
