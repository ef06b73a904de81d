"""The router's reading of requests, the number of replicas, and a cluster that does not start."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.serving.ray_app.call import Call
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster
from ssd_runtime.serving.ray_app.routing import read_call
from ssd_runtime.serving.ray_app.scale import Scale


def call(body: Any, path: str = "/v1/chat/completions", key: str = "") -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(method="POST", path=path, headers=((b"authorization", key.encode()),), body=data)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_all_turns_of_a_conversation_have_one_key_and_no_other_has_it() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = [system, user("Why?")]
    later = [*first, {"role": "assistant", "content": "So."}, user("And?")]
    key = read_call(call({"messages": first})).call.conversation
    assert key
    assert read_call(call({"messages": later, "temperature": 1.0})).call.conversation == key
    asked = {"instructions": "Be brief.", "input": "Why?"}
    key_of_response = read_call(call(asked, "/v1/responses")).call.conversation
    grown = {**asked, "input": [user("Why?"), {"role": "assistant", "content": "So."}, user("And?")]}
    assert read_call(call(grown, "/v1/responses")).call.conversation == key_of_response != key
    others = [
        call({"messages": [user("Why?")]}),
        call({"messages": [system, user("Who?")]}),
        call({"messages": first}, key="Bearer other"),
        call({"prompt": "Why?"}, "/v1/completions"),
    ]
    assert key not in {read_call(each).call.conversation for each in others}


def test_a_request_without_a_seed_gets_one_and_every_other_field_stays() -> None:
    body = {"messages": [user("é 🎈")], "temperature": 0.1, "stream": True, "logit_bias": {"5": -1.5}}
    routed = read_call(call(body))
    sent = json.loads(routed.call.body)
    assert isinstance(sent.pop("seed"), int)
    assert sent.pop("return_token_ids") is True
    assert sent == body
    assert (routed.streams, routed.resumable, routed.keep_token_ids) == (True, True, False)
    assert json.loads(read_call(call({**body, "seed": 7})).call.body)["seed"] == 7


def test_a_request_takes_no_more_bytes_than_it_came_in() -> None:
    """Replicas take bodies as long as the router does."""
    body = json.dumps({"messages": [user("日本語" * 99)]}, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(read_call(call(body)).call.body) <= len(body) + len(',"seed":2147483647')


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b'{"a": ' + b"[" * 100_000])
def test_what_is_no_request_stays_as_it_is(body: bytes) -> None:
    assert read_call(call(body)).call == call(body)


def test_replicas_are_a_number_or_a_range() -> None:
    assert (Scale.of("3", 2).least, Scale.of("3", 2).most) == (3, 3)
    assert (Scale.of("1:4", 2).least, Scale.of("1:4", 2).most, Scale.of("1:4", 2).cpus) == (1, 4, 2)
    assert Scale.of("1", None, device="cuda").gpus == 1
    assert [Scale.of("1:4", 2).on_cards(cards).gpus for cards in (0, 3, 4)] == [0, 0, 1]
    for wrong in ("0", "4:1", "-1", "two", "1:", "1:99999", "", "٢"):
        with pytest.raises(UserError, match="--replicas"):
            Scale.of(wrong, 1)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("local", "--ray local: Ray did not start on this machine (TimeoutError); see `ray start --head`"),
        ("ray://host", "--ray ray://host: no cluster can be joined there (TimeoutError); see `ray status`"),
    ],
)
def test_a_cluster_that_fails_without_a_message_is_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str, told: str
) -> None:
    def fail(**_: object) -> None:
        raise TimeoutError

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=fail, __spec__=ModuleSpec("ray", None)))
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"), ray_cluster(address):
        pass
