"""Where a compile keeps its finished stages, so that one that was killed can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssd_artifacts.files import write_atomically
from ssd_compiler.settings import CompileSettings
from ssd_profiles.errors import UserError


class Workspace:
    """A folder beside the bundle-to-be with one JSON file a finished stage; gone when the bundle is written."""

    def __init__(self, out: Path, settings: CompileSettings, model_key: str, resume: bool) -> None:
        """Begin afresh, or with `resume` where an earlier compile of the same settings and model stopped.

        Raises UserError when there is something to resume, but of other settings.
        """
        self.folder = out.parent / f".{out.name}.compile"
        identity = json.dumps([settings.key(), model_key])
        begun = self.folder / "identity.json"
        if resume and begun.is_file() and begun.read_text() != identity:
            raise UserError(
                f"{self.folder}: was begun with another model or other options; repeat those, "
                "or leave --resume away to begin afresh"
            )
        if not resume:
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
