"""The answers of the server: a run's page and what it asks for, or the list of runs. No torch.

/                  the run's page, or the list where the folder holds runs
/api/data          everything that the page shows, as JSON
/api/heat          the picture of the steps `from` to `to`, in columns of `factor` steps
/api/events        server-sent events: what is new to a page that shows what it says
/api/runs          (list) the runs with their verdicts
/api/changes       (list) the same as events, whenever it changes
/run/NAME/...      (list) the page of one run, and what it asks for, as above

No file of a run is handed out, and a run is found by its name among those below the folder: there
is no path that could lead out of it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from gradsight.errors import GradsightError
from gradsight.show.page.assemble import page
from gradsight.show.serve.list_page import list_page, list_rows
from gradsight.show.serve.listing import Listing
from gradsight.show.serve.live_payload import DumpsOf, LivePayload, Shown
from gradsight.show.serve.live_run import LiveRun
from gradsight.store.run_listing import run_in

_FIRST = 0.4
"""Seconds that the first answer may read; a longer run is shown in part, and grows."""
_LOOK_EVERY = 0.4
_AT_MOST = 1.5
_LIST_EVERY = 1.5
_STILL_HERE = 10.0
_EVENT_STREAM = "text/event-stream"
_MOST_FOLLOWED = 16
"""Runs whose pictures are kept open; the one that was not asked for longest is closed first."""


class FollowedRuns:
    """The runs that somebody looks at."""

    def __init__(self, folder: Path, dumps_of: DumpsOf) -> None:
        self._folder = folder
        self._dumps_of = dumps_of
        self._runs: dict[str, tuple[LiveRun, LivePayload]] = {}

    def get(self, name: str) -> tuple[LiveRun, LivePayload]:
        """A run by its name; 404 where there is none."""
        known = self._runs.pop(name, None)
        if known is None:
            place = run_in(self._folder, name)
            if place is None:
                raise HTTPException(404, "there is no such run here")
            live = LiveRun(place)
            known = (live, LivePayload(live, self._dumps_of))
        self._runs[name] = known  # now the last one that was asked for
        while len(self._runs) > _MOST_FOLLOWED:
            self._runs.pop(next(iter(self._runs)))[0].close()
        return known

    def close(self) -> None:
        """Keep the pictures for the next server."""
        for live, _ in self._runs.values():
            live.close()
        self._runs.clear()


def make_app(folder: Path, followed: FollowedRuns) -> Starlette:
    """The answers for a run, or for the runs of a folder."""
    answers = _RunAnswers(followed)
    is_run = run_in(folder, ".") is not None
    if is_run:
        routes = answers.routes("")
    else:
        lists = _ListAnswers(Listing(folder))
        routes = [*lists.routes(), *answers.routes("/run/{name:path}")]
    app = Starlette(routes=routes)
    # Only what is named is there; a redirection would say that something else is.
    app.router.redirect_slashes = False
    return app


class _RunAnswers:
    """A run's page and what it asks for."""

    def __init__(self, followed: FollowedRuns) -> None:
        self._followed = followed

    def routes(self, prefix: str) -> list[Route]:
        """The longer paths first: a name may hold slashes."""
        return [
            Route(f"{prefix}/api/data", self.data),
            Route(f"{prefix}/api/heat", self.heat),
            Route(f"{prefix}/api/events", self.events),
            Route(f"{prefix}/", self.page),
        ]

    def _get(self, request: Request) -> tuple[LiveRun, LivePayload]:
        return self._followed.get(request.path_params.get("name", "."))

    async def _whole(self, request: Request) -> dict[str, Any]:
        live, payload = self._get(request)
        await asyncio.to_thread(live.refresh, _FIRST)
        try:
            return await asyncio.to_thread(payload.whole)
        except GradsightError as error:
            raise HTTPException(404, str(error)) from error

    async def page(self, request: Request) -> Response:
        whole = await self._whole(request)
        return HTMLResponse(await asyncio.to_thread(page, whole, live=True))

    async def data(self, request: Request) -> Response:
        return _json(await self._whole(request))

    async def heat(self, request: Request) -> Response:
        _, payload = self._get(request)
        steps = (_number(request, "from", 0), _number(request, "to", 2**62))
        level = await asyncio.to_thread(payload.window, *steps, _factor(request))
        if level is None:
            raise HTTPException(404, "nothing is measured yet")
        return _json(level)

    async def events(self, request: Request) -> Response:
        live, payload = self._get(request)
        shown = Shown(
            generation=_number(request, "generation", -1),
            factor=_factor(request),
            after=_number(request, "after", -1),
            parts=_number(request, "parts", -1),
        )
        return _events(request, _changes(live, payload, shown))


async def _changes(live: LiveRun, payload: LivePayload, shown: Shown) -> AsyncIterator[str | None]:
    """A message whenever the run has grown; None where nothing has happened."""
    version = -1
    while True:
        # A long run that is being opened is read on, and shown now and then.
        more = await asyncio.to_thread(live.refresh, _AT_MOST)
        if live.version == version:
            yield None
        else:
            version = live.version
            message, shown = await asyncio.to_thread(payload.update, shown)
            yield json.dumps(message)
        if not more:
            await asyncio.sleep(_LOOK_EVERY)


class _ListAnswers:
    """The list of runs."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    def routes(self) -> list[Route]:
        return [
            Route("/api/runs", self.runs),
            Route("/api/changes", self.changes),
            Route("/", self.page),
        ]

    async def page(self, request: Request) -> Response:
        runs = await asyncio.to_thread(self._listing.runs)
        return HTMLResponse(list_page(self._listing.folder, runs))

    async def runs(self, request: Request) -> Response:
        return _json(await self._rows())

    async def changes(self, request: Request) -> Response:
        return _events(request, self._changes())

    async def _rows(self) -> list[dict[str, Any]]:
        return list_rows(await asyncio.to_thread(self._listing.runs))

    async def _changes(self) -> AsyncIterator[str | None]:
        before: list[dict[str, Any]] | None = None
        while True:
            now = await self._rows()
            yield None if now == before else json.dumps(now)
            before = now
            await asyncio.sleep(_LIST_EVERY)


def _events(request: Request, messages: AsyncIterator[str | None]) -> Response:
    """Messages as server-sent events; a line now and then says that the server is still there."""

    async def lines() -> AsyncIterator[str]:
        said = time.monotonic()
        async for message in messages:
            # Pages that follow a run stay connected; a server that ends does not wait for them.
            if request.app.state.server.should_exit:
                return
            if message is not None:
                yield f"data: {message}\n\n"
            elif time.monotonic() - said < _STILL_HERE:
                continue
            else:
                yield ": still here\n\n"
            said = time.monotonic()

    if request.method == "HEAD":
        return Response(media_type=_EVENT_STREAM)
    return StreamingResponse(lines(), media_type=_EVENT_STREAM)


def _json(value: object) -> Response:
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _factor(request: Request) -> int:
    """Steps of a column; 400 where it is no power of two."""
    factor = _number(request, "factor", 1)
    if factor < 1 or factor & (factor - 1):
        raise HTTPException(400, "factor should be a power of two")
    return factor


def _number(request: Request, name: str, otherwise: int) -> int:
    """A whole number of the query; 400 where it is none."""
    given = request.query_params.get(name)
    if given is None:
        return otherwise
    try:
        return max(-(2**62), min(2**62, int(given)))
    except ValueError as error:
        raise HTTPException(400, f"{name} should be a whole number") from error
