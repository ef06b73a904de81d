"""Where a compile keeps its finished stages, so that one that was killed can go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from ssd_artifacts.files import cache_folder, clear_leftovers, write_atomically
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import tool_version
from ssd_compiler.settings import CompileSettings
from ssd_profiles.errors import UserError

IDENTITY = "identity.json"
"""Says which model, options and version the stages are of."""
STAGES = 6
"""Version of what stages keep; raised whenever one keeps something else."""


class Workspace:
    """A folder beside the bundle-to-be with one JSON file a finished stage; gone when the bundle is written.

    A context manager that only one compile into the same bundle can be in.
    """

    def __init__(self, out: Path, settings: CompileSettings, resume: bool) -> None:
        """Stages of a compile into `out`, an absolute path."""
        self.folder = out.parent / f".{out.name}.compile"
        self._out, self._settings, self._resume = out, settings, resume
        # In the cache: a lock file must stay, and beside the bundle it would be litter.
        place = hashlib.sha256(str(out).encode()).hexdigest()[:16]
        self._lock = FileLock(cache_folder() / "locks" / f"{place}.lock")

    def __enter__(self) -> Workspace:
        """Raises UserError when another compile into the same bundle is running."""
        Path(self._lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self._out}: another compile is writing this bundle; wait for it or give another --out"
            ) from None
        self._out.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self._out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not any(self._stages()):
            self.remove()
        self._lock.release()

    def begin(self, model: ModelFingerprint) -> None:
        """Begin afresh, or where an earlier compile of the same settings and model stopped.

        Raises UserError when there is something to resume, but of other settings.
        """
        identity = json.dumps([tool_version(), STAGES, self._settings.key(), model.model_dump()])
        begun = self.folder / IDENTITY
        if self._resume and begun.is_file():
            if begun.read_text(encoding="utf-8") != identity:
                raise UserError(
                    f"{self.folder}: was begun with another model, other options or another version; repeat those, "
                    "or leave --resume away to begin afresh"
                )
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        write_atomically(begun, identity)

    def stage(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a finished stage, or that of `compute`, kept. Results are plain JSON."""
        path = self.folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        result = compute()
        write_atomically(path, json.dumps(result))
        return result

    def file(self, name: str, compute: Callable[[], bytes]) -> Path:
        """A file that a finished stage has left, or that holds what `compute` gives."""
        path = self.folder / name
        if not path.is_file():
            write_atomically(path, compute())
        return path

    def remove(self) -> None:
        """Delete the folder: the bundle is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _stages(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("[!.]*") if path.name != IDENTITY)
