"""The bundles that are installed with the package."""

from __future__ import annotations

from pathlib import Path

from ssd_artifacts.manifest import MANIFEST

REFERENCE = "demo"


def bundle_path(artifact: Path) -> Path:
    """Resolve `--artifact`: a folder of the user's, or for `demo` the packaged bundle of the demo model.

    A bundle of the user's own in a folder named `demo` takes precedence.
    """
    return Path(__file__).parent / "reference" / REFERENCE if is_packaged(artifact) else artifact


def is_packaged(artifact: str | Path | None) -> bool:
    """Whether `--artifact` means the packaged bundle."""
    return str(artifact) == REFERENCE and not (Path(REFERENCE) / MANIFEST).exists()
