"""Files that are not what they say, or of what is not served, are refused by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from ssd_artifacts.files import cache_folder
from ssd_profiles.errors import UserError
from ssd_runtime.loading.gguf.config import gguf_config
from ssd_runtime.loading.gguf.models import packed_model
from ssd_runtime.loading.models import load_model
from ssd_runtime.weights.gguf.blocks import UNREADABLE
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.native.library import library
from tests.gguf_files import HYBRID_SIZES, SIZES, save_gguf, written
from tests.models import VARIANTS, tiny_model

YARN = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
TWICE_2_TO_27 = {"qwen35.ssm.time_step_rank": 2**27, "qwen35.ssm.inner_size": 2**27}


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3.5", {"metadata": {"qwen35.attention.recurrent_layers": [True]}}, "recurrent_layers lists 1 layers"),
        ("qwen3.5", {"extra": {"blk.4.attn_norm.weight": np.ones(64)}}, r"blk\.4\.attn_norm\.weight .* no part"),
        ("qwen3.5", {"metadata": {"qwen35.ssm.group_count": 3}}, "time_step_rank is 16 for 3 groups"),
        ("lfm2", {"metadata": {"lfm2.attention.head_count_kv": [0, 2]}}, "head_count_kv lists 2 layers"),
        ("lfm2", {"metadata": {"lfm2.attention.head_count_kv": [1, 0, 2, 0]}}, "head_count_kv differs by layer"),
        ("lfm2-moe", {"metadata": {"lfm2moe.expert_gating_func": 1}}, "expert_gating_func is 1"),
        ("lfm2-moe", {"metadata": {"lfm2moe.expert_weights_scale": 2.0}}, r"expert_weights_scale is 2\.0"),
        ("granite-hybrid", {"metadata": {"granitehybrid.ssm.group_count": 2}}, "group_count is 2"),
        ("gemma4-shared-keys", {"metadata": {"gemma4.attention.head_count_kv": [2, 2, 3, 2]}}, r"\[2, 2, 3, 2\] for 4"),
        (
            "gemma4-shared-keys",
            {"metadata": {"gemma4.feed_forward_length": [96, 192, 96, 96]}},
            "feed_forward_length is",
        ),
        ("gemma4-shared-keys", {"extra": {"rope_freqs.weight": np.arange(1, 17)}}, "rope_freqs.weight has unknown"),
        ("gemma4-shared-keys", {"metadata": {"gemma4.expert_count": 8}}, "lacks .*gemma4.expert_used_count"),
        ("gemma4-experts", {"metadata": {"gemma4.expert_gating_func": 2}}, "expert_gating_func is 2"),
        ("gemma4-experts", {"omit": ["blk.1.ffn_gate_up_exps.weight"]}, r"lacks the tensor blk\.1\.ffn_gate_exps"),
        ("falcon-h1", {"extra": {"blk.0.attn_q.bias": np.ones(64)}}, r"blk\.0\.attn_q\.bias .* no part"),
        ("falcon-h1", {"metadata": {"falcon-h1.ssm.inner_size": 2**31}}, "inner_size is 2147483648 beside"),
        ("falcon-h1", {"metadata": {"falcon-h1.ssm.state_size": 2**31}}, "groups of 2147483648"),
        ("qwen3.5", {"metadata": {"qwen35.nextn_predict_layers": 10**9}}, "predict_layers is 1000000000 of 4 layers"),
        ("qwen3.5", {"metadata": {"qwen35.nextn_predict_layers": 4}}, "predict_layers is 4 of 4 layers"),
        ("qwen3.5", {"metadata": TWICE_2_TO_27}, "inner_size is 134217728 beside 4 groups of 16"),
        ("granite-hybrid", {"metadata": {"granitehybrid.ssm.inner_size": 2**31}}, "inner_size is 2147483648 beside"),
        ("granite-hybrid", {"metadata": {"granitehybrid.ssm.inner_size": 65}}, "inner_size is 65 for 16 heads"),
        (
            "granite-hybrid",
            {"kinds": {"blk.1.ffn_up.weight": Type.Q4_0}},
            r"ffn_gate.* and blk\.1\.ffn_up.* one kernel",
        ),
        ("gemma4-experts", {"metadata": {"gemma4.expert_used_count": 6}}, "expert_used_count is 6 of 5 experts"),
        ("granitemoe", {"metadata": {"granitemoe.expert_used_count": 7}}, "expert_used_count is 7 of 6 experts"),
        ("apertus", {"metadata": {"xielu.eps": None}}, r"lacks the metadata xielu\.eps"),
        ("apertus", {"metadata": {"xielu.beta": [0.5]}}, r"xielu\.beta is not a number for each of 4 layers"),
        ("granite", {"architecture": "minicpm"}, r"minicpm\.attention\.scale is 0\.2"),
        (
            "granite",
            {"architecture": "minicpm", "metadata": {"minicpm.attention.scale": None, "minicpm.logit_scale": 0.0}},
            "logit_scale is not above 0",
        ),
        (
            "exaone4-sliding",
            {"metadata": {"exaone4.attention.sliding_window_pattern": ["yes"] * 4}},
            "sliding_window_pattern lists no number for each of 4 layers",
        ),
        (
            "llama",
            {"fuse_qkv": True, "extra": {"blk.0.attn_k.weight": np.ones((32, 64))}},
            r"lacks the tensor blk\.0\.attn_q\.weight",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_an_architecture_alone_has_is_checked(
    variant: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if variant not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    path = tmp_path / "model.gguf"
    save_gguf(path, tiny_model(variant, **SIZES, **HYBRID_SIZES.get(variant, {})), Type.Q8_0, **changes)
    with pytest.raises(UserError, match=message) as caught:
        packed_model(GgufIndex.read(path), gguf_config(GgufIndex.read(path)))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variant", "metadata", "message"),
    [
        ("qwen3.5", {"qwen35.nextn_predict_layers": -1}, "predict_layers is -1 of 4 layers, which is not supported"),
        ("qwen2", {**YARN, "qwen2.rope.scaling.yarn_log_multiplier": -10 / math.log(4)}, "division by zero"),
    ],
)
def test_numbers_that_no_converter_writes_are_refused(
    variant: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if variant not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    index = written(tmp_path, tiny_model(variant, **SIZES, **HYBRID_SIZES.get(variant, {})), Type.Q8_0)
    index.metadata.update(metadata)
    with pytest.raises(UserError, match=message):
        gguf_config(index)


@pytest.mark.parametrize("weights", ["dense", "packed"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"omit": ["blk.2.ffn_down.weight"]}, r"lacks the tensor blk\.2\.ffn_down\.weight"),
        ({"omit": ["blk.1.attn_q.bias"]}, r"lacks the tensor blk\.1\.attn_q\.bias"),
        (
            {"omit": [f"blk.0.attn_{each}.weight" for each in "qkv"], "extra": {"blk.0.attn_qkv.weight": np.ones(64)}},
            r"lacks the tensor blk\.0\.attn_q\.weight",
        ),
        ({"omit": ["output_norm.weight"]}, r"lacks the tensor output_norm\.weight"),
        ({"extra": {"blk.1.attn_output.bias": np.ones(64)}}, r"tensor blk\.1\.attn_output\.bias .* no part"),
        ({"extra": {"blk.4.attn_norm.weight": np.ones(64)}}, r"tensor blk\.4\.attn_norm\.weight .* no part"),
        ({"extra": {"rope_freqs.weight": np.ones(7)}}, r"rope_freqs\.weight is F32 \[7\], expected F32 \[8\]"),
        (
            {"metadata": {"qwen2.feed_forward_length": 128}},
            r"blk\.0\.ffn_gate\.weight is \[96, 64\], expected \[128, 64\]",
        ),
        (
            {"metadata": {"qwen2.feed_forward_length": 2**32 - 1}},
            "its metadata: intermediate_size is '4294967295', expected 1 to",
        ),
        ({"metadata": {"qwen2.rope.freq_base": float("nan")}}, "freq_base is nan"),
        ({"metadata": {"qwen2.rope.freq_base": float("inf")}}, "freq_base is inf"),
        ({"metadata": {"qwen2.rope.freq_base": 0.0}}, r"rope_theta has the number 0\.0, expected 0\.001"),
        ({"metadata": {"qwen2.rope.freq_base": 0.0, **YARN}}, r"rope_theta has the number 0\.0"),
        ({"metadata": {"qwen2.rope.freq_base": -1.0}}, r"rope_theta has the number -1\.0"),
        ({"metadata": {"qwen2.rope.scaling.factor": -2.0}}, r"factor has the number -2\.0"),
        ({"metadata": {"qwen2.rope.scaling.factor": 1e-30}}, "factor has the number 1.*e-30"),
        ({"metadata": {"qwen2.rope.scaling.attn_factor": float("nan"), **YARN}}, "attn_factor is nan"),
        ({"extra": {"rope_freqs.weight": np.full(8, np.nan)}}, "factor has the number nan"),
        ({"metadata": {"qwen2.block_count": 10**8}}, "no norm of block 4, and says that there are 100000000"),
        (
            {"metadata": {"qwen2.block_count": 500}, "extra": {f"blk.{i}.x": np.ones(1) for i in range(4, 500)}},
            "no norm of block 4,",
        ),
        (
            {
                "metadata": {"qwen2.block_count": 1025},
                "extra": {f"blk.{i}.attn_norm.weight": np.ones(64) for i in range(4, 1025)},
            },
            "num_hidden_layers has the number 1025, expected 1 to 1024",
        ),
        (
            {"metadata": {"qwen2.block_count": 10**6}, "extra": {"blk.999999.attn_norm.weight": np.ones(64)}},
            "no norm of block 4,",
        ),
        ({"metadata": {"qwen2.block_count": 3}}, r"tensor blk\.3\..* no part"),
        ({"metadata": {"qwen2.attention.value_length": 10**6}}, "value_length is 1000000"),
        ({"metadata": {"qwen2.attention.head_count": 0}}, "head_count is 0, expected at least 1"),
        ({"metadata": {"qwen2.attention.head_count_kv": 3}}, "head_count_kv is 3 for 4 heads"),
        ({"metadata": {"qwen2.embedding_length": "64"}}, "embedding_length is '64', expected int"),
        ({"metadata": {"qwen2.attention.sliding_window": 4}}, "sliding_window is not known here and is not supported"),
        ({"metadata": {"qwen2.rope.scaling.type": "su"}}, "rope.scaling.type"),
        ({"metadata": {"qwen2.rope.scaling.alpha": 2.0}}, "rope.scaling.alpha is not known here"),
        ({"metadata": {"qwen2.expert_count": 8}}, "expert_count is 8"),
        ({"metadata": {"qwen2.attention.causal": False}}, "causal is False"),
        ({"metadata": {"tokenizer.ggml.normalizer.lowercase": True}}, r"lowercase is not known here"),
        ({"metadata": {"tokenizer.ggml.pre": "kimi-k2"}}, "pre-tokenizer 'kimi-k2' is not supported"),
        ({"metadata": {"tokenizer.ggml.pre": "another"}}, "pre-tokenizer 'another' is not supported"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "expected gpt2, llama or gemma4, got 't5'"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 96}}, "the token 'a' twice"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a"]}}, "1 tokens, but its embedding has 96 rows"),
        ({"metadata": {"general.type": "adapter"}}, "holds 'adapter', not a model"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_not_the_model_that_it_says_is_refused_by_name(
    weights: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, tiny_model("qwen2", **SIZES), Type.Q8_0, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(path), "cpu", weights=weights)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    # What a refused conversion had begun is not kept.
    assert not list((cache_folder() / "models").glob("model-*/model.safetensors"))


@pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.name)
def test_types_that_the_library_does_not_dequantise_are_refused_by_name(kind: Type, tmp_path: Path) -> None:
    name, index = "blk.1.ffn_down.weight", written(tmp_path, tiny_model("qwen2", **SIZES), Type.Q8_0)
    config = gguf_config(index)
    index.tensors[name] = replace(index.tensors[name], type=kind)
    with pytest.raises(
        UserError, match=rf"tensor blk\.1\.ffn_down\.weight is of type {kind.name}, which is not served"
    ):
        packed_model(index, config)


@pytest.mark.skipif(library() is None, reason="other kernels requantise them")
def test_scales_that_no_model_has_are_refused_by_name(tmp_path: Path) -> None:
    index = written(tmp_path, tiny_model("qwen2", **SIZES), Type.MXFP4)
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.seek(index.tensors["blk.1.ffn_down.weight"].offset + 17 * 3 * 50)
        file.write(b"\xff")
    with pytest.raises(UserError, match=r"tensor blk\.1\.ffn_down\.weight has scales above 2\^72"):
        packed_model(index, gguf_config(index))


@pytest.mark.parametrize("weights", ["dense", "packed"])
def test_an_architecture_that_is_not_served_is_refused_with_the_list(weights: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save_gguf(path, tiny_model("llama", **SIZES), Type.Q8_0, {"general.architecture": "falcon"})
    with pytest.raises(UserError, match=r"architecture falcon are not supported, only llama, .*qwen2, .*smollm3"):
        load_model(str(path), "cpu", weights=weights)
