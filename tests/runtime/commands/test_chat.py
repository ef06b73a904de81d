"""A chat's turns: what they reuse and what an interruption leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime import Engine, RunSettings
from ssd_runtime.commands.chat import Chat
from ssd_runtime.sequence.prompt_states import BLOCK
from tests.folders import TEXTS

pytestmark = pytest.mark.usefixtures("made_up_latencies")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.open(model=str(folder), device="cpu")


def test_the_next_turn_runs_only_what_is_new(engine: Engine) -> None:
    chat = Chat(engine.runner(RunSettings("lookup", max_new_tokens=20)))
    first = chat.answer(" ".join(TEXTS))
    second = chat.answer("And then?")
    assert first.generation.num_cached_tokens == 0
    assert second.generation.num_cached_tokens >= first.generation.prompt_tokens // BLOCK * BLOCK > 0
    assert second.generation.first_token_seconds > 0.0
    alone = Chat(engine.runner(RunSettings("plain", max_new_tokens=20)), messages=chat.messages[:2])
    assert alone.answer("And then?").generation.token_ids == second.generation.token_ids


def test_an_interrupted_answer_stays_in_the_conversation_and_its_keys_in_the_cache(engine: Engine) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len("".join(written)) > 20 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    stopped: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    chat = Chat(engine.runner(RunSettings("lookup", max_new_tokens=200), write))
    cut = chat.answer(" ".join(TEXTS))
    assert signal.getsignal(signal.SIGINT) == before
    assert 0 < len(cut.generation.token_ids) < 200
    assert chat.messages[-1] == ("assistant", cut.text)
    assert "".join(written) == cut.text
    following = chat.answer("And then?").generation
    assert following.num_cached_tokens >= cut.generation.prompt_tokens // BLOCK * BLOCK > 0
    assert following.finish_reason == "length", "the interruption was for one answer"


def test_a_second_interruption_ends_the_program(engine: Engine) -> None:
    written: list[str] = []

    def twice_at_first(text: str) -> None:
        written.append(text)
        for _ in range(2 if len(written) == 1 else 0):  # later, the usual handler would raise it too
            os.kill(os.getpid(), signal.SIGINT)

    chat = Chat(engine.runner(RunSettings("plain", max_new_tokens=50), twice_at_first))
    with pytest.raises(KeyboardInterrupt):
        chat.answer("The river")


def test_a_refused_message_is_not_part_of_the_conversation(engine: Engine) -> None:
    chat = Chat(engine.runner(RunSettings("plain", max_new_tokens=5)))
    chat.answer("The river")
    known = list(chat.messages)
    with pytest.raises(UserError, match="512"):
        chat.answer("many words " * 300)
    assert chat.messages == known
