"""Who may ask the server, and how: this machine's own address, reading only, with the token.

Other users of a machine can reach its loopback address, and so can any page in the user's browser:
by a name that resolves to 127.0.0.1, which the Host gives away. No torch.
"""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address carries the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_READING = ("GET", "HEAD")


class TokenDoor:
    """Lets in whoever reads from this address with the token, and nobody else."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app = app
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._token = token
        # Cookies are shared by all ports of a host: each server needs a name of its own.
        self._cookie = f"gradsight-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 4xx, or hand on."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not self._has_cookie(scope):
                    headers["Set-Cookie"] = cookie
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        """What is wrong with a request, if anything."""
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse(f"ask for {self._hosts[0]}, not for another host", 421)
        if scope["method"] not in _READING:
            return PlainTextResponse("this server is only read from", 405, {"Allow": "GET, HEAD"})
        if not (self._has_cookie(scope) or self._has_token(scope)):
            text = "open the address that gradsight serve has printed: it carries a token"
            return PlainTextResponse(text, 403)
        return None

    def _has_token(self, scope: Scope) -> bool:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        return len(given) == 1 and self._is_token(given[0])

    def _has_cookie(self, scope: Scope) -> bool:
        try:
            cookies = SimpleCookie("; ".join(Headers(scope=scope).getlist("cookie")))
        except CookieError:
            return False
        return self._cookie in cookies and self._is_token(cookies[self._cookie].value)

    def _is_token(self, given: str) -> bool:
        # Compared in constant time: how long a refusal takes tells nothing of the token.
        return hmac.compare_digest(given.encode(), self._token.encode())
