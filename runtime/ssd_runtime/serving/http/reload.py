"""Takes up a new bundle without a restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ssd_artifacts.sharing.opening import OpenedBundle, manifest_sha256, open_bundle
from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from ssd_runtime.serving.http.engine_thread import EngineThread, Refused
from ssd_runtime.serving.http.metrics import Metrics

log = logging.getLogger("ssd_serve")
POLL_SECONDS = 2.0
"""Seconds between two looks at a bundle's manifest."""
MOST_LOOKS = 32
"""Most looks at a refused bundle between two times that it is loaded."""


class BundleWatch:
    """Loads the bundle of a folder again when its manifest changes, or when asked.

    Loading and checking run beside decoding. A bundle that is damaged, or of another model, is refused with one line in
    the log, and requests go on with the one they have.
    """

    def __init__(self, opened: OpenedBundle, key: Path | None, thread: EngineThread, metrics: Metrics) -> None:
        """Watch the folder of the bundle in use. With `key`, another must be signed by that public key."""
        self._folder = opened.folder
        self._key = key
        self._thread = thread
        self._metrics = metrics
        self._seen = opened.manifest_sha256
        self._complaint = ""
        self._lock = asyncio.Lock()

    async def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Look at the manifest every `seconds` seconds, for ever.

        A bundle that was refused may be one that is still copied, so it is loaded again, after ever longer pauses.
        """
        refused, pause, looks = "", 0, 0
        while True:
            await asyncio.sleep(seconds)
            found = await asyncio.to_thread(manifest_sha256, self._folder)
            looks += 1
            if found == self._seen or (found == refused and looks <= pause):
                continue
            pause = min(2 * pause + 1, MOST_LOOKS) if found == refused else 1
            looks = 0
            if not await self.reload():
                refused = found

    async def reload(self) -> bool:
        """Load the bundle and take it up; returns whether it was."""
        async with self._lock:
            try:
                opened = await asyncio.to_thread(self._open)
                await asyncio.wrap_future(self._thread.use_bundle(opened.bundle))
            except (UserError, OSError, Refused) as error:
                self._refuse(printable(str(error)))
                return False
            except Exception as error:  # a defect must not end the watch in silence: the bundle in use stays
                self._refuse(printable(f"{type(error).__name__}: {error}"))
                return False
            # A folder that is still being copied is refused, and looked at again: only what was taken up is `seen`.
            self._seen = opened.manifest_sha256
            bundle = opened.bundle
            self._complaint = ""
            self._metrics.count_reload("taken_up")
            log.info("took up the bundle %s of %s: %s", self._folder, bundle.created, ", ".join(bundle.domains))
            return True

    def _refuse(self, complaint: str) -> None:
        """Say once why a bundle was not taken up."""
        if complaint != self._complaint:
            self._complaint = complaint
            self._metrics.count_reload("refused")
            log.error("the bundle was not taken up, and the one in use stays: %s", complaint)

    def _open(self) -> OpenedBundle:
        opened = open_bundle(self._folder, self._key)
        self._thread.engine.require_fitting(opened.bundle, opened.where)
        return opened
