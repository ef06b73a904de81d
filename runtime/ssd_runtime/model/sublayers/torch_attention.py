"""Attention by torch's operations, between the projections of the layers that our own code does not serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_runtime.model.batch.batch import Batch, Segment, Variants
from ssd_runtime.model.batch.rotary import rotate
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.model.sublayers.attention import attend, attend_apart, attend_by_row


@dataclass(frozen=True, slots=True, eq=False)
class TorchAttention:
    """Queries, keys and values of a model's layers, and what attention mixes of them."""

    layers: Sequence[Layer]
    family: Family
    heads: int
    cap: float | None
    alike: bool
    """Whether a lone row is attended as two, which rounds it as other rows are."""

    def project(self, parts: Layer, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Normed and rotated queries [n, heads, head_dim] of `x`, and keys with values [n, 2 * kv_heads, head_dim].

        There are no keys with values in layers that read another's. The gates [n, heads * head_dim] of attention's
        output follow, before their sigmoid; None in most families.
        """
        heads = self.heads
        rotation = batch.turns(parts.kind, heads, 0 if parts.about.shares else parts.about.kv_heads)
        qkv = parts.qkv_of(x).view(x.shape[0], -1, parts.about.head_dim)
        gates = None
        if self.family.gated:  # a head's query and gate are neighbours
            both = qkv[:, : 2 * heads].unflatten(1, (-1, 2))
            gates = both[:, :, 1].flatten(1)
            qkv = torch.cat([both[:, :, 0], qkv[:, 2 * heads :]], 1)
        if parts.keys_are_values:
            qkv = torch.cat([qkv, qkv[:, heads:]], 1)
        norms_last = self.family.qk_norm == "rotated"
        if rotation is not None and norms_last:
            qkv = rotate(qkv, rotation)
        if parts.q_norm is not None:
            qkv = self._normed(parts, qkv)
        if rotation is not None and not norms_last:
            qkv = rotate(qkv, rotation, self.family.pairs_alternate)
        return qkv[:, :heads], qkv[:, heads:], gates

    def _normed(self, parts: Layer, qkv: Tensor) -> Tensor:
        """Queries, keys and values [n, heads, head_dim], each normed where the layer has a norm for them."""
        n, heads = len(qkv), self.heads
        kept = (qkv.shape[1] - heads) // 2
        split = qkv.split([heads, kept, kept], 1)
        if self.family.qk_norm == "projection":
            split = (split[0].reshape(n, -1), split[1].reshape(n, -1), split[2])
        norms = (parts.q_norm, parts.k_norm, parts.v_norm)
        normed = [each if norm is None else norm(each) for each, norm in zip(split, norms, strict=True)]
        return torch.cat([each.view(n, -1, parts.about.head_dim) for each in normed], 1)

    def mixed(self, layer: int, queries: Tensor, new: Tensor, batch: Batch) -> Tensor:
        """Attention output [rows, heads * head_dim] of a batch's rows; writes `new` to the caches of its sequences."""
        if len(queries) > batch.rows:  # a lone row that runs as two equal ones
            return self._of_segment(layer, queries[:1], new[:1], batch.segments[0]).repeat(2, 1)
        if len(batch.segments) == 1:  # slicing the rows of one sequence would take half a percent of a plain step
            return self._of_segment(layer, queries, new, batch.segments[0])
        sizes = [segment.rows for segment in batch.segments]
        each = zip(queries.split(sizes), new.split(sizes), batch.segments, strict=True)
        return torch.cat([self._of_segment(layer, *own) for own in each])

    def _of_segment(self, layer: int, queries: Tensor, new: Tensor, segment: Segment | Variants) -> Tensor:
        """Attention output [n, heads * head_dim] of one sequence's rows; writes `new` to its cache."""
        if isinstance(segment, Variants):
            return self._apart(layer, queries=queries, new=new, variants=segment)
        parts = self.layers[layer]
        view = segment.views[parts.kind]
        if not parts.about.shares:
            segment.cache.write(layer, segment.slot, new)
        keys, values = segment.cache.read(parts.keys, view.begin, view.end)
        queries = queries.transpose(0, 1)
        if view.bias is not None and view.bias.ndim == 4:
            mixed = attend_by_row(queries=queries, keys=keys, values=values, bias=view.bias, scale=parts.scale)
            return mixed.transpose(0, 1).reshape(segment.rows, -1)
        paired = segment.rows == 1 and self.alike
        mixed = attend(
            queries=queries.expand(-1, 2, -1) if paired else queries,
            keys=keys,
            values=values,
            bias=view.bias,
            scale=parts.scale,
            cap=self.cap,
            causal=view.causal,
            sinks=None if parts.sinks is None else parts.sinks.tensor,
        )
        if paired:
            mixed = mixed[:, :1]
        return mixed.transpose(0, 1).reshape(segment.rows, -1)

    def _apart(self, layer: int, queries: Tensor, new: Tensor, variants: Variants) -> Tensor:
        """Attention output [n, heads * head_dim] of variants of one sequence's rows; writes nothing.

        Where another layer's keys are read, a variant's own are those of the full model: its own are not kept.
        """
        parts = self.layers[layer]
        view = variants.views[parts.kind]
        keys, values = variants.cache.read(parts.keys, view.begin, view.end)
        if parts.about.shares:
            starts = torch.tensor(variants.lineage.starts, device=queries.device)
            first = int(variants.lineage.starts[0])
            full = variants.cache.read(parts.keys, first, variants.lineage.starts[-1] + 1)
            own = torch.stack([each[0, :, starts - first] for each in full])
        else:
            own = new.transpose(0, 1).view(2, parts.about.kv_heads, -1, parts.about.head_dim)
        mixed = attend_apart(
            queries=queries.transpose(0, 1),
            own=own,
            keys=keys,
            values=values,
            bias=view.bias,
            scale=parts.scale,
            cap=self.cap,
            sinks=None if parts.sinks is None else parts.sinks.tensor,
        )
        return mixed.transpose(0, 1).reshape(variants.rows, -1)
