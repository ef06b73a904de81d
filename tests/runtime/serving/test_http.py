"""OpenAI's interface over a socket, as its own client and others use it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch

from ssd_runtime.serving.http.app import Service
from ssd_runtime.serving.http.openai.answers.logprobs import PositionReader
from tests.folders import TEXTS
from tests.served import metric
from tests.serving import QUESTION, chat, lone, request_for, send, serving, tiny_engine, tiny_service


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., str]:
    """The text of plain decoding alone, by an engine of its own."""
    engine = tiny_engine(folder)
    return lambda tokens, **changes: engine.loaded.decode(
        lone(engine, request_for(engine, TEXTS[0], tokens, **changes))
    )


def test_answers_whole_and_streamed_are_those_of_lone_plain_decoding(
    service: Service, client: openai.OpenAI, expected: Callable[..., str]
) -> None:
    text = expected(24)
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_completion_tokens=24)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[0].usage is None
    assert len({chunk.id for chunk in chunks}) == 1
    legacy = client.completions.create(model="tiny", prompt=[TEXTS[0], TEXTS[1]], max_tokens=5)
    assert [choice.index for choice in legacy.choices] == [0, 1]
    ids = client.completions.create(model="tiny", prompt=service.encoder.text(TEXTS[1], 300), max_tokens=5)
    assert ids.choices[0].text == legacy.choices[1].text
    streamed = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == legacy.choices[1].text


def stepwise(service: Service, text: str, tokens: int, change: Callable[[torch.Tensor, list[int]], None]) -> list[int]:
    """Greedy decoding by the model itself, one token at a time, with changed logits."""
    loaded = service.thread.engine.loaded
    prompt = loaded.encode([("user", text)])
    new = list[int]()
    with torch.no_grad():
        for _ in range(tokens):
            logits = loaded.model(torch.tensor([prompt + new])).logits[0, -1].float()
            change(logits, new)
            new.append(int(logits.argmax()))
    return new


@pytest.mark.parametrize("strategy", ["plain", "auto", "clasp"])
def test_penalties_and_biases_change_the_targets_logits(service: Service, address: str, strategy: str) -> None:
    def penalise(logits: torch.Tensor, new: list[int]) -> None:
        for token in set(new):
            logits[token] -= 0.3 + 0.2 * new.count(token)
        logits[7] += 3.5

    tokens = stepwise(service, TEXTS[0], 30, penalise)
    assert tokens != stepwise(service, TEXTS[0], 30, lambda logits, new: None)
    fields: dict[str, Any] = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {"7": 3.5}}
    status, body = chat(address, **fields, max_tokens=30, return_token_ids=True, ssd={"strategy": strategy})
    assert status == 200
    assert body["choices"][0]["token_ids"] == tokens


@pytest.mark.parametrize("sampled", [False, True])
def test_log_probabilities_are_the_models_own(service: Service, client: openai.OpenAI, sampled: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 20, "seed": 3}
    asked |= {"temperature": 0.9, "top_p": 0.9} if sampled else {"temperature": 0}
    extra = {"return_token_ids": True}
    bare = client.chat.completions.create(**asked)
    whole = client.chat.completions.create(**asked, extra_body=extra, logprobs=True, top_logprobs=3)
    choice = whole.choices[0]
    assert choice.message.content == bare.choices[0].message.content, "the record changes nothing"
    tokens = choice.token_ids  # type: ignore[attr-defined]
    loaded = service.thread.engine.loaded
    prompt = loaded.encode([("user", TEXTS[0])])
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    values = logits.float().log_softmax(-1)
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 20
    for row, token, entry in zip(values, tokens, choice.logprobs.content, strict=True):
        assert bytes(entry.bytes or []) == service.encoder.token_bytes.of(token, first=False)
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [each.logprob for each in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    chunks = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    whole_values = [entry.logprob for entry in choice.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(whole_values, abs=1e-3)
    legacy = client.completions.create(model="tiny", prompt=TEXTS[1], max_tokens=9, logprobs=2, extra_body=extra)
    listed = legacy.choices[0].logprobs
    assert listed.tokens is not None
    assert len(listed.tokens) == 9
    for name, top in zip(listed.tokens, listed.top_logprobs or [], strict=True):
        assert name in top
        assert len(top) in (2, 3)


def test_others_are_answered_while_log_probabilities_are_written(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may have thousands of tokens, each with twenty others."""
    begun, answered = threading.Event(), threading.Event()
    read = PositionReader.read

    def wait(self: PositionReader, entries: Any) -> Any:
        begun.set()
        assert answered.wait(60), "the server answers nobody else"
        return read(self, entries)

    monkeypatch.setattr(PositionReader, "read", wait)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(chat, address, logprobs=True, top_logprobs=2, n=2)
        assert begun.wait(60)
        assert send(address, "/health", b"", "GET")[0] == 200
        answered.set()
        status, body = asked.result()
    assert status == 200
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == [4, 4]


