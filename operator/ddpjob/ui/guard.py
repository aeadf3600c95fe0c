"""Who may read the pages: requests from a browser of this machine that know the token."""

import secrets
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Cache-Control": "no-store",
    # No other site gets the address, which has the token. With no-referrer the Origin of a form would be null.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Guard:
    """Refuses requests under another name of this machine, from other sites, and without the token.

    A site that lets its name stand for 127.0.0.1 (DNS rebinding) sends its name as ``Host``. Other users of this
    machine can connect, and do not know the token, which is the first part of each path.

    Args:
        hosts: the values of ``Host`` that are served.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str]) -> None:
        self._app, self._token, self._hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = self._refusal(scope)
        if refused is not None:
            await PlainTextResponse(refused[1], refused[0], _HEADERS)(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            return 421, "ddpjob ui answers under 127.0.0.1 and localhost alone\n"
        given = scope["path"].lstrip("/").partition("/")[0]
        if not secrets.compare_digest(given.encode(), self._token.encode()):
            return 404, "open the address that ddpjob ui has printed: it has a token\n"
        if scope["method"] not in ("GET", "HEAD"):
            origin = headers.get("origin")
            own = origin is not None and origin.removeprefix("http://") in self._hosts
            if not own or headers.get("sec-fetch-site", "same-origin") != "same-origin":
                return 403, "this request came from another site\n"
        return None
