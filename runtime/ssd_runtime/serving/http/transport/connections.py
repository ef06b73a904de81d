"""Connections of clients, none of which stays open for one that neither sends nor reads."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ssd_runtime.serving.http.openai.errors import ApiError

HEAD_BYTES = 64 << 10
"""Longest head of a request."""
HEAD_SECONDS = 30.0
"""Seconds within which a head has to be complete, from its first byte or from the connection on."""
SEND_SECONDS = 60.0
"""Seconds that a client may read nothing for, while more is sent than the system's buffers hold."""
SEND_BUFFER = 128 << 10
"""Bytes that the system is asked to hold for a client: it tells of what one has read by the third of its buffer,
which on Linux grows to 4 MiB by itself."""
FREE_PIECES = 1024
"""Pieces of a body, however small they are."""
LEAST_PIECE = 64
"""Mean bytes of the pieces after those: each takes the event loop as much time as thousands of bytes do."""
REFUSAL_SECONDS = 1.0
"""Seconds within which a client may still send its request when it has been refused."""
MOST_REFUSED = 64
"""Such clients at once; the connections of others are closed at once."""
MOST_CONNECTIONS = 512
"""Connections at once: half of the 1,024 files that systems usually allow a process."""


class _Pieces(h11.Connection):
    """Counts the pieces of bodies, such as chunks. Raises RemoteProtocolError for too many."""

    _pieces = 0
    _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > FREE_PIECES + self._bytes // LEAST_PIECE:
                raise h11.RemoteProtocolError("the body comes in pieces that are too small", 400)
        return event


class BoundedProtocol(H11Protocol):
    """Ends connections that stay without a whole head, and those of clients that do not read what they asked for."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Pieces(h11.SERVER, HEAD_BYTES)
        self._refused: set[BoundedProtocol] = app_state.setdefault("refused", set())
        """Connections beyond the limit whose clients still send; the server's connections share it."""
        self._head: asyncio.TimerHandle | None = None
        self._send: asyncio.TimerHandle | None = None
        self._unread = 0
        """Unsent bytes of the answers when the idle connection was last looked at."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head, unless there are too many connections."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if len(self.connections) <= MOST_CONNECTIONS:
            self._await_head(True)
            return
        self.connections.discard(self)
        transport.write(_refusal())
        if transport.can_write_eof() and len(self._refused) < MOST_REFUSED:
            # What the client sends is read, since a close before that would take the answer from it.
            transport.write_eof()
            self._refused.add(self)
            self.loop.call_later(REFUSAL_SECONDS, transport.close)
        else:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Read a part of a head or of a body."""
        if self in self._refused:
            return
        super().data_received(data)
        # A body that still comes after its answer has as long as the next head, which ends uvicorn's own time for that.
        answered = self.cycle is not None and self.cycle.response_complete
        self._await_head(answered or self.conn.their_state is h11.IDLE)

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        self._end_send()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection, once the client has read the answers or reads no more."""
        left, before = self.transport.get_write_buffer_size(), self._unread
        self._unread = left
        if left in (0, before):
            self.transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._refused.discard(self)
        self._unset_keepalive_if_required()
        self._await_head(False)
        self._end_send()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, unless an answer has begun: the connection then just ends."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _await_head(self, awaited: bool) -> None:
        """Begin or end the time for a head; it goes on if it has begun."""
        if awaited and self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not awaited and self._head is not None:
            self._head.cancel()
            self._head = None

    def _await_reading(self, before: int | None = None) -> None:
        """End the connection if the client has read none of `before` unsent bytes; look again later unless it has all.

        Nothing more is sent meanwhile.
        """
        left = self.transport.get_write_buffer_size()
        self._end_send()
        if before is not None and left >= before:
            self.transport.abort()
        elif left:
            self._send = self.loop.call_later(SEND_SECONDS, self._await_reading, left)

    def _end_send(self) -> None:
        if self._send is not None:
            self._send.cancel()
            self._send = None


def _refusal() -> bytes:
    """The whole response to a connection beyond the limit, whatever it would ask."""
    error = ApiError(503, "too many connections; connect again later", code="overloaded", retry_after=1)
    response = error.response()
    head = b"".join(b"%b: %b\r\n" % pair for pair in response.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n" + head + b"\r\n" + bytes(response.body)


def without_broken_sends(record: logging.LogRecord) -> bool:
    """A filter of asyncio's log: that clients leave while they are answered is no news."""
    return record.getMessage() != "socket.send() raised exception."
