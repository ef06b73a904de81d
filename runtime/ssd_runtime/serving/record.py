"""Appends real prompts to a file that `ssd-compile --domain-file NAME=FILE` learns from."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from time import monotonic

import regex

from ssd_profiles.errors import UserError
from ssd_profiles.prompts import is_text

REDACTED = "[redacted]"
"""The text in place of what the user's pattern matches."""
REDACTING_SECONDS = 2.0
"""Most seconds that the pattern may take for a request: some patterns take for ever on texts made for that."""


class Recorder:
    """Appends the messages of requests to a JSON-lines file, which only its owner can read.

    Several threads, and several processes, may append to one file.
    """

    def __init__(self, path: Path, share: float = 1.0, redact: regex.Pattern[str] | None = None) -> None:
        """Record a random `share` of all requests. Raises UserError if the file cannot be opened for appending."""
        self.path = path
        self.share = share
        self.redact = redact
        self.recorded = 0
        """Number of requests recorded so far."""
        self._random = random.Random()
        self._lock = RLock()
        try:
            self._file: int | None = _opened(path)
        except OSError as error:
            raise UserError(f"--record: {path} cannot be written ({error.strerror}); give another file") from None

    @property
    def notice(self) -> str:
        """One line that tells the user what is stored, and where."""
        some = "every prompt" if self.share >= 1.0 else f"{self.share:.3g} of all prompts"
        how = "" if self.redact is None else f", with {REDACTED} for what matches {self.redact.pattern!r}"
        return f"recording {some} with the messages before it, but no later answer, in {self.path}{how}"

    def add(self, messages: Sequence[tuple[str, str]], domain: str | None = None) -> bool:
        """Record a request's messages, pairs (role, content); returns whether they were.

        Requests outside the share, without text at the end, with half of a character, or on which the pattern takes too
        long are omitted. If the file cannot be written any more, one line on standard error says so and recording ends:
        requests go on.
        """
        if self._random.random() >= self.share or (line := self._line(messages, domain)) is None:
            return False
        with self._lock:
            if self._file is None:
                return False
            try:
                _append(self._file, line)
            except OSError as error:
                print(f"warning: recording in {self.path} has ended ({error.strerror})", file=sys.stderr)
                self.close()
                return False
            self.recorded += 1
            return True

    def close(self) -> None:
        """Close the file; further requests are not recorded."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _line(self, messages: Sequence[tuple[str, str]], domain: str | None) -> bytes | None:
        """The line of a request; None if a prompt file cannot hold it."""
        ends = monotonic() + REDACTING_SECONDS
        try:
            kept = [{"role": role, "content": self._redacted(content, ends)} for role, content in messages]
        except TimeoutError:
            return None
        if not kept or not kept[-1]["content"].strip():
            return None
        record = {"id": os.urandom(8).hex(), "messages": kept, **({"domain": domain} if domain is not None else {})}
        text = json.dumps(record, ensure_ascii=False) + "\n"
        return text.encode() if is_text(text) else None

    def _redacted(self, text: str, ends: float) -> str:
        if self.redact is None:
            return text
        # Other threads run meanwhile, which they do not while Python's own module matches.
        return self.redact.sub(REDACTED, text, concurrent=True, timeout=max(0.0, ends - monotonic()))


def _append(file: int, line: bytes) -> None:
    """Write a line at once, so that lines of several processes do not mix. Raises OSError, with no part of it left."""
    written = os.write(file, line)
    if written < len(line):
        end = os.lseek(file, 0, os.SEEK_CUR)
        if os.fstat(file).st_size == end:
            os.ftruncate(file, end - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _opened(path: Path) -> int:
    """Open a file for appending, readable by its owner alone, and end a line that an earlier process left open."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
        size = os.lseek(file, 0, os.SEEK_END)
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    return file
