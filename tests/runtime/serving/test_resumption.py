"""A stream that breaks goes on on another replica, and the client gets what one replica alone would have told."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from ssd_runtime.serving.http.app import Service, make_app
from ssd_runtime.serving.http.keys import ApiKeys
from ssd_runtime.serving.http.openai.errors import ApiError
from ssd_runtime.serving.http.transport.web_pages import web_page_middleware
from ssd_runtime.serving.ray_app.call import Call, ReplicaLost, exchange
from ssd_runtime.serving.ray_app.router import Router
from tests.folders import TEXTS
from tests.serving import QUESTION, TOOL_TEMPLATE, tiny_engine, tiny_service

SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 48}


class Mortals:
    """Replicas in this process, each of which dies after so many events of a stream; None lives on."""

    def __init__(self, services: Sequence[Service], lives: Sequence[int | None]) -> None:
        self._apps = [make_app(service) for service in services]
        self._lives = list(lives)
        self.calls: list[Call] = []
        self.bodies = 0
        """Number of bodies that the latest replica has told."""

    async def respond(self, call: Call) -> AsyncGenerator[list[Message]]:
        life = self._lives[len(self.calls)] if len(self.calls) < len(self._lives) else None
        app = self._apps[len(self.calls) % len(self._apps)]
        self.calls.append(call)
        self.bodies = 0
        async with aclosing(exchange(app, call)) as batches:
            async for batch in batches:
                for message in batch:
                    if life is not None and self.bodies >= life:
                        raise ReplicaLost
                    self.bodies += bool(message.get("body"))
                    yield [message]

    async def alive(self) -> bool:
        return True

    async def metrics(self) -> Sequence[tuple[str, str]]:
        return [("one", "# TYPE a counter\na_total 1.0\n"), ("two", "# TYPE a counter\na_total 2.0\n")]


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[list[Service]]:
    found = [tiny_service(tiny_engine(folder), template=TOOL_TEMPLATE) for _ in range(2)]
    for service in found:
        service.thread.start()
    yield found
    for service in found:
        service.thread.close(0.0)


def told(services: Sequence[Service], lives: Sequence[int | None], **fields: Any) -> tuple[list[Any], Mortals, Router]:
    """The events of a stream of replicas that die so."""
    replicas = Mortals(services, lives)
    router = Router(replicas, 1 << 20)
    body = {"messages": QUESTION, "stream": True, **fields}
    if "prompt" in fields:
        del body["messages"]
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    with TestClient(router.app(), raise_server_exceptions=True) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events], replicas, router


def answers(events: Sequence[Any]) -> dict[int, list[Any]]:
    """Text, tokens, named tokens, end and texts of tokens of each choice, with the pieces joined."""
    found: dict[int, list[Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, tokens, names, ends, spelled = found.setdefault(choice["index"], ["", [], [], [], []])
        found[choice["index"]] = [
            text + (choice["text"] if "text" in choice else choice["delta"].get("content") or ""),
            tokens + choice.get("token_ids", []),
            names + [name for name, _ in noted(choice)],
            ends + ([choice["finish_reason"]] if choice["finish_reason"] else []),
            spelled + [token["text"] for token in choice.get("ssd", {}).get("tokens", [])],
        ]
    return found


def once(events: Sequence[Any]) -> tuple[list[int], int]:
    """The choices whose role is told, each as often as it is, and the number of events of usage alone."""
    choices = [choice for event in events for choice in event["choices"]]
    roles = sorted(choice["index"] for choice in choices if "role" in choice.get("delta", {}))
    return roles, sum(not event["choices"] for event in events)


def called(events: Sequence[Any]) -> tuple[str, str]:
    """Name and arguments of the only call of a stream, with the pieces joined."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    told = [call["function"] for call in calls]
    return "".join(each.get("name") or "" for each in told), "".join(each.get("arguments") or "" for each in told)


def noted(choice: Any) -> list[tuple[str, float]]:
    """Tokens of a choice with their log-probabilities."""
    logprobs = choice["logprobs"] or {}
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True))


