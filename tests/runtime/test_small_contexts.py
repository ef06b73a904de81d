"""Models whose context holds fewer tokens than a cache has spare slots: every strategy and front door serves them."""

from __future__ import annotations

import http.client
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from ssd_profiles.errors import UserError
from ssd_runtime import CustomGenerate
from ssd_runtime.commands.run import main as run_main
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.registry import NAMES, read_settings
from ssd_runtime.serving.http.opening import ServiceOptions, open_service
from tests.bundles import LAYERS, bundle
from tests.folders import save_tiny_model
from tests.models import VARIANTS, tiny_model
from tests.serving import serving
from tests.tables import latency_table

CONTEXTS = (16, 64, 128, 256)
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


def filled(engine: Engine, strategy: str, stream: str) -> Generation:
    """An answer that is as long as the context allows, decoded beside another one."""
    settings = RunSettings(strategy, parameters=read_settings(strategy, EAGER.get(strategy, [])), max_new_tokens=9999)
    requests = [engine.add_request(ids, settings, stream=stream) for ids in (PROMPT, PROMPT[::-1])]
    while not all(request.done for request in requests):
        engine.step()
    return requests[0].outcome().generation


@pytest.mark.parametrize("strategy", [*(name for name in NAMES if name != "fixed:NAME"), "fixed:one"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_strategy_fills_the_context_as_plain_decoding_does(
    folders: dict[int, Path], context: int, strategy: str
) -> None:
    engine = engine_of(folders[context])
    plain = filled(engine, "plain", "plainly")
    got = filled(engine, strategy, "")
    assert got.token_ids == plain.token_ids
    assert (got.finish_reason, len(got.token_ids)) == ("context", context - len(PROMPT))


@pytest.mark.parametrize("variant", ["mistral-sliding", "gemma3", "qwen3-sliding"])
def test_a_pool_of_sliding_layers_holds_a_whole_small_context(variant: str) -> None:
    decoder = Decoder(tiny_model(variant, max_position_embeddings=64))
    for sequences in (1, 8):
        assert Scheduler(decoder, sequences).most_tokens == 64
    assert "sliding_window" in VARIANTS[variant][1]


@pytest.mark.parametrize("context", [64, 256])
def test_generate_is_served(folders: dict[int, Path], context: int) -> None:
    model = load_model(str(folders[context])).model
    ids = torch.tensor([PROMPT])
    wanted = model.generate(ids, max_new_tokens=context - len(PROMPT), do_sample=False)
    fast = CustomGenerate(strategy="swift")
    got = model.generate(ids, max_new_tokens=context - len(PROMPT), do_sample=False, custom_generate=fast)
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize(("context", "concurrency"), [(64, 1), (64, 8), (128, 1), (256, 1)])
def test_a_server_starts_and_answers_to_the_contexts_end(
    folders: dict[int, Path], context: int, concurrency: int
) -> None:
    options = ServiceOptions(model=str(folders[context]), temperature=0.0, max_concurrency=concurrency)
    notes = list[str]()
    service = open_service(options, options.source(), notes.append)
    assert service.settings.max_context == context
    assert not any("--kv-memory" in note for note in notes), "the memory does not bound these requests"
    with serving(service) as address:
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
        body = {"prompt": PROMPT, "max_tokens": 9999}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.load(connection.getresponse())
    assert answer["usage"]["total_tokens"] == context


def test_too_little_memory_for_the_context_is_said_with_its_tokens(folders: dict[int, Path]) -> None:
    options = ServiceOptions(model=str(folders[64]), strategy="plain", cache_bytes=1 << 12)
    with pytest.raises(UserError, match="hold no request of 64 tokens; give more with --kv-memory"):
        open_service(options, options.source(), lambda note: None)


@pytest.mark.parametrize("strategy", ["auto", "lookup"])
def test_the_command_answers_and_compares(
    folders: dict[int, Path], strategy: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(folders[64]), "--raw", "river", "--strategy", strategy, "--compare", "--json"]
    monkeypatch.setattr(sys, "argv", ["ssd-run", *options, "--max-new-tokens", "999"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as ended:
        run_main()
    shown = capfd.readouterr()
    assert ended.value.code == 0, shown.err
    answer = json.loads(shown.out.splitlines()[0])
    assert answer["prompt_tokens"] + answer["new_tokens"] == 64
    assert answer["divergence"] in ("none", "near_tie")
