"""Signatures: whose key signed a bundle decides whether it is trusted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import SIGNATURE
from ssd_artifacts.sharing.archive import pack
from ssd_artifacts.sharing.opening import open_bundle, open_given
from ssd_artifacts.sharing.signature import require_signature, sign
from ssd_profiles.errors import UserError
from tests.bundles import bundle
from tests.damage import edit_manifest, edit_yaml, rewrite
from tests.keys import key_pair


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path, "mine")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    bundle().save(tmp_path / "bundle")
    sign(tmp_path / "bundle", keys[0])
    return tmp_path / "bundle"


def test_a_signed_bundle_from_elsewhere_may_choose_the_model(
    signed: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    archive = tmp_path / "bundle.ssd.tar"
    pack(signed, archive)
    assert not open_bundle(archive).trusted, "who signed it is not asked"
    opened = open_bundle(archive, keys[1])
    assert opened.trusted
    assert opened.model_spec() == "tiny"


def test_a_folder_beside_which_other_things_stand_is_still_signed(signed: Path, keys: tuple[Path, Path]) -> None:
    (signed / "README.md").write_text("the user's")
    (signed / "report.html").write_text("made here")
    moved = signed.parent / "moved"
    shutil.move(signed, moved)
    assert open_bundle(moved, keys[1]).trusted


def resigned_by_another(folder: Path) -> None:
    private, _ = key_pair(folder.parent, "other")
    sign(folder, private)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another key": (resigned_by_another, "not signed by"),
    "no signature": (lambda folder: (folder / SIGNATURE).unlink(), "it is not signed"),
    "no signature but a link": (
        lambda folder: ((folder / SIGNATURE).rename(folder.parent / "s"), (folder / SIGNATURE).symlink_to("../s")),
        "it is not signed",
    ),
    "an empty signature": (lambda folder: (folder / SIGNATURE).write_text(""), "not signed by"),
    "a signature that is no text": (lambda folder: (folder / SIGNATURE).write_bytes(b"\xff\x1b[2J"), "not signed by"),
    "nested JSON": (lambda folder: (folder / SIGNATURE).write_text("[" * 60_000), "not signed by"),
    "a huge signature": (lambda folder: (folder / SIGNATURE).write_text(" " * 100_000), "too large"),
    "another manifest": (
        lambda folder: edit_manifest(folder, lambda data: data["model"].update(name="evil/model")),
        "not signed by",
    ),
    "another mask, its hash in the manifest": (
        lambda folder: edit_yaml(folder, "domains/one.yaml", lambda data: data["frontier"][0].update(mask="00")),
        "not signed by",
    ),
    "another mask, the manifest untouched": (
        lambda folder: (folder / "domains" / "one.yaml").write_text("name: one"),
        "altered",
    ),
    "a signature of another bundle": (
        lambda folder: rewrite(folder, "report.json", "{}"),
        "not signed by",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_key_did_not_sign_is_refused_in_one_line(signed: Path, keys: tuple[Path, Path], case: str) -> None:
    change, says = CASES[case]
    change(signed)
    with pytest.raises(UserError, match=says) as error:
        open_bundle(signed, keys[1])
    assert str(error.value).isprintable()


def test_keys_that_are_none_are_refused(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("no key")
    for key in (tmp_path / "text.pem", keys[1]):
        with pytest.raises(UserError, match="cannot sign"):
            sign(signed, key)
    before = (signed / SIGNATURE).read_bytes()
    for key, says in ((tmp_path / "none.pub", "is not there"), (tmp_path / "text.pem", "is no public key")):
        with pytest.raises(UserError, match=says):
            require_signature(signed, key, "bundle")
    assert (signed / SIGNATURE).read_bytes() == before
    with pytest.raises(UserError, match="no bundle to be signed"):
        open_given(None, keys[1])


def test_a_damaged_bundle_is_not_signed(signed: Path, keys: tuple[Path, Path]) -> None:
    (signed / SIGNATURE).unlink()
    (signed / "domains" / "one.yaml").write_text("altered")
    with pytest.raises(UserError, match="altered"):
        sign(signed, keys[0])
    assert not (signed / SIGNATURE).exists()


def test_a_bundle_written_anew_is_no_longer_signed(signed: Path) -> None:
    Bundle.load(signed).save(signed)
    assert not (signed / SIGNATURE).exists()


def test_without_the_library_the_message_says_what_to_install(
    signed: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssd_artifacts.sharing.signature.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '.\[share\]'"):
        open_bundle(signed, keys[1])
