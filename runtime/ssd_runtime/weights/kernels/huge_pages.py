"""Memory for weights in huge pages.

A step reads every weight once. In pages of 4 KiB the processor must look up an address every 4 KiB and stops fetching
ahead there; in pages of 2 MiB it does neither. The MLPs of a step took a tenth less time so, on one processor. Many
systems give such pages only to those who ask.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

PAGE = 2 << 20
"""Bytes of a huge page."""
LINE = 64
"""Bytes of a cache line, at which every weight begins."""
LEAST = 32 * PAGE
"""Bytes that are asked for at a time, at least; only those that are written to take memory."""


class HugePages:
    """Memory that weights take one behind the other, since small ones would not fill a page. Threads may share it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = Lock()

    def take(self, count: int) -> Tensor:
        """New memory [count], uint8. Where the system has no huge pages, or too few, it is memory like any other."""
        with self._lock:
            if count > len(self._left):
                try:
                    self._left = _mapped(max(count, LEAST))
                except OSError:
                    return torch.empty(count, dtype=torch.uint8)
            taken, self._left = self._left[:count], self._left[-(-count // LINE) * LINE :]
        return taken


def _mapped(count: int) -> Tensor:
    """New memory [count] that begins at a huge page, uint8. It lasts as long as any part of it is in use."""
    memory = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # no Linux, or an old one
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:count]
