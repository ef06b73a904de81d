"""Factors of the outputs of projections, by which Falcon-H1 was scaled in training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Factors [out] or [1] of the outputs of a layer's projections."""

    qkv: Tensor
    output: Tensor
    mixer: Tensor
    """Those of the input projection of the mixer beside attention."""
    mixed: Tensor
    """Those of its output projection."""
    gate_up: Tensor
    down: Tensor


def falcon_h1_factors(layer: Any) -> Factors | None:
    """The factors of a layer of Falcon-H1; those of inputs are those of outputs, too, where there is no bias."""
    attention, mlp, mixer = layer.self_attn, layer.feed_forward, layer.mamba
    inward, outward = layer.attention_in_multiplier, layer.attn_out_multiplier
    every = (inward, outward, attention.key_multiplier, mixer.ssm_in_multiplier, layer.ssm_out_multiplier)
    if {*every, mlp.gate_multiplier, mlp.down_multiplier, *mixer.mup_vector.flatten().tolist()} == {1.0}:
        return None  # as in `.gguf` files, whose weights have them
    one = mixer.dt_bias.new_ones

    def joined(parts: dict[str, float], block: Any) -> Tensor:
        return torch.cat([one(getattr(block, name).out_features) * factor for name, factor in parts.items()])

    return Factors(
        qkv=joined({"q_proj": inward, "k_proj": inward * attention.key_multiplier, "v_proj": inward}, attention),
        output=one(1) * outward,
        mixer=mixer.mup_vector.flatten().to(one(1)) * mixer.ssm_in_multiplier,
        mixed=one(1) * layer.ssm_out_multiplier,
        gate_up=joined({"gate_proj": mlp.gate_multiplier, "up_proj": 1.0}, mlp),
        down=one(1) * mlp.down_multiplier,
    )
