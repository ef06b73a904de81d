"""The parts of one decoder layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ssd_runtime.devices.placement import device_of
from ssd_runtime.model.experts import Experts
from ssd_runtime.model.family import Family
from ssd_runtime.model.mixers.mixer import Mixer
from ssd_runtime.model.mlp import Mlp
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.light import LightLinear
from ssd_runtime.weights.linear import Linear, PackedMemory, stamp_of

NORM_TOLERANCE = 1e-5


class Norm:
    """An RMS norm module, called in a short form on its weight, or as a module if its rounding would differ.

    `offset` is added to the stored weight. The short form serves fp32 only, since families differ in where they round,
    and only if it agrees with the module.
    """

    __slots__ = (
        "_epsilon",
        "_floor",
        "_module",
        "_name",
        "_offset",
        "_parent",
        "_scaled",
        "_short",
        "_stamp",
        "_weight",
        "rms",
    )

    rms: RmsNorm | None
    """The norm as numbers, for kernels that norm their rows; None if only the module has its result."""

    def __init__(self, parent: nn.Module, name: str, offset: float = 0.0) -> None:
        self._parent = parent
        self._name = name
        self._offset = offset
        self._build()

    def __call__(self, x: Tensor) -> Tensor:
        """The normed rows of `x`."""
        if not self._short or x.dtype != torch.float32:
            return self._module(x)
        if x.is_cuda:
            return rms_norm(x, self._weight.shape, self._weight, self._epsilon)
        # torch's fused function runs a dozen kernels on a CPU. x / sqrt(mean(x²) + ε) = x √d / hypot(|x|, √(d ε)).
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return x.div(length).mul_(self._scaled)

    def refresh(self) -> bool:
        """Build the short form again if the user's module has changed; returns whether it has."""
        changed = self._stamp != stamp_of([getattr(self._parent, self._name)])
        if changed:
            self._build()
        return changed

    def _build(self) -> None:
        module: nn.Module = getattr(self._parent, self._name)
        self._module = module
        self._stamp = stamp_of([module])
        self._epsilon = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
        weight = module._parameters.get("weight")
        # A wrapper such as PEFT's forwards the `weight` of an inner module and may change that at any time.
        self._short = weight is not None and weight.dtype == torch.float32 and _has_nothing_else(module)
        if weight is not None and self._short:
            self._weight = weight.detach() + self._offset if self._offset else weight.detach()
            width = weight.numel()
            self._floor = weight.new_tensor((width * self._epsilon) ** 0.5)
            self._scaled = self._weight * width**0.5
            probe = torch.linspace(-2, 3, weight.numel(), device=weight.device)[None]
            expected = self._module(probe)
            self._short = bool((self(probe) - expected).abs().max() <= NORM_TOLERANCE * expected.abs().max())
        self.rms = RmsNorm(self._weight.contiguous(), self._epsilon) if self._short else None


