"""Tiny models with a layer for multi-token prediction, and what it drafts by transformers' own layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ssd_runtime.drafting.mtp import MtpChain
from ssd_runtime.drafting.tree import Draft
from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.layer.mtp import MtpModule
from ssd_runtime.model.runner import Work
from ssd_runtime.sequence.session import Session
from tests.models import VARIANTS, tiny_model

MTP_VARIANTS = [name for name in ("qwen3.5", "qwen3.5-moe", "qwen3-next") if name in VARIANTS]
"""The third has the second's layer but for its name."""


@torch.no_grad()
def with_mtp(variant: str, seed: int = 0, agreeing: bool = False, **overrides: Any) -> PreTrainedModel:
    """A random model with an MTP layer, which is random too, or is `agreeing`: then it is often right.

    In an agreeing model the next token depends on the latest one more than on all before, and that is what the layer
    looks at.
    """
    model = tiny_model(variant, seed=seed, max_position_embeddings=512, **overrides)
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


class Noting:
    """Drafts by the layer, and notes the tokens before each draft."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []

    def drafting(self, session: Session, length: int) -> Work[Draft]:
        known = [*session.ids, session.pending]
        draft = yield from MtpChain().drafting(session, length)
        self.drafts.append((known, draft.tokens))
        return draft


@torch.no_grad()
def expected(model: PreTrainedModel, known: Sequence[int], length: int, unknown: Sequence[int] = (0,)) -> list[int]:
    """The draft after `known` by transformers' own layers; the states before the tokens `unknown` are zero."""
    ids, base, mtp = torch.tensor([known]), model.model, model.mtp
    states = base(ids[:, :-1]).last_hidden_state
    states = torch.cat([torch.zeros_like(states[:, :1]), states], 1)
    states[:, list(unknown)] = 0.0
    tokens = list[int]()
    while len(tokens) < length:
        embedded = base.embed_tokens(ids)
        x = mtp.fc(torch.cat([mtp.pre_fc_norm_embedding(embedded), mtp.pre_fc_norm_hidden(states)], -1))
        angles = base.rotary_emb(x, torch.arange(x.shape[1])[None])
        x = mtp.norm(mtp.layers[0](x, position_embeddings=angles, attention_mask=None))
        tokens.append(int(model.lm_head(x[0, -1]).argmax()))
        ids = torch.cat([ids, torch.tensor([tokens[-1:]])], 1)
        states = torch.cat([states, x[:, -1:]], 1)
    return tokens