def test_every_choice_has_a_seed_of_its_own(client: openai.OpenAI, expected: Callable[..., str]) -> None:
    """Choice i of seed s is the answer to seed s + i; streams of several choices are told apart."""
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 12, "temperature": 0.9, "seed": 7}
    three = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert texts == [expected(12, seed=7 + place) for place in range(3)]
    assert len(set(texts)) == 3
    found = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    assert [found[place] for place in range(3)] == texts
    assert three.usage.completion_tokens == 36
    assert three.usage.prompt_tokens == client.chat.completions.create(**asked).usage.prompt_tokens  # type: ignore[union-attr]
    assert three.usage.ssd["seed"] == 7  # type: ignore[attr-defined]


def test_answers_end_before_stop_strings(client: openai.OpenAI, expected: Callable[..., str]) -> None:
    text = expected(40)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    for stops in (stop, ["never in there", stop]):
        whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=40, stop=stops)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (cut, "stop")
        streamed = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=40, stop=stops, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == cut


def test_a_request_chooses_its_strategy_and_gets_its_figures(service: Service, client: openai.OpenAI) -> None:
    texts = set[str | None]()
    for strategy in ("plain", "auto", "clasp"):
        extra = {"ssd": {"strategy": strategy}}
        answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=20, extra_body=extra)
        texts.add(answer.choices[0].message.content)
        figures = answer.usage.ssd  # type: ignore[union-attr]
        assert figures["strategy"] == strategy
        assert figures["time_to_first_token"] > 0
        assert figures["tokens_per_second"] > 0
        if strategy == "plain":
            assert (figures["mean_acceptance_length"], figures["num_drafts"]) == (1.0, 0)
    assert len(texts) == 1
    cached = answer.usage.prompt_tokens_details  # type: ignore[union-attr]
    assert cached.cached_tokens is not None
    assert cached.cached_tokens > 0


def test_keys_are_needed_and_their_requests_share_nothing(folder: Path) -> None:
    service = tiny_service(tiny_engine(folder), keys=["first", "second"])
    with serving(service) as address:
        body = {"messages": [{"role": "user", "content": TEXTS[0] * 3}], "max_tokens": 2}

        def cached(key: str) -> int:
            status, _, answer = send(address, "/v1/chat/completions", body, Authorization=f"Bearer {key}")
            assert status == 200
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert (cached("first"), cached("second")) == (0, 0)
        assert cached("first") > 0
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
            for path, method in (("/v1/chat/completions", "POST"), ("/v1/models", "GET")):
                status, _, answer = send(address, path, body, method, **headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        assert connection.getresponse().status == 401, "a body is not waited for"
        connection.close()
        assert send(address, "/health", b"", "GET")[0] == 200


def test_a_prompt_longer_than_the_server_allows_is_refused(folder: Path) -> None:
    service = tiny_service(tiny_engine(folder), max_prompt_tokens=20)
    with serving(service) as address:
        for count, status in ((20, 200), (21, 400)):
            answer = send(address, "/v1/completions", {"prompt": [5] * count, "max_tokens": 2})
            assert answer[0] == status, answer
        assert answer[2]["error"]["code"] == "context_length_exceeded"


def test_a_full_server_says_when_to_come_again(folder: Path) -> None:
    service = tiny_service(tiny_engine(folder), places=2)
    with serving(service) as address:
        slow = {"messages": QUESTION, "max_tokens": 450, "stream": True, "n": 2}
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        connection.request("POST", "/v1/chat/completions", json.dumps(slow), {"Content-Type": "application/json"})
        connection.getresponse().read(10)
        # The engine takes no step meanwhile, so that both places stay taken.
        with service.thread.engine._lock:
            status, headers, body = send(address, "/v1/chat/completions", {"messages": QUESTION})
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        status, _, body = send(address, "/v1/chat/completions", {"messages": QUESTION, "n": 3})
        assert (status, body["error"]["param"]) == (400, "n")
        connection.close()


def test_metrics_count_what_requests_were_told(address: str) -> None:
    names = {
        "vllm:generation_tokens_total": "completion_tokens",
        "vllm:prompt_tokens_total": "prompt_tokens",
        "vllm:spec_decode_num_drafts_total": "num_drafts",
        "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
        "ssd:target_forwards_total": "target_forwards",
    }
    counted = [*names, "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    before = {name: metric(address, name) for name in counted}
    between = ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count")
    intervals = {name: metric(address, name) for name in between}
    status, body = chat(address, max_tokens=60, ssd={"strategy": "clasp", "parameters": {"confidence": 0.0}})
    assert status == 200
    figures = {**body["usage"], **body["usage"]["ssd"]}
    assert figures["num_accepted_tokens"] > 0
    for name, figure in names.items():
        assert metric(address, name) - before[name] == figures[figure], name
    assert metric(address, counted[-1]) - before[counted[-1]] == figures["num_accepted_tokens"], "in all positions"
    for name in (
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
    ):
        assert metric(address, name) > 0
    for name in between:
        assert metric(address, name) - intervals[name] == figures["completion_tokens"] - 1, name
    assert metric(address, "vllm:num_requests_running") == 0
