"""The examples of transformers' documentation of text generation, with and without self-speculation.

The calls are those of its pages "Text generation", "Generation strategies", "Generation features" and "KV cache
strategies", on a tiny random model; every one is compared with the same call without `custom_generate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
    set_seed,
)
from transformers.generation.stopping_criteria import MaxTimeCriteria

from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import FOLDER, StockDecodingWarning
from tests.folders import TEXTS, save_tiny_model

Example = Callable[[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("examples") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = 2
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="module")
def fast(tokenizer: PreTrainedTokenizerBase) -> CustomGenerate:
    return CustomGenerate(strategy="clasp", tokenizer=tokenizer)


def one(tokenizer: PreTrainedTokenizerBase) -> Any:
    return tokenizer([TEXTS[1]], return_tensors="pt")


def default_generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    ids = model.generate(**one(tokenizer), **how)
    return tokenizer.batch_decode(ids, skip_special_tokens=True)[0]


def no_mask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    return model.generate(one(tokenizer).input_ids, max_new_tokens=30, **how)


def a_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    config = GenerationConfig(max_new_tokens=50, do_sample=True, top_k=50, pad_token_id=0, eos_token_id=2)
    set_seed(0)
    return model.generate(**one(tokenizer), generation_config=config, **how).shape[0]


def padding_on_the_left(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    inputs = tokenizer(["1, 2, 3", "A, B, C, D, E", "the"], padding=True, return_tensors="pt")
    return tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=20, **how), skip_special_tokens=True)


def a_chat_template(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    messages = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "How many loaves?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**inputs, max_new_tokens=20, **how)
    return tokenizer.decode(out[0][inputs["input_ids"].shape[1] :])


def without_a_repeat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    return model.generate(**one(tokenizer), repetition_penalty=1.2, no_repeat_ngram_size=3, max_new_tokens=40, **how)


def bad_words(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    words = tokenizer([" river", " the"], add_special_tokens=False).input_ids
    own = LogitsProcessorList([NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([2]))])
    return model.generate(**one(tokenizer), logits_processor=own, max_new_tokens=30, **how)


def transition_scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    out = model.generate(**one(tokenizer), max_new_tokens=10, return_dict_in_generate=True, output_scores=True, **how)
    return model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True).mul(100.0).round()


def a_watermark(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    config = WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")
    return model.generate(**one(tokenizer), watermarking_config=config, do_sample=False, max_length=60, **how)


def a_static_cache(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    return model.generate(**one(tokenizer), do_sample=False, max_new_tokens=20, cache_implementation="static", **how)


def a_stop_string_criterion(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    own = StoppingCriteriaList([StopStringCriteria(tokenizer, ["e", "a"]), MaxTimeCriteria(600.0)])
    return model.generate(**one(tokenizer), stopping_criteria=own, max_new_tokens=40, **how)


def text_is_streamed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> Any:
    return model.generate(**one(tokenizer), streamer=TextStreamer(tokenizer), max_new_tokens=20, **how)


EXAMPLES: dict[str, Example] = {
    example.__name__.replace("_", " "): example
    for example in (
        default_generate,
        no_mask,
        a_generation_config,
        padding_on_the_left,
        a_chat_template,
        without_a_repeat,
        bad_words,
        transition_scores,
        a_watermark,
        a_static_cache,
        a_stop_string_criterion,
        text_is_streamed,
    )
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("form", ["callable", "folder"])
def test_an_example_gives_what_it_gives_without(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fast: CustomGenerate,
    form: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder_form = {"custom_generate": FOLDER, "trust_remote_code": True, "strategy": "clasp"}
    expected = EXAMPLES[name](model, tokenizer, {})
    shown = capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("error", StockDecodingWarning)
        got = EXAMPLES[name](model, tokenizer, {"custom_generate": fast} if form == "callable" else folder_form)
    assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected
    assert capsys.readouterr().out == shown


def test_a_pipeline_passes_it_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, fast: CustomGenerate
) -> None:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    chat = [{"role": "user", "content": "How many apples?"}]
    given = ["The river", "How many apples does Ada have"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", StockDecodingWarning)
        for inputs, batch_size in ((given[0], 1), (given, 2), (chat, 1)):
            options = {"max_new_tokens": 20, "do_sample": False, "batch_size": batch_size}
            assert pipe(inputs, **options, custom_generate=fast) == pipe(inputs, **options)
        whole = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", custom_generate=fast)
        options = {"max_new_tokens": 20, "do_sample": False}
        assert whole(given[0], **options) == pipe(given[0], **options)
        set_seed(3)
        several = pipe(given[0], do_sample=True, num_return_sequences=3, max_new_tokens=8, custom_generate=fast)
    assert len({each["generated_text"] for each in several}) == 3
