"""Differences between the weights of files and of transformers' models: names, order and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

JOINED = {
    ".experts.gate_up_proj": (".experts.gate_proj.weight", ".experts.up_proj.weight"),
    ".experts.down_proj": (".experts.down_proj.weight",),
    ".experts.gate_up_proj_bias": (".experts.gate_proj.bias", ".experts.up_proj.bias"),
    ".experts.down_proj_bias": (".experts.down_proj.bias",),
    ".shared_mlp.input_linear.weight": (".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight"),
}
"""Ends of the names of transformers' parameters, and of those that files hold in their place."""
JOINED_EXPERTS = tuple(end for end in JOINED if end.startswith(".experts."))
"""Those among the ends of transformers' names that belong to experts."""
RENAMED = {
    ".expert_bias": ".expert_bias.bias",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
    ".block_sparse_moe.router.": ".mlp.gate.",
    ".block_sparse_moe.": ".mlp.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
    ".dt_bias": ".dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".self_attn.sinks": ".self_attn.sinks.weight",
}
"""Parts of names that `gguf` does not know, and those that it knows instead."""
SHARED = ".shared_mlp."
"""Part of a parameter's name for the expert that all rows use; in a model without others, for the MLP block."""
DELTA = ".linear_attn."
"""The part of a parameter's name that says that it belongs to a gated delta net."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Differences between the weights of an architecture's files and of transformers."""

    pairs_alternate: bool = False
    """Whether the two columns that a rotation pairs are neighbours in queries and keys, not half a head apart."""
    norm_offset: float = 0.0
    """Number that files add to the weights of norms, but to those within gated delta nets."""
    gates_joined: bool = False
    """Whether transformers has a gated delta net's gates and its queries, keys and values in one weight."""
    values_alternate: bool = False
    """Whether neighbouring value heads of a gated delta net have different key heads, not the same one."""
    experts_alternate: bool = False
    """Whether transformers has the weights of experts as [experts, in, out], and outputs of gate and of up by turns."""


TRANSFORMERS = Layout()
"""The layout of architectures whose files hold weights as transformers does."""


class Order:
    """Brings the weights of a model of `config` from a file's order into transformers'."""

    def __init__(self, layout: Layout, config: PreTrainedConfig) -> None:
        self._layout = layout
        # Models whose heads differ by layer have the pairs of a rotation half a head apart.
        kv_heads = config.num_key_value_heads if layout.pairs_alternate else 1
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": kv_heads}
        self._key_heads = config.linear_num_key_heads if layout.values_alternate else 1
        self._value_heads = config.linear_num_value_heads if layout.values_alternate else 1
        self._config = config
        self._both = 2 * self._key_heads * config.linear_key_head_dim if layout.values_alternate else 0

    def rows(self, name: str, data: NDArray[Any]) -> NDArray[Any]:
        """The rows [out, …] of a parameter in transformers' order."""
        heads = self._heads.get(name.split(".")[-2])
        if self._layout.pairs_alternate and heads is not None:
            return data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if not self._reordered(name) or name.endswith((".norm.weight", ".out_proj.weight")):
            return data
        begin = self._both if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")) else 0
        values = data[begin:]
        apart = values.reshape(-1, self._key_heads, len(values) // self._value_heads, *values.shape[1:])
        return np.concatenate([data[:begin], apart.swapaxes(0, 1).reshape(values.shape)])

    def grouped(self, data: NDArray[Any]) -> NDArray[Any]:
        """Rows of all q, k, v and z [out, …] with those of each key head side by side (`GroupedDeltaNet`)."""
        config = self._config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        parts = np.split(data, [keys, 2 * keys, 2 * keys + values])
        heads = [part.reshape(config.linear_num_key_heads, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(heads, 1).reshape(data.shape)

    def columns(self, name: str, count: int) -> Tensor | None:
        """The place in transformers' order of each of the `count` columns of a weight; None if it is their own.

        Blocks of a quantised weight have columns of several heads, so its columns stay as they are.
        """
        if not self._reordered(name) or not name.endswith(".out_proj.weight"):
            return None
        return torch.arange(count).view(self._key_heads, -1, count // self._value_heads).transpose(0, 1).flatten()

    def values(self, name: str, tensor: Tensor) -> Tensor:
        """The numbers of a parameter whose rows are in transformers' order."""
        columns = self.columns(name, tensor.shape[-1])
        if columns is not None:
            return tensor[:, columns.argsort()]
        if name.endswith(".A_log"):
            return (-tensor).log()
        return tensor - self._layout.norm_offset if "norm" in name and DELTA not in name else tensor

    def _reordered(self, name: str) -> bool:
        return self._value_heads != self._key_heads and DELTA in name


def parts_of(name: str) -> list[str]:
    """The parameters that files hold in the place of one of transformers'."""
    for end, parts in JOINED.items():
        if name.endswith(end):
            return [name.removesuffix(end) + part for part in parts]
    return [name]


def shape_of_parts(name: str, shape: Sequence[int], alternate: bool) -> tuple[int, ...]:
    """The shape of each of the file's parameters for the parameter `name` of this shape.

    `alternate` is `Layout.experts_alternate`.
    """
    count, (*first, last) = len(parts_of(name)), shape
    if count == 1 and not (alternate and name.endswith(JOINED_EXPERTS)):
        return tuple(shape)
    if name.endswith("_bias"):
        return *first, last // count
    *first, rows = first
    return (*first, last // count, rows) if alternate else (*first, rows // count, last)


def joined_parts(name: str, parts: Sequence[Tensor], alternate: bool) -> Tensor:
    """The parameter `name` of its parts in a file, as `shape_of_parts` has them."""
    is_bias = name.endswith("_bias")
    if not alternate or not name.endswith(JOINED_EXPERTS):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1 if is_bias else -2)
    both = torch.stack(list(parts), 2).flatten(1, 2)
    return both if is_bias else both.transpose(1, 2).contiguous()
