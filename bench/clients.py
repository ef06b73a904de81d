"""Structured extraction through clients that people use: LangChain, litellm, instructor and pydantic-ai.

`pip install langchain-openai litellm instructor 'pydantic-ai-slim[openai]'`, start `ssd-serve -m qwen@wheel`, then
`python -m bench.clients --url http://127.0.0.1:8000/v1`. Each client asks for a model of pydantic's from 20 texts in
its own way: by `response_format`, or by a call of a tool that must be made. Its own retries are off.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

from bench.structured import CASES


class Note(BaseModel):
    """The content of a short text."""

    subject: str = Field(description="what it is about, in a few words", max_length=60)
    names: list[str] = Field(description="names of people, places and products", max_length=4)
    numbers: list[float] = Field(max_length=4)
    kind: Literal["report", "request", "question", "instruction", "code"]


Extract = Callable[[str], Any]


def langchain(url: str, model: str) -> Extract:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=200, max_retries=0)
    return chat.with_structured_output(Note).invoke


def litellm(url: str, model: str) -> Extract:
    import litellm

    def extract(text: str) -> Note:
        answer = litellm.completion(
            model=f"openai/{model}",
            api_base=url,
            api_key="none",
            messages=[{"role": "user", "content": text}],
            response_format=Note,
            temperature=0,
            max_tokens=200,
            num_retries=0,
        )
        return Note.model_validate_json(answer.choices[0].message.content)

    return extract


def instructor(url: str, model: str) -> Extract:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    return lambda text: client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        response_model=Note,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )


def pydantic_ai(url: str, model: str) -> Extract:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(served, output_type=Note, retries=0, model_settings={"temperature": 0, "max_tokens": 200})
    return lambda text: agent.run_sync(text).output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="qwen@wheel")
    arguments = parser.parse_args()
    for make in (langchain, litellm, instructor, pydantic_ai):
        extract = make(arguments.url, arguments.model)
        counts = Counter[str]()
        began = time.monotonic()
        for _, text in CASES:
            try:
                counts["valid" if isinstance(extract(f"Note what this says: {text}"), Note) else "invalid"] += 1
            except Exception as error:  # each client has kinds of its own
                counts[f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"] += 1
        print(f"{make.__name__}: {dict(counts)}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
