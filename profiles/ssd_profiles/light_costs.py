"""Costs of blocks on light copies of their weights, relative to the same blocks on the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from ssd_profiles.arrays import Array, listed, rounded

MAX_ROWS = 64
"""Most numbers of rows that costs may have."""


_Rows = Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=MAX_ROWS)]
_Shares = Annotated[list[Annotated[float, Field(ge=1e-3, le=1e3)]], Field(max_length=MAX_ROWS)]
Shares = Annotated[Array, listed(_Shares)]


@dataclass(frozen=True, slots=True)
class LightCosts:
    """Costs on copies of the same bits: shares of the time of the full block, measured in turn with it.

    Shapes: `attention` [queries] for each layer kind, `mlp`, `head` and `step`, a whole step with everything light,
    [queries]. Between numbers of rows shares are linear, outside of them constant.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    context: Annotated[int, Field(ge=0, le=1 << 30)]
    """Cached tokens at which attention and steps were measured."""
    queries: Annotated[Array, listed(_Rows)]
    attention: dict[Annotated[str, Field(max_length=64)], Shares]
    mlp: Shares
    head: Shares
    step: Shares

    @property
    def parts(self) -> dict[str, Array]:
        """The shares of every part of a step by name, a mixer's by its kind."""
        return {"mlp": self.mlp, "head": self.head, "step": self.step, **self.attention}

    def share(self, part: str, queries: float) -> float:
        """Time of a part ÷ that of the full one: of a mixer at `context`, `mlp`, `head` or a whole `step`."""
        return float(np.interp(queries, self.queries, self.parts[part]))

    def check(self, where: str) -> None:
        """Raise ValueError unless rows ascend and shapes agree; `where` names the costs in its message."""
        if self.queries[0] != 1 or np.any(np.diff(self.queries) <= 0):
            raise ValueError(f"{where}.queries: expected ascending numbers from 1")
        for name, values in self.parts.items():
            if values.shape != self.queries.shape:
                raise ValueError(f"{where}.{name}: expected shape {self.queries.shape}, got {values.shape}")

    def to_data(self) -> dict[str, Any]:
        """The costs as JSON holds them, to four significant digits."""
        return {
            "context": self.context,
            "queries": [int(n) for n in self.queries],
            "attention": {kind: rounded(values, 4) for kind, values in self.attention.items()},
            **{name: rounded(self.parts[name], 4) for name in ("mlp", "head", "step")},
        }
