"""A file's types of weights are multiplied as they are: the same numbers, in as many bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from ssd_runtime.weights.gguf.blocks import dense
from ssd_runtime.weights.gguf.kernels import LARGEST_EXPONENT, OWN, kernel_of
from ssd_runtime.weights.kernels.formats import FORMATS, GROUP, Q3_K, SIXTEEN
from ssd_runtime.weights.kernels.int4 import quantised4
from ssd_runtime.weights.kernels.native import Native, rounded
from ssd_runtime.weights.native.library import library
from tests.gguf_files import random_blocks

KINDS = [kind for kind in Type if kind.name in OWN]
NUMBERS = (Type.BF16, Type.F16)
OUT, COLUMNS = 48, 768
ROUNDING = 3e-7
"""Relative to the sum of magnitudes: products and sums are in fp32."""
pytestmark = pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")


def kernel_and_weight(kind: Type) -> tuple[Native, torch.Tensor]:
    data = random_blocks(kind, OUT, COLUMNS)
    return native(data, kind), weight_of(data, kind)


def native(data: NDArray[Any], kind: Type, bias: torch.Tensor | None = None) -> Native:
    found = kernel_of([(data, kind)], kind.name, bias)
    assert isinstance(found, Native)
    return found


def weight_of(data: NDArray[np.uint8], kind: Type) -> torch.Tensor:
    return torch.from_numpy(np.array(dequantize(data, kind))).double()


def quantised_rows(x: torch.Tensor, kind: Type) -> torch.Tensor:
    """Rows as the code rounds them for quantised weights: 8 bits, and a scale per group."""
    if kind in NUMBERS:
        return x.double()
    groups = x.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups * (1 / scale)).round() * scale).flatten(1).double()


def test_every_format_serves_a_type_of_files() -> None:
    assert {kind.name for kind in KINDS} == {kept.name for kept in FORMATS}
    numbers = [kept.number for kept in FORMATS] + [kept.draft for kept in FORMATS if kept.draft is not None]
    assert numbers == list(range(len(numbers)))


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_product_is_that_of_the_dequantised_weight_with_rounded_rows(kind: Type) -> None:
    torch.manual_seed(0)
    kernel, weight = kernel_and_weight(kind)
    for rows in (1, 2, 7, 8, 9, 15, 16, 17, 40):
        x = torch.randn(rows, COLUMNS)
        got = kernel(x)
        exact, magnitude = quantised_rows(x, kind) @ weight.T, quantised_rows(x, kind).abs() @ weight.abs().T
        assert ((got - exact).abs() <= ROUNDING * magnitude).all()
        for row in (0, rows - 1):
            assert torch.equal(kernel(x[row : row + 1])[0], got[row]), "a row has the same bits beside others"


CENTRES = {
    Type.Q4_0: [(slice(2, 18), 0x88)],
    Type.Q5_0: [(slice(2, 6), 0xFF), (slice(6, 22), 0)],
    Type.Q8_0: [(slice(2, 34), 0)],
    Type.Q3_K: [(slice(0, 32), 0xFF), (slice(32, 96), 0)],
    Type.Q6_K: [(slice(0, 128), 0), (slice(128, 192), 0xAA)],
    Type.MXFP4: [(slice(1, 17), 0)],
}
"""Bytes of a block of weights that are all 0 whatever their scales."""


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("kind", CENTRES, ids=lambda kind: kind.name)
def test_weights_of_zero_make_products_of_exactly_zero(kind: Type) -> None:
    """Levels count from their centre in sums of integers, which round nothing."""
    torch.manual_seed(5)
    data = random_blocks(kind, OUT, COLUMNS)
    blocks = data.reshape(OUT, -1, GGML_QUANT_SIZES[kind][1])
    for place, byte in CENTRES[kind]:
        blocks[..., place] = byte
    data = blocks.reshape(OUT, -1)
    assert not weight_of(data, kind).any()
    for rows in (1, 5, 16):
        assert not native(data, kind)(torch.randn(rows, COLUMNS)).any()


LOW_BITS = {Type.Q8_0: (slice(2, 34), 0x0F), Type.Q6_K: (slice(0, 128), 0x33)}
"""The bytes of a block that hold the bits which drafts do not read, and which bits of these bytes that are."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in LOW_BITS], ids=lambda kind: kind.name)
def test_a_draft_multiplies_by_the_mean_of_all_weights_with_the_same_high_bits(kind: Type) -> None:
    torch.manual_seed(0)
    data, (places, bits) = random_blocks(kind, OUT, COLUMNS), LOW_BITS[kind]
    ends = []
    for low in (0, bits):
        blocks = data.reshape(OUT, -1, GGML_QUANT_SIZES[kind][1]).copy()
        blocks[..., places] = blocks[..., places] & ~np.uint8(bits) | np.uint8(low)
        ends.append(blocks.reshape(OUT, -1))
    weight = (weight_of(ends[0], kind) + weight_of(ends[1], kind)) / 2
    drafts = [native(each, kind).draft for each in (data, *ends)]
    for rows in (1, 3, 8, 17):
        x = torch.randn(rows, COLUMNS)
        exact, magnitude = quantised_rows(x, kind) @ weight.T, quantised_rows(x, kind).abs() @ weight.abs().T
        for draft in drafts:
            assert draft is not None
            assert ((draft(x) - exact).abs() <= ROUNDING * magnitude).all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_weight_takes_the_bytes_that_it_has_in_the_file(kind: Type) -> None:
    columns, size = GGML_QUANT_SIZES[kind]
    kept = OWN[kind.name]
    of_file = 8 * size / columns
    assert of_file <= kept.bits <= of_file * (1.04 if kept is Q3_K else 1.0)
    assert kernel_and_weight(kind)[0].nbytes == OUT * COLUMNS * kept.bits / 8


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_outputs_that_fill_no_tile_are_those_of_a_weight_with_more(kind: Type) -> None:
    torch.manual_seed(0)
    data, bias = random_blocks(kind, OUT, COLUMNS), torch.randn(OUT)
    whole = native(data, kind, bias)
    x, residual = torch.randn(9, COLUMNS), torch.randn(9, OUT)
    for out in (1, OUT - 15, OUT - 1):
        part = native(data[:out], kind, bias[:out])
        assert part.out_features == out
        for rows in (1, 9):
            assert torch.equal(part(x[:rows]), whole(x[:rows])[:, :out])
        assert torch.equal(part.fused(x, None, residual[:, :out]), whole.fused(x, None, residual)[:, :out])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parts_of_a_weight_are_ordered_as_the_whole_is(kind: Type) -> None:
    """Also where they lie apart in the file, or have a single block."""
    data = random_blocks(kind, 39, max(GROUP, GGML_QUANT_SIZES[kind][0]))
    apart = np.repeat(data, 2, axis=0)[::2]
    parts = kernel_of([(apart[:16], kind), (data[16:32], kind), (data[32:], kind)], kind.name, None)
    x = torch.randn(3, parts.in_features)
    assert torch.equal(parts(x), native(data, kind)(x))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_block_is_read_or_written_out_of_bounds(kind: Type) -> None:
    data, kept = random_blocks(kind, 17, COLUMNS), OWN[kind.name]
    found = library()
    assert found is not None
    for size, begin, columns in ((-1, 0, COLUMNS), (0, 1, COLUMNS), (0, -1, COLUMNS), (0, 0, COLUMNS + GROUP)):
        tiles = torch.zeros(kept.nbytes(17, COLUMNS) + size, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="blocks"):
            found.repack(kept.number, data, columns, tiles, begin)
        assert not tiles.any()


