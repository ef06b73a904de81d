"""Reads from a request what the router needs: its conversation, and whether its answer can be resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers

from ssd_runtime.serving.http.openai.answers.events import json_text
from ssd_runtime.serving.http.openai.requests.json_bounds import read_json
from ssd_runtime.serving.ray_app.call import Call

RESPONSES = "/v1/responses"
PATHS = ("/v1/chat/completions", "/v1/completions", RESPONSES)
MOST_IDS = 1 << 20
"""Token ids of a prompt, at most; the replica knows how many its model takes."""
PROMPT_HEAD = 1024
"""Characters, or tokens, of a completion's prompt that tell its conversation."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A request as replicas get it."""

    call: Call
    streams: bool = False
    """Whether the answer is a stream of events."""
    resumable: bool = False
    """Whether its events have token ids."""
    keep_token_ids: bool = False
    """Whether the client asked for these."""


def read_call(call: Call) -> Routed:
    """Give a request a seed, and its stream token ids, so that any replica can go on with its answer.

    Requests without a fixed seed would have another answer on another replica. Bodies that are no JSON object, or
    have too many values, stay as they are: the replica says what is wrong.
    """
    if call.method != "POST" or call.path not in PATHS:
        return Routed(call)
    try:
        body = read_json(call.body, MOST_IDS)
    except ValueError:
        return Routed(call)
    if not isinstance(body, dict):
        return Routed(call)
    streams = body.get("stream") is True
    asked = body.get("return_token_ids")
    # Events of responses have no token ids.
    resumable = streams and call.path != RESPONSES and asked in (None, False, True)
    if body.get("seed") is None:
        body["seed"] = secrets.randbelow(1 << 31)
    if resumable:
        body["return_token_ids"] = True
    # JSON without spaces and escapes, since replicas take no longer bodies than the router does.
    seeded = replace(call, body=json_text(body).encode(), conversation=_conversation(call, body))
    headers = tuple(pair for pair in seeded.headers if pair[0].lower() != b"content-length")
    return Routed(replace(seeded, headers=headers), streams=streams, resumable=resumable, keep_token_ids=asked is True)


def _conversation(call: Call, body: Mapping[str, Any]) -> str:
    """The key that all turns of a conversation have in common, and no turn of another key or beginning.

    The turns of a chat begin with the same messages up to the first of the user; what follows grows.
    """
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        users = (place for place, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user")
        beginning: Any = messages[: next(users, 0) + 1]
    else:
        prompt = body.get("prompt")
        beginning = prompt[:PROMPT_HEAD] if isinstance(prompt, str | list) else None
    key = Headers(raw=list(call.headers)).get("authorization")
    told = json.dumps([key, body.get("instructions"), beginning])
    return sha256(told.encode()).hexdigest()
