"""Fixtures of tests that run our own C code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from ssd_runtime.weights.native.library import Library, library

AVX2 = "avx2-"


@pytest.fixture
def threads() -> Iterator[None]:
    """Torch's number of threads is what it was, after a test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _without_avx512() -> Library:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_NATIVE", "avx2")
        found = library.__wrapped__()
    assert found.instructions == AVX2
    return found


@pytest.fixture(params=["1", "avx2"], ids=["best instructions", "AVX2"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The code for this processor; and that for processors without AVX-512, if this one has it."""
    best = library()
    if best is None:
        pytest.skip("needs AVX2 and a C compiler")
    if request.param == "1":
        return best
    if best.instructions == AVX2:
        pytest.skip("this processor's best instructions are AVX2")
    plain = _without_avx512()
    monkeypatch.setattr("ssd_runtime.weights.kernels.native.library", lambda: plain)
    return plain
