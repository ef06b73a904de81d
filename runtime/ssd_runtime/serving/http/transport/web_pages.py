"""Keeps web pages out that reach a local server under a name of their own (DNS rebinding), or from another origin.

Pages of allowed origins may read the answers (CORS).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_artifacts.sharing.reachable import is_local
from ssd_runtime.serving.http.openai.errors import ApiError

ALL = "*"


class WebPageGuard:
    """Answers requests only if their `Host`, and their `Origin` where there is one, are of this machine or allowed.

    Browsers always send the name that a page was reached under. Other clients may omit it.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], on_refusal: Callable[[int], object]
    ) -> None:
        """`hosts` are names without ports. `on_refusal` is told the status of each request that is refused."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._origins = {origin.lower() for origin in origins}
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._on_refusal(refusal.status)
            await refusal.response()(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host and not self._is_known(f"//{host}"):
            return _forbidden("Host", host, "--allow-host NAME")
        if origin and not self._origins & {ALL, origin.lower()} and not self._is_known(origin):
            return _forbidden("Origin", origin, "--allow-origin ORIGIN")
        return None

    def _is_known(self, url: str) -> bool:
        """Whether the host of a URL is this machine or an allowed one."""
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return is_local(name) or bool(self._hosts & {ALL, name})


def web_page_middleware(
    hosts: Collection[str] | None, origins: Collection[str], on_refusal: Callable[[int], object] = lambda _: None
) -> list[Middleware]:
    """The guard, unless `hosts` is None, before the headers that let pages of `origins` read the answers, if any."""
    found = []
    if hosts is not None:
        found.append(Middleware(WebPageGuard, hosts=hosts, origins=origins, on_refusal=on_refusal))
    if origins:
        methods = ["GET", "POST"]
        found.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], max_age=3600)
        )
    return found


def _forbidden(header: str, value: str, option: str) -> ApiError:
    return ApiError(
        403, f"{header}: {value[:100]!r} is not allowed here; start ssd-serve with {option}", code="forbidden"
    )
