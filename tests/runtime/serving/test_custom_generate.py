"""`generate` with self-speculation against `generate` without: the same tokens, scores, streams and calls."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
    pipeline,
    set_seed,
)

from ssd_profiles.errors import UserError
from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import FOLDER, StockDecodingWarning
from tests.folders import TEXTS

pytestmark = pytest.mark.usefixtures("made_up_latencies")
NEW = 40
Model = PreTrainedModel
Words = PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Words:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture(scope="module")
def model(folder: Path, tokenizer: Words) -> Model:
    """A model in which drafts of a few layers are often right, and whose first answer ends half-way."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer(TEXTS[0], return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=NEW)[0, prompt.input_ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = next(token for token in answer[20:] if token not in answer[:20])
    return model


@pytest.fixture(scope="module")
def fast() -> CustomGenerate:
    return CustomGenerate(strategy="clasp")


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """Whatever is not served fails, unless a test expects the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StockDecodingWarning)
        yield


class Blocks:
    """A streamer that keeps what is put."""

    def __init__(self) -> None:
        self.put_values: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not value.is_inference(), "such a tensor cannot be changed later"
        self.put_values.append(value)

    def end(self) -> None:
        self.ends += 1


class Watched(LogitsProcessor):
    """A processor with a state, which changes scores in place and keeps the ids that it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not any(tensor.is_inference() for tensor in (input_ids, scores))
        self.seen.append(input_ids[0].tolist())
        scores[:, len(self.seen) % scores.shape[1]] += 8.0
        return scores


class Seen(LogitsProcessor):
    """A processor that changes nothing, and keeps the number of ids that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids.shape[1])
        return scores


class Lengthy(StoppingCriteria):
    """Stops at some lengths, and keeps the ids and the number of scores that it sees."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.scores: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        self.scores.append(-1 if scores is None else len(scores))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] % 16 == 0)


def prompts(tokenizer: Words, rows: int) -> dict[str, Tensor]:
    texts = [TEXTS[0], "The baker", TEXTS[1][:40], "How many apples does the river"]
    return dict(tokenizer(texts[:rows], padding=True, return_tensors="pt"))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "length": {"max_length": 60, "max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "several ends": {"eos_token_id": [5, 60, 99, 130]},
    "no end": {"eos_token_id": -1},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[289], [223, 84]]},
    "sequence_bias": {"sequence_bias": [[[289], -3.0], [[84, 81], 4.0]]},
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 50},
    "suppress_tokens": {"suppress_tokens": list(range(200, 290))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(250))},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.3)},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "config": {"generation_config": GenerationConfig(max_new_tokens=15, repetition_penalty=1.2, pad_token_id=0)},
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_stock_decoding(
    model: Model, tokenizer: Words, fast: CustomGenerate, case: str, rows: int
) -> None:
    options = {"max_new_tokens": NEW, **CASES[case]}
    if case == "config":
        options.pop("max_new_tokens")
    inputs = prompts(tokenizer, rows)
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=fast), expected)


ALONE: dict[str, dict[str, Any]] = {
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: list(range(int(ids[-1]) % 7, 300, 5))},
}


@pytest.mark.parametrize("case", ALONE)
def test_processors_that_know_rows_serve_a_lone_prompt(
    model: Model, tokenizer: Words, fast: CustomGenerate, case: str
) -> None:
    one, two = prompts(tokenizer, 1), prompts(tokenizer, 2)
    options = {"max_new_tokens": NEW, **ALONE[case]}
    assert torch.equal(model.generate(**one, **options, custom_generate=fast), model.generate(**one, **options))
    with pytest.warns(StockDecodingWarning, match=f"{case} tells the rows of a batch apart"):
        both = model.generate(**two, **options, custom_generate=fast)
    assert torch.equal(both, model.generate(**two, **options))


