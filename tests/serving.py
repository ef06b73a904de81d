"""A tiny model behind an engine's thread, and behind a socket."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.serving.http.app import Service, make_app
from ssd_runtime.serving.http.engine_thread import EngineThread
from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.metrics import Metrics
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.opening import watch_gauges
from ssd_runtime.serving.http.pending import Block, End, GenerationRequest
from ssd_runtime.serving.http.settings import BODY_SECONDS, ServerSettings, ServiceOptions
from ssd_runtime.serving.http.transport.connections import BoundedProtocol
from tests.folders import TEXTS
from tests.tables import latency_table
from tests.waiting import wait_until

LAYERS = 8
QUESTION = [{"role": "user", "content": TEXTS[0]}]
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
"""A template that takes longer than anyone waits."""
TOOL_TEMPLATE = (
    "{% if tools %}<s>tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def tiny_engine(folder: Path, sequences: int = 4) -> Engine:
    """An engine of a saved tiny model whose latencies are made up, so that nothing is measured."""
    loaded = LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    engine = Engine(loaded)
    engine.max_sequences = sequences
    engine.latency = latency_table(LAYERS)
    return engine


def request_for(
    engine: Engine, text: str, tokens: int = 12, strategy: str = "auto", **changes: Any
) -> GenerationRequest:
    """A request for a greedy answer to a text, or with a `seed` for a sampled one."""
    seed = changes.pop("seed", None)
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=0.9, seed=seed)
    settings = RunSettings(strategy, max_new_tokens=tokens, sampling=sampling)
    return GenerationRequest(ids=engine.loaded.encode([("user", text)]), settings=settings, **changes)


def lone(engine: Engine, wanted: GenerationRequest) -> list[int]:
    """The tokens of plain decoding alone."""
    settings = replace(wanted.settings, strategy="plain", parameters=None)
    request = engine.add_request(wanted.ids, settings, stream="alone")
    while not request.done:
        engine.step()
    return request.outcome().generation.token_ids


@dataclass
class Inbox:
    """Receives events, and waits for ends."""

    events: dict[int, list[Block | End]] = field(default_factory=dict)
    _ends: Queue[int] = field(default_factory=Queue)

    def listen(self, place: int, event: Block | End) -> None:
        self.events.setdefault(place, []).append(event)
        if isinstance(event, End):
            self._ends.put(place)

    def wait(self, requests: int, seconds: float = 60.0) -> dict[int, End]:
        """The ends of so many requests."""
        for _ in range(requests):
            self._ends.get(timeout=seconds)
        return {place: end for place, events in self.events.items() for end in events if isinstance(end, End)}


def assert_ended_once(inbox: Inbox, requests: int) -> None:
    """Every request has exactly one end, and nothing comes after it."""
    assert sorted(inbox.events) == list(range(requests))
    for events in inbox.events.values():
        assert [isinstance(event, End) for event in events] == [False] * (len(events) - 1) + [True]


@contextmanager
def running(engine: Engine, places: int = 16) -> Iterator[EngineThread]:
    """The engine in a thread."""
    thread = EngineThread(engine, places, Metrics("tiny"))
    thread.start()
    try:
        yield thread
    finally:
        thread.close(0.0)


def tiny_service(
    engine: Engine,
    places: int = 16,
    keys: Sequence[str] = (),
    template: str | None = None,
    own_template: str | None = None,
    max_context: int | None = None,
    body_seconds: float = BODY_SECONDS,
    **options: Any,
) -> Service:
    """A service of a tiny engine, whose thread has not started.

    `template` becomes the model's chat template, and `own_template` the server's.
    """
    if template is not None:
        engine.loaded.tokenizer.chat_template = template
    config = engine.loaded.model.config
    settings = ServerSettings(
        options=ServiceOptions(**{"temperature": 0.0, **options}),
        model_name="tiny",
        max_context=max_context or config.max_position_embeddings,
        vocabulary=config.vocab_size,
        body_seconds=body_seconds,
    )
    metrics = Metrics("tiny")
    service = Service(
        thread=EngineThread(engine, places, metrics),
        settings=settings,
        encoder=PromptEncoder(engine.loaded, own_template, settings.longest_prompt),
        metrics=metrics,
        keys=ApiKeys(keys),
    )
    watch_gauges(service)
    return service


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """The service behind a socket of this machine; yields its address. Its thread may have started."""
    if not service.thread.alive:
        service.thread.start()
    server = uvicorn.Server(
        uvicorn.Config(make_app(service), port=0, log_level="error", http=BoundedProtocol, loop="asyncio")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server has started")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        service.thread.close(0.0)
        server.should_exit = True
        thread.join()


def send(address: str, path: str, body: Any, method: str = "POST", **headers: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and content of a response; JSON is parsed."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, dict(response.getheaders()), json.loads(content) if content[:1] in b"{[" else content


def chat(address: str, **fields: Any) -> tuple[int, Any]:
    """Status and content of a short answer to a question."""
    fields = {"messages": QUESTION, "max_tokens": 4, **fields}
    status, _, body = send(address, "/v1/chat/completions", fields)
    return status, body
