"""Small contexts and scarce memory: every strategy serves them, and running out is a user's error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import guard_memory
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.models import load_model
from ssd_runtime.loading.source import read_source
from ssd_runtime.model.sublayers.attention import attend
from ssd_runtime.planning.registry import NAMES, read_settings
from ssd_runtime.serving.http.opening import open_service
from ssd_runtime.serving.http.settings import ServiceOptions
from tests.bundles import LAYERS, bundle
from tests.folders import save_tiny_model
from tests.serving import send, serving
from tests.tables import latency_table

CONTEXTS = (16, 64)
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
EAGER = {
    "swift": ["window=4", "confidence=0", "max_draft=20"],
    "knapsack": ["refresh=2", "window=2", "confidence=0"],
    "clasp": ["refresh=2", "confidence=0"],
    "exit": ["threshold=0", "width=8"],
    "del": ["every=1", "refresh=2", "confidence=0"],
    "light": ["max_draft=20"],
}
"""Parameters with which drafts and searches reach the end of the context."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A saved model of four layers for each context."""
    root = tmp_path_factory.mktemp("small")
    return {context: save_tiny_model(root / str(context), weak=0, context=context) for context in CONTEXTS}


def engine_of(folder: Path) -> Engine:
    """An engine with a bundle and made-up latencies."""
    loaded = load_model(str(folder))
    engine = Engine(loaded, replace(bundle(), model=loaded.fingerprint()))
    engine.latency = latency_table(LAYERS)
    return engine


def filled(engine: Engine, strategy: str) -> Generation:
    """An answer that is as long as the context allows, decoded beside another one."""
    settings = RunSettings(strategy, parameters=read_settings(strategy, EAGER.get(strategy, [])), max_new_tokens=9999)
    requests = [engine.add_request(ids, settings) for ids in (PROMPT, PROMPT[::-1])]
    while not all(request.done for request in requests):
        engine.step()
    return requests[0].outcome().generation


@pytest.fixture(scope="module")
def plain(folders: dict[int, Path]) -> dict[int, list[int]]:
    """The tokens of plain decoding in each context."""
    return {context: filled(engine_of(folder), "plain").token_ids for context, folder in folders.items()}


@pytest.mark.parametrize("strategy", [*(name for name in NAMES if name not in ("fixed:NAME", "mtp")), "fixed:one"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_strategy_fills_the_context_as_plain_decoding_does(
    folders: dict[int, Path], plain: dict[int, list[int]], context: int, strategy: str
) -> None:
    got = filled(engine_of(folders[context]), strategy)
    assert got.token_ids == plain[context]
    assert (got.finish_reason, len(got.token_ids)) == ("context", context - len(PROMPT))


@pytest.mark.parametrize(("context", "concurrency"), [(16, 1), (64, 8)])
def test_a_server_starts_and_answers_to_the_contexts_end(
    folders: dict[int, Path], context: int, concurrency: int
) -> None:
    options = ServiceOptions(model=str(folders[context]), temperature=0.0, max_concurrency=concurrency)
    notes = list[str]()
    service = open_service(options, read_source(None, options.model), notes.append)
    assert service.settings.max_context == context
    assert not any("--kv-memory" in note for note in notes), "the memory does not bound these requests"
    with serving(service) as address:
        answer = send(address, "/v1/completions", {"prompt": PROMPT, "max_tokens": 9999})[2]
    assert answer["usage"]["total_tokens"] == context


def test_too_little_memory_for_the_context_is_said_with_its_tokens(folders: dict[int, Path]) -> None:
    options = ServiceOptions(model=str(folders[64]), strategy="plain", cache_bytes=1 << 12)
    with pytest.raises(UserError, match="hold no request of 64 tokens; give more with --kv-memory"):
        open_service(options, read_source(None, options.model), lambda note: None)


CPU = torch.device("cpu")
QUESTION = "How many loaves did the baker count?"


def exhaust(*_: Any, **__: Any) -> Any:
    """Ask for more than any address space has."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def attends(calls: int) -> Callable[..., torch.Tensor]:
    """Attention that runs out of memory after some calls."""
    left = iter(range(calls))

    def work(*arguments: Any, **named: Any) -> torch.Tensor:
        return attend(*arguments, **named) if next(left, None) is not None else exhaust()

    return work


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    "work",
    [
        exhaust,
        raising(MemoryError()),
        raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")),
        raising(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")),
        raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ],
)
def test_every_allocators_error_is_one_line(work: Callable[[], object]) -> None:
    with (
        pytest.raises(UserError, match=r"^out of memory on cpu while testing; give less$"),
        guard_memory("testing", CPU, "give less"),
    ):
        work()


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="sizes differ"), guard_memory("testing", CPU):
        raise RuntimeError("sizes differ")


@pytest.mark.usefixtures("made_up_latencies")
@pytest.mark.parametrize(
    ("strategy", "compare"), [("plain", False), ("auto", True), ("swift", False), ("lookup", True)]
)
def test_a_runner_goes_on_after_a_prompt_that_runs_out_of_memory(
    loaded: LoadedModel, strategy: str, compare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded)
    expected = engine.runner(RunSettings("plain", max_new_tokens=24)).answer(QUESTION).generation.token_ids
    runner = engine.runner(RunSettings(strategy, max_new_tokens=24, compare=compare))
    for calls in (0, 8, 12):  # in the prefill, after it, and in the middle of a forward
        with monkeypatch.context() as scarce:
            scarce.setattr("ssd_runtime.model.sublayers.torch_attention.attend", attends(calls))
            with pytest.raises(
                UserError, match=r"^prompt 1: out of memory on cpu while decoding; give a shorter prompt"
            ):
                runner.answer(QUESTION)
        assert runner.answer(QUESTION).generation.token_ids == expected


def test_running_out_of_memory_while_measuring_is_a_users_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded)
    monkeypatch.setattr("ssd_runtime.model.cache.kv_cache.KVCache.reserve", exhaust)
    with pytest.raises(UserError, match=r"^out of memory on cpu while measuring .*--weight-memory 0"):
        engine.runner()