def test_more_rows_than_fit_at_once_wait(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    two_at_once = CustomGenerate(strategy="lookup", max_sequences=2)
    inputs = prompts(tokenizer, 4)
    expected = model.generate(**inputs, max_new_tokens=NEW)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, custom_generate=two_at_once), expected)


def test_scores_and_logits_are_those_of_stock_decoding(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    options = {
        "max_new_tokens": NEW,
        "repetition_penalty": 1.3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    for rows in (1, 4):
        inputs = prompts(tokenizer, rows)
        expected = model.generate(**inputs, **options)
        got = model.generate(**inputs, **options, custom_generate=fast)
        assert torch.equal(got.sequences, expected.sequences)
        new = got.sequences[:, inputs["input_ids"].shape[1] :]
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


def test_a_users_processor_is_called_once_per_token_with_the_tokens_before_it(
    model: Model, tokenizer: Words, fast: CustomGenerate
) -> None:
    inputs = prompts(tokenizer, 1)
    stock, mine = Watched(), Watched()
    expected = model.generate(**inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList([stock]))
    streamer = Blocks()
    got = model.generate(
        **inputs,
        max_new_tokens=NEW,
        logits_processor=LogitsProcessorList([mine]),
        custom_generate=fast.streaming_to(streamer),
    )
    assert torch.equal(got, expected)
    assert mine.seen == stock.seen


def test_no_processor_is_asked_for_what_follows_the_end(model: Model, tokenizer: Words) -> None:
    """Drafts go on beyond the end of an answer: by lookup, the answer's own tokens follow its end in this prompt."""
    ids = prompts(tokenizer, 1)["input_ids"]
    answer = model.generate(ids, max_new_tokens=NEW, eos_token_id=-1)
    repeated = torch.cat([answer, ids], 1)
    continued = model.generate(repeated, max_new_tokens=NEW, eos_token_id=-1)[0, repeated.shape[1] :].tolist()
    for end in (10, 13, 16, 19):
        stops = StoppingCriteriaList([lambda ids, _, end=end: torch.tensor([ids.shape[1] >= repeated.shape[1] + end])])
        for more in ({"eos_token_id": continued[end]}, {"eos_token_id": -1, "stopping_criteria": stops}):
            stock, mine = Seen(), Seen()
            for seen, own in ((stock, None), (mine, CustomGenerate(strategy="lookup"))):
                options = {"logits_processor": LogitsProcessorList([seen]), "max_new_tokens": NEW, **more}
                model.generate(
                    repeated,
                    attention_mask=torch.ones_like(repeated),
                    **options,
                    **({"custom_generate": own} if own is not None else {}),
                )
            assert mine.seen == stock.seen


def test_a_users_criterion_is_called_once_per_token_and_stops_exactly(
    model: Model, tokenizer: Words, fast: CustomGenerate
) -> None:
    inputs = prompts(tokenizer, 1)
    for scores in (False, True):
        stock, mine = Lengthy(), Lengthy()
        options = {"max_new_tokens": NEW, "return_dict_in_generate": scores, "output_scores": scores}
        expected, got = (
            model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([criterion]), **more)
            for criterion, more in ((stock, {}), (mine, {"custom_generate": fast}))
        )
        if scores:
            expected, got = expected.sequences, got.sequences
        assert torch.equal(got, expected)
        assert got.shape[1] % 16 == 0
        assert mine.seen == stock.seen
        assert mine.scores == stock.scores


def test_stop_strings_end_where_stock_decoding_ends(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    inputs = prompts(tokenizer, 1)
    width = inputs["input_ids"].shape[1]
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=NEW)[0, width:])
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii() and text[i] not in text[:i])
    expected = model.generate(**inputs, max_new_tokens=NEW, stop_strings=stop, tokenizer=tokenizer)
    assert expected.shape[1] < width + 20
    knowing = fast.streaming_to(None, tokenizer)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=NEW, stop_strings=stop, custom_generate=knowing), expected
    )
    config = GenerationConfig(max_new_tokens=NEW, stop_strings=[stop], pad_token_id=0)
    for given in ({"stop_strings": stop, "max_new_tokens": NEW}, {"generation_config": config}):
        got = model.generate(
            **inputs, **given, tokenizer=tokenizer, custom_generate=FOLDER, trust_remote_code=True, strategy="clasp"
        )
        assert torch.equal(got, expected)
    assert config.stop_strings == [stop]
    with pytest.raises(UserError, match="stop_strings: no tokenizer"):
        model.generate(**inputs, stop_strings=stop, custom_generate=fast)


