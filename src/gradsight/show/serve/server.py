"""Starts the server: on 127.0.0.1 alone, with its address printed before anything is loaded."""

import contextlib
import hashlib
import os
import secrets
import signal
import socket
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradsight.errors import UsageError
from gradsight.show.serve.cache import cache_root

if TYPE_CHECKING:
    from gradsight.show.serve.live_payload import DumpsOf

ADDRESS = "127.0.0.1"
"""Never another: what a run tells is the user's, and this server knows no users."""
USUAL_PORT = 6116
_BACKLOG = 512
_ANY = 0


def serve_folder(
    folder: Path, port: int | None, dumps_of: "DumpsOf", open_page: bool = False
) -> None:
    """Show a run, or the runs of a folder, until somebody ends it.

    port: None takes the usual one, or a free one where that is taken; 0 takes a free one.
    """
    with _ctrl_c_ends_at_once() as loaded, contextlib.closing(_listening(port)) as listener:
        number = listener.getsockname()[1]
        token = _token(folder, number, port)
        # At once: whoever opens it now waits in the queue until all is loaded.
        address = f"http://{ADDRESS}:{number}/?token={token}"
        print(address, flush=True)
        print(f"from another machine: ssh -L {number}:{ADDRESS}:{number} {_host()}", flush=True)
        if open_page:
            webbrowser.open(address)
        # Ctrl-C is how a server is meant to end.
        with contextlib.suppress(KeyboardInterrupt):
            _run(folder, listener, token, dumps_of, loaded)


@contextlib.contextmanager
def _ctrl_c_ends_at_once() -> Iterator[threading.Event]:
    """While packages are loaded, Ctrl-C ends the process: there is nothing to lose yet.

    A KeyboardInterrupt inside the import of a compiled module comes out as another error, or as a
    line on stderr. Yields what is set once all is loaded: from then on Python's own way holds.
    """
    loaded = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield loaded
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: object) -> None:
        if loaded.is_set():
            raise KeyboardInterrupt
        os._exit(0)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield loaded
    finally:
        signal.signal(signal.SIGINT, before)


def _run(
    folder: Path,
    listener: socket.socket,
    token: str,
    dumps_of: "DumpsOf",
    loaded: threading.Event,
) -> None:
    import uvicorn

    from gradsight.show.serve.app import FollowedRuns, make_app
    from gradsight.show.serve.door import TokenDoor

    followed = FollowedRuns(folder, dumps_of)
    app = make_app(folder, followed)
    config = uvicorn.Config(
        TokenDoor(app, listener.getsockname()[1], token),
        # The same on every machine, whatever else is installed beside it.
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",  # what strangers send is no news
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    app.state.server = server
    loaded.set()
    with contextlib.closing(followed):
        server.run(sockets=[listener])


def _listening(port: int | None) -> socket.socket:
    """A socket on which connections queue up already."""
    wanted = [USUAL_PORT, _ANY] if port is None else [port]
    for number in wanted:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, number))
        except (OSError, OverflowError) as error:
            listener.close()
            refusal = error
            continue
        listener.listen(_BACKLOG)
        return listener
    why = getattr(refusal, "strerror", None) or str(refusal)
    raise UsageError(f"port {port} cannot be had: {why}; --port 0 takes a free one")


def _token(folder: Path, port: int, asked: int | None) -> str:
    """A secret for the address; the same again where a server is started again in its place.

    So a page that is open goes on when the server does. Nobody else can read where it is kept.
    """
    fresh = secrets.token_urlsafe(24)
    if asked == _ANY:
        return fresh
    place = f"{folder.resolve()}:{port}"
    file = cache_root() / "tokens" / hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return fresh
    with os.fdopen(handle, "r+", encoding="ascii", errors="replace") as stream:
        about = os.fstat(handle)
        kept = stream.read()
        is_ours = about.st_uid == os.geteuid() and not about.st_mode & 0o077
        if is_ours and len(kept) == len(fresh):
            return kept
        stream.seek(0)
        stream.truncate()
        stream.write(fresh)
        os.fchmod(handle, 0o600)
    return fresh


def _host() -> str:
    return socket.gethostname() or "HOST"
