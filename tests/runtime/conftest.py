"""Fixtures of tests that run our own C code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from ssd_runtime.devices.device import processor_flags
from ssd_runtime.weights.native.forms import FORMS
from ssd_runtime.weights.native.library import Library, library


@pytest.fixture
def threads() -> Iterator[None]:
    """Torch's number of threads is what it was, after a test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@cache
def _narrower(form: str) -> Library:
    """The code for processors without AVX-512; where AVX-VNNI is missing too, its instruction is AVX-512's."""
    with pytest.MonkeyPatch.context() as patch:
        if not processor_flags() >= FORMS[form].needed:
            patch.setitem(FORMS, form, FORMS["vnni"]._replace(flags=(*FORMS["vnni"].flags, "-DNARROW")))
        patch.setenv("SSD_NATIVE", form)
        found = library.__wrapped__()
    assert found is not None
    assert found.instructions.removesuffix("-") == form
    return found


@pytest.fixture(params=["1", "avxvnni", "avx2"], ids=["best instructions", "AVX-VNNI", "AVX2"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The code for this processor, and that for those with fewer instructions."""
    best = library()
    if best is None:
        pytest.skip("needs AVX2 and a C compiler")
    if request.param == "1":
        return best
    faster = [*FORMS][: [*FORMS].index(best.instructions.removesuffix("-")) + 1]
    if request.param in faster:
        pytest.skip("this processor has no more instructions")
    narrower = _narrower(request.param)
    monkeypatch.setattr("ssd_runtime.weights.kernels.native.library", lambda: narrower)
    return narrower