def test_an_accepted_block_is_streamed_at_once(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """Closed over, given to `generate`, and through the folder: the prompt comes first, the answer in blocks."""
    inputs = prompts(tokenizer, 1)
    prompt = inputs["input_ids"]
    expected = model.generate(**inputs, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist()
    closed, dropped, handed = Blocks(), Blocks(), Blocks()
    model.generate(**inputs, max_new_tokens=NEW, custom_generate=fast.streaming_to(closed))
    model.generate(**inputs, max_new_tokens=NEW, streamer=dropped, custom_generate=fast)
    model.generate(
        **inputs,
        max_new_tokens=NEW,
        streamer=handed,
        custom_generate=FOLDER,
        trust_remote_code=True,
        strategy="clasp",
    )
    for streamer in (closed, dropped, handed):
        assert torch.equal(streamer.put_values[0], prompt)
        blocks = streamer.put_values[1:]
        assert [token for block in blocks for token in block.tolist()] == expected
        assert max(len(block) for block in blocks) > 1
        assert streamer.ends == 1


def test_a_thread_answers_an_iterating_streamer(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    inputs = prompts(tokenizer, 1)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {**inputs, "max_new_tokens": NEW, "custom_generate": fast.streaming_to(streamer)}
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    answer = model.generate(**inputs, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(answer)


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
    """Three tokens of three choices each, by the scores of stock decoding after every possible beginning."""
    runs = 800
    inputs = {"input_ids": prompts(tokenizer, 1)["input_ids"][:, :12]}
    options = {
        "do_sample": True,
        "top_k": 3,
        "temperature": 1.7,
        "repetition_penalty": 1.5,
        "max_new_tokens": 3,
        "eos_token_id": None,
    }
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for beginning, chance in chances.items():
            ids = torch.cat([inputs["input_ids"], torch.tensor([beginning], dtype=torch.long)], 1)
            one = model.generate(
                ids, **{**options, "max_new_tokens": 1}, return_dict_in_generate=True, output_scores=True
            )
            probs = one.scores[0][0].softmax(-1)
            longer |= {(*beginning, int(token)): chance * float(probs[token]) for token in probs.nonzero()[:, 0]}
        chances = longer
    set_seed(0)
    got = model.generate(**inputs, **options, num_return_sequences=runs, custom_generate=fast)[:, 12:].tolist()
    counts = dict.fromkeys(chances, 0)
    for answer in got:
        counts[tuple(answer)] += 1
    likely = [answer for answer in chances if chances[answer] * runs >= 5]
    rest = [runs - sum(counts[a] for a in likely), runs * (1.0 - sum(chances[a] for a in likely))]
    observed = [*(counts[answer] for answer in likely), rest[0]]
    expected = [*(chances[answer] * runs for answer in likely), max(rest[1], 1e-9)]
    assert len(likely) > 8
    assert chisquare(observed, expected, sum_check=False).pvalue > 1e-3


def test_an_answer_ends_where_the_context_is_full(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    inputs = {"input_ids": prompts(tokenizer, 1)["input_ids"].repeat(1, 25)[:, :500]}
    options = {"eos_token_id": None, "max_new_tokens": 30}
    expected = model.generate(**inputs, **options)
    with pytest.warns(UserWarning, match="context of 512 tokens is full"):
        got = model.generate(**inputs, **options, custom_generate=fast)
    assert got.shape[1] == 512
    assert torch.equal(got, expected[:, :512])


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
