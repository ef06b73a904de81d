"""Whatever stands in a bundle: it is refused in one line, or decodes to plain decoding's output."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import check_files, read_manifest
from ssd_artifacts.successors import SuccessorSet
from ssd_profiles.errors import UserError
from ssd_profiles.latency_law import broken_law
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.sources import find_model
from tests.bundles import LAYERS, WIDTH
from tests.damage import contents, edit_manifest, edit_tensors, rewrite, swap
from tests.hostile import NEW_TOKENS, QUESTION, STRATEGIES, TABLE, answer, drafting_bundle, tiny
from tests.mutations import mutate
from tests.streams import stream_by_the_table


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good(loaded: LoadedModel) -> Bundle:
    return drafting_bundle(loaded)


@pytest.fixture
def saved(good: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Tables that do not fit the model are measured again, which takes seconds, and coarsely on a busy machine.
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.measure_latency", lambda *_, **__: TABLE)
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.others_during", lambda _: 0.0)
    good.save(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def plainly(loaded: LoadedModel) -> list[int]:
    return answer(Engine(loaded, weight_memory=0), "plain")


def opened(loaded: LoadedModel, folder: Path) -> Engine:
    return Engine(loaded, Bundle.load(folder), str(folder), weight_memory=0)


def test_the_good_bundle_drafts(
    loaded: LoadedModel, saved: Path, plainly: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests below would show nothing."""
    monkeypatch.setattr("ssd_runtime.planning.auto.auto.Stream", stream_by_the_table)
    engine = opened(loaded, saved)
    for strategy in STRATEGIES:
        outcome = engine.runner(RunSettings(strategy, max_new_tokens=NEW_TOKENS)).answer(QUESTION)
        assert outcome.generation.token_ids == plainly
        assert outcome.generation.num_draft_tokens, strategy


MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "anchors of another width": (
        lambda folder: (
            edit_tensors(
                folder,
                "anchors.safetensors",
                features=np.eye(1, WIDTH + 1, dtype=np.float32),
                center=np.zeros(WIDTH + 1, np.float32),
                others=np.eye(1, WIDTH + 1, dtype=np.float16),
            ),
            edit_tensors(
                folder,
                "exits.safetensors",
                weights=np.zeros((2, WIDTH + 1, WIDTH + 1), np.float16),
                biases=np.zeros((2, WIDTH + 1), np.float16),
            ),
        ),
        "anchors.safetensors: expected the model's hidden size 32, got 33",
    ),
    "successors of another vocabulary": (
        lambda folder: swap(folder, "followers.safetensors", SuccessorSet.of([[5, 6, 300]]).to_bytes()),
        "followers.safetensors: expected token ids below 300, got 300",
    ),
    "masks of another number of layers": (
        lambda folder: (
            edit_manifest(folder, lambda data: data["model"].update(num_layers=LAYERS + 1)),
            edit_table(folder, layer_kinds=["full"] * (LAYERS + 1)),
        ),
        "compiled for 5 layers, but .* has 4",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_bundle_that_does_not_fit_the_model_is_refused(loaded: LoadedModel, saved: Path, misfit: str) -> None:
    craft, says = MISFITS[misfit]
    craft(saved)
    known = Bundle.load(saved)
    with pytest.raises(UserError, match=says) as error:
        Engine(loaded, known, str(saved), weight_memory=0)
    assert "\n" not in str(error.value)
    assert "compile the bundle again" in str(error.value)


def edit_table(folder: Path, **changed: Any) -> None:
    [path] = (folder / "latency").iterdir()
    rewrite(folder, f"latency/{path.name}", json.dumps(json.loads(path.read_text()) | changed))


def test_a_table_of_other_layer_kinds_is_not_planned_with(loaded: LoadedModel, saved: Path) -> None:
    """The runtime measures its own instead."""
    attention = (TABLE.attention["full"] * 2).tolist()
    edit_table(saved, layer_kinds=["wide"] * LAYERS, attention={"wide": attention}, spread={})
    engine = opened(loaded, saved)
    assert next(iter(engine.bundle.latency.values())).layer_kinds == ("wide",) * LAYERS  # type: ignore[union-attr]
    assert engine.latency.layer_kinds == ("full",) * LAYERS


@pytest.mark.parametrize("changed", [{"overhead": [-1e4] * 6}, {"mlp": [1e4, *[1e-9] * 5]}, {"head": [1e-9] * 6}])
def test_an_absurd_table_changes_no_output(
    loaded: LoadedModel, saved: Path, plainly: list[int], changed: dict[str, Any]
) -> None:
    """A table that breaks the law is not planned with, but others may be nearly as absurd."""
    edit_table(saved, **changed)
    engine = opened(loaded, saved)
    [absurd] = engine.bundle.latency.values()
    assert (engine.latency is TABLE) == (broken_law(absurd) is not None)
    engine.latency = absurd
    assert all(answer(engine, strategy) == plainly for strategy in STRATEGIES)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 500, "/" + "x" * 500, "a\0b", "~nobody-has-this-home/x", ""])
