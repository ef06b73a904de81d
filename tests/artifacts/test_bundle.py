from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ssd_artifacts.bundle import Bundle
from ssd_profiles.errors import UserError
from tests.bundles import bundle, fingerprint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bundle().save(tmp_path / "bundle")
    return tmp_path / "bundle"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_round_trip_is_byte_stable(saved: Path, tmp_path: Path) -> None:
    loaded = Bundle.load(saved)
    loaded.save(tmp_path / "again")
    assert contents(saved) == contents(tmp_path / "again")
    assert loaded.domains == bundle().domains
    assert loaded.model == fingerprint()
    assert loaded.reports["report.html"] == "<p>Ω</p>"


def test_a_bundle_may_be_moved_and_accompanied(saved: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(saved, moved)
    (moved / "README.md").write_text("beside")
    Bundle.load(moved)


def test_saving_replaces_a_bundle_whole(saved: Path) -> None:
    (saved / "stray.txt").write_text("gone afterwards")
    bundle().save(saved)
    assert "stray.txt" not in contents(saved)
    assert [p.name for p in saved.parent.iterdir()] == ["bundle"]


def test_a_failed_save_leaves_the_old_bundle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)

    def fail(*_: object) -> str:
        raise OSError("no space")

    monkeypatch.setattr("ssd_artifacts.bundle.sha256_file", fail)
    with pytest.raises(OSError, match="no space"):
        bundle().save(saved)
    assert contents(saved) == before
    assert [p.name for p in saved.parent.iterdir()] == ["bundle"]


def edit_manifest(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = yaml.safe_load((folder / "manifest.yaml").read_text())
    change(data)
    (folder / "manifest.yaml").write_text(yaml.safe_dump(data))


def rewrite(folder: Path, name: str, text: str) -> None:
    """Alter a file and the manifest with it, so that only its content is wrong."""
    (folder / name).write_text(text)
    content = (folder / name).read_bytes()
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    edit_manifest(folder, lambda data: data["files"].update({name: entry}))  # type: ignore[attr-defined]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "no bundle there"),
    "empty": (lambda f: [shutil.rmtree(f), f.mkdir()], "manifest.yaml: cannot be read"),
    "file missing": (lambda f: (f / "domains/one.yaml").unlink(), r"one.yaml: missing"),
    "file altered": (lambda f: (f / "domains/one.yaml").write_text("x"), r"one.yaml: altered"),
    "file truncated": (lambda f: (f / "anchors.safetensors").write_bytes(b""), r"anchors.safetensors: altered"),
    "surplus file": (lambda f: (f / "extra.pkl").write_text("x"), r"extra.pkl: not listed"),
    "newer format": (lambda f: edit_manifest(f, lambda d: d.update(format_version=2)), "format 2"),
    "manifest not yaml": (lambda f: (f / "manifest.yaml").write_text("{"), "not valid YAML"),
    "manifest empty": (lambda f: (f / "manifest.yaml").write_text(""), "manifest.yaml"),
    "python tag": (
        lambda f: (f / "manifest.yaml").write_text("!!python/object/apply:os.system ['true']"),
        "not valid YAML",
    ),
    "alias bomb": (lambda f: (f / "manifest.yaml").write_text("a: &a [1]\nb: *a\n"), "aliases"),
    "duplicate key": (lambda f: rewrite(f, "domains/one.yaml", "name: one\nname: two\n"), "twice"),
    "unlisted domain": (lambda f: edit_manifest(f, lambda d: d["domains"].append("three")), "three"),
    "wrong record": (lambda f: rewrite(f, "domains/one.yaml", "name: one\n"), "one.yaml: context"),
    "long mask": (
        lambda f: rewrite(
            f, "domains/one.yaml", (f / "domains/one.yaml").read_text().replace("mask: 3c", "mask: 3cff", 1)
        ),
        r"frontier\[0\]",
    ),
    "not a number": (
        lambda f: rewrite(
            f, "domains/one.yaml", (f / "domains/one.yaml").read_text().replace("potential: 1.4", "potential: .nan")
        ),
        "potential",
    ),
    "bad latency": (lambda f: rewrite(f, next(f.glob("latency/*")).relative_to(f).as_posix(), "{}"), "latency"),
    "bad anchors": (lambda f: rewrite(f, "anchors.safetensors", "nothing"), "damaged anchors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line(saved: Path, damage: str) -> None:
    break_it, says = DAMAGE[damage]
    break_it(saved)
    with pytest.raises(UserError, match=says) as error:
        Bundle.load(saved)
    assert "\n" not in str(error.value)
    assert str(saved) in str(error.value)


@pytest.mark.parametrize("part", ["config", "tokenizer", "weights_sample"])
def test_another_model_is_refused(part: str) -> None:
    other = fingerprint(**{f"{part}_sha256": "e" * 64})
    with pytest.raises(UserError, match=part.removesuffix("_sample")):
        fingerprint().require_same_model(other, "bundle")
    fingerprint().require_same_model(fingerprint(), "bundle")
