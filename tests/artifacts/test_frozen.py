"""Bundles as earlier versions wrote them: each loads, travels, and says what it said.

`1-first` has neither token pairs nor exits and says `potential`; `1-followers` has both; `1-loads` says
`oracle_speedup` and how it does under load; `1-shared` is the first that does not list its page. `2-light` has masks
with light sub-layers, and what these cost. A change of the format adds a folder here and never alters one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.integrity import read_manifest
from ssd_artifacts.manifest import MANIFEST, Manifest
from ssd_artifacts.reference_bundle import bundle_path
from ssd_artifacts.sharing.archive import pack
from ssd_artifacts.sharing.opening import open_bundle
from ssd_artifacts.texts import read_yaml, validated
from ssd_profiles.domain import domain_names
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan
from tests.bundles import LAYERS, bundle
from tests.mutations import slots
from tests.tables import latency_table, with_light_costs

FROZEN = Path(__file__).parent / "frozen"
NAMES = sorted(path.name for path in FROZEN.iterdir())
WHOLE = SubLayerPlan.of(4).lightened(8)
MIXED = SubLayerPlan.of(4, {5}).lightened({0: 8, 1: 4, 2: 4, 4: 8, 7: 4, 8: 8})
ARCHIVES = {
    "1-first": "25e48a440e92f0be07fec7142dae26433c7b0a43ff9fde2c2e59c64a0b11e756",
    "1-followers": "19bd9a07674a5df89e5096bc0e45bf3fae9e041d24f0d332a86e6b447978d767",
    "1-loads": "02db3f292349a295d248ab82e308c90b886bd5fce53353f53037119c8184f0c0",
    "1-shared": "9d1d8ee049ff558921f4cc81d32aa6d0cb85e72eee871025e6f7a161d6bceecd",
    "2-light": "8aab3824bd14d4bbf36f37e4a69f913699421f87ae2d93894ce8711f3b436e18",
}
"""SHA-256 of the archive of each: the bytes of `pack` depend on the bundle alone, on every machine."""


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_of_an_earlier_version_says_what_it_said(name: str, tmp_path: Path) -> None:
    bundle = Bundle.load(FROZEN / name)
    assert set(bundle.domains) == {"one", "two"}
    one, two = bundle.domains["one"], bundle.domains["two"]
    assert one.frontier[0].sub_layer_plan(4) == SubLayerPlan.of(4, {2, 3, 4, 5})
    lighter = [entry.sub_layer_plan(4) for entry in one.frontier[1:]]
    assert lighter == ([WHOLE, MIXED] if name == "2-light" else [])
    assert [entry.sub_layer_plan(4) for entry in two.frontier] == [SubLayerPlan.of(4, {0, 1}), SubLayerPlan.of(4, {6})]
    assert one.oracle_speedup == 1.4
    assert one.validation.speedup == 1.2
    assert bundle.anchors.domains == ("one", "two")
    [table] = bundle.latency.values()
    assert table.step_seconds(100) > 0
    if not table.sequences.size:
        few = float(table.contexts[0])
        assert table.step_seconds(few, 64, None, 16) == table.step_seconds(few, 64), "it knows no sequences"
    assert table.draft_cost(WHOLE, 100) == pytest.approx(0.5 if name == "2-light" else 1.0)
    assert (bundle.successors is not None) == (bundle.exits is not None) == (name != "1-first")
    bundle.save(tmp_path / "anew")
    anew = Bundle.load(tmp_path / "anew")
    assert read_manifest(tmp_path / "anew").format_version == int(name[0]), "the oldest format that holds it"
    assert anew.domains == bundle.domains
    assert anew.model == bundle.model
    assert anew.anchors.to_bytes() == bundle.anchors.to_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_its_archive_has_the_same_bytes_everywhere(name: str, tmp_path: Path) -> None:
    archive = tmp_path / "bundle.ssd.tar"
    pack(FROZEN / name, archive)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == ARCHIVES[name]
    assert open_bundle(archive).bundle.domains == Bundle.load(FROZEN / name).domains


def test_the_reference_bundle_is_whole_and_small() -> None:
    folder = bundle_path(Path("demo"))
    bundle = Bundle.load(folder)
    assert set(bundle.domains) == {*domain_names(), "mix"}
    assert set(bundle.anchors.domains) == set(domain_names())
    assert bundle.model.name == "demo@wheel"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 3 << 20


def test_a_bundle_of_the_users_own_called_demo_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert bundle_path(Path("demo")).is_absolute()
    (tmp_path / "demo" / "manifest.yaml").write_text("mine")
    assert bundle_path(Path("demo")) == Path("demo")


def assert_strict(data: Any, read: Callable[[Any], object]) -> None:
    """No number of the data may be anything else."""
    read(data)
    places = [place for place, (part, key) in enumerate(slots(data)) if type(part[key]) in (int, float)]
    assert places
    for place in places:
        part, key = list(slots(data))[place]
        for other in (True, "1", *([1.5] if isinstance(part[key], int) else [])):
            changed = copy.deepcopy(data)
            part, key = list(slots(changed))[place]
            part[key] = other
            with pytest.raises((UserError, ValueError)):
                read(changed)
                pytest.fail(f"{key}: {other!r} was taken for a number")


def test_texts(tmp_path: Path) -> None:
    bundle().save(tmp_path)
    for name, kind in ((MANIFEST, Manifest), ("domains/one.yaml", DomainConfig)):
        path = tmp_path / name
        assert_strict(read_yaml(path), lambda data, path=path, kind=kind: validated(path, data, kind))


def test_latency_tables() -> None:
    table = with_light_costs(latency_table(LAYERS), 0.5, (8, 4))
    assert_strict(json.loads(table.to_json()), lambda data: LatencyTable.from_json(json.dumps(data)))
