"""How long each kind of sub-layer takes on one device, against context length and number of query tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssd_profiles.mask import SkipMask

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """What a latency depends on besides the model: measured again when any of it differs."""

    device: str
    """The processor or card, as the system names it, with what tells it from others of that name."""
    threads: int
    torch: str
    dtype: str
    kernels: str
    """Which matmul kernels served the projections, e.g. `packed` or `module`."""
    engine: int
    """Which stage of this runtime's own work a step was measured on."""

    def slug(self) -> str:
        """A file name: readable device, then a hash of everything."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        readable = "".join(c if c.isalnum() else "-" for c in self.device.lower()).strip("-")
        while "--" in readable:
            readable = readable.replace("--", "-")
        return f"{readable[:40] or 'device'}-{digest}"


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Median seconds of one attention block, one MLP block, the head and the rest of a step.

    Shapes: `attention` [contexts, queries] for each layer kind; `mlp`, `head`, `overhead` [queries]. `head`
    includes the final norm and the choice of the most probable token; `overhead` is what a whole step takes
    beyond the sum of its parts. Between grid points latencies are linear; beyond the grid they go on as
    between the last two points. `spread` holds (p75 - p25) ÷ median of each figure, shaped alike.
    """

    device: DeviceKey
    layer_kinds: tuple[str, ...]
    queries: Array
    contexts: Array
    attention: dict[str, Array]
    mlp: Array
    head: Array
    overhead: Array
    spread: dict[str, Array]

    def attention_seconds(self, context: float, queries: float, kind: str) -> float:
        """One attention block: `queries` new tokens over `context` cached ones."""
        grid = self.attention[kind]
        by_context = [_interpolate(queries, self.queries, row) for row in grid]
        return _interpolate(context, self.contexts, np.asarray(by_context))

    def mlp_seconds(self, queries: float) -> float:
        """One MLP block over `queries` tokens."""
        return _interpolate(queries, self.queries, self.mlp)

    def sublayer_seconds(self, context: float, queries: float) -> list[float]:
        """Each of the 2L sub-layers."""
        attention = {kind: self.attention_seconds(context, queries, kind) for kind in self.attention}
        mlp = self.mlp_seconds(queries)
        return [seconds for kind in self.layer_kinds for seconds in (attention[kind], mlp)]

    def head_seconds(self, queries: float) -> float:
        """Final norm, LM head and arg max of `queries` tokens."""
        return _interpolate(queries, self.queries, self.head)

    def overhead_seconds(self, queries: float) -> float:
        """What a step of `queries` tokens takes beside its sub-layers and the head, however deep it goes."""
        return _interpolate(queries, self.queries, self.overhead)

    def step_seconds(self, context: float, queries: float = 1, mask: SkipMask | None = None) -> float:
        """A whole forward of `queries` tokens over `context` cached ones, without the sub-layers of `mask`.

        One query without a mask is a plain step, one with a mask a draft step, several without one a
        verification.
        """
        kept_mlp, kept_attention = len(self.layer_kinds), dict.fromkeys(self.attention, 0)
        for layer, kind in enumerate(self.layer_kinds):
            if mask is None or not mask.bits[2 * layer]:
                kept_attention[kind] += 1
            if mask is not None and mask.bits[2 * layer + 1]:
                kept_mlp -= 1
        attention = sum(
            count * self.attention_seconds(context, queries, kind) for kind, count in kept_attention.items() if count
        )
        fixed = self.head_seconds(queries) + self.overhead_seconds(queries)
        return attention + kept_mlp * self.mlp_seconds(queries) + fixed

    def draft_cost(self, mask: SkipMask, context: float) -> float:
        """c of E(Spd): a draft step ÷ a plain step at `context` cached tokens."""
        return self.step_seconds(context, 1, mask) / self.step_seconds(context, 1)

    def to_json(self) -> str:
        """The table as JSON, seconds to six significant digits."""
        return json.dumps(
            {
                "device": asdict(self.device),
                "layer_kinds": list(self.layer_kinds),
                "queries": [int(n) for n in self.queries],
                "contexts": [int(n) for n in self.contexts],
                "attention": {kind: _rounded(values) for kind, values in self.attention.items()},
                "mlp": _rounded(self.mlp),
                "head": _rounded(self.head),
                "overhead": _rounded(self.overhead),
                "spread": {name: _rounded(values, 3) for name, values in self.spread.items()},
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> LatencyTable:
        """Inverse of `to_json`. Raises ValueError when the text is not a latency table."""
        try:
            data = json.loads(text)
            table = cls(
                device=DeviceKey(**data["device"]),
                layer_kinds=tuple(data["layer_kinds"]),
                queries=np.asarray(data["queries"], float),
                contexts=np.asarray(data["contexts"], float),
                attention={kind: np.asarray(values, float) for kind, values in data["attention"].items()},
                mlp=np.asarray(data["mlp"], float),
                head=np.asarray(data["head"], float),
                overhead=np.asarray(data["overhead"], float),
                spread={name: np.asarray(values, float) for name, values in data["spread"].items()},
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a latency table: {error!r}") from error
        table.check()
        return table

    def check(self) -> None:
        """Raise ValueError unless shapes agree and every latency is a finite number ≥ 0."""
        points = self.queries.shape
        if len(points) != 1 or not points[0] or np.any(np.diff(self.queries) <= 0) or self.queries[0] != 1:
            raise ValueError("queries must ascend from 1")
        if not self.contexts.size or self.contexts.ndim != 1 or np.any(np.diff(self.contexts) <= 0):
            raise ValueError("contexts must ascend")
        if not self.layer_kinds or set(self.layer_kinds) != set(self.attention):
            raise ValueError(f"layer kinds {sorted(set(self.layer_kinds))} but attention of {sorted(self.attention)}")
        for kind, values in self.attention.items():
            if values.shape != (self.contexts.size, *points):
                raise ValueError(f"attention {kind}: expected {(self.contexts.size, *points)}, got {values.shape}")
        for name in ("mlp", "head", "overhead"):
            if getattr(self, name).shape != points:
                raise ValueError(f"{name}: expected {points}, got {getattr(self, name).shape}")
        if not all(np.all(np.isfinite(v)) for v in (*self.attention.values(), self.overhead)):
            raise ValueError("latencies must be finite")
        for values in (*self.attention.values(), self.mlp, self.head):
            if not np.all(np.isfinite(values)) or np.any(values < 0):
                raise ValueError("latencies must be finite and not negative")


def _interpolate(x: float, grid: Array, values: Array) -> float:
    """Linear between grid points, held before the first, and on along the last slope after the last."""
    if x > grid[-1] and grid.size > 1:
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return float(values[-1] + slope * (x - grid[-1]))
    return float(np.interp(x, grid, values))


def _rounded(values: Array, digits: int = 6) -> Any:
    if values.ndim > 1:
        return [_rounded(row, digits) for row in values]
    return [float(f"{value:.{digits}g}") for value in values]
