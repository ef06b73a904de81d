"""The public names of `ssd_runtime`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ssd_runtime
from ssd_runtime.engine.engine import Engine


def test_the_front_door_needs_no_deeper_import() -> None:
    assert ssd_runtime.Engine is Engine
    assert ssd_runtime.SamplingParams(temperature=0.5).random
    assert ssd_runtime.RunSettings().strategy == "auto"
    with pytest.raises(AttributeError):
        _ = ssd_runtime.Motor
    quick = "import sys, ssd_runtime; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", quick], check=False).returncode == 0
