"""The bundles that come with the package."""

from __future__ import annotations

from pathlib import Path

REFERENCE = "demo"


def bundle_path(artifact: Path) -> Path:
    """Where `--artifact` points to: a folder of the user's, or for `demo` the reference bundle of the demo model."""
    return Path(__file__).parent / "reference" / REFERENCE if str(artifact) == REFERENCE else artifact
