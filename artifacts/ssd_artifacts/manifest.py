"""The schema of a bundle's manifest."""

from __future__ import annotations

import re
import unicodedata
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_profiles.printable import Printable

FORMAT_VERSION = 2
"""The newest format. A bundle is written in the oldest that holds it, so that earlier versions can read it."""
FIRST_FORMAT = 1
"""Format of bundles without light sub-layers, in masks or latency tables."""
MANIFEST = "manifest.yaml"
ARCHIVE_SUFFIX = ".ssd.tar"
MAX_DOMAINS = 256
"""Upper bound for domains. A compile finds at most 64, and further domains may join."""
MAX_TABLES = 256
"""Upper bound for latency tables, one for each device that a bundle was measured on."""
MAX_BUNDLE_BYTES = 8 << 30
"""Upper bound for all files together. Exit heads are nearly all of it: eight of a hidden size of 16k take 4 GiB."""
MAX_TEXTS_BYTES = 64 << 20
"""Upper bound for all text files together, which take seconds per MiB to read and check."""
DOMAIN_NAME = "[a-z0-9][a-z0-9_-]{0,79}"
REPORT, REPORT_PAGE = "report.json", "report.html"
FILE_NAMES = re.compile(
    rf"(anchors|exits|followers)\.safetensors|report\.(json|html)|domains/{DOMAIN_NAME}\.yaml|latency/[\w-]{{1,64}}\.json"
)
"""Every file that a manifest may list: no code, no pickle and no path out of the folder can be among them."""


def tool_version() -> str:
    """Version of the installed package, or `unknown` when it runs from a source tree that is not installed."""
    try:
        return version("ssd-decoding")
    except PackageNotFoundError:
        return "unknown"


class FileEntry(BaseModel, extra="forbid", frozen=True):
    """Hash and size of one file of a bundle."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    bytes: int = Field(ge=0)


def _known(name: str) -> str:
    if not FILE_NAMES.fullmatch(name):
        raise ValueError("no name of a file inside the bundle: expected tensors, a domain, a latency table or a report")
    return name


def _bounded(files: dict[str, FileEntry]) -> dict[str, FileEntry]:
    """Raise ValueError if names differ only by case, or if there are too many tables or bytes."""
    if len({unicodedata.normalize("NFKC", name).casefold() for name in files}) < len(files):
        raise ValueError("expected names that differ by more than upper and lower case")
    if sum(name.startswith("latency/") for name in files) > MAX_TABLES:
        raise ValueError(f"expected at most {MAX_TABLES} latency tables")
    if sum(entry.bytes for entry in files.values()) > MAX_BUNDLE_BYTES:
        raise ValueError(f"expected at most {MAX_BUNDLE_BYTES >> 30} GiB in all")
    if sum(entry.bytes for name, entry in files.items() if not name.endswith(".safetensors")) > MAX_TEXTS_BYTES:
        raise ValueError(f"expected at most {MAX_TEXTS_BYTES >> 20} MiB of text files")
    return files


def _distinct(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("expected each domain once")
    return names


class Manifest(BaseModel, extra="forbid", frozen=True):
    """Schema of `manifest.yaml`: the bundle's model, the tool that wrote it, and its files."""

    format_version: int
    tool_version: Printable
    created: Printable
    model: ModelFingerprint
    domains: Annotated[
        list[Annotated[str, Field(pattern=f"^{DOMAIN_NAME}$")]],
        Field(max_length=MAX_DOMAINS),
        AfterValidator(_distinct),
    ]
    files: Annotated[dict[Annotated[str, AfterValidator(_known)], FileEntry], AfterValidator(_bounded)]
