"""The schema of a bundle's manifest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ssd_artifacts.fingerprint import ModelFingerprint

FORMAT_VERSION = 1
MAX_DOMAINS = 256
"""Upper bound for domains. A compile finds at most 64, and further domains may join."""


def tool_version() -> str:
    """Version of the installed package, or `unknown` when it runs from a source tree that is not installed."""
    try:
        return version("ssd-decoding")
    except PackageNotFoundError:
        return "unknown"


class FileEntry(BaseModel):
    """Hash and size of one file of a bundle."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or not name.isprintable():
        raise ValueError("expected the path of a file inside the bundle")
    return name


def _distinct(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("expected each domain once")
    return names


class Manifest(BaseModel):
    """Schema of `manifest.yaml`: which model and tool the bundle is of, and which files it has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    tool_version: str
    created: str
    model: ModelFingerprint
    domains: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,79}$")]],
        Field(max_length=MAX_DOMAINS),
        AfterValidator(_distinct),
    ]
    files: dict[Annotated[str, AfterValidator(_inside)], FileEntry]
