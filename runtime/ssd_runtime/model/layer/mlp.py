"""The gated MLP: a dense model's MLP block, or one expert of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN, SiLUActivation

from ssd_runtime.model.family.factors import Factors
from ssd_runtime.model.family.family import Family
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import RowNorm
from ssd_runtime.weights.kernels.native_mlp import Activation, Function, NativeMlp
from ssd_runtime.weights.light import LightLinear
from ssd_runtime.weights.linear import Linear, PackedMemory, stamp_of

SILU = (nn.SiLU, SiLUActivation)
GELU = type(ACT2FN["gelu_pytorch_tanh"])


class LayerActivation:
    """An activation of the user's: a module, which may have weights, or a function."""

    def __init__(self, owner: Any, name: str | None) -> None:
        """That of this `name` in the module `owner`; SiLU without a name."""
        self._owner, self._name = owner, name
        self.function: Callable[[Tensor], Tensor] = nn.SiLU()
        self._stamp: list[Any] = []
        self.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        """The activation of `x`, of the same shape."""
        return self.function(x)

    @property
    def native(self) -> Activation | None:
        """The activation as our own code computes it; None for others."""
        if not self.hooked and (self.function is silu or isinstance(self.function, SILU)):
            return Activation(Function.SILU)
        return Activation(Function.GELU) if not self.hooked and type(self.function) is GELU else None

    @property
    def uncalled(self) -> tuple[nn.Module, ...]:
        """The activation, if it is a module (`Layer.uncalled`)."""
        return (self.function,) if isinstance(self.function, nn.Module) else ()

    @property
    def hooked(self) -> bool:
        """Whether a call runs more than the activation itself."""
        return any(map(hooked, self.uncalled))

    def refresh(self) -> bool:
        """Follow changes of the user's activation; returns whether there were any."""
        before = self._stamp
        if self._name is not None:
            self.function = getattr(self._owner, self._name)
        self._stamp = stamp_of([self.function]) if isinstance(self.function, nn.Module) else [self.function]
        return self._stamp != before


@dataclass(frozen=True, slots=True)
class Mlp:
    """W_down (activation(W_gate x) × W_up x), or W_down gated(W x) where `gated` joins gate and up, or has no gate."""

    gate_up: Linear | LightLinear
    activation: LayerActivation | None
    down: Linear | LightLinear
    gated: Callable[[Tensor], Tensor] | None = None
    """Takes the output [n, 2 inner] of `gate_up`, or [n, inner], and returns the input [n, inner] of `down`."""

    @classmethod
    def of(cls, block: Any, family: Family, memory: PackedMemory, factors: Factors | None) -> Mlp:
        """The MLP of a module of transformers."""
        activation = LayerActivation(block, family.activation)
        return cls(
            gate_up=Linear(block, family.gate_up, memory, factors=factors and factors.gate_up),
            activation=activation if family.gated_mlp else None,
            down=Linear(block, (family.down,), memory, factors=factors and factors.down),
            gated=None if family.gated_mlp else activation,
        )

    def inner(self, x: Tensor, norm: RowNorm | None = None) -> Tensor:
        """The input [n, inner] of `down` for rows `x` [n, hidden], which are normed first."""
        both = self.gate_up(x, norm=norm)
        if self.activation is None or self.gated is not None:
            assert self.gated is not None
            return self.gated(both)
        gate, up = both.chunk(2, -1)
        return self.activation(gate) * up

    def joined_by(self, activation: Activation | None) -> NativeMlp | None:
        """The MLP with this activation as one call of our own code; None for no activation or no kernels."""
        whole, down = self.gate_up.fused, self.down.fused
        return None if whole is None or down is None or activation is None else NativeMlp(whole, down, activation)

    @property
    def native(self) -> NativeMlp | None:
        """The MLP as one call of our own code; None if that does not serve it."""
        return self.joined_by(None if self.activation is None or self.gated is not None else self.activation.native)

    @property
    def uncalled(self) -> tuple[nn.Module, ...]:
        """Its activation, if that is a module (`Layer.uncalled`)."""
        return () if self.activation is None else self.activation.uncalled

    def linears(self) -> tuple[Linear, ...]:
        """The projections but light copies."""
        return tuple(each for each in (self.gate_up, self.down) if isinstance(each, Linear))

    def light(self, bits: int) -> Mlp:
        """This MLP on the light copies of its projections (`Linear.light`), as far as it has these."""
        return replace(self, gate_up=self.gate_up.light(bits), down=self.down.light(bits))

    def refresh(self) -> bool:
        """Follow changes of the user's modules; returns whether there were any."""
        followed = (*self.linears(), self.activation, self.gated)
        changed = [each.refresh() for each in followed if isinstance(each, Linear | LayerActivation)]
        return any(changed)
