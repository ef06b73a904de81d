"""Renders chat templates in processes that are ended when they take too long, too much, or nobody waits any more."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock
from time import monotonic
from typing import Any

START = "import sys; memory, *folders = sys.argv[1:]; sys.path += folders; import child; child.main(int(memory))"
"""The program of the processes. They skip the site's start, and so find packages by their folders."""
START_SECONDS = 60.0
"""Seconds within which a process is ready. It takes 0.1 on an idle machine."""
LOOK_SECONDS = 0.05
"""Seconds between two looks whether somebody still waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Bounds of one rendering."""

    seconds: float = 5.0
    memory_bytes: int = 384 << 20
    """Address space of a process, of which Python with Jinja takes 30 MB. A body of 4 MiB takes 100 MB at worst."""
    characters: int = 1 << 24
    """Characters that a template may write."""
    kept: int = 4
    """Most processes that wait for the next conversation, of 25 MB each."""


class TemplateRefused(Exception):  # noqa: N818 - an answer, not a failure
    """A template does not render a conversation; the message is the reason in one line."""


class TemplateLate(TemplateRefused):
    """A template took too long, which a busy machine may be the reason of."""


class RenderingStopped(Exception):  # noqa: N818 - nobody waits for an answer
    """The renderer was closed, or the caller has left."""


class TemplateRenderer:
    """Renders templates, each call in a process of its own; several threads may use it.

    Processes are kept for later calls. One that overruns is ended and replaced.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = Lock()
        self._closed = False
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        weakref.finalize(self, _end_all, self._all)

    def render(
        self, template: str, context: str, variables: Mapping[str, Any] | None = None, stop: Event | None = None
    ) -> str:
        """The text that a template writes.

        `context` is a JSON object, and `variables` are more of them. Raises TemplateRefused for every error of the
        template and every limit, and RenderingStopped soon after `stop` is set or the renderer is closed.
        """
        limits = self.limits
        header = json.dumps([template, variables or {}, limits.characters, limits.seconds])
        child = self._take()
        try:
            child.wait_until_ready(stop)
            answer = child.ask(f"[{header},{context}]", limits, stop)
        except BaseException:
            child.end()
            self._all.discard(child)
            if self._closed:
                raise RenderingStopped from None
            raise
        self._give_back(child)
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return answer["text"]

    def close(self) -> None:
        """End all processes; calls raise RenderingStopped from now on."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in list(self._all):
            child.kill()
        for child in idle:
            child.end()

    def _take(self) -> _Child:
        with self._lock:
            if self._closed:
                raise RenderingStopped
            child = self._idle.pop() if self._idle else _Child(self.limits.memory_bytes)
            self._all.add(child)
            return child

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < self.limits.kept:
                self._idle.append(child)
                return
        child.end()
        self._all.discard(child)


class _Child:
    """A process that renders one template at a time."""

    def __init__(self, memory_bytes: int) -> None:
        folders = [*{_home("jinja2"), _home("markupsafe")}, str(Path(__file__).parent)]
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", START, str(memory_bytes), *folders],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the other one
            )
        self._ready = False

    def wait_until_ready(self, stop: Event | None) -> None:
        """Wait for a new process to start. Raises RuntimeError if it does not."""
        if not self._ready:
            try:
                self._read(16, monotonic() + START_SECONDS, stop)
            except (OSError, EOFError) as error:
                raise RuntimeError("the process that renders chat templates does not start") from error
            self._ready = True

    def ask(self, request: str, limits: TemplateLimits, stop: Event | None) -> dict[str, str]:
        """The answer to a request. Raises TemplateRefused if there is none, after which the process is to be ended."""
        until = monotonic() + limits.seconds
        try:
            self._socket.settimeout(limits.seconds)
            self._socket.sendall(f"{request}\n".encode())
            # JSON takes up to 12 bytes for a character.
            line = self._read(12 * limits.characters + 1024, until, stop)
        except TimeoutError:
            raise TemplateLate(f"it takes more than {limits.seconds:g} s") from None
        except (OSError, EOFError):
            raise TemplateRefused("it takes too much time or memory, or nests too deeply") from None
        answer: dict[str, str] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process; a thread that waits for its answer wakes up."""
        self._process.kill()

    def end(self) -> None:
        """End the process and free what it takes here; no thread may wait for it."""
        self.kill()
        self._process.wait()
        self._socket.close()

    def _read(self, most: int, until: float, stop: Event | None) -> bytes:
        """The next line. Raises TimeoutError, RenderingStopped, or EOFError if the process ends or writes too much."""
        line = bytearray()
        while not line.endswith(b"\n"):
            left = until - monotonic()
            if left <= 0:
                raise TimeoutError
            if stop is not None and stop.is_set():
                raise RenderingStopped
            self._socket.settimeout(min(left, LOOK_SECONDS))
            try:
                part = self._socket.recv(1 << 18)
            except TimeoutError:
                continue
            if not part or len(line) + len(part) > most:
                raise EOFError
            line += part
        return bytes(line)


def _home(module: str) -> str:
    """The folder in which a package lies."""
    spec = find_spec(module)
    assert spec is not None, "this package depends on it"
    assert spec.origin is not None, "it is a package of files"
    return str(Path(spec.origin).parent.parent)


def _end_all(children: set[_Child]) -> None:
    for child in list(children):
        child.end()
