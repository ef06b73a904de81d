"""Checks that a bundle's folder holds the files of its manifest, unaltered, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from ssd_artifacts.files import sha256_file
from ssd_artifacts.manifest import FIRST_FORMAT, FORMAT_VERSION, MANIFEST, REPORT_PAGE, Manifest
from ssd_artifacts.texts import read_yaml, validated
from ssd_profiles.errors import UserError

SIGNATURE = "manifest.yaml.sig"
"""Signature of the manifest, and so of every file that the manifest lists."""
MAX_SIGNATURE_BYTES = 64 << 10
ORIGIN = "origin.yaml"
"""File that says where a bundle was pulled or unpacked from. It stays on the machine that received the bundle."""
KEPT = frozenset({"README.md", ".gitattributes"})
"""Files of the user's that survive when a bundle is written anew."""
UNLISTED = KEPT | {REPORT_PAGE, SIGNATURE, ORIGIN}
"""Files that may stand beside a bundle. They are no part of it, and loading does not read them.

Earlier versions listed report.html in the manifest. It is passed over there too: a page made elsewhere is never opened.
"""
IGNORED = frozenset({".git", ".cache", ".DS_Store"})
"""Names that version control, the Hub's client and file managers put at the top of a folder."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a bundle's folder. Raises UserError when it is damaged or of another format version."""
    path = folder / MANIFEST
    _require_unlinked(folder, path)
    data = read_yaml(path)
    # The version comes first, because a newer format may hold fields that this version would reject.
    version = data.get("format_version", FORMAT_VERSION) if isinstance(data, dict) else FORMAT_VERSION
    if version not in range(FIRST_FORMAT, FORMAT_VERSION + 1):
        raise UserError(
            f"{path}: bundle format {str(version)[:40]}, this version reads {FIRST_FORMAT} to {FORMAT_VERSION}; "
            "compile it again or install a matching version"
        )
    return validated(path, data, Manifest)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise UserError if a file of the bundle is missing, altered, a link or not listed, or the signature is none."""
    listed = set(manifest.files) - {REPORT_PAGE}
    present = present_files(folder)
    for name in sorted(listed - present):
        raise UserError(f"{folder / name}: missing from the bundle; copy it again or compile it again")
    for name in sorted(present - listed - UNLISTED - {MANIFEST}):
        raise UserError(f"{folder / name}: not listed in the bundle's manifest; remove it")
    # It travels with the bundle, and no hash of the manifest says what is in it.
    signature = folder / SIGNATURE
    _require_unlinked(folder, signature)
    if signature.is_file() and signature.stat().st_size > MAX_SIGNATURE_BYTES:
        raise UserError(f"{signature}: too large to be a signature; remove it, or fetch the bundle again")
    for name in sorted(listed):
        file = folder / name
        entry = manifest.files[name]
        _require_unlinked(folder, file)
        # A link may lead to a device, and reading a device may never end.
        if not file.is_file():
            raise UserError(f"{file}: not a file, or a link to nothing; copy the bundle again")
        if (size := file.stat().st_size) != entry.bytes:
            raise UserError(f"{file}: altered: expected {entry.bytes} bytes, got {size}; copy it or compile it again")
        if (digest := sha256_file(file)) != entry.sha256:
            raise UserError(
                f"{file}: altered: expected sha256 {entry.sha256[:12]}…, got {digest[:12]}…; "
                "copy it or compile it again"
            )


def present_files(folder: Path) -> set[str]:
    """Relative paths of all files in a bundle's folder that are not `IGNORED`."""
    files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file() or file.is_symlink())
    return {file.as_posix() for file in files if file.parts[0] not in IGNORED}


def carry_over(old: Path, new: Path) -> None:
    """Copy the user's own files from the folder of a bundle that is about to be replaced."""
    for name in KEPT:
        if (old / name).is_file():
            shutil.copy2(old / name, new / name)


def _require_unlinked(folder: Path, file: Path) -> None:
    """Raise UserError for a link.

    A snapshot in the cache of the Hub's client is made of links to its blobs, which are fine.
    """
    if not file.is_symlink():
        return
    try:
        target = file.resolve()
    except (OSError, RuntimeError):
        target = Path("/")
    snapshots = folder.resolve().parent
    if snapshots.name != "snapshots" or not target.is_relative_to(snapshots.parent / "blobs"):
        raise UserError(f"{file}: not a file but a link out of the bundle; copy the bundle again")
