"""Where a compile keeps its finished stages, so that one that was killed can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from ssd_artifacts.files import clear_leftovers, write_atomically
from ssd_compiler.settings import CompileSettings
from ssd_profiles.errors import UserError


class Workspace:
    """A folder beside the bundle-to-be with one JSON file a finished stage; gone when the bundle is written.

    A context manager that only one compile into the same bundle can be in.
    """

    def __init__(self, out: Path, settings: CompileSettings, resume: bool) -> None:
        """Raises UserError when another compile into `out` is running."""
        self.folder = out.parent / f".{out.name}.compile"
        self._out, self._settings, self._resume = out, settings, resume
        self._lock = FileLock(out.parent / f".{out.name}.lock")

    def __enter__(self) -> Workspace:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self._out}: another compile is writing this bundle; wait for it or give another --out"
            ) from None
        clear_leftovers(self._out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def begin(self, model_key: str) -> None:
        """Begin afresh, or where an earlier compile of the same settings and model stopped.

        Raises UserError when there is something to resume, but of other settings.
        """
        identity = json.dumps([self._settings.key(), model_key])
        begun = self.folder / "identity.json"
        if self._resume and begun.is_file() and begun.read_text() != identity:
            raise UserError(
                f"{self.folder}: was begun with another model or other options; repeat those, "
                "or leave --resume away to begin afresh"
            )
        if not self._resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        write_atomically(begun, identity)

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a finished stage, or that of `compute`, kept. Results are plain JSON."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        result = compute()
        write_atomically(path, json.dumps(result))
        return result

    def remove(self) -> None:
        """Delete the folder: the bundle is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
