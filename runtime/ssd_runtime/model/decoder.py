"""A view of the user's own loaded transformers model, sub-layer by sub-layer; the model is never changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ssd_profiles.mask import FULL, WIDTHS, SkipMask
from ssd_runtime.model.attention import attend, attend_apart, attend_by_row, capped, has_causal_kernel
from ssd_runtime.model.batch import Batch, BatchBuilder, Segment, Variants
from ssd_runtime.model.families import LONGROPE, Family, family_of, layer_kinds, max_context, rope_types, setting
from ssd_runtime.model.kv_cache import KVCache
from ssd_runtime.model.kv_pool import KVLayout, KVPool
from ssd_runtime.model.layer import Layer, Norm
from ssd_runtime.model.native_attention import HEAD_DIMS, NativeAttention
from ssd_runtime.model.placement import device_of
from ssd_runtime.model.rotary import RotaryTable, Rotation, rotate
from ssd_runtime.model.transfer import to_device
from ssd_runtime.profiling.clock import WaitedLock, queues_work, synchronize
from ssd_runtime.profiling.memory import gib
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.hooks import require_unhooked
from ssd_runtime.weights.linear import ALWAYS, Linear, PackedMemory, can_pack, named, stamp_of

KEY_MULTIPLE = 64
"""Numbers of keys are rounded up to a multiple of this in models that round rows to fewer bits than states have.

