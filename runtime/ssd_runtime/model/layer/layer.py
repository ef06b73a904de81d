"""The parts of one decoder layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ssd_profiles.errors import UserError
from ssd_runtime.devices.placement import device_of
from ssd_runtime.model.family.factors import Factors
from ssd_runtime.model.family.family import Family
from ssd_runtime.model.family.layer_kinds import LayerKind, key_owners, layer_kinds, setting
from ssd_runtime.model.layer.experts import Experts
from ssd_runtime.model.layer.layer_inputs import Injection, input_width
from ssd_runtime.model.layer.mlp import Mlp
from ssd_runtime.model.layer.norm import Norm
from ssd_runtime.model.mixers.mixer import Mixer
from ssd_runtime.weights.kernels.kernel import Connection
from ssd_runtime.weights.kernels.native_ending import Injected, NativeEnding
from ssd_runtime.weights.kernels.native_mlp import NativeExperts, NativeMlp
from ssd_runtime.weights.light import LightLinear
from ssd_runtime.weights.linear import Linear, PackedMemory, is_read, written


class Parallel(NamedTuple):
    """A mixer that runs beside attention, between its projections."""

    mixer: Mixer
    inputs: Linear | LightLinear
    output: Linear | LightLinear

    @classmethod
    def of(cls, layer: nn.Module, family: Family, memory: PackedMemory, by_row: bool) -> Parallel | None:
        """The mixer beside a decoder layer's attention; None in families without one."""
        if (kind := family.parallel) is None:
            return None
        block: Any = getattr(layer, kind.module)
        factors = None if family.factors is None else family.factors(layer)
        return cls(
            mixer=kind(block, by_row),
            inputs=Linear(block, kind.projections, memory, factors=factors and factors.mixer),
            output=Linear(block, (kind.output,), memory, factors=factors and factors.mixed),
        )


