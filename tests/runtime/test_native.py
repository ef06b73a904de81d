"""Our own products with quantised weights: what they compute, and that a row's result depends on that row alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from ssd_profiles.errors import UserError
from ssd_runtime.weights.kernels.huge_pages import HugePages
from ssd_runtime.weights.kernels.native import GROUP
from ssd_runtime.weights.native import forms
from ssd_runtime.weights.native import library as native
from ssd_runtime.weights.native.forms import FORMS
from ssd_runtime.weights.native.library import library
from tests.native_blocks import silu_mlp
from tests.native_weights import native4, native8, weight8

pytestmark = pytest.mark.usefixtures("threads")
needs_native = pytest.mark.usefixtures("instructions")


@needs_native
@pytest.mark.parametrize("row", [-127, 127])
@pytest.mark.parametrize(("level", "bits"), [(-128, 8), (-127, 8), (127, 8), (15, 4)])
def test_the_largest_levels_do_not_overflow(level: int, bits: int, row: int) -> None:
    """Sums of 16 bits hold the products of a group, if barely."""
    ones = torch.ones(16, 1)
    levels = torch.full((16, GROUP), level, dtype=torch.int8 if bits == 8 else torch.uint8)
    kernel = native8(levels, ones) if bits == 8 else native4(levels, ones, 0 * ones)
    x = torch.full((3, GROUP), float(row))
    assert torch.equal(kernel(x), torch.full((3, 16), float(GROUP * level * row)))


@needs_native
def test_torchs_default_dtype_is_another_threads_business() -> None:
    """It is the process's, and transformers sets it while it loads a model: our code writes floats all the same."""
    torch.manual_seed(1)
    whole, _ = weight8(192, 64)
    down, _ = weight8(64, 96)
    x = torch.randn(40, 64)
    expected = [whole.fused(x, None, None), silu_mlp(whole, down)(x, None)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [whole.fused(x, None, None), silu_mlp(whole, down)(x, None)]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(expected, found, strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one, other)


@needs_native
@pytest.mark.parametrize("value", [-1e4, -87.5, -20.0, -1.0, -1e-3, 0.0, 0.5, 3.0, 80.0, 1e4])
def test_silu_holds_for_inputs_of_all_sizes(value: float) -> None:
    """The gates are the first column and the ups the 33rd, which has a scale of its own."""
    gates_and_ups = torch.zeros(64, 64, dtype=torch.int8)
    gates_and_ups[:32, 0] = 1
    gates_and_ups[32:, 32] = 1
    whole = native8(gates_and_ups, torch.ones(64, 2))
    down = native8(torch.eye(64, 32).to(torch.int8), torch.ones(64, 1))
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 32] = value, 1.0
    got = silu_mlp(whole, down)(x, None)[0, :32]
    expected = silu(torch.full((32,), value))
    torch.testing.assert_close(got[1:], expected[1:], rtol=1e-5, atol=1e-30)


@needs_native
def test_a_draft_reads_its_weights_memory_and_runs_where_it_does() -> None:
    kernel, _ = weight8(32, 64)
    for own in (True, False):
        assert kernel.draft is not None
        kernel.own_threads = own
        assert kernel.draft.own_threads == own
    kernel.move(HugePages())
    x = torch.randn(3, 64)
    assert kernel.draft(x).any()
    kernel._blocks.zero_()
    assert not kernel.draft(x).any()


@pytest.mark.parametrize("compiler", ["", "false", "gcc -D__clang__"], ids=["none", "a failing one", "no GCC"])
def test_without_a_compiler_there_is_no_library(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor a word of a compile."""
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(forms, "COMPILERS", ())
    assert library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))
    assert capsys.readouterr().err == ""


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NATIVE", "0")
    assert library.__wrapped__() is None


@pytest.mark.parametrize(
    ("flags", "setting", "compiled", "told"),
    [
        (FORMS["avx2"].needed, "1", False, True),
        (FORMS["neon"].needed, "1", False, True),
        (FORMS["avx2"].needed, "1", True, False),
        (FORMS["avx2"].needed, "0", False, False),
        (FORMS["neon"].needed, "avx2", False, False),
        (frozenset({"avx2"}), "1", False, False),
    ],
    ids=["no compiler", "no compiler on Arm", "compiled", "switched off", "AVX2 alone on Arm", "no instructions"],
)
def test_a_missing_compiler_is_told_only_where_one_would_help(
    monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], setting: str, compiled: bool, told: bool
) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: flags)
    monkeypatch.setattr(native, "library", lambda: SimpleNamespace(note=None) if compiled else None)
    monkeypatch.setenv("SSD_NATIVE", setting)
    note = native.missing_note()
    assert (note is not None) == told
    assert note is None or "gcc" in note


def test_an_unknown_setting_of_the_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_NATIVE", "sse")
    with pytest.raises(UserError, match="SSD_NATIVE: expected 0, avx2 or avxvnni, got 'sse'"):
        native.wanted()
