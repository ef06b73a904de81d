"""Serves an application until it is asked to stop, and lets open requests end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ssd_runtime.engine.interrupts import handling
from ssd_runtime.serving.http.app import Service, make_app
from ssd_runtime.serving.http.listening import url_of
from ssd_runtime.serving.http.reload import BundleWatch
from ssd_runtime.serving.http.transport.connections import BoundedProtocol, without_broken_sends

log = logging.getLogger("ssd_serve")
KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open: longer than clients keep theirs, or some requests would meet a
connection that is just being closed."""
SPARE_SECONDS = 2
"""Seconds, after the grace, in which the last errors are sent; connections still open then are broken."""
LAST_SECONDS = 1
"""Seconds after those in which everything else ends, such as a thread that reads a request; or the process is ended."""


def serve(
    service: Service, listener: socket.socket, grace: float, watch: BundleWatch | None = None, poll: bool = False
) -> None:
    """Serve until SIGTERM or Ctrl-C. New requests are then refused.

    Open ones have `grace` seconds to end in; those that take longer end with an error. SIGHUP loads the bundle again,
    if there is one, and so does a change of its folder with `poll`.
    """
    app = make_app(service, _lifespan(watch, poll))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(grace) + SPARE_SECONDS + LAST_SECONDS,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        # The others, which uvicorn takes where they are installed, have other limits.
        http=BoundedProtocol,
        loop="asyncio",
        ws="none",
    )
    logging.getLogger("asyncio").addFilter(without_broken_sends)
    GracefulServer(config, service, grace).run([listener])


class GracefulServer(uvicorn.Server):
    """A server whose engine ends open requests before connections are closed."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        for listener in sockets or []:
            # Connections inherit it, and would else keep the next server from the address for a minute.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await super().startup(sockets)
        if self.started:
            url = url_of((sockets or [])[0])
            name = self._service.settings.model_name
            log.info("serving %s on %s (base_url for OpenAI's clients: %s/v1)", name, url, url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let the engine end the open ones, and close the connections."""
        thread = self._service.thread
        thread.refuse_more()
        self._service.encoder.loaded.prompts.close()
        log.info("stopping: %d open requests have %g s to end", thread.open, self._grace)
        latest = self._grace + SPARE_SECONDS
        asyncio.get_running_loop().call_later(latest, self._break_connections)
        end = threading.Timer(latest + 2 * LAST_SECONDS, os._exit, [1])
        end.daemon = True
        end.start()
        closing = asyncio.create_task(asyncio.to_thread(thread.close, self._grace))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and asyncio's cancellation would be logged with a traceback
            await self.lifespan.shutdown()
        await closing

    def _break_connections(self) -> None:
        """End the connections of clients that do not read their answers or do not send their bodies."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second Ctrl-C ends open requests at once."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            self._service.thread.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGINT and SIGTERM without raising them again: being asked to stop is no failure."""
        with handling(self.handle_exit):
            yield


def _lifespan(watch: BundleWatch | None, poll: bool):  # type: ignore[no-untyped-def]
    """Load the bundle again at SIGHUP while the application runs, and with `poll` when its folder changes."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = set[asyncio.Task[object]]()
        loop = asyncio.get_running_loop()

        def reload() -> None:
            # Without a handler, the signal would end the process.
            if watch is None:
                log.warning("SIGHUP: there is no bundle to load again; the server goes on")
                return
            task: asyncio.Task[object] = asyncio.ensure_future(watch.reload())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        if watch is not None and poll:
            tasks.add(asyncio.ensure_future(watch.poll()))
        try:
            yield
        finally:
            for task in list(tasks):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    return lifespan
