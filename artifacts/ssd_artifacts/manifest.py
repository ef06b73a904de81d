"""The bundle's table of contents."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ssd_artifacts.fingerprint import ModelFingerprint

FORMAT_VERSION = 1
MAX_DOMAINS = 256
"""A compile finds 64 at most; some more may join."""


def tool_version() -> str:
    """The installed version of this package; `unknown` where it runs from a source tree that is not installed."""
    try:
        return version("ssd-decoding")
    except PackageNotFoundError:
        return "unknown"


class FileEntry(BaseModel):
    """One file of a bundle, by content."""

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
    """`manifest.yaml`: what the bundle was made for, by what, and which files it consists of."""

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
