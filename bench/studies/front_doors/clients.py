"""Tries clients that people have with `ssd-serve`: OpenAI's, LangChain's, litellm's, and curl.

`python -m bench.studies.front_doors.clients --url http://127.0.0.1:8000 --model demo@wheel`

It runs in an environment that has the clients (`pip install openai langchain-openai litellm`); nothing of this
repository is needed there. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

QUESTION = "Name three colours of the rainbow."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo@wheel")
    arguments = parser.parse_args()
    print("| client | tried | came back |\n|---|---|---|")
    for client, tries in (("openai", with_openai), ("langchain", with_langchain), ("litellm", with_litellm)):
        for tried, attempt in tries(arguments.url, arguments.model):
            show(client, tried, attempt)
    for tried, attempt in with_curl(arguments.url, arguments.model):
        show("curl", tried, attempt)


def show(client: str, tried: str, attempt: Callable[[], object]) -> None:
    """Print a row; an exception is a result, too."""
    try:
        came = str(attempt())
    except Exception as error:  # what the user of the client would see
        came = f"{type(error).__name__}: {error}"
    came = " ".join(came.split()).replace("|", "/")
    print(f"| {client} | {tried} | {came[:200]} |", flush=True)


def open_requests(url: str) -> str:
    """The server's own count of requests that run."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running{"))


def with_openai(url: str, model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows of OpenAI's own client."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    common: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}

    def streamed(**more: Any) -> str:
        chunks = list(client.chat.completions.create(**{**common, **more}, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        return f"{len(chunks)} chunks, {text!r}" + (f", {usage.completion_tokens} tokens" if usage else "")

    def cancelled() -> str:
        stream = client.chat.completions.create(**{**common, "max_tokens": 2000}, stream=True)
        for _ in zip(stream, range(5), strict=False):
            pass
        stream.close()
        time.sleep(1.0)
        return f"{open_requests(url)} requests run a second later"

    yield "models.list", lambda: [each.id for each in client.models.list()]
    yield "chat, whole", lambda: client.chat.completions.create(**common).choices[0].message.content
    yield "chat, stream", streamed
    yield "stream with include_usage", lambda: streamed(stream_options={"include_usage": True})
    yield "stop", lambda: client.chat.completions.create(**common, stop=["."]).choices[0]
    yield "seed, twice", lambda: _equal(client, common)
    yield "n=3", lambda: [c.message.content for c in _create(client, common, n=3, temperature=1.0, seed=1).choices]
    yield "usage", lambda: _create(client, common).usage
    yield "strategy plain", lambda: _create(client, common, extra_body={"ssd": {"strategy": "plain"}}).usage.ssd
    yield (
        "completions, list of prompts",
        lambda: [
            choice.text
            for choice in client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=6).choices
        ],
    )
    yield "temperature 9", lambda: _create(client, common, temperature=1.9, extra_body={"temperature": 9})
    yield "another model", lambda: _create(client, common, model="gpt-5")
    yield "response_format json_object", lambda: _create(client, common, response_format={"type": "json_object"})
    yield "logprobs", lambda: _create(client, common, logprobs=True)
    yield (
        "an image",
        lambda: _create(
            client,
            common,
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        ),
    )
    yield (
        "a prompt of 20,000 words",
        lambda: _create(client, common, messages=[{"role": "user", "content": "a b " * 10000}]),
    )
    yield "leave after 5 chunks", cancelled


def _create(client: Any, common: dict[str, Any], **more: Any) -> Any:
    return client.chat.completions.create(**{**common, **more})


def _equal(client: Any, common: dict[str, Any]) -> str:
    texts = [_create(client, common, temperature=1.0, seed=3).choices[0].message.content for _ in range(2)]
    return f"equal: {texts[0] == texts[1]}"


def with_langchain(url: str, model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows of LangChain's ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=24, temperature=0, max_retries=0)
    yield "invoke", lambda: chat.invoke(QUESTION).content
    yield "stream", lambda: "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    yield "usage_metadata", lambda: chat.invoke(QUESTION).usage_metadata
    yield "stop", lambda: chat.invoke(QUESTION, stop=["."]).content
    yield "batch of 3", lambda: [answer.content[:30] for answer in chat.batch([QUESTION] * 3)]
    extras: dict[str, Any] = {"user": "me", "store": False, "service_tier": "auto", "parallel_tool_calls": False}
    yield "bind(user, store, service_tier, parallel_tool_calls)", lambda: chat.bind(**extras).invoke(QUESTION).content
    yield "bind_tools", lambda: chat.bind_tools([_tool()]).invoke(QUESTION).content
    yield "with_structured_output", lambda: chat.with_structured_output(_schema()).invoke(QUESTION)


def _schema() -> dict[str, Any]:
    properties = {"colours": {"type": "array", "items": {"type": "string"}, "description": "The colours."}}
    return {"title": "Answer", "description": "An answer.", "type": "object", "properties": properties}


def _tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}


def with_litellm(url: str, model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows of litellm."""
    import litellm

    litellm.suppress_debug_info = True
    common: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
        "num_retries": 0,
    }

    def streamed() -> str:
        chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return f"{len(chunks)} chunks, {text!r}"

    yield "completion", lambda: litellm.completion(**common).choices[0].message.content
    yield "completion, stream with usage", streamed
    yield "n=2, seed", lambda: len(litellm.completion(**{**common, "temperature": 1}, n=2, seed=1).choices)
    yield "temperature 9", lambda: litellm.completion(**{**common, "temperature": 9})
    yield (
        "text_completion",
        lambda: (
            litellm.text_completion(
                model=f"text-completion-openai/{model}",
                api_base=f"{url}/v1",
                api_key="none",
                prompt="One, two,",
                max_tokens=6,
            )
            .choices[0]
            .text
        ),
    )


def with_curl(url: str, model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rows of curl."""
    body = json.dumps({"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0})
    streaming = json.dumps({**json.loads(body), "stream": True, "stream_options": {"include_usage": True}})
    chat = f"{url}/v1/chat/completions"
    kind = ["-H", "Content-Type: application/json"]

    def curl(*options: str) -> str:
        done = subprocess.run(
            ["curl", "-s", "-w", " [%{http_code}]", *options], capture_output=True, text=True, check=False
        )
        return done.stdout

    yield "chat", lambda: json.loads(curl(*kind, "-d", body, chat).rpartition(" [")[0])["choices"][0]["message"]
    yield "stream", lambda: curl("-N", *kind, "-d", streaming, chat)[-150:]
    yield "without Content-Type", lambda: curl("-d", body, chat)
    yield "half a body", lambda: curl(*kind, "-d", body[:20], chat)
    yield "a path that is not there", lambda: curl(f"{url}/v1/embeddings")
    yield "/health", lambda: curl(f"{url}/health")


if __name__ == "__main__":
    main()
