"""The modules that stand in a transformers model for projections and embeddings of a quantised file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import Kernel


class PackedLinear(nn.Module):
    """A projection whose weight stays quantised; columns `begin` to `end` of what `kernel` computes.

    Projections that share an input share one kernel, so that the engine computes all of them in one call.
    """

    def __init__(self, kernel: Kernel, begin: int = 0, end: int | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.begin = begin
        self.end = kernel.out_features if end is None else end

    def forward(self, x: Tensor) -> Tensor:
        """The projection [..., out] of `x` [..., in]."""
        y = self.kernel(x.reshape(-1, x.shape[-1]))
        return y[:, self.begin : self.end].reshape(*x.shape[:-1], self.end - self.begin)

    def extra_repr(self) -> str:
        """The kernel and the columns."""
        return f"{self.kernel.name}, {self.begin}:{self.end}"


class PackedEmbedding(nn.Module):
    """An embedding whose rows stay in the file as they are and are dequantised when they are read.

    `stored` [vocabulary, bytes] is the file's tensor; `dequantise` returns the numbers of some of its rows in fp32.
    `embed_scale` is the factor that the replaced module applies; None if it applies none.
    """

    def __init__(
        self,
        stored: NDArray[np.uint8],
        dequantise: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
        embed_scale: float | None,
    ) -> None:
        super().__init__()
        self._stored = stored
        self._dequantise = dequantise
        self.embed_scale = embed_scale
        self.num_embeddings = len(stored)

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of token ids [...]."""
        rows = torch.from_numpy(self._dequantise(self._stored[ids.reshape(-1).numpy()]))
        if self.embed_scale is not None:
            rows = rows * self.embed_scale
        return rows.view(*ids.shape, -1)


def whole_kernels(modules: Sequence[nn.Module]) -> list[Kernel] | None:
    """The kernels that compute the modules' outputs side by side; None if a module is of another kind or hooked."""
    kernels = list[Kernel]()
    at = 0
    for module in modules:
        if type(module) is not PackedLinear or hooked(module):
            return None
        if not at:
            kernels.append(module.kernel)
        if module.kernel is not kernels[-1] or module.begin != at:
            return None
        at = 0 if module.end == module.kernel.out_features else module.end
    return kernels if not at else None
