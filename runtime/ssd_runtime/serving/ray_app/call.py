"""Requests on their way to a replica, and the responses of an ASGI application to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from ssd_runtime.serving.http.openai.answers.resumption import RESUMPTION, Resumption


class ReplicaLost(Exception):  # noqa: N818 - the router's reason to try another
    """The replica that a request was given to is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    conversation: str = ""
    """Key of the conversation that it belongs to; empty for none."""
    resumption: Resumption | None = None
    """The broken stream that the answer goes on after."""

    def scope(self) -> dict[str, Any]:
        """The scope of ASGI, without what is optional there."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "query_string": b"",
            "headers": list(self.headers),
            RESUMPTION: self.resumption,
        }


async def exchange(app: ASGIApp, call: Call) -> AsyncGenerator[list[Message]]:
    """Run an application on one request; yields its messages, all that are ready together.

    An application that fails without a complete response raises its error here. If the caller leaves, the application
    is cancelled.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    body = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Event().wait()
        raise AssertionError("the caller leaves by cancelling")

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    running = asyncio.ensure_future(app(call.scope(), receive, send))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    complete = False
    try:
        while True:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            told = [message for message in ready if message is not None]
            if told:
                complete = told[-1]["type"] == "http.response.body" and not told[-1].get("more_body", False)
                yield told
            if len(told) < len(ready):
                if not complete:
                    running.result()
                return
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
