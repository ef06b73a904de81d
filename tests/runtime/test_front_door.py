"""What `ssd_runtime` offers, and names that were documented at other places before."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import ssd_runtime
from ssd_runtime.engine.engine import Engine

MOVED = {
    "ssd_runtime.engine": "Engine",
    "ssd_runtime.runner": "RunSettings",
    "ssd_runtime.generate": "generate",
    "ssd_runtime.models": "LoadedModel",
    "ssd_runtime.sampling": "Sampling",
    "ssd_runtime.session": "Session",
}


def test_the_front_door_needs_no_deeper_import() -> None:
    assert ssd_runtime.Engine is Engine
    assert ssd_runtime.SamplingParams(temperature=0.5).random
    assert ssd_runtime.RunSettings().strategy == "auto"
    with pytest.raises(AttributeError):
        _ = ssd_runtime.Motor
    quick = "import sys, ssd_runtime; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", quick], check=False).returncode == 0


@pytest.mark.parametrize("module", MOVED)
def test_documented_imports_still_work_with_a_note(module: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module}.{MOVED[module]} has moved: from ssd_runtime"):
        found = getattr(import_module(module), MOVED[module])
    assert found is not None
    with pytest.raises(AttributeError):
        _ = import_module(module).nothing


def test_every_moved_name_is_there() -> None:
    for module in MOVED:
        for name, place in import_module(module).PLACES.items():
            home, _, now = place.partition(":")
            assert hasattr(import_module(home), now), name
