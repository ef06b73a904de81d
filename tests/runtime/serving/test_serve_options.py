"""Options of the server, seen in its answers over a socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.commands.serve_options import ServerOptions
from ssd_runtime.serving.http.keys import KEY_VARIABLE, ApiKeys, read_keys
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.openai.requests.requests import ChatRequest, read_request
from tests.folders import TEXTS
from tests.serving import QUESTION, TOOL_TEMPLATE, send, serving, tiny_engine, tiny_service

CHAT = "/v1/chat/completions"


def ask(address: str, body: Any) -> tuple[int, Any]:
    """Status and JSON of a response."""
    status, _, answer = send(address, CHAT, body)
    return status, answer


def test_requests_set_variables_of_the_template_and_nothing_else(folder: Path) -> None:
    template = TOOL_TEMPLATE + "{% if thinking %}Let me think, step by step: {% endif %}"
    with serving(tiny_service(tiny_engine(folder), own_template=template)) as address:
        body = {"messages": QUESTION, "max_tokens": 2}
        tokens = [
            ask(address, {**body, "chat_template_kwargs": {"thinking": thinking}})[1]["usage"]["prompt_tokens"]
            for thinking in (False, True)
        ]
        assert tokens[0] < tokens[1]
        for name in ("tokenize", "add_generation_prompt", "conversation", "messages", "chat_template", "tools"):
            status, answer = ask(address, {**body, "chat_template_kwargs": {name: "x"}})
            assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_template_that_does_not_work_is_told_before_the_server_starts(folder: Path) -> None:
    loaded = tiny_engine(folder).loaded
    for template, reason in (
        ("{% for m in messages %}", "endfor"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("{{ messages[5].content }}", "undefined|no element"),
    ):
        with pytest.raises(UserError, match=f"^--chat-template: here does not work: .*({reason})"):
            PromptEncoder(loaded, template).check_template("here")
    PromptEncoder(loaded, TOOL_TEMPLATE).check_template("here")


def test_control_tokens_in_messages_are_text_unless_the_server_allows_them(folder: Path) -> None:
    """A completion's prompt, however, is what the model reads."""
    spelled = [{"role": "user", "content": "a<s>b</s>"}, {"role": "assistant", "content": "<s>"}, QUESTION[0]]
    plain = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}, QUESTION[0]]
    engine = tiny_engine(folder)
    begin = engine.loaded.tokenizer.bos_token_id
    counts = list[int]()
    for allow in (False, True):
        engine.loaded = replace(engine.loaded, allow_special=allow)
        encoder = tiny_service(engine).encoder
        for messages in (plain, spelled):
            request = read_request(json.dumps({"messages": messages}).encode(), ChatRequest)
            counts.append(encoder.chat(request.messages, []).count(begin))
        assert encoder.text("a<s>b", 300).count(begin) == 1
        template = encoder.loaded.tokenizer.chat_template
        encoder.loaded.tokenizer.chat_template = None
        assert PromptEncoder(engine.loaded).chat(request.messages, []).count(begin) == 2 * allow
        encoder.loaded.tokenizer.chat_template = template
    assert counts == [4, 4, 4, 6]


def test_the_name_of_a_control_token_is_a_stop(folder: Path) -> None:
    """Though the token has no text in answers."""
    engine = tiny_engine(folder)
    begin = engine.loaded.tokenizer.bos_token_id
    assert begin not in engine.loaded.eos_ids
    body = {"messages": QUESTION, "max_tokens": 20, "logit_bias": {str(begin): 100}, "return_token_ids": True}
    with serving(tiny_service(engine)) as address:
        for stop, tokens, reason in ((["<s>"], [begin], "stop"), (["<pad>", "x<s>"], [begin] * 20, "length")):
            _, answer = ask(address, {**body, "stop": stop})
            choice = answer["choices"][0]
            assert (choice["token_ids"], choice["finish_reason"]) == (tokens, reason)
            assert choice["message"]["content"] == ""


def test_a_body_that_comes_too_slowly_is_refused(folder: Path) -> None:
    service = tiny_service(tiny_engine(folder), body_seconds=2.0)
    with serving(service) as address:
        host, port = urlsplit(address).netloc.split(":")
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            began = time.monotonic()
            slow.sendall(head.encode())
            for _ in range(3):
                slow.sendall(b" ")
                time.sleep(0.02)
            response = http.client.HTTPResponse(slow)
            response.begin()
            assert time.monotonic() - began >= 2.0
            assert response.status == 408
            assert json.loads(response.read())["error"]["code"] == "request_timeout"
        assert ask(address, {"messages": QUESTION, "max_tokens": 2})[0] == 200


