"""Fixtures of `generate` with self-speculation, and of a server."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import StockDecodingWarning
from ssd_runtime.serving.http.app import Service
from tests.folders import TEXTS
from tests.generation import NEW, Both, prompts
from tests.serving import serving, tiny_engine, tiny_service


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="module")
def model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model in which drafts of a few layers are often right, and whose first answer ends half-way."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer(TEXTS[0], return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=NEW)[0, prompt.input_ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = next(token for token in answer[20:] if token not in answer[:20])
    return model


@pytest.fixture
def no_fallback() -> Iterator[None]:
    """Whatever is not served fails, unless a test expects the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StockDecodingWarning)
        yield


@pytest.fixture(scope="module")
def fast() -> CustomGenerate:
    return CustomGenerate(strategy="clasp")


@pytest.fixture(scope="module")
def both(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fast: CustomGenerate) -> Both:
    """Answers so many prompts by stock decoding and by ours."""

    def both(rows: int = 1, own: CustomGenerate = fast, **options: Any) -> list[Any]:
        given = {**prompts(tokenizer, rows), "max_new_tokens": NEW, **options}
        if "generation_config" in options:
            del given["max_new_tokens"]
        return [model.generate(**given), model.generate(**given, custom_generate=own)]

    return both


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    limits = {"max_new_tokens": 400, "max_body_bytes": 20_000}
    return tiny_service(tiny_engine(folder), **limits, allow_strategies=("clasp", "knn"))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
