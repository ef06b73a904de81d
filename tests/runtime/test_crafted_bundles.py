"""Whatever stands in a bundle: it is refused in one line, or decodes to plain decoding's output."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig, ExitChoice
from ssd_artifacts.successors import SuccessorSet
from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.offline.runner import RunSettings
from ssd_runtime.loading.models import LoadedModel, find_model, load_model
from ssd_runtime.planning.auto.draft_stats import DraftStats
from ssd_runtime.profiling.latency import device_key
from tests.bundles import LAYERS, WIDTH, bundle, exits, record
from tests.damage import MANIFEST, contents, dump, edit_manifest, edit_tensors, load, read_tensors, rewrite, swap
from tests.folders import save_tiny_model
from tests.tables import latency_table

STRATEGIES = ("auto", "knn", "knapsack", "exit", "fixed:one")
QUESTION = "How many loaves did the baker count?"
NEW_TOKENS = 16
TABLE = latency_table(LAYERS, per_token=1e-6)


def drafting(name: str, skipped: tuple[int, ...]) -> DomainConfig:
    """A domain whose masks and exits are promised to pay, so that they are drafted with."""
    choice = ExitChoice(stops=[1, 2], width=4, threshold=0.0, annealing=0.2, predicted_speedup=1.5)
    return record(name, {skipped: 0.95, (6, 7): 0.9}, 1.2).model_copy(update={"exit": choice})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(save_tiny_model(tmp_path_factory.mktemp("model"), weak=0)), "cpu", "fp32")


@pytest.fixture(scope="module")
def good(loaded: LoadedModel) -> Bundle:
    """A bundle of the tiny model with all that a bundle may have."""
    plain = bundle(one=drafting("one", (2, 3, 4, 5)), mix=drafting("mix", (2, 3)))
    return replace(
        plain,
        model=loaded.fingerprint(),
        anchors=replace(plain.anchors, threshold=-1.0),
        latency={device_key(Engine(loaded, weight_memory=0).decoder).slug(): TABLE},
        exits=exits(),
    )


@pytest.fixture
def saved(good: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Tables that do not fit the model are measured again, which takes seconds.
    monkeypatch.setattr("ssd_runtime.engine.engine.measure_latency", lambda decoder: TABLE)
    good.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def answer(engine: Engine, strategy: str) -> list[int]:
    """The tokens that a strategy decodes."""
    return engine.runner(RunSettings(strategy, max_new_tokens=NEW_TOKENS)).answer(QUESTION).generation.token_ids


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
        lambda folder: edit_tensors(
            folder,
            "anchors.safetensors",
            features=np.eye(1, WIDTH + 1, dtype=np.float32),
            center=np.zeros(WIDTH + 1, np.float32),
            others=np.eye(1, WIDTH + 1, dtype=np.float16),
        ),
        "anchors.safetensors is for a hidden size of 33, the model's is 32",
    ),
    "exits of another width": (
        lambda folder: edit_tensors(
            folder,
            "exits.safetensors",
            weights=np.zeros((2, WIDTH - 1, WIDTH - 1), np.float16),
            biases=np.zeros((2, WIDTH - 1), np.float16),
        ),
        "exits.safetensors is for a hidden size of 31, the model's is 32",
    ),
    "followers of another vocabulary": (
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
    edit_table(saved, layer_kinds=["wide"] * LAYERS, attention={"wide": attention})
    engine = opened(loaded, saved)
    assert next(iter(engine.bundle.latency.values())).layer_kinds == ("wide",) * LAYERS  # type: ignore[union-attr]
    assert engine.latency.layer_kinds == ("full",) * LAYERS


@pytest.mark.parametrize("changed", [{"overhead": [-1e4] * 6}, {"mlp": [1e4, *[1e-9] * 5]}, {"head": [1e-9] * 6}])
def test_an_absurd_table_changes_no_output(
    loaded: LoadedModel, saved: Path, plainly: list[int], changed: dict[str, Any]
) -> None:
    edit_table(saved, **changed)
    engine = opened(loaded, saved)
    assert engine.latency is not TABLE
    assert all(answer(engine, strategy) == plainly for strategy in STRATEGIES)


def test_a_mask_that_promises_nothing_can_be_judged_for_ever() -> None:
    """What was predicted fades to 0 in a long stream."""
    stats = DraftStats()
    for _ in range(40_000):
        stats.update(1, 0.0, 1.0)
    assert np.isfinite(stats.factor)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 500, "/" + "x" * 500, "a\0b", "~nobody-has-this-home/x", ""])
def test_a_name_that_no_model_has_is_refused(saved: Path, name: str) -> None:
    edit_manifest(saved, lambda data: data["model"].update(name=name))
    with pytest.raises(UserError):
        find_model(Bundle.load(saved).model.spec("bundle"))


VALUES: tuple[Any, ...] = (
    *(None, "", "x", "../x", True, False, [], {}, [[]], [[[1]]], {"a": {"a": 1}}),
    *(-1, 0, 1, 2, 63, 10**400, -0.5, 0.5, 1e-9, 1e-300, 1e4, 1e308, float("inf"), float("nan")),
)
SHAPES = ((), (0,), (1,), (3,), (1, 1), (2, 2), (1, WIDTH), (WIDTH,), (2, WIDTH), (2, WIDTH, WIDTH), (0, WIDTH))
DTYPES = ("float32", "float16", "float64", "int64", "int32", "uint8", "bool")


def slots(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) at any depth."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from slots(data[key])


def mapped(data: Any, change: Callable[[float], Any]) -> Any:
    """The structure of `data` with every number changed."""
    if isinstance(data, dict):
        return {key: mapped(part, change) for key, part in data.items()}
    if isinstance(data, list):
        return [mapped(part, change) for part in data]
    return change(data) if isinstance(data, int | float) else data


def mutated(draw: Callable[[st.SearchStrategy[Any]], Any], data: dict[str, Any]) -> dict[str, Any]:
    """A copy of what a YAML or JSON file holds, with one place changed."""
    data = copy.deepcopy(data)
    # By name first: most places are numbers of an acceptance profile.
    places = list(slots(data))
    name = draw(st.sampled_from(sorted({str(key) for _, key in places})))
    container, key = draw(st.sampled_from([place for place in places if str(place[1]) == name]))
    change = draw(st.sampled_from(("drop", "double", "replace", "fill", "scale", "scale", "scale")))
    if change == "drop":
        del container[key]
    elif change == "double":
        copied = copy.deepcopy(container[key])
        if isinstance(container, list):
            container.insert(key, copied)
        else:
            container[f"{key}-2"] = copied
    elif change == "replace":
        container[key] = draw(st.sampled_from(VALUES))
    elif change == "fill":
        value = draw(st.sampled_from(VALUES))
        container[key] = mapped(container[key], lambda _: value)
    else:
        factor = draw(st.sampled_from((-1, 0, 0.5, 0.9, 2, 1e-4, 1e4)))
        container[key] = mapped(container[key], lambda number: type(number)(number * factor))
    return data


def altered_tensors(draw: Callable[[st.SearchStrategy[Any]], Any], path: Path) -> bytes:
    """A safetensors file with one tensor changed, or its metadata."""
    tensors, metadata = read_tensors(path)
    about = {name: json.loads(text) for name, text in metadata.items()}
    if about and draw(st.booleans()):
        return save(tensors, {name: json.dumps(part) for name, part in mutated(draw, about).items()})
    name = draw(st.sampled_from(sorted(tensors)))
    change = draw(st.sampled_from(("drop", "replace", "fill", "dtype")))
    known = tensors.pop(name)
    value = draw(st.sampled_from((0.0, 1.0, -1.0, 299.0, 6e4, 3e38, float("nan"), float("inf"))))
    with np.errstate(all="ignore"):
        if change == "replace":
            shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
            tensors[name] = np.full(shape, value).astype(dtype)
        elif change == "fill":
            tensors[name] = np.full(known.shape, value).astype(known.dtype)
        elif change == "dtype":
            tensors[name] = known.astype(draw(st.sampled_from(DTYPES)))
    return save(tensors, metadata)


# Shrinking a failure would take minutes.
@settings(max_examples=300, phases=(Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_structure_changes_the_output_or_ends_in_a_traceback(
    loaded: LoadedModel, saved: Path, plainly: list[int], data: st.DataObject
) -> None:
    folder = saved.parent / "crafted"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    files = sorted(name for name in contents(saved) if not name.startswith("report"))
    names = data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=2, unique=True))
    for name in sorted(names, key=lambda name: name == MANIFEST):  # which the others are listed in
        path = folder / name
        if name.endswith(".safetensors"):
            swap(folder, name, altered_tensors(data.draw, path))
        elif name.endswith(".json"):
            rewrite(folder, name, json.dumps(mutated(data.draw, json.loads(path.read_text()))))
        elif name == MANIFEST:
            path.write_text(dump(mutated(data.draw, load(path.read_text()))))
        else:
            rewrite(folder, name, dump(mutated(data.draw, load(path.read_text()))))
    with suppress(UserError):  # which is one line by its class
        engine = opened(loaded, folder)
        for strategy in STRATEGIES:
            assert answer(engine, strategy) == plainly, strategy
