"""A file is the model that transformers computes with the same weights, dense and packed, of every kind there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_runtime.engine.loop import generate
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import dense_model, packed_model
from ssd_runtime.loading.gguf.tokenizer import gguf_tokenizer
from ssd_runtime.loading.models import load_model
from ssd_runtime.loading.sources import find_model, find_packed
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import ConstantPlanner, PlainPlanner, Plan
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.packed_linear import PackedLinear
from tests.gguf_files import DELTA_NETS, EXPONENTS, GEMMA4, HYBRID_SIZES, MERGED, SCALES, SIZES, save_gguf, written
from tests.models import VARIANTS, tiny_model
from tests.mtp import MTP_VARIANTS, Noting, expected, with_mtp
from tests.runtime.gguf.vocabularies import CONTROL, UNUSED, byte_level, with_tokens
from tests.texts import TEXTS

IDS = torch.arange(1, 60)[None]
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
FACTORS = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": FACTORS,
    "long_factor": [2 * each for each in FACTORS],
    "original_max_position_embeddings": 32,
}
WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
"""Angles of families that rotate a quarter of each head unless they are told."""
ROTATED = {**HYBRID_SIZES["granite-hybrid"], "position_embedding_type": "rope", "mamba_conv_bias": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama biases": ("llama-biases", {}),
    "llama no groups": ("llama-no-groups", {}),
    "llama one kv head": ("llama-one-kv-head", {}),
    "llama wide heads": ("llama-wide-heads", {"head_dim": 32}),
    "llama linear": ("llama-linear-rope", {}),
    "llama rope_freqs": ("llama-llama3-rope", {}),
    "llama yarn": ("llama-yarn-rope", {}),
    "llama yarn, attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama yarn, betas": ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "mistral": ("mistral", {}),
    "ministral3": ("ministral3", {}),
    "ministral3 with constant queries": ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}}),
    "seed-oss": ("seed-oss", {}),
    "ernie-4.5": ("ernie-4.5", {"use_bias": False}),
    "arcee": ("arcee", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2-untied", {}),
    "qwen2 yarn": ("qwen2-yarn-rope", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3-sliding", {}),
    "phi3 partial": ("phi3-partial-rope", {}),
    "phi3 longrope": ("phi3-longrope", {"rope_parameters": LONGROPE}),
    "gemma2": ("gemma2", GEMMA),
    "gemma2 no caps": ("gemma2-no-caps", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "gemma4": ("gemma4", GEMMA4),
    "gemma4 shared keys": ("gemma4-shared-keys", GEMMA4),
    "gemma4 values are keys": ("gemma4-values-are-keys", {"global_head_dim": 32}),
    "gemma4 experts": ("gemma4-experts", HYBRID_SIZES["gemma4-experts"]),
    "olmo2": ("olmo2", {}),
    "exaone4": ("exaone4", {}),
    "exaone4 windows": ("exaone4-sliding", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4 without biases": ("glm4", {"attention_bias": False}),
    "hunyuan plain": ("hunyuan", {"rope_parameters": PLAIN}),
    "apertus": ("apertus", {}),
    "granite": ("granite", {}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-moe": ("qwen3-moe", {"moe_intermediate_size": 32}),
    "olmoe": ("olmoe", {}),
    "granitemoe": ("granitemoe", {}),
    "gpt-oss": ("gpt-oss-sliding", {}),
    "gpt-oss yarn": ("gpt-oss-sliding", {"rope_parameters": {**YARN, "truncate": False}}),
    "granite shared expert": ("granite-shared-expert", {"shared_intermediate_size": 64}),
    "granite-hybrid experts": ("granite-hybrid-experts", HYBRID_SIZES["granite-hybrid-experts"]),
    "mixtral": ("mixtral", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "lfm2": ("lfm2", HYBRID_SIZES["lfm2"]),
    "lfm2-moe": ("lfm2-moe", HYBRID_SIZES["lfm2-moe"]),
    "qwen3.5": ("qwen3.5", HYBRID_SIZES["qwen3.5"]),
    "qwen3.5 whole heads": ("qwen3.5", {**HYBRID_SIZES["qwen3.5"], "rope_parameters": WHOLE}),
    "qwen3.5 one value head per key head": ("qwen3.5", {**HYBRID_SIZES["qwen3.5"], "linear_num_key_heads": 16}),
    "qwen3.5-moe": ("qwen3.5-moe", HYBRID_SIZES["qwen3.5-moe"]),
    "falcon-h1": ("falcon-h1", HYBRID_SIZES["falcon-h1"]),
    "falcon-h1 norm": (
        "falcon-h1",
        {**HYBRID_SIZES["falcon-h1"], "mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "qwen3-next": ("qwen3-next", HYBRID_SIZES["qwen3-next"]),
    "qwen3-next whole heads": ("qwen3-next", {**HYBRID_SIZES["qwen3-next"], "rope_parameters": WHOLE}),
    "granite-hybrid": ("granite-hybrid", HYBRID_SIZES["granite-hybrid"]),
    "granite-hybrid rotation": ("granite-hybrid", ROTATED),
}
# The first 5.x have one rotation for all layers, and forget HunYuan's alpha.
if "full_attention" in AutoConfig.for_model("olmo3").rope_parameters:
    MODELS["hunyuan"] = ("hunyuan", {})
    MODELS["olmo3"] = ("olmo3-sliding", {})
    MODELS["olmo3 yarn"] = ("olmo3-sliding", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}})
SAME_FACTORS = {**LONGROPE, "long_factor": FACTORS, "original_max_position_embeddings": 128, "attention_factor": 1.0}
UNSAID = dict.fromkeys(("attention.scale", "rope.scaling.attn_factor", "rope.scaling.original_context_length"))
NAMES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("internlm2", "llama-no-groups", {}, {}),
    ("exaone", "llama-llama3-rope", {}, {}),
    ("qwen2vl", "qwen2", {}, {"rope.dimension_sections": [4, 2, 2, 0]}),
    ("qwen3vl", "qwen3", {}, {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3}),
    ("qwen3vlmoe", "qwen3-moe", {"moe_intermediate_size": 32}, {"rope.dimension_sections": [4, 2, 2, 0]}),
    ("minicpm", "granite", {"attention_multiplier": 0.25}, UNSAID),
    ("minicpm", "granite", {"attention_multiplier": 0.25, "rope_parameters": SAME_FACTORS}, UNSAID),
]
"""Architectures whose models are another family's, a variant of it, and what their metadata have of their own."""
TYPES = sorted({*SCALES, *EXPONENTS, Type.IQ1_M, Type.F16, Type.BF16, Type.F32}, key=lambda kind: kind.name)


