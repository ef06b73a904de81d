"""A user's processors, criteria and streamers are called as stock decoding calls them."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from ssd_profiles.errors import UserError
from ssd_runtime import CustomGenerate
from ssd_runtime.serving.generate.custom_generate import FOLDER
from tests.generation import NEW, Blocks, Both, Lengthy, Seen, Watched, prompts

pytestmark = pytest.mark.usefixtures("made_up_latencies", "no_fallback")
Model = PreTrainedModel
Words = PreTrainedTokenizerBase
FROM_FOLDER = {"trust_remote_code": True, "strategy": "clasp"}


def test_a_users_processor_is_called_once_per_token_with_the_tokens_before_it(
    model: Model, tokenizer: Words, fast: CustomGenerate
) -> None:
    stock, mine = Watched(), Watched()
    expected, got = (
        model.generate(
            **prompts(tokenizer, 1), max_new_tokens=NEW, logits_processor=LogitsProcessorList([processor]), **more
        )
        for processor, more in ((stock, {}), (mine, {"custom_generate": fast.streaming_to(Blocks())}))
    )
    assert torch.equal(got, expected)
    assert mine.seen == stock.seen


def test_a_users_function_is_called_once_per_token(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """It may count its calls, as a processor may."""
    inputs = prompts(tokenizer, 1)

    def answer(**more: CustomGenerate) -> tuple[list[list[int]], list[int]]:
        calls = list[int]()

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            calls.append(len(ids))
            return list(range(len(calls) % 7, 300, 5))

        return model.generate(**inputs, max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed, **more).tolist(), calls

    assert answer(custom_generate=fast) == answer()


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
    for scores, dictionary in ((False, False), (True, True), (True, False)):
        stock, mine = Lengthy(), Lengthy()
        options = {
            "max_new_tokens": NEW,
            "return_dict_in_generate": dictionary,
            "output_scores": scores,
            "repetition_penalty": 1.0 if dictionary else 1.1,
        }
        expected, got = (
            model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([criterion]), **more)
            for criterion, more in ((stock, {}), (mine, {"custom_generate": fast}))
        )
        if dictionary:
            expected, got = expected.sequences, got.sequences
        assert torch.equal(got, expected)
        assert got.shape[1] % 16 == 0
        assert mine.seen == stock.seen
        assert mine.scores == stock.scores


def test_a_users_criterion_is_called_after_the_end_token_too(
    model: Model, tokenizer: Words, fast: CustomGenerate
) -> None:
    inputs = prompts(tokenizer, 1)
    width = inputs["input_ids"].shape[1]
    answer = model.generate(**inputs, max_new_tokens=NEW)[0, width:].tolist()
    place = next(place for place in range(7, NEW) if answer[place] not in answer[:place])
    assert width + place + 1 < 64, "the criterion stops there"
    stock, mine = Lengthy(), Lengthy()
    for criterion, more in ((stock, {}), (mine, {"custom_generate": fast})):
        options = {"max_new_tokens": NEW, "eos_token_id": answer[place]}
        model.generate(**inputs, **options, stopping_criteria=StoppingCriteriaList([criterion]), **more)
    assert mine.seen == stock.seen
    assert mine.seen[-1][-1] == answer[place]


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
        got = model.generate(**inputs, **given, tokenizer=tokenizer, custom_generate=FOLDER, **FROM_FOLDER)
        assert torch.equal(got, expected)
    assert config.stop_strings == [stop]
    with pytest.raises(UserError, match="stop_strings: no tokenizer"):
        model.generate(**inputs, stop_strings=stop, custom_generate=fast)


def test_a_streamer_takes_each_token_by_itself(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """Closed over, given to `generate`, and through the folder: the prompt comes first."""
    inputs = prompts(tokenizer, 1)
    prompt = inputs["input_ids"]
    expected = model.generate(**inputs, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist()
    for way in (
        lambda streamer: {"custom_generate": fast.streaming_to(streamer)},
        lambda streamer: {"custom_generate": fast, "streamer": streamer},
        lambda streamer: {"custom_generate": lambda *given, **named: fast(*given, **named), "streamer": streamer},
        lambda streamer: {"custom_generate": FOLDER, **FROM_FOLDER, "streamer": streamer},
    ):
        streamer = Blocks()
        model.generate(**inputs, max_new_tokens=NEW, **way(streamer))
        assert torch.equal(streamer.put_values[0], prompt)
        blocks = streamer.put_values[1:]
        assert [int(block) for block in blocks] == expected
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


def test_two_streamers_are_refused(model: Model, tokenizer: Words, fast: CustomGenerate) -> None:
    """Whoever reads one that gets nothing would wait for ever."""
    with pytest.raises(UserError, match="streamer: generate has one and streaming_to another"):
        model.generate(**prompts(tokenizer, 1), streamer=Blocks(), custom_generate=fast.streaming_to(Blocks()))


@pytest.mark.parametrize("strategy", ["light", "clasp"])
def test_a_repeatable_function_that_knows_no_more_tokens_is_asked_for_drafts_alone(
    model: Model, tokenizer: Words, strategy: str
) -> None:
    """Drafts go on after an answer's end, where a trie of answers has nothing left."""
    inputs = prompts(tokenizer, 1)
    begin, end = inputs["input_ids"].shape[1], int(model.generation_config.eos_token_id)
    answer = [5, 6, 7, 8, end]

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        place = len(ids) - begin
        return answer[place : place + 1] if ids[begin:].tolist() == answer[:place] else []

    allowed.repeatable = True  # type: ignore[attr-defined]
    given = {**inputs, "prefix_allowed_tokens_fn": allowed, "max_new_tokens": NEW}
    for _ in range(3):
        got = model.generate(**given, custom_generate=CustomGenerate(strategy=strategy))
        assert got[0, begin:].tolist() == answer


@pytest.mark.parametrize("length", [3, NEW + 20, 120])
def test_a_users_length_criterion_replaces_the_length_of_generate(both: Both, length: int) -> None:
    """It may be longer, too; a length that the prompt has reached gives one token."""
    ended = StoppingCriteriaList([MaxLengthCriteria(length)])
    for rows in (1, 4):
        assert torch.equal(*both(rows, stopping_criteria=ended, max_new_tokens=9, eos_token_id=-1))
