"""Brings a bundle from an archive, the Hub or a registry into a folder, whole or not at all."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from ssd_artifacts.bundle import Bundle, require_replaceable
from ssd_artifacts.files import cache_folder, clear_leftovers, new_folder, sha256_file, write_lock
from ssd_artifacts.integrity import ORIGIN, carry_over
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.reference_bundle import bundle_path
from ssd_artifacts.sharing.archive import unpack
from ssd_artifacts.sharing.hub import fetch_from_hub, hub_commit
from ssd_artifacts.sharing.reference import Reference
from ssd_artifacts.sharing.registry import fetch_from_registry, registry_digest
from ssd_artifacts.texts import to_yaml
from ssd_profiles.errors import UserError
from ssd_profiles.printable import Printable


class Origin(BaseModel):
    """Schema of `origin.yaml`, which marks a bundle as somebody else's."""

    source: Printable
    revision: Printable
    """The Hub's commit, the layer's digest or the archive's digest."""
    received: Printable


def receive(reference: Reference, out: Path | None = None) -> Path:
    """Return a local folder with the bundle.

    The folder of a folder reference is returned as it is; anything else is fetched into `out`, or into the cache if
    `out` is None. What is fetched is checked by loading it, marked by `origin.yaml`, and never replaces anything but a
    bundle from elsewhere. Processes that write one folder wait for each other; a killed one leaves the former content.
    """
    if reference.kind == "folder":
        return bundle_path(reference.path)
    revision = _revision(reference)
    folder = out if out is not None else _cached(reference, revision)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with write_lock(folder):
        clear_leftovers(folder)
        if out is None and (folder / MANIFEST).is_file():
            return folder
        _require_free(folder, is_cached=out is None)
        with new_folder(folder) as temporary:
            try:
                _fetch(reference, revision, temporary)
                Bundle.load(temporary)
                if reference.kind == "archive" and _revision(reference) != revision:
                    raise UserError(f"{reference.text}: changed while it was unpacked; give it again")
            except UserError as error:
                raise UserError(str(error).replace(str(temporary), reference.text)) from None
            received = datetime.now(UTC).isoformat(timespec="seconds")
            origin = Origin(source=reference.text, revision=revision, received=received)
            carry_over(folder, temporary)
            (temporary / ORIGIN).write_text(to_yaml(origin), encoding="utf-8")
    return folder


def _revision(reference: Reference) -> str:
    """Identifier of the content that the reference means now: a commit or a digest."""
    if reference.kind == "hub":
        return hub_commit(reference)
    if reference.kind == "registry":
        return registry_digest(reference)
    if not reference.path.is_file():
        raise UserError(f"{reference.text}: no such archive; give a file that ssd-bundle pack wrote")
    return f"sha256:{sha256_file(reference.path)}"


def _fetch(reference: Reference, revision: str, folder: Path) -> None:
    if reference.kind == "hub":
        fetch_from_hub(reference, revision, folder)
    elif reference.kind == "registry":
        fetch_from_registry(reference, revision, folder)
    else:
        unpack(reference.path, folder)


def _cached(reference: Reference, revision: str) -> Path:
    name = hashlib.sha256(f"{reference.kind} {reference.name} {revision}".encode()).hexdigest()[:24]
    return cache_folder() / "bundles" / name


def _require_free(folder: Path, is_cached: bool) -> None:
    try:
        require_replaceable(folder)
    except UserError as error:
        if is_cached:
            raise UserError(f"{folder}: the cached bundle is damaged; delete this folder") from None
        raise UserError(f"--out: {error}") from None
    if not is_cached and (folder / MANIFEST).is_file() and not (folder / ORIGIN).is_file():
        raise UserError(f"--out: {folder} is a bundle that was made here, and would be lost; name another folder")
