"""The mixer and MLP blocks of a model, on its own weights or on light copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_profiles.mask import FULL
from ssd_runtime.devices.clock import WaitedLock
from ssd_runtime.model.attention import attend, attend_apart, attend_by_row
from ssd_runtime.model.batch import Batch, Segment, Variants
from ssd_runtime.model.family import Family
from ssd_runtime.model.layer import Layer
from ssd_runtime.model.layer_inputs import LayerInputs
from ssd_runtime.model.mixing import mix
from ssd_runtime.model.native.native_attention import HEAD_DIMS, NativeAttention
from ssd_runtime.model.native.native_run import NativeRun, NativeSubLayer
from ssd_runtime.model.rotary import Rotation, rotate

KEY_MULTIPLE = 64
"""Numbers of keys are rounded up to a multiple of this in models that round rows to fewer bits than states have.

The last bits of torch's attention depend on whether a row is alone and on the number of keys modulo 16, and that
rounding magnifies them to 0.4%. With such numbers most rows are the same to the bit in a plain step and in a
verification: all but those beside a row that needs the next multiple.
"""
FEW_ROWS = 64
"""Most rows of a call of many sub-layers."""
MOST_RUNS = 64
"""Most different selections of sub-layers that are kept for our own code; searches try many."""
KEY_BLOCK = 512
"""Keys that torch's attention on CPUs multiplies at a time. In whole blocks its products have the same sizes however
many keys there are, so that hidden keys change no bit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    num_layers: int
    hidden: int
    heads: int
    vocabulary: int
    max_context: int


