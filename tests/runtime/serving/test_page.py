"""The chat page, and the extension of streams that it draws: how each token was drafted."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.clocks import let_forwards_take_the_same
from tests.folders import TEXTS
from tests.serving import send, serving, tiny_engine, tiny_service

FIRST_OF_TWO_BYTES = 130
"""The token of the byte 0xc3, with which a character of two bytes begins."""


def test_the_page_needs_no_key_and_reaches_this_server_alone(folder: Path) -> None:
    with serving(tiny_service(tiny_engine(folder), keys=["secret"])) as address:
        status, headers, content = send(address, "/", b"", "GET")
    page = content.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["x-content-type-options"] == "nosniff"
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert rules[f"{tag}-src"] == f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
    assert not re.findall(r"https?:|src=|url\(|@import|//\w+\.", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_a_server_can_do_without_the_page(folder: Path) -> None:
    with serving(tiny_service(tiny_engine(folder), page=False)) as address:
        assert send(address, "/", b"", "GET")[0] == 404


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        let_forwards_take_the_same(patch)  # what `auto` drafts depends on what steps cost
        with serving(tiny_service(tiny_engine(folder), allow_strategies=("clasp",))) as address:
            yield address


def streamed(address: str, drafts: bool, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of an answer."""
    options = {"include_usage": True, **({"include_drafts": True} if drafts else {})}
    body = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 60, **fields}
    sent = {**body, "stream": True, "stream_options": options}
    status, _, told = send(address, "/v1/chat/completions", sent)
    assert status == 200
    return [json.loads(line[6:]) for line in told.decode().splitlines() if line.startswith("data: {")]


def content(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def spelled(chunks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The tokens that the chunks tell; that of the role tells none."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice.get("ssd", {"tokens": []})["tokens"]]


@pytest.mark.parametrize(
    ("strategy", "origins"),
    [
        ("plain", {"plain"}),
        ("lookup", {"plain", "guess"}),
        ("clasp", {"plain", "skipped"}),
        ("auto", {"plain", "guess"}),
    ],
)
def test_every_token_is_told_once_with_its_origin(address: str, strategy: str, origins: set[str]) -> None:
    """The texts are the answer's, also where several tokens spell a character; the counts are those of the usage."""
    chunks = streamed(address, drafts=True, ssd={"strategy": strategy})
    told = spelled(chunks)
    usage = chunks[-1]["usage"]
    drafted = [token for token in told if token["origin"] != "plain"]
    assert "".join(token["text"] for token in told) == content(chunks)
    assert {token["origin"] for token in told} == origins
    assert len(told) == usage["completion_tokens"]
    # The first token comes from the prompt, and every forward adds one to those that were drafted; an accepted draft
    # may be the last token.
    assert len(told) - len(drafted) - 1 - usage["ssd"]["target_forwards"] in (0, -1)
    # The statistics count a chain's tokens, and not the siblings in a tree.
    accepted = usage["ssd"]["num_accepted_tokens"]
    assert len(drafted) == accepted if strategy in ("plain", "clasp") else len(drafted) >= accepted
    speeds = chunks[-2]["choices"][0]["ssd"]
    assert speeds["tokens_per_second"] > 0
    assert (speeds["plain_tokens_per_second"] or 0) > 0 or strategy != "auto"


def test_text_that_a_stop_held_back_is_told_too(address: str) -> None:
    text = content(streamed(address, drafts=False))
    for stop in (text[20:23], text[-1] + "x"):
        chunks = streamed(address, drafts=True, stop=[stop])
        assert "".join(token["text"] for token in spelled(chunks)) == content(chunks) == text.partition(stop)[0]


def test_an_unfinished_character_at_the_end_is_told_too(address: str) -> None:
    chunks = streamed(address, drafts=True, max_tokens=3, logit_bias={str(FIRST_OF_TWO_BYTES): 100})
    assert "".join(token["text"] for token in spelled(chunks)) == content(chunks) == "\ufffd" * 3


def test_who_does_not_ask_gets_the_same_chunks_without_it(address: str) -> None:
    def bare(chunks: list[dict[str, Any]]) -> list[Any]:
        return [chunk["choices"] for chunk in chunks]

    ordinary, extended = (streamed(address, drafts, ssd={"strategy": "plain"}) for drafts in (False, True))
    assert "tokens" not in json.dumps(bare(ordinary))
    for chunk in extended:
        for choice in chunk["choices"]:
            choice.pop("ssd", None)
    assert bare(extended) == bare(ordinary)
    assert set(extended[0]) == set(ordinary[0])
