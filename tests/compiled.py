"""The C code that is compiled for this machine already, which takes ten seconds, in caches of tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from ssd_artifacts.files import cache_folder
from ssd_runtime.weights.native.forms import FORMS, form_name


def seeded(cache: Path) -> str:
    """Give a folder the compiled code of the present cache; returns it as text for `SSD_CACHE`.

    A process with an empty cache compiles for itself.
    """
    kept = cache / "native"
    for name in map(form_name, FORMS):
        known = cache_folder() / "native" / name
        if known.is_file() and not (kept / name).exists():
            kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(known, kept / name)
    return str(cache)
