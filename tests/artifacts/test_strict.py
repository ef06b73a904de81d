"""Numbers in a bundle's files are numbers: no boolean, no text, and no fraction for a whole one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.manifest import MANIFEST, Manifest
from ssd_artifacts.texts import read_yaml, validated
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from tests.bundles import LAYERS, bundle
from tests.mutations import slots
from tests.tables import latency_table, with_light_costs


def assert_strict(data: Any, read: Callable[[Any], object]) -> None:
    """No number of the data may be anything else."""
    read(data)
    places = [place for place, (part, key) in enumerate(slots(data)) if type(part[key]) in (int, float)]
    assert places
    for place in places:
        part, key = list(slots(data))[place]
        for other in (True, "1", *([1.5] if isinstance(part[key], int) else [])):
            changed = copy.deepcopy(data)
            part, key = list(slots(changed))[place]
            part[key] = other
            with pytest.raises((UserError, ValueError)):
                read(changed)
                pytest.fail(f"{key}: {other!r} was taken for a number")


def test_texts(tmp_path: Path) -> None:
    bundle().save(tmp_path)
    for name, kind in ((MANIFEST, Manifest), ("domains/one.yaml", DomainConfig)):
        path = tmp_path / name
        assert_strict(read_yaml(path), lambda data, path=path, kind=kind: validated(path, data, kind))


def test_latency_tables() -> None:
    table = with_light_costs(latency_table(LAYERS), 0.5, (8, 4))
    assert_strict(json.loads(table.to_json()), lambda data: LatencyTable.from_json(json.dumps(data)))
