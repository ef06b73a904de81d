"""Archives: the same bytes everywhere, and nothing but what `pack` writes is unpacked."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import MAX_SIGNATURE_BYTES, ORIGIN, SIGNATURE
from ssd_artifacts.manifest import MANIFEST, REPORT_PAGE
from ssd_artifacts.sharing.archive import archive_bytes, pack, unpack
from ssd_artifacts.sharing.departing import departing
from ssd_artifacts.sharing.opening import open_bundle
from ssd_profiles.errors import UserError
from tests.bundles import bundle
from tests.damage import contents, edit_manifest

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bundle().save(tmp_path / "bundle", "<p>made here</p>")
    return tmp_path / "bundle"


@pytest.fixture
def archive(saved: Path, tmp_path: Path) -> Path:
    pack(saved, tmp_path / "bundle.ssd.tar")
    return tmp_path / "bundle.ssd.tar"


def unpacked(archive: Path, folder: Path) -> dict[str, bytes]:
    folder.mkdir()
    unpack(archive, folder)
    return contents(folder)


def members(archive: Path) -> Members:
    with tarfile.open(archive) as file:
        return [(member, file.extractfile(member).read()) for member in file]  # type: ignore[union-attr]


def rewritten(archive: Path, change: Callable[[Members], Members], **options: object) -> None:
    """The archive with other members, written by Python's own tarfile."""
    found = change(members(archive))
    with tarfile.open(archive, format=tarfile.USTAR_FORMAT, **{"mode": "w", **options}) as file:  # type: ignore[call-overload]
        for member, content in found:
            file.addfile(member, io.BytesIO(content))


