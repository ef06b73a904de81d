"""Calls that are not served are decoded by transformers, with one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ssd_profiles.errors import UserError
from ssd_runtime import CustomGenerate, Engine, RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.serving.generate.custom_generate import StockDecodingWarning
from tests.generation import NEW, Lengthy, Watched, prompts

pytestmark = pytest.mark.usefixtures("made_up_latencies")
Model = PreTrainedModel
Words = PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def left_out(model: Model, tokenizer: Words) -> dict[str, tuple[dict[str, Any], str]]:
    """Calls that are not served, with the reasons."""
    one, two = prompts(tokenizer, 1), prompts(tokenizer, 2)
    ids = one["input_ids"]
    right = {"input_ids": two["input_ids"].flip(1), "attention_mask": two["attention_mask"].flip(1)}
    hole = torch.ones_like(ids)
    hole[0, 3] = 0
    started = DynamicCache()
    with torch.no_grad():
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
        "a long mask": ({"input_ids": ids, "attention_mask": torch.ones(1, ids.shape[1] + 3)}, "has another length"),
        "long positions": ({**one, "position_ids": torch.arange(99)[None]}, "position_ids has another length"),
        "no padding token": (
            {**two, "eos_token_id": None, "pad_token_id": None, "stopping_criteria": [Lengthy()]},
            "pad_token_id",
        ),
        "no end": ({**two, "eos_token_id": None, "stopping_criteria": [Lengthy()]}, "without an end-of-sequence"),
        "a full prompt": ({"input_ids": ids.repeat(1, 30)[:, :512]}, "context of 512"),
        "time without an end": ({**two, "eos_token_id": None, "max_time": 1e3}, "without an end-of-sequence"),
        "time without padding": (
            {**two, "eos_token_id": None, "pad_token_id": None, "max_time": 1e3},
            "pad_token_id",
        ),
        "an own criterion of rows": ({**two, "stopping_criteria": [Lengthy()]}, "Lengthy may tell the rows"),
        "an own processor of rows": ({**two, "logits_processor": [Watched()]}, "Watched may tell the rows"),
        "time of many rows": ({"input_ids": ids.repeat(9, 1), "max_time": 1e3}, "max_time is for all rows"),
    }


NOT_SERVED = 22
"""Number of calls that are not served."""


@pytest.mark.parametrize("place", range(NOT_SERVED))
def test_what_is_not_served_is_decoded_by_transformers_with_one_warning(
    model: Model, left_out: dict[str, tuple[dict[str, Any], str]], fast: CustomGenerate, place: int
) -> None:
    answers = []
    assert len(left_out) == NOT_SERVED
    given, reason = list(left_out.values())[place]
    for more in ({}, {"custom_generate": fast}):
        options = deepcopy(given)
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


@pytest.mark.parametrize("first", [False, True], ids=["after the engine", "before the engine"])
def test_autocast_is_left_to_transformers(folder: Path, tokenizer: Words, first: bool) -> None:
    """The engine's copies of weights have the model's dtype, whatever the context casts to."""
    own, model = CustomGenerate(strategy="lookup"), AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = prompts(tokenizer, 1)
    if not first:
        model.generate(**inputs, max_new_tokens=9, custom_generate=own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(StockDecodingWarning, match="autocast"):
            got = model.generate(**inputs, max_new_tokens=NEW, custom_generate=own)
        assert torch.equal(got, model.generate(**inputs, max_new_tokens=NEW))


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


def other_layers(model: Model) -> None:
    model.model.layers = model.model.layers[:4]


def other_forward(model: Model) -> None:
    model.forward = MethodType(type(model).forward, model)  # type: ignore[method-assign]


def hooked(model: Model) -> None:
    model.model.layers[1].register_forward_hook(lambda layer, given, out: out * 1.1)


@pytest.mark.parametrize(
    "change", [other_layers, other_forward, hooked, Model.train, Model.bfloat16], ids=lambda change: change.__name__
)
def test_a_model_that_changes_between_calls_is_looked_at_again(
    folder: Path, tokenizer: Words, change: Callable[[Model], object]
) -> None:
    """Also where transformers has to decode it from now on."""
    own, model = CustomGenerate(strategy="lookup"), AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = prompts(tokenizer, 1)
    before = model.generate(**inputs, max_new_tokens=9, custom_generate=own)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StockDecodingWarning)
        after = model.generate(**inputs, max_new_tokens=9, custom_generate=own)
        again = model.generate(**inputs, max_new_tokens=9, custom_generate=own)
    expected = model.generate(**inputs, max_new_tokens=9)
    assert torch.equal(after, expected)
    assert torch.equal(again, expected)
    assert before.shape[0] == 1


def test_inputs_that_a_model_prepares_in_its_own_way_reach_it(folder: Path, tokenizer: Words) -> None:
    """PEFT puts learned prompts in front of the inputs this way, and gives the method back after each call."""
    own, model = CustomGenerate(strategy="lookup"), AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs, method = prompts(tokenizer, 1), model.prepare_inputs_for_generation

    def prepared(*given: Any, **kwargs: Any) -> dict[str, Any]:
        values = method(*given, **kwargs)
        return {**values, "input_ids": values["input_ids"].flip(1)}

    before = model.generate(**inputs, max_new_tokens=9, custom_generate=own)
    model.prepare_inputs_for_generation = prepared
    with pytest.warns(StockDecodingWarning, match="prepares its inputs"):
        changed = model.generate(**inputs, max_new_tokens=9, custom_generate=own)
    assert torch.equal(changed, model.generate(**inputs, max_new_tokens=9))
    assert not torch.equal(changed, before)
    model.prepare_inputs_for_generation = method
    with warnings.catch_warnings():
        warnings.simplefilter("error", StockDecodingWarning)
        assert torch.equal(model.generate(**inputs, max_new_tokens=9, custom_generate=own), before)


def test_an_engine_refuses_requests_once_its_model_has_other_layers(folder: Path, tokenizer: Words) -> None:
    engine = Engine(LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer))
    assert engine.generate(["How many?"], RunSettings("plain", max_new_tokens=4))
    other_layers(engine.loaded.model)
    with pytest.raises(UserError, match="layers, dtype or mode have changed"):
        engine.generate(["How many?"], RunSettings("plain", max_new_tokens=4))


def test_a_processor_may_decode_with_the_same_object(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """The inner call is left to transformers, since the outer one's step is not done."""
    inputs, answers = prompts(tokenizer, 1), list[torch.Tensor]()

    class Asking(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not answers:
                answers.append(model.generate(**inputs, max_new_tokens=4, custom_generate=fast))
            return scores

    with pytest.warns(StockDecodingWarning, match="of another call calls it"):
        got = model.generate(**inputs, max_new_tokens=9, logits_processor=[Asking()], custom_generate=fast)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=9))
    assert torch.equal(answers[0], got[:, : answers[0].shape[1]])
