"""One replica: an engine behind the application of `ssd-serve`, in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from ray import serve
from starlette.types import Message

from ssd_runtime.loading.source import read_source
from ssd_runtime.serving.http.settings import ServiceOptions
from ssd_runtime.serving.ray_app.call import Call, exchange

log = logging.getLogger("ssd_serve")


class Replica:
    """Serves one engine. Ray Serve makes as many of these as are wanted."""

    def __init__(self, options: ServiceOptions, reload: bool = False) -> None:
        """Load the model. With `reload`, the bundle is taken up anew when its folder changes."""
        # These imports take seconds, and the router's process needs none of them.
        from ssd_runtime.serving.http.app import make_app
        from ssd_runtime.serving.http.opening import open_service, watch_bundle

        source = read_source(options.artifact, options.model, options.require_signature)
        self._service = open_service(options, source, log.info)
        self._app = make_app(self._service)
        self._watch = watch_bundle(options, source, self._service) if reload else None
        self._watching: asyncio.Task[None] | None = None

    async def respond(self, call: Call) -> AsyncIterator[list[Message]]:
        """Respond to a request."""
        if self._watch is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch.poll())
        async for messages in exchange(self._app, call):
            yield messages

    async def metrics(self) -> tuple[str, str]:
        """This replica's name and metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._service.metrics.text().decode()

    async def alive(self) -> bool:
        """Whether requests are taken."""
        return self._service.thread.alive

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's thread has ended: Ray Serve then starts another replica."""
        if not self._service.thread.alive:
            raise RuntimeError("the engine's thread has ended")
