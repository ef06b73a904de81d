"""The C code that is compiled for this machine already, which takes ten seconds, in caches of tests."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

from ssd_artifacts.files import cache_folder
from ssd_runtime.weights.native.forms import FORMS, form_name


def seeded(folder: Path) -> str:
    """Give a cache the compiled code of the present one; returns it as text for `SSD_CACHE`.

    A process with an empty cache compiles for itself. Nobody may write to the files, which may be the present cache's.
    """
    kept = folder / "native"
    for name in _names():
        known = cache_folder() / "native" / name
        if known.is_file() and not (kept / name).exists():
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.link(known, kept / name)
            except OSError:  # another disk
                shutil.copy2(known, kept / name)
    return str(folder)


@cache
def _names() -> list[str]:
    """Names of the libraries; to hash the sources for them takes as long as a small test."""
    return [form_name(form) for form in FORMS]
