"""Of which state of the repository a figure is."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit that is checked out, with a + where files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude", "*", "--dirty=+"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
