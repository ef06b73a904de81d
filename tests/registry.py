"""A registry for tests, which are skipped where its program is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.fixtures.machines import registry


@contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Yield the host and port of a registry."""
    if not registry.installed():
        pytest.skip(f"{registry.PROGRAM} is not installed (apt-get install {registry.PROGRAM})")
    with registry.running_registry(folder) as host:
        yield host
