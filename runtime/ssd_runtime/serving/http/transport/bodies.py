"""Reads the bodies of requests, within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from ssd_runtime.serving.http.openai.errors import ApiError


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """The body; of one longer than `most` bytes, a beginning that is longer too.

    Raises ApiError if it is not complete after `seconds` seconds.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    break
    except TimeoutError:
        raise ApiError(
            408, f"the body was not complete after {seconds:g} s; send it sooner", code="request_timeout"
        ) from None
    return bytes(body)
