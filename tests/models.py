"""Tiny random models, one a family feature."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2CLS
from transformers.models.granitemoe import modeling_granitemoe
from transformers.models.lfm2_moe import modeling_lfm2_moe

from ssd_runtime.model.family.families import FAMILIES

VOCABULARY = 97
WINDOW = 16
SWITCH = 32
"""Position at which longrope changes its angles."""
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3}
FEW_EXPERTS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 2}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
SLIDING = {"sliding_window": WINDOW}
THREE_SLIDE: dict[str, Any] = {
    **SLIDING,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
BIASES = {"attention_bias": True, "mlp_bias": True}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 6,
    "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
}

GRANITE_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_expand": 1,
    "mamba_d_head": 8,
    **GRANITE,
}
GEMMA4: dict[str, Any] = {
    **SLIDING,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCABULARY,
    "final_logit_softcapping": 5.0,
}
ORIGINAL = {"original_max_position_embeddings": SWITCH}
LONGROPE = {**ORIGINAL, "rope_type": "longrope", "rope_theta": 1e4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", BIASES),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn-rope": ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}}),
    "qwen2-untied": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 16}),
    "qwen3-sliding": ("qwen3", {**SLIDING, "use_sliding_window": True, "max_window_layers": 2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", SLIDING),
    "phi3": ("phi3", {"resid_pdrop": 0.1}),
    "phi3-sliding": ("phi3", SLIDING),
    "phi3-partial-rope": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "phi3",
        {
            **ORIGINAL,
            "rope_parameters": {**LONGROPE, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]},
        },
    ),
    "gemma2": ("gemma2", {**SLIDING, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}),
    "gemma2-no-caps": ("gemma2", {**SLIDING, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": (
        "gemma3_text",
        {
            **THREE_SLIDE,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": DEFAULT_ROPE,
            },
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4-shared-keys": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "tie_word_embeddings": False},
    ),
    "gemma4-values-are-keys": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": None,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-no-groups": ("olmo2", {"num_key_value_heads": 4}),
    "granite": ("granite", GRANITE),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "smollm3-sliding": ("smollm3", {**SLIDING, "no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True}),
    "phi3-longrope-partial": (
        "phi3",  # Phi-4-mini
        {
            **ORIGINAL,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "head_dim": 16,
            "rope_parameters": {
                **LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.3],
                "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
            },
        },
    ),
    "olmo3-sliding": ("olmo3", SLIDING),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-sliding": ("exaone4", THREE_SLIDE),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"rope_parameters": {**DEFAULT_ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3-moe-sliding-dense-layers": (
        "qwen3_moe",
        {**EXPERTS, **SLIDING, "moe_intermediate_size": 24, "mlp_only_layers": [2], "use_sliding_window": True},
    ),
    "olmoe": ("olmoe", EXPERTS),
    "granitemoe": ("granitemoe", {**LOCAL_EXPERTS, **GRANITE}),
    "gpt-oss-sliding": ("gpt_oss", {**LOCAL_EXPERTS, **SLIDING, "rope_parameters": DEFAULT_ROPE}),
    "mixtral": ("mixtral", FEW_EXPERTS),
    "mixtral-sliding": ("mixtral", {**FEW_EXPERTS, **SLIDING}),
    "lfm2": ("lfm2", {**CONVOLUTIONS, "conv_bias": True}),
    "qwen3.5": ("qwen3_5_text", DELTA_NETS),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA_NETS, **SHARED_EXPERT}),
    "granite-shared-expert": (
        "granitemoeshared",
        {**FEW_EXPERTS, "shared_intermediate_size": 40, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    ),
    "granite-hybrid-experts": ("granitemoehybrid", {**GRANITE_HYBRID, **FEW_EXPERTS, "shared_intermediate_size": 40}),
    "granite-hybrid": ("granitemoehybrid", {**GRANITE_HYBRID, "num_local_experts": 0, "shared_intermediate_size": 56}),
    "ministral-sliding": ("ministral", THREE_SLIDE),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.15}},
    ),
    "seed-oss": ("seed_oss", {**BIASES, "attention_out_bias": True}),
    "ernie-4.5": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "helium": ("helium", BIASES),
    "arcee": ("arcee", BIASES),
    "apertus": ("apertus", {"attention_bias": True}),
    "lfm2-moe": (
        "lfm2_moe",
        {**EXPERTS, **CONVOLUTIONS, "moe_intermediate_size": 24, "num_dense_layers": 1, "routed_scaling_factor": 1.7},
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": False,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3-next": ("qwen3_next", {**DELTA_NETS, **SHARED_EXPERT, "mlp_only_layers": [1]}),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 24,
            "mamba_n_heads": 6,
            "mamba_d_head": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [1.5, 0.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.6],
            "ssm_in_multiplier": 0.7,
            "ssm_out_multiplier": 0.3,
        },
    ),
}
"""Name to (model type, what differs from `SMALL`)."""
NEWER = frozenset(kind for kind in FAMILIES if kind not in CONFIG_MAPPING)
NEWER |= (
    frozenset[str]()
    if hasattr(modeling_granitemoe, "GraniteMoeExperts")
    else frozenset({"granitemoe", "granitemoeshared"})
)
NEWER |= frozenset[str]() if hasattr(modeling_lfm2_moe, "Lfm2MoeTopKRouter") else frozenset({"lfm2_moe"})
if "granitemoehybrid" not in NEWER and "linear_attention" not in (
    CONFIG_MAPPING["granitemoehybrid"]().layer_types or ()
):
    NEWER |= {"granitemoehybrid"}
try:
    with torch.device("meta"):
        ACT2CLS["xielu"]()
except NotImplementedError:
    NEWER |= {"apertus"}
"""Types that the oldest transformers lacks or cannot load, or whose experts or layers it describes otherwise."""
VARIANTS = {name: (kind, changes) for name, (kind, changes) in VARIANTS.items() if kind not in NEWER}
HYBRIDS = [name for name, (kind, _) in VARIANTS.items() if FAMILIES[kind].mixers or FAMILIES[kind].parallel]
"""Variants some of whose layers mix tokens otherwise than by attention."""
MIXERS = [name for name in ("lfm2", "qwen3.5", "granite-hybrid", "falcon-h1") if name in VARIANTS]
"""A variant without experts for each mixer with a state."""
SHARING = [name for name in VARIANTS if name in ("gemma4-shared-keys", "gemma4-experts")]
"""Variants some of whose layers read another layer's keys."""
ALIKE = frozenset({"ministral-sliding", "ministral3", "seed-oss", "ernie-4.5", "helium", "arcee", "apertus"})
ALIKE |= {"gemma4-experts", "lfm2-moe", "qwen3-next"}
"""Variants that decode as others do, step by step: CI has time to compare their logits alone."""
FIRST = {kind: name for name, (kind, _) in reversed(VARIANTS.items())}
"""Model type to the first of its variants."""
IN_BOTH = [
    (name, torch.float32)
    for name, (kind, _) in VARIANTS.items()
    if name not in ALIKE and (FIRST[kind] == name or any(word in name for word in ("sliding", "longrope", "keys")))
]
IN_BOTH += [(name, torch.bfloat16) for name, _ in IN_BOTH[::6]]
"""A variant of each type in fp32, those with windows, two kinds of angles or keys of two uses besides, every sixth in
bf16."""


def tiny_model(variant: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of a variant. Weights are large enough for sharp, varied predictions; biases are not zero."""
    kind, changes = VARIANTS[variant]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **deepcopy({**SMALL, **changes, **overrides}))
    # The first 5.x versions of transformers let SDPA drop Gemma-2's soft-cap without a word.
    attention = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim >= 2 else 0.1
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else scale))
        for name, buffer in model.named_buffers():
            if name.endswith(".layer_scalar"):
                buffer.mul_(0.5 + torch.rand(1))
            if name.endswith(".expert_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


class SharedScale(torch.nn.Module):
    """A linear module whose activations share one dynamic scale over all rows of a forward, as int8 kernels may."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.in_features = inner.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return self.inner((x / scale).round() * scale)