def logprobs_of(events: Sequence[Any]) -> list[float]:
    """Log-probabilities of the tokens, choice after choice."""
    choices = sorted((choice for event in events for choice in event["choices"]), key=lambda each: each["index"])
    return [value for choice in choices for _, value in noted(choice)]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "max_tokens": 48},
        SAMPLED,
        {**SAMPLED, "n": 3, "return_token_ids": True, "logprobs": True, "top_logprobs": 2},
        {**SAMPLED, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.95},
        {**SAMPLED, "prompt": [TEXTS[0], TEXTS[1]], "logprobs": 2, "stop": ["e t"], "return_token_ids": True},
        {**SAMPLED, "stream_options": {"include_usage": True, "include_drafts": True}},
    ],
    ids=["greedy", "sampled", "n and logprobs", "penalties", "completions with a stop", "usage"],
)
def test_a_resumed_stream_is_the_stream_of_one_replica(services: list[Service], fields: dict[str, Any]) -> None:
    """Wherever the first replica dies: before it told anything, on the way, or with nothing left to tell."""
    # Plain decoding has as many events each time.
    fields = {**fields, "ssd": {"strategy": "plain"}}
    whole, alone, _ = told(services, [], **fields)
    for share in (0.0, 0.6, 1.0):
        resumed, replicas, _ = told(services, [math.ceil(share * (alone.bodies - 1)), 1], **fields)
        assert len(replicas.calls) >= 2, "a replica died"
        assert answers(resumed) == answers(whole)
        assert once(resumed) == once(whole)
        # The other replica computed the keys of earlier tokens in one forward, which rounds otherwise.
        assert logprobs_of(resumed) == pytest.approx(logprobs_of(whole), abs=1e-3)
        assert len({event["id"] for event in resumed}) == 1
        named = any("token_ids" in choice for event in resumed for choice in event["choices"])
        assert named == bool(fields.get("return_token_ids"))
        ends = [event["usage"] for event in (whole[-1], resumed[-1]) if event.get("usage")]
        assert len({(end["prompt_tokens"], end["completion_tokens"]) for end in ends}) <= 1


def test_without_a_seed_a_stream_is_resumed_all_the_same(services: list[Service]) -> None:
    events, replicas, _ = told(services, [6], temperature=0.9, max_tokens=32, return_token_ids=True)
    first, second = (json.loads(call.body) for call in replicas.calls)
    assert first["seed"] == second["seed"]
    again, _, _ = told(services, [], temperature=0.9, max_tokens=32, return_token_ids=True, seed=first["seed"])
    assert answers(events) == answers(again)


def test_tool_calls_are_neither_lost_nor_told_twice(services: list[Service]) -> None:
    """The second replica reads the first one's text again: half a call may be in it."""
    parameters = {"properties": {"day": {"enum": ["monday", "tuesday"]}}, "required": ["day"]}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    forced = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    fields = {**forced, **SAMPLED, "seed": 9, "max_tokens": 200, "ssd": {"strategy": "plain"}}
    whole, alone, _ = told(services, [], **fields)
    name, arguments = called(whole)
    assert name == "find"
    assert json.loads(arguments)["day"] in parameters["properties"]["day"]["enum"]
    for life in (2, alone.bodies // 2, alone.bodies - 1):
        resumed, replicas, _ = told(services, [life], **fields)
        assert len(replicas.calls) == 2, "a replica died"
        assert called(resumed) == (name, arguments)
        assert answers(resumed) == answers(whole)


def test_whole_answers_begin_again(services: list[Service]) -> None:
    replicas = Mortals(services, [0, 0])
    router = Router(replicas, 1 << 20)
    with TestClient(router.app()) as client:
        response = client.post("/v1/chat/completions", json={"messages": QUESTION, **SAMPLED})
        expected = client.post("/v1/chat/completions", json={"messages": QUESTION, **SAMPLED})
        assert "ssd:router_requests_retried_total 2.0" in client.get("/metrics").text.replace("_created", "")
    assert len(replicas.calls) == 4
    assert response.json()["choices"] == expected.json()["choices"]


class Defective(Mortals):
    """Replicas that fail after two events."""

    async def respond(self, call: Call) -> AsyncGenerator[list[Message]]:
        async with aclosing(super().respond(call)) as batches:
            yield [*await anext(batches), *await anext(batches)]
        raise RuntimeError("a defect")


@pytest.mark.parametrize(("kind", "lives", "code"), [(Mortals, [3] * 9, "broken"), (Defective, [], "internal_error")])
def test_when_all_die_or_one_has_a_defect_the_stream_ends_with_an_error(
    services: list[Service], kind: type[Mortals], lives: list[int], code: str
) -> None:
    body = {"messages": QUESTION, "stream": True, **SAMPLED, "max_tokens": 400}
    with TestClient(Router(kind(services, lives), 1 << 20).app()) as client:
        *_, error, done = filter(None, client.post("/v1/chat/completions", json=body).text.split("\n\n"))
        assert "ssd:router_streams_broken_total 1.0" in client.get("/metrics").text
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == code


def test_when_all_die_a_whole_answer_is_an_error(services: list[Service]) -> None:
    with TestClient(Router(Mortals(services, [0] * 9), 1 << 20).app()) as client:
        whole = client.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 2})
    assert (whole.status_code, whole.json()["error"]["code"], whole.headers["retry-after"]) == (503, "broken", "1")


