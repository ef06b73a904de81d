"""Routes requests to replicas, and lets no answer end with the replica that began it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.openai.answers.events import DONE, event_of
from ssd_runtime.serving.http.openai.answers.responses import failed_event
from ssd_runtime.serving.http.openai.errors import ApiError, no_valid_key
from ssd_runtime.serving.http.settings import BODY_SECONDS
from ssd_runtime.serving.http.transport.bodies import Bodies
from ssd_runtime.serving.http.transport.failures import exception_handlers, known, until_gone
from ssd_runtime.serving.ray_app.call import Call, ReplicaLost
from ssd_runtime.serving.ray_app.delivered import DeliveredStream, Stopped
from ssd_runtime.serving.ray_app.routing import RESPONSES, Routed, read_call

if TYPE_CHECKING:
    from ssd_runtime.serving.ray_app.handle import ServedReplicas

log = logging.getLogger("ssd_serve")
API = "/v1/"
"""Prefix of the paths that need a key."""
ATTEMPTS = 4
"""Replicas that a request is given to, at most."""
PAUSE = 0.5
"""Seconds between two tries to find a replica that goes on with a stream."""
HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host"})
"""Headers that are for one connection alone."""


class Router:
    """An application that gives every request to a replica.

    A request is given a seed if it has none, so that its answer is the same on every replica. When a replica dies, the
    request goes to another one: a whole answer from its beginning, a stream after the tokens that the client has. What
    the client gets is in both cases the answer that one replica alone gives. If `ATTEMPTS` replicas die, it gets an
    error in OpenAI's form.
    """

    def __init__(self, replicas: ServedReplicas, max_body_bytes: int, keys: ApiKeys | None = None) -> None:
        """Requests to the API without one of the `keys` take no place of a replica."""
        self._replicas = replicas
        self._keys = keys or ApiKeys()
        self._max_body_bytes = max_body_bytes
        self._bodies = Bodies()
        self._registry = CollectorRegistry()
        self._retried = self._counter("ssd:router_requests_retried", "Whole answers begun again on another replica.")
        self._resumed = self._counter("ssd:router_streams_resumed", "Streams that went on on another replica.")
        self._broken = self._counter("ssd:router_streams_broken", "Streams that ended with an error after a break.")

    def app(self, middleware: Sequence[Middleware] = ()) -> Starlette:
        """The application, behind `middleware`."""
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.show_metrics, methods=["GET"]),
                Route("/{path:path}", self.forward, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
            ],
            middleware=middleware,
            exception_handlers=exception_handlers(),
        )

    async def health(self, request: Request) -> Response:
        """200 while a replica takes requests, else 503."""
        alive = await self._replicas.alive()
        return JSONResponse({"status": "ok" if alive else "no replica is ready"}, 200 if alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        """The metrics of all replicas, each with the label `replica`, and the router's own."""
        replicas = CollectorRegistry()
        replicas.register(_ReplicaMetrics(await self._replicas.metrics()))
        return Response(generate_latest(self._registry) + generate_latest(replicas), media_type=CONTENT_TYPE_LATEST)

    async def forward(self, request: Request) -> Response:
        """Give a request to a replica."""
        stream = self._keys.stream_of(request.headers.get("authorization"))
        if stream is None and request.url.path.startswith(API):
            raise no_valid_key()
        async with self._bodies.read(request, self._max_body_bytes, BODY_SECONDS) as body:
            headers = tuple(pair for pair in request.headers.raw if pair[0] not in HOP)
            call = Call(method=request.method, path=request.url.path, headers=headers, body=body)
        # A long body takes a while, in which other streams go on.
        routed = await asyncio.to_thread(read_call, call)
        if not routed.streams:
            return await until_gone(request, self._whole(routed.call))
        delivered = DeliveredStream(routed.keep_token_ids, routed.resumable)
        messages = self._resuming(routed, delivered)
        start = await until_gone(request, anext(messages))
        if not _is_stream(start):
            return _response([start, *[message async for message in messages]])
        response = StreamingResponse(_texts(messages), start["status"])
        response.raw_headers = list(start["headers"])
        return response

    async def _whole(self, call: Call) -> Response:
        """The response to a request, begun again wherever its replica dies."""
        for attempt in range(ATTEMPTS):
            self._retried.inc(attempt > 0)
            try:
                async with aclosing(self._replicas.respond(call)) as batches:
                    return _response([message async for batch in batches for message in batch])
            except ReplicaLost:
                log.warning("a replica died; its request is begun again on another")
        raise _all_lost()

    async def _resuming(self, routed: Routed, delivered: DeliveredStream) -> AsyncGenerator[Message]:
        """The messages of a streamed response; after a break they go on with those of another replica.

        Bodies are as the client gets them. Raises ApiError only before the response starts; after that, whatever
        breaks, the stream ends with an error event.
        """
        failure = _all_lost()
        started = False
        for attempt in range(ATTEMPTS):
            if attempt and not delivered.resumable:
                failure = _cannot_resume()
                break
            self._resumed.inc(started)
            call = replace(routed.call, resumption=delivered.resumption())
            try:
                async with aclosing(self._replicas.respond(call)) as batches:
                    async for batch in batches:
                        for message in batch:
                            if message["type"] == "http.response.start" and started:
                                _require_stream(message)
                                continue
                            started = True
                            yield _redelivered(message, delivered)
                return
            except (ReplicaLost, Stopped):
                log.warning("a replica died after %d tokens of a stream, which goes on on another", delivered.tokens)
            except Exception as error:
                if not started:
                    raise
                failure = known(error)
                if failure is not error:
                    break
                await asyncio.sleep(PAUSE)
            if delivered.done:
                break
        if delivered.done:
            return
        if not started:
            raise failure
        self._broken.inc()
        told = failure.to_json()
        text = failed_event(told["error"]) if routed.call.path == RESPONSES else event_of(told) + DONE
        yield {"type": "http.response.body", "body": text.encode()}

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)


