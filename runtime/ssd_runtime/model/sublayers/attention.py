"""Scaled dot-product attention of rows and of variants of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ssd_runtime.model.batch.builder import GROUPED_ROWS, bias_of
from ssd_runtime.weights.kernels.kernel import capped

CAUSAL_TOLERANCE = 1e-2
"""Largest difference between two kernels in half precision; a mask that is off by one key differs by more."""

LEAST_QUERIES = 4
"""Fewest query heads per key-value head in `attend_by_row`; smaller groups are repeated. With fewer, the order of sums
varies, so even two equal rows differ in their last bits."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    cap: float | None,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention output [heads, n, head_dim] of queries [heads, n, head_dim].

    Keys and values are [1, kv_heads, length, head_dim]. `bias` (`bias_of`) is added to the scores. With `causal`, and
    neither bias nor cap, the queries are the last n of the keys' positions and see no later ones; no mask is made.
    `sinks` [heads] are scores of a key without a value, which takes a share of each head's attention.
    """
    heads, n, width = queries.shape
    kv_heads = keys.shape[1]
    if causal:
        mask = causal_lower_right(n, keys.shape[2])
        return scaled_dot_product_attention(
            queries[None], keys, values, attn_mask=mask, scale=scale, enable_gqa=heads > kv_heads
        )[0]
    plain = cap is None and sinks is None
    if plain and n > GROUPED_ROWS:
        apart = (kv_heads, heads // kv_heads, -1, width)
        shared_keys, shared_values = (each.transpose(0, 1).expand(apart) for each in (keys, values))
        mixed = scaled_dot_product_attention(
            queries.reshape(apart), shared_keys, shared_values, attn_mask=bias, scale=scale
        )
        return mixed.reshape(heads, n, width)
    grouped = queries.reshape(1, kv_heads, -1, width)
    if plain:
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale).view(heads, n, width)
    # The fused kernels have no soft-cap and no sinks.
    scores = capped(grouped @ keys.transpose(-1, -2) * scale, cap)
    if bias is not None:
        scores = (scores.unflatten(2, (-1, bias.shape[0])) + bias).flatten(2, 3)
    if sinks is not None:
        sink = sinks.view(1, kv_heads, -1, 1).repeat_interleave(n, 2)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)[..., : keys.shape[2]]
    return (weights @ values).view(heads, n, width)


def attend_by_row(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Batch-invariant `attend` without a cap: no bit of a row depends on the other rows.

    Rows are a dimension of the batch, so that all products have the same sizes in a plain step and in a verification.
    `bias` is [n, 1, 1, length].
    """
    heads, n, width = queries.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    rows = queries.transpose(0, 1).reshape(n, kv_heads, groups, width).repeat(1, 1, -(-LEAST_QUERIES // groups), 1)
    keys, values = keys.expand(n, -1, -1, -1), values.expand(n, -1, -1, -1)
    mixed = scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=scale)
    return mixed[:, :, :groups].reshape(n, heads, width).transpose(0, 1)


def attend_apart(
    queries: Tensor,
    own: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention output [heads, n, head_dim] of variants of rows, which do not see each other.

    Queries are [heads, n, head_dim], with the variants of one row next to each other. `own` [2, kv_heads, n, head_dim]
    are their own keys and values, each seen by its variant only. `keys` and `values` [1, kv_heads, length, head_dim]
    are shared. `bias` [rows, length], 0 or -inf, hides some of these from a row's variants. `sinks` are those of
    `attend`.
    """
    heads, n, width = queries.shape
    _, kv_heads, length, _ = keys.shape
    # Keys and values have one head per group of query heads, broadcast over it.
    own_keys, own_values = own[:, :, None]
    queries = queries.reshape(kv_heads, -1, n, width)
    scores = capped(queries.flatten(1, 2) @ keys[0].transpose(1, 2) * scale, cap)
    if bias is not None:
        scores = scores.view(kv_heads, -1, bias.shape[0], n // bias.shape[0], length) + bias[:, None]
    scores = scores.view(*queries.shape[:3], length)
    own_scores = capped((queries * own_keys).sum(-1, keepdim=True) * scale, cap)
    every = [scores, own_scores]
    if sinks is not None:
        every.append(sinks.view(kv_heads, -1, 1, 1).expand_as(own_scores))
    weights = torch.softmax(torch.cat(every, -1), -1, dtype=torch.float32).to(values.dtype)
    mixed = (weights[..., :length].flatten(1, 2) @ values[0]).view_as(queries)
    mixed = mixed + weights[..., length : length + 1] * own_values
    return mixed.view(heads, n, width)


@torch.inference_mode()
def has_causal_kernel(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether `causal` attention has a fused kernel on a device, which agrees with attention under a bias.

    Without one, torch would make a mask in every layer.
    """
    n = 3
    length = 8
    queries, new = (
        torch.linspace(-1, 1, count * head_dim, dtype=dtype) for count in (heads * n, 2 * kv_heads * length)
    )
    queries = queries.view(heads, n, head_dim).to(device)
    keys, values = new.view(2, 1, kv_heads, length, head_dim).to(device)
    parameters = SDPAParams(
        queries[None], keys, values, None, 0.0, False, heads > kv_heads
    )  # as torch asks for this mask
    if not can_use_flash_attention(parameters):
        return False
    visible = torch.ones(n, length, dtype=torch.bool, device=device).tril(length - n)
    scale = head_dim**-0.5
    bias = bias_of(visible, heads // kv_heads, dtype)
    expected = attend(queries, keys, values, bias=bias, scale=scale, cap=None)
    got = attend(queries, keys, values, bias=None, scale=scale, cap=None, causal=True)
    return torch.allclose(got.float(), expected.float(), atol=CAUSAL_TOLERANCE, rtol=CAUSAL_TOLERANCE)
