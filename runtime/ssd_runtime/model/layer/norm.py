"""RMS norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ssd_runtime.devices.placement import device_of
from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import RmsNorm
from ssd_runtime.weights.linear import stamp_of

NORM_TOLERANCE = 1e-5


class Norm:
    """An RMS norm module, called in a short form on its weight, or as a module if its rounding would differ.

    `offset` is added to the stored weight; a norm of rows of a known `width` may have none. The short form serves fp32
    only, since families differ in where they round, and only if it agrees with the module.
    """

    rms: RmsNorm | None
    """The norm as numbers, for kernels that norm their rows; None if only the module has its result."""

    def __init__(self, parent: nn.Module, name: str, offset: float = 0.0, width: int | None = None) -> None:
        self._parent = parent
        self._width = width
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
        if weight is None and self._width is not None and not module._parameters:
            weight = nn.Parameter(torch.ones(self._width, device=device_of(self._parent)), requires_grad=False)
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
    return not (hooked(norm) or norm._modules or norm._buffers) and set(norm._parameters) <= {"weight"}