class SubLayers:
    """Sub-layer 2i is the mixer of layer i (`mixers/mixer.py`) and 2i + 1 its MLP, each with its norm and residual.

    Every `x` is [rows, hidden], the rows of a `Batch`'s sequences one after the other; with `LayerInputs`, states that
    are given and returned carry their tokens, too. Each call of a module holds the
    lock, since accelerate fetches offloaded weights for a call.
    """

    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        family: Family,
        shape: Shape,
        cap: float | None,
        spread: bool,
        bitwise: bool,
        rounded: bool,
        lock: WaitedLock,
        kv_bits: int,
        inputs: LayerInputs | None = None,
    ) -> None:
        """Soft-cap scores of attention by `cap`; layers on several devices are `spread`.

        A row's result depends on how many others run beside it: not at all if `bitwise`, little if rows are `rounded`
        coarsely, within the last bits otherwise. Our own attention needs no care for either.
        """
        self.layers = layers
        self._family = family
        self._shape = shape
        self._cap = cap
        self._spread = spread
        self._lock = lock
        self._kv_bits = kv_bits
        self._inputs = inputs
        self.never_idle = frozenset(
            {2 * layer.keys for index, layer in enumerate(layers) if layer.keys != index}
            | {2 * index + 1 for index, layer in enumerate(layers) if layer.scalar is not None}
        )
        """Sub-layers that do something though a draft skips them: attention writes keys that other layers read, an MLP
        scales the layer's result."""
        self.follow(())
        self.by_row = bitwise and not self.are_native
        """Whether attention runs row by row, and a lone row as two equal ones."""
        self.key_multiple = self._key_multiple(rounded)
        """Numbers of keys are rounded up to a multiple of this."""

    def follow(self, precisions: Sequence[int]) -> None:
        """Rebuild what depends on the projections.

        That is a list of layers per copy precision of `precisions`, and a `NativeAttention` per layer where it applies.
        """
        self._forms = {FULL: self.layers}
        self._forms |= {bits: [layer.light(bits) for layer in self.layers] for bits in precisions}
        self._native = {bits: [self._native_attention(each) for each in form] for bits, form in self._forms.items()}
        self._runs: dict[tuple[tuple[int, int | None], ...], NativeRun | None] = {}
        """Latest selections that `run` was given, as our own code runs them; None if it does not serve all."""
        self._whole = {
            bits: [part for layer in range(len(self.layers)) for part in self._native_sublayers(layer, bits)]
            for bits in self._forms
        }

    @property
    def are_native(self) -> bool:
        """Whether our own code serves the attention of all layers on the model's own weights."""
        return None not in self._native[FULL]

    @property
    def are_whole(self) -> bool:
        """Whether each sub-layer on the model's own weights is one call of our own code."""
        return self.are_native and all(layer.native_mlp is not None for layer in self.layers)

    def _key_multiple(self, rounded: bool) -> int:
        if self.by_row:
            return KEY_BLOCK
        return KEY_MULTIPLE if rounded and not self.are_native else 1

    def _form(self, bits: int) -> int:
        """The precision to use for `bits`: its copies, else the widest copies, else the model's own weights."""
        return bits if bits in self._forms else max(self._forms)

    def attention(self, layer: int, x: Tensor, batch: Batch, bits: int = FULL) -> Tensor:
        """The mixer of `layer` on states `x`, on copies of its weights of this `bits` if there are any.

        Writes the rows' keys and values, or inputs, into their caches.
        """
        with self._lock.inner:
            return self._carrying(x, self._attention(layer, self._stream(x), batch, bits))

    def mlp(self, layer: int, x: Tensor, bits: int = FULL) -> Tensor:
        """The MLP block of `layer` on states `x`, on copies of its weights of this `bits` if there are any."""
        with self._lock.inner:
            inputs = None if self._inputs is None else self._inputs.of(x)
            return self._carrying(x, self._mlp(layer, self._stream(x), bits, inputs))

    def _attention(self, layer: int, x: Tensor, batch: Batch, bits: int) -> Tensor:
        bits = self._form(bits)
        beside = self._forms[bits][layer].parallel
        if beside is None:
            return self._mixer(layer, x, batch, bits)
        parts = self._forms[bits][layer]
        x, batch = (x.to(parts.device), batch.on(parts.device)) if self._spread else (x, batch)
        projected = beside.inputs(x, norm=parts.attention_norm)[: batch.rows]
        mixed = mix(beside.mixer, layer, projected, batch.segments)
        out = self._mixer(layer, x, batch, bits)
        return beside.output(mixed.repeat(len(x) // len(mixed), 1), residual=out)

    def _mixer(self, layer: int, x: Tensor, batch: Batch, bits: int) -> Tensor:
        parts = self._forms[bits][layer]
        native = self._native[bits][layer]
        if native is not None and batch.sequences is not None:
            return native(layer, parts.kind, x, batch.sequences, batch.rotations[parts.kind])
        if self._spread:
            x = x.to(parts.device)
            batch = batch.on(parts.device)
        if parts.mixer is not None:
            mixed = mix(parts.mixer, layer, parts.qkv_of(x)[: batch.rows], batch.segments)
            return parts.add_attention(x, mixed.repeat(len(x) // len(mixed), 1))  # a lone row may run as two
        queries, new, gates = self.project(layer, x, batch.rotations[parts.kind], bits)
        if self.by_row and len(x) > batch.rows:  # a lone row that runs as two equal ones
            mixed = self._mixed(layer, queries=queries[:1], new=new[:1], segment=batch.segments[0]).repeat(2, 1)
        elif len(batch.segments) == 1:  # slicing the rows of one sequence would take half a percent of a plain step
            mixed = self._mixed(layer, queries=queries, new=new, segment=batch.segments[0])
        else:
            sizes = [segment.rows for segment in batch.segments]
            parts_of_each = zip(queries.split(sizes), new.split(sizes), batch.segments, strict=True)
            mixed = torch.cat(
                [
                    self._mixed(layer, queries=own_queries, new=own_new, segment=segment)
                    for own_queries, own_new, segment in parts_of_each
                ]
            )
        return parts.add_attention(x, mixed if gates is None else mixed * gates.sigmoid())

    def write(self, layer: int, x: Tensor, batch: Batch) -> None:
        """Write the keys and values that the attention of `layer` writes for `x` [rows, hidden], and do no more."""
        assert all(isinstance(segment, Segment) for segment in batch.segments), "variants write nothing"
        with self._lock.inner:
            self._write(layer, x, batch)

    def _write(self, layer: int, x: Tensor, batch: Batch) -> None:
        _, new, _ = self.project(layer, x, batch.rotations[self.layers[layer].kind])
        sizes = [segment.rows for segment in batch.segments]
        for own, segment in zip(new[: batch.rows].split(sizes), batch.segments, strict=True):
            if isinstance(segment, Segment):
                segment.cache.write(layer, segment.slot, own)

    def _mixed(self, layer: int, queries: Tensor, new: Tensor, segment: Segment | Variants) -> Tensor:
        """Attention output [n, heads * head_dim] of one sequence's rows; writes `new` to its cache."""
        if isinstance(segment, Variants):
            return self._mixed_apart(layer, queries=queries, new=new, variants=segment)
        parts = self.layers[layer]
        view = segment.views[parts.kind]
        if not parts.about.shares:
            segment.cache.write(layer, segment.slot, new)
        keys, values = segment.cache.read(parts.keys, view.begin, view.end)
        queries = queries.transpose(0, 1)
        if view.bias is not None and view.bias.ndim == 4:
            mixed = attend_by_row(queries=queries, keys=keys, values=values, bias=view.bias, scale=parts.scale)
            return mixed.transpose(0, 1).reshape(segment.rows, -1)
        paired = segment.rows == 1 and self.key_multiple > 1
        mixed = attend(
            queries=queries.expand(-1, 2, -1) if paired else queries,
            keys=keys,
            values=values,
            bias=view.bias,
            scale=parts.scale,
            cap=self._cap,
            causal=view.causal,
            sinks=None if parts.sinks is None else parts.sinks.tensor,
        )
        if paired:
            mixed = mixed[:, :1]
        return mixed.transpose(0, 1).reshape(segment.rows, -1)

    def _mixed_apart(self, layer: int, queries: Tensor, new: Tensor, variants: Variants) -> Tensor:
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
            cap=self._cap,
            sinks=None if parts.sinks is None else parts.sinks.tensor,
        )
        return mixed.transpose(0, 1).reshape(variants.rows, -1)

    def project(
        self, layer: int, x: Tensor, rotation: Rotation | None, bits: int = FULL
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Normed and rotated queries [n, heads, head_dim] of `x`, and keys with values [n, 2 * kv_heads, head_dim].

        There are no keys with values in layers that read another's. The gates [n, heads * head_dim] of attention's
        output follow, before their sigmoid; None in most families.
        """
        parts = self._forms[self._form(bits)][layer]
        heads = self._shape.heads
        qkv = parts.qkv_of(x).view(x.shape[0], -1, parts.about.head_dim)
        gates = None
        if self._family.gated:  # a head's query and gate are neighbours
            both = qkv[:, : 2 * heads].unflatten(1, (-1, 2))
            gates = both[:, :, 1].flatten(1)
            qkv = torch.cat([both[:, :, 0], qkv[:, 2 * heads :]], 1)
        if parts.keys_are_values:
            qkv = torch.cat([qkv, qkv[:, heads:]], 1)
        norms_last = self._family.qk_norm == "rotated"
        if rotation is not None and norms_last:
            qkv = rotate(qkv, rotation)
        if parts.q_norm is not None:
            qkv = self._normed(parts, qkv)
        if rotation is not None and not norms_last:
            qkv = rotate(qkv, rotation, self._family.pairs_alternate)
        return qkv[:, :heads], qkv[:, heads:], gates

    def _mlp(self, layer: int, x: Tensor, bits: int, inputs: Tensor | None) -> Tensor:
        parts = self._forms[self._form(bits)][layer]
        return parts.add_mlp(x.to(parts.device) if self._spread else x, None if inputs is None else inputs[layer])

    def _skipped(self, index: int, x: Tensor, batch: Batch) -> Tensor:
        """The states `x` [rows, hidden] after a sub-layer of `never_idle` that a draft skips."""
        layer, is_mlp = divmod(index, 2)
        parts = self.layers[layer]
        if self._spread:
            x, batch = x.to(parts.device), batch.on(parts.device)
        if is_mlp:
            return parts.scaled(x)
        self._write(layer, x, batch)
        return x

    def run(
        self, wanted: Sequence[tuple[int, int | None]], x: Tensor, batch: Batch, states: list[Tensor] | None = None
    ) -> Tensor:
        """The sub-layers of these indices and bits on states `x`, one after the other; None in place of bits skips one.

        Appends the state after each to `states`. Our own code takes one call for all of them where it serves each, and
        where rows are few.
        """
        with self._lock.inner:
            native = states is None and len(x) <= FEW_ROWS and batch.sequences is not None
            if native and (whole := self._native_run(tuple(wanted))) is not None:
                return whole(x, batch)
            needed = self._inputs is not None and any(index % 2 and bits is not None for index, bits in wanted)
            inputs = self._inputs.of(x) if needed and self._inputs is not None else None
            given, x = x, self._stream(x)
            for index, bits in wanted:
                layer, is_mlp = divmod(index, 2)
                if bits is None:
                    x = self._skipped(index, x, batch) if index in self.never_idle else x
                elif is_mlp:
                    x = self._mlp(layer, x, bits, inputs)
                else:
                    x = self._attention(layer, x, batch, bits)
                if states is not None:
                    states.append(self._carrying(given, x))
            return self._carrying(given, x)

    def _stream(self, states: Tensor) -> Tensor:
        """The residual stream [rows, hidden] of states, without the tokens that these may carry."""
        return states if self._inputs is None else states[:, : self._shape.hidden].contiguous()

    def _carrying(self, states: Tensor, x: Tensor) -> Tensor:
        """The rows `x` [rows, hidden] with the tokens that `states` carry, if they do."""
        return x if self._inputs is None else torch.cat([x, states[:, self._shape.hidden :].to(x.device)], -1)

    def _native_run(self, wanted: tuple[tuple[int, int | None], ...]) -> NativeRun | None:
        """These sub-layers as our own code runs them, without the skipped ones; None if it does not serve all."""
        if wanted not in self._runs:
            parts = [self._whole[self._form(bits)][index] for index, bits in wanted if bits is not None]
            served = [part for part in parts if part is not None]
            if len(self._runs) == MOST_RUNS:
                self._runs.clear()
            self._runs[wanted] = NativeRun(served) if served and len(served) == len(parts) else None
        if (found := self._runs[wanted]) is None:
            return None
        mlps = (self.layers[index // 2].mlp for index, bits in wanted if bits is not None and index % 2)
        return None if any(mlp.activation_hooked for mlp in mlps) else found

    def _native_sublayers(self, layer: int, bits: int) -> Iterator[NativeSubLayer | None]:
        """The attention block and the MLP of a layer as our own code runs them, as far as it serves them."""
        attention, parts = self._native[bits][layer], self._forms[bits][layer]
        yield None if attention is None else NativeSubLayer(layer, parts.kind, attention)
        mlp = None if self._spread else parts.native_mlp
        norm = None if parts.mlp_norm is None else parts.mlp_norm.rms
        yield None if mlp is None else NativeSubLayer(layer, parts.kind, mlp=mlp, norm=norm)

    def _native_attention(self, layer: Layer) -> NativeAttention | None:
        """The layer's attention block as one call of our own code; None where that does not serve it."""
        about = layer.about
        qkv, output = layer.qkv.natives, layer.output.fused
        norms = {"norm": layer.attention_norm, "q_norm": layer.q_norm, "k_norm": layer.k_norm}
        apart = self._spread or self._cap is not None or layer.attention_after is not None or layer.residual != 1.0
        if layer.state is not None or not qkv or output is None or apart or about.head_dim not in HEAD_DIMS:
            return None
        if (
            self._family.pairs_alternate
            or self._family.gated
            or layer.sinks is not None
            or self._family.qk_norm in ("projection", "rotated")
            or layer.v_norm is not None
            or about.shares
            or any(norm is not None and norm.rms is None for norm in norms.values())
        ):
            return None
        return NativeAttention(
            qkv=qkv,
            output=output,
            **{name: None if norm is None else norm.rms for name, norm in norms.items()},
            heads=self._shape.heads,
            kv_heads=about.kv_heads,
            head_dim=about.head_dim,
            scale=layer.scale,
            kv_bits=self._kv_bits,
        )

    def _normed(self, parts: Layer, qkv: Tensor) -> Tensor:
        """Queries, keys and values [n, heads, head_dim], each normed where the layer has a norm for them."""
        n, heads = len(qkv), self._shape.heads
        kept = (qkv.shape[1] - heads) // 2
        split = qkv.split([heads, kept, kept], 1)
        if self._family.qk_norm == "projection":
            split = (split[0].reshape(n, -1), split[1].reshape(n, -1), split[2])
        norms = (parts.q_norm, parts.k_norm, parts.v_norm)
        normed = [each if norm is None else norm(each) for each, norm in zip(split, norms, strict=True)]
        return torch.cat([each.view(n, -1, parts.about.head_dim) for each in normed], 1)
