"""The responses to requests that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.http.transport.leaving import GONE

log = logging.getLogger("ssd_serve")
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
