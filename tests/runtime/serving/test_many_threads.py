"""Eight threads that ask one engine for answers, `SSD_REQUESTS` each: every answer is plain decoding's."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from ssd_runtime.engine.engine import Engine
from ssd_runtime.serving.http.engine_thread import EngineThread
from tests.folders import TEXTS, save_tiny_model
from tests.serving import Inbox, lone, request_for, running, tiny_engine

THREADS = 8
REQUESTS = int(os.environ.get("SSD_REQUESTS", "25"))
STRATEGIES = ("auto", "lookup", "clasp", "plain")
LENGTHS = (1, 3, 6)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return tiny_engine(save_tiny_model(tmp_path / "model"), THREADS)


def test_answers_to_many_threads_are_those_of_plain_decoding(engine: Engine) -> None:
    expected = {(text, tokens): lone(engine, request_for(engine, text, tokens)) for text in TEXTS for tokens in LENGTHS}

    def ask(number: int, thread: EngineThread) -> int:
        """Ask one after another; returns how many answers were right."""
        random = Random(number)
        right = 0
        for _ in range(REQUESTS):
            text, tokens, strategy = random.choice(TEXTS), random.choice(LENGTHS), random.choice(STRATEGIES)
            inbox = Inbox()
            thread.submit([request_for(engine, text, tokens, strategy, stream=f"{number % 3}")], inbox.listen)
            outcome = inbox.wait(1)[0].outcome
            right += outcome is not None and outcome.generation.token_ids == expected[text, tokens]
        return right

    with running(engine, places=THREADS) as thread, ThreadPoolExecutor(THREADS) as pool:
        right = list(pool.map(lambda number: ask(number, thread), range(THREADS)))
    assert right == [REQUESTS] * THREADS
    assert engine.scheduler.pool.used_bytes == engine.scheduler.prefixes.bytes, "nothing is held by requests that ended"
