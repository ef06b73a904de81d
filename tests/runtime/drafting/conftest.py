"""Fixtures of drafts on light copies."""

from __future__ import annotations

import pytest

from ssd_runtime.weights.kernels.native import Native


@pytest.fixture(params=[False, True], ids=["aten", "own"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether our own code serves, where this processor can run it."""
    if not request.param:
        monkeypatch.setattr(Native, "can_serve", staticmethod(lambda in_features: False))
    elif not Native.can_serve(32):
        pytest.skip("no AVX2, or no C compiler")
    return bool(request.param)
