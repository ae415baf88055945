"""Posts findings to an address, off the training thread. The address is a secret, told to nobody.

One POST of JSON per finding, three tries of five seconds; no step waits for it, and closing waits
for a bounded time.
"""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from typing import Any

from gradsight.core.guard import Guard
from gradsight.core.problems import Problems

_TIMEOUT = 5.0
_TRIES = 3
_PAUSE = 0.5
_PATIENCE = 20.0
"""Seconds that closing waits for what is still to be posted."""
_MOST = 100
"""Findings that may wait; there are not as many codes."""


class Webhook:
    """Findings on their way to some addresses."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._waiting: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_MOST)
        self._thread: threading.Thread | None = None

    def post(self, address: str, body: dict[str, Any]) -> None:
        """Have this posted, soon."""
        # Made when it is first needed: most runs have nothing to say.
        if self._thread is None:
            guard = Guard(self._problems, "on_finding-post", "no more findings are posted")
            run = partial(guard.attempt, self._run)
            self._thread = threading.Thread(target=run, name="gradsight-post", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((address, body))
        except queue.Full:
            self._problems.report("on_finding-post", "too many findings wait to be posted")

    def close(self) -> None:
        """Post what is left, within a bounded time."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            self._problems.report(
                "on_finding-post",
                f"not every finding could be posted within {_PATIENCE:.0f} s of closing",
            )

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            fault = _post(*waiting)
            if fault is not None:
                code = waiting[1].get("code")
                self._problems.report(
                    "on_finding-post", f"{code} could not be posted in {_TRIES} tries: {fault}"
                )


def _post(address: str, body: dict[str, Any]) -> str | None:
    """Post it; what went wrong at last, in words without the address."""
    fault = None
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        try:
            _send(address, body)
        except urllib.error.HTTPError as error:
            fault = f"the answer was {error.code}"
        except Exception as error:
            # Only the kind: the text of some errors repeats the address.
            fault = type(error).__name__
        else:
            return None
    return fault


def _send(address: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=_TIMEOUT):
        pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A finding goes to the address that the user named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirection: the answer itself is then the fault."""
        return
