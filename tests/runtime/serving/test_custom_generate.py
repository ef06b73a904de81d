"""`generate` with self-speculation against `generate` without: the same tokens, scores, streams and calls."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    WatermarkingConfig,
    pipeline,
    set_seed,
)

from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import StockDecodingWarning
from tests.generation import NEW, Both, prompts

pytestmark = pytest.mark.usefixtures("made_up_latencies", "no_fallback")
Model = PreTrainedModel
Words = PreTrainedTokenizerBase


# Of the options that stand together, each changes what the others give, but for `renormalize_logits` and
# `remove_invalid_values`, which only have to be served.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "length": {"max_length": 60, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "several ends": {"eos_token_id": [5, 60, 99, 130]},
    "no end": {"eos_token_id": -1},
    "penalty": {"repetition_penalty": 1.4, "bad_words_ids": [[289], [223, 84]], "min_new_tokens": 30},
    "bias": {"sequence_bias": [[[289], -3.0], [[84, 81], 4.0]], "min_length": 85},
    "repeats": {"no_repeat_ngram_size": 2, "forced_eos_token_id": 7, "renormalize_logits": True},
    "suppressed": {"suppress_tokens": list(range(200, 290)), "begin_suppress_tokens": list(range(250))},
    "decay": {"exponential_decay_length_penalty": (3, 1.3), "remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "config": {"generation_config": GenerationConfig(max_new_tokens=15, repetition_penalty=1.2, pad_token_id=0)},
}


@pytest.mark.parametrize(("case", "rows"), [("greedy", 1), ("watermark", 1), *((case, 4) for case in CASES)])
def test_the_tokens_are_those_of_stock_decoding(both: Both, case: str, rows: int) -> None:
    assert torch.equal(*both(rows, **CASES[case]))


ALONE: dict[str, dict[str, Any]] = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: list(range(int(ids[-1]) % 7, 300, 5))},
}


@pytest.mark.parametrize("case", ALONE)
def test_processors_that_know_rows_serve_a_lone_prompt(both: Both, case: str) -> None:
    assert torch.equal(*both(1, **ALONE[case]))
    with pytest.warns(StockDecodingWarning, match=f"{case} tells the rows of a batch apart"):
        assert torch.equal(*both(2, **ALONE[case]))


def test_ids_of_32_bits_become_those_of_64(both: Both, tokenizer: Words) -> None:
    stock, got = both(input_ids=prompts(tokenizer, 1)["input_ids"].int())
    assert got.dtype == stock.dtype
    assert torch.equal(got, stock)


def test_more_rows_than_fit_at_once_wait(both: Both) -> None:
    assert torch.equal(*both(4, own=CustomGenerate(strategy="lookup", max_sequences=2)))


def test_scores_and_logits_are_those_of_stock_decoding(both: Both, model: Model, tokenizer: Words) -> None:
    options = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    for rows in (1, 4):
        expected, got = both(rows, **options, repetition_penalty=1.3)
        assert torch.equal(got.sequences, expected.sequences)
        new = got.sequences[:, prompts(tokenizer, rows)["input_ids"].shape[1] :]
        ended = (new == model.generation_config.eos_token_id).int().cumsum(1).roll(1, 1) > 0
        ended[:, 0] = False
        assert bool(ended.any()) == (rows > 1)
        for mine, stock in ((got.scores, expected.scores), (got.logits, expected.logits)):
            assert len(mine) == len(stock) == new.shape[1]
            for step, (x, y) in enumerate(zip(mine, stock, strict=True)):
                running = ~ended[:, step]
                torch.testing.assert_close(x[running], y[running], atol=1e-4, rtol=1e-4)
        chances = model.compute_transition_scores(got.sequences, got.scores, normalize_logits=True)
        stock_chances = model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
        torch.testing.assert_close(chances[~ended], stock_chances[~ended], atol=1e-4, rtol=1e-4)
        assert (chances[ended] == 0.0).all(), "padding costs nothing"
        got.scores[0].add_(1.0)  # the tensors are the user's own


def test_a_seed_decides_what_is_sampled_whatever_is_drafted(
    model: Model, tokenizer: Words, fast: CustomGenerate
) -> None:
    inputs = prompts(tokenizer, 2)
    options = {"max_new_tokens": NEW, "do_sample": True, "top_k": 30, "num_return_sequences": 2}

    def sampled(seed: int, callable_: CustomGenerate) -> list[list[int]]:
        set_seed(seed)
        return model.generate(**inputs, **options, custom_generate=callable_).tolist()

    first = sampled(1, fast)
    assert len({tuple(row) for row in first}) == 4, "every sequence has noise of its own"
    assert sampled(1, fast) == first
    assert sampled(1, CustomGenerate(strategy="plain")) == first
    assert sampled(2, fast) != first
    assert model.generate(**inputs, **options, custom_generate=fast).tolist() != first


def test_samples_have_stock_decodings_distribution(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """The scores of `generate` tell it; here they are those of three tokens."""
    inputs, draws = {"input_ids": prompts(tokenizer, 1)["input_ids"][:, :12]}, 400
    options = {"do_sample": True, "top_k": 3, "temperature": 1.7, "repetition_penalty": 1.5, "max_new_tokens": 1}
    stock = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    probs = stock.scores[0][0].double().softmax(-1)
    set_seed(0)
    drawn = model.generate(**inputs, **options, num_return_sequences=draws, custom_generate=fast)[:, 12]
    counts = torch.bincount(drawn, minlength=len(probs))
    assert int(counts[probs > 0].sum()) == draws
    assert chisquare(counts[probs > 0], draws * probs[probs > 0]).pvalue > 1e-3


def test_an_answer_ends_where_the_context_is_full(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    inputs = {"input_ids": prompts(tokenizer, 1)["input_ids"].repeat(1, 25)[:, :500]}
    options = {"eos_token_id": None, "max_new_tokens": 30}
    expected = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match="context of 512 tokens is full"):
        got = model.generate(**inputs, **options, custom_generate=fast)
    assert got.shape[1] == 512
    assert torch.equal(got, expected[:, :512])


def test_dropping_the_object_frees_the_model(folder: Path, tokenizer: Words) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    own = CustomGenerate(strategy="lookup")
    model.generate(**prompts(tokenizer, 1), max_new_tokens=3, custom_generate=own)
    known = weakref.ref(model)
    del model, own
    gc.collect()
    assert known() is None


def test_a_pipeline_passes_it_on(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
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
