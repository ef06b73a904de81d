"""Templates behind a server: what one client's conversation does to a template is felt by nobody else."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ssd_runtime.loading.prompt_tokens import PromptTokens
from ssd_runtime.serving.http.app import MOST_TEMPLATES
from ssd_runtime.serving.http.openai.requests.prompt_encoder import MOST_NESTING
from ssd_runtime.templates.renderer import TemplateLimits
from tests.folders import TEXTS, save_tiny_model
from tests.serving import ENDLESS, TOOL_TEMPLATE, send, serving, tiny_engine, tiny_service
from tests.waiting import wait_until

TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}"
    "{% if fails is defined %}{{ fails.x.y / 0 }}{% endif %}{% if messages[0].content == 'raise' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    + TOOL_TEMPLATE.replace("{% for m in messages", "{% for m in (messages[:1] if brief is defined else messages)")
    + "{{ variable | default(0) | tojson }}"
)
LOOP = {"messages": [{"role": "user", "content": "loop"}], "max_tokens": 2}
PLAIN = {"messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 2}


@dataclass(frozen=True)
class Served:
    """A server of a model whose template loops for some conversations."""

    address: str
    prompts: PromptTokens

    @property
    def looping(self) -> int:
        """Processes that render, or are about to."""
        return len(self.prompts._renderer._all) - len(self.prompts._renderer._idle)

    def ask(self, body: Any) -> tuple[int, Any]:
        """Status and body of an answer."""
        connection = self.send(body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())

    def send(self, body: Any) -> http.client.HTTPConnection:
        """A connection on which an answer is to come."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=120)
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def until_looping(self, count: int) -> None:
        """Wait until so many processes render."""
        wait_until(lambda: self.looping == count, f"{count} processes render")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("templates") / "model", context=2048)


def served(folder: Path, seconds: float) -> Iterator[Served]:
    engine = tiny_engine(folder)
    engine.loaded.tokenizer.chat_template = TEMPLATE
    prompts = PromptTokens(engine.loaded.tokenizer, limits=TemplateLimits(seconds=seconds))
    vars(engine.loaded)["prompts"] = prompts
    with serving(tiny_service(engine)) as address:
        yield Served(address, prompts)
        prompts.close()


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[Served]:
    yield from served(folder, 2.0)


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[Served]:
    yield from served(folder, 600.0)


def nested(depth: int) -> str:
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def calling(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}],
        "max_tokens": 1,
    }


LONG = 1 << 18
"""Characters of a text that is far longer than the context."""
DEEP = f"nested more than {MOST_NESTING} deep"
REFUSED: dict[str, tuple[Any, str]] = {
    "an endless loop": (LOOP, r"template refuses them \(it takes more than 2 s\)"),
    "a template's exception": ({"messages": [{"role": "user", "content": "raise"}]}, r"\(roles must alternate\)"),
    "an undefined variable": ({**PLAIN, "chat_template_kwargs": {"fails": 1}}, r"refuses them \(.*no attribute 'x'"),
    "arguments of 100,000": (calling(nested(100_000)), "more than .* lists and objects"),
    "arguments of 65": (calling(nested(65)), DEEP),
    "a conversation too long": (
        {"messages": [{"role": "user", "content": "x" * (LONG)}]},
        "more than .* tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_error_of_a_template_is_a_400_with_its_message(hasty: Served, what: str) -> None:
    body, reason = REFUSED[what]
    status, answer = hasty.ask(body)
    assert status == 400, answer
    assert re.search(reason, answer["error"]["message"])
    assert answer["error"]["message"].isprintable()


def test_others_are_served_while_templates_loop(patient: Served) -> None:
    """As many loop as may at once, and more wait: others' completions and `/health` do not."""
    loops = [patient.send(LOOP) for _ in range(MOST_TEMPLATES - 1)]
    patient.until_looping(MOST_TEMPLATES - 1)
    assert patient.ask(PLAIN)[0] == 200
    loops += [patient.send(LOOP) for _ in range(8)]
    patient.until_looping(MOST_TEMPLATES)
    worst = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert send(patient.address, "/health", b"", "GET")[0] == 200
        worst = max(worst, time.monotonic() - began)
    assert worst < 5
    assert patient.ask({"prompt": TEXTS[0], "max_tokens": 2})[0] == 200
    # Whoever leaves frees a place, whether its conversation loops or waits.
    for connection in loops:
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    patient.until_looping(0)
    assert patient.ask(PLAIN)[0] == 200
