"""Reads the bodies of requests, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from ssd_runtime.serving.http.openai.errors import ApiError

MOST_BODIES = 64
"""Longest bodies that are held at once; of shorter ones, as many as have the same bytes."""


class Bodies:
    """The bodies of all requests that are being read, whose bytes are counted as they come.

    They come before a request has a place, so that the number of places does not bound them.
    """

    def __init__(self) -> None:
        self.held = 0
        """Bytes of the bodies that are held."""

    @asynccontextmanager
    async def read(self, request: Request, most: int, seconds: float) -> AsyncIterator[bytes]:
        """The body of a request, which is held until the context ends.

        Raises ApiError if it is longer than `most` bytes or not complete after `seconds` seconds, or if the server
        holds as many bytes as it may.
        """
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(seconds):
                    async for part in request.stream():
                        self.held += len(part)
                        body += part
                        self._check(len(body), most)
            except TimeoutError:
                raise ApiError(
                    408, f"the body was not complete after {seconds:g} s; send it sooner", code="request_timeout"
                ) from None
            yield bytes(body)
        finally:
            self.held -= len(body)

    def _check(self, length: int, most: int) -> None:
        if length > most:
            raise ApiError(413, f"the body is longer than {most} bytes; shorten it", code="request_too_large")
        if self.held > MOST_BODIES * most:
            raise ApiError(503, "too many requests are being read; send it again", code="overloaded", retry_after=1)
