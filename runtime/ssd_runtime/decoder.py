"""A view of the user's own loaded transformers model, sub-layer by sub-layer. Nothing of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import PreTrainedModel

from ssd_profiles.mask import SkipMask
from ssd_runtime.families import Family, family_of
from ssd_runtime.kv_cache import KVCache
from ssd_runtime.linear import Linear, can_pack
from ssd_runtime.rotary import RotaryTable, rotate


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


@dataclass(frozen=True, slots=True)
class Span:
    """Where the n rows of a forward stand: their rotation, the slots they fill, the keys they see.

    `cos` and `sin` [n, 1, head_dim]; new keys go to slots `slot`, …, `slot` + n - 1; keys 0, …, `length` - 1 are
    read under `bias` [groups * n, length] (0 or -inf, rows repeated for each query head of a group), or all of
    them when it is None.
    """

    cos: Tensor
    sin: Tensor
    slot: int
    length: int
    bias: Tensor | None


class Norm:
    """An RMS norm module: the fused function on its weight, or the module itself where rounding would differ."""

    __slots__ = ("_epsilon", "_module", "_plain")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._epsilon = float(getattr(module, "variance_epsilon", 0.0))
        self._plain = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows of `x`."""
        # transformers rounds to the weight's dtype before the weight is applied: equal only in fp32.
        if self._plain and x.dtype == torch.float32 and not self._module._forward_hooks:
            return rms_norm(x, (x.shape[-1],), self._module.weight, self._epsilon)  # type: ignore[arg-type]
        return self._module(x)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, taken apart."""

    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    device: torch.device

    @classmethod
    def of(cls, layer: nn.Module, family: Family, pack: bool) -> Layer:
        """The parts of a transformers decoder layer."""
        attention, mlp = _module(layer, family.attention), _module(layer, family.mlp)
        return cls(
            attention_norm=Norm(_module(layer, family.attention_norm)),
            qkv=Linear([_module(attention, name) for name in family.qkv], pack),
            q_norm=Norm(_module(attention, "q_norm")) if family.qk_norm else None,
            k_norm=Norm(_module(attention, "k_norm")) if family.qk_norm else None,
            output=Linear([_module(attention, family.output)], pack),
            mlp_norm=Norm(_module(layer, family.mlp_norm)),
            gate_up=Linear([_module(mlp, name) for name in family.gate_up], pack),
            activation=_module(mlp, "act_fn"),
            down=Linear([_module(mlp, family.down)], pack),
            device=next(layer.parameters()).device,
        )

    def linears(self) -> tuple[Linear, ...]:
        """Every projection."""
        return self.qkv, self.output, self.gate_up, self.down


class Decoder:
    """A causal LM as 2L sub-layers between an embedding and a head; immutable and shared between sessions.

    Rows are tokens of one sequence: every `x` is [n, hidden]. Sub-layer 2i is the attention block of layer i,
    2i + 1 its MLP block, each with its norm and residual. Raises UserError for models that are not supported.
    """

    def __init__(self, model: PreTrainedModel, pack: bool = True) -> None:
        self.family = family_of(model)
        self.model = model
        self.lock = RLock()
        config, base = model.config, model.model
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = Shape(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.vocab_size,
            config.max_position_embeddings,
        )
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = base.embed_tokens.weight.device
        self.layer_kinds = ("full",) * self.shape.num_layers
        pack = pack and can_pack(model)
        with torch.inference_mode():
            self.layers = [Layer.of(layer, self.family, pack) for layer in base.layers]
            self._norm = Norm(base.norm)
            self._head = Linear([model.lm_head], pack)
            self._rotary = RotaryTable(base.rotary_emb, torch.empty(0, dtype=self.dtype, device=self.device))

    @property
    def kernels(self) -> str:
        """Which kernels serve the projections."""
        packed = [linear.packed for linear in self._linears()]
        return "packed" if all(packed) else "mixed" if any(packed) else "module"

    def refresh(self) -> None:
        """Follow changes of the model's weights, adapters and hooks since the decoder was built."""
        with torch.inference_mode():
            for linear in self._linears():
                linear.refresh()

    def new_cache(self) -> KVCache:
        """An empty cache for one session."""
        shape = self.shape
        devices = [layer.device for layer in self.layers]
        # Scratch slots behind the last position let evaluations keep their own keys beside committed ones.
        return KVCache(devices, shape.kv_heads, shape.head_dim, self.dtype, 2 * shape.max_context)

    def embed(self, ids: list[int]) -> Tensor:
        """Embeddings [n, hidden] of token ids."""
        return self.model.model.embed_tokens(torch.tensor(ids, device=self.device))

    def span(self, start: int, n: int) -> Span:
        """Rows at positions `start`, …, `start` + n - 1, each seeing all before it and itself."""
        end = start + n
        cos, sin = self._rotary.rows(slice(start, end), end)
        bias = None
        if n > 1:
            bias = torch.zeros(n, end, dtype=self.dtype, device=self.device)
            bias[:, start:].masked_fill_(_future(n, self.device), float("-inf"))
            bias = bias.repeat(self.shape.groups, 1)
        return Span(cos, sin, start, end, bias)

    def free_span(self, positions: Tensor, slot: int, visible: Tensor) -> Span:
        """Rows at any `positions` [n], written from `slot` on, seeing keys where `visible` [n, length] is true."""
        cos, sin = self._rotary.rows(positions, int(positions.max()) + 1)
        bias = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        bias.masked_fill_(~visible, float("-inf"))
        return Span(cos, sin, slot, visible.shape[1], bias.repeat(self.shape.groups, 1))

    def attention(self, layer: int, x: Tensor, cache: KVCache, span: Span) -> Tensor:
        """The attention block of `layer` on `x` [n, hidden]; writes the rows' keys and values into the cache."""
        parts, shape, n = self.layers[layer], self.shape, x.shape[0]
        queries, keys, values = self.project(layer, x, span.cos, span.sin)
        cache.write(layer, span.slot, keys, values)
        all_keys, all_values = cache.read(layer, span.length)
        # Query heads of a group become rows, so that their shared keys are read once and never expanded.
        grouped = queries.transpose(0, 1).reshape(1, shape.kv_heads, shape.groups * n, shape.head_dim)
        mixed = scaled_dot_product_attention(grouped, all_keys, all_values, attn_mask=span.bias)
        merged = mixed.view(shape.heads, n, shape.head_dim).transpose(0, 1).reshape(n, -1)
        return x + parts.output(merged)

    def project(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries, keys and plain values of `x`, each [n, its heads, head_dim]."""
        parts, shape, n = self.layers[layer], self.shape, x.shape[0]
        both = shape.heads + shape.kv_heads
        qkv = parts.qkv(parts.attention_norm(x)).view(n, both + shape.kv_heads, shape.head_dim)
        qk = qkv[:, :both]
        if parts.q_norm is not None and parts.k_norm is not None:
            qk = torch.cat([parts.q_norm(qk[:, : shape.heads]), parts.k_norm(qk[:, shape.heads :])], 1)
        qk = rotate(qk, cos, sin)
        return qk[:, : shape.heads], qk[:, shape.heads :], qkv[:, both:]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """The MLP block of `layer` on `x` [n, hidden]."""
        parts = self.layers[layer]
        gate, up = parts.gate_up(parts.mlp_norm(x)).chunk(2, -1)
        return x + parts.down(parts.activation(gate) * up)

    def run(
        self,
        x: Tensor,
        cache: KVCache,
        span: Span,
        mask: SkipMask | None = None,
        first: int = 0,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """Sub-layers `first`, …, 2L - 1 but for those in `mask`; appends the state behind each to `states`."""
        with self.lock:
            for index in range(first, 2 * self.shape.num_layers):
                if mask is None or not mask.bits[index]:
                    layer, is_mlp = divmod(index, 2)
                    x = self.mlp(layer, x) if is_mlp else self.attention(layer, x, cache, span)
                if states is not None:
                    states.append(x)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """The final norm."""
        return self._norm(x)

    def head(self, normed: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states behind the final norm."""
        return self._head(normed)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [n, vocabulary] of states behind the last sub-layer."""
        return self._head(self._norm(x))

    def _linears(self) -> Iterator[Linear]:
        for layer in self.layers:
            yield from layer.linears()
        yield self._head


def _future(n: int, device: torch.device) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).triu_(1)


def _module(parent: nn.Module, path: str) -> Any:
    return reduce(getattr, path.split("."), parent)
