"""Bundles as earlier versions wrote them: each loads, travels, and says what it said.

`1-first` has neither token pairs nor exits and says `potential`; `1-followers` has both; `1-loads` says
`oracle_speedup` and how it does under load; `1-shared` is the first that does not list its page. `2-light` has masks
with light sub-layers, and what these cost. A change of the format adds a folder here and never alters one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import read_manifest
from ssd_artifacts.sharing.archive import pack
from ssd_artifacts.sharing.opening import open_bundle
from ssd_profiles.mask import SubLayerPlan

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
    assert one.validation is not None
    assert one.validation.speedup == 1.2
    assert bundle.anchors.domains == ("one", "two")
    [table] = bundle.latency.values()
    assert table.step_seconds(100) > 0
    if not table.sequences.size:
        assert table.step_seconds(50, 64, None, 16) == table.step_seconds(50, 64), "it knows no sequences"
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