def assert_is(index: GgufIndex, truth: PreTrainedModel, name: str = "") -> PreTrainedModel:
    """A file computes what a model does, dense and packed; returns the packed one.

    The configuration that is read is another object than the model's, so every entry counts.
    """
    config = gguf_config(index)
    if name.startswith("gemma2"):  # the first 5.x versions of transformers let SDPA drop its soft-cap
        config._attn_implementation = "eager"
    expected = truth(IDS).logits
    assert expected.isfinite().all()
    torch.testing.assert_close(dense_model(index, config)(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    packed, _ = packed_model(index, config)
    require_faithful(Decoder(packed))
    # Rows are rounded to 8 bits, which these random layers amplify; another model is 1.4 away.
    assert (packed(IDS).logits - expected).norm() < 0.4 * (expected - expected.mean()).norm()
    return packed


@pytest.mark.parametrize("name", [name for name, (variant, _) in MODELS.items() if variant in VARIANTS])
@torch.inference_mode()
def test_a_file_is_transformers_model(name: str, tmp_path: Path) -> None:
    variant, changes = MODELS[name]
    truth = tiny_model(variant, seed=7, **{**SIZES, **changes})
    assert_is(written(tmp_path, truth, Type.Q8_0), truth, name)


@pytest.mark.parametrize(("name", "variant", "changes", "own"), NAMES)
@torch.inference_mode()
def test_a_file_is_the_model_of_another_family(
    name: str, variant: str, changes: dict[str, Any], own: dict[str, Any], tmp_path: Path
) -> None:
    truth = tiny_model(variant, seed=7, **{**SIZES, **changes})
    metadata = {f"{name}.{key}": value for key, value in own.items()}
    assert_is(written(tmp_path, truth, Type.Q8_0, metadata, architecture=name), truth)


@pytest.mark.parametrize("name", ["llama biases", "qwen2", "gemma3", "gemma4", "glm", "granite"])
@torch.inference_mode()
def test_queries_keys_and_values_may_be_one_tensor(name: str, tmp_path: Path) -> None:
    variant, changes = MODELS[name]
    if variant not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    truth = tiny_model(variant, seed=7, **{**SIZES, **changes})
    index = written(tmp_path, truth, Type.Q8_0, fuse_qkv=True)
    assert "blk.0.attn_qkv.weight" in index.tensors
    assert_is(index, truth)


@pytest.mark.skipif("olmo3" not in MODELS, reason="this transformers has one rotation for all layers")
@torch.inference_mode()
def test_olmo_3_has_its_own_pattern_and_one_base_unless_the_file_says(tmp_path: Path) -> None:
    truth = tiny_model("olmo3-sliding", seed=7, **SIZES)
    keys = ("attention.sliding_window_pattern", "rope.freq_base_swa")
    index = written(tmp_path, truth, Type.F32, {f"olmo2.{key}": None for key in keys})
    torch.testing.assert_close(dense_model(index, gguf_config(index))(IDS).logits, truth(IDS).logits)


@pytest.mark.skipif("qwen3-next" not in VARIANTS, reason="this transformers lacks the family")
@torch.inference_mode()
def test_tensors_that_transformers_joins_may_be_of_two_types(tmp_path: Path) -> None:
    truth = tiny_model("qwen3-next", seed=7, **SIZES, **HYBRID_SIZES["qwen3-next"])
    packed = assert_is(written(tmp_path, truth, Type.Q8_0, kinds={"blk.0.attn_gate.weight": Type.Q4_0}), truth)
    kinds = [type(layer.linear_attn.in_proj_qkvz) for layer in packed.model.layers[:2]]
    assert kinds == [torch.nn.Linear, PackedLinear]
    assert_is(written(tmp_path, truth, Type.Q8_0, kinds={"blk.1.attn_gate.weight": Type.F32}), truth)


@pytest.mark.skipif("qwen3.5" not in VARIANTS, reason="this transformers lacks the family")
@torch.inference_mode()
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    truth = tiny_model("qwen3.5", seed=7, **SIZES, **HYBRID_SIZES["qwen3.5"])
    predicting = {"blk.4.attn_norm.weight": np.ones(64), "blk.4.nextn.eh_proj.weight": np.ones((64, 128))}
    states = [kind == "linear_attention" for kind in truth.config.layer_types]
    metadata = {"block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": [*states, False]}
    metadata = {f"qwen35.{key}": value for key, value in metadata.items()}
    index = written(tmp_path, truth, Type.F32, metadata, extra=predicting)
    torch.testing.assert_close(dense_model(index, gguf_config(index))(IDS).logits, truth(IDS).logits)


@pytest.mark.parametrize(
    ("variant", "sizes", "whole"),
    [(name, HYBRID_SIZES[name], name == "qwen3.5-moe") for name in MTP_VARIANTS]
    + [(name, DELTA_NETS, True) for name in MTP_VARIANTS if name == "qwen3.5"],
)
@torch.inference_mode()
def test_a_layer_that_predicts_further_tokens_drafts_packed_and_dense(
    tmp_path: Path, variant: str, sizes: dict[str, Any], whole: bool
) -> None:
    truth = with_mtp(variant, seed=2, agreeing=True, **SIZES, **sizes)
    index = written(tmp_path, truth, Type.Q8_0)
    dense = dense_model(index, gguf_config(index))
    for name, tensor in truth.mtp.state_dict().items():
        torch.testing.assert_close(dense.mtp.state_dict()[name], tensor)
    packed, _ = packed_model(index, gguf_config(index))
    assert type(packed.mtp.fc) is PackedLinear
    decoder, drafter, limits = Decoder(packed), Noting(), Limits(30)
    threads = {native.own_threads for linear in decoder.mtp.linears() for native in linear.natives}
    assert threads == {decoder.sublayers.are_whole} == {whole}
    plain = generate(Session(decoder), [3, 1, 4], PlainPlanner(), limits).token_ids
    assert generate(Session(decoder), [3, 1, 4], ConstantPlanner(Plan("mtp", drafter, 3)), limits).token_ids == plain
    alike = [tokens[:1] == expected(truth, known, 1) for known, tokens in drafter.drafts]
    assert sum(alike) >= 0.9 * len(alike) > 9, "the dense layer's, but for rounding"


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@torch.inference_mode()
def test_every_type_of_weights_is_read(kind: Type, tmp_path: Path) -> None:
    truth = tiny_model("llama", seed=7, **{**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    assert_is(written(tmp_path, truth, kind), truth)


@pytest.mark.parametrize("shape", [(64, 1, 64), (1, 64, 64)])
@torch.inference_mode()
def test_dimensions_of_size_1_change_nothing(shape: tuple[int, ...], tmp_path: Path) -> None:
    truth, name = tiny_model("llama", seed=7, **SIZES), "blk.1.attn_output.weight"
    index = written(tmp_path, truth, Type.Q8_0)
    index.tensors[name] = replace(index.tensors[name], shape=shape)
    assert_is(index, truth)


@pytest.mark.parametrize("given", [1, 2, 3])
@torch.inference_mode()
def test_a_split_file_is_read_whole_whichever_part_is_given(given: int, tmp_path: Path) -> None:
    truth = tiny_model("qwen2", seed=7, **SIZES)
    save_gguf(tmp_path / "model.gguf", truth, Type.Q4_0, tensors_per_part=20)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    index = GgufIndex.read(parts[given - 1])
    got = dense_model(index, gguf_config(index))(IDS).logits
    torch.testing.assert_close(got, truth(IDS).logits, rtol=1e-4, atol=1e-4)
    for damage, message in (
        (lambda: parts[1].rename(tmp_path / "kept"), "missing"),
        (lambda: parts[1].write_bytes(parts[0].read_bytes()), r"is part \(0, 3\) of another model, expected \(1, 3\)"),
    ):
        damage()
        with pytest.raises(UserError, match=message):
            GgufIndex.read(parts[0])


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_padded_vocabularies_and_harmless_metadata_are_read(weights: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tokens = [*(f"<{number}>" for number in range(89)), MERGED, *(f"[PAD{number}]" for number in range(6))]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 90 + [5] * 6,
        "llama.vocab_size": 90,
        "llama.rope.scaling.finetuned": False,
        "general.license": "apache-2.0",
        "quantize.imatrix.file": "x.dat",
    }
    save_gguf(path, tiny_model("llama", **SIZES), Type.Q8_0, changes)
    loaded = load_model(str(path), "cpu", weights=weights)
    assert loaded.model.config.vocab_size == 96
    assert loaded.decode([3]) == "<3>"


def save_padded(path: Path, vocabulary: dict[str, Any]) -> None:
    """Write a model with a vocabulary that is filled up to whole groups of 16 tokens."""
    padding = {f"[PAD{number}]": UNUSED for number in range(-len(vocabulary["tokenizer.ggml.tokens"]) % 16)}
    padded = with_tokens(vocabulary, padding)
    model = tiny_model("qwen2", **{**SIZES, "vocab_size": len(padded["tokenizer.ggml.tokens"])})
    save_gguf(path, model, Type.Q8_0, padded)


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_a_qwen_file_whose_eos_is_the_texts_end_stops_at_a_turns_end_too(weights: str, tmp_path: Path) -> None:
    vocabulary, path = byte_level("qwen2"), tmp_path / "model.gguf"
    tokens = [*vocabulary["tokenizer.ggml.tokens"], "<|endoftext|>"]
    save_padded(path, with_tokens(vocabulary, {"<|endoftext|>": CONTROL}, eos="<|endoftext|>"))
    loaded = load_model(str(path), "cpu", weights=weights)
    assert {tokens[end] for end in loaded.eos_ids} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_tokens_that_a_file_suppresses_are_known(weights: str, tmp_path: Path) -> None:
    key, model = "tokenizer.ggml.suppress_tokens", tiny_model("qwen2", **SIZES)
    for number, (listed, known) in enumerate({(): (), (7, 5, 10**6): (5, 7)}.items()):
        path = tmp_path / f"{number}.gguf"
        save_gguf(path, model, Type.Q8_0, {key: [*listed]})
        assert load_model(str(path), "cpu", weights=weights).greedy.suppress_tokens == known
    save_gguf(path, model, Type.Q8_0, {key: ["a"]})
    with pytest.raises(UserError, match="suppress_tokens is no list of tokens"):
        load_model(str(path), "cpu", weights=weights)


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_a_files_template_for_tools_is_taken_for_tools(weights: str, tmp_path: Path) -> None:
    path, own = tmp_path / "model.gguf", {"": "{{ 1 }}", ".tool_use": "{{ 2 }}", ".rag": "{{ 3 }}"}
    templates = {f"tokenizer.chat_template{name}": text for name, text in own.items()}
    save_gguf(path, tiny_model("qwen2", **SIZES), Type.Q8_0, templates)
    tokenizer = load_model(str(path), "cpu", weights=weights).tokenizer
    assert tokenizer.get_chat_template(None, [{"name": "f"}]) == "{{ 2 }}"
    assert tokenizer.get_chat_template(None) == "{{ 1 }}"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_a_loaded_file_has_the_tokenizer_of_its_vocabulary(pre: str, tmp_path: Path) -> None:
    """transformers has one of its own for this architecture."""
    path = tmp_path / "model.gguf"
    save_padded(path, byte_level(pre))
    made, _ = gguf_tokenizer(GgufIndex.read(path))
    loaded = load_model(str(path), "cpu", weights="packed").tokenizer
    assert all(loaded(text)["input_ids"] == made(text)["input_ids"] for text in TEXTS)


def test_a_dense_granite_4_without_recurrences_is_a_granite(tmp_path: Path) -> None:
    """Its converter writes the sizes of recurrences that it has not, and its MLP's as those of a shared expert."""
    model = tiny_model("granite", **SIZES)
    names = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    more = {f"granite.ssm.{name}": 4 for name in names}
    inner = model.config.intermediate_size
    more |= {"granite.expert_shared_feed_forward_length": inner, "granite.feed_forward_length": 2 * inner}
    index = written(tmp_path, model, Type.Q8_0, more)
    packed, _ = packed_model(index, gguf_config(index))
    assert packed.config.intermediate_size == inner


def test_a_link_is_named_itself(tmp_path: Path) -> None:
    """In the Hub's cache files are links, and what these lead to has no suffix."""
    save_gguf(tmp_path / "model.gguf", tiny_model("llama", **SIZES), Type.Q8_0)
    (tmp_path / "model.gguf").rename(tmp_path / "blob")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    for find in (find_model, find_packed):
        name = find(str(tmp_path / "model.gguf")).name
        assert name == str(tmp_path / "model.gguf")
        assert find(name)
