"""The mixer and MLP blocks of a model, on its own weights or on light copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ssd_profiles.mask import FULL
from ssd_runtime.devices.clock import WaitedLock
from ssd_runtime.model.batch.batch import Batch, Segment
from ssd_runtime.model.family.families import max_context
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.layer.layer import Layer
from ssd_runtime.model.layer.layer_inputs import LayerInputs
from ssd_runtime.model.sublayers.mixing import mix
from ssd_runtime.model.sublayers.native_attention import NativeAttention
from ssd_runtime.model.sublayers.native_mixing import NativeMixing, continues
from ssd_runtime.model.sublayers.native_run import NativeRun, NativeSubLayer
from ssd_runtime.model.sublayers.torch_attention import TorchAttention
from ssd_runtime.weights.hooks import hooked

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

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Shape:
        """The sizes in a model's config."""
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            vocabulary=config.vocab_size,
            max_context=max_context(config),
        )


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
        self._bitwise = bitwise
        self.follow(())
        self.by_row = bitwise and not self.are_native
        """Whether attention runs row by row, and a lone row as two equal ones."""
        self.key_multiple = self._key_multiple(rounded)
        """Numbers of keys are rounded up to a multiple of this."""
        self._attending = TorchAttention(layers, family, shape.heads, cap, alike=self.key_multiple > 1)

    def follow(self, precisions: Sequence[int]) -> None:
        """Rebuild what depends on the projections.

        That is a list of layers per copy precision of `precisions`, and the mixers that our own code serves.
        """
        self._forms = {FULL: self.layers}
        self._forms |= {bits: [layer.light(bits) for layer in self.layers] for bits in precisions}
        self._native = {bits: [self._native_attention(each) for each in form] for bits, form in self._forms.items()}
        self._mixing = {bits: [self._native_mixing(each) for each in form] for bits, form in self._forms.items()}
        if self._bitwise and not self.are_native:
            # Rows run one by one then, and a lone one as two.
            self._native = {bits: [None] * len(self.layers) for bits in self._forms}
            self._mixing = {bits: [None] * len(self.layers) for bits in self._forms}
        self._runs: dict[tuple[tuple[int, int | None], ...], tuple[NativeRun, list[nn.Module]] | None] = {}
        """Latest selections that `run` was given, as our own code runs them, and the modules that it does not call
        (`Layer.uncalled`); None if it does not serve all."""
        self._whole = {
            bits: [parts for layer in range(len(self.layers)) for parts in self._native_sublayers(layer, bits)]
            for bits in self._forms
        }

    @property
    def are_native(self) -> bool:
        """Whether our own code serves all attention on the model's own weights; other mixers are none."""
        own = zip(self._native[FULL], self.layers, strict=True)
        return all(native is not None or layer.mixer is not None for native, layer in own)

    @property
    def are_whole(self) -> bool:
        """Whether each sub-layer on the model's own weights is one call of our own code."""
        return None not in self._whole[FULL]

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
        parts = self._forms[bits][layer]
        if self._spread:
            x, batch = x.to(parts.device), batch.on(parts.device)
        if parts.state is None:
            return self._keyed(parts, layer, x, batch, bits)
        residual = x if parts.parallel is None else self._keyed(parts, layer, x, batch, bits)
        native, sequences = self._mixing[bits][layer], batch.sequences
        if native is not None and sequences is not None and continues(sequences):
            return native(layer, x, sequences, residual)
        beside = parts.parallel
        projected = (parts.qkv if beside is None else beside.inputs)(x, norm=parts.attention_norm)
        mixed = _as_many(mix(parts.state, layer, projected[: batch.rows], batch.segments), x)
        return parts.add_attention(x, mixed) if beside is None else beside.output(mixed, residual=residual)

    def _keyed(self, parts: Layer, layer: int, x: Tensor, batch: Batch, bits: int) -> Tensor:
        """The attention block of `layer`."""
        native = self._native[bits][layer]
        if native is not None and batch.sequences is not None:
            return native(parts.keys, parts.kind, x, batch.sequences, batch.rotations[parts.kind])
        queries, new, gates = self._attending.project(parts, x, batch)
        mixed = self._attending.mixed(layer, queries, new, batch)
        return parts.add_attention(x, mixed if gates is None else mixed * gates.sigmoid())

    def write(self, layer: int, x: Tensor, batch: Batch) -> None:
        """Write the keys and values that the attention of `layer` writes for `x` [rows, hidden], and do no more."""
        assert all(isinstance(segment, Segment) for segment in batch.segments), "variants write nothing"
        with self._lock.inner:
            self._write(layer, x, batch)

    def _write(self, layer: int, x: Tensor, batch: Batch) -> None:
        _, new, _ = self._attending.project(self.layers[layer], x, batch)
        sizes = [segment.rows for segment in batch.segments]
        for own, segment in zip(new[: batch.rows].split(sizes), batch.segments, strict=True):
            if isinstance(segment, Segment):
                segment.cache.write(layer, segment.slot, own)

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
            needed = self._inputs is not None and any(index % 2 and bits is not None for index, bits in wanted)
            inputs = self._inputs.of(x) if needed and self._inputs is not None else None
            given, x = x, self._stream(x)
            native = states is None and len(x) <= FEW_ROWS and batch.sequences is not None
            if native and (whole := self._native_run(tuple(wanted))) is not None and whole.serves(batch):
                return self._carrying(given, whole(x, batch, inputs))
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
        """These sub-layers as our own code runs them, without the idle ones; None if it does not serve all."""
        if wanted not in self._runs:
            served = [
                self._native_skipped(i) if bits is None else self._whole[self._form(bits)][i] for i, bits in wanted
            ]
            parts = [part for found in served if found is not None for part in found]
            if len(self._runs) == MOST_RUNS:
                self._runs.clear()
            layers = [self.layers[index // 2] for index, bits in wanted if bits is not None and index % 2]
            uncalled = [module for layer in layers for module in layer.uncalled]
            self._runs[wanted] = (NativeRun(parts), uncalled) if parts and None not in served else None
        run, modules = self._runs[wanted] or (None, [])
        return None if any(map(hooked, modules)) else run

    def _native_skipped(self, index: int) -> Sequence[NativeSubLayer] | None:
        """A skipped sub-layer as our own code runs it; None for attention that still writes keys."""
        layer, is_mlp = divmod(index, 2)
        if index not in self.never_idle:
            return ()
        factor = self.layers[layer].native_factor() if is_mlp else None
        return None if factor is None else (NativeSubLayer(layer, self.layers[layer].kind, factor),)

    def _native_sublayers(self, layer: int, bits: int) -> Iterator[Sequence[NativeSubLayer] | None]:
        """The mixer and the MLP of a layer as our own code runs them, as far as it serves them."""
        attention, mixing, parts = self._native[bits][layer], self._mixing[bits][layer], self._forms[bits][layer]
        found = attention if parts.mixer is None else mixing
        if found is None or (mixing is None and parts.state is not None):
            yield None
        else:
            yield [NativeSubLayer(parts.keys, parts.kind, found, beside=mixing)]
        mlp, ending = (None, None) if self._spread else (parts.native_mlp, parts.native_ending)
        steps = [] if mlp is None else [NativeSubLayer(layer, parts.kind, *mlp)]
        if ending is not None:
            steps.append(NativeSubLayer(layer, parts.kind, ending))
        yield steps if len(steps) == 1 + parts.has_ending else None

    def _native_mixing(self, layer: Layer) -> NativeMixing | None:
        """The layer's mixer with a state as one call of our own code; None where that does not serve it."""
        return None if self._spread else NativeMixing.of(layer)

    def _native_attention(self, layer: Layer) -> NativeAttention | None:
        """The layer's attention block as one call of our own code; None where that does not serve it."""
        if self._spread:
            return None
        return NativeAttention.of(layer, self._family, self._shape.heads, self._kv_bits, self._cap)


def _as_many(mixed: Tensor, x: Tensor) -> Tensor:
    """The rows `mixed` [n, …] as often as `x` has them: a lone row may run as two equal ones."""
    return mixed if len(mixed) == len(x) else mixed.repeat(len(x) // len(mixed), 1)
