from __future__ import annotations

from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.domain import domain_names


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
