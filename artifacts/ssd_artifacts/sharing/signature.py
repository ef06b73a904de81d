"""Signatures of bundles by OpenSSF's model-signing: of the manifest, and so of every file that it lists."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssd_artifacts.integrity import MAX_SIGNATURE_BYTES, SIGNATURE, check_files, read_manifest
from ssd_artifacts.manifest import MANIFEST
from ssd_profiles.errors import UserError, first_line


def sign(folder: Path, private_key: Path) -> Path:
    """Sign a bundle with a private key of an elliptic curve (PEM); returns the signature's path.

    Raises UserError when the bundle is damaged, or when the key cannot be used.
    """
    check_files(folder, read_manifest(folder))
    _require_file(private_key, "--key")
    config = _library("signing", "--key").Config()
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        written = Path(temporary) / SIGNATURE
        try:
            config.use_elliptic_key_signer(private_key=private_key).sign(folder / MANIFEST, written)
        # The library raises whatever its parsers do.
        except Exception as error:
            raise UserError(
                f"--key: {private_key} cannot sign ({first_line(error)}); give a PEM of a P-256 key"
            ) from None
        os.replace(written, folder / SIGNATURE)
    return folder / SIGNATURE


def require_signature(folder: Path, public_key: Path, where: str) -> None:
    """Raise UserError unless the manifest is signed by the key (PEM). `where` names the bundle in messages.

    The files are held against the manifest where the bundle is loaded.
    """
    _require_file(public_key, "--require-signature")
    signature = folder / SIGNATURE
    if signature.is_symlink() or not signature.is_file():
        raise UserError(f"{where}: it is not signed; ask for a signed one, or omit --require-signature")
    if signature.stat().st_size > MAX_SIGNATURE_BYTES:
        raise UserError(f"{where}: its signature is too large to be one; fetch the bundle again")
    verifying = _library("verifying", "--require-signature")
    hashing = _library("hashing", "--require-signature")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:
        raise UserError(
            f"--require-signature: {public_key} is no public key ({first_line(error)}); give its signer's"
        ) from None
    try:
        # The library prints what differs.
        with contextlib.redirect_stdout(io.StringIO()):
            config.set_hashing_config(hashing.Config()).verify(folder / MANIFEST, signature)
    except Exception as error:
        raise UserError(
            f"{where}: not signed by {public_key} ({first_line(error)}); do not use it, or give its signer's key"
        ) from None


def _library(module: str, where: str) -> Any:
    """A module of model-signing."""
    if find_spec("model_signing") is None:
        raise UserError(f"{where}: this needs model-signing; install it with pip install '.[share]' in a clone")
    from importlib import import_module

    return import_module(f"model_signing.{module}")


def _require_file(key: Path, option: str) -> None:
    if not key.is_file():
        raise UserError(f"{option}: {key} is not there; give a key in a PEM file")
