"""The latency table of one device: seconds of each kind of sub-layer, and of steps that sequences share."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sized
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from ssd_profiles.arrays import Array, interpolate, listed, read_as, rounded
from ssd_profiles.errors import first_problem
from ssd_profiles.light_costs import LightCosts
from ssd_profiles.mask import FULL, SubLayerPlan
from ssd_profiles.printable import Printable

LEAST_SHARE = 0.01
"""A step takes at least this share of the sum of its parts, however negative the measured overhead is."""
MAX_POINTS = 64
"""Contexts, and numbers of query tokens, that a table may have."""
MAX_KINDS = 32
"""Kinds of mixers that a table may have. A mask is priced kind by kind."""
_Name = Annotated[str, Field(max_length=64)]
_Counts = Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(max_length=MAX_POINTS)]
_Contexts = Annotated[list[Annotated[int, Field(ge=0, le=1 << 30)]], Field(min_length=1, max_length=MAX_POINTS)]
# No block runs in no time, and none for hours: such numbers were not measured.
_Seconds = list[Annotated[float, Field(ge=1e-9, le=1e4)]]
_Overheads = list[Annotated[float, Field(ge=-1e4, le=1e4)]]
_Growths = Annotated[list[Annotated[float, Field(ge=1.0, le=1e4)]], Field(max_length=MAX_POINTS)]
_Joints = Annotated[list[Annotated[float, Field(ge=0.0, le=1e4)]], Field(max_length=MAX_POINTS)]
_Spreads = list[Annotated[float, Field(ge=0.0, le=1e9)]]


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """All that a latency depends on besides the model; it is measured again when any of this differs."""

    device: Printable
    """The processor or card, as the system names it, with what tells it from others of that name."""
    threads: int
    torch: Printable
    dtype: Printable
    kernels: Printable
    """Names of the matmul kernels of the projections, such as `packed` or `module`."""
    engine: int
    """Version of the decoder's speed (`profiling.latency.ENGINE`); tables of other versions are measured again."""

    def slug(self) -> str:
        """A file name: readable device, then a hash of everything."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        readable = re.sub(r"[\W_]+", "-", self.device.lower()).strip("-")
        return f"{readable[:40] or 'device'}-{digest}"


def base_of(contexts: Sized) -> int:
    """Index of the context at which whole steps are measured: the second, or the only one."""
    return min(1, len(contexts) - 1)


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Median seconds of one mixer (attention in most models), one MLP, the head and the rest of a step.

    Shapes: `attention` [contexts, queries] for each layer kind, also those that mix tokens otherwise (`conv`, `delta`,
    `mamba`); `mlp`, `head`, `overhead` [queries]. `head` includes the final norm and the choice of the most probable
    token; `overhead` is what a whole step takes beyond the sum of its parts. Latencies are linearly interpolated.
    Beyond the grid they are extrapolated with the last slope, or held if that slope is negative. `spread` holds the
    noise of each figure as a share of it, shaped alike: (p75 - p25) ÷ median of its samples, or more where more rows
    seemed to take less. A figure of fewer than three samples has none. `latency_law.broken_law` tells tables of a quiet
    machine from those of a busy one.

    Forwards of more rows than `queries` has, and those of several sequences, were measured as whole steps at a short
    context. Tables of earlier versions have neither: their steps go on linearly, and sequences add nothing.
    """

    device: DeviceKey
    layer_kinds: Annotated[tuple[_Name, ...], Field(min_length=1)]
    queries: Annotated[Array, listed(Annotated[_Counts, Field(min_length=1)])]
    contexts: Annotated[Array, listed(_Contexts)]
    attention: Annotated[dict[_Name, Annotated[Array, listed(list[_Seconds])]], Field(max_length=MAX_KINDS)]
    mlp: Annotated[Array, listed(_Seconds)]
    head: Annotated[Array, listed(_Seconds)]
    overhead: Annotated[Array, listed(_Overheads)]
    spread: dict[_Name, Annotated[Array, listed(_Spreads | list[_Spreads])]]
    wide_queries: Annotated[Array, listed(_Counts)] = field(default_factory=lambda: np.empty(0))
    """Numbers of rows beyond those of `queries`, ascending."""
    growth: Annotated[Array, listed(_Growths)] = field(default_factory=lambda: np.empty(0))
    """Seconds of a step of each of `wide_queries` rows ÷ those of the last of `queries`; never falls."""
    sequences: Annotated[Array, listed(_Counts)] = field(default_factory=lambda: np.empty(0))
    """Numbers of sequences, ascending from 2 or more."""
    joint: Annotated[Array, listed(_Joints)] = field(default_factory=lambda: np.empty(0))
    """Seconds that a step of each of `sequences` takes beyond one of as many rows of one sequence; never falls."""
    light: dict[Annotated[int, read_as(Literal["8", "4"], int)], LightCosts] = field(default_factory=dict)
    """Costs on light copies of the weights, by their bits. Precisions without an entry run in full."""
    draft_head: Annotated[float, Field(ge=1e-4, le=2.0)] = 1.0
    """Seconds of the head of a draft's row, which scores a part of the vocabulary, ÷ those of the whole head.
    Light heads score all."""

    @property
    def base(self) -> int:
        """Index of the context at which whole steps were measured."""
        return base_of(self.contexts)

    @property
    def parts(self) -> Array:
        """Seconds of all parts of a step at the base context: [queries]."""
        blocks = np.sum([self.attention[kind][self.base] for kind in self.layer_kinds], axis=0)
        total: Array = blocks + len(self.layer_kinds) * self.mlp + self.head
        return total

    @property
    def most_queries(self) -> int:
        """The largest number of rows that was measured."""
        return int((self.wide_queries if self.wide_queries.size else self.queries)[-1])

    def mixer_seconds(self, context: float, queries: float, kind: str, bits: int = FULL) -> float:
        """One mixer: `queries` new tokens over `context` cached ones, on weights of these bits.

        Light weights save the same seconds at every context, since attention reads the same keys.
        """
        full = self._attention(context, queries, kind)
        costs = self.light.get(bits)
        if costs is None:
            return full
        measured = self._attention(costs.context, queries, kind)
        return max(LEAST_SHARE * full, full - measured * (1.0 - costs.share(kind, queries)))

    def mlp_seconds(self, queries: float, bits: int = FULL) -> float:
        """One MLP over `queries` tokens, on weights of these bits."""
        return interpolate(queries, self.queries, self.mlp) * self._share(bits, "mlp", queries)

    def sublayer_seconds(self, context: float, queries: float, bits: int = FULL) -> list[float]:
        """Each of the 2L sub-layers, on weights of these bits."""
        attention = {kind: self.mixer_seconds(context, queries, kind, bits) for kind in self.attention}
        mlp = self.mlp_seconds(queries, bits)
        return [seconds for kind in self.layer_kinds for seconds in (attention[kind], mlp)]

    def head_seconds(self, queries: float, bits: int = FULL) -> float:
        """Final norm, LM head and arg max of `queries` tokens, on weights of these bits."""
        return interpolate(queries, self.queries, self.head) * self._share(bits, "head", queries)

    def draft_head_seconds(self, queries: float, bits: int = FULL) -> float:
        """Final norm, head and arg max of `queries` rows of drafts, on weights of these bits."""
        return self.head_seconds(queries, bits) * (self.draft_head if bits == FULL else 1.0)

    def overhead_seconds(self, queries: float, bits: int = FULL) -> float:
        """Seconds of a step of `queries` tokens beside its sub-layers and the head, however deep it goes.

        `bits` is that of all its weights.
        """
        full = interpolate(queries, self.queries, self.overhead)
        costs = self.light.get(bits)
        if costs is None:
            return full
        whole = full + sum(self.sublayer_seconds(costs.context, queries)) + self.head_seconds(queries)
        parts = sum(self.sublayer_seconds(costs.context, queries, bits)) + self.head_seconds(queries, bits)
        return whole * costs.share("step", queries) - parts

    def _attention(self, context: float, queries: float, kind: str) -> float:
        """One mixer on the model's own weights."""
        by_context = [interpolate(queries, self.queries, row) for row in self.attention[kind]]
        return interpolate(context, self.contexts, np.asarray(by_context))

    def _share(self, bits: int, part: str, queries: float) -> float:
        """Time of the MLP block or the head on weights of these bits ÷ on the model's own."""
        costs = self.light.get(bits)
        return 1.0 if costs is None else costs.share(part, queries)

    def step_seconds(
        self, context: float, queries: float = 1, mask: SubLayerPlan | None = None, sequences: float = 1
    ) -> float:
        """A whole forward of `queries` tokens over `context` cached ones, without the sub-layers of `mask`.

        One query without a mask is a plain step, one with a mask a draft step, several without one a
        verification. The queries are those of all `sequences` together, each with so many cached tokens of its own.
        """
        kept_mlp, kept_attention = Counter[int](), Counter[tuple[str, int]]()
        for layer, kind in enumerate(self.layer_kinds):
            if mask is None or not mask.skipped[2 * layer]:
                kept_attention[kind, FULL if mask is None else mask.bits_of(2 * layer)] += 1
            if mask is None or not mask.skipped[2 * layer + 1]:
                kept_mlp[FULL if mask is None else mask.bits_of(2 * layer + 1)] += 1
        rows, growth = queries, 1.0
        if self.wide_queries.size and queries > self.queries[-1]:
            rows = float(self.queries[-1])
            growth = interpolate(queries, np.append(rows, self.wide_queries), np.append(1.0, self.growth))

        def mixers(context: float, rows: float) -> float:
            return sum(count * self.mixer_seconds(context, rows, *each) for each, count in kept_attention.items())

        few = float(self.contexts[0]) if sequences > 1 else context
        attention = mixers(few, rows)
        mlp = sum(count * self.mlp_seconds(rows, bits) for bits, count in kept_mlp.items())
        head = self.head_seconds(rows) if mask is None else self.draft_head_seconds(rows, mask.head_bits)
        parts = attention + mlp + head
        overhead = self._overhead(rows, mask)
        if overhead < 0.0 and mask is not None:
            # Sub-layers that take less in a step than alone do so one by one, so what is skipped gives nothing back.
            skipped = self.sublayer_seconds(few, rows)
            overhead *= parts / (parts + sum(each for each, skip in zip(skipped, mask.skipped, strict=True) if skip))
        step = growth * max(parts + overhead, LEAST_SHARE * parts)
        if sequences <= 1:
            return step
        # Sequences differ in attention alone: each one's rows attend to its own tokens, measured with few.
        keys = sequences * (mixers(context, queries / sequences) - mixers(few, queries / sequences))
        return step + keys + kept_attention.total() / len(self.layer_kinds) * self.joint_seconds(sequences)

    def _overhead(self, queries: float, mask: SubLayerPlan | None) -> float:
        """Overhead of a step with a mask: the average of those of its sub-layers' bits."""
        if mask is None or not mask.light:
            return self.overhead_seconds(queries)
        kept = Counter(mask.bits_of(i) for i, skipped in enumerate(mask.skipped) if not skipped) or Counter([FULL])
        return sum(count * self.overhead_seconds(queries, bits) for bits, count in kept.items()) / kept.total()

    def joint_seconds(self, sequences: float) -> float:
        """Seconds that a step of `sequences` sequences takes beyond one of as many rows of one sequence."""
        if sequences <= 1 or not self.sequences.size:
            return 0.0
        return interpolate(sequences, np.append(1.0, self.sequences), np.append(0.0, self.joint))

    def draft_cost(self, mask: SubLayerPlan, context: float) -> float:
        """c of E(Spd): a draft step ÷ a plain step at `context` cached tokens."""
        return self.step_seconds(context, 1, mask) / self.step_seconds(context, 1)

    def to_json(self) -> str:
        """The table as JSON, seconds to six significant digits."""
        light = {str(bits): costs.to_data() for bits, costs in self.light.items()}
        return json.dumps(
            {
                "device": asdict(self.device),
                "layer_kinds": list(self.layer_kinds),
                "queries": [int(n) for n in self.queries],
                "contexts": [int(n) for n in self.contexts],
                "attention": {kind: rounded(values, 6) for kind, values in self.attention.items()},
                "mlp": rounded(self.mlp, 6),
                "head": rounded(self.head, 6),
                "overhead": rounded(self.overhead, 6),
                "spread": {name: rounded(values, 3) for name, values in self.spread.items()},
                "wide_queries": [int(n) for n in self.wide_queries],
                "growth": rounded(self.growth, 6),
                "sequences": [int(n) for n in self.sequences],
                "joint": rounded(self.joint, 6),
                # Tables without these have the bytes that they had before there were any.
                **({"light": light} if light else {}),
                **({"draft_head": float(f"{self.draft_head:.6g}")} if self.draft_head != 1.0 else {}),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> LatencyTable:
        """Inverse of `to_json`. Raises ValueError of one line when the text is not a latency table."""
        try:
            table = _TABLE.validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(f"not a latency table: {first_problem(error)}") from None
        table.check()
        return table

    def check(self) -> None:
        """Raise ValueError unless all grids ascend, the shapes agree, and more rows or sequences never take less."""
        if self.queries[0] != 1 or np.any(np.diff(self.queries) <= 0):
            raise ValueError("queries: expected ascending numbers from 1")
        if np.any(np.diff(self.contexts) <= 0):
            raise ValueError("contexts: expected ascending numbers")
        if set(self.layer_kinds) != set(self.attention):
            raise ValueError("attention: expected one entry for each of layer_kinds")
        if np.any(np.diff(self.wide_queries, prepend=self.queries[-1]) <= 0):
            raise ValueError(f"wide_queries: expected ascending numbers above {self.queries[-1]:.0f}")
        if np.any(np.diff(self.sequences, prepend=1) <= 0):
            raise ValueError("sequences: expected ascending numbers from 2")
        for name, values, least in (("growth", self.growth, 1.0), ("joint", self.joint, 0.0)):
            if np.any(np.diff(values, prepend=least) < 0):
                raise ValueError(f"{name}: expected numbers from {least:.0f} that never fall")
        points, grid = self.queries.shape, (*self.contexts.shape, *self.queries.shape)
        figures = [(kind, values, grid) for kind, values in self.attention.items()]
        figures += [("mlp", self.mlp, points), ("head", self.head, points), ("overhead", self.overhead, points)]
        figures += [("growth", self.growth, self.wide_queries.shape), ("joint", self.joint, self.sequences.shape)]
        figures += [(name, values, grid if name in self.attention else points) for name, values in self.spread.items()]
        for name, values, shape in figures:
            if values.shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {values.shape}")
        for bits, costs in self.light.items():
            if set(costs.attention) != set(self.attention):
                raise ValueError(f"light.{bits}.attention: expected one entry for each of layer_kinds")
            costs.check(f"light.{bits}")


_TABLE = TypeAdapter(LatencyTable)
