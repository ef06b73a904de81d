"""A view of the user's own loaded transformers model, sub-layer by sub-layer; the model is never changed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_runtime.devices.clock import WaitedLock, queues_work, synchronize
from ssd_runtime.devices.memory import gib
from ssd_runtime.devices.placement import device_of
from ssd_runtime.model.batch.batch import Batch
from ssd_runtime.model.batch.builder import BatchBuilder
from ssd_runtime.model.batch.rotary import RotaryTable, rope_switch, rotary_tables
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_layout import KVLayout
from ssd_runtime.model.cache.kv_pool import SPARE_SLOTS, KVPool
from ssd_runtime.model.embedding import Embedding
from ssd_runtime.model.family.families import family_of
from ssd_runtime.model.family.layer_kinds import LayerKind, query_scaling, setting
from ssd_runtime.model.head.output_head import OutputHead, alone_as_two
from ssd_runtime.model.layer.layer import Layer, layers_of
from ssd_runtime.model.layer.layer_inputs import LayerInputs, input_width
from ssd_runtime.model.layer.mtp import Mtp, MtpModule
from ssd_runtime.model.projections import LightCopies, Projections
from ssd_runtime.model.sublayers.attention import has_causal_kernel
from ssd_runtime.model.sublayers.sublayers import Shape, SubLayers
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.hooks import made_of, require_unhooked
from ssd_runtime.weights.linear import Linear, PackedMemory
from ssd_runtime.weights.native.library import library

KV_BITS = 8
"""The bits of a number of quantised keys and values."""
NOT_QUANTISED = 32


class Decoder:
    """A causal LM as 2L sub-layers between an embedding and a head; immutable and shared between sessions.

    Every `x` is [rows, hidden], the rows of a `Batch`'s sequences one after the other. Sub-layer 2i is the attention
    block of layer i and 2i + 1 its MLP block, each with its norm and residual. Layers run on their own devices, since
    accelerate may spread or offload a model. Offloaded weights are fetched for a call, so every call of a module holds
    `lock`. Packed copies of weights take at most `weight_memory` bytes; by default all layers have one. Raises
    UserError for models that are not supported. With `bitwise`, no bit of a row's logits depends on the rows beside it
    in forwards of the full model with up to `MOST_BY_ROW` rows (`bitwise.require_bitwise`). With `kv_bits` of 8, keys
    and values are held in 8 bits, which our own attention alone reads.
    """

    def __init__(
        self, model: PreTrainedModel, weight_memory: int = 1 << 62, bitwise: bool = False, kv_bits: int | None = None
    ) -> None:
        config = model.config
        self.family = family_of(config)
        require_unhooked(model, self.family.mixing, self.family.mlp, self.family.shared)
        self.model, base = model, model.model
        self._made_of = made_of(model)
        self.bitwise = bitwise
        self.lock = WaitedLock()
        self.version = 0
        """Incremented by `refresh` when the model has changed: states computed before belong to another model."""
        self.shape = Shape.of(config)
        self.dtype: torch.dtype = model.dtype
        self._cap = setting(config, self.family.attention_cap)
        self.packed = PackedMemory(weight_memory)
        ahead = getattr(model, "mtp", None)
        ahead = ahead if isinstance(ahead, MtpModule) else None
        with torch.inference_mode():
            layers = layers_of(model, self.family, () if ahead is None else ahead.layers, self.packed, bitwise)
            self.layers = layers[: self.shape.num_layers]
            self._inputs = (
                LayerInputs(base=base, family=self.family, memory=self.packed, beside=self.beside_steps)
                if input_width(config, self.family)
                else None
            )
            self.embed = Embedding(model, self.family, self._inputs, self.lock)
            self.device = self.embed.device
            """The device of states and logits; layers may run on other devices."""
            self.mtp = None if ahead is None else Mtp(ahead, layers[-1], self.family, self.packed)
            """The model's own layer for drafts; None without one."""
            output = Linear(model, ("lm_head",), self.packed)
            self.projections = Projections(layers=self.layers, head=output, inputs=self._inputs, ahead=self.mtp)
            self.projections.use_huge_pages()
            self.light = LightCopies(self.projections, self.shape.num_layers, self.packed)
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            rotary = rotary_tables(base, self.family, like, self.shape.max_context)
        self.layer_kinds = tuple(layer.about.name for layer in self.layers)
        self.rope_switch = rope_switch(config, self.family)
        """All tokens of a longer sequence are rotated by other angles (longrope); None for other models."""
        ends = {device_of(getattr(base, self.family.final_norm)), device_of(model.lm_head)}
        self.is_spread = ends | {layer.device for layer in self.layers} != {self.device}
        """Whether layers run on several devices."""
        self.sublayers = SubLayers(
            layers=layers,
            family=self.family,
            shape=self.shape,
            cap=self._cap,
            spread=self.is_spread,
            bitwise=bitwise,
            rounded=self.rounding != self.dtype,
            lock=self.lock,
            kv_bits=kv_bits or NOT_QUANTISED,
            inputs=self._inputs,
        )
        if kv_bits is not None and not (kv_bits == KV_BITS and self.sublayers.are_native):
            raise UserError(
                f"--kv-bits {kv_bits}: keys and values of {KV_BITS} bits are for packed weights whose attention our "
                "own kernels serve on this processor; use --weights packed with a .gguf file, or omit it"
            )
        by_row = self.sublayers.by_row
        self.head = OutputHead(model, self.family, output, device=self.device, lock=self.lock, in_pairs=by_row)
        self._choose_threads()
        self.kv_layout = self._layout(layers, kv_bits is not None)
        self.batches = self._batches(rotary)

    def _batches(self, rotary: dict[str, RotaryTable]) -> BatchBuilder:
        kinds = list(dict.fromkeys(layer.about for layer in self.layers))
        return BatchBuilder(
            kinds=kinds,
            tables=rotary,
            heads=self.shape.heads,
            dtype=self.dtype,
            device=self.device,
            key_multiple=self.sublayers.key_multiple,
            causal=self._attends_causally(kinds),
            by_row=self.sublayers.by_row,
            query_scaling=query_scaling(self.model.config, self.family),
        )

    def _layout(self, layers: Sequence[Layer], quantised: bool) -> KVLayout:
        """The sizes of the keys, values and states that caches hold of each layer, the MTP layer included."""
        kinds = [layer.about for layer in layers]
        key_multiple = self.sublayers.key_multiple
        return KVLayout(
            devices=[layer.device for layer in layers],
            windows=[kind.window for kind in kinds],
            heads=[(kind.kv_heads, kind.head_dim) for kind in kinds],
            dtype=self.dtype,
            # Searches write the keys of their rows to slots after the committed ones, as many as these at most.
            max_slots=2 * (self.shape.max_context + SPARE_SLOTS) + key_multiple - 1,
            key_multiple=key_multiple,
            quantised=quantised,
            mixers={index: layer.state for index, layer in enumerate(self.layers) if layer.state is not None},
            parallel=self.family.parallel is not None,
            sharing=frozenset(index for index, kind in enumerate(kinds) if kind.shares),
        )

    def _attends_causally(self, kinds: Sequence[LayerKind]) -> bool:
        """Whether the kernels of all devices attend causally without a bias in layers of all these kinds."""
        heads = self.shape.heads
        if self._cap is not None or self.family.sinks or self.rounding != self.dtype:
            return False
        return all(
            queues_work(device) and has_causal_kernel(device, self.dtype, heads, kind.kv_heads, kind.head_dim)
            for device in {layer.device for layer in self.layers}
            for kind in kinds
        )

    @property
    def kernels(self) -> str:
        """The kernels of the projections, and what else changes the time of steps: how keys are held, and where."""
        held = ", 8-bit keys and values" if self.kv_layout.quantised else ""
        apart = ", row by row" if self.sublayers.by_row else ""
        return f"{self.projections.kernels}{held}{apart}{self._placement}"

    @property
    def rounding(self) -> torch.dtype:
        """The coarsest dtype to which rows are rounded (`Projections.rounding`)."""
        return self.projections.rounding(self.dtype)

    @property
    def has_attention_cap(self) -> bool:
        """Whether scores of attention are soft-capped, or have sinks."""
        return self._cap is not None or self.family.sinks

    @property
    def holds_scores(self) -> bool:
        """Whether attention holds the scores of all heads at once, for lack of a fused kernel with caps and sinks."""
        return self.has_attention_cap and not self.sublayers.are_native

    @property
    def _placement(self) -> str:
        """Devices of spread layers and the number of offloaded weights, which change the time of steps."""
        devices = sorted({str(layer.device) for layer in self.layers}) if self.is_spread else []
        fetched = sum(parameter.is_meta for parameter in self.model.parameters())
        return "".join(f" on {device}" for device in devices) + (f" {fetched} weights offloaded" if fetched else "")

    @property
    def memory(self) -> str:
        """The memory of packed copies, as a message for the user."""
        return f"kernels: {self.kernels}; copies of weights in their layout take {gib(self.packed.used)}"

    def _choose_threads(self) -> None:
        """Run steps on threads of our own if no other code has a part in them, nor in those of an MTP layer."""
        whole = self.sublayers.are_whole and bool(self.projections.head.natives)
        whole = whole and (self.mtp is None or self.mtp.is_native)
        self._own_threads = library() if whole else None
        self.projections.use_own_threads(whole)

    def beside_steps(self) -> AbstractContextManager[None]:
        """Within it, work between steps leaves the processors to our own threads, if steps run on these."""
        return nullcontext() if self._own_threads is None else self._own_threads.torch_alone()

    def lighten(self, bits: DraftBits) -> None:
        """Make light copies of the weights for drafts, or drop them (`LightCopies.make`)."""
        with self.lock, torch.inference_mode():
            self.light.make(bits)
            self.sublayers.follow(self.light.bits)
            self._choose_threads()

    def refresh(self) -> None:
        """Follow changes of the model's weights, adapters and hooks since the decoder was built.

        Weights that were written in place through their `data` are not noticed: build another decoder for these.
        Raises UserError if a module that the engine bypasses has a new hook, if layers, dtype or mode have changed, or
        if weights change in bitwise mode.
        """
        require_unhooked(self.model, self.family.mixing, self.family.mlp, self.family.shared)
        if made_of(self.model) != self._made_of:
            raise UserError(
                "model: its layers, dtype or mode have changed since the engine was made; make a new engine"
            )
        with torch.inference_mode():
            parts: list[Embedding | Layer | OutputHead | Mtp | LayerInputs] = [self.embed, *self.layers, self.head]
            parts += [part for part in (self.mtp, self._inputs) if part is not None]
            changed = [part.refresh() for part in parts]
        if any(changed):
            self.version += 1
            self.projections.use_huge_pages()
            self.sublayers.follow(self.light.bits)
            self._choose_threads()
        if self.bitwise and self.version:
            raise UserError("--bitwise: the model has changed since the engine was made; make a new engine")

    def synchronize(self) -> None:
        """Wait for the work queued on the model's devices; returns at once on a CPU."""
        devices = {self.device}
        if self.is_spread:
            devices |= {layer.device for layer in self.layers}
        for device in devices:
            synchronize(device)

    def new_cache(self) -> KVCache:
        """Make a cache for one sequence, whose memory grows."""
        return KVCache(self.new_pool())

    def new_pool(self, max_bytes: int | None = None, sequences: int = 1) -> KVPool:
        """Make memory for the keys and values of sequences (`KVPool`)."""
        return KVPool(self.kv_layout, max_bytes, sequences)

    def probe_ids(self, count: int, first: int = 0) -> list[int]:
        """Fixed, different token ids for measurements and checks: equal rows make softmax and norms too easy."""
        return [(17 + 31 * i) % self.shape.vocabulary for i in range(first, first + count)]

    def run(
        self,
        x: Tensor,
        batch: Batch,
        mask: SubLayerPlan | None = None,
        first: int = 0,
        last: int | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Run sub-layers `first`, …, `last` - 1 as `mask` says; appends the state after each to `states`."""
        blocks = self.sublayers
        paired = blocks.by_row and len(x) == 1 and mask is None
        if paired:
            x = x.repeat(2, 1)  # rows of stride 0 would be summed in another order
        every = range(first, 2 * self.shape.num_layers if last is None else last)
        wanted = [
            (index, FULL if mask is None else None if mask.skipped[index] else mask.bits_of(index)) for index in every
        ]
        after = list[Tensor]()
        with self.lock:
            x = blocks.run(wanted, x, batch, None if states is None else after)
        if states is not None:
            states += [self._handed(each[:1] if paired else each) for each in after]
        return self._handed(x[:1] if paired else x)

    def run_ahead(self, embedded: Tensor, states: Tensor, batch: Batch, keys_alone: bool = False) -> Tensor:
        """Run the MTP layer on tokens' embeddings and the normed final states before them; both are [rows, hidden].

        Returns its normed states [rows, hidden]; with `keys_alone` nothing is computed but what it writes to caches.
        """
        assert self.mtp is not None, "the model has no such layer"
        with self.lock:
            with self.beside_steps():
                normed = self.mtp.normed(embedded, states)
            x = self.mtp.joined(normed)
            if keys_alone:
                self.sublayers.write(self.shape.num_layers, x, batch)
                return x
        first = 2 * self.shape.num_layers
        x = self.run(x, batch, first=first, last=first + 2)
        with self.lock:
            return alone_as_two(self.mtp.norm, x, self.sublayers.by_row)

    def logits(self, x: Tensor, bits: int = FULL, drafting: bool = False) -> Tensor:
        """Logits [n, vocabulary] of states after the last sub-layer; `OutputHead` has `bits` and `drafting`."""
        return self.head(self.head.norm(x), bits, drafting)

    def _handed(self, x: Tensor) -> Tensor:
        """A tensor on the decoder's device."""
        return x.to(self.device) if self.is_spread else x