def test_a_name_that_no_model_has_is_refused(saved: Path, name: str) -> None:
    edit_manifest(saved, lambda data: data["model"].update(name=name))
    with pytest.raises(UserError):
        find_model(Bundle.load(saved).model.spec("bundle"))


PAST_INTEGRITY = ("refused by content", "refused by model", "decoded")
COUNT = int(os.environ.get("SSD_MUTATIONS", "100"))
PARTS = 5
MOST_SECONDS = 20.0
"""Processor time that any one bundle may take: to be read, to plan with and to decode by five strategies."""
MOST_GROWTH = 512 << 20
"""Bytes by which the process may grow over all mutations."""


@pytest.fixture(scope="module")
def saved_once(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "bundle"
    drafting_bundle(loaded).save(folder)
    return folder


@pytest.mark.hostile
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mutated_bundle_is_refused_in_one_line_or_changes_no_output(
    loaded: LoadedModel,
    saved_once: Path,
    plainly: list[int],
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tables that do not fit the model are measured again, which takes seconds.
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.measure_latency", lambda *_, **__: TABLE)
    outcomes: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seeds = range(part * COUNT // PARTS, (part + 1) * COUNT // PARTS)
    for seed in seeds:
        folder = tmp_path / "mutated"
        shutil.copytree(saved_once, folder)
        names = mutate(folder, seed)
        began = process_time()
        try:
            outcome = _outcome(loaded, folder, plainly)
        except Exception as error:
            error.add_note(f"mutation {seed} of {names}")
            raise
        assert process_time() - began < MOST_SECONDS, (seed, names)
        outcomes[outcome] += 1
        shutil.rmtree(folder)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10
    assert growth < MOST_GROWTH
    assert set(outcomes) <= {*PAST_INTEGRITY, "refused by manifest"}, outcomes
    past_integrity = sum(outcomes[name] for name in PAST_INTEGRITY)
    assert past_integrity >= len(seeds) // 2, outcomes
    assert len(seeds) < 20 or outcomes["decoded"] > 0, outcomes


def _outcome(loaded: LoadedModel, folder: Path, plainly: list[int]) -> str:
    """The outcome of a mutated bundle; every refusal is one printable line."""
    reached = "refused by manifest"
    try:
        check_files(folder, read_manifest(folder))
        reached = "refused by content"
        bundle = Bundle.load(folder)
        reached = "refused by model"
        engine = Engine(loaded, bundle, str(folder), weight_memory=0)
        for strategy in STRATEGIES:
            if strategy != "fixed:one" or "one" in bundle.domains:
                assert answer(engine, strategy) == plainly, (strategy, contents(folder))
    except UserError as error:
        return reached if str(error).isprintable() else "refused with control characters"
    return "decoded"