@pytest.mark.parametrize("out", [OUT, OUT - 7])
@pytest.mark.parametrize("dtype", list(SIXTEEN))
def test_a_weight_of_16_bits_is_kept_to_the_bit(dtype: torch.dtype, out: int) -> None:
    weight = torch.randn(out, COLUMNS).to(dtype)
    bias = torch.randn(out)
    kernel = Native.of16(weight, bias)
    assert torch.equal(kernel.numbers, weight)
    assert torch.equal(kernel(torch.eye(COLUMNS)), weight.float().T + bias), "columns of the identity are its numbers"


def test_exponents_that_no_model_has_are_refused() -> None:
    data = random_blocks(Type.MXFP4, OUT, COLUMNS)
    data.reshape(OUT, -1, 17)[..., 0] = LARGEST_EXPONENT
    expected = weight_of(data, Type.MXFP4).sum(1)
    product = native(data, Type.MXFP4)(torch.ones(1, COLUMNS))[0]
    torch.testing.assert_close(product.double(), expected)
    data.reshape(OUT, -1, 17)[-1, -1, 0] = LARGEST_EXPONENT + 1
    with pytest.raises(ValueError, match="scales above"):
        native(data, Type.MXFP4)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.F16], ids=lambda kind: kind.name)
def test_a_vector_may_be_in_blocks_too(kind: Type) -> None:
    vector = np.linspace(-1, 1, 64, dtype=np.float32)
    got = dense(quantize(vector, kind), kind)
    assert got.shape == (64,)
    assert np.allclose(got, vector, atol=0.15)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "kind", "levels"), [(4, Type.Q4_1, 15), (8, Type.Q8_0, 254)])
def test_a_weight_is_rounded_to_the_nearest_levels(bits: int, kind: Type, levels: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(19, 160) * torch.logspace(-3, 2, 19)[:, None]).to(dtype)
    weight[3, 32:64] = 0.25
    weight[4] = 0
    found = rounded(weight, bits)
    change = weight_of(found.blocks, kind) - weight.double()
    groups = weight.double().unflatten(1, (-1, GROUP))
    span = groups.amax(-1) - groups.amin(-1) if bits == 4 else 2 * groups.abs().amax(-1)
    worst = change.unflatten(1, (-1, GROUP)).abs().amax(-1)
    # Half a level, and the rounding of scales; a narrower range of 4 bits cuts at most a tenth off either end.
    assert (worst <= span * (0.5 / levels + (0.1 if bits == 4 else 1e-3)) + 1e-6).all()
    assert found.squares == pytest.approx(float(weight.double().square().sum()), rel=1e-5)
    if bits == 4:
        assert found.error == pytest.approx(float(change.square().sum()), rel=1e-4)
        assert found.error <= 1.02 * float(quantised4(weight).error.sum())
        again = rounded(weight_of(found.blocks, kind).float(), bits)
        assert again.error <= 1e-3 * found.error, "a weight on a grid stays there"
    if dtype == torch.float32:
        assert np.array_equal(rounded(weight.double(), bits).blocks, found.blocks), "fp64 is taken, too"


def test_sizes_that_do_not_agree_are_not_rounded() -> None:
    found = library()
    assert found is not None
    for bits, columns, size in ((4, 64, 41), (8, 64, 67), (5, 64, 40), (4, 48, 30)):
        with pytest.raises(RuntimeError, match=r"round|columns"):
            found.round(torch.zeros(3, columns), bits, np.zeros((3, size), np.uint8))
    with pytest.raises(RuntimeError, match="16 or 32 bits"):
        found.round(torch.zeros(3, 64, dtype=torch.float64), 4, np.zeros((3, 40), np.uint8))