def test_the_memory_for_keys_bounds_a_request_and_none_fails_of_it(folder: Path) -> None:
    """A longer prompt is refused as the client's mistake, and an answer ends where the memory does."""
    engine = tiny_engine(folder)
    engine.cache_bytes = 760 * engine.decoder.kv_layout.bytes_per_slot
    most = engine.scheduler.most_tokens
    assert 100 < most < engine.decoder.shape.max_context
    with serving(tiny_service(engine, max_context=most)) as address:
        ids = engine.loaded.encode([("user", TEXTS[0])])
        status, answer = ask(address, {"messages": QUESTION, "max_tokens": 5000})
        assert status == 200, answer
        assert answer["usage"]["total_tokens"] == most
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == len(ids)
        status, answer = ask(address, {"messages": [{"role": "user", "content": TEXTS[0] * 10}]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def ask_web(address: str, **headers: str) -> tuple[int, str]:
    """Status and message of a response."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.putrequest("GET", "/v1/models", skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, json.loads(response.read()).get("error", {}).get("message", "")


OWN = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:80", "127.8.0.1", "[::1]", "[::1]:8000"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "evil@example", "127.0.0.1.evil.example", "["]


def test_names_of_this_machine_are_served_and_others_refused(folder: Path) -> None:
    with serving(tiny_service(tiny_engine(folder), allowed_hosts=())) as address:
        for host in OWN:
            assert ask_web(address, Host=host)[0] == 200, host
            assert ask_web(address, Origin=f"http://{host}")[0] == 200, host
        for host in FOREIGN:
            status, message = ask_web(address, Host=host)
            assert (status, "--allow-host" in message) == (403, True), host
        for origin in [*(f"https://{host}" for host in FOREIGN), "null", "file://"]:
            status, message = ask_web(address, Origin=origin)
            assert (status, "--allow-origin" in message) == (403, True), origin


@pytest.mark.parametrize(
    "origin", ["chat.example", "foo", "https://", "https://a/b", "null", "file://", "https://a b", ""]
)
def test_what_can_be_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(UserError, match="--allow-origin"):
        _ = ServerOptions(allow_origin=[origin]).allowed_origins


def test_origins_are_told_as_browsers_send_them() -> None:
    options = ServerOptions(allow_origin=["https://Chat.Example:8443/", "*"])
    assert options.allowed_origins == ("https://chat.example:8443", "*")


def test_what_is_allowed_is_served(folder: Path) -> None:
    changes = {"allowed_hosts": ("Chat.example",), "allowed_origins": ("https://a.example",)}
    with serving(tiny_service(tiny_engine(folder), **changes)) as address:
        assert ask_web(address, Host="chat.example:443", Origin="https://chat.example")[0] == 200
        assert ask_web(address, Origin="https://a.example")[0] == 200
        assert ask_web(address, Host="a.example")[0] == 403
        assert ask_web(address, Origin="http://a.example")[0] == 403
    for hosts in (None, ("*",)):
        with serving(tiny_service(tiny_engine(folder), allowed_hosts=hosts)) as address:
            assert ask_web(address, Host="evil.example")[0] == 200


def test_keys_of_the_environment_serve_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "first, second,")
    assert read_keys(None) == ("first", "second")
    assert read_keys(["given"]) == ("given",)
    keys = ApiKeys(read_keys(None))
    assert keys.stream_of("Bearer second") == "key 2"
    assert keys.stream_of("Bearer given") is None


@pytest.mark.parametrize("value", ["", " ", ",", " , ,"])
def test_a_variable_that_names_no_key_opens_no_server(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE}: it is set, but names no key"):
        read_keys(None)
    assert read_keys(["given"]) == ("given",)
    monkeypatch.delenv(KEY_VARIABLE)
    assert read_keys(None) == ()


def test_spaces_around_a_key_are_no_part_of_it() -> None:
    keys = ApiKeys(read_keys([" first ", "second\t"]))
    assert [keys.stream_of(f"Bearer {key}") for key in ("first", " second ")] == ["key 1", "key 2"]


@pytest.mark.parametrize("key", ["", "  ", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="--api-key: a key is text of ASCII characters that is not empty"):
        read_keys([key])
