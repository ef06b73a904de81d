"""The modules that stand in a transformers model for projections and embeddings of a quantised file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssd_runtime.weights.hooks import hooked
from ssd_runtime.weights.kernels.kernel import Kernel

FEW = 32
"""Most tokens of a forward whose rows are looked up among recent ones: to dequantise one takes numpy a quarter of a
millisecond."""
KEPT = 1 << 23
"""Numbers of the rows that are kept, some megabytes."""


class PackedLinear(nn.Module):
    """A projection whose weight stays quantised; columns `begin` to `end` of what `kernel` computes.

    Projections that share an input share one kernel, so that the engine computes all of them in one call. With
    `columns`, column j of the kernel's weight multiplies number `columns[j]` of a row; who calls the kernel itself
    orders rows so.
    """

    def __init__(self, kernel: Kernel, begin: int = 0, end: int | None = None, columns: Tensor | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.begin = begin
        self.end = kernel.out_features if end is None else end
        self.out_features = self.end - begin
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        """The projection [..., out] of `x` [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        y = self.kernel(rows if self.columns is None else rows[:, self.columns])
        return y[:, self.begin : self.end].reshape(*x.shape[:-1], self.out_features)

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
        self._recent = dict[int, Tensor]()

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings [..., hidden] of token ids [...]."""
        flat = ids.reshape(-1)
        rows = self._few(flat.tolist()) if len(flat) <= FEW else self._rows(flat)
        return rows.view(*ids.shape, -1)

    def _few(self, tokens: Sequence[int]) -> Tensor:
        """The rows of a step's tokens, most of which an earlier step had."""
        rows = {token: row for token in tokens if (row := self._recent.get(token)) is not None}
        if new := [token for token in dict.fromkeys(tokens) if token not in rows]:
            rows.update(zip(new, self._rows(torch.tensor(new)).unbind(), strict=True))
            if len(self._recent) * len(rows[new[0]]) > KEPT:
                self._recent.clear()
            self._recent.update(rows)
        return torch.stack([rows[token] for token in tokens])

    def _rows(self, ids: Tensor) -> Tensor:
        rows = torch.from_numpy(self._dequantise(self._stored[ids.numpy()]))
        return rows if self.embed_scale is None else rows * self.embed_scale


class PackedExperts(nn.Module):
    """The experts of a mixture, each with the projections of a gated MLP (`gate_proj`, `up_proj` and `down_proj`)."""

    def __init__(self, experts: Sequence[Any], replaced: Any) -> None:
        """`experts` stand in for `replaced`, which has an activation `act_fn`, or joins gate and up by turns."""
        super().__init__()
        self.act_fn: Callable[[Tensor], Tensor] | None = getattr(replaced, "act_fn", None)
        self._gated: Callable[[Tensor], Tensor] | None = getattr(replaced, "_apply_gate", None)
        self.clamp = (float(replaced.alpha), float(replaced.limit)) if hasattr(replaced, "limit") else None
        """Alpha and limit of an activation that clamps; None for others."""
        self.each = tuple(experts)
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum [n, hidden] of the outputs of a row's experts `chosen` [n, k], each times its weight [n, k]."""
        total = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            expert = self.each[number]
            inner = self.joined(expert.gate_proj(x[rows]), expert.up_proj(x[rows]))
            total.index_add_(0, rows, expert.down_proj(inner) * weights[rows, place, None])
        return total

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """The input [..., inner] of `down_proj` for the outputs `gate` and `up` [..., inner] of the other two."""
        if self.act_fn is not None:
            return self.act_fn(gate) * up
        assert self._gated is not None
        return self._gated(torch.stack([gate, up], -1).flatten(-2))

    def gated_halves(self, both: Tensor) -> Tensor:
        """The input [..., inner] of `down_proj` for `both` [..., 2 inner], the outputs of gate and up side by side."""
        return self.joined(*both.chunk(2, -1))


def whole_calls(modules: Sequence[nn.Module]) -> list[Callable[[Tensor], Tensor]]:
    """The calls that compute the modules' outputs side by side: a kernel for all that share it, else the modules."""
    calls = list[Callable[[Tensor], Tensor]]()
    for kernel, run in groupby(modules, key=_kernel_of):
        sharing = list[Any](run)
        ends = [0] if kernel is None else [0, *(module.end for module in sharing)]
        whole = kernel is not None and [*(module.begin for module in sharing), kernel.out_features] == ends
        calls += [kernel] if kernel is not None and whole else sharing
    return calls


def _kernel_of(module: nn.Module) -> Kernel | None:
    """The kernel that may be called in a module's place."""
    return module.kernel if type(module) is PackedLinear and not hooked(module) else None
