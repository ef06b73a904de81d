"""Fixtures of bundles on disk and in a registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import bundle


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved bundle, which a test may change."""
    bundle().save(tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a registry."""
    from tests.registry import running_registry

    with running_registry(tmp_path_factory.mktemp("registry")) as found:
        yield found
