"""Opens what `--artifact` names: the one way from a reference to a checked bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.files import sha256_file
from ssd_artifacts.integrity import ORIGIN
from ssd_artifacts.manifest import MANIFEST
from ssd_artifacts.sharing.receiving import receive
from ssd_artifacts.sharing.reference import read_reference
from ssd_artifacts.sharing.signature import require_signature
from ssd_profiles.errors import UserError


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """A checked bundle and where it lies."""

    bundle: Bundle
    where: str
    """The name by which the user gave it, for messages."""
    folder: Path
    manifest_sha256: str
    """Hash of its manifest, which has the hashes of all files."""
    trusted: bool
    """Whether it may choose the model: it was made on this machine, or a key that the user named has signed it."""

    def model_spec(self) -> str:
        """The model that the bundle names, as an argument for `load_model`.

        Raises UserError for a bundle from elsewhere that no trusted key has signed, and for a model that is not here.
        """
        if not self.trusted:
            raise UserError(
                f"{self.where}: a bundle from elsewhere does not choose the model; give {self.bundle.model.name} or "
                "another with --model, or its signer's key with --require-signature"
            )
        return self.bundle.model.spec(self.where)


def open_bundle(artifact: str | Path, key: Path | None = None) -> OpenedBundle:
    """Open a folder, an archive, `hf://…`, `oci://…` or `demo`.

    With `key`, the bundle must be signed by it. Raises UserError when the bundle cannot be had, is damaged or not
    signed.
    """
    reference = read_reference(str(artifact))
    folder = receive(reference)
    if key is not None:
        require_signature(folder, key, str(artifact))
    # Hashed before the bundle is read: one that changes meanwhile is seen to be another.
    stamp = manifest_sha256(folder)
    return OpenedBundle(
        bundle=Bundle.load(folder),
        where=str(artifact),
        folder=folder,
        manifest_sha256=stamp,
        trusted=key is not None or not (folder / ORIGIN).exists(),
    )


def manifest_sha256(folder: Path) -> str:
    """Hash of the manifest in a folder; empty while there is none."""
    try:
        return sha256_file(folder / MANIFEST)
    except OSError:
        return ""


def open_given(artifact: str | Path | None, key: Path | None = None) -> OpenedBundle | None:
    """Open a bundle if one is given. Raises UserError when a key is given without one."""
    if artifact is not None:
        return open_bundle(artifact, key)
    if key is not None:
        raise UserError("--require-signature: there is no bundle to be signed; give one, or omit it")
    return None


def trusted_bundle(opened: OpenedBundle | None) -> Bundle | None:
    """The bundle if it may decide how the model is loaded, else None."""
    return opened.bundle if opened is not None and opened.trusted else None