class LayerTensor:
    """A tensor of a module that no part but the layer itself reads: attention's sinks, or a factor of the result."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._stamp: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Follow changes of the user's tensor; returns whether there were any."""
        before = self._stamp
        self.tensor: Tensor = getattr(self._module, self._name).detach()
        self._stamp = written(self.tensor)
        return self._stamp != before


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one decoder layer; every `x` is [n, hidden]."""

    kind: int
    """Index among the decoder's layer kinds."""
    about: LayerKind
    keys: int
    """The layer whose keys its attention reads: itself, or an earlier one."""
    keys_are_values: bool
    """Whether values are the keys before their norm and rotation."""
    scale: float
    """Factor of scores before the softmax."""
    residual: float
    """Factor of a block's output before it is added to the residual stream."""
    attention_norm: Norm | None
    mixer: Mixer | None
    """The mixer that stands for attention, between `qkv` and `output`; None for attention."""
    parallel: Parallel | None
    """The mixer beside attention; None without one."""
    qkv: Linear | LightLinear
    """Attention's input projections, or the mixer's."""
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    sinks: LayerTensor | None
    """Scores [heads] of attention that no value has (`attention.attend`); None without."""
    output: Linear | LightLinear
    attention_after: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_after: Norm | None
    injection: Injection | None
    """Adds the vector of a row's token after the MLP, within its sub-layer; None in most families."""
    scalar: LayerTensor | None
    """Factor [1] of the layer's result; None for 1."""
    device: torch.device
    """The device that the layer runs on."""

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        family: Family,
        kind: int,
        about: LayerKind,
        keys: int,
        residual: float,
        memory: PackedMemory,
        by_row: bool = False,
        injected: bool = False,
    ) -> Layer:
        """The parts of a transformers decoder layer; `by_row` is that of `Experts`, `injected` asks for `injection`."""
        mixer = about.mixer
        attention: Any = getattr(layer, "self_attn" if mixer is None else mixer.module)
        normed = family.qk_norm if mixer is None else None
        qkv = present(attention, family.qkv) if mixer is None else mixer.projections
        factors = None if family.factors is None else family.factors(layer)

        def norm(parent: nn.Module, name: str | None) -> Norm | None:
            return Norm(parent, name, family.norm_offset) if name else None

        return cls(
            kind=kind,
            about=about,
            keys=keys,
            keys_are_values=mixer is None and not about.shares and len(qkv) < len(family.qkv),
            scale=float(attention.scaling) if mixer is None else 1.0,
            residual=residual,
            attention_norm=norm(layer, family.attention_norm),
            mixer=None if mixer is None else mixer(attention, by_row),
            parallel=Parallel.of(layer, family, memory, by_row),
            qkv=Linear(attention, qkv, memory, factors=factors and factors.qkv),
            q_norm=norm(attention, family.qk_norms[0] if normed else None),
            k_norm=norm(attention, family.qk_norms[1] if normed and not about.shares else None),
            v_norm=Norm(attention, family.v_norm, width=about.head_dim) if family.v_norm and not about.shares else None,
            sinks=LayerTensor(attention, "sinks") if family.sinks else None,
            output=Linear(
                attention,
                (family.output if mixer is None else mixer.output,),
                memory,
                factors=factors and factors.output,
            ),
            attention_after=norm(layer, family.attention_after),
            mlp_norm=norm(layer, family.mlp_norm),
            mlp=_mlp_of(layer, family, memory, by_row, factors),
            mlp_after=norm(layer, family.mlp_after),
            injection=Injection.of(layer, family, memory) if injected else None,
            scalar=LayerTensor(layer, family.layer_scalar) if family.layer_scalar else None,
            device=device_of(layer),
        )

    def qkv_of(self, x: Tensor) -> Tensor:
        """Queries, keys and values [n, all their heads] of the normed `x`."""
        return self.qkv(x, norm=self.attention_norm)

    def add_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """`x` with the attention block's output for the mixed values [n, heads * head_dim] added."""
        return self._join(x, self.output, mixed, self.attention_after)

    def add_mlp(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """`x` with the MLP block's output added, and what the layer's `inputs` [n, width] inject after it."""
        x = self._with_mlp(x)
        inputs = None if inputs is None else inputs.to(x.device)
        if (ending := self.native_ending) is not None:
            return ending(x, inputs)
        if self.injection is not None:
            assert inputs is not None, "a layer with an injection has inputs"
            x = self.injection.added(x, inputs)
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        """`x` times the layer's factor, which holds for a skipped MLP, too."""
        return x if self.scalar is None else x * self.scalar.tensor

    def _with_mlp(self, x: Tensor) -> Tensor:
        if (native := self.native_mlp) is not None:
            block, connection = native
            return block(x, connection)
        if isinstance(self.mlp, Experts):
            return self._add(x, self.mlp(x if self.mlp_norm is None else self.mlp_norm(x), x), self.mlp_after)
        return self._join(x, self.mlp.down, self.mlp.inner(x, self.mlp_norm), self.mlp_after)

    @property
    def native_mlp(self) -> tuple[NativeMlp | NativeExperts, Connection] | None:
        """The MLP block as a call of our own code and its connection to the stream; None if it is none.

        An injection and a factor of the layer follow (`native_ending`).
        """
        block, connection = self.mlp.native, self._connection(self.mlp_norm, self.mlp_after)
        return None if block is None or connection is None else (block, connection)

    @property
    def has_ending(self) -> bool:
        """Whether something follows the MLP block within its sub-layer."""
        return self.injection is not None or self.scalar is not None

    @property
    def native_ending(self) -> NativeEnding | None:
        """The call of our own code for what follows the MLP block; None if there is none, or none for the block."""
        injected = None if self.injection is None else self.injection.native
        if not self.has_ending or (injected is None and self.injection is not None):
            return None
        return self.native_factor(injected)

    def native_factor(self, injected: Injected | None = None) -> NativeEnding | None:
        """The factor of the layer's result in our own code, after what is `injected`; None if the MLP is not there."""
        factor = None if self.scalar is None else self.scalar.tensor
        if (native := self.native_mlp) is None or not (factor is None or (factor.numel() == 1 and is_read(factor))):
            return None
        return NativeEnding(native[0].hidden, factor, injected)

    @property
    def uncalled(self) -> tuple[nn.Module, ...]:
        """The modules of the MLP sub-layer that our own code computes without a call, and that may have hooks."""
        return self.mlp.uncalled + (() if self.injection is None else self.injection.activation.uncalled)

    @property
    def attention_connection(self) -> Connection | None:
        """The attention block's connection to the residual stream in our own code; None if that has not its norms."""
        return self._connection(self.attention_norm, self.attention_after)

    def _connection(self, norm: Norm | None, after: Norm | None) -> Connection | None:
        before, behind = (None if each is None else each.rms for each in (norm, after))
        if (norm is None) != (before is None) or (after is None) != (behind is None):
            return None
        return Connection(before, behind, self.residual)

    @property
    def state(self) -> Mixer | None:
        """The mixer with a state, in the place of attention or beside it."""
        return self.mixer if self.parallel is None else self.parallel.mixer

    def mixing(self) -> tuple[Linear, ...]:
        """The projections of attention and of mixers, but light copies."""
        beside = () if self.parallel is None else (self.parallel.inputs, self.parallel.output)
        return tuple(each for each in (self.qkv, self.output, *beside) if isinstance(each, Linear))

    def linears(self) -> tuple[Linear, ...]:
        """All projections but light copies: those of `mixing` first."""
        return self.mixing() + self.mlp.linears() + (() if self.injection is None else self.injection.linears())

    def light(self, bits: int) -> Layer:
        """Return this layer on the light copies of its projections (`Linear.light`), as far as it has these."""
        return replace(
            self,
            qkv=self.qkv.light(bits),
            output=self.output.light(bits),
            parallel=None
            if self.parallel is None
            else Parallel(self.parallel.mixer, self.parallel.inputs.light(bits), self.parallel.output.light(bits)),
            mlp=self.mlp.light(bits),
            injection=None if self.injection is None else self.injection.light(bits),
        )

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        before = (self.attention_norm, self.q_norm, self.k_norm, self.v_norm)
        after = (self.attention_after, self.mlp_norm, self.mlp_after)
        found = (*before, *after, *self.mixing(), self.mlp, self.state, self.injection, self.sinks, self.scalar)
        parts = [part for part in found if part is not None]
        changed = [part.refresh() for part in parts]
        return any(changed)

    def _join(self, x: Tensor, last: Linear | LightLinear, inner: Tensor, after: Norm | None) -> Tensor:
        """`x` plus the block's output, which its `last` projection makes of `inner`."""
        if after is None and self.residual == 1.0:
            return last(inner, residual=x)
        return self._add(x, last(inner), after)

    def _add(self, x: Tensor, out: Tensor, after: Norm | None) -> Tensor:
        """`x` plus the block's output `out`, normed after it and scaled."""
        if after is not None:
            out = after(out)
        return x + out if self.residual == 1.0 else x + out * self.residual


def present(attention: object, names: Sequence[str]) -> tuple[str, ...]:
    """The projections of these names that an attention block has."""
    return tuple(name for name in names if getattr(attention, name, None) is not None)


def _mlp_of(
    layer: nn.Module, family: Family, memory: PackedMemory, by_row: bool, factors: Factors | None
) -> Mlp | Experts:
    """The MLP block of a decoder layer, which may be a router with its experts."""
    mlp: Any = getattr(layer, family.mlp)
    block = layer if family.beside else mlp
    if family.router is None or not hasattr(block, family.router):
        return Mlp.of(mlp, family, memory, factors)
    shared: Any = mlp if family.beside else layer.get_submodule(family.shared) if family.shared else None
    return Experts(block, family, memory, by_row, None if shared is None else Mlp.of(shared, family, memory, factors))


def layers_of(
    model: PreTrainedModel, family: Family, ahead: Iterable[nn.Module], memory: PackedMemory, by_row: bool
) -> list[Layer]:
    """All layers of a model; those `ahead` (`Mtp`) come after its own, so that their keys are in the same caches.

    Raises UserError if the model has another number of layers than its config says.
    """
    config = model.config
    modules, kinds, owners = [*model.model.layers], layer_kinds(config, family), key_owners(config, family)
    if len(modules) != len(kinds):
        raise UserError(f"model: num_hidden_layers in its config: expected {len(modules)} layers, got {len(kinds)}")
    distinct = list(dict.fromkeys(kinds))
    for module in ahead:
        modules.append(module)
        kinds.append(next(kind for kind in kinds if kind.is_full))
        owners.append(len(owners))
    return [
        Layer.of(
            layer=layer,
            family=family,
            kind=distinct.index(kind),
            about=kind,
            keys=owner,
            residual=setting(config, family.residual_multiplier) or 1.0,
            memory=memory,
            by_row=by_row,
            injected=input_width(config, family) > 0,
        )
        for layer, kind, owner in zip(modules, kinds, owners, strict=True)
    ]
