"""The responses to requests that fail, and the end of work for clients that leave before they have its result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ssd_runtime.serving.http.openai.errors import ApiError

T = TypeVar("T")
log = logging.getLogger("ssd_serve")
GONE = 499
"""The status, never sent, of a request whose client has left."""
Handlers = Mapping[Any, Callable[[Request, Exception], Response]]
"""Handlers by the class of their exceptions, as Starlette takes them."""


def exception_handlers(note: Callable[[ApiError], object] = lambda _: None) -> Handlers:
    """Handlers that tell every error in OpenAI's form; `note` is called with each before the client is told."""

    def refuse(request: Request, error: Exception) -> Response:
        told = known(error)
        note(told)
        return told.response()

    def left(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    return {ApiError: refuse, ClientDisconnect: left, Exception: refuse}


def known(error: Exception) -> ApiError:
    """The error that the client is told; one of another kind is a defect, which is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("a defect: %s: %s", type(error).__name__, error)
    return ApiError(500, "a defect of the server; its log says more", code="internal_error")


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for each in (working, leaving):
            each.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
