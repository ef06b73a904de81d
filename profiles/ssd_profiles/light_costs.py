"""Costs of blocks on light copies of their weights, relative to the same blocks on the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

Array = NDArray[np.float64]
MAX_ROWS = 64
"""Most numbers of rows that costs may have."""


@dataclass(frozen=True, slots=True)
class LightCosts:
    """Costs on copies of the same bits: shares of the time of the full block, measured in turn with it.

    Shapes: `attention` [queries] for each layer kind, `mlp`, `head` and `step`, a whole step with everything light,
    [queries]. Between numbers of rows shares are linear, outside of them constant.
    """

    context: int
    """Cached tokens at which attention and steps were measured."""
    queries: Array
    attention: dict[str, Array]
    mlp: Array
    head: Array
    step: Array

    def attention_share(self, kind: str, queries: float) -> float:
        """Time of a mixer at `context` ÷ that of the full one."""
        return float(np.interp(queries, self.queries, self.attention[kind]))

    def share(self, part: str, queries: float) -> float:
        """Time of the `mlp` block or the `head` ÷ that of the full one."""
        return float(np.interp(queries, self.queries, self.mlp if part == "mlp" else self.head))

    def step_share(self, queries: float) -> float:
        """Time of a whole step with everything light ÷ that of a full one."""
        return float(np.interp(queries, self.queries, self.step))

    def check(self, where: str) -> None:
        """Raise ValueError unless rows ascend and shapes agree; `where` names the costs in its message."""
        if self.queries[0] != 1 or np.any(np.diff(self.queries) <= 0):
            raise ValueError(f"{where}.queries: expected ascending numbers from 1")
        named = {"mlp": self.mlp, "head": self.head, "step": self.step, **self.attention}
        for name, values in named.items():
            if values.shape != self.queries.shape:
                raise ValueError(f"{where}.{name}: expected shape {self.queries.shape}, got {values.shape}")

    def as_file(self) -> LightCostsFile:
        """The costs as they are written, to four significant digits."""
        return LightCostsFile(
            context=self.context,
            queries=[int(n) for n in self.queries],
            attention={kind: _rounded(values) for kind, values in self.attention.items()},
            mlp=_rounded(self.mlp),
            head=_rounded(self.head),
            step=_rounded(self.step),
        )

    @classmethod
    def of_file(cls, data: LightCostsFile) -> LightCosts:
        """Inverse of `as_file`."""
        return cls(
            context=data.context,
            queries=np.asarray(data.queries, float),
            attention={kind: np.asarray(values, float) for kind, values in data.attention.items()},
            mlp=np.asarray(data.mlp, float),
            head=np.asarray(data.head, float),
            step=np.asarray(data.step, float),
        )


_Share = Annotated[float, Field(ge=1e-3, le=1e3)]
_Shares = Annotated[list[_Share], Field(max_length=MAX_ROWS)]


class LightCostsFile(BaseModel):
    """Schema of `LightCosts` in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(ge=0, le=1 << 30)
    queries: list[Annotated[int, Field(ge=1, le=4096)]] = Field(min_length=1, max_length=MAX_ROWS)
    attention: dict[Annotated[str, Field(max_length=64)], _Shares]
    mlp: _Shares
    head: _Shares
    step: _Shares


def interpolate(x: float, grid: Array, values: Array) -> float:
    """Interpolate linearly; before the grid hold the first value, after it extrapolate the last slope if that rises."""
    if x > grid[-1] and grid.size > 1:
        # A slope that falls is noise, and would lead below zero.
        slope = max(0.0, (values[-1] - values[-2]) / (grid[-1] - grid[-2]))
        return float(values[-1] + slope * (x - grid[-1]))
    return float(np.interp(x, grid, values))


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
