"""Weights of `.gguf` files stay packed: what is computed is the file's model, and speculation changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.loading.draft_copies import make_copies
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import ModelRunner
from ssd_runtime.planning.plan import Plan
from ssd_runtime.profiling.latency import device_key
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.gguf.blocks import dense, levels4
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.gguf.kernels import held_bytes
from ssd_runtime.weights.kernels.int4 import Int4
from ssd_runtime.weights.kernels.int8 import Int8, quantised
from ssd_runtime.weights.native.library import library
from ssd_runtime.weights.packed_linear import PackedEmbedding, PackedLinear, whole_calls
from tests.decoding import as_plain, logits_of, strategy_of
from tests.gguf_files import quantised_pair, random_blocks
from tests.kernels import kernel_name
from tests.models import HYBRIDS, tiny_model

DENSE_HYBRIDS = [variant for variant in HYBRIDS if variant in ("lfm2", "qwen3.5", "granite-hybrid")]
"""Rounding sends rows of random mixtures to other experts."""
needs_native = pytest.mark.skipif(library() is None, reason="needs AVX2 and a C compiler")
CODES = ("native", "aten")


def blocks_of(kind: Type) -> np.ndarray:
    """48 rows of three random blocks."""
    return random_blocks(kind, 48, 3 * GGML_QUANT_SIZES[kind][0])


@pytest.fixture(params=CODES)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our own kernels, if they run here, and aten's."""
    if request.param == "aten":
        monkeypatch.setattr("ssd_runtime.weights.kernels.native.library", lambda: None)
    elif library() is None:
        pytest.skip("needs AVX2 and a C compiler")
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 2, 5, 32])
def test_a_kernels_row_is_the_same_to_the_bit_whatever_stands_beside_it(rows: int) -> None:
    torch.manual_seed(0)
    read = levels4(blocks_of(Type.Q4_1), Type.Q4_1)
    four, eight = (Int4(read.levels, read.scale, read.zero), Int8(*quantised(dense(blocks_of(Type.Q8_0), Type.Q8_0))))
    for kernel, width in ((four, read.levels.shape[1]), (eight, 96)):
        x = torch.randn(rows, width)
        other = torch.cat([x[:1], 50 * torch.randn(rows - 1, width)])
        assert torch.equal(kernel(x)[0], kernel(other)[0]), kernel.name
        assert torch.equal(kernel(x)[0], kernel(x[:1])[0]), kernel.name


FILES = [
    (variant, kind, CODES[(first + second) % 2])
    for first, variant in enumerate(("llama", "llama-biases", "qwen2", "qwen2-untied", "qwen3", *DENSE_HYBRIDS))
    for second, kind in enumerate((Type.Q4_0, Type.Q4_1, Type.Q8_0))
]
"""Every variant in files of every kind and by both codes, and every kind by both."""


@pytest.mark.parametrize(("variant", "kind", "code"), FILES, ids=str, indirect=["code"])
@torch.inference_mode()
def test_a_packed_model_is_the_files_model(variant: str, kind: Type, code: str, tmp_path: Path) -> None:
    packed, file, reference = quantised_pair(tmp_path, variant, kind)
    ids = torch.arange(1, 40)[None]
    expected, got = reference(ids).logits, packed(ids).logits
    # In bf16, the dequantised models themselves reach 0.08. Random delta nets magnify what is rounded.
    most = 0.25 if variant == "qwen3.5" else 0.12
    assert (got - expected).norm() < most * (expected - expected.mean()).norm()
    decoder = Decoder(packed)
    require_faithful(decoder)
    bits, short = (8, "8") if kind == Type.Q8_0 else (4, "4" if kind == Type.Q4_1 else kind.name)
    assert decoder.kernels == f"module {kernel_name(bits, code == 'native', short)}"
    assert bool(file.requantised) == (kind == Type.Q8_0 and code == "aten")


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.F16, Type.IQ4_NL], ids=lambda kind: kind.name)
def test_a_vocabulary_of_any_size_is_held_as_others_are(kind: Type, code: str, tmp_path: Path) -> None:
    """And in the memory that is asked for before, with our own kernels and without."""
    kernels = list[str]()
    for size in (96, 93):
        packed, file, _ = quantised_pair(tmp_path, "qwen2", kind, vocab_size=size)
        own = {module.kernel for module in packed.modules() if type(module) is PackedLinear}
        held = sum(each.nbytes for each in (*own, *packed.parameters()))
        assert held == pytest.approx(held_bytes(GgufIndex.read(file.path)), rel=0.05)
        decoder = Decoder(packed)
        require_faithful(decoder)
        kernels.append(decoder.kernels)
    assert kernels[0] == kernels[1] or code == "aten"


