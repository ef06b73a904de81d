"""Running out of memory is a user's error, after which decoding goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_profiles.errors import UserError
from ssd_runtime.devices.memory import guard_memory
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.models import LoadedModel
from ssd_runtime.model.attention import attend
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.latency import MAX_CACHE_BYTES, device_key, measure_latency
from tests.folders import save_tiny_model
from tests.models import tiny_model

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


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("model"))
    return LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("strategy", ["plain", "auto", "swift", "lookup"])
def test_a_runner_goes_on_after_a_prompt_that_runs_out_of_memory(
    loaded: LoadedModel, strategy: str, compare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded)
    expected = engine.runner(RunSettings("plain", max_new_tokens=24)).answer(QUESTION).generation.token_ids
    runner = engine.runner(RunSettings(strategy, max_new_tokens=24, compare=compare))
    for calls in (0, 8, 12):  # in the prefill, after it, and in the middle of a forward
        with monkeypatch.context() as scarce:
            scarce.setattr("ssd_runtime.model.sublayers.attend", attends(calls))
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


@pytest.mark.usefixtures("any_machine")
def test_measuring_takes_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny_model("llama", max_position_embeddings=4096), 0)
    per_slot = decoder.new_cache().bytes_per_slot
    longest = {}
    for name, free in (("scarce", 4000 * per_slot), ("none", 0), ("plenty", 100 * MAX_CACHE_BYTES)):
        monkeypatch.setattr("ssd_runtime.profiling.latency.available_bytes", lambda _, free=free: free)
        table = measure_latency(decoder, budget_seconds=8.0)
        assert table.device == device_key(decoder)
        longest[name] = max(table.contexts)
    assert longest == {"scarce": 512, "none": 128, "plenty": 4096 - 32}


def test_a_failed_prompts_cache_is_given_back(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Engine(loaded).runner(RunSettings("plain"))
    monkeypatch.setattr("ssd_runtime.model.sublayers.attend", attends(8))
    with pytest.raises(UserError, match="while decoding"):
        runner.answer(QUESTION)
    assert runner.scheduler.pool.bytes
    assert not runner.scheduler.pool.used_bytes
