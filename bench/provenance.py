"""Of which state of the repository a figure is."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit that is checked out, with a + where files but documents differ from it; None outside a repository."""
    found = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
    return f"{found}+" if found and changed else found or None


def _git(*arguments: str) -> str:
    """What git says, without blanks at the ends; nothing where there is no git or no repository."""
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
