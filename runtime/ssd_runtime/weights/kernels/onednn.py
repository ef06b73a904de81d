"""oneDNN's product with a dense fp32 or bf16 weight in oneDNN's own layout."""

from __future__ import annotations

import torch
from torch import Tensor


class OneDNN:
    """A copy of a dense weight [out, in], in blocks that fit the processor's vector registers."""

    name = "oneDNN"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self.out_features = weight.shape[0]
        self.rounding = weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._packed.numel() * self._packed.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """The product [n, out] of rows `x` [n, in]."""
        return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")


def can_serve(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by the weight on this machine; bf16 needs instructions of its own."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
