"""One small interface for every projection, whichever kernel serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that a fast kernel may show against the user's modules."""


class Linear:
    """Projections that share an input: `x` [n, in] to their outputs side by side [n, out].

    Served by a oneDNN weight packed once (CPU, fp32), or by calling the user's modules as they are. Packed
    weights are a copy: they serve only an exact `nn.Linear` without hooks, are checked against it when built,
    and are built again when a weight, a hook or a module's type has changed.
    """

    __slots__ = ("_bias", "_modules", "_pack", "_packed", "_stamp")

    def __init__(self, modules: Sequence[nn.Module], pack: bool) -> None:
        self._modules = list(modules)
        self._pack = pack
        self._build()

    @property
    def packed(self) -> bool:
        """Whether the packed copy serves."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """The projections of `x`."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")
        if len(self._modules) == 1:
            return self._modules[0](x)
        return torch.cat([module(x) for module in self._modules], -1)

    def refresh(self) -> None:
        """Build again if the user's modules changed since."""
        if self._stamp != stamp_of(self._modules):
            self._build()

    def _build(self) -> None:
        self._stamp = stamp_of(self._modules)
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        linears = [module for module in self._modules if isinstance(module, nn.Linear) and _packable(module)]
        if not self._pack or len(linears) < len(self._modules):
            return
        weights = [linear.weight.detach() for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if any(linear.bias is not None for linear in linears):
            zeros = weight.new_zeros
            self._bias = torch.cat([zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        if not self._agrees(weight.shape[1]):
            self._packed = None

    def _agrees(self, width: int) -> bool:
        probe = torch.linspace(-1, 1, width)[None]
        expected = torch.cat([module(probe) for module in self._modules], -1)
        return bool((self(probe) - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-6))


def can_pack(model: nn.Module) -> bool:
    """Whether packed weights can serve any of the model's projections."""
    weight = next(model.parameters())
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _packable(module: nn.Linear) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and not hooked(module)
    )


def hooked(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its own `forward`."""
    # accelerate replaces `forward` on the instance instead of registering a hook.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def stamp_of(modules: Sequence[nn.Module]) -> list[Any]:
    """Something that differs once a weight, a hook or a type of the modules has changed."""
    return [
        # Inference tensors keep no version; they are not written in place either.
        (type(module), hooked(module), parameter.data_ptr(), parameter.is_inference() or parameter._version)
        for module in modules
        for parameter in module.parameters()
    ]