@needs_native
@pytest.mark.parametrize(
    ("variant", "kinds", "kv_bits"),
    [
        ("llama", {}, None),
        ("llama-biases", {}, None),
        ("qwen2", {}, None),
        ("qwen3", {}, None),
        ("qwen2", {"v_proj": Type.Q4_0}, None),
        ("llama", {}, 8),
        ("qwen3", {}, 8),
    ],
)
@torch.inference_mode()
def test_our_own_code_gives_a_row_the_same_bits_in_every_forward(
    variant: str, kinds: dict[str, Type], kv_bits: int | None, tmp_path: Path
) -> None:
    """In forwards of any size, on every path of a tree, beside other sequences, and whatever unused slots hold."""
    packed, _, _ = quantised_pair(tmp_path, variant, Type.Q8_0, kinds)
    decoder = Decoder(packed, kv_bits=kv_bits)
    require_faithful(decoder)
    assert decoder.batches.key_multiple == 1
    known, chain, other = [(3 + 5 * i) % 90 + 1 for i in range(61)], [7, 11, 13, 17, 19], [23, 29]

    def fresh(ids: list[int], size: int) -> tuple[Session, torch.Tensor]:
        session = Session(decoder)
        session.prefill(known)
        for storage in session.cache.pool.storage:
            storage[..., len(known) :, :] = float("nan") if storage.is_floating_point() else 127
        found = [torch.empty(0)]
        for begin in range(0, len(ids), size):
            found.append(decoder.logits(session.forward(ids[begin : begin + size])))
            session.commit(ids[begin : begin + size])
        return session, torch.cat(found)

    _, alone = fresh(chain, 1)
    _, branch = fresh([*chain[:2], *other], 1)
    for size in (2, 3, 5):
        assert torch.equal(fresh(chain, size)[1], alone)
    session, _ = fresh([], 1)
    # Row 5 follows row 1, beside row 2, and row 6 follows row 5.
    depths = torch.tensor([0, 1, 2, 3, 4, 2, 3])
    visible = torch.ones(7, 7).tril().bool()
    visible[5:, 2:5] = False
    request = session.tree_request([*chain, *other], depths, visible)
    beside, _ = fresh([], 1)
    answers = ModelRunner(decoder).answer([request, beside.request(chain[:3])])
    tree, second = (decoder.logits(states) for states in answers)
    assert torch.equal(tree[:5], alone)
    assert torch.equal(tree[5:], branch[2:])
    assert torch.equal(second, alone[:3])


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("variant", HYBRIDS)
@torch.inference_mode()
def test_a_row_of_a_hybrid_has_the_same_bits_alone_and_beside_others(variant: str, tmp_path: Path) -> None:
    """Rounding to 8 bits would magnify the last bit of one number per head."""
    decoder, ids = Decoder(quantised_pair(tmp_path, variant, Type.Q8_0)[0]), list(range(3, 27))
    session, alone = Session(decoder), list[torch.Tensor]()
    for token in ids:
        alone.append(decoder.logits(session.forward([token])))
        session.commit([token])
    assert torch.equal(logits_of(decoder, ids), torch.cat(alone))


@pytest.mark.usefixtures("code")
@torch.inference_mode()
def test_a_kernel_that_projections_share_runs_once_beside_a_dense_one(tmp_path: Path) -> None:
    packed, _, _ = quantised_pair(tmp_path, "qwen2", Type.Q8_0, {"v_proj": Type.F32})
    require_faithful(Decoder(packed))
    attention = packed.model.layers[0].self_attn
    shared = attention.q_proj.kernel
    assert whole_calls([attention.q_proj, attention.k_proj, attention.v_proj]) == [shared, attention.v_proj]
    assert whole_calls([attention.q_proj, attention.v_proj]) == [attention.q_proj, attention.v_proj]


