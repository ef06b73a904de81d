"""Whatever stands in a bundle: it is refused in one line, or decodes to plain decoding's output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.successors import SuccessorSet
from ssd_profiles.errors import UserError
from ssd_profiles.latency_law import broken_law
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.models import LoadedModel, find_model
from ssd_runtime.planning.auto.draft_stats import DraftStats
from tests.bundles import LAYERS, WIDTH
from tests.damage import edit_manifest, edit_tensors, rewrite, swap
from tests.hostile import NEW_TOKENS, QUESTION, STRATEGIES, TABLE, answer, drafting_bundle, tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def good(loaded: LoadedModel) -> Bundle:
    return drafting_bundle(loaded)


@pytest.fixture
def saved(good: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Tables that do not fit the model are measured again, which takes seconds.
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.measure_latency", lambda *_: TABLE)
    good.save(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def plainly(loaded: LoadedModel) -> list[int]:
    return answer(Engine(loaded, weight_memory=0), "plain")


def opened(loaded: LoadedModel, folder: Path) -> Engine:
    return Engine(loaded, Bundle.load(folder), str(folder), weight_memory=0)


def test_the_good_bundle_drafts(loaded: LoadedModel, saved: Path, plainly: list[int]) -> None:
    """Otherwise the tests below would show nothing."""
    engine = opened(loaded, saved)
    for strategy in STRATEGIES:
        outcome = engine.runner(RunSettings(strategy, max_new_tokens=NEW_TOKENS)).answer(QUESTION)
        assert outcome.generation.token_ids == plainly
        # `knapsack` searches first, and `auto` leaves steps of a model as fast as this one mostly unplanned.
        assert outcome.generation.num_draft_tokens or strategy in ("knapsack", "auto")


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
        "anchors.safetensors is for a hidden size of 33, the model's is 32",
    ),
    "successors of another vocabulary": (
        lambda folder: swap(folder, "followers.safetensors", SuccessorSet.of([[5, 6, 10**6]]).to_bytes()),
        "followers.safetensors has tokens that the model does not have",
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
    assert engine.bundle is not None
    [absurd] = engine.bundle.latency.values()
    assert (engine.latency is TABLE) == (broken_law(absurd) is not None)
    engine.latency = absurd
    assert all(answer(engine, strategy) == plainly for strategy in STRATEGIES)


def test_a_mask_that_promises_nothing_can_be_judged_for_ever() -> None:
    """Predictions fade to 0 in a long stream."""
    stats = DraftStats()
    for _ in range(40_000):
        stats.update(1, 0.0, 1.0)
    assert np.isfinite(stats.factor)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 500, "/" + "x" * 500, "a\0b", "~nobody-has-this-home/x", ""])
def test_a_name_that_no_model_has_is_refused(saved: Path, name: str) -> None:
    edit_manifest(saved, lambda data: data["model"].update(name=name))
    with pytest.raises(UserError):
        find_model(Bundle.load(saved).model.spec("bundle"))