def member(name: str, content: bytes = b"", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def test_a_bundle_survives_and_its_bytes_do_not_depend_on_the_machine(
    saved: Path, archive: Path, tmp_path: Path
) -> None:
    packed = archive.read_bytes()
    assert len(packed) == archive_bytes(saved)
    before = contents(saved)
    del before[REPORT_PAGE]
    assert unpacked(archive, tmp_path / "again") == before
    elsewhere = tmp_path / "other name"
    shutil.copytree(tmp_path / "again", elsewhere)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(path.stat().st_mode & ~stat.S_IWUSR)
    (elsewhere / "README.md").write_text("the user's")
    (elsewhere / ORIGIN).write_text("stays here")
    pack(elsewhere, tmp_path / "other.ssd.tar")
    assert (tmp_path / "other.ssd.tar").read_bytes() == packed


def test_a_page_made_elsewhere_does_not_travel(saved: Path, tmp_path: Path) -> None:
    """Earlier versions listed it in the manifest."""
    (saved / REPORT_PAGE).write_text("<script>")
    entry = {"sha256": "0" * 64, "bytes": 8}
    edit_manifest(saved, lambda data: data["files"].update({REPORT_PAGE: entry}))
    pack(saved, tmp_path / "old.ssd.tar")
    assert REPORT_PAGE not in unpacked(tmp_path / "old.ssd.tar", tmp_path / "new")
    Bundle.load(tmp_path / "new")


def test_a_damaged_bundle_is_not_packed(saved: Path, tmp_path: Path) -> None:
    (saved / "domains" / "one.yaml").write_text("altered")
    with pytest.raises(UserError, match="altered"):
        pack(saved, tmp_path / "bundle.ssd.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("target", ["../private", ".git/config", None])
def test_only_a_signature_is_packed_as_one(saved: Path, tmp_path: Path, target: str | None) -> None:
    """Its content is in no manifest, so that a link in its place would send any file."""
    if target is None:
        (saved / SIGNATURE).write_bytes(bytes(MAX_SIGNATURE_BYTES + 1))
    else:
        (saved / target).parent.mkdir(exist_ok=True)
        (saved / target).write_text("secret")
        (saved / SIGNATURE).symlink_to(target)
    with pytest.raises(UserError, match=SIGNATURE):
        pack(saved, tmp_path / "bundle.ssd.tar")
    with pytest.raises(UserError, match=SIGNATURE), departing(saved, strip=False, private_key=None):
        pass


def first_replaced(**attributes: object) -> Callable[[Members], Members]:
    def change(found: Members) -> Members:
        for key, value in attributes.items():
            setattr(found[1][0], key, value)
        return found

    return change


def sparse(found: Members) -> Members:
    found[1][0].type = tarfile.GNUTYPE_SPARSE
    return found


CASES: dict[str, Callable[[Members], Members]] = {
    "a link": lambda found: [*found, member("domains/x.yaml", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a hard link": lambda found: [*found, member("domains/x.yaml", type=tarfile.LNKTYPE, linkname=MANIFEST)],
    "a device": lambda found: [*found, member("domains/x.yaml", type=tarfile.CHRTYPE)],
    "a folder": lambda found: [member("domains", type=tarfile.DIRTYPE), *found],
    "a sparse file": sparse,
    "a manifest that is a link": lambda found: [member(MANIFEST, type=tarfile.SYMTYPE, linkname="x"), *found[1:]],
    "an absolute name": lambda found: [*found, member("/tmp/x", b"x")],
    "a name outside": lambda found: [*found, member("../x", b"x")],
    "a name outside in place of a file": first_replaced(name="../anchors.safetensors"),
    "code": lambda found: [*found, member("setup.py", b"x")],
    "a file twice": lambda found: [*found, found[-1]],
    "a page of somebody else's": lambda found: [*found, member(REPORT_PAGE, b"<script>")],
    "an origin of somebody else's": lambda found: [*found, member(ORIGIN, b"source: here")],
    "a file left out": lambda found: found[:-1],
    "another order": lambda found: [found[0], *reversed(found[1:])],
    "no manifest": lambda found: found[1:],
    "the manifest last": lambda found: [*found[1:], found[0]],
    "another mode": first_replaced(mode=0o4755),
    "another owner": first_replaced(uid=1000),
    "another date": first_replaced(mtime=1),
    "a name of another case": first_replaced(name="Anchors.safetensors"),
    "nothing": lambda found: [],
}


@pytest.mark.parametrize("case", CASES)
def test_what_pack_does_not_write_is_refused_in_one_line(archive: Path, tmp_path: Path, case: str) -> None:
    rewritten(archive, CASES[case])
    refused(archive, tmp_path)


def refused(archive: Path, tmp_path: Path) -> None:
    """The archive is refused, and nothing of it is outside the folder."""
    (tmp_path / "in").mkdir()
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"archive|manifest|altered|missing") as error:
        unpack(archive, tmp_path / "in")
    assert str(error.value).isprintable()
    outside = {name: content for name, content in contents(tmp_path).items() if not name.startswith("in/")}
    assert outside == before
    assert not any(path.is_symlink() for path in (tmp_path / "in").rglob("*"))


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_a_compressed_archive_is_refused(archive: Path, tmp_path: Path, compression: str) -> None:
    """Nothing that expands is read."""
    rewritten(archive, lambda found: found, mode=f"w:{compression}")
    refused(archive, tmp_path)


def test_a_member_that_promises_more_than_there_is_is_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    size = len(content)
    info = tarfile.TarInfo("anchors.safetensors")
    info.size = 1 << 32
    begin = 512 + -(-members(archive)[0][0].size // 512) * 512
    archive.write_bytes(content[:begin] + info.tobuf(tarfile.USTAR_FORMAT) + content[begin + 512 :])
    assert archive.stat().st_size == size
    refused(archive, tmp_path)


@pytest.mark.parametrize("tail", [b"x", bytes(512), bytes(10240)])
def test_nothing_may_stand_after_the_end(archive: Path, tmp_path: Path, tail: bytes) -> None:
    archive.write_bytes(archive.read_bytes() + tail)
    refused(archive, tmp_path)


def test_an_archive_that_changes_while_it_is_unpacked_is_not_kept(
    archive: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the cache would hold another archive's bundle under the digest of this one."""
    before = archive.read_bytes()

    def replaced(path: Path, folder: Path) -> None:
        replace(bundle(), created="2001-01-01T00:00:00+00:00").save(saved)
        pack(saved, path)
        unpack(path, folder)

    monkeypatch.setattr("ssd_artifacts.sharing.receiving.unpack", replaced)
    with pytest.raises(UserError, match="changed while it was unpacked"):
        open_bundle(archive)
    monkeypatch.undo()
    archive.write_bytes(before)
    assert open_bundle(archive).bundle.created == bundle().created


def test_an_archive_is_a_bundle_from_elsewhere(archive: Path, saved: Path, tmp_path: Path) -> None:
    assert open_bundle(saved).trusted
    opened = open_bundle(archive)
    assert not opened.trusted
    assert opened.bundle.domains == bundle().domains
    with pytest.raises(UserError, match="does not choose the model; give tiny or another with --model"):
        opened.model_spec()
    again = open_bundle(archive)
    assert again.folder == opened.folder, "unpacked once"
    copied = tmp_path / "copied"
    shutil.copytree(opened.folder, copied)
    assert not open_bundle(copied).trusted, "a copy stays somebody else's"
    rewritten(archive, lambda found: found[:-1])
    with pytest.raises(UserError, match=str(archive)) as error:
        open_bundle(archive)
    assert ".new." not in str(error.value)
