"""The bundle's table of contents."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pydantic import BaseModel, ConfigDict, Field

from ssd_artifacts.fingerprint import ModelFingerprint

FORMAT_VERSION = 1


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


class Manifest(BaseModel):
    """`manifest.yaml`: what the bundle was made for, by what, and which files it consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: int
    tool_version: str
    created: str
    model: ModelFingerprint
    domains: list[str]
    files: dict[str, FileEntry]
