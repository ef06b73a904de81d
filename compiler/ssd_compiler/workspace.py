"""The folder where a compile keeps finished stages, so that a killed compile can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from filelock import FileLock, Timeout

from ssd_artifacts.files import clear_leftovers, write_atomically, write_lock
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import tool_version
from ssd_compiler.settings import CompileSettings
from ssd_profiles.errors import UserError

IDENTITY = "identity.json"
"""File that records the model, options and version of the stages."""
LOCK = ".lock"
"""File that the running compile has locked. It is beside the stages, since compiles may differ in their caches."""
STAGES = 8
"""Version of the stages' results. It is raised whenever a stage stores something else."""


class Store(Protocol):
    """Keeps results of stages."""

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the stored JSON result of a finished stage, or compute and store it."""
        ...

    def file(self, name: str, compute: Callable[[], bytes]) -> Path:
        """Return the path of a stored file, or compute its bytes and store them."""
        ...


def stages_folder(out: Path) -> Path:
    """The folder of the stages of a compile into the absolute path `out`; it is there while something is kept."""
    return out.parent / f".{out.name}.compile"


class NotFinished(Exception):  # noqa: N818 - an answer: somebody has to run the stage
    """A stage has no stored result."""


class Workspace:
    """A folder beside the bundle-to-be with one JSON file per finished stage.

    It is a context manager that excludes other compiles into the same bundle, and deletes the folder unless an error
    ends the block after some stage.
    """

    def __init__(self, out: Path, settings: CompileSettings, resume: bool) -> None:
        """Prepare the workspace of a compile into the absolute path `out`."""
        self.folder = stages_folder(out)
        self._out = out
        self._settings = settings
        self._resume = resume
        self._lock = FileLock(self.folder / LOCK)

    def __enter__(self) -> Workspace:
        """Lock the workspace. Raises UserError when another compile into the same bundle is running."""
        self.folder.mkdir(parents=True, exist_ok=True)  # if it cannot be, that is known before the model is loaded
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self._out}: another compile is writing this bundle; wait for it or give another --out"
            ) from None
        with write_lock(self._out):
            clear_leftovers(self._out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self.kept:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def begin(self, model: ModelFingerprint) -> bool:
        """Start afresh, or with `resume` where an earlier compile stopped; returns whether there was one.

        Raises UserError when the earlier compile had other settings or another model.
        """
        identity = json.dumps([tool_version(), STAGES, self._settings.key(), model.model_dump()])
        begun = self.folder / IDENTITY
        if self._resume and begun.is_file():
            if begun.read_text(encoding="utf-8") != identity:
                raise UserError(
                    f"{self.folder}: was begun with another model, other options or prompts, or another version; "
                    "repeat those, or omit --resume to begin afresh"
                )
            return True
        for path in self.folder.glob("*"):
            if path.name != LOCK:
                path.unlink()
        write_atomically(begun, identity)
        return False

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the stored JSON result of a finished stage, or compute and store it."""
        try:
            return self.finished(name)
        except NotFinished:
            result = compute()
            self.keep(name, result)
            return result

    def finished(self, name: str) -> Any:
        """Return the stored result of a stage. Raises NotFinished if there is none that is whole."""
        try:
            return json.loads((self.folder / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValueError):  # a power cut may leave half a file
            raise NotFinished(name) from None

    def keep(self, name: str, result: Any) -> None:
        """Store the JSON result of a stage."""
        write_atomically(self.folder / f"{name}.json", json.dumps(result))

    def file(self, name: str, compute: Callable[[], bytes]) -> Path:
        """Return the path of a stored file, or compute its bytes and store them."""
        path = self.folder / name
        if not path.is_file():
            write_atomically(path, compute())
        return path

    @property
    def kept(self) -> int:
        """Number of files that finished stages have stored."""
        return sum(path.name != IDENTITY for path in self.folder.glob("[!.]*"))