The last bits of torch's attention depend on whether a row is alone and on the number of keys modulo 16, and that
rounding magnifies them to 0.4%. With such numbers most rows are the same to the bit in a plain step and in a
verification: all but those beside a row that needs the next multiple.
"""


KEY_BLOCK = 512
"""Keys that torch's attention on CPUs multiplies at a time. In whole blocks its products have the same sizes however
many keys there are, so that hidden keys change no bit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int

    @property
    def groups(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads


class Decoder:
    """A causal LM as 2L sub-layers between an embedding and a head; immutable and shared between sessions.

    Every `x` is [rows, hidden], the rows of a `Batch`'s sequences one after the other. Sub-layer 2i is the attention
    block of layer i and 2i + 1 its MLP block, each with its norm and residual. Layers run on their own devices, since
    accelerate may spread or offload a model. Offloaded weights are fetched for a call, so every call of a module holds
    `lock`. Packed copies of weights take at most `weight_memory` bytes; by default all layers have one. Raises
    UserError for models that are not supported. With `bitwise`, no bit of a row's logits depends on the rows beside it
    in forwards of the full model with up to `MOST_BY_ROW` rows (`bitwise.require_bitwise`).
    """

    def __init__(self, model: PreTrainedModel, weight_memory: int = 1 << 62, bitwise: bool = False) -> None:
        self.family = family_of(model.config)
        require_unhooked(model)
        self.model = model
        self.bitwise = bitwise
        self.lock = WaitedLock()
        self.version = 0
        """Incremented by `refresh` when the model has changed: states computed before belong to another model."""
        self._embedding_stamp = stamp_of([model.model.embed_tokens])
        config = model.config
        base = model.model
        self.shape = Shape(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            max_context=max_context(config),
        )
        self._serves: tuple[bool, ...] = ALWAYS
        self.dtype: torch.dtype = model.dtype
        self.device = device_of(base.embed_tokens)
        """The device of states and logits; layers may run on other devices."""
        kinds = layer_kinds(config, self.family)
        distinct = list(dict.fromkeys(kinds))
        self.layer_kinds = tuple(kind.name for kind in kinds)
        self.rope_switch = _rope_switch(config, self.family)
        """All tokens of a longer sequence are rotated by other angles (longrope); None for other models."""
        self._cap = setting(config, self.family.attention_cap)
        self._logit_cap = setting(config, self.family.logit_cap)
        self._logit_divisor = setting(config, self.family.logit_divisor) or 1.0
        self._embedding_scale = _embedding_scale(model, self.family)
        residual = setting(config, self.family.residual_multiplier) or 1.0
        self.packed = PackedMemory(weight_memory if can_pack(model) else 0)
        with torch.inference_mode():
            self.layers = [
                Layer.of(
                    layer=layer,
                    family=self.family,
                    kind=distinct.index(kind),
                    residual=residual,
                    memory=self.packed,
                )
                for layer, kind in zip(base.layers, kinds, strict=True)
            ]
            devices = {device_of(base.norm), device_of(model.lm_head)} | {layer.device for layer in self.layers}
            self._spread = devices != {self.device}
            self._norm = Norm(base, "norm", self.family.norm_offset)
            self._head = Linear(model, ("lm_head",), self.packed)
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            tables = {
                name: RotaryTable(module=base.rotary_emb, like=like, switch=self.rope_switch, name=name)
                for name in rope_types(config, self.family)
            }
        shape = self.shape
        self.follow_layers()
        self._by_row = bitwise and None in self._native[FULL]
        """Whether attention runs row by row, and a lone row as two equal ones: our own code needs neither."""
        key_multiple = KEY_MULTIPLE if self.rounding != self.dtype and None in self._native[FULL] else 1
        if self._by_row:
            key_multiple = KEY_BLOCK
        self.kv_layout = KVLayout(
            devices=[layer.device for layer in self.layers],
            windows=[kind.window for kind in kinds],
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            # Searches write the keys of their rows to slots after the committed ones.
            max_slots=2 * shape.max_context + key_multiple - 1,
            key_multiple=key_multiple,
        )
        self.batches = BatchBuilder(
            kinds=distinct,
            tables=tables,
            groups=shape.groups,
            rotated_heads=shape.heads + shape.kv_heads,
            kept_heads=shape.kv_heads,
            dtype=self.dtype,
            device=self.device,
            key_multiple=key_multiple,
            causal=self._attends_causally(),
            by_row=self._by_row,
        )

    def _attends_causally(self) -> bool:
        """Whether the kernels of all devices attend causally without a bias."""
        shape = self.shape
        if self._cap is not None or self.rounding != self.dtype:
            return False
        return all(
            queues_work(device) and has_causal_kernel(device, self.dtype, shape.heads, shape.kv_heads, shape.head_dim)
            for device in {layer.device for layer in self.layers}
        )

    @property
    def kernels(self) -> str:
        """The kernels of the projections: `module`, `packed`, or packed for some projections or numbers of rows."""
        packed = [linear.packed for linear in self._linears()]
        formats = dict.fromkeys(name for linear in self._linears() for name in linear.formats)
        beside = "".join(f" {name}" for name in formats) + f"{named(self.foreign)}{self._placement}"
        if not any(packed) or not any(self._serves):
            return f"module{beside}"
        where = "" if all(packed) else f" {sum(packed)} of {len(packed)}"
        rows = "" if all(self._serves) else f" rows {_ranges(self._serves)}"
        return f"packed{where}{rows}{beside}"

    @property
    def is_packed(self) -> bool:
        """Whether packed kernels serve all projections, whatever the number of rows."""
        return all(linear.packed or linear.formats for linear in self._linears()) and all(self._serves)

    @property
    def head_projection(self) -> Linear:
        """The head's projection."""
        return self._head

    @property
    def is_spread(self) -> bool:
        """Whether layers run on several devices."""
        return self._spread

    @property
    def has_attention_cap(self) -> bool:
        """Whether scores of attention are soft-capped."""
        return self._cap is not None

    @property
    def rounding(self) -> torch.dtype:
        """The coarsest dtype to which rows are rounded: that of a quantised file's kernels, else the model's own."""
        found = {dtype for linear in self._linears() for dtype in linear.roundings}
        return min(found, key=lambda dtype: dtype.itemsize, default=self.dtype)

    @property
    def foreign(self) -> list[nn.Module]:
        """The projections that are not a plain `nn.Linear`, such as quantised ones and adapters."""
        return [module for linear in self._linears() for module in linear.foreign]

    @property
    def _placement(self) -> str:
        """Devices of spread layers and the number of offloaded weights, which change the time of steps."""
        devices = sorted({str(layer.device) for layer in self.layers}) if self._spread else []
        fetched = sum(parameter.is_meta for parameter in self.model.parameters())
        return "".join(f" on {device}" for device in devices) + (f" {fetched} weights offloaded" if fetched else "")

    @property
    def memory(self) -> str:
        """The memory of packed copies, as a message for the user."""
        return f"kernels: {self.kernels}; packed copies of weights take {gib(self.packed.used)}"

    def serve(self, rows: Sequence[bool]) -> None:
        """Let packed copies serve forwards of n rows if `rows[n - 1]` is true; the last entry holds beyond its end."""
        self._serves = tuple(rows)
        for linear in self._linears():
            linear.serve(rows)

    def lighten(self, bits: DraftBits, masks: Iterable[SkipMask] = ()) -> None:
        """Make lighter copies of the weights for drafts, as far as the memory budget holds them, or drop them.

        With `auto`, what runs in 4 bits in one of `masks` has a copy in 4 bits beside that in 8.
        """
        both = _of_width(masks, 4)
        with self.lock, torch.inference_mode():
            for index, linears in self._sublayers():
                for linear in linears:
                    linear.lighten(bits, index in both)
            self.follow_layers()

    def light_bytes(self, bits: DraftBits, masks: Iterable[SkipMask] = ()) -> int:
        """Bytes that all lighter copies for drafts with `masks` would take at most; 0 if there can be none."""
        both = _of_width(masks, 4)
        return sum(linear.light_bytes(bits, i in both) for i, linears in self._sublayers() for linear in linears)

    @property
    def light(self) -> str:
        """The kernels of the lighter copies with their numbers, such as `121 int8`; empty without any."""
        names = Counter(copy.kernel.name for linear in self._linears() for copy in linear.copies.values())
        return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))

    @property
    def copy_widths(self) -> list[tuple[int, ...]]:
        """The widths of the lighter copies of each sub-layer and, last, of the head; the nearest to the model first."""
        found = [{width for linear in linears for width in linear.copies} for _, linears in self._sublayers()]
        return [tuple(width for width in WIDTHS if width in widths) for widths in found]

    @property
    def light_widths(self) -> tuple[int, ...]:
        """The widths of all lighter copies, the nearest to the model first."""
        found = {width for widths in self.copy_widths for width in widths}
        return tuple(width for width in WIDTHS if width in found)

    @property
    def light_mask(self) -> SkipMask:
        """The draft that skips nothing and runs everything on the lighter copies that are nearest to the model."""
        nearest = {index: widths[0] for index, widths in enumerate(self.copy_widths) if widths}
        return SkipMask.of(self.shape.num_layers).lightened(nearest)

    def follow_layers(self) -> None:
        """Put together what is made of the layers' projections: their lighter forms, and calls of our own code."""
        self._forms = {FULL: self.layers}
        self._forms |= {width: [layer.lighter(width) for layer in self.layers] for width in self.light_widths}
        self._native = {
            width: [self._native_attention(layer) for layer in layers] for width, layers in self._forms.items()
        }

    def _form(self, width: int) -> int:
        """The width that stands in for `width`: another one, or the model's own, if there are no copies of it."""
        return width if width in self._forms else max(self._forms)

    def refresh(self) -> None:
        """Follow changes of the model's weights, adapters and hooks since the decoder was built.

        Weights that were written in place through their `data` are not noticed: build another decoder for these.
        Raises UserError if a part that is not called as a whole has a new hook.
        """
        require_unhooked(self.model)
        embedding = stamp_of([self.model.model.embed_tokens])
        with torch.inference_mode():
            changed = [layer.refresh() for layer in self.layers] + [self._norm.refresh(), self._head.refresh()]
        if any(changed):
            self.follow_layers()
        if any(changed) or embedding != self._embedding_stamp:
            self.version += 1
            self._embedding_stamp = embedding

    def synchronize(self) -> None:
        """Wait for the work queued on the model's devices; returns at once on a CPU."""
        devices = {self.device}
        if self._spread:
            devices |= {layer.device for layer in self.layers}
        for device in devices:
            synchronize(device)

    def new_cache(self) -> KVCache:
        """Make a cache for one sequence, whose memory grows."""
        return self.new_pool().cache()

    def new_pool(self, max_bytes: int | None = None, sequences: int = 1) -> KVPool:
        """Make memory for the keys and values of sequences (`KVPool`)."""
        return KVPool(self.kv_layout, max_bytes, sequences)

    def embed(self, *ids: Sequence[int] | Tensor) -> Tensor:
        """Embeddings [n, hidden] of token ids, some on the host and some on the device, one after the other."""
        tokens = [each if isinstance(each, Tensor) else to_device(each, self.device) for each in ids]
        with self.lock:
            x = self.model.model.embed_tokens(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return x if self._embedding_scale is None else x * self._embedding_scale

    def attention(self, layer: int, x: Tensor, batch: Batch, width: int = FULL) -> Tensor:
        """The attention block of `layer` on `x` [rows, hidden]; writes the rows' keys and values into their caches.

        It runs on copies of its weights of this `width`, if there are any.
        """
        with self.lock.inner:
            width = self._form(width)
            parts = self._forms[width][layer]
            native = self._native[width][layer]
            if native is not None and batch.sequences is not None:
                return native(layer, parts.kind, x, batch.sequences, batch.rotations[parts.kind])
            if self._spread:
                x = x.to(parts.device)
                batch = batch.on(parts.device)
            queries, new = self.project(layer, x, batch.rotations[parts.kind], width)
            if self._by_row and len(x) > batch.rows:  # a lone row that runs as two equal ones
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
            return parts.add_attention(x, mixed)

    def _mixed(self, layer: int, queries: Tensor, new: Tensor, segment: Segment | Variants) -> Tensor:
        """Attention output [n, heads * head_dim] of one sequence's rows; writes `new` to its cache."""
        if isinstance(segment, Variants):
            return self._mixed_apart(layer, queries=queries, new=new, variants=segment)
        parts = self.layers[layer]
        view = segment.views[parts.kind]
        segment.cache.write(layer, segment.slot, new)
        keys, values = segment.cache.read(layer, view.begin, view.end)
        queries = queries.transpose(0, 1)
        if view.bias is not None and view.bias.ndim == 4:
            mixed = attend_by_row(queries=queries, keys=keys, values=values, bias=view.bias, scale=parts.scale)
            return mixed.transpose(0, 1).reshape(segment.rows, -1)
        paired = segment.rows == 1 and self.batches.key_multiple > 1
        mixed = attend(
            queries=queries.expand(-1, 2, -1) if paired else queries,
            keys=keys,
            values=values,
            bias=view.bias,
            scale=parts.scale,
            cap=self._cap,
            causal=view.causal,
        )
        if paired:
            mixed = mixed[:, :1]
        return mixed.transpose(0, 1).reshape(segment.rows, -1)

    def _mixed_apart(self, layer: int, queries: Tensor, new: Tensor, variants: Variants) -> Tensor:
        """Attention output [n, heads * head_dim] of variants of one sequence's rows; writes nothing."""
        parts = self.layers[layer]
        shape = self.shape
        view = variants.views[parts.kind]
        keys, values = variants.cache.read(layer, view.begin, view.end)
        mixed = attend_apart(
            queries=queries.transpose(0, 1),
            own=new.transpose(0, 1).view(2, shape.kv_heads, -1, shape.head_dim),
            keys=keys,
            values=values,
            bias=view.bias,
            scale=parts.scale,
            cap=self._cap,
        )
        return mixed.transpose(0, 1).reshape(variants.rows, -1)

    def project(self, layer: int, x: Tensor, rotation: Rotation | None, width: int = FULL) -> tuple[Tensor, Tensor]:
        """Normed and rotated queries [n, heads, head_dim] of `x`, and keys with values [n, 2 * kv_heads, head_dim]."""
        parts = self._forms[self._form(width)][layer]
        shape = self.shape
        qkv = parts.qkv_of(x).view(x.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        if parts.q_norm is not None and parts.k_norm is not None:
            qkv = self._normed(parts.q_norm, parts.k_norm, qkv)
        if rotation is not None:
            qkv = rotate(qkv, rotation)
        return qkv[:, : shape.heads], qkv[:, shape.heads :]

    def mlp(self, layer: int, x: Tensor, width: int = FULL) -> Tensor:
        """The MLP block of `layer` on `x` [n, hidden], on copies of its weights of this `width` if there are any."""
        with self.lock.inner:
            parts = self._forms[self._form(width)][layer]
            return parts.add_mlp(x.to(parts.device) if self._spread else x)

    def run(
        self,
        x: Tensor,
        batch: Batch,
        mask: SkipMask | None = None,
        first: int = 0,
        last: int | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Run sub-layers `first`, …, `last` - 1 as `mask` says; appends the state after each to `states`."""
        paired = self._by_row and len(x) == 1 and mask is None
        if paired:
            x = x.repeat(2, 1)  # rows of stride 0 would be summed in another order
        with self.lock:
            for index in range(first, 2 * self.shape.num_layers if last is None else last):
                if mask is None or not mask.bits[index]:
                    layer, is_mlp = divmod(index, 2)
                    width = FULL if mask is None else mask.width(index)
                    x = self.mlp(layer, x, width) if is_mlp else self.attention(layer, x, batch, width)
                if states is not None:
                    states.append(self._handed(x[:1] if paired else x))
        return self._handed(x[:1] if paired else x)

    def norm(self, x: Tensor) -> Tensor:
        """States `x` after the final norm."""
        with self.lock:
            return self._handed(self._on_two_rows(self._norm, x))

    def head(self, normed: Tensor, width: int = FULL) -> Tensor:
        """Logits [n, vocabulary] of normed states, by a copy of the head of this `width` if there is one."""
        head = self._head if width == FULL else self._head.lighter(width)
        with self.lock:
            return self.finished(self._handed(self._on_two_rows(head, normed)))

    def _on_two_rows(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply `work` to rows `x`, to a lone one as two equal ones if no bit may depend on their number."""
        return work(x.repeat(2, 1))[:1] if self._by_row and len(x) == 1 else work(x)

    def finished(self, logits: Tensor) -> Tensor:
        """Logits from the output of the head's projection, scaled and capped as the family does."""
        if self._logit_divisor != 1.0:
            logits = logits / self._logit_divisor
        return capped(logits, self._logit_cap)

    def logits(self, x: Tensor, width: int = FULL) -> Tensor:
        """Logits [n, vocabulary] of states after the last sub-layer; `width` is that of `head`."""
        return self.head(self.norm(x), width)

    def _handed(self, x: Tensor) -> Tensor:
        """A tensor on the decoder's device."""
        return x.to(self.device) if self._spread else x

    def _native_attention(self, layer: Layer) -> NativeAttention | None:
        """The layer's attention block as one call of our own code; None where that does not serve it."""
        shape = self.shape
        qkv, output = layer.qkv.fused, layer.output.fused
        norms = {"norm": layer.attention_norm, "q_norm": layer.q_norm, "k_norm": layer.k_norm}
        apart = self._spread or self._cap is not None or layer.attention_after is not None or layer.residual != 1.0
        if qkv is None or output is None or apart or shape.head_dim not in HEAD_DIMS:
            return None
        if self.family.qk_norm == "projection" or any(norm is not None and norm.rms is None for norm in norms.values()):
            return None
        return NativeAttention(
            qkv=qkv,
            output=output,
            **{name: None if norm is None else norm.rms for name, norm in norms.items()},
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=layer.scale,
        )

    def _normed(self, q_norm: Norm, k_norm: Norm, qkv: Tensor) -> Tensor:
        """Queries, keys and values [n, heads, head_dim] with normed queries and keys."""
        n = qkv.shape[0]
        shape = self.shape
        queries, keys, values = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if self.family.qk_norm == "projection":
            queries = queries.reshape(n, -1)
            keys = keys.reshape(n, -1)
        return torch.cat([q_norm(queries).view(n, shape.heads, -1), k_norm(keys).view_as(values), values], 1)

    def _linears(self) -> Iterator[Linear]:
        for _, linears in self._sublayers():
            yield from linears

    def _sublayers(self) -> Iterator[tuple[int, Sequence[Linear]]]:
        """The projections of each sub-layer, by its index, and of the head (2L)."""
        for index, layer in enumerate(self.layers):
            linears = layer.linears()
            yield 2 * index, linears[:2]
            yield 2 * index + 1, linears[2:]
        yield 2 * len(self.layers), (self._head,)


def _of_width(masks: Iterable[SkipMask], width: int) -> set[int]:
    """Indices of all sub-layers, and 2L of the head, that run at this width in one of the masks."""
    return {index for mask in masks for index, each in enumerate(mask.light) if each == width}


def _rope_switch(config: PreTrainedConfig, family: Family) -> int | None:
    if LONGROPE not in rope_types(config, family).values():
        return None
    return int(config.rope_parameters["original_max_position_embeddings"])


def _embedding_scale(model: PreTrainedModel, family: Family) -> float | Tensor | None:
    """The base model's factor of embeddings, unless its embedding module applies it; None for 1."""
    module = model.model.embed_tokens
    # The first 5.x versions of transformers scale Gemma-2's embeddings in the model, later ones in the module.
    if family.scaled_embedding and not hasattr(module, "embed_scale"):
        return torch.tensor(model.config.hidden_size**0.5, dtype=module.weight.dtype, device=device_of(module))
    return setting(model.config, family.embedding_multiplier)


def _ranges(rows: Sequence[bool]) -> str:
    """The numbers of rows whose entry is true, such as `4-32`; the last entry holds beyond its end."""
    runs = list[str]()
    first = 1
    for served, run in groupby(rows):
        last = first + len(list(run)) - 1
        if served:
            runs.append(f"{first}+" if last == len(rows) else f"{first}-{last}")
        first = last + 1
    return ",".join(runs)