def _has_nothing_else(norm: nn.Module) -> bool:
    """Whether a norm's result depends on its weight alone: it has no hook, submodule or other tensor."""
    return not (hooked(norm) or norm._modules or norm._buffers) and set(norm._parameters) == {"weight"}


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one decoder layer; every `x` is [n, hidden]."""

    kind: int
    """Index among the decoder's layer kinds."""
    scale: float
    """Factor of scores before the softmax."""
    residual: float
    """Factor of a block's output before it is added to the residual stream."""
    attention_norm: Norm | None
    mixer: Mixer | None
    """The mixer that stands for attention, between `qkv` and `output`; None for attention."""
    qkv: Linear | LightLinear
    """Attention's input projections, or the mixer's."""
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Tensor | None
    """Scores [heads] of attention that no value has (`attention.attend`); None without."""
    output: Linear | LightLinear
    attention_after: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_after: Norm | None
    device: torch.device
    """The device that the layer runs on."""

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        family: Family,
        kind: int,
        residual: float,
        memory: PackedMemory,
        by_row: bool = False,
        mixer: type[Mixer] | None = None,
    ) -> Layer:
        """The parts of a transformers decoder layer; `by_row` is that of `Experts`, `mixer` the kind's."""
        attention: Any = getattr(layer, "self_attn" if mixer is None else mixer.module)
        normed = family.qk_norm if mixer is None else None
        mlp: Any = getattr(layer, family.mlp)
        shared = layer.get_submodule(family.shared) if family.shared else None

        def norm(parent: nn.Module, name: str | None) -> Norm | None:
            return Norm(parent, name, family.norm_offset) if name else None

        def gated(block: Any) -> Mlp:
            activation = nn.SiLU() if family.activation is None else getattr(block, family.activation)
            return Mlp(
                gate_up=Linear(block, family.gate_up, memory),
                activation=activation if family.gated_mlp else None,
                gated=None if family.gated_mlp else activation,
                down=Linear(block, (family.down,), memory),
            )

        return cls(
            kind=kind,
            scale=float(attention.scaling) if mixer is None else 1.0,
            residual=residual,
            attention_norm=norm(layer, family.attention_norm),
            mixer=None if mixer is None else mixer(attention, by_row),
            qkv=Linear(attention, family.qkv if mixer is None else mixer.projections, memory),
            q_norm=norm(attention, family.qk_norms[0] if normed else None),
            k_norm=norm(attention, family.qk_norms[1] if normed else None),
            sinks=attention.sinks.detach() if family.sinks else None,
            output=Linear(attention, (family.output if mixer is None else mixer.output,), memory),
            attention_after=norm(layer, family.attention_after),
            mlp_norm=norm(layer, family.mlp_norm),
            mlp=Experts(
                mlp, family.router, memory, by_row, None if shared is None else gated(shared), family.shared_gate
            )
            if family.router is not None and hasattr(mlp, family.router)
            else gated(mlp),
            mlp_after=norm(layer, family.mlp_after),
            device=device_of(layer),
        )

    def qkv_of(self, x: Tensor) -> Tensor:
        """Queries, keys and values [n, all their heads] of the normed `x`."""
        return self.qkv(x, norm=self.attention_norm)

    def add_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """`x` with the attention block's output for the mixed values [n, heads * head_dim] added."""
        return self._join(x, self.output, mixed, self.attention_after)

    def add_mlp(self, x: Tensor) -> Tensor:
        """`x` with the MLP block's output added."""
        native = self.native_mlp
        if native is not None:
            whole, down = native
            return whole.fused_mlp(down, x, None if self.mlp_norm is None else self.mlp_norm.rms)
        if isinstance(self.mlp, Experts):
            return self._add(x, self.mlp(x if self.mlp_norm is None else self.mlp_norm(x)), self.mlp_after)
        return self._join(x, self.mlp.down, self.mlp.inner(x, self.mlp_norm), self.mlp_after)

    @property
    def native_mlp(self) -> tuple[Native, Native] | None:
        """The kernels of the MLP block, of gate and up and of down, if it is one call of our own code.

        It is x + W_down (SiLU(W_gate norm(x)) × W_up norm(x)), with an RMS norm or none.
        """
        plain = self.residual == 1.0 and self.mlp_after is None
        return self.mlp.native if plain and (self.mlp_norm is None or self.mlp_norm.rms is not None) else None

    def linears(self) -> tuple[Linear, ...]:
        """All projections but light copies: the two of attention first."""
        attention = tuple(each for each in (self.qkv, self.output) if isinstance(each, Linear))
        return attention + self.mlp.linears()

    def light(self, bits: int) -> Layer:
        """Return this layer on the light copies of its projections (`Linear.light`), as far as it has these."""
        return replace(self, qkv=self.qkv.light(bits), output=self.output.light(bits), mlp=self.mlp.light(bits))

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        norms = (self.attention_norm, self.q_norm, self.k_norm, self.attention_after, self.mlp_norm, self.mlp_after)
        parts: list[Linear | Norm | Mlp | Experts | Mixer] = [norm for norm in norms if norm is not None]
        parts += [*self.linears()[:2], self.mlp, *([] if self.mixer is None else [self.mixer])]
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
