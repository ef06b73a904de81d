"""References to bundles: the values of `--artifact`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ssd_artifacts.manifest import ARCHIVE_SUFFIX
from ssd_profiles.errors import UserError, first_line

HUB, REGISTRY = "hf://", "oci://"
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_REGISTRY_NAME = re.compile(
    r"(?P<host>[\w.-]+(:\d{1,5})?)/(?P<name>[a-z0-9][a-z0-9._/-]*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A bundle's place: a folder, an archive, a Hub repository or a repository of an OCI registry."""

    text: str
    """The reference as the user gave it."""
    kind: Literal["folder", "archive", "hub", "registry"]
    name: str
    """A path, the Hub's `org/name`, or the registry's `host/name`."""
    revision: str | None = None
    """The Hub's branch, tag or commit; the registry's tag or digest."""

    @property
    def is_remote(self) -> bool:
        """Whether the bundle has to be fetched over a network."""
        return self.kind in ("hub", "registry")

    @property
    def path(self) -> Path:
        """The path of a folder or an archive."""
        return Path(self.name)


def read_reference(text: str) -> Reference:
    """Parse `--artifact`. Raises UserError when it is neither a path nor a reference that is complete."""
    if text.startswith(HUB):
        found = _HUB_NAME.fullmatch(text.removeprefix(HUB))
        if not found or ".." in text:
            raise UserError(f"{text}: no reference to the Hub; give hf://org/name or hf://org/name@revision")
        return Reference(text, "hub", found["name"], found["revision"])
    if text.startswith(REGISTRY):
        found = _REGISTRY_NAME.fullmatch(text.removeprefix(REGISTRY))
        if not found or ".." in text:
            raise UserError(f"{text}: no reference to a registry; give oci://host/name:tag or oci://host/name@sha256:…")
        return Reference(text, "registry", f"{found['host']}/{found['name']}", found["digest"] or found["tag"])
    if "://" in text:
        raise UserError(f"{text}: unknown kind of reference; give a folder, an archive, hf://… or oci://…")
    path = Path(text)
    is_archive = path.is_file() or text.endswith(ARCHIVE_SUFFIX)
    return Reference(text, "archive" if is_archive else "folder", text)


@contextmanager
def client_errors(reference: Reference, host: str, check: str) -> Iterator[None]:
    """Turn whatever a client of `host` raises into one line that says what to check."""
    try:
        yield
    except UserError:
        raise
    # Clients raise OSErrors, errors of their own, ValueErrors, and KeyErrors where an answer lacks what they expect.
    except Exception as error:
        raise UserError(
            f"{reference.text}: {host} cannot give or take it ({first_line(error)}); check {check}"
        ) from None
