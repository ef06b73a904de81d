"""The C code that is compiled for this machine already, which takes ten seconds, in caches of tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from ssd_artifacts.files import cache_folder


def seeded(cache: Path) -> str:
    """Give a folder the compiled code of the present cache; returns it as text for `SSD_CACHE`.

    A process with an empty cache compiles for itself.
    """
    from ssd_runtime.devices.device import processor_flags  # these import torch, which not all tests need
    from ssd_runtime.weights.native.forms import FLAGS, library_name

    name = library_name("sublayers", (*FLAGS, "-march=native"), sorted(processor_flags()))
    known, kept = cache_folder() / "native" / name, cache / "native"
    if known.is_file() and not (kept / name).exists():
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(known, kept / name)
    return str(cache)
