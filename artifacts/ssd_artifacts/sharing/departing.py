"""A bundle as it leaves the machine: stripped and signed if asked, in a folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.sharing.archive import travelling_files
from ssd_artifacts.sharing.privacy import stripped
from ssd_artifacts.sharing.signature import sign


@contextmanager
def departing(folder: Path, strip: bool, private_key: Path | None) -> Iterator[Path]:
    """Yield a temporary folder with the bundle's files.

    `strip` leaves out the optional parts (`privacy.stripped`), which voids an earlier signature. A key signs the files.
    """
    with tempfile.TemporaryDirectory() as temporary:
        leaving = Path(temporary) / "bundle"
        if strip:
            stripped(Bundle.load(folder)).save(leaving)
        else:
            Bundle.load(folder)
            for name in travelling_files(folder):
                (leaving / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, leaving / name)
        if private_key is not None:
            sign(leaving, private_key)
        yield leaving
