"""Real Chromium for the tests of the page: the system's own, driven by playwright.

A test that asks for `visit` opens pages with it and fails on any console error and on any request
beyond the page itself. `BROWSER=0` leaves these tests out, and the summary says how many.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, Request

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install -y --no-install-recommends chromium"
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""A browser that does nothing of its own accord."""

LEFT_OUT = pytest.StashKey[int]()
RUNNING = pytest.StashKey[Playwright]()


def executable() -> str:
    """The system's browser; without one the test fails with the line that installs it."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.fail(f"the page is tested in Chromium, and there is none here: {INSTALL}")


@pytest.fixture(scope="session")
def browser(pytestconfig: pytest.Config) -> Iterator[Browser]:
    """One browser for all tests of a process."""
    from playwright.sync_api import sync_playwright

    path = executable()
    # Chromium's sandbox refuses to work for root.
    alone = ["--no-sandbox"] * (os.geteuid() == 0)
    with sync_playwright() as playwright:
        pytestconfig.stash[RUNNING] = playwright
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, *alone])
        yield browser
        browser.close()
        del pytestconfig.stash[RUNNING]


@dataclass
class Visits:
    """Opens pages, each in a browser context of its own, and keeps what they complain about."""

    browser: Browser
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)
    contexts: list[BrowserContext] = field(default_factory=list)

    def __call__(self, url: str, *, ready: bool = True, **options: object) -> Page:
        """A page, once its heat map is painted; options are those of a browser context.

        A page from a file may ask for nothing but itself, one from a server only for its origin.
        """
        context = self.browser.new_context(**options)  # type: ignore[arg-type]
        # A busy machine may need longer than the default of 30 seconds.
        context.set_default_timeout(120_000)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)
        self.allowed.add(_reach(url))
        page.goto(url)
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page

    def strangers(self) -> list[str]:
        """Requests beyond the pages that were opened."""
        return [url for url in self.requests if _reach(url) not in self.allowed]

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        # What is written into the page itself is no request to anybody.
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)

    def close(self) -> None:
        for context in self.contexts:
            context.close()


def _reach(url: str) -> str:
    """What a page may ask for: its own file, or everything of its own server."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return parts.path
    return f"{parts.scheme}://{parts.netloc}"


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    """Opens a page by its address; the test fails if a page complains or asks a stranger."""
    visits = Visits(browser)
    yield visits
    visits.close()
    assert visits.errors == []
    assert visits.strangers() == []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With BROWSER=0 no test that needs a browser is run."""
    if os.environ.get("BROWSER") != "0":
        return
    out = [item for item in items if _needs_browser(item)]
    items[:] = [item for item in items if not _needs_browser(item)]
    config.stash[LEFT_OUT] = len(out)
    config.hook.pytest_deselected(items=out)


def _needs_browser(item: pytest.Item) -> bool:
    return "browser" in getattr(item, "fixturenames", ())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of several tells whoever prints the summary."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    # Every worker collects everything, so that each knows the whole number.
    told = getattr(node, "workeroutput", {})
    if "left_out" in told:
        node.config.stash[LEFT_OUT] = told["left_out"]  # type: ignore[attr-defined]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"BROWSER=0: {count} tests in a browser were left out")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let only tests of the page see playwright's event loop as running.

    It is one for as long as the browser lives, and `asyncio.run` of any other test would refuse.
    """
    playwright = item.config.stash.get(RUNNING, None)
    if playwright is not None:
        loop = playwright._loop if _needs_browser(item) else None
        asyncio._set_running_loop(loop)
