"""Hundreds of mutated bundles: each is refused in one line, or decodes to plain decoding's output."""

from __future__ import annotations

import os
import resource
import shutil
from collections import Counter
from pathlib import Path
from time import process_time

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import check_files, read_manifest
from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine
from ssd_runtime.loading.models import LoadedModel
from tests.damage import contents
from tests.hostile import STRATEGIES, TABLE, answer, drafting_bundle, tiny
from tests.mutations import mutate

PAST_INTEGRITY = ("refused by content", "refused by model", "decoded")
COUNT = int(os.environ.get("SSD_MUTATIONS", "500"))
PARTS = 10
MOST_SECONDS = 20.0
"""Processor time that any one bundle may take: to be read, to plan with and to decode by five strategies."""
MOST_GROWTH = 512 << 20
"""Bytes by which the process may grow over all mutations."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def saved(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "bundle"
    drafting_bundle(loaded).save(folder)
    return folder


@pytest.fixture(scope="module")
def plainly(loaded: LoadedModel) -> list[int]:
    return answer(Engine(loaded, weight_memory=0), "plain")


@pytest.mark.hostile
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mutated_bundle_is_refused_in_one_line_or_changes_no_output(
    loaded: LoadedModel, saved: Path, plainly: list[int], part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tables that do not fit the model are measured again, which takes seconds.
    monkeypatch.setattr("ssd_runtime.engine.latency_tables.measure_latency", lambda *_: TABLE)
    outcomes: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seeds = range(part * COUNT // PARTS, (part + 1) * COUNT // PARTS)
    for seed in seeds:
        folder = tmp_path / "mutated"
        shutil.copytree(saved, folder)
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
    _write(part, outcomes)
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


def _write(part: int, outcomes: Counter[str]) -> None:
    """Keep the counts where `SSD_MUTATION_COUNTS` names a folder."""
    if folder := os.environ.get("SSD_MUTATION_COUNTS"):
        lines = "".join(f"{name}: {count}\n" for name, count in sorted(outcomes.items()))
        (Path(folder) / f"{part:02d}.txt").write_text(lines)