@needs_native
@pytest.mark.parametrize(
    ("name", "assignments"),
    [
        ("clasp", ["refresh=4"]),
        ("knapsack", ["refresh=6", "window=3", "share=1"]),
        ("exit", ["threshold=0.1", "depth=0.8"]),
        ("lookup", []),
    ],
)
def test_drafts_on_keys_of_8_bits_give_plain_decodings_tokens(
    name: str, assignments: list[str], tmp_path: Path
) -> None:
    packed, _, _ = quantised_pair(tmp_path, "qwen3", Type.Q8_0)
    decoder, whole = Decoder(packed, kv_bits=8), Decoder(packed)
    assert 3 * decoder.kv_layout.bytes_per_slot < whole.kv_layout.bytes_per_slot
    assert device_key(decoder).slug() != device_key(whole).slug()
    make = strategy_of(name, decoder, *assignments)
    answers = [as_plain(decoder, ids, make(), 24) for ids in ([7, 7, 9], list(range(3, 40)))]
    assert any(answer.num_draft_tokens for answer in answers)


@needs_native
@pytest.mark.parametrize("variant", DENSE_HYBRIDS)
def test_hybrids_keep_keys_of_8_bits_too(variant: str, tmp_path: Path) -> None:
    packed, _, _ = quantised_pair(tmp_path, variant, Type.Q8_0)
    decoder = Decoder(packed, kv_bits=8)
    require_faithful(decoder)
    as_plain(decoder, list(range(3, 40)), Plan.masked("test", SubLayerPlan.of(4, {2, 5}), 4), 24)


@needs_native
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_drafts_on_a_files_high_bits_take_no_memory_and_give_plain_decodings_tokens(kind: Type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    packed, _, _ = quantised_pair(tmp_path, "qwen3", kind, **sizes)
    decoder = Decoder(packed, 0)
    make_copies(decoder, "auto", say=pytest.fail)
    assert decoder.light.bits == (4,)
    assert decoder.projections.draft_bytes < 0.75 * decoder.projections.quantised_bytes
    drafted = accepted = 0
    for seed in range(4):
        ids = [(3 + 7 * seed + 5 * i) % 90 + 1 for i in range(8)]
        got = as_plain(decoder, ids, Plan.masked("test", decoder.light.mask, 4), 24)
        drafted += got.num_draft_tokens
        accepted += got.num_accepted_tokens
    assert accepted > drafted / 10, "random models amplify what the low bits change; by chance it would be one in 90"


@pytest.mark.parametrize("kinds", [{}, {"v_proj": Type.Q8_0}], ids=["none", "one tensor"])
def test_a_file_of_few_bits_has_no_drafts_on_a_part_of_them(kinds: dict[str, Type], tmp_path: Path) -> None:
    """Nor does one whose drafts would read nearly all of it."""
    packed, _, _ = quantised_pair(tmp_path, "llama", Type.Q4_0, kinds)
    decoder = Decoder(packed)
    decoder.lighten("auto")
    assert not decoder.light.kernels
    assert "where most have 6 or 8" in decoder.light.obstacle


def test_keys_of_8_bits_are_refused_where_our_own_attention_does_not_read_them() -> None:
    for bits in (8, 4):
        with pytest.raises(UserError, match=f"--kv-bits {bits}: keys and values of 8 bits are for packed weights"):
            Decoder(tiny_model("llama"), kv_bits=bits)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("some/model", {}, r"--weights packed needs a \.gguf file"),
        ("missing.gguf", {}, "no such file"),
        ("demo@wheel", {"dtype": "bf16"}, "rows are fp32, not bf16"),
    ],
)
def test_what_cannot_be_packed_is_said(spec: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(spec, weights="packed", **settings)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q4_K], ids=lambda kind: kind.name)
def test_levels_and_scales_are_those_of_the_file(kind: Type) -> None:
    data = blocks_of(kind)
    read = levels4(data, kind)
    weight = (read.levels.float().unflatten(1, (-1, 32)) - 8) * read.scale[..., None] + read.zero[..., None]
    torch.testing.assert_close(weight.flatten(1), torch.from_numpy(dequantize(data, kind)), rtol=1e-5, atol=1e-6)


def test_rows_of_an_embedding_that_are_kept_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = np.arange(400, dtype=np.uint8).reshape(50, 8)
    embedding = PackedEmbedding(stored, lambda rows: rows.astype(np.float32), None)
    monkeypatch.setattr("ssd_runtime.weights.packed_linear.KEPT", 6 * 8)
    for token in range(50):
        ids = torch.tensor([token, (3 * token) % 50])
        assert torch.equal(embedding(ids), torch.from_numpy(stored[ids.numpy()]).float())
        assert len(embedding._recent) <= 8
