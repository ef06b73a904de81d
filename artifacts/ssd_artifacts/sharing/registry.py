"""Bundles in OCI registries: one layer that holds the packed bundle."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ssd_artifacts.files import sha256_file
from ssd_artifacts.manifest import ARCHIVE_SUFFIX, MAX_BUNDLE_BYTES
from ssd_artifacts.sharing.archive import pack, unpack
from ssd_artifacts.sharing.reachable import is_local, reachable
from ssd_artifacts.sharing.reference import Reference, client_errors
from ssd_profiles.errors import UserError, first_problem

MEDIA_TYPE = "application/vnd.ssd.bundle.v1.tar"
"""Media type of the layer that holds a bundle."""
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 1 << 20
_CHUNK = 1 << 20
_registry_errors = partial(client_errors, host="the registry", check="the name and your login")


class _Layer(BaseModel):
    mediaType: str = Field(max_length=256)  # noqa: N815
    digest: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0, le=MAX_BUNDLE_BYTES + (64 << 20), strict=True)


class _OciManifest(BaseModel):
    """Schema of the registry's manifest, as far as it is read."""

    layers: Annotated[list[_Layer], Field(max_length=64)]


def registry_digest(reference: Reference) -> str:
    """Digest of the layer that a reference means now."""
    return _layer(reference).digest


def fetch_from_registry(reference: Reference, digest: str, folder: Path) -> None:
    """Write the bundle of a layer into an empty folder. Raises UserError when the registry cannot give it."""
    layer = _layer(reference)
    if layer.digest != digest:
        raise UserError(f"{reference.text}: it changed while it was fetched; pull again")
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        archive = Path(temporary) / f"bundle{ARCHIVE_SUFFIX}"
        with _registry_errors(reference):
            client = _client(reference)
            with client.get_blob(_target(reference), digest, stream=True) as response:
                response.raise_for_status()
                _save(response.iter_content(_CHUNK), layer, archive, reference)
        unpack(archive, folder)


def push_to_registry(folder: Path, reference: Reference, annotations: dict[str, str]) -> str:
    """Upload a bundle as one layer; returns the layer's digest."""
    if reference.revision is not None and reference.revision.startswith("sha256:"):
        raise UserError(f"{reference.text}: a digest cannot be pushed to; give oci://host/name:tag")
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / f"bundle{ARCHIVE_SUFFIX}"
        pack(folder, archive)
        with _registry_errors(reference):
            _client(reference).push(
                target=_target(reference),
                files=[f"{archive}:{MEDIA_TYPE}"],
                manifest_annotations=annotations,
                disable_path_validation=True,
                quiet=True,
            )
        return f"sha256:{sha256_file(archive)}"


def _layer(reference: Reference) -> _Layer:
    """The one layer of a bundle's media type."""
    with _registry_errors(reference):
        client = _client(reference)
        container = client.get_container(_target(reference))
        client.auth.load_configs(container)
        url = f"{client.prefix}://{container.manifest_url()}"
        with client.do_request(url, "GET", headers={"Accept": OCI_MANIFEST}, stream=True) as response:
            response.raise_for_status()
            content = response.raw.read(MAX_MANIFEST_BYTES + 1, decode_content=True)
        if len(content) > MAX_MANIFEST_BYTES:
            raise ValueError("its manifest is too large")
        pinned = container.digest
        if pinned and f"sha256:{hashlib.sha256(content).hexdigest()}" != pinned:
            raise ValueError("its manifest has another digest")
    try:
        manifest = _OciManifest.model_validate(json.loads(content))
    except ValidationError as error:
        raise UserError(f"{reference.text}: no bundle ({first_problem(error)}); check the name") from None
    except (ValueError, RecursionError):
        raise UserError(f"{reference.text}: no bundle (its manifest is no JSON); check the name") from None
    layers = [layer for layer in manifest.layers if layer.mediaType == MEDIA_TYPE]
    if len(layers) != 1:
        raise UserError(f"{reference.text}: no bundle (no layer of type {MEDIA_TYPE}); check the name")
    return layers[0]


def _save(chunks: Iterator[bytes], layer: _Layer, path: Path, reference: Reference) -> None:
    """Write a layer's content, of the size and digest that the manifest says."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for chunk in chunks:
            size += len(chunk)
            if size > layer.size:
                break
            digest.update(chunk)
            file.write(chunk)
    if size != layer.size:
        raise UserError(f"{reference.text}: the registry sent other than {layer.size} bytes; pull again")
    if (got := f"sha256:{digest.hexdigest()}") != layer.digest:
        raise UserError(f"{reference.text}: expected {layer.digest[:19]}…, the registry sent {got[:19]}…; pull again")


def _client(reference: Reference) -> Any:
    """A client of the reference's registry, by plain HTTP for one on this machine."""
    if find_spec("oras") is None:
        raise UserError(f"{reference.text}: this needs oras; install it with pip install '.[share]' in a clone")
    from oras.client import OrasClient

    host = reference.name.partition("/")[0]
    insecure = is_local(host.partition(":")[0])
    if not reachable(f"{'http' if insecure else 'https'}://{host}"):
        raise UserError(f"{reference.text}: no connection to {host}; check the name and the network")
    return OrasClient(hostname=host, insecure=insecure)


def _target(reference: Reference) -> str:
    revision = reference.revision or "latest"
    host, _, name = reference.name.partition("/")
    if not set(".:") & set(host):  # else oras takes the host for a part of the name
        host += ":80" if is_local(host) else ":443"
    return f"{host}/{name}{'@' if revision.startswith('sha256:') else ':'}{revision}"
