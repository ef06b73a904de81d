"""The HTTP application: routes, keys, limits and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.openai.answers.answers import Answer, EventStream, Subscription
from ssd_runtime.serving.http.openai.answers.events import Json, events_of
from ssd_runtime.serving.http.openai.answers.forms import ChatForm, CompletionForm, Form
from ssd_runtime.serving.http.openai.answers.responses import chat_body, response_events, whole_response
from ssd_runtime.serving.http.openai.answers.resumption import RESUMPTION, Resumption
from ssd_runtime.serving.http.openai.calls.call_forms import TAGGED
from ssd_runtime.serving.http.openai.errors import ApiError, no_valid_key
from ssd_runtime.serving.http.openai.requests.generation_requests import chat_requests, compiled, completion_requests
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder, text_of
from ssd_runtime.serving.http.openai.requests.requests import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    checked,
    read_fields,
    read_request,
)
from ssd_runtime.serving.http.page import page_route
from ssd_runtime.serving.http.pending import GenerationRequest
from ssd_runtime.serving.http.settings import ServerSettings
from ssd_runtime.serving.http.transport.bodies import Bodies
from ssd_runtime.serving.http.transport.failures import exception_handlers, until_gone
from ssd_runtime.serving.http.transport.web_pages import web_page_middleware
from ssd_runtime.serving.record import Recorder

T = TypeVar("T")
JSON_TYPE = "application/json"
MOST_TEMPLATES = 4
"""Most conversations that are written through the chat template at once; others wait, in no thread."""
COMPILERS = 2
"""Threads that compile structures: a hostile one takes seconds, for which only others with a structure wait."""
READERS = 2
"""Threads that read requests: more would take turns, and keep the event loop waiting for its own."""
WRITERS = 2
"""Threads that write answers with log-probabilities, of which one request may have megabytes."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A request that was read: what was asked for, and the conversations in it, as (role, content) pairs."""

    asked: CommonRequest
    requests: list[GenerationRequest]
    form: Form
    conversations: list[list[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The routes, with the objects that they use."""

    thread: EngineThread
    settings: ServerSettings
    encoder: PromptEncoder
    metrics: Metrics
    keys: ApiKeys
    recorder: Recorder | None = None
    templates: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, MOST_TEMPLATES, "ssd-template"))
    """Threads in which chat templates are waited for."""
    readers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, READERS, "ssd-read"))
    compilers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, COMPILERS, "ssd-grammar"))
    writers: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, WRITERS, "ssd-write"))
    bodies: Bodies = field(default_factory=Bodies)

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            *([page_route()] if self.settings.options.page else []),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        alive = self.thread.alive
        return JSONResponse({"status": "ok" if alive else "shutting down"}, 200 if alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        """The metrics, in Prometheus' text format."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The one model, as a list."""
        self._stream(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._stream(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        stream = self._stream(request)
        async with self._body(request) as body:
            asked = await _in_threads(self.readers, read_request, body, ChatRequest, self.settings.max_context)
            found = await self._chat(request, asked, stream)
        return await self._respond(request, found)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's responses; nothing is kept."""
        stream = self._stream(request)
        async with self._body(request) as body:
            fields = await _in_threads(self.readers, read_fields, body)
            asked = await _in_threads(self.readers, lambda: checked(chat_body(fields), ChatRequest))
            found = await self._chat(request, asked, stream)
        return await self._respond(request, found, fields)

    async def _chat(self, request: Request, asked: ChatRequest, stream: str) -> _Read:
        self._check_model(asked.model)
        stop = Event()
        try:
            reading = _in_threads(self.templates, self._read_chat, asked, stream, stop)
            return await self._ready(request, await until_gone(request, reading))
        finally:
            stop.set()

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or several."""
        stream = self._stream(request)
        async with self._body(request) as body:
            found = await _in_threads(self.readers, self._read_completions, body, stream)
            found = await self._ready(request, found)
        return await self._respond(request, found)

    def _read_chat(self, asked: ChatRequest, stream: str, stop: Event) -> _Read:
        requests = chat_requests(asked, self.encoder, self.settings, stream, stop)
        has_channels = self.encoder.loaded.has_channels
        form = ChatForm(
            tools=[(tool.function.name, tool.function.parameters) for tool in asked.offered_tools],
            call_form=self.encoder.shown_call_form if asked.offered_tools and not has_channels else TAGGED,
            most_calls=None if asked.parallel else 1,
            # An answer of a given shape has no thoughts.
            thinks=self.encoder.thinks(requests[0].ids) if requests[0].settings.structure is None else None,
            has_channels=has_channels,
        )
        # The roles that the template has got.
        messages = [
            ("system" if message.role == "developer" else str(message.role), text_of(message, place))
            for place, message in enumerate(asked.messages)
        ]
        return _Read(asked, requests, form, [messages])

    def _read_completions(self, body: bytes, stream: str) -> _Read:
        asked = read_request(body, CompletionRequest, self.settings.max_context)
        self._check_model(asked.model)
        requests = completion_requests(asked, self.encoder, self.settings, stream)
        texts = [[("user", prompt)] for prompt in asked.prompt if isinstance(prompt, str)]
        return _Read(asked, requests, CompletionForm(), texts)

    async def _ready(self, request: Request, found: _Read) -> _Read:
        """The generation requests as they are submitted: after what a client has, and with their grammar."""
        resumption: Resumption | None = request.scope.get(RESUMPTION)
        requests = found.requests if resumption is None else resumption.requests(found.requests)
        if any(each.settings.structure is not None for each in requests):
            compiling = _in_threads(self.compilers, compiled, requests, self.encoder.loaded)
            requests = await until_gone(request, compiling)
        return replace(found, requests=requests)

    async def _respond(self, request: Request, found: _Read, fields: Json | None = None) -> Response:
        """Submit the generation requests of an HTTP request; respond with the answer, whole or as it comes.

        `fields` are those of a request for a response.
        """
        resumption: Resumption | None = request.scope.get(RESUMPTION)
        subscription = Subscription(self.thread, found.requests, found.asked.n or 1)
        if (recorder := self.recorder) is not None and resumption is None:
            try:
                # In a thread: files and the user's pattern may take their time.
                await asyncio.to_thread(lambda: [*map(recorder.add, found.conversations)])
            except asyncio.CancelledError:
                subscription.close()
                raise
        answer = Answer(
            asked=found.asked,
            subscription=subscription,
            form=found.form,
            encoder=self.encoder,
            model_name=self.settings.model_name,
            resumption=resumption,
        )
        if found.asked.stream:
            chunks = answer.chunks()
            events = events_of(chunks) if fields is None else response_events(chunks, fields)
            return EventStream(events, subscription)
        try:
            outcomes = await until_gone(request, answer.outcomes())
        finally:
            subscription.close()
        if fields is not None:
            return JSONResponse(whole_response(answer.whole(outcomes), fields))
        if found.asked.noted_logprobs is None:
            text = answer.written(outcomes)
        else:
            text = await _in_threads(self.writers, answer.written, outcomes)
        return Response(text, media_type=JSON_TYPE)

    def _stream(self, request: Request) -> str:
        """The stream of a request's key. Raises ApiError if it has none that is valid."""
        stream = self.keys.stream_of(request.headers.get("authorization"))
        if stream is None:
            raise no_valid_key()
        return stream

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.model_name):
            known = self.settings.model_name
            raise ApiError(
                404, f"model: {name!r} is not served; ask for {known!r}", param="model", code="model_not_found"
            )

    def _model(self) -> Json:
        settings = self.settings
        return {
            "id": settings.model_name,
            "object": "model",
            "created": settings.created,
            "owned_by": "ssd-serve",
            "max_model_len": settings.max_context,
        }

    def _body(self, request: Request) -> AbstractAsyncContextManager[bytes]:
        """The body, as `Bodies.read` has it. Raises ApiError for one of another type than JSON."""
        # Web pages of origins that are not allowed cannot send this type: browsers ask for leave first.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON_TYPE:
            raise ApiError(415, "send `Content-Type: application/json`", code="unsupported_media_type")
        return self.bodies.read(request, self.settings.options.max_body_bytes, self.settings.body_seconds)


def _in_threads(threads: Executor, work: Callable[..., T], *given: Any) -> asyncio.Future[T]:
    """The result of `work`, which one of these threads does; streams and other requests go on meanwhile."""
    return asyncio.get_running_loop().run_in_executor(threads, work, *given)


def make_app(service: Service, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
    """The application of a service whose thread is running."""
    options = service.settings.options

    def count(status: int) -> None:
        service.metrics.count_without_answer(f"http {status}")

    handlers = exception_handlers(lambda error: count(error.status))

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "the handler of this kind of error"
        paths = "/v1/models, /v1/chat/completions, /v1/completions and /v1/responses"
        what = (
            f"{request.method} {request.url.path}: {error.detail.lower()}; there are {paths} (a base_url ends in /v1)"
        )
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return handlers[ApiError](request, ApiError(error.status_code, what, code=code))

    return Starlette(
        routes=service.routes(),
        middleware=web_page_middleware(options.allowed_hosts, options.allowed_origins, count),
        lifespan=lifespan,
        exception_handlers={**handlers, HTTPException: http_error},
    )