def _redelivered(message: Message, delivered: DeliveredStream) -> Message:
    """A message as the client gets it. Bodies that are no events, such as an error's, stay as they are."""
    body: bytes = message.get("body", b"")
    if not body.startswith((b"data: ", b"event: ")):
        return message
    return {**message, "body": delivered.read(body.decode()).encode()}


def _is_stream(start: Message) -> bool:
    """Whether a response's first message begins a stream of events."""
    kinds = [value for name, value in start["headers"] if name == b"content-type"]
    return bool(start["status"] == 200 and kinds and kinds[0].startswith(b"text/event-stream"))


def _require_stream(start: Message) -> None:
    """Raise ApiError if a replica refuses to go on with a stream."""
    if not _is_stream(start):
        raise ApiError(503, "the stream broke, and no other replica takes it; send the request again", code="broken")


async def _texts(messages: AsyncGenerator[Message]) -> AsyncIterator[bytes]:
    async with aclosing(messages) as told:
        async for message in told:
            if message["body"]:
                yield message["body"]


def _response(messages: Sequence[Message]) -> Response:
    """The response of a replica's messages, the first of which is its start."""
    start, *bodies = messages
    response = Response(b"".join(message.get("body", b"") for message in bodies), start["status"])
    response.raw_headers = list(start["headers"])
    return response


def _all_lost() -> ApiError:
    return ApiError(
        503, f"{ATTEMPTS} replicas died while they answered; send the request again", code="broken", retry_after=1
    )


def _cannot_resume() -> ApiError:
    return ApiError(503, "the replica died, and its stream cannot go on; send the request again", code="broken")


class _ReplicaMetrics(Collector):
    """The metrics of replicas, with a label that tells which."""

    def __init__(self, texts: Sequence[tuple[str, str]]) -> None:
        """`texts` are the names of replicas with their metrics in Prometheus' text format."""
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """The metrics, each with the samples of all replicas."""
        found = dict[str, Metric]()
        for replica, text in self._texts:
            for family in text_string_to_metric_families(text):
                metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += [
                    Sample(each.name, {**each.labels, "replica": replica}, each.value) for each in family.samples
                ]
        yield from found.values()
