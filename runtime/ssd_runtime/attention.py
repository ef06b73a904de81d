"""Scores and mixing of values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """Values mixed by attention: [1, kv_heads, rows, head_dim] of queries [1, kv_heads, rows, head_dim].

    Keys and values are [1, kv_heads, length, head_dim]; `bias` [rows, length] is added to the scores.
    """
    if cap is None:
        return scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
    # The fused kernels know no soft-cap.
    scores = capped(queries @ keys.transpose(-1, -2) * scale, cap)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores or logits squeezed smoothly into (-cap, cap), as Gemma does; unchanged without a cap."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
