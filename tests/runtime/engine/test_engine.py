"""The front door from Python answers as the model does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.engine import Engine, IgnoredSettingsWarning
from ssd_runtime.engine.output.result import Tally, disturbance
from ssd_runtime.engine.output.text_stream import TextStream
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.planning.settings import ClaspSettings
from ssd_runtime.sampling.params import SamplingParams
from tests.bundles import bundle
from tests.folders import TEMPLATE
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("made_up_latencies")
QUESTION = "How many loaves did the baker count?"


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[int]:
    """The output of transformers' `generate`."""
    ids = torch.tensor([loaded.encode([("user", QUESTION)])])
    answer = loaded.model.generate(ids, max_new_tokens=24, do_sample=False)
    return list(answer[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    "settings",
    [RunSettings(), RunSettings("plain"), RunSettings("clasp", parameters=ClaspSettings(confidence=0.0))],
    ids=lambda settings: settings.strategy,
)
def test_answers_are_those_of_generate(loaded: LoadedModel, expected: list[int], settings: RunSettings) -> None:
    written: list[str] = []
    runner = Engine(loaded).runner(dataclasses.replace(settings, max_new_tokens=24), written.append)
    answers = [runner.answer(QUESTION) for _ in range(2)]
    assert [answer.generation.token_ids for answer in answers] == [expected, expected]
    assert "".join(written) == "".join(answer.text for answer in answers)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, top_k=20, seed=3)], ids=["greedy", "drawn"])