def test_web_pages_of_an_allowed_origin_can_read_the_routers_own_answers(services: list[Service]) -> None:
    origin = "https://chat.example"
    router = Router(Full(services, []), 1 << 20, ApiKeys(["right"]))
    with TestClient(router.app(web_page_middleware(None, [origin])), headers={"Origin": origin}) as client:
        url, asked = "/v1/chat/completions", {"Access-Control-Request-Method": "POST"}
        answers = [
            (200, client.get("/health")),
            (200, client.get("/metrics")),
            (200, client.options(url, headers=asked)),
            (401, client.post(url, json={})),
            (429, client.post(url, json={"messages": QUESTION}, headers={"Authorization": "Bearer right"})),
        ]
    for status, response in answers:
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, origin)


def test_responses_are_streamed_and_end_with_their_own_error(services: list[Service]) -> None:
    body = {"input": QUESTION, "stream": True, "temperature": 0.0, "max_output_tokens": 24}
    ends = []
    for lives in ([], [0], [4]):
        replicas = Mortals(services, lives)
        with TestClient(Router(replicas, 1 << 20).app()) as client:
            events = [event for event in client.post("/v1/responses", json=body).text.split("\n\n") if event]
        assert events[0].startswith("event: response.created\n")
        assert replicas.bodies > 3, "events come one by one"
        ends.append(events[-1].splitlines())
    (one, whole), (other, again), (broken, error) = ends
    assert one == other == "event: response.incomplete"
    texts = [json.loads(data.removeprefix("data: "))["response"]["output"][0]["content"] for data in (whole, again)]
    assert texts[0] == texts[1]
    assert broken == "event: error"
    assert json.loads(error.removeprefix("data: "))["code"] == "broken"


def test_requests_without_a_key_take_no_place_of_a_replica(services: list[Service]) -> None:
    replicas, body = Mortals(services, []), {"messages": QUESTION, "max_tokens": 2}
    with TestClient(Router(replicas, 1 << 20, ApiKeys(["right"])).app()) as client:
        for key in (None, "Bearer wrong"):
            headers = {} if key is None else {"Authorization": key}
            for response in (client.post("/v1/chat/completions", json=body, headers=headers), client.get("/v1/models")):
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert not replicas.calls
        right = {"Authorization": "Bearer right"}
        assert client.post("/v1/chat/completions", json=body, headers=right).status_code == 200


class Full(Mortals):
    """Replicas whose places are all taken."""

    async def respond(self, call: Call) -> AsyncGenerator[list[Message]]:
        raise ApiError(429, "all places are taken", code="rate_limit_exceeded", retry_after=1)
        yield []


def test_bad_requests_and_full_servers_are_answered_as_one_server_does(services: list[Service]) -> None:
    with TestClient(Router(Mortals(services, []), 1 << 20).app()) as client:
        for body, status in ((b"{", 400), (b"[]", 400), (b'{"messages": [], "stream": true}', 400)):
            response = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/nothing").status_code == 404
        assert 'a_total{replica="two"} 2.0' in client.get("/metrics").text
    with TestClient(Router(Full(services, []), 1 << 20).app()) as client:
        for stream in (False, True):
            response = client.post("/v1/chat/completions", json={"messages": QUESTION, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
