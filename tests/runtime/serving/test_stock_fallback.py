"""Calls that are not served are decoded by transformers, with one warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import StockDecodingWarning
from tests.generation import Lengthy, prompts

pytestmark = pytest.mark.usefixtures("made_up_latencies")
Model = PreTrainedModel
Words = PreTrainedTokenizerBase


def left_out(model: Model, tokenizer: Words) -> dict[str, tuple[dict[str, Any], str]]:
    """Calls that are not served, with the reasons."""
    one, two = prompts(tokenizer, 1), prompts(tokenizer, 2)
    ids = one["input_ids"]
    right = {"input_ids": two["input_ids"].flip(1), "attention_mask": two["attention_mask"].flip(1)}
    hole = torch.ones_like(ids)
    hole[0, 3] = 0
    started = DynamicCache()
    model(ids[:, :5], past_key_values=started)
    dictionary = {"return_dict_in_generate": True}
    return {
        "beams": ({**one, "num_beams": 2}, "beam search"),
        "sampled beams": ({**one, "num_beams": 2, "do_sample": True, "top_k": 1}, "beam sample"),
        "prompt lookup": ({**one, "prompt_lookup_num_tokens": 3}, "assisted generation"),
        "guidance": ({**one, "guidance_scale": 1.5}, "guidance_scale"),
        "attentions": ({**one, **dictionary, "output_attentions": True}, "output_attentions"),
        "hidden states": ({**one, **dictionary, "output_hidden_states": True}, "output_hidden_states"),
        "an own cache": ({**one, "past_key_values": DynamicCache()}, "a cache is given"),
        "a started cache": ({"input_ids": ids, "past_key_values": started}, "a cache is given"),
        "embeddings": ({"inputs_embeds": model.get_input_embeddings()(ids).detach()}, "inputs_embeds"),
        "right padding": (right, "attention_mask"),
        "a hole": ({"input_ids": ids, "attention_mask": hole}, "attention_mask"),
        "positions": ({**one, "position_ids": torch.arange(3, 3 + ids.shape[1])[None]}, "position_ids"),
        "no padding token": (
            {**two, "eos_token_id": None, "pad_token_id": None, "stopping_criteria": [Lengthy()]},
            "pad_token_id",
        ),
        "no end": ({**two, "eos_token_id": None, "stopping_criteria": [Lengthy()]}, "without an end-of-sequence"),
        "a full prompt": ({"input_ids": ids.repeat(1, 30)[:, :512]}, "context of 512"),
    }


NOT_SERVED = 15
"""Number of calls that are not served."""


@pytest.mark.parametrize("place", range(NOT_SERVED))
def test_what_is_not_served_is_decoded_by_transformers_with_one_warning(
    model: Model, tokenizer: Words, fast: CustomGenerate, place: int
) -> None:
    answers = []
    for more in ({}, {"custom_generate": fast}):
        calls = list(left_out(model, tokenizer).values())
        assert len(calls) == NOT_SERVED
        options, reason = calls[place]
        set_seed(0)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            answers.append(model.generate(**options, **more, max_new_tokens=8))
        said = [str(note.message) for note in noted if issubclass(note.category, StockDecodingWarning)]
        assert len(said) == bool(more)
    assert reason in said[0]
    assert any(issubclass(note.category, StockDecodingWarning) and note.filename == __file__ for note in noted)
    expected, got = (getattr(answer, "sequences", answer) for answer in answers)
    assert torch.equal(got, expected)


def test_models_that_cannot_be_viewed_are_decoded_by_transformers(folder: Path) -> None:
    own = CustomGenerate(strategy="lookup")
    config = AutoConfig.for_model(
        "gpt2", vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=None
    )
    gpt2 = AutoModelForCausalLM.from_config(config).eval()
    training = AutoModelForCausalLM.from_pretrained(folder).train()
    for model, reason in (
        (gpt2, "a gpt2 model is not supported; supported are .*Llama, Mistral"),
        (training, "training mode"),
    ):
        ids = torch.arange(1, 9)[None]
        with pytest.warns(StockDecodingWarning, match=reason):
            got = model.generate(ids, max_new_tokens=5, custom_generate=own)
        assert torch.equal(got, model.generate(ids, max_new_tokens=5))