def test_tokens_that_the_model_suppresses_are_never_chosen(
    folder: Path, expected: list[int], sampling: SamplingParams
) -> None:
    """Ids beyond the vocabulary are, as in `generate`, no matter."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = LoadedModel.of(model, AutoTokenizer.from_pretrained(folder))
    settings = RunSettings("plain", max_new_tokens=24, sampling=sampling)
    usual = Engine(loaded).runner(settings).answer(QUESTION).generation.token_ids
    model.generation_config.suppress_tokens = [usual[0], usual[5], -1, 10**6]
    asked = dataclasses.replace(sampling, suppress_tokens=(usual[0], -1, 10**6))
    settings = dataclasses.replace(settings, sampling=asked)
    answers = [
        Engine(loaded).runner(dataclasses.replace(settings, strategy=name)).answer(QUESTION).generation.token_ids
        for name in ("plain", "auto", "clasp")
    ]
    assert answers[0] == answers[1] == answers[2]
    assert not {usual[0], usual[5]} & {*answers[0]}
    if not sampling.random:
        assert usual == expected
        ids = torch.tensor([loaded.encode([("user", QUESTION)])])
        assert answers[0] == model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()


def test_prompt_n_of_a_call_has_a_seed_of_its_own(loaded: LoadedModel) -> None:
    """`generate` gives prompt n the seed that a runner gives it, so equal prompts may get different answers."""
    settings = RunSettings("lookup", max_new_tokens=12, sampling=SamplingParams(1.0, seed=7))
    engine = Engine(loaded)
    runner = engine.runner(settings)
    alone = [next(runner.run(Prompt(str(n), turns=(QUESTION,)))).generation.token_ids for n in range(3)]
    together = [answer.generation.token_ids for answer in engine.generate([QUESTION] * 3, settings)]
    assert together == alone
    assert together[0] != together[1]
    with pytest.raises(UserError, match=r"compare: .*Engine\.runner"):
        engine.generate([QUESTION], dataclasses.replace(settings, compare=True))


def test_requests_come_and_go(loaded: LoadedModel, expected: list[int]) -> None:
    """Each with settings of its own: answers are those of prompts that are alone, and text comes while others run."""
    engine, written, settings = Engine(loaded), list[str](), RunSettings("lookup", max_new_tokens=24)
    first = engine.add_request(QUESTION, settings, written.append)
    other = engine.add_request("Why?", RunSettings("plain", max_new_tokens=100))
    sampled = engine.add_request(
        QUESTION, RunSettings("auto", max_new_tokens=9, sampling=SamplingParams(0.9, seed=3), stops=("zzzz",))
    )
    hopeless = engine.add_request("word " * 400, settings)
    ended = engine.step()
    assert not first.done
    engine.cancel(other)
    while not (first.done and sampled.done and hopeless.done):
        ended += engine.step()
    assert set(ended) == {first, sampled, hopeless}
    assert first.outcome().generation.token_ids == expected
    assert "".join(written) == first.outcome().text
    alone = engine.runner(RunSettings("plain", max_new_tokens=9, sampling=SamplingParams(0.9, seed=3)))
    assert sampled.outcome().generation.token_ids == alone.answer(QUESTION).generation.token_ids
    with pytest.raises(UserError, match=r"^prompt 4: \d+ tokens, but this model's context holds"):
        hopeless.outcome()
    answers = engine.generate([QUESTION, "Why?", QUESTION], settings)
    assert [answers[0].generation.token_ids, answers[2].generation.token_ids] == [expected, expected]
    assert [answer.prompt.id for answer in answers] == ["5", "6", "7"]


@pytest.mark.parametrize("held", [False, True])
def test_text_goes_on_after_the_tokens_that_are_answered(loaded: LoadedModel, held: bool) -> None:
    """Also where they end within what may become a stop string, or within a character."""
    engine, settings = Engine(loaded), RunSettings("plain", max_new_tokens=24)
    [whole] = engine.generate([QUESTION], settings)
    ids = whole.generation.token_ids
    if held:
        # A stop string that the answer ends within: text is held back from its first quarter on.
        settings = dataclasses.replace(settings, stops=(whole.text[len(whole.text) // 4 :] + "?",))
    for cut in range(len(ids)):
        written: list[str] = []
        told = TextStream(loaded.decode, settings.stops, written.append)
        told.feed(ids[:cut])
        request = engine.add_request(QUESTION, settings, written.append, answered=ids[:cut])
        while not request.done:
            engine.step()
        assert request.outcome().generation.token_ids == ids
        assert "".join(written) == whole.text, cut


def test_an_answer_that_goes_on_fills_the_context(loaded: LoadedModel) -> None:
    settings = RunSettings("plain", max_new_tokens=10**6)
    engine = Engine(loaded)
    [whole] = engine.generate([QUESTION], settings)
    ids = whole.generation.token_ids
    assert whole.generation.finish_reason == "context"
    request = engine.add_request(QUESTION, settings, answered=ids[: len(ids) // 2])
    while not request.done:
        engine.step()
    assert request.outcome().generation.token_ids == ids


def test_a_bad_prompt_leaves_none_of_those_before_it(
    loaded: LoadedModel, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded)
    choosy = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    monkeypatch.setattr(loaded.tokenizer, "chat_template", choosy)
    with pytest.raises(UserError, match="prompt 2"):
        engine.generate([QUESTION, "bad"], RunSettings(max_new_tokens=24))
    assert engine.scheduler.waiting == 0
    assert engine.generate([QUESTION], RunSettings(max_new_tokens=24))[0].generation.token_ids == expected


def test_a_listener_that_fails_at_the_end_fails_its_own_request(loaded: LoadedModel, expected: list[int]) -> None:
    engine = Engine(loaded)
    settings = RunSettings("plain", max_new_tokens=24)
    text = engine.generate([QUESTION], settings)[0].text

    def write(part: str) -> None:
        if part.endswith(text[-1]):
            raise OSError("no listener")

    # The last letter is held back until the end, since a stop string might begin with it.
    held_back = dataclasses.replace(settings, stops=(f"{text[-1]}, never",))
    failing, other = engine.add_request(QUESTION, held_back, write), engine.add_request(QUESTION, settings)
    while not (failing.done and other.done):
        engine.step()
    assert other.outcome().generation.token_ids == expected
    with pytest.raises(OSError, match="no listener"):
        failing.outcome()


def test_a_models_own_repetition_penalty_holds_as_it_does_in_generate(folder: Path, expected: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.repetition_penalty = 1.4
    loaded = LoadedModel.of(model, AutoTokenizer.from_pretrained(folder))
    ids = torch.tensor([loaded.encode([("user", QUESTION)])])
    penalized = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    assert penalized != expected
    for penalty, tokens in ((None, penalized), (1.0, expected)):
        settings = RunSettings(max_new_tokens=24, sampling=SamplingParams(repetition_penalty=penalty))
        assert Engine(loaded).runner(settings).answer(QUESTION).generation.token_ids == tokens


def test_an_engine_warns_once_of_generation_settings_that_it_ignores(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(no_repeat_ngram_size=3, begin_suppress_tokens=[4], repetition_penalty=1.4)
    loaded = LoadedModel.of(model, AutoTokenizer.from_pretrained(folder))
    with pytest.warns(IgnoredSettingsWarning, match="sets no_repeat_ngram_size, begin_suppress_tokens, ") as caught:
        Engine(loaded).runner(RunSettings("plain", max_new_tokens=2)).answer(QUESTION)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_what_is_missing_is_said(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="give a model, or a --bundle"):
        Engine.open()
    with pytest.raises(UserError, match="needs a bundle"):
        Engine(loaded).runner(RunSettings("knn"))
    with pytest.raises(UserError, match="training mode"):
        LoadedModel.of(tiny_model("llama").train(), loaded.tokenizer)
    with pytest.raises(UserError, match="name the files"):
        Engine(LoadedModel.of(tiny_model("llama"), loaded.tokenizer), bundle())
    with pytest.raises(UserError, match="max_new_tokens"):
        Engine(loaded).runner(RunSettings(max_new_tokens=0)).answer(QUESTION)
    with pytest.raises(UserError, match="top_p has no effect"):
        SamplingParams(top_p=0.9)
    with pytest.raises(UserError, match="a list of them, got one text"):
        Engine(loaded).generate(QUESTION)
    with pytest.raises(UserError, match="several texts, got one"):
        RunSettings(stops="END")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="an empty text"):
        RunSettings(stops=("END", ""))
    with pytest.raises(UserError, match="expected one of auto, 8, 4, none, got '5'"):
        Engine(loaded, draft_bits="5")  # type: ignore[arg-type]


def test_a_busy_machine_is_said() -> None:
    plain = [(40, 1.0), (40, 1.4), (3, 0.9), (40, 3.0)]
    *steady, slow = [Tally(plain_later_tokens=tokens, plain_seconds=seconds) for tokens, seconds in plain]
    assert disturbance(steady) is None
    assert disturbance(steady[:1]) is None
    said = disturbance([*steady, slow])
    assert said is not None
    assert "3.0 times" in said


def test_limits_are_set_before_the_first_request(loaded: LoadedModel) -> None:
    engine = Engine(loaded)
    engine.max_sequences, engine.cache_bytes = 2, 1 << 20
    assert engine.scheduler.max_sequences == 2
    with pytest.raises(UserError, match="max_sequences: requests were added already"):
        engine.max_sequences = 3
    with pytest.raises(UserError, match="cache_bytes: requests were added already"):
        engine.cache_bytes = None
