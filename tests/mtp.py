"""Tiny models with a layer for multi-token prediction."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ssd_runtime.model.families import family_of
from ssd_runtime.model.mtp import MtpModule
from tests.models import tiny_model

MTP_VARIANTS = ("qwen3.5", "qwen3.5-moe")


@torch.no_grad()
def with_mtp(variant: str, seed: int = 0, agreeing: bool = False) -> PreTrainedModel:
    """A random model with an MTP layer, which is random too, or is `agreeing`: then it is often right.

    In an agreeing model the next token depends on the latest one more than on all before, and that is what the layer
    looks at.
    """
    model = tiny_model(variant, seed=seed, max_position_embeddings=512)
    torch.manual_seed(seed + 1)
    model.mtp = MtpModule(model, family_of(model.config)).eval()
    for name, parameter in model.mtp.named_parameters():
        scale = 0.1 if "norm" in name else 0.3
        parameter.copy_(torch.randn_like(parameter) * scale)
    if agreeing:
        model.model.embed_tokens.weight.mul_(100.0)  # what the layers add to it is less
        model.mtp.layers[0].self_attn.o_proj.weight.mul_(0.1)
        for name, parameter in model.mtp.named_parameters():
            if "down_proj" in name:
                parameter.mul_(0.1)
        model.mtp.fc.weight.copy_(torch.eye(model.config.hidden_size, 2 * model.config.hidden_size))
        model.mtp.pre_fc_norm_embedding.weight.zero_()
        model.mtp.norm.weight.copy_(model.model.norm.weight)
    return model
